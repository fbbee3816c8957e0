"""A bad value followed from the call that made it: a finding while it is still being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.capture.encode import PLAIN_TENSORS
from tensorprobe.capture.gradients import Path
from tensorprobe.capture.naming import CallNames, call_name
from tensorprobe.guarding.findings import Finding
from tensorprobe.overflow.call_kinds import Plan
from tensorprobe.overflow.call_site import Trail, render
from tensorprobe.records import Direction

NAMED = 5  # calls that a finding names of those which carry its value on


class Sighting:
    """One call of the program: what it is called, and where it was made."""

    __slots__ = ("module", "number", "plan", "step", "trail")

    def __init__(self, plan: Plan, number: int, module: str, step: int, trail: Trail) -> None:
        self.plan, self.number, self.module = plan, number, module
        self.step, self.trail = step, trail

    def noted(self) -> tuple[Plan, int, str, int, Trail]:
        """What it is made of."""
        return self.plan, self.number, self.module, self.step, self.trail

    def name(self, direction: Direction = "forward") -> str:
        return call_name(self.plan.api, self.number, direction)

    def names(self, direction: Direction = "forward") -> CallNames:
        return CallNames(self.plan.api, self.name(direction), self.module, direction)


class Case:
    """What is known of one bad value so far."""

    def __init__(
        self,
        sighting: Sighting,
        direction: Direction,
        reason: str,
        metrics: dict[str, Any],
        write: Callable[[], bool] | None,
    ) -> None:
        self.sighting, self.direction = sighting, direction
        self.reason, self.metrics = reason, metrics
        self.write = write  # puts it into the capture; False where its forward inputs are gone
        self.saved = False  # in the capture, with all that it takes to run it again
        self.affected = 0
        self.travelled: list[str] = []
        self.reached = ""
        self.told = False
        self.pending = False  # a GradScaler may deal with it

    @property
    def name(self) -> str:
        return self.sighting.name(self.direction)

    def carry(self, name: str) -> None:
        """Another call has this value in what it returns."""
        self.affected += 1
        if len(self.travelled) < NAMED and name not in self.travelled:
            self.travelled.append(name)

    def finding(self, rank: int, **more: Any) -> Finding:
        """The case as it stands."""
        return Finding(
            name=self.name,
            kind="nonfinite",
            direction=self.direction,
            step=self.sighting.step,
            rank=rank,
            module=self.sighting.module,
            op=self.sighting.plan.api.op,
            stack=render(self.sighting.trail),
            reason=self.reason,
            metrics=self.metrics,
            affected=self.affected,
            travelled=tuple(self.travelled),
            reached=self.reached,
            **more,
        )


class Taint:
    """Which memory holds a bad value, and of which case.

    By storage, held weakly: what an allocator puts at the same place later is another one.
    """

    def __init__(self) -> None:
        self._cases: dict[int, tuple[StorageWeakRef, Case]] = {}
        self._before: dict[int, tuple[StorageWeakRef, Case]] = {}

    def __bool__(self) -> bool:
        return bool(self._cases)

    def add(self, content: torch.Tensor, case: Case) -> None:
        storage = content.untyped_storage()
        self._cases[storage._cdata] = (StorageWeakRef(storage), case)

    def case_of(self, content: torch.Tensor) -> Case | None:
        found = self._cases.get(content.untyped_storage()._cdata)
        return found[1] if found is not None else None

    def earlier_case_of(self, content: torch.Tensor) -> Case | None:
        """The case that spoiled this memory in the step before, such as a parameter's."""
        found = self._before.get(content.untyped_storage()._cdata)
        return found[1] if found is not None else None

    def is_alive(self, case: Case) -> bool:
        """Whether memory that this case spoiled is still in use."""
        return any(known is case and not ref.expired() for ref, known in self._cases.values())

    def begin_step(self) -> None:
        """A step of its own: what is still bad counts anew."""
        self._before = {k: v for k, v in self._cases.items() if not v[0].expired()}
        self._cases = {}

    def drop(self, cases: Sequence[Case]) -> None:
        """Forget what these cases spoiled."""
        self._cases = {k: v for k, v in self._cases.items() if v[1] not in cases}


# Labels and paths of arguments by position, made once.
POSITIONS: list[Path] = [(str(number),) for number in range(64)]


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, Path]]:
    """The tensors among the arguments of a call, with their paths."""
    found: list[tuple[torch.Tensor, Path]] = []
    number = -1
    for value in args:
        number += 1
        kind = type(value)
        if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            found.append((value, POSITIONS[number] if number < 64 else (str(number),)))
        elif kind in _CONTAINERS:
            _inside(value, (str(number),), found)
    if kwargs:
        for key, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                found.append((value, (key,)))
            elif type(value) in _CONTAINERS:
                _inside(value, (key,), found)
    return found


def tensors_out(result: Any) -> list[tuple[torch.Tensor, Path]]:
    """The tensors that a call returned, with their paths."""
    if isinstance(result, torch.Tensor):
        return [(result, POSITIONS[0])]
    if isinstance(result, tuple | list | dict):
        found: list[tuple[torch.Tensor, Path]] = []
        _inside(result, (), found)
        return found
    return []


_CONTAINERS = frozenset([list, tuple, dict])


def _inside(value: Any, path: Path, found: list[tuple[torch.Tensor, Path]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            found.append((item, (*path, str(key))))
        elif isinstance(item, tuple | list | dict) and len(path) < 6:
            _inside(item, (*path, str(key)), found)
