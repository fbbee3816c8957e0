"""Looking at backward: the gradients that each call is given, and those it sends on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.follow.gradients import (
    LEAF,
    Gradients,
    Path,
    Spot,
    Trace,
    one_node,
    trace_call,
    trace_function,
)
from tensorprobe.follow.naming import ApiName
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.overflow.call_kinds import PASSING, Passing, plan_for
from tensorprobe.overflow.call_site import render
from tensorprobe.overflow.cases import NamedCall, NotedCall
from tensorprobe.overflow.guard_state import MODES_OFF, NEAR, GuardState
from tensorprobe.overflow.judge import (
    CallValues,
    SeenTensor,
    clamped,
    fault,
    look_at,
    near_limit,
    seen_as,
)
from tensorprobe.overflow.pending_calls import NotedInput, NotedOutput
from tensorprobe.overflow.saved_calls import write_backward
from tensorprobe.overflow.watched_call import (
    Remembered,
    RunningCall,
    Tensors,
    edges_of,
    version_of,
)
from tensorprobe.tensors.finiteness import LIMITS, extent_now, readable

_LOSS: Path = ("loss",)
_MOST_LAYERS = 1000
_sequence_number = torch._C._autograd._get_sequence_nr


class BackwardCalls:
    """Follows calls into backward."""

    def __init__(self, state: GuardState) -> None:
        self.state = state
        self._key = object()  # of what is written on the nodes of Functions
        # where the node of a call leads to, by what it calls and which inputs require a gradient
        self._spots: dict[tuple[str, type, tuple[Path, ...]], list[Spot]] = {}
        # of linear layers, which make several nodes: how those hang together
        self.layers: dict[tuple[Any, ...], Layout] = {}

    def look_at_roots(self, roots: Any) -> None:
        """Backward starts from these tensors."""
        if torch._C._current_graph_task_id() != -1:
            return  # inside another one: a checkpoint's
        with Quiet():
            tensors = [root for root in roots if isinstance(root, torch.Tensor)]
            nodes = [(root, root.grad_fn) for root in tensors]
            functions = [(r, node) for r, node in nodes if isinstance(node, BackwardCFunction)]
            self.watch_functions(functions, sys._getframe())
            late: Tensors = []
            seen: list[SeenTensor] = []
            for root in tensors:
                content = readable(root)
                if content is None:
                    continue
                if not self.state.is_immediate(content):
                    late.append((root, _LOSS))
                elif (extent := extent_now(content)).bits:
                    seen.append(seen_as(content, _LOSS, "input", extent))
            if late:
                inputs = self.state.pending.inputs(late)
                self.state.pending.add(None, "forward", [], inputs, note="loss")
            else:  # a backward that is looked at later begins when its loss is
                self.state.cases.begin_backward(seen)

    def watch_functions(
        self, functions: list[tuple[torch.Tensor, Any]], frame: FrameType | None
    ) -> None:
        """Custom autograd.Functions: `apply` is no torch call, but their node is in the graph."""
        for _, node in functions:
            # written on the node itself: numbers of nodes are those of a thread
            if node.metadata.get(self._key) == self.state.step:
                continue
            node.metadata[self._key] = self.state.step
            kind = getattr(type(node), "_forward_cls", type(node))
            api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            number = self.state.program.counter.next(api)
            call = NamedCall(*self.state.noted_at(plan_for(api), number, frame))
            self._listen(trace_function(node), call, None, frozenset())

    def watch_backward(self, watched: RunningCall, outputs: Tensors) -> None:
        edges = edges_of(watched)
        assert edges is not None
        trace = trace_call(outputs, edges)
        if trace.boundary:
            leaves = frozenset(path for _, path in edges.leaves.values())
            call = NamedCall(*self.state.noted(watched))
            self._listen(trace, call, Remembered(watched), leaves)

    def watch_backward_later(self, watched: RunningCall, outputs: Tensors) -> list[Spot] | None:
        """Follow a call into backward whose gradients are all looked at later, at less cost.

        Gives the spots of its inputs if it made one node. They are the same whenever the same is
        called with the same inputs requiring a gradient.
        """
        made = _sequence_number() - watched.start
        if not made:
            return None
        output = outputs[0][0]
        node = output.grad_fn
        if made > 1 or len(outputs) > 1 or node is None or node._sequence_nr() != watched.start:
            self.watch_nodes_later(watched, outputs)
            return None
        key = (watched.plan.stem, type(node), watched.needs)
        spots = self._spots.get(key)
        if spots is None:
            edges = edges_of(watched)
            one = one_node(output, edges) if edges is not None else None
            if one is None:
                self.watch_nodes_later(watched, outputs)
                return None
            spots = self._spots[key] = list(one[1])
        self.listen_later(node, self.state.noted(watched), spots)
        return spots

    def watch_nodes_later(self, watched: RunningCall, outputs: Tensors) -> dict[Any, list[Spot]]:
        edges = edges_of(watched)
        assert edges is not None
        boundary = trace_call(outputs, edges).boundary
        for node, spots in boundary.items():
            self.listen_later(node, self.state.noted(watched), spots)
        return boundary

    def watch_layer_later(
        self, watched: RunningCall, outputs: Tensors, key: tuple[Any, ...]
    ) -> None:
        """Follow a linear layer into backward, and remember how its nodes hang together.

        They do so alike for an equal `key`: what was called, on what, and how many nodes it made.
        """
        boundary = self.watch_nodes_later(watched, outputs)
        met = sorted(path for spots in boundary.values() for _, path, _ in spots)
        if met == sorted(watched.needs) and len(self.layers) < _MOST_LAYERS:  # each, and once
            self.layers[key] = layout_of(outputs[0][0].grad_fn, boundary, watched.start)

    def is_known_layer(
        self, key: tuple[Any, ...], call: NotedCall, start: int, args: tuple[Any, ...], root: Any
    ) -> bool:
        """Whether its nodes hang together as they did before; then they have their hooks."""
        layout = self.layers.get(key)
        nodes = None if layout is None else follow(root, layout, start, args)
        if nodes is None:
            return False
        for node, spots in nodes:
            self.listen_later(node, call, spots)
        return True

    def listen_later(self, node: Any, call: NotedCall, spots: list[Spot]) -> None:
        node.register_hook(self.hook_for(call, spots, PASSING.get(node.name(), Passing.COMPUTED)))

    def gradients_later(
        self,
        call: NotedCall,
        spots: list[Spot],
        passing: Passing,
        grads: Gradients,
        incoming: Gradients,
    ) -> None:
        """Backward leaves a call: what it sends on is flagged, and looked at later.

        Not so where it is known to be what was sent before, as far as that has been flagged.
        """
        pending = self.state.pending
        held: list[NotedOutput] = []
        given: list[NotedInput] = []
        last = None
        for position, path, _ in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is None:
                continue
            if grad is last:  # a sum's: once is enough
                held.append((path, *held[-1][1:]))
                continue
            plain = type(grad) in PLAIN_TENSORS
            found = pending.hold_gradient(grad, path, passing, incoming) if plain else None
            if found is None:
                content = numbers_of(grad)
                if content is None:
                    continue
                found = pending.hold(content, path), None
            last = grad
            held.append(found[0])
            if found[1] is not None:
                given.append(found[1])
        if held:
            pending.add(call, "backward", tuple(held), tuple(given), in_backward=True)
            if pending.is_due:
                self.state.look()

    def hook_for(self, call: NotedCall, spots: list[Spot], passing: Passing) -> Callable[..., None]:
        """The hook of a node in Python; C++ asks for it for compiled autograd, and among others."""
        return partial(send_later, self, call, spots, passing)

    def backward_trouble(self, call: NotedCall, error: Exception) -> None:
        """What a call sends on in backward could not be noted."""
        self.state.watcher.trouble(NamedCall(*call).name("backward"), error)

    def _listen(
        self,
        trace: Trace,
        call: NamedCall,
        forward: Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        listener = _Listener(self, call, forward, leaves)
        boundary = trace.boundary
        for node, spots in trace.outputs.items():
            if node not in boundary and node._sequence_nr() != LEAF:
                node.register_prehook(_Incoming(listener, spots))
        listener.nodes = len(boundary)
        for node, spots in boundary.items():
            node.register_hook(_Outgoing(listener, spots, trace.outputs.get(node)))

    def gradients(
        self,
        listener: _Listener,
        spots: list[Spot],
        grads: Gradients,
        received: dict[Path, torch.Tensor],
    ) -> None:
        """Backward leaves a call: look at what it sends on."""
        late: list[NotedOutput] = []
        bad: list[SeenTensor] = []
        near: list[SeenTensor] = []
        call, state = listener.call, self.state
        for position, path, _ in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is None:
                continue
            content = readable(grad)
            if content is None:
                continue
            if not state.is_immediate(content):
                late.append(state.pending.hold(content, path))
                continue
            extent = extent_now(content)
            if not extent.bits and path in listener.leaves:
                storage = content.untyped_storage()
                seen = (StorageWeakRef(storage), version_of(content))
                state.seen_gradients[storage._cdata] = seen
            if extent.bits:
                bad.append(seen_as(content, path, "output", extent))
            elif extent.top >= NEAR[content.dtype]:
                near.append(seen_as(content, path, "output", extent))
        if near:
            near = near_limit(CallValues(call.plan, [], near, direction="backward"))
            state.growth.see(call.name("backward"), state.step, near)
        if late:
            state.pending.add(call, "backward", late, in_backward=True)
            if state.pending.is_due:
                state.look()
        if bad:
            self._suspect(listener, _sent(spots, grads), received, bad)
        elif not all(grad is None or grad.is_cpu for grad in grads):
            sent = _sent(spots, grads)
            if state.was_clamped(sent):
                self._suspect(listener, sent, received, look_at(sent, "output"), was_clamped=True)

    def _suspect(
        self,
        listener: _Listener,
        sent: Tensors,
        received: dict[Path, torch.Tensor],
        bad: list[SeenTensor],
        *,
        was_clamped: bool = False,
    ) -> None:
        """What it sends on is not finite, or the flag of a chip that clamps was raised."""
        plan, cases = listener.call.plan, self.state.cases
        values = CallValues(plan, [], bad, direction="backward")
        case = cases.behind(values, any_value=was_clamped)
        if case is not None:
            cases.carry(case, listener.call, values)
            return
        if self.state.watcher.is_full:
            return
        came = look_at([(tensor, path) for path, tensor in received.items()], "input")
        values = values._replace(inputs=came, outputs=look_at(sent, "output"))
        reason = clamped(values) if was_clamped else fault(values, cases.origin)
        assert reason is not None
        here = listener.call._replace(step=self.state.step)
        forward = listener.forward if listener.call.step == here.step else None

        def write() -> bool:
            whole = forward is not None and forward.write(self.state.tape, here)
            gradients = {path: tensor for tensor, path in sent}
            names, frames = here.names("backward"), render(here.trail)
            write_backward(self.state.tape, names, frames, received, gradients)
            return whole

        cases.blame(here, values, reason, in_backward=True, write=write)


class _Listener:
    """Follows one call into backward; it holds no node of the graph."""

    __slots__ = ("call", "calls", "forward", "leaves", "left", "nodes", "received")

    def __init__(
        self,
        calls: BackwardCalls,
        call: NamedCall,
        forward: Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        self.calls, self.call, self.forward = calls, call, forward
        self.leaves = leaves  # inputs that are parameters, or other leaves
        self.received: dict[Path, torch.Tensor] = {}
        self.nodes = self.left = 0

    def incoming(self, spots: list[Spot] | None, grads: Gradients) -> dict[Path, torch.Tensor]:
        found = {}
        for number, path, window in spots or ():
            grad = grads[number] if number < len(grads) else None
            if grad is not None:
                found[path] = grad if window is None else window.cut(grad)
        return found


class _Incoming:
    """A prehook on a node of an output: keeps the gradient until the call's backward is over."""

    __slots__ = ("_listener", "_spots")

    def __init__(self, listener: _Listener, spots: list[Spot]) -> None:
        self._listener, self._spots = listener, spots

    def __call__(self, grads: Gradients) -> None:
        listener = self._listener
        if not listener.calls.state.on:
            return
        with Quiet():
            listener.received |= listener.incoming(self._spots, grads)
            listener.left = listener.nodes


class _Outgoing:
    """A hook on a node at the edge of an input: the call sends gradients on."""

    __slots__ = ("_listener", "_outputs", "_spots")

    def __init__(self, listener: _Listener, spots: list[Spot], outputs: list[Spot] | None) -> None:
        self._listener, self._spots, self._outputs = listener, spots, outputs

    def __call__(self, grads: Gradients, incoming: Gradients) -> None:
        listener = self._listener
        if not listener.calls.state.on:
            return
        try:
            with Quiet():
                received = listener.received
                if self._outputs is not None:
                    received = received | listener.incoming(self._outputs, incoming)
                listener.calls.gradients(listener, self._spots, grads, received)
                listener.left -= 1
                if listener.left <= 0:
                    listener.received = {}
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            listener.calls.state.watcher.trouble(listener.call.name("backward"), error)


def send_later(
    calls: BackwardCalls,
    call: NotedCall,
    spots: list[Spot],
    passing: Passing,
    grads: Gradients,
    incoming: Gradients,
) -> None:
    """Note the gradients that leave a call; a device flags them, and they are looked at later."""
    if not calls.state.on:
        return
    try:
        with MODES_OFF():
            calls.gradients_later(call, spots, passing, grads, incoming)
    except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
        calls.backward_trouble(call, error)


# Nodes that hang together, the first being that of an output. Of each: the number of the one above
# it, counted from 1, and which of its edges leads here; and which of its own lead to inputs.
Layout = list[tuple[int, int, list[Spot]]]


def layout_of(root: Any, boundary: dict[Any, list[Spot]], start: int) -> Layout:
    """How the nodes hang together that were made from `start` on, below the node of an output."""
    nodes, layout = [root], [(0, 0, boundary.get(root, []))]
    for number, node in enumerate(nodes):  # which grows
        for position, (after, _) in enumerate(node.next_functions):
            if after is not None and after not in nodes and start <= after._sequence_nr() < LEAF:
                nodes.append(after)
                layout.append((number + 1, position, boundary.get(after, [])))
    return layout


def follow(
    root: Any, layout: Layout, start: int, args: tuple[Any, ...]
) -> list[tuple[Any, list[Spot]]] | None:
    """The nodes at the inputs; None unless all of them hang together as in this layout."""
    found = []
    edges: list[Any] = [[(root, 0)]]
    for above, position, spots in layout:
        node = edges[above][position][0] if position < len(edges[above]) else None
        if node is None or not start <= node._sequence_nr() < LEAF:
            return None
        below = node.next_functions
        edges.append(below)
        for place, (argument, *_), _ in spots:
            after = below[place][0] if place < len(below) else None
            given = args[int(argument)].grad_fn
            if after is None or (after is not given and given is not None):
                return None  # to a copy that autocast has kept, for one
            if given is None and after._sequence_nr() != LEAF:
                return None
        if spots:
            found.append((node, spots))
    return found


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor that is not plain, which may take operations to get at."""
    if tensor.dtype not in LIMITS:
        return None
    with Quiet():
        return readable(tensor)


def _sent(spots: list[Spot], grads: Gradients) -> Tensors:
    found: Tensors = []
    for position, path, window in spots:
        grad = grads[position] if position < len(grads) else None
        if grad is not None:
            found.append((grad if window is None else window.cut(grad), path))
    return found
