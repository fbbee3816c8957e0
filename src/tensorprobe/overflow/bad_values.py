"""What all looks of a guard share: the bad values that are known, and when to look."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from tensorprobe.capture.gradients import Path, Spot
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.stand_ins import StandIns
from tensorprobe.devices import OverflowFlag, device_layer
from tensorprobe.overflow.call_site import Trail, frames_in
from tensorprobe.overflow.cases import Case, Sighting, Taint
from tensorprobe.overflow.growth import Latent
from tensorprobe.overflow.judge import Seen
from tensorprobe.overflow.late_judge import Hindsight
from tensorprobe.overflow.pending_calls import NotedCall, Ring
from tensorprobe.overflow.saved_calls import GuardTape
from tensorprobe.overflow.watched_call import Glance, Tensors
from tensorprobe.tensors.finiteness import LIMITS, readable

# While it is entered, tensors are read without a function mode or subclass taking notice. It costs
# a quarter of Quiet, and is enough where no operation of torch is called.
MODES_OFF = torch._C.DisableTorchFunction
# Between a look at what a call returned and the program: _after, call, __torch_function__. Some
# come by _call_later too; a stack that is shown has none of ours.
OWN_FRAMES = 4
# The inputs of a call, and whether they require a gradient.
Paths = tuple[tuple[Path, bool], ...]
NEAR = {dtype: limit / 2 for dtype, limit in LIMITS.items()}
_SCALER_FILE = "grad_scaler.py"


class Watcher(Protocol):
    """Whom a sight tells."""

    attention: bool

    @property
    def is_full(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def add(self, case: Case, *, pending: bool) -> None: ...
    def warn(self, name: str, step: int, text: str) -> None: ...
    def trouble(self, name: str, error: BaseException) -> None: ...
    def call_made(self) -> None: ...
    def unscaled(self) -> None: ...
    def scale_updated(self, skipped_at: float | None, optimizers: Iterable[int]) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...


class Looking:
    """The state of the looks at calls, at backward and at optimizers."""

    def __init__(self, tape: GuardTape, watcher: Watcher, look_every: int | None) -> None:
        self.on = False
        self.stand_ins = StandIns()
        self.make = self.stand_ins.make
        self._tape = tape
        self._watcher = watcher
        self._look_every = look_every
        self._is_late = look_every != 1  # not all is looked at as it is made
        self._looks_later = look_every is not None and look_every > 1  # also on the host
        self.step = 0
        self.taint = Taint()
        # by thread, the optimizer at work, by identity, the call, and whether a gradient is bad
        self.stepping: dict[int, tuple[int, Sighting, bool]] = {}
        self._pass_case: Case | None = None  # of the backward that runs
        self._key = object()  # of what is written on the nodes of Functions
        # where the node of a call leads to, by what it calls and which inputs require a gradient
        self._spots: dict[tuple[str, type, tuple[Path, ...]], list[Spot]] = {}
        # the same, by their positions, or by the paths of all where some are in a list
        self._routes: dict[tuple[str, type, int | Paths], list[Spot]] = {}
        # of linear layers, which make several nodes: how those hang together (a Layout)
        self._layers: dict[tuple[Any, ...], list[tuple[int, int, list[Spot]]]] = {}
        self._node_types: set[type] = set()  # of graph nodes, none of a custom Function
        self._uninitialised: dict[int, StorageWeakRef] = {}
        self._asleep: list[Case] = []  # infinite at a pole, such as 1 / 0: many programs mask that
        # gradients of leaves that were looked at in backward; the optimizer is given the same
        self._seen_gradients: dict[int, tuple[StorageWeakRef, int]] = {}
        # optimizers that stepped in this step and the one before, and the case their gradients had
        self._stepped: list[tuple[weakref.ref[Optimizer], Sighting, Case | None]] = []
        self._latent = Latent(watcher.warn)
        self._flag: OverflowFlag | None = None
        self._flags_needed: bool | None = None
        self._ring = Ring(look_every)
        self._hindsight = Hindsight(self._latent, self._found_late)

    def begin(self) -> None:
        """The watch begins: what was flagged on a device before is not ours."""
        row = device_layer("npu")
        self._flag = row.overflow_flag if row.is_available() else None
        if self._flag is not None and self._flag.is_needed():
            with contextlib.suppress(RuntimeError):  # no device is set yet: nothing has run on one
                self._flag.clear()

    def begin_step(self, step: int) -> None:
        """A new step: what is still bad counts anew."""
        self.step = step
        self._stepped = [each for each in self._stepped if each[1].step >= step - 1]
        self.taint.begin_step()
        self._pass_case = None
        self._asleep.clear()
        self._uninitialised.clear()
        self._seen_gradients.clear()
        self._ring.clear()
        self._hindsight.begin_step()

    def forgive(self, cases: Sequence[Case]) -> None:
        """These were GradScaler's to deal with, and it has."""
        self.taint.drop(cases)
        self._hindsight.forgive(cases)
        if self._pass_case in cases:
            self._pass_case = None

    def _looks_now(self, tensor: torch.Tensor) -> bool:
        content = readable(tensor)
        return content is not None and self._is_immediate(content)

    def _is_immediate(self, content: torch.Tensor) -> bool:
        """Whether to look at these numbers now: reading host memory waits for nothing."""
        return content.is_cpu if self._look_every is None else self._look_every == 1

    def _sighting(self, glance: Glance) -> Sighting:
        return Sighting(*self._noted(glance))

    def _noted(self, glance: Glance, depth: int = 2) -> NotedCall:
        """What a later report needs to know of a call, noted while it is made.

        `depth` of the frames above the caller are ours.
        """
        call = glance.call
        if call is None:
            tape = self._tape
            trail = tape.trail(depth)
            call = glance.call = (
                glance.plan, glance.number, tape.place.module, self.step, trail,
            )  # fmt: skip
        return call

    def _spoil(self, tensors: list[Seen], case: Case, *, any_value: bool = False) -> None:
        for each in tensors:
            if each.bits or any_value:
                self.taint.add(each.tensor, case)

    def _wake(self, case: Case) -> None:
        """An infinity that may have been meant has done harm."""
        if case in self._asleep:
            self._asleep.remove(case)
            if not self._watcher.is_full:
                self._watcher.add(case, pending=case.pending)

    def wake_living(self) -> None:
        """The step ends: an infinity that is still there was not thrown away."""
        for case in list(self._asleep):
            if self.taint.is_alive(case):
                self._wake(case)
        self._hindsight.wake_living(self._ring)

    # The overflow flag of a chip that clamps

    def _clamped(self, outputs: Tensors) -> bool:
        """Whether the device says that something was clamped since last asked."""
        flag = self._flag
        if flag is None and outputs:
            flag = self._flag = device_layer(outputs[0][0].device).overflow_flag
        if flag is None or not flag.is_needed() or not self._flag_is_free(outputs):
            return False
        if not flag.is_raised():
            return False
        flag.clear()
        return True

    def _flag_is_free(self, outputs: Tensors) -> bool:
        contents = [readable(tensor) for tensor, _ in outputs]
        return any(each is not None and self._is_immediate(each) for each in contents)

    # On a device: later

    def look(self) -> None:
        """Look at what devices have found since the last look."""
        if not self._ring.active:
            return
        with Quiet():
            clamped = False
            if self._flag is not None and self._flag.is_needed():
                clamped = self._flag.is_raised()
                if clamped:
                    self._flag.clear()
            self._hindsight.go_through(*self._ring.take(), clamped)

    def _found_late(self, case: Case, pending: bool) -> bool:
        if self._watcher.is_full:
            return False
        self._watcher.add(case, pending=pending or made_by_scaler(case.sighting.trail))
        return True


def made_by_scaler(trail: Trail) -> bool:
    """Whether a GradScaler made the call: it multiplies the loss until something overflows."""
    return any(code.co_filename.endswith(_SCALER_FILE) for code, _ in frames_in(trail, 8))
