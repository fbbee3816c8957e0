"""What a monitor has written, read again as trends: numbers over steps. No torch."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.errors import BadArtefact, BadUsage
from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.monitor_file import (
    ALARMS,
    FACTS,
    read_alarms,
    read_attempts,
    read_facts,
)
from tensorprobe.monitoring.series import Array, StepValues
from tensorprobe.monitoring.series_files import read_segment, segments
from tensorprobe.parts import NamedParts

# The module of each: `recognises(path)`, and `read_trends(path)`, which gives a list of Trends.
SERIES_FILES = NamedParts("series", {"msprobe": "tensorprobe.peers.msprobe.msprobe_monitor_files"})
SCALAR = "scalar"
TOTAL = "total"  # the name of the norm of all rows of a kind together
_RANK = re.compile(r"rank(\d+)")
_MOST_GAPS = 100


class TrendKey(NamedTuple):
    """A number that is followed: the norm of `kind` of `name`, or a scalar."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name if self.kind == SCALAR else f"{self.kind} {self.name}"


class Trend(NamedTuple):
    """Its values by step; steps ascend."""

    steps: Array
    values: Array


class Trends(NamedTuple):
    """What one rank has written."""

    path: Path
    rank: int
    facts: dict[str, Any]
    trends: dict[TrendKey, Trend]
    alarms: list[Alarm]
    gaps: list[str]

    @property
    def steps(self) -> Array:
        """All steps that have something, ascending."""
        every = [trend.steps for trend in self.trends.values()]
        return np.unique(np.concatenate(every)) if every else np.empty(0, int)


def read_trends(path: Path) -> list[Trends]:
    """The trends of each rank; BadArtefact says what is wrong with the path."""
    if not path.exists():
        raise BadUsage(f"no such file or folder: '{path}'")
    ranks = rank_folders(path)
    if ranks:
        return [_read(folder, rank) for rank, folder in ranks]
    for name in SERIES_FILES:
        reader = SERIES_FILES.module(name)
        if reader.recognises(path):
            found: list[Trends] = reader.read_trends(path)
            return found
    raise BadArtefact(
        f"'{path}' holds no trends: expected the folder of a monitor (tensorprobe run --monitor "
        "DIR, or tp.Monitor), or the output of msprobe's monitor"
    )


def rank_folders(path: Path) -> list[tuple[int, Path]]:
    """The folders of the ranks in that of a monitor, or in that of one rank."""
    if not path.is_dir():
        return []
    if segments(path) or (path / FACTS).is_file():
        name = _RANK.fullmatch(path.resolve().name)
        return [(int(name[1]) if name else 0, path)]
    found = []
    for folder in path.iterdir():
        name = _RANK.fullmatch(folder.name)
        if not name or folder.is_symlink() or not folder.is_dir():
            continue
        if segments(folder) or (folder / FACTS).is_file():
            found.append((int(name[1]), folder))
    return sorted(found)


def read_steps(folder: Path, tell: Callable[[str], None]) -> Iterator[StepValues]:
    """The steps of a rank in order; those that a later start has made again come once."""
    attempts = [(each["first_segment"], each["first_step"]) for each in read_attempts(folder)]
    for segment in segments(folder):
        over = [first for number, first in attempts if number > segment.number]
        last = min(over, default=None)
        for step in read_segment(segment, folder, tell):
            if last is None or step.step < last:
                yield step


def collect(steps: Iterator[StepValues]) -> dict[TrendKey, Trend]:
    """Norms and scalars over all steps."""
    held: dict[TrendKey, tuple[array[int], array[float]]] = {}

    def add(kind: str, name: str, step: int, value: float) -> None:
        key = TrendKey(kind, name)
        known = held.get(key)
        if known is None:
            known = held[key] = array("q"), array("d")
        if not known[0] or step > known[0][-1]:
            known[0].append(step)
            known[1].append(value)

    for step in steps:
        for name, value in step.scalars.items():
            add(SCALAR, name, step.step, value)
        for kind, table in step.tables.items():
            for name, norm in zip(table.names, table.column("norm").tolist(), strict=True):
                add(kind, name, step.step, norm)
        norm_of_all = step.total_norm()
        if norm_of_all is not None:
            add("gradient", TOTAL, step.step, norm_of_all)
    return {
        key: Trend(np.array(numbers, np.int64), np.array(values, np.float64))
        for key, (numbers, values) in held.items()
    }


def _read(folder: Path, rank: int) -> Trends:
    gaps: list[str] = []

    def tell(text: str) -> None:
        if len(gaps) < _MOST_GAPS:
            gaps.append(text)

    facts: dict[str, Any] = {}
    try:
        facts = read_facts(folder)
    except ValueError as error:
        tell(f"{FACTS}: {error}")
    alarms = read_alarms(folder, tell) if (folder / ALARMS).exists() else []
    return Trends(folder, rank, facts, collect(read_steps(folder, tell)), alarms, gaps)
