"""Replicas that part: what a rank has after the reduction, against what rank 0 wrote."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tensorprobe.monitoring.alarm_rules import Suspicion
from tensorprobe.monitoring.series import Array, StepTable, StepValues
from tensorprobe.monitoring.series_files import segments
from tensorprobe.monitoring.step_lines import StepTail

KINDS = ("gradient", "parameter")
FIELDS = ("norm", "mean", "min", "max")
MOST = 64  # steps of this rank that wait for those of rank 0


class ReplicaWatch:
    """Reads what rank 0 writes, and compares each step with that of this rank.

    Only what both have had alike in an earlier step is a replica: parts of a sharded model differ
    from the beginning. Nothing is sent: where the folder is not shared, there is nothing to read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # of rank 0
        self._tail: StepTail | None = None
        self._number = -1  # of the segment that is read
        self._own: OrderedDict[int, StepValues] = OrderedDict()
        self._others: OrderedDict[int, StepValues] = OrderedDict()
        self._alike: dict[str, set[str]] = {kind: set() for kind in KINDS}

    def look(self, step: StepValues) -> Iterator[tuple[int, Suspicion]]:
        """What differs in steps that both ranks have by now, with the number of the step."""
        _hold(self._own, step)
        for other in self._read():
            _hold(self._others, other)
        for number in [each for each in self._own if each in self._others]:
            own, other = self._own.pop(number), self._others.pop(number)
            for kind in KINDS:
                yield from self._compare(kind, own, other)

    def _compare(
        self, kind: str, own: StepValues, other: StepValues
    ) -> Iterator[tuple[int, Suspicion]]:
        mine, theirs = own.tables.get(kind), other.tables.get(kind)
        if mine is None or theirs is None or mine.names != theirs.names:
            return
        same = _same(mine, theirs)
        alike = self._alike[kind]
        parted = [row for row in np.flatnonzero(~same).tolist() if mine.names[row] in alike]
        alike |= {mine.names[row] for row in np.flatnonzero(same).tolist()}
        if parted:
            row = parted[0]
            norms = float(mine.column("norm")[row]), float(theirs.column("norm")[row])
            more = f" and {len(parted) - 1} more" if parted[1:] else ""
            text = f"norm {norms[0]:.9g} here, {norms[1]:.9g} in rank 0: the replicas have parted"
            found = Suspicion(kind, mine.names[row] + more, own.step, text, *norms)
            yield own.step, found

    def _read(self) -> list[StepValues]:
        """The steps that rank 0 has written since this was asked."""
        found: list[StepValues] = []
        for _ in range(8):
            if self._tail is not None:
                found += self._tail.read()
            later = [
                each
                for each in segments(self._folder)
                if each.number > self._number and each.path.suffix == ".jsonl" and not each.level
            ]
            if not later:
                break
            if self._tail is not None:
                self._tail.close()
            # The first that is read is the newest: what was before it has no partner here.
            segment = later[0] if self._tail is not None else later[-1]
            self._number = segment.number
            try:
                self._tail = StepTail(segment.path, self._folder)
            except OSError:  # thinned meanwhile
                self._tail = None
        return found

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()


def _hold(steps: OrderedDict[int, StepValues], step: StepValues) -> None:
    tables = {kind: table for kind, table in step.tables.items() if kind in KINDS}
    steps[step.step] = step._replace(tables=tables)
    while len(steps) > MOST:
        steps.popitem(last=False)


def _same(one: StepTable, other: StepTable) -> Array:
    made: Array = np.logical_and.reduce(
        [
            (one.column(field) == other.column(field))
            | (np.isnan(one.column(field)) & np.isnan(other.column(field)))
            for field in FIELDS
        ]
    )
    return made
