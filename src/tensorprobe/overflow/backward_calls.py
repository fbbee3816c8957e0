"""Looking at backward: the gradients that each call is given, and those it sends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.capture.encode import PLAIN_TENSORS
from tensorprobe.capture.gradients import (
    LEAF,
    Gradients,
    Path,
    Spot,
    Trace,
    one_node,
    trace_call,
    trace_function,
)
from tensorprobe.capture.naming import ApiName
from tensorprobe.capture.quiet import Quiet
from tensorprobe.overflow.bad_values import MODES_OFF, NEAR, OWN_FRAMES, Looking
from tensorprobe.overflow.call_kinds import PASSING, Passing, plan_for
from tensorprobe.overflow.cases import POSITIONS, Case, Sighting
from tensorprobe.overflow.judge import Seen, bits_of, look_at
from tensorprobe.overflow.pending_calls import NotedCall, NotedInput, NotedOutput
from tensorprobe.overflow.saved_calls import write_backward
from tensorprobe.overflow.watched_call import (
    Glance,
    Remembered,
    Tensors,
    contents_of,
    edges_of,
    frames_of,
    labelled,
    version_of,
)
from tensorprobe.tensors.finiteness import LIMITS, extent_now, readable

_LOSS: Path = ("loss",)
_FIRST = POSITIONS[0]
_MOST_LAYERS = 1000
_sequence_number = torch._C._autograd._get_sequence_nr


class BackwardLooking(Looking):
    """Follows calls into backward."""

    def backward_begins(self, roots: Any) -> None:
        """Backward starts from these tensors."""
        if torch._C._current_graph_task_id() != -1:
            return  # inside another one: a checkpoint's
        self._pass_case = None
        with Quiet():
            tensors = [root for root in roots if isinstance(root, torch.Tensor)]
            nodes = [(root, root.grad_fn) for root in tensors]
            functions = [(r, node) for r, node in nodes if isinstance(node, BackwardCFunction)]
            self._watch_functions(functions)
            for root in tensors:
                content = readable(root)
                if content is None:
                    continue
                if not self._is_immediate(content):
                    inputs = self._ring.inputs([(root, _LOSS)])
                    self._ring.add(None, "forward", [], inputs, note="loss")
                    continue
                case = self.taint.case_of(content) if extent_now(content).bits else None
                if case is not None:
                    case.reached = "the loss"
                    self._pass_case = case
                    self._wake(case)

    def _watch_functions(self, functions: list[tuple[torch.Tensor, Any]]) -> None:
        """Custom autograd.Functions: `apply` is no torch call, but their node is in the graph."""
        for _, node in functions:
            # written on the node itself: numbers of nodes are those of a thread
            if node.metadata.get(self._key) == self.step:
                continue
            node.metadata[self._key] = self.step
            kind = getattr(type(node), "_forward_cls", type(node))
            api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            number = self._tape.counter.next(api)
            module, trail = self._tape.place.module, self._tape.trail(2)
            sighting = Sighting(plan_for(api), number, module, self.step, trail)
            self._listen(trace_function(node), sighting, None, frozenset())

    def _watch_backward(self, glance: Glance, outputs: Tensors) -> None:
        edges = edges_of(glance)
        assert edges is not None
        trace = trace_call(outputs, edges)
        if trace.boundary:
            leaves = frozenset(path for _, path in edges.leaves.values())
            self._listen(trace, self._sighting(glance), Remembered(glance), leaves)

    def _watch_backward_later(self, glance: Glance, outputs: Tensors) -> list[Spot] | None:
        """The same for a call whose gradients are all looked at later: it needs far less.

        Where it leads to, if it made but one node: of such a call that depends on what was called,
        and on which inputs require a gradient.
        """
        made = _sequence_number() - glance.start
        if not made:
            return None
        output = outputs[0][0]
        node = output.grad_fn
        if made > 1 or len(outputs) > 1 or node is None or node._sequence_nr() != glance.start:
            self._watch_nodes_later(glance, outputs)
            return None
        key = (glance.plan.stem, type(node), glance.needs)
        spots = self._spots.get(key)
        if spots is None:
            edges = edges_of(glance)
            one = one_node(output, edges) if edges is not None else None
            if one is None:
                self._watch_nodes_later(glance, outputs)
                return None
            spots = self._spots[key] = list(one[1])
        self._listen_later(node, self._noted(glance, OWN_FRAMES), spots)
        return spots

    def _watch_nodes_later(self, glance: Glance, outputs: Tensors) -> dict[Any, list[Spot]]:
        edges = edges_of(glance)
        assert edges is not None
        boundary = trace_call(outputs, edges).boundary
        for node, spots in boundary.items():
            self._listen_later(node, self._noted(glance, OWN_FRAMES + 1), spots)
        return boundary

    def _watch_layer_later(self, glance: Glance, outputs: Tensors, key: tuple[Any, ...]) -> None:
        """The same for a linear layer, whose some four nodes hang together whenever it is called.

        By `key` it is known again: what was called and on what, how many nodes it made.
        """
        boundary = self._watch_nodes_later(glance, outputs)
        met = sorted(path for spots in boundary.values() for _, path, _ in spots)
        if met == sorted(glance.needs) and len(self._layers) < _MOST_LAYERS:  # each, and once
            self._layers[key] = layout_of(outputs[0][0].grad_fn, boundary, glance.start)

    def _is_known_layer(
        self, key: tuple[Any, ...], call: NotedCall, start: int, args: tuple[Any, ...], root: Any
    ) -> bool:
        """Whether its nodes hang together as they did before; then they have their hooks."""
        layout = self._layers.get(key)
        nodes = None if layout is None else follow(root, layout, start, args)
        if nodes is None:
            return False
        for node, spots in nodes:
            self._listen_later(node, call, spots)
        return True

    def _listen_later(self, node: Any, call: NotedCall, spots: list[Spot]) -> None:
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
        ring = self._ring
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
            found = ring.hold_gradient(grad, path, passing, incoming) if plain else None
            if found is None:
                content = numbers_of(grad)
                if content is None:
                    continue
                found = ring.hold(content, path), None
            last = grad
            held.append(found[0])
            if found[1] is not None:
                given.append(found[1])
        if held:
            ring.add(call, "backward", tuple(held), tuple(given), scaler=True)
            if ring.is_due:
                self.look()

    def hook_for(self, call: NotedCall, spots: list[Spot], passing: Passing) -> Callable[..., None]:
        """The hook of a node in Python; C++ asks for it for compiled autograd, and among others."""
        return partial(send_later, self, call, spots, passing)

    def backward_trouble(self, call: NotedCall, error: Exception) -> None:
        """What a call sends on in backward could not be noted."""
        self._watcher.trouble(Sighting(*call).name("backward"), error)

    def _listen(
        self,
        trace: Trace,
        sighting: Sighting,
        forward: Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        listener = _Listener(self, sighting, forward, leaves)
        boundary = trace.boundary
        for node, spots in trace.outputs.items():
            if node not in boundary:
                listener.waits = True
                if node._sequence_nr() != LEAF:
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
        bad = False
        for position, path, _ in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is None:
                continue
            content = readable(grad)
            if content is None:
                continue
            if not self._is_immediate(content):
                late.append(self._ring.hold(content, path))
                continue
            extent = extent_now(content)
            if not extent.bits and path in listener.leaves:
                storage = content.untyped_storage()
                seen = (StorageWeakRef(storage), version_of(content))
                self._seen_gradients[storage._cdata] = seen
            if extent.bits:
                bad = True
            elif extent.top >= NEAR[content.dtype]:
                name = f"{listener.sighting.name('backward')}.output.{'.'.join(path)}"
                self._latent.see(name, self.step, extent.top, LIMITS[content.dtype])
        if late:
            self._ring.add(listener.sighting.noted(), "backward", late, scaler=True)
            if self._ring.is_due:
                self.look()
        if bad or self._clamped_backward(spots, grads):
            self._suspect_backward(listener, spots, grads, received, clamped=not bad)

    def _clamped_backward(self, spots: list[Spot], grads: Gradients) -> bool:
        if all(grad is None or grad.is_cpu for grad in grads):
            return False
        return self._clamped(_sent(spots, grads))

    def _suspect_backward(
        self,
        listener: _Listener,
        spots: list[Spot],
        grads: Gradients,
        received: dict[Path, torch.Tensor],
        *,
        clamped: bool,
    ) -> None:
        sighting = listener.sighting
        sent = {path: tensor for tensor, path in _sent(spots, grads)}
        case = self._pass_case
        if case is None and self.taint:
            known = [self.taint.case_of(content) for content in contents_of(_sent(spots, grads))]
            case = next((each for each in known if each is not None), None)
        if case is not None:
            self._pass_case = case
            case.carry(sighting.name("backward"))
            self._wake(case)
            return
        if self._watcher.is_full:
            return
        seen = look_at(labelled([(t, p) for p, t in sent.items()], "output"))
        came = look_at(labelled([(t, p) for p, t in received.items()], "input"))
        reason = _backward_reason(seen, came, clamped)
        here = Sighting(sighting.plan, sighting.number, sighting.module, self.step, sighting.trail)
        forward = listener.forward
        same_step = sighting.step == self.step

        def write() -> bool:
            whole = forward is not None and same_step and forward.write(self._tape, here)
            write_backward(self._tape, here.names("backward"), frames_of(here), received, sent)
            return whole

        metrics = {each.label: each.facts for each in (*came, *seen)}
        case = self._pass_case = Case(here, "backward", reason, metrics, write)
        self._watcher.add(case, pending=True)


class _Listener:
    """Follows one call into backward; it holds no node of the graph."""

    __slots__ = ("forward", "leaves", "left", "nodes", "received", "sight", "sighting", "waits")

    def __init__(
        self,
        sight: BackwardLooking,
        sighting: Sighting,
        forward: Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        self.sight, self.sighting, self.forward = sight, sighting, forward
        self.leaves = leaves  # inputs that are parameters, or other leaves
        self.waits = False  # for gradients that come in at another node than they leave from
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
        if not listener.sight.on:
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
        if not listener.sight.on:
            return
        try:
            with Quiet():
                received = listener.received
                if self._outputs is not None:
                    received = received | listener.incoming(self._outputs, incoming)
                listener.sight.gradients(listener, self._spots, grads, received)
                listener.left -= 1
                if listener.left <= 0:
                    listener.received = {}
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            listener.sight._watcher.trouble(listener.sighting.name("backward"), error)


def send_later(
    sight: BackwardLooking,
    call: NotedCall,
    spots: list[Spot],
    passing: Passing,
    grads: Gradients,
    incoming: Gradients,
) -> None:
    """The same where gradients are flagged, and looked at later."""
    if not sight.on:
        return
    try:
        with MODES_OFF():
            sight.gradients_later(call, spots, passing, grads, incoming)
    except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
        sight.backward_trouble(call, error)


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


def _backward_reason(sent: list[Seen], came: list[Seen], clamped: bool) -> str:
    if clamped:
        return "the chip clamps, and its overflow flag was raised in its backward"
    worst = max(sent, key=lambda each: each.facts["nan"] + each.facts["inf"])
    facts = worst.facts
    count, word = (facts["nan"], "NaN") if facts["nan"] else (facts["inf"], "infinite")
    label = worst.label.replace("output.", "input.")
    numbers = "1 number in the gradient" if count == 1 else f"{count} numbers in the gradient"
    verb = "is" if count == 1 else "are"
    made = f"{numbers} of {label} ({facts['dtype']}) {verb} {word}"
    if not came:
        return made
    if bits_of(came):
        return (
            f"it is given a gradient that is not finite though none was sent: the sum of the "
            f"gradients that meet there overflows, or the program began with it; {made}"
        )
    top = max(each.top for each in came)
    return f"the gradients it is given are finite (up to {top:.4g}), {made}"


def _sent(spots: list[Spot], grads: Gradients) -> Tensors:
    found: Tensors = []
    for position, path, window in spots:
        grad = grads[position] if position < len(grads) else None
        if grad is not None:
            found.append((grad if window is None else window.cut(grad), path))
    return found
