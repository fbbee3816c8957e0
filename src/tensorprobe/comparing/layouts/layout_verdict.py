"""The verdict on two runs of a model, one on several ranks and the other in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.align import Pair
from tensorprobe.comparing.arguments import fact_differences
from tensorprobe.comparing.layouts.layout_steps import PlaceFound, StepComparison, StepResult
from tensorprobe.comparing.layouts.rank_weights import Held, RankWeights
from tensorprobe.comparing.layouts.recorded_ranks import RecordedRanks, draws
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.rank_facts import world_size
from tensorprobe.comparing.verdict import (
    Culprit,
    CulpritKind,
    MeasuredPlace,
    Status,
    Verdict,
    percent,
)
from tensorprobe.comparing.verdict import Place as CallPlace
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.parallel_layout import ParallelLayout, read_layout
from tensorprobe.records import Capture, TensorRecord, count

Array = np.ndarray[Any, Any]
_STATUS: dict[str, Status] = {
    "fine": "within", "undecided": "undecided", "wrong": "beyond", "unknown": "not compared",
}  # fmt: skip
_KINDS: dict[str, CulpritKind] = {
    "parameter": "parameter", "input": "input", "given": "input", "output": "output",
    "gradient": "gradient", "update": "output",
}  # fmt: skip
_PLACES: dict[str, Literal["output", "input", "parameter", "gradient"]] = {
    "parameter": "parameter", "input": "input", "given": "input", "output": "output",
    "gradient": "gradient", "update": "parameter",
}  # fmt: skip
_GROWN = 1e-3
_MOST = 16  # parts that a note lists


def have_other_layouts(actual: Capture, expected: Capture) -> bool:
    """Whether the runs had other numbers of ranks, as far as these are known. Ranks that nobody
    counted may be copies, or processes that never spoke: none is a part of the other run."""
    sizes = [
        world_size(capture) or (1 if len(capture.ranks) == 1 else None)
        for capture in (actual, expected)
        if capture.layout == "native"
    ]
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return False
    return None not in sizes


def _size(capture: Capture) -> int:
    return max(world_size(capture) or 1, len(capture.ranks))


class _Sides:
    """Which of the two has several ranks."""

    def __init__(self, actual: Capture, expected: Capture, step: int | None) -> None:
        self.captures = actual, expected
        self.is_swapped = _size(actual) == 1
        many, one = (expected, actual) if self.is_swapped else (actual, expected)
        self.many, self.one = RecordedRanks(many, step), RecordedRanks(one, step)

    def in_order(self, ours: object, theirs: object) -> tuple[object, object]:
        return (theirs, ours) if self.is_swapped else (ours, theirs)


def compare_layouts(
    actual: Capture, expected: Capture, layout: Path | None, step: int | None, rank: int | None
) -> tuple[list[CallPair], Verdict]:
    """Put together what the ranks have, and compare it with what one process has."""
    if rank is not None:
        raise BadUsage("runs of other layouts are compared as a whole: leave out `rank`")
    known = read_layout(layout) if layout is not None else None
    sides = _Sides(actual, expected, step)
    if known is not None and layout is not None:
        known.check(max(map(_size, (actual, expected))), layout)
    verdict = Verdict(
        verdict="match",
        actual=str(actual.path),
        expected=str(expected.path),
        mode="tensors",
        counts=dict.fromkeys(
            ("calls_actual", "calls_expected", "aligned", "only_actual", "only_expected",
             "diverged"), 0,
        ) | {"gaps": len(actual.gaps) + len(expected.gaps)},
        culprits=[],
        at=["parameters", "outputs", "gradients"],
        facts=fact_differences(actual.facts, expected.facts),
    )  # fmt: skip
    reason = _why_not(sides)
    if reason is not None:
        verdict.verdict, verdict.reason = "incomparable", reason
        return [], verdict
    try:
        found = _all_steps(sides, known, verdict)
    except (UnreadableCapture, OSError) as error:
        verdict.verdict, verdict.reason = "incomparable", f"{error}"
        return [], verdict
    pairs = _pairs(sides, found)
    verdict.boundaries = [_measured(sides, each) for each in found]
    verdict.counts["aligned"] = len(pairs)
    verdict.counts["diverged"] = sum(each.status == "wrong" for each in found)
    return pairs, verdict


def _why_not(sides: _Sides) -> str | None:
    """What keeps these runs from being compared at all."""
    if len(sides.one.ranks) > 1 or _size(sides.one.capture) > 1:
        sizes = " and ".join(str(_size(capture)) for capture in sides.captures)
        return (
            f"the runs have {sizes} ranks: what ranks have is put together by what one process "
            "has. Compare each of them with a run in one process"
        )
    if sides.many.steps != sides.one.steps and not {*sides.many.steps} & {*sides.one.steps}:
        return f"one side has steps {list(sides.many.steps)}, the other {list(sides.one.steps)}"
    whole = world_size(sides.many.capture) or len(sides.many.ranks)
    lost = sorted({*range(whole)} - {*sides.many.ranks})
    if lost:
        return (
            f"{listed(lost)} of {whole} {'was' if len(lost) == 1 else 'were'} not recorded in "
            f"'{sides.many.capture.path}': what they have is needed to put tensors together"
        )
    for run in (sides.many, sides.one):
        step = min(run.steps, default=0)
        has = [run.at(rank, step) for rank in run.ranks]
        where = f"'{run.capture.path}'"
        if not any(each.parameters for each in has):
            return (
                f"no modules with weights were recorded in {where}: runs of other layouts are "
                "compared at modules. Record with level='L0' or 'mix'"
            )
        kept = (p.record.blob is not None for each in has for p in each.parameters.values())
        if not all(kept):
            return (
                f"{where} keeps no tensors: parts of ranks can only be put together from them. "
                "Record with keep='tensors'"
            )
    return None


def _all_steps(sides: _Sides, layout: ParallelLayout | None, verdict: Verdict) -> list[PlaceFound]:
    """Compare step by step, up to the first that differs; the verdict is filled in."""
    found: list[PlaceFound] = []
    steps = sorted({*sides.many.steps} & {*sides.one.steps})
    first = steps[0]
    weights = RankWeights(
        sides.one.at(sides.one.ranks[0], first), sides.many.of_step(first), layout
    )
    verdict.notes += _notes(weights)
    inherited = 0.0
    updates: dict[str, tuple[Array, Array]] = {}
    for step in steps:
        one = sides.one.at(sides.one.ranks[0], step)
        ranks = sides.many.of_step(step)
        if not one.tree.modules or not any(has.tree.modules for has in ranks.values()):
            continue
        result = StepComparison(
            one, ranks, weights, facts=(sides.one.capture.facts, sides.many.capture.facts),
            is_first=step == first, inherited=inherited, updates=updates,
        ).result()  # fmt: skip
        found += result.found
        culprits = _culprits(sides, weights, result, step == first)
        if culprits and (call := draws(one.calls)) is not None and culprits[0].cause == "result":
            verdict.verdict = "incomparable"
            verdict.reason = (
                f"step {step}: {call.name} draws random numbers, which are others in another "
                "layout; turn dropout off, and record again"
            )
            return found
        if culprits:
            verdict.verdict, verdict.culprits = "diverged", culprits
            verdict.origins = sorted({rank for c in culprits[:1] for rank in _ranks_of(c, result)})
            return found
        if (reason := _open(weights, result, step, step == first)) is not None:
            verdict.verdict, verdict.reason = "incomparable", reason
            return found
        changed = [e for e in result.found if e.kind in ("parameter", "update")]
        inherited = max([inherited, *(e.error for e in changed)])
        grown = max((e.relative for e in changed), default=0.0)
        if grown > _GROWN and step != steps[-1]:
            verdict.notes.append(
                f"after step {step} parameters are up to {percent(grown)} apart: rounding that has "
                "grown by steps from gradients about zero; it hides smaller faults of later steps"
            )
        updates = {
            name: (one.gradients[name].array(), place.array())
            for name, place in one.parameters.items()
            if name in one.gradients
        }
    _tell_steps(sides, verdict)
    return found


def _tell_steps(sides: _Sides, verdict: Verdict) -> None:
    odd = sorted({*sides.many.steps} ^ {*sides.one.steps})
    units = [
        run.at(rank, step) for run in (sides.many, sides.one) for step in odd
        if step in run.steps for rank in run.ranks
    ]  # fmt: skip
    if any(each.tree.modules for each in units):
        verdict.verdict = "incomparable"
        verdict.reason = f"step {odd[0]} is only in one of the runs; all before it agrees"


def _culprits(
    sides: _Sides, weights: RankWeights, result: StepResult, is_first: bool
) -> list[Culprit]:
    """What is named, if an effect is wrong: weights, their order, data, results, gradients."""
    wrong = [each for each in result.found if each.status == "wrong"]
    effects = [each for each in wrong if each.is_effect]
    if not effects:
        return []
    of_kind: dict[str, list[PlaceFound]] = {}
    for each in wrong:
        of_kind.setdefault("output" if each.kind == "given" else each.kind, []).append(each)
    first: PlaceFound | None = None
    if "parameter" in of_kind:
        first = of_kind["parameter"][0]
    elif {"output", "gradient"} & of_kind.keys():  # what was given, and then what was made of it
        if swapped := weights.swapped():
            return [_swapped(sides, *swapped[0], result)]
        odd = weights.out_of_order()
        if odd:
            return [_ordered(sides, weights, odd, result)]
    if first is None:
        for kind in ("input", "output", "gradient", "update"):
            if kind in of_kind:
                first = _telling(of_kind[kind])
                break
    assert first is not None
    return [_culprit(sides, first, len(wrong) - 1)]


def _telling(found: Sequence[PlaceFound]) -> PlaceFound:
    """The first, unless a cause is known of one that is as early."""
    first = found[0]
    if first.kind == "gradient" and first.cause == "result":
        first = found[-1]  # backward begins at the last module
    same = [each for each in found if each.name == first.name or first.kind == "gradient"]
    return next((each for each in same if each.cause == "structure"), first)


def _swapped(sides: _Sides, held: Held, other: Held, result: StepResult) -> Culprit:
    paths = [each.name.rpartition(".")[0] for each in (held, other)]
    there = [each.whole.rpartition(".")[0] for each in (held, other)]
    reason = (
        f"weights are swapped: on rank {held.rank} {paths[0]} has those of {there[0]}, and "
        f"{paths[1]} those of {there[1]}"
    )
    named = next(
        each for each in result.found
        if each.kind == "parameter" and each.rank == held.rank and each.name == held.whole
    )  # fmt: skip
    wrong = sum(each.status == "wrong" for each in result.found)
    return _culprit(sides, named._replace(cause="weights", reason=reason), wrong)


def _ordered(
    sides: _Sides, weights: RankWeights, odd: Sequence[Held], result: StepResult
) -> Culprit:
    held = odd[0]
    assert held.part.piece is not None
    _, n = held.part.piece
    usual = weights.usual(held.rank, n)
    named = next(
        each for each in result.found
        if each.kind == "parameter" and each.rank == held.rank and each.name == held.whole
    )  # fmt: skip
    ranks = sorted({each.rank for each in odd})
    reason = (
        f"wrong shard order: rank {held.rank} has {held.part} of {held.name}, and piece {usual} "
        f"of its other weights (on {listed(ranks)})"
    )
    wrong = sum(each.status == "wrong" for each in result.found)
    return _culprit(
        sides, named._replace(cause="structure", reason=reason, ranks=tuple(ranks)), wrong
    )


def _open(weights: RankWeights, result: StepResult, step: int, is_first: bool) -> str | None:
    """Why it is no match, though nothing is wrong."""
    if is_first and weights.unknown:
        rank, name = weights.unknown[0]
        return (
            f"{name} of rank {rank} is no part of a parameter of the one process that could be "
            f"found ({count(len(weights.unknown), 'parameter')} of this kind)"
        )
    if is_first and (lost := weights.missing()):
        return f"no rank has all of {lost[0]} ({count(len(lost), 'parameter')} of this kind)"
    if result.unknown:
        return f"step {step}: {result.unknown[0]}"
    undecided = [e for e in result.found if e.status == "undecided" and e.is_effect]
    if undecided:
        first = undecided[0]
        return (
            f"step {step}: {first.kind} {first.name or 'of the model'} on rank {first.rank} is off "
            f"by {first.error:,.0f} roundings, where {first.limit:.0f} are explained: nobody can "
            "tell whether that is rounding. All before it agrees"
        )
    if not any(each.is_effect and each.kind != "parameter" for each in result.found):
        return f"step {step}: no result of the model and no gradient could be compared"
    return None


def _notes(weights: RankWeights) -> Iterable[str]:
    cut = [held for held in weights.held.values() if not held.part.is_whole and held.found]
    texts: dict[str, list[int]] = {}
    for held in cut:
        pieces = held.part.piece
        what = f"{held.whole} in {pieces[1]} pieces" if pieces else f"{held.whole} in parts"
        texts.setdefault(what, []).append(held.rank)
    if texts:
        shown = ", ".join(list(texts)[:4]) + (f" and {len(texts) - 4} more" * (len(texts) > 4))
        yield f"parameters were put together from what ranks have: {shown}"
    renamed = {
        f"{ours} of rank {rank} is {theirs}"
        for rank, paths in weights.paths.items()
        for ours, theirs in paths.items()
        if ours != theirs
    }
    if renamed:
        names = ", ".join(sorted(renamed)[: _MOST // 4])
        yield f"{count(len(renamed), 'module')} paired by the weights they hold: {names}"


def _culprit(sides: _Sides, found: PlaceFound, affected: int) -> Culprit:
    mine, other = sides.in_order(found.ours, found.theirs)
    call, there = mine.call, other.call  # type: ignore[attr-defined]
    return Culprit(
        name=call.name,
        cause=found.cause,
        kind=_KINDS[found.kind],
        direction="backward" if found.kind == "gradient" else call.direction,
        step=call.step,
        rank=found.rank,
        module=call.module,
        op=call.op,
        stack=call.stack,
        reason=found.reason,
        own_error=found.error,
        inherited_error=0.0,
        affected=affected,
        tensor=found.ours.record.name,
        expected=CallPlace(there.name, there.step, there.rank),
        proof="compared",
    )


def _ranks_of(culprit: Culprit, result: StepResult) -> Iterable[int]:
    for each in result.found:
        if each.reason == culprit.reason:
            return each.ranks
    return (culprit.rank,)


def _measured(sides: _Sides, found: PlaceFound) -> MeasuredPlace:
    tensor = found.ours.record.name.removeprefix(found.ours.call.name + ".")
    names = sides.in_order(found.ours.call.module, found.theirs.call.module)
    return MeasuredPlace(
        actual=str(names[0]), expected=str(names[1]), tensor=tensor,
        kind=_PLACES[found.kind],
        call=found.ours.call.name, step=found.ours.call.step, rank=found.rank, error=found.error,
        relative=found.relative, limit=found.limit or None,
        status="equal" if not found.error and found.status == "fine" else _STATUS[found.status],
        note=found.how or None,
    )  # fmt: skip


def _pairs(sides: _Sides, found: Iterable[PlaceFound]) -> list[CallPair]:
    """What was compared, by call; in the order in which the ranks made them."""
    pairs: dict[tuple[int, int], CallPair] = {}
    for each in found:
        mine, other = (each.theirs, each.ours) if sides.is_swapped else (each.ours, each.theirs)
        name = each.ours.record.name.removeprefix(each.ours.call.name + ".")
        row = TensorPair(name, _bare(mine.record), _bare(other.record), distance=each.error)
        if mine.record.shape != other.record.shape:
            row.problem = f"compared as a part: {each.how}" if each.how else "compared as a part"
        pair = CallPair(Pair(mine.call, other.call, "mapped"), [])
        pairs.setdefault((id(mine.call), id(other.call)), pair).tensors.append(row)
    return sorted(pairs.values(), key=lambda each: (each.call.rank, each.call.index))


def _bare(record: TensorRecord) -> TensorRecord:
    return msgspec.structs.replace(record, digest=None, summary=None)
