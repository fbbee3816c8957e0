"""What is kept of a rank once it has been read: small, and enough for what concerns all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tensorprobe.collectives.links import kind_of
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.opaque import opaque_modules
from tensorprobe.comparing.received import RankGave, gave
from tensorprobe.comparing.rounding import (
    ROUNDING,
    Mode,
    content_mode,
    distance,
)
from tensorprobe.comparing.scene import sees_operators
from tensorprobe.comparing.units import Unit, is_beside, is_outside
from tensorprobe.records import IN_MEMORY, LAST_NODE, Call, Gap, kind_of_digest

Counts = tuple[int, int, int]  # calls of the actual side, of the expected side, and pairs
FirstDifference = tuple[float, int]


class UnitSurvey(msgspec.Struct):
    """One step of one rank: whether both sides do the same there."""

    unit: Unit
    of_model: Counts
    of_all: Counts
    has_modules: bool  # or steps of optimizers
    last: tuple[int, int]  # of each side, the place of its last call among the pairs; else -1
    has_own_effect: tuple[bool, bool]  # an effect of one side only, if actual or expected is short


class CallsSeen(msgspec.Struct):
    """What has to be known of all calls of a capture, or of one of its ranks."""

    n_calls: int = 0
    steps: set[int] = msgspec.field(default_factory=set)
    first_name: str | None = None
    digests: set[str] = msgspec.field(default_factory=set)  # the kinds
    ends_at_last_node: set[bool] = msgspec.field(default_factory=set)
    world_size: int | None = None  # by the groups it speaks in

    def add(self, other: CallsSeen) -> None:
        """Take in those of the next rank."""
        self.n_calls += other.n_calls
        self.steps |= other.steps
        if self.first_name is None:
            self.first_name = other.first_name
        self.digests |= other.digests
        self.ends_at_last_node |= other.ends_at_last_node
        sizes = [size for size in (self.world_size, other.world_size) if size is not None]
        self.world_size = max(sizes, default=None)


class SideSurvey(msgspec.Struct):
    """What one side has of a rank."""

    seen: CallsSeen
    n_calls: dict[int, int]  # by step, of those that are compared
    beside: set[int]  # the steps that have no call of the model, nor of an optimizer
    gaps: list[Gap] = []
    end_gaps: list[Gap] = []
    unfinished: list[str] = []
    unopened: list[str] = []


class RankSurvey(msgspec.Struct):
    """One rank of both sides."""

    rank: int
    n_pairs: int
    n_rows: int  # of a table
    units: list[UnitSurvey]
    modes: dict[Mode, int]
    sees_operators: bool
    autocast: dict[int, float]  # the coarsest unit that autocast gives to modules, by step
    coarse: dict[int, float]  # the same as it was used
    switches: dict[str, int]  # what coarser products there are, and how many
    dtypes: dict[tuple[str, str], int]
    gave: RankGave
    first_difference: FirstDifference
    sides: tuple[SideSurvey, SideSurvey] | None = None
    measured: bytes = b""  # the metrics of its tensors, so that these are read once


def calls_seen(calls: Sequence[Call]) -> CallsSeen:
    """What has to be known of these calls."""
    groups = [call.collective.group for call in calls if call.collective is not None]
    return CallsSeen(
        n_calls=len(calls),
        steps={call.step for call in calls},
        first_name=calls[0].name if calls else None,
        digests={
            kind_of_digest(record.digest) or "tensorprobe"
            for call in calls
            for record in call.tensors
            if record.digest and not record.digest.startswith(IN_MEMORY)
        },
        ends_at_last_node={
            LAST_NODE in call.notes for call in calls if call.direction == "backward"
        },
        world_size=max((max(group, default=-1) + 1 for group in set(groups)), default=None),
    )


def side_survey(calls: Sequence[Call], units: Mapping[Unit, Sequence[Call]]) -> SideSurvey:
    """What a side has of a rank; `units` are those of its calls that are compared."""
    return SideSurvey(
        seen=calls_seen(calls),
        n_calls={step: len(found) for (_, step), found in units.items()},
        beside={step for (_, step), found in units.items() if all(map(is_beside, found))},
    )


def survey(
    rank: int,
    pairs: Sequence[CallPair],
    *,
    switches: dict[str, int],
    dtypes: dict[tuple[str, str], int],
    autocast: dict[int, float],
    coarse: dict[int, float],
) -> RankSurvey:
    """Look through the measured pairs of one rank."""
    modes: dict[Mode, int] = {}
    for pair in pairs:
        for row in pair.tensors:
            mode = content_mode(row)
            modes[mode] = modes.get(mode, 0) + 1
    return RankSurvey(
        rank=rank,
        n_pairs=len(pairs),
        n_rows=sum(len(pair.tensors) or 1 for pair in pairs),
        units=_units(pairs),
        modes=modes,
        sees_operators=any(map(sees_operators, pairs)),
        autocast=autocast,
        coarse=coarse,
        switches=switches,
        dtypes=dtypes,
        gave=gave(pairs),
        first_difference=_first_difference(pairs),
    )


def _units(pairs: Sequence[CallPair]) -> list[UnitSurvey]:
    within = {at for inside in opaque_modules(pairs).values() for at in inside}
    places: dict[Unit, list[int]] = {}
    for i, pair in enumerate(pairs):
        places.setdefault((pair.call.rank, pair.call.step), []).append(i)
    found = []
    for unit, at in places.items():
        outside = [i for i in at if i not in within]
        mine = [pairs[i] for i in outside]
        found.append(
            UnitSurvey(
                unit=unit,
                of_model=_counts(pair for pair in mine if not _is_beside_model(pair)),
                of_all=_counts(pairs[i] for i in at),
                has_modules=any(
                    pair.call.name.startswith(("Module.", "Optimizer.")) for pair in mine
                ),
                last=(_last(pairs, outside, 0), _last(pairs, outside, 1)),
                has_own_effect=(_has_own_effect(mine, 0), _has_own_effect(mine, 1)),
            )
        )
    return found


def _counts(pairs: Iterable[CallPair]) -> Counts:
    actual = expected = paired = 0
    for pair in pairs:
        actual += pair.pair.actual is not None
        expected += pair.pair.expected is not None
        paired += pair.is_paired
    return actual, expected, paired


def _last(pairs: Sequence[CallPair], places: Sequence[int], side: int) -> int:
    return next((i for i in reversed(places) if pairs[i].pair[side] is not None), -1)


def _has_own_effect(pairs: Sequence[CallPair], shorter: int) -> bool:
    """Whether only one side has an effect, or the shorter one a call of the whole model."""
    for pair in pairs:
        if pair.is_paired:
            continue
        call = pair.call
        is_root = call.name.startswith("Module.") and call.parent is None
        if call.name.startswith("Optimizer.") or ".parameters_grad." in call.name:
            return True
        if is_root and call.direction == "forward" and pair.pair[shorter] is not None:
            return True
    return False


def _is_beside_model(pair: CallPair) -> bool:
    """Whether a call is a step of an optimizer's, or outside of all modules in forward."""
    return (pair.call.parent or "").startswith("Optimizer.") or is_outside(pair.call)


def are_one_program(surveys: Sequence[RankSurvey], narrow: tuple[bool, bool]) -> bool:
    """Whether at least half of the model's calls align, in the ranks and steps of both sides.

    Optimizers step in several ways, and set-up is no part of the model: they do not count, nor what
    only one side shows inside of a module. Where one side was told to record some calls only, or
    makes more calls than the other with the same effects, those of the other are what could align.
    """
    if not any(unit.of_all[2] for each in surveys for unit in each.units):
        return False
    common = _common_units(surveys)
    ours, theirs, aligned = (sum(count[n] for *_, count in common) for n in range(3))
    if aligned * 2 >= max(ours, theirs):
        return True
    shorter = 0 if ours < theirs else 1
    mine = [(rank, unit) for rank, unit, _ in common]
    return aligned * 2 >= min(ours, theirs) and (any(narrow) or _effects_align(mine, shorter))


def aligned_of_model(surveys: Sequence[RankSurvey]) -> tuple[int, int]:
    """How many of the model's calls align, of how many that one side makes at least."""
    counts = [count for *_, count in _common_units(surveys)]
    if not any(count[2] for count in counts):
        counts = [unit.of_all for each in surveys for unit in each.units]
    ours, theirs, aligned = (sum(count[n] for count in counts) for n in range(3))
    return aligned, max(ours, theirs)


def _common_units(
    surveys: Sequence[RankSurvey],
) -> list[tuple[int, UnitSurvey, tuple[int, int, int]]]:
    """What counts as the model's calls, by rank and step: those that both sides have."""
    units = [(each.rank, unit) for each in surveys for unit in each.units]
    counts = [(rank, unit, unit.of_model) for rank, unit in units if any(unit.of_model)]
    if not counts:
        counts = [(rank, unit, unit.of_all) for rank, unit in units]
    return [each for each in counts if each[2][0] and each[2][1]] or counts


def _effects_align(units: Sequence[tuple[int, UnitSurvey]], shorter: int) -> bool:
    """Whether both sides have the same effects, and the longer one only more calls: it evaluates
    the model in between, say, or does the same in smaller steps."""
    if any(unit.has_modules for _, unit in units):
        return not any(unit.has_own_effect[shorter] for _, unit in units)
    last = [
        max(((n, unit.last[side]) for n, (_, unit) in _by_rank(units) if unit.last[side] >= 0),
            default=None)
        for side in (0, 1)
    ]  # fmt: skip
    return last[0] is not None and last[0] == last[1]


def _by_rank(
    units: Sequence[tuple[int, UnitSurvey]],
) -> Iterable[tuple[int, tuple[int, UnitSurvey]]]:
    """Each unit with the place of its rank among these."""
    places: dict[int, int] = {}
    for each in units:
        yield places.setdefault(each[0], len(places)), each


def _first_difference(pairs: Sequence[CallPair]) -> FirstDifference:
    """The step of the first call that differs, and how many communications are before it."""
    step, before = None, 0
    for pair in pairs:
        call = pair.call
        if call.step != step:
            step, before = call.step, 0
        before += kind_of(call) is not None
        if not pair.is_paired or any(
            row.role == "output" and distance(row) > ROUNDING for row in pair.tensors
        ):
            return call.step, before
    return math.inf, 0
