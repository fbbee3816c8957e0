"""Looking at calls on a device: what they make is flagged there, and judged when a step ends.

It runs for every call of the program and decides what a step costs, so it reads tensors and calls
no operation of torch, which then need not be hidden from the program's modes and graph.
"""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe.capture.encode import PLAIN_TENSORS
from tensorprobe.guard.cases import POSITIONS
from tensorprobe.guard.glances import Glance, Tensors
from tensorprobe.guard.judging import scalar_bits
from tensorprobe.guard.kinds import Kind, Plan
from tensorprobe.guard.looking import MODES_OFF, OWN_FRAMES
from tensorprobe.guard.looking_backward import BackwardLooking, numbers_of
from tensorprobe.guard.ring import UNFLAGGED
from tensorprobe.guard.trail import NOWHERE
from tensorprobe.numerics.finiteness import LIMITS, REAL, is_plain

_CASTS, _MOVES, _PASSES = Kind.CASTS, Kind.MOVES, Kind.PASSES
_FIRST = POSITIONS[0]
_graph_task = torch._C._current_graph_task_id


class LaterLooking(BackwardLooking):
    """Notes calls whose results are looked at later."""

    def _are_later(self, glance: Glance, outputs: Tensors) -> bool:
        """Whether all that this call makes is looked at later, its gradients too."""
        if not self._ring.active or glance.plan.looks_now or self._look_every == 1:
            return False
        if self._looks_later:  # on the host too
            return all(type(tensor) in PLAIN_TENSORS for tensor, _ in outputs)
        for tensor, _ in outputs:
            if tensor.is_cpu or type(tensor) not in PLAIN_TENSORS:
                return False
        if glance.needs:
            for tensor, _ in glance.inputs:
                if tensor.is_cpu and tensor.requires_grad:
                    return False
        return True

    def _look_at_later(self, glance: Glance, outputs: Tensors) -> None:
        """Note the call; what it made is known when the device has got there."""
        kind = glance.plan.kind
        flag = kind is not _PASSES
        if kind is _CASTS and glance.inputs:
            source, target = glance.inputs[0][0], outputs[0][0]
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
            self._look_later(glance, contents, flag, OWN_FRAMES + 1)

    def _look_later(self, glance: Glance, outputs: Tensors, flag: bool, depth: int) -> None:
        ring = self._ring
        inputs = ring.inputs(glance.inputs) if glance.noted is None else glance.noted
        held = []
        for content, path in outputs:
            held.append(ring.hold(content, path, flag))
        told = scalar_bits(glance.args, glance.kwargs)
        ring.add(self._noted(glance, depth), "forward", held, inputs, told, _graph_task() != -1)
        if ring.is_due:
            self.look()

    def _is_noted_view(self, plan: Plan, number: int, args: tuple[Any, ...], result: Any) -> bool:
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
            if not self._looks_later and (self._look_every == 1 or source.is_cpu or result.is_cpu):
                return False
            key = self._ring.known_storage(source)
            if key is None or not is_plain(result) or result.untyped_storage()._cdata != key:
                return False
            held = (_FIRST, key, source.device, UNFLAGGED, dtype, result.shape, False)
            call = (plan, number, "", self.step, NOWHERE)
            self._ring.add(call, "forward", [held], [(_FIRST, key)])
        return True


def holds_all_of(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a cast between these dtypes cannot overflow; copies between devices are looked at."""
    return source.is_cpu == target.is_cpu and LIMITS[source.dtype] <= LIMITS[target.dtype]
