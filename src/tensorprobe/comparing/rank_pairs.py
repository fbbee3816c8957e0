"""The pairs of one rank: read, aligned and measured; and made again, as they were, when needed."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from tensorprobe.comparing.align import Pair, align
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import CallPair, Workers, measure, pair_tensors
from tensorprobe.comparing.rank_survey import RankSurvey, SideSurvey, side_survey, survey
from tensorprobe.comparing.rank_switches import RankSwitches
from tensorprobe.comparing.rounding import (
    autocast_units,
    coarsen,
    coarsen_modules,
    dtypes_found,
)
from tensorprobe.comparing.scene import sees_operators
from tensorprobe.comparing.units import Units, are_one_each, renumbered, units_of
from tensorprobe.garbage import no_garbage
from tensorprobe.records import Call, Capture
from tensorprobe.store.rank_folders import read_rank


class RankPart(msgspec.Struct):
    """One rank of both sides: where it is, and what is known of it after it was read once."""

    rank: int
    steps: tuple[list[Path], list[Path]] = ([], [])
    coarse: dict[int, float] | None = None  # see rounding.coarsen_modules; None: not known yet
    measured: bytes = b""
    anew: bytes = b""  # the rows that hold numbers made anew, as the scene has settled it


class RankPairs(NamedTuple):
    """The pairs of one rank."""

    pairs: list[CallPair]
    unfinished: tuple[set[str], set[str]]  # steps of each side


class RankSource(Protocol):
    """Where the pairs of each rank come from."""

    switches: RankSwitches

    def survey(self, part: RankPart) -> RankSurvey:
        """Read a rank, and say what is to be kept of it."""

    def pairs(self, part: RankPart) -> RankPairs:
        """The pairs of a rank that has been surveyed."""


class FolderRanks:
    """Ranks of two runs that are read when they are asked for, and not kept."""

    def __init__(
        self,
        paths: tuple[Path, Path],
        switches: RankSwitches,
        mapping: CallMapping,
        step: int | None,
    ) -> None:
        self._paths = paths
        self.switches = switches
        self._mapping = mapping
        self._step = step
        self.workers: Workers | None = None  # that measure, where ranks are not spread

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "workers": None}

    def survey(self, part: RankPart) -> RankSurvey:
        with no_garbage():
            pairs, sides, _ = self._read(part)
            if part.measured:
                _restore_metrics(pairs, part.measured)
            else:
                measure(pairs, workers=self.workers)
            found = surveyed(pairs, part, self.switches)
            found.sides = sides
            found.measured = part.measured or _stored_metrics(pairs)
            return found

    def pairs(self, part: RankPart) -> RankPairs:
        with no_garbage():
            pairs, _, unfinished = self._read(part)
            _restore_metrics(pairs, part.measured)
            coarsen(pairs, self.switches.facts)
            coarsen_modules(pairs, part.coarse or {})
            restore_anew(pairs, part.anew)
            return RankPairs(pairs, unfinished)

    def _read(
        self, part: RankPart
    ) -> tuple[list[CallPair], tuple[SideSurvey, SideSurvey], tuple[set[str], set[str]]]:
        sides = [read_rank(*each) for each in zip(self._paths, part.steps, strict=True)]
        ours, theirs = (units_of(side.calls, self._step, None) for side in sides)
        surveys = []
        for side, units in zip(sides, (ours, theirs), strict=True):
            found = side_survey(side.calls, units)
            found.gaps, found.end_gaps = side.gaps, side.end_gaps
            found.unfinished, found.unopened = side.unfinished, side.unopened
            surveys.append(found)
        pairs = [pair_tensors(pair) for pair in aligned(ours, theirs, self._mapping)]
        unfinished = set(sides[0].unfinished), set(sides[1].unfinished)
        return pairs, (surveys[0], surveys[1]), unfinished


class LoadedRanks:
    """Ranks of two captures that are in memory."""

    def __init__(
        self,
        actual: Capture,
        expected: Capture,
        mapping: CallMapping,
        step: int | None,
        rank: int | None,
    ) -> None:
        self.ours = units_of(actual.calls, step, rank)
        self.theirs = renumbered(self.ours, units_of(expected.calls, step, rank))
        self._unfinished = tuple(
            set(capture.facts.get("unfinished") or ()) for capture in (actual, expected)
        )
        if self.ours and self.theirs:
            pairs = [pair_tensors(pair) for pair in aligned(self.ours, self.theirs, mapping)]
        else:
            pairs = []
        self.all = pairs
        self._by_rank = by_rank(pairs)
        self.switches = RankSwitches((actual.facts, expected.facts), list(self._by_rank))

    def parts(self) -> list[RankPart]:
        """The ranks, when all pairs have been measured."""
        coarse: dict[int, float] = {}
        if not any(map(sees_operators, self.all)):
            coarse = autocast_units(self.all)
        return [RankPart(rank, coarse=coarse) for rank in self._by_rank]

    def survey(self, part: RankPart) -> RankSurvey:
        return surveyed(self._by_rank[part.rank], part, self.switches)

    def pairs(self, part: RankPart) -> RankPairs:
        return RankPairs(self._by_rank[part.rank], self._unfinished)  # type: ignore[arg-type]


def surveyed(pairs: list[CallPair], part: RankPart, known: RankSwitches) -> RankSurvey:
    """A survey of measured pairs, which are judged by the coarser units from here on."""
    switches = coarsen(pairs, known.facts)
    autocast = autocast_units(pairs)
    coarse = part.coarse
    if coarse is None:
        coarse = {} if any(map(sees_operators, pairs)) else autocast
    coarsen_modules(pairs, coarse)
    return survey(
        part.rank,
        pairs,
        switches=switches,
        dtypes=dtypes_found(pairs),
        autocast=autocast,
        coarse=coarse,
    )


def aligned(ours: Units, theirs: Units, mapping: CallMapping) -> list[Pair]:
    """The calls of both sides, step by step of each rank."""
    if are_one_each(ours, theirs):
        ((_, calls),) = ours.items()
        ((_, others),) = theirs.items()
        return align(calls, others, mapping)
    pairs: list[Pair] = []
    for key in sorted({*ours, *theirs}):
        pairs += align(ours.get(key, []), theirs.get(key, []), mapping)
    return pairs


def by_rank(pairs: Sequence[CallPair]) -> dict[int, list[CallPair]]:
    """The pairs of each rank, in order; of one rank on either side, whatever its number, all."""
    sides = [{c.rank for p in pairs if isinstance(c := p.pair[side], Call)} for side in (0, 1)]
    if len(sides[0]) == 1 and len(sides[1]) <= 1:
        return {sides[0].pop(): list(pairs)}
    found: dict[int, list[CallPair]] = {}
    for pair in pairs:
        found.setdefault(pair.call.rank, []).append(pair)
    return dict(sorted(found.items()))


def _stored_metrics(pairs: Iterable[CallPair]) -> bytes:
    """The metrics and problems of all rows, in order; nothing where no row has any."""
    found = [(row.metrics, row.problem) for pair in pairs for row in pair.tensors]
    if not any(metrics is not None or problem for metrics, problem in found):
        return b""
    return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)


def _restore_metrics(pairs: Iterable[CallPair], stored: bytes) -> None:
    if not stored:
        return
    rows = (row for pair in pairs for row in pair.tensors)
    for row, (metrics, problem) in zip(rows, pickle.loads(stored), strict=True):
        row.metrics, row.problem = metrics, problem


def stored_anew(pairs: Iterable[CallPair]) -> bytes:
    """Which rows hold numbers that were made anew."""
    rows = (row for pair in pairs for row in pair.tensors)
    return array("I", [i for i, row in enumerate(rows) if row.is_made_anew]).tobytes()


def restore_anew(pairs: Iterable[CallPair], stored: bytes) -> None:
    """Settle it again as it was."""
    if not stored:
        return
    places = set(array("I", stored))
    for i, row in enumerate(row for pair in pairs for row in pair.tensors):
        row.is_made_anew = i in places
