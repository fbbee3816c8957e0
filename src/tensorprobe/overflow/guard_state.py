"""What all parts of the overflow watch share: the open cases, the pending calls, when to look."""

from __future__ import annotations

import contextlib
import os
import threading
from types import CodeType, FrameType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.devices import OverflowFlag, device_layer
from tensorprobe.follow.quiet import Quiet
from tensorprobe.overflow.call_kinds import Plan
from tensorprobe.overflow.call_site import trail_from
from tensorprobe.overflow.cases import NamedCall, NotedCall, OpenCases, Watcher
from tensorprobe.overflow.judge import Growth
from tensorprobe.overflow.late_calls import LateCalls
from tensorprobe.overflow.module_place import GuardedProgram
from tensorprobe.overflow.pending_calls import PendingCalls
from tensorprobe.overflow.watched_call import RunningCall, Tensors
from tensorprobe.record.tape import Tape
from tensorprobe.tensors.finiteness import LIMITS, readable

_OPTIMIZERS = os.path.join(os.path.dirname(torch.__file__), "optim") + os.sep
# While it is entered, tensors are read without a function mode or subclass taking notice. It costs
# a quarter of Quiet, and is enough where no operation of torch is called.
MODES_OFF = torch._C.DisableTorchFunction
NEAR = {dtype: limit / 2 for dtype, limit in LIMITS.items()}


class GuardState:
    """State that the parts looking at calls, backward and optimizers share."""

    def __init__(self, tape: Tape, watcher: Watcher, look_every: int | None) -> None:
        self.on = False
        self.program = GuardedProgram(tape.counter)
        self.tape = tape  # on which calls are written down that are at fault
        self.watcher = watcher
        self.look_every = look_every
        self.is_late = look_every != 1  # not all is looked at as it is made
        self.looks_later = look_every is not None and look_every > 1  # also on the host
        self.step = 0
        # by thread, the optimizer at work, by identity, the call, and whether a gradient is bad
        self.stepping: dict[int, tuple[int, NamedCall, bool]] = {}
        # by thread, the optimizer that was given a closure, by identity, and the code of its step
        self.closures: dict[int, tuple[int, CodeType | None]] = {}
        # gradients of leaves that were looked at in backward; the optimizer is given the same
        self.seen_gradients: dict[int, tuple[StorageWeakRef, int]] = {}
        self.growth = Growth(watcher.warn)
        self.pending = PendingCalls(look_every)
        self.cases = OpenCases(watcher, self.pending.storage_at)
        self._late_calls = LateCalls(self.cases, self.growth)
        self._flag: OverflowFlag | None = None

    def is_optimizers_own(self, frame: FrameType | None) -> bool:
        """Whether a call made in `frame` is part of an optimizer's step, which is one call."""
        ident = threading.get_ident()
        if ident in self.stepping:
            return True
        if ident not in self.closures or frame is None:
            return False
        code = frame.f_code  # a closure is called by the step as well, but makes its calls itself
        return code is self.closures[ident][1] or code.co_filename.startswith(_OPTIMIZERS)

    def begin_watch(self) -> None:
        """Begin the watch, and drop flags that a device raised before it."""
        row = device_layer("npu")
        self._flag = row.overflow_flag if row.is_available() else None
        if self._flag is not None and self._flag.is_needed():
            with contextlib.suppress(RuntimeError):  # no device is set yet: nothing has run on one
                self._flag.clear()

    def begin_step(self, step: int) -> None:
        """Begin a step: a value that is still bad is reported again."""
        self.step = step
        self.cases.begin_step()
        self.seen_gradients.clear()
        self.pending.clear()
        self._late_calls.begin_step()

    def looks_now(self, tensor: torch.Tensor) -> bool:
        content = readable(tensor)
        return content is not None and self.is_immediate(content)

    def is_immediate(self, content: torch.Tensor) -> bool:
        """Whether to look at these numbers now: reading host memory waits for nothing."""
        return content.is_cpu if self.look_every is None else self.look_every == 1

    def noted(self, watched: RunningCall) -> NotedCall:
        """What a later report needs to know of a call, noted while it is made."""
        call = watched.noted
        if call is None:
            call = watched.noted = self.noted_at(watched.plan, watched.number, watched.frame)
        return call

    def noted_at(self, plan: Plan, number: int, frame: FrameType | None) -> NotedCall:
        """What a later report needs to know of a call that `frame` has made."""
        module, base, rest = self.program.place.here
        return plan, number, module, self.step, trail_from(frame, base, rest)

    # The overflow flag of a chip that clamps

    def was_clamped(self, outputs: Tensors) -> bool:
        """Whether the device says that something was clamped since last asked."""
        flag = self._flag
        if flag is None and outputs:
            flag = self._flag = device_layer(outputs[0][0].device).overflow_flag
        if flag is None or not any(self.looks_now(tensor) for tensor, _ in outputs):
            return False
        return _take(flag)

    # On a device: later

    def look(self) -> None:
        """Look at what devices have found since the last look."""
        if self.pending.active:
            with Quiet():
                was_clamped = self._flag is not None and _take(self._flag)
                self._late_calls.go_through(*self.pending.take(), was_clamped)


def _take(flag: OverflowFlag) -> bool:
    """Whether the flag was raised, which is lowered."""
    if not flag.is_needed() or not flag.is_raised():
        return False
    flag.clear()
    return True
