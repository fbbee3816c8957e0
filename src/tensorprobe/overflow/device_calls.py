"""Looking at calls on a device: what they make is flagged there, and judged when a step ends.

It runs for every call of the program and decides what a step costs, so it reads tensors and calls
no operation of torch, which then need not be hidden from the program's modes and graph.
"""

from __future__ import annotations

from math import isfinite
from types import EllipsisType, FrameType, NoneType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from tensorprobe.follow.gradients import Path, Spot
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.overflow.backward_calls import BackwardCalls, Layout, numbers_of
from tensorprobe.overflow.call_kinds import Kind, Plan
from tensorprobe.overflow.call_site import NOWHERE
from tensorprobe.overflow.cases import NotedCall
from tensorprobe.overflow.guard_state import MODES_OFF, GuardState
from tensorprobe.overflow.judge import scalar_bits
from tensorprobe.overflow.pending_calls import UNFLAGGED, holds_all_of, piece_of
from tensorprobe.overflow.watched_call import POSITIONS, RunningCall, Tensors
from tensorprobe.tensors.finiteness import LIMITS, REAL, is_plain

_CASTS, _MOVES, _PASSES = Kind.CASTS, Kind.MOVES, Kind.PASSES
_FIRST = POSITIONS[0]
_graph_task = torch._C._current_graph_task_id
_sequence_number = torch._C._autograd._get_sequence_nr
# torch.func is at work where there are some: its wrappers have no graph that can be walked
_transforms = torch._C._functorch.peek_interpreter_stack
LINEAR = "Functional.linear"
_JOINS = frozenset(["Torch.cat", "Torch.stack"])  # their node leads to the items of their list
_MOST_ARGUMENTS = 60  # that the short way takes
# among those that need a gradient: one that is given by a keyword, one inside a list
_BY_NAME = 1 << _MOST_ARGUMENTS
_IN_LIST = _BY_NAME << 1
# The inputs of a call, and whether they require a gradient.
Paths = tuple[tuple[Path, bool], ...]
_MOST_JOINED = 16  # lists that grow from call to call would fill the table
# Arguments that hold no tensor.
ATOMS = frozenset(
    [
        bool, int, str, NoneType, EllipsisType, slice,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    ]
)  # fmt: skip
_LISTS = frozenset([list, tuple])


class DeviceCalls:
    """Notes calls whose results are looked at later."""

    def __init__(self, state: GuardState, backward: BackwardCalls) -> None:
        self._state = state
        self._backward = backward
        # where the node of a call leads to, by what it calls, its type, and the positions of the
        # inputs that require a gradient, or the paths of all where some are in a list
        self._routes: dict[tuple[str, type, int | Paths], list[Spot]] = {}
        self._node_types: set[type] = set()  # of graph nodes, none of a custom Function

    def note_later(
        self, plan: Plan, number: int, start: int, args: tuple[Any, ...], kwargs: Any,
        frame: FrameType | None, result: Any,
    ) -> bool:  # fmt: skip
        """Note a call that returned one tensor, the short way; False where it is not for it.

        It does what `_before`, `_look_at_later` and `_watch_backward_later` do together, for plain
        tensors among plain arguments. `start` is the number of the next graph node before the call.
        """
        if type(result) is not torch.Tensor or len(args) > _MOST_ARGUMENTS:
            return False
        on_host = self._state.looks_later  # also what lies there is looked at later
        if not on_host and result.is_cpu:
            return False
        given_to = self._plain_arguments(args, kwargs, on_host)
        if given_to is None:
            return False
        inputs, told, needs = given_to
        looked, flag = result.dtype in LIMITS, True
        if plan.kind is _CASTS and inputs:
            source = inputs[0][0]
            if source is result or source.dtype not in LIMITS:
                looked = False
            elif looked:
                flag = not holds_all_of(result, source)
        elif plan.kind is _MOVES and looked:
            looked = not result._is_view()
        call = None
        if looked:
            piece = piece_of(result)
            if piece is None:
                return False
            pending = self._state.pending
            given = pending.inputs(inputs)  # first: the result may share their memory
            held = pending.hold_piece(result, _FIRST, flag, piece)
            call = self._state.noted_at(plan, number, frame)
            pending.add(call, "forward", (held,), given, told, _graph_task() != -1)
            if pending.is_due:
                self._state.look()
        if needs and (node := result.grad_fn) is not None and not _transforms():
            made = _sequence_number() - start
            if made:
                if call is None:
                    call = self._state.noted_at(plan, number, frame)
                if made == 1 and needs < _BY_NAME:
                    spots = self._routes.get((plan.stem, type(node), needs))
                    if spots is not None and node._sequence_nr() == start:
                        self._backward.listen_later(node, call, spots)
                        return True
                told_of = (args, kwargs, inputs, needs)
                self._follow_route(plan, number, call, start, made, told_of, result, node)
        return True

    def _follow_route(
        self, plan: Plan, number: int, call: NotedCall, start: int, made: int,
        given: tuple[tuple[Any, ...], Any, Tensors, int], result: torch.Tensor, node: Any,
    ) -> list[Spot] | Layout | None:  # fmt: skip
        """Follow a call into backward that may be the first to go there this way.

        The way, where it is known from now on: the spots of one node, or the layout of a layer.
        """
        args, kwargs, inputs, needs = given
        which = needs if needs < _BY_NAME else _paths_of(inputs)
        route = (plan.stem, type(node), which)
        is_layer = made > 1 and plan.stem == LINEAR and needs < _BY_NAME
        is_layer = is_layer and len(args) > 1 and args[0] is not args[1]
        if made == 1:
            spots = self._routes.get(route)
            if spots is not None and node._sequence_nr() == start:
                self._backward.listen_later(node, call, spots)
                return spots
        elif is_layer and self._backward.is_known_layer((*route, made), call, start, args, node):
            return self._backward.layers[(*route, made)]
        watched = RunningCall(plan, number, args, kwargs)
        watched.inputs, watched.start, watched.noted = inputs, start, call
        watched.needs = tuple(path for tensor, path in inputs if tensor.requires_grad)
        outputs = [(result, _FIRST)]
        if is_layer:
            self._backward.watch_layer_later(watched, outputs, (*route, made))
            return self._backward.layers.get((*route, made))
        if needs < _IN_LIST:
            found = self._backward.watch_backward_later(watched, outputs)
        else:
            boundary = self._backward.watch_nodes_later(watched, outputs)
            is_join = made == 1 and plan.stem in _JOINS
            found = boundary.get(node) if is_join else None
        if found is None or which == ():
            return None
        self._routes[route] = found
        return found

    def new_route(
        self, plan: Plan, number: int, call: NotedCall, start: int, made: int,
        args: tuple[Any, ...], kwargs: Any, result: torch.Tensor,
    ) -> list[Spot] | Layout | None:  # fmt: skip
        """Follow a call that C++ has noted, but cannot follow into backward itself."""
        with MODES_OFF():
            plain = self._plain_arguments(args, kwargs, self._state.looks_later)
            assert plain is not None
            given = (args, kwargs, plain[0], plain[2])
            node = result.grad_fn
            return self._follow_route(plan, number, call, start, made, given, result, node)

    def _plain_arguments(
        self, args: tuple[Any, ...], kwargs: Any, on_host: bool
    ) -> tuple[Tensors, int, int] | None:
        """Tensors among plain arguments, what numbers tell, and a bit for each that needs a
        gradient; None where there is anything else."""
        inputs: Tensors = []
        known = self._node_types
        told = needs = 0
        position = -1
        for value in args:
            position += 1
            kind = type(value)
            if kind in PLAIN_TENSORS:
                inputs.append((value, POSITIONS[position]))
                if value.requires_grad:
                    node = value.grad_fn
                    if type(node) not in known and not self._can_follow(node):
                        return None
                    if not on_host and value.is_cpu:
                        return None
                    needs |= 1 << position
            elif kind is float:
                if not isfinite(value):
                    told = scalar_bits(args, kwargs)
            elif kind in _LISTS:
                index = -1
                for item in value:
                    index += 1
                    if type(item) in PLAIN_TENSORS:
                        inputs.append((item, (*POSITIONS[position], str(index))))
                        if item.requires_grad:
                            if not self._can_follow(item.grad_fn) or (not on_host and item.is_cpu):
                                return None
                            needs |= _IN_LIST
                    elif type(item) not in ATOMS and type(item) is not float:
                        return None
            elif kind not in ATOMS:
                return None
        if kwargs:
            for key, value in kwargs.items():
                kind = type(value)
                if kind in PLAIN_TENSORS:
                    inputs.append((value, (key,)))
                    if value.requires_grad:
                        if not self._can_follow(value.grad_fn) or (not on_host and value.is_cpu):
                            return None
                        needs |= _BY_NAME
                elif kind is float:
                    if not isfinite(value):
                        told = scalar_bits(args, kwargs)
                elif kind not in ATOMS:
                    return None
        return inputs, told, needs

    def _can_follow(self, node: Any) -> bool:
        """Whether a node that made an input is none of a custom Function, which has to be named."""
        if isinstance(node, BackwardCFunction):
            return False
        self._node_types.add(type(node))
        return True

    def are_later(self, watched: RunningCall, outputs: Tensors) -> bool:
        """Whether all that this call makes is looked at later, its gradients too."""
        if not self._state.pending.active or watched.plan.looks_now or self._state.look_every == 1:
            return False
        if self._state.looks_later:  # on the host too
            return all(type(tensor) in PLAIN_TENSORS for tensor, _ in outputs)
        for tensor, _ in outputs:
            if tensor.is_cpu or type(tensor) not in PLAIN_TENSORS:
                return False
        if watched.needs:
            for tensor, _ in watched.inputs:
                if tensor.is_cpu and tensor.requires_grad:
                    return False
        return True

    def look_at_later(self, watched: RunningCall, outputs: Tensors) -> None:
        """Note the call; what it made is known when the device has got there."""
        kind = watched.plan.kind
        flag = kind is not _PASSES
        if kind is _CASTS and watched.inputs:
            source, target = watched.inputs[0][0], outputs[0][0]
            if source is target or source.dtype not in LIMITS:
                return
            flag = target.dtype not in LIMITS or not holds_all_of(target, source)
        contents = []
        for tensor, path in outputs:
            if kind is _MOVES and tensor._is_view():
                continue
            content = tensor if is_plain(tensor) else numbers_of(tensor)
            if content is not None:
                contents.append((content, path))
        if contents:
            self.look_later(watched, contents, flag)

    def look_later(self, watched: RunningCall, outputs: Tensors, flag: bool) -> None:
        pending = self._state.pending
        inputs = pending.inputs(watched.inputs) if watched.memory is None else watched.memory
        held = []
        for content, path in outputs:
            held.append(pending.hold(content, path, flag))
        told = scalar_bits(watched.args, watched.kwargs)
        pending.add(self._state.noted(watched), "forward", held, inputs, told, _graph_task() != -1)
        if pending.is_due:
            self._state.look()

    def is_noted_view(self, plan: Plan, number: int, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a call that has passed its first argument on was a view of memory that is known.

        Then nothing is flagged, and all there is to note is its name: a bad value went by here.
        """
        if type(result) not in PLAIN_TENSORS or not args or type(args[0]) not in PLAIN_TENSORS:
            return False
        with MODES_OFF():
            source = args[0]
            dtype = source.dtype
            if dtype not in REAL or result.dtype is not dtype:
                return False
            if not self._state.looks_later and (
                self._state.look_every == 1 or source.is_cpu or result.is_cpu
            ):
                return False
            key = self._state.pending.known_storage(source)
            if key is None or not is_plain(result) or result.untyped_storage()._cdata != key:
                return False
            held = (_FIRST, key, source.device, UNFLAGGED, dtype, result.shape, False)
            call = (plan, number, "", self._state.step, NOWHERE)
            self._state.pending.add(call, "forward", [held], [(_FIRST, key)])
        return True


def _paths_of(inputs: Tensors) -> Paths:
    """The inputs of a call that takes a short list; none where a tensor is among them twice."""
    if len(inputs) > _MOST_JOINED or len({id(tensor) for tensor, _ in inputs}) < len(inputs):
        return ()
    return tuple((path, tensor.requires_grad) for tensor, path in inputs)
