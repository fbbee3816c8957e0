"""The verdict of a comparison at chosen places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorprobe.comparing.arguments import fact_differences
from tensorprobe.comparing.mapping import NO_MAPPING, plain_path
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.places.boundaries import MODULES, Tree
from tensorprobe.comparing.places.chosen import FoundPlace, PlaceResults, compare_rank
from tensorprobe.comparing.places.place_limits import UNSURE, Floors, Limits, noise_floors
from tensorprobe.comparing.places.row_pairs import AUTO, Fork, Rows, parse_rows
from tensorprobe.comparing.places.weights import Twins, is_quantised
from tensorprobe.comparing.rounding import Mode, content_mode, number_text
from tensorprobe.comparing.verdict import Culprit, Place, RowCounts, Verdict, measured_text, percent
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.records import Call, Capture, count

_NAMES = 3
_HOW = {"weights": "weights", "content": "weights", "place": "place"}  # without being told


class Wanted(NamedTuple):
    """What a user asks for at chosen places."""

    at: tuple[str, ...]
    rows: Rows
    within: float | None
    mapping: CallMapping


def wanted(
    at: tuple[str, ...], rows: str | None, within: float | None, mapping: CallMapping
) -> Wanted:
    """The same, if it makes sense."""
    if within is not None and not 0 <= within < math.inf:
        raise BadUsage(f"within={within}: expected a share of a tensor's size, such as 1e-3")
    return Wanted(at, parse_rows(rows or AUTO), within, mapping)


Proposed = dict[str, str | list[str]]


def compare_chosen(
    actual: Capture,
    expected: Capture,
    places: Wanted,
    noise: Sequence[Capture],
    step: int | None,
    rank: int | None,
) -> tuple[list[CallPair], Verdict, Proposed]:
    """Pairs, the verdict, and the names of modules that were paired by their weights."""
    every: list[Judged] = []
    for ours, theirs in _ranks(actual, expected, rank):
        there = _tree(expected, "expected", theirs, step)
        trees = _tree(actual, "actual", ours, step), there
        results = compare_rank((actual, expected), trees, places.at, places.rows, places.mapping)
        floors: Floors | None = None
        if noise:
            floors = noise_floors([
                compare_rank(
                    (run, expected), (_tree(run, "noise", theirs, step), there),
                    places.at, places.rows, NO_MAPPING,
                )
                for run in noise
            ])  # fmt: skip
        facts = (actual.facts, expected.facts)
        limits = Limits(results, facts, within=places.within, floors=floors)
        limits.judge()
        every.append(Judged(results, limits))
    return _settled(actual, expected, places, every)


class Judged(NamedTuple):
    """What was found in one rank, with its limits."""

    results: PlaceResults
    limits: Limits


def _ranks(actual: Capture, expected: Capture, rank: int | None) -> list[tuple[int, int]]:
    """The ranks to compare: those of one number, or the only one of each side."""
    if rank is not None:
        return [(rank, rank)]
    if len(actual.ranks) == len(expected.ranks) == 1:
        return [(actual.ranks[0], expected.ranks[0])]
    return [(n, n) for n in sorted({*actual.ranks, *expected.ranks})]


def _tree(capture: Capture, side: str, rank: int, step: int | None) -> Tree:
    calls = [c for c in capture.calls if c.rank == rank and (step is None or c.step == step)]
    if not calls:
        raise UnreadableCapture(
            f"nothing to compare: {side} '{capture.path}' has no calls of rank {rank}"
            + (f", step {step}" if step is not None else "")
            + f"; it has steps {list(capture.steps)} and ranks {list(capture.ranks)}"
        )
    return Tree(calls)


def _settled(
    actual: Capture, expected: Capture, places: Wanted, every: Sequence[Judged]
) -> tuple[list[CallPair], Verdict, Proposed]:
    found = [each for judged in every for each in judged.results.found]
    pairs = _by_call(found)
    compared = sum(pair.is_paired for pair in pairs)
    verdict = Verdict(
        verdict="match",
        actual=str(actual.path),
        expected=str(expected.path),
        mode=_mode(pairs),
        counts={
            "calls_actual": len(pairs),
            "calls_expected": compared,
            "aligned": compared,
            "only_actual": len(pairs) - compared,
            "only_expected": 0,
            "diverged": sum(each.measured.status == "beyond" for each in found),
            "gaps": len(actual.gaps) + len(expected.gaps),
        },
        culprits=[],
        facts=fact_differences(actual.facts, expected.facts),
        at=list(places.at),
        within=places.within,
        boundaries=[each.measured for each in found],
    )
    rows = [judged.results.rows for judged in every]
    verdict.rows = RowCounts(
        sum(each.compared for each in rows),
        sum(each.only_actual for each in rows),
        sum(each.only_expected for each in rows),
    )
    culprit = _culprit(every)
    if culprit is not None:
        verdict.verdict = "diverged"
        verdict.culprits = [culprit]
    elif (reason := _why_not(places, every) or _unpaired(verdict.rows, every)) is not None:
        verdict.verdict = "incomparable"
        verdict.reason = reason
    verdict.notes = list(_notes(places, every))
    return pairs, verdict, _proposed(every)


def _by_call(found: Sequence[FoundPlace]) -> list[CallPair]:
    """The tensors that were measured, as those of one pair of calls each."""
    pairs: dict[tuple[int, int], CallPair] = {}
    for each in found:
        key = (id(each.pair.pair.actual), id(each.pair.pair.expected))
        if key in pairs:
            pairs[key].tensors.append(each.row)
        else:
            pairs[key] = CallPair(each.pair.pair, [each.row])
    return list(pairs.values())


def _mode(pairs: Sequence[CallPair]) -> Mode:
    modes = [content_mode(row) for pair in pairs for row in pair.tensors if pair.is_paired]
    known: list[Mode] = [mode for mode in modes if mode != "structure"]
    return max(known, key=lambda mode: known.count(mode)) if known else "structure"


def _culprit(every: Sequence[Judged]) -> Culprit | None:
    """The first place at which the sides are apart by more than is allowed."""
    for results, limits in every:
        beyond = [each for each in results.found if each.measured.status == "beyond"]
        own = [each for each in beyond if each.is_own]
        if limits.within is not None:  # errors add up from layer to layer: which one adds most?
            own = [each for each in own if _adds_most(each)] or own
        forked = [(fork, each, why) for fork, each, why in results.forks if why]
        if own:
            drawn = [each for each in beyond if _is_drawn(each) and each.time <= own[0].time]
            first = (drawn or own)[0]
            culprit = _blame(first, len(beyond) - 1, results, limits)
            if drawn:
                culprit.cause = "seed"
                culprit.reason = f"random: {culprit.reason}"
            return culprit
        if forked:
            return _forked(*forked[0])
    return None


def _is_drawn(found: FoundPlace) -> bool:
    """Whether it is the result of a dropout that is given the same on both sides."""
    return (
        found.measured.kind == "output"
        and "Dropout" in found.pair.call.op.rpartition(".")[2]
        and (found.measured.limit or 0.0) > found.measured.inherited
    )


def _adds_most(found: FoundPlace) -> bool:
    """Whether most of the error at a place was not there in what the module was given."""
    return (found.measured.error or 0.0) > 2 * found.measured.inherited


def _blame(found: FoundPlace, affected: int, results: PlaceResults, limits: Limits) -> Culprit:
    measured = found.measured
    call = found.pair.call
    other = found.pair.pair.expected
    size = measured_text(measured, limits.within)
    where = measured.row and f"; the worst row is {measured.row}"
    cause, kind = "result", measured.kind
    if kind == "parameter":
        cause = "weights"
        reason = f"{measured.tensor} is not what {measured.expected} has: {size.partition(';')[0]}"
    elif kind == "input":
        kind = "output"
        above = results.trees[0].module_above(call)
        reason = f"what {measured.actual} is given here is {size}; {_fine_before(found, results)}"
        call, other = above or call, _above(results.trees[1], other)
    else:
        reason = f"{measured.tensor} is {size}"
        if kind == "output" and any(
            each.twins is found.twins and each.measured.kind == "input" for each in results.found
        ):
            given = number_text(measured.inherited)
            reason += f"; what it was given, and what is in it, is off by {given} roundings"
    reason += (where or "") + _missing_weights(found, results) + _layout(call, results)
    return Culprit(
        name=call.name,
        cause=cause,  # type: ignore[arg-type]
        kind=kind,
        direction="backward" if kind == "gradient" else call.direction,
        step=call.step,
        rank=call.rank,
        module=call.module,
        op=call.op,
        stack=call.stack,
        reason=reason,
        own_error=measured.error or 0.0,
        inherited_error=measured.inherited,
        affected=affected,
        tensor=measured.tensor if measured.kind != "input" else None,
        expected=Place(other.name, other.step, other.rank) if other is not None else None,
        proof="compared" if found.row.metrics is not None else "statistics",
    )


def _above(tree: Tree, call: Call | None) -> Call | None:
    return None if call is None else tree.module_above(call) or call


def _fine_before(found: FoundPlace, results: PlaceResults) -> str:
    """What was compared last before a bad place."""
    before = [
        each.measured
        for each in results.found
        if each.time < found.time
        and each.measured.kind == "output"
        and each.measured.status in ("equal", "within")
    ]
    if not before:
        return "nothing was compared before it"
    return f"{before[-1].actual or 'the model'}, before it, is fine"


def _missing_weights(found: FoundPlace, results: PlaceResults) -> str:
    """Weights of expected that actual has nowhere, up to the bad place."""
    modules = results.trees[1].modules
    missing = [
        path
        for path in results.pairing.only_expected
        if modules[path].parameters
        and modules[path].n_before <= found.depth
        and all(record.blob is not None for record in modules[path].parameters.values())
    ]
    for twins in results.pairing.twins:
        if any(is_quantised(results.trees[0].modules[path]) for path in twins.actual):
            continue
        ours, theirs = (
            {name for path in paths for name in tree.modules[path].parameters}
            for tree, paths in zip(results.trees, twins[:2], strict=True)
        )
        depth = max(modules[path].n_before for path in twins.expected)
        if depth <= found.depth:
            missing += [f"{' + '.join(twins.expected)}.{name}" for name in sorted(theirs - ours)]
    if not missing:
        return ""
    return f"; no module of actual was found that has the weights {_some(missing)}"


def _layout(call: Call, results: PlaceResults) -> str:
    """What is in which order in the joined weights of a module."""
    path = plain_path(call.module)
    tree = results.trees[0]
    joined = [
        f"{twins.actual[0]} holds {' + '.join(_in_order(twins, results.trees[1]))}"
        for twins in results.pairing.twins
        if len(twins.expected) > 1 and path in tree.above(twins.actual[0])
    ]
    return f"; {_some(joined)}, in this order" if joined and path else ""


def _in_order(twins: Twins, tree: Tree) -> list[str]:
    """The parts of a module as its weights have them."""
    names = [path.rpartition(".")[2] for path in twins.expected]
    if twins.features is None:
        return names
    lengths = [tree.modules[path].parameters["weight"].shape[0] for path in twins.expected]
    owners = [n for n, length in enumerate(lengths) for _ in range(length)]
    seen = [owners[place] for place in twins.features.tolist()]
    runs = [n for i, n in enumerate(seen) if not i or seen[i - 1] != n]
    return [names[n] for n in runs] if len(runs) <= 2 * len(names) else [*names, "interleaved"]


def _forked(fork: Fork, found: FoundPlace, why: str) -> Culprit:
    call = found.pair.call
    return Culprit(
        name=call.name, cause="data", kind="input", direction=call.direction, step=call.step,
        rank=call.rank, module=call.module, op=call.op, stack=call.stack,
        reason=(
            f"after {found.measured.row or 'the same tokens'} actual reads {fork.actual} and "
            f"expected reads {fork.expected}; {why}"
        ),
        own_error=found.measured.error or 0.0, inherited_error=0.0,
    )  # fmt: skip


def _why_not(places: Wanted, every: Sequence[Judged]) -> str | None:
    """Why the runs are no match although nothing is beyond its limit."""
    found = [each for judged in every for each in judged.results.found if each.is_own]
    undecided = [each for each in found if each.measured.status == "undecided"]
    if undecided:
        return _undecided(undecided, every)
    missed = [each for each in found if each.measured.status == "not compared"]
    needed = [each for each in missed if _is_needed(each, places)]
    if needed:
        first = needed[0].measured
        return (
            f"{first.actual or 'the model'} {first.tensor} could not be compared: {first.note}. "
            "How rows go together: `rows`"
        )
    if not any(each.measured.error is not None for each in found):
        return (
            f"nothing at {', '.join(places.at)} could be compared: no module of actual has a "
            "partner. Say what is the same: `mapping=FILE`"
        )
    return None


def _unpaired(rows: RowCounts, every: Sequence[Judged]) -> str | None:
    """Rows that both sides have for themselves may be what differs between them; not where a tie
    made them go on with other tokens, if at least half of what they could share is left."""
    fewer = min(rows.only_actual, rows.only_expected)
    unknown = [min(judged.results.unpaired) for judged in every]
    if not any(unknown) and rows.compared >= fewer:
        return None
    return (
        f"only {rows.compared} of {rows.compared + fewer} rows that the model gave have a partner. "
        "Give both sides the same data, or say how rows go together: `rows`"
    )


def _is_needed(found: FoundPlace, places: Wanted) -> bool:
    """Whether `match` says something of it: results of the model, gradients, what was named."""
    if found.measured.kind == "gradient":
        return True
    if found.measured.kind != "output" or not found.is_float:
        return False
    return found.is_root or MODULES not in places.at


def _undecided(undecided: Sequence[FoundPlace], every: Sequence[Judged]) -> str:
    worst = max(undecided, key=lambda each: each.measured.relative or 0.0).measured
    limits = next(judged.limits for judged in every if judged.results.found)
    first = undecided[0].measured
    given = "Say what is allowed, as a share of its size: `within=1e-3`; or give further runs of "
    given += "the expected side: `noise=RUN`"
    if first.limit is None and limits.quantised is not None:
        return (
            f"{limits.quantised[1]} is quantised on one side, and rounding does not say how far "
            f"off it may be; the largest error is at {worst.actual or 'the model'} {worst.tensor}, "
            f"{measured_text(worst)}. {given}"
        )
    if first.limit is None or not first.limit:
        return f"whole numbers differ at {first.actual or 'the model'} {first.tensor}. {given}"
    return (
        f"{first.actual or 'the model'} {first.tensor} is {measured_text(first)}, "
        f"{number_text(UNSURE * first.limit)} never, and what is between nobody can tell. {given}"
    )


def _notes(places: Wanted, every: Sequence[Judged]) -> Iterator[str]:
    if places.within is not None:
        yield f"as stated, errors of {percent(places.within)} of a tensor's size are allowed"
    for judged in every:
        yield from judged.results.notes
        yield from _pairing_notes(judged.results)
        ties = [each for each in judged.results.forks if not each[2]]
        if ties:
            fork = ties[0][0]
            yield (
                f"{count(len(ties), 'sequence')} went on with other tokens ({fork.actual} and "
                f"{fork.expected}), whose logits were nearer than the sides are: not compared "
                "from there on"
            )
        missed = [
            each.measured for each in judged.results.found if each.measured.status == "not compared"
        ]
        if missed:
            first = missed[0]
            yield (
                f"{count(len(missed), 'tensor')} not compared, the first is "
                f"{first.actual or 'the model'} {first.tensor}: {first.note}"
            )


def _pairing_notes(results: PlaceResults) -> Iterator[str]:
    for how, words in (("weights", "the weights they hold"), ("place", "their place")):
        twins = [t for t in results.pairing.twins if _HOW.get(t.how) == how]
        if twins:
            names = _some([f"{' + '.join(t.actual)} is {' + '.join(t.expected)}" for t in twins])
            yield f"{count(len(twins), 'module')} paired by {words}: {names}"
    moved = [t for t in results.pairing.twins if t.features is not None or t.columns is not None]
    if moved:
        names = _some([" + ".join(t.actual) for t in moved])
        yield f"features are in another order than in expected, and were compared so: {names}"
    for side, paths in (
        ("actual", results.pairing.only_actual),
        ("expected", results.pairing.only_expected),
    ):
        if paths:
            yield f"{count(len(paths), 'module')} only in {side}: {_some(paths)}"
    if results.pairing.like:
        names = _some([f"{ours}: {theirs}" for ours, theirs in results.pairing.like.items()])
        yield f"these have the same shapes; if they are the same, say so with `mapping`: {names}"


def _proposed(every: Sequence[Judged]) -> Proposed:
    found: Proposed = {}
    for judged in every:
        for twins in judged.results.pairing.twins:
            if twins.how in _HOW:
                theirs = list(twins.expected)
                found[" + ".join(twins.actual)] = theirs[0] if len(theirs) == 1 else theirs
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
