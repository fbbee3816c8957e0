"""Steps whose numbers are on their way from the device, in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorprobe.monitoring.series import COLUMNS, UPDATE_COLUMNS, StepTable, StepValues
from tensorprobe.tensors.result import Result

if TYPE_CHECKING:
    from tensorprobe.tensors.summarizer import Summarizer

MOST = 32  # steps that may be on their way; then the program waits for the oldest


class PendingStep:
    """A step as it was measured, and facts of it that rules ask for."""

    def __init__(self, step: int, time: float) -> None:
        self.step = step
        self.time = time
        self.scalars: dict[str, float | Result] = {}
        self.losses: list[Result] = []  # what backward began from
        self.entries: dict[str, dict[str, tuple[Result, int]]] = {}
        self.updates: dict[str, tuple[Result, Result, float]] = {}
        self.groups: dict[str, int] = {}  # of each parameter that an optimizer steps
        self.optimizers: dict[int, int] = {}  # of each group
        self.trained: set[str] = set()  # parameters that require grad
        self.kept_gradients: list[str] = []  # optimizers whose gradients were not cleared
        self.decay = 1.0  # the least beta2 of the optimizers
        self.is_half = False  # whether something was float16
        self.has_stepped = False
        self.scale_known = False

    def beside(self, group: int, other: int) -> bool:
        """Whether two groups are of one optimizer."""
        return self.optimizers.get(group) == self.optimizers.get(other)

    def results(self) -> list[Result]:
        """All that has to arrive."""
        found = [each for each in self.scalars.values() if isinstance(each, Result)]
        found += self.losses
        for entries in self.entries.values():
            found += [result for result, _ in entries.values()]
        for change, before, _ in self.updates.values():
            found += (change, before)
        return found

    def values(self) -> StepValues:
        """The numbers, once all have arrived."""
        scalars = {name: _number(each) for name, each in self.scalars.items()}
        if self.losses and "loss" not in scalars:
            loss = math.fsum(_number(each) for each in self.losses) / len(self.losses)
            scale = scalars.get("loss_scale", 1.0)
            if scale and (self.scale_known <= ("loss_scale" in scalars)):
                scalars["loss"] = loss / scale
        tables = {kind: _table(entries) for kind, entries in self.entries.items() if entries}
        if self.updates:
            tables["update"] = _updates(self.updates)
        return StepValues(self.step, self.time, scalars, tables)


class PendingSteps:
    """Hands on each step, in order, when its last number has arrived."""

    def __init__(
        self, summarizer: Summarizer, complete: Callable[[PendingStep, StepValues], None]
    ) -> None:
        self.summarizer = summarizer
        self._complete = complete
        self._steps: deque[tuple[PendingStep, list[Result]]] = deque()

    def add(self, step: PendingStep) -> None:
        """A step is over; its numbers may be on their way."""
        self._steps.append((step, step.results()))
        self.summarizer.flush()
        self.summarizer.poll()
        self._hand_on()
        if len(self._steps) >= MOST:
            self.wait()

    def wait(self) -> None:
        """Return when all steps were handed on."""
        self.summarizer.wait()
        self._hand_on()

    def _hand_on(self) -> None:
        while self._steps and all(result.ready for result in self._steps[0][1]):
            step, _ = self._steps.popleft()
            self._complete(step, step.values())


def _number(value: float | Result) -> float:
    if not isinstance(value, Result):
        return value
    summary = value.summary
    if summary is None or summary.nan_count:
        return math.nan
    return math.nan if summary.max is None else float(summary.max)


def _table(entries: dict[str, tuple[Result, int]]) -> StepTable:
    rows = np.full((len(COLUMNS), len(entries)), np.nan)
    for number, (result, count) in enumerate(entries.values()):
        found = result.summary
        if found is None:
            continue
        rows[:, number] = (
            _float(found.norm),
            _float(found.mean),
            _float(found.min),
            _float(found.max),
            found.nan_count,
            found.inf_count,
            found.zero_count,
            count,
        )
    return StepTable(tuple(entries), dict(zip(COLUMNS, rows, strict=True)))


def _updates(entries: dict[str, tuple[Result, Result, float]]) -> StepTable:
    rows = np.full((len(UPDATE_COLUMNS), len(entries)), np.nan)
    for number, (change, before, share) in enumerate(entries.values()):
        whole = math.sqrt(share) or 1.0
        rows[:, number] = _norm(change) / whole, _norm(before) / whole
    return StepTable(tuple(entries), dict(zip(UPDATE_COLUMNS, rows, strict=True)))


def _norm(result: Result) -> float:
    return math.nan if result.summary is None else _float(result.summary.norm)


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)
