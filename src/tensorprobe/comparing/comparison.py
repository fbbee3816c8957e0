"""Two captures become a comparison: paired calls, measured tensors, and a verdict."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from tensorprobe.comparing.align import Pair, align
from tensorprobe.comparing.blame import Findings, blame
from tensorprobe.comparing.evidence import Replayer, UserCode, replayer_for
from tensorprobe.comparing.mapping import NO_MAPPING, read_mapping
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import (
    CallPair,
    Progress,
    TensorPair,
    Workers,
    measure,
    pair_tensors,
    workers_for,
)
from tensorprobe.comparing.opaque import opaque_modules
from tensorprobe.comparing.rank_causes import origins_of, settle_ranks
from tensorprobe.comparing.rank_facts import facts_of_ranks, world_size
from tensorprobe.comparing.received import by_rank, hears_for, in_causal_order
from tensorprobe.comparing.rounding import (
    Mode,
    coarsen,
    coarsen_modules,
    content_mode,
    distance,
    dtype_notes,
)
from tensorprobe.comparing.scene import place, sees_operators
from tensorprobe.comparing.verdict import Outcome, RankResult, Side, Verdict, in_short
from tensorprobe.config import parse_numbers
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.garbage import no_garbage
from tensorprobe.notebooks import html_of
from tensorprobe.records import (
    IN_MEMORY,
    LAST_NODE,
    Call,
    Capture,
    TensorRecord,
    count,
    kind_of_digest,
)
from tensorprobe.replay.calibration import covers
from tensorprobe.store.loading import load
from tensorprobe.store.native import NOT_WRITTEN, damaged_records

Source = str | os.PathLike[str] | Capture
# Facts by which a healthy kernel may sum in another order.
_SUMS_DEPEND_ON = ("torch.", "numerics.", "cuda.", "npu.", "environment.", "packages.torch")
_WEAKER = "only statistics were kept: the verdict is weaker than one from tensors"
_WEAKER_WITH_DIGESTS = (
    "only digests and statistics were kept: the verdict is weaker than one from tensors"
)
Units = dict[tuple[int, int], list[Call]]  # by rank and step
_SIDES: tuple[Side, Side] = ("actual", "expected")


class Compared:
    """What two captures have in common and where they part; report.saving adds files to it."""

    def __init__(
        self,
        actual: Capture,
        expected: Capture,
        pairs: Sequence[CallPair],
        verdict: Verdict,
        structure: Sequence[str] = (),
        proposed: Mapping[str, str | list[str]] | None = None,
    ) -> None:
        self.actual = actual
        self.expected = expected
        self.pairs = pairs
        self.verdict = verdict
        self.structure = structure  # differences in calls that are not blamed
        self.proposed = proposed or {}  # a mapping of modules that were paired by their weights

    @property
    def rows(self) -> Iterator[tuple[CallPair, TensorPair]]:
        """Every tensor of every call, in execution order."""
        for pair in self.pairs:
            for row in pair.tensors:
                yield pair, row

    @property
    def one_sided(self) -> list[tuple[Call, str]]:
        """The calls that only one side has, each with the paired call it follows."""
        found, before = [], "the start"
        for pair in self.pairs:
            if pair.is_paired:
                before = pair.call.name
            else:
                found.append((pair.call, before))
        return found

    def __repr__(self) -> str:
        return f"<Comparison {in_short(self.verdict)}>"

    def _repr_html_(self) -> str:
        return html_of(self)


def compare_captures(
    actual: Source,
    expected: Source,
    *,
    noise: Sequence[Source] = (),
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    at: str | Sequence[str] = (),
    rows: str | None = None,
    within: float | None = None,
    step: int | None = None,
    rank: int | None = None,
    jobs: int | Workers | None = None,
    timeout: float = 120.0,
    replay: bool = True,
    references: str | os.PathLike[str] | None = None,
    imports: Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
) -> Compared:
    """What tp.compare does, without its files; `jobs` may also be processes that run already."""
    known = NO_MAPPING if mapping is None else read_mapping(mapping)
    places = (at,) if isinstance(at, str) else tuple(at)
    if places:
        sides = _opened(actual), _opened(expected)
        return _chosen(sides, noise, step, rank, at=places, rows=rows, within=within, known=known)
    _check_unchosen(rows, within, known)
    replayer = replayer_for(_user_code(references, imports))
    if references is not None or imports:
        replayer.start()  # what is wrong with a user's code is told before the work, not after it
    with workers_for(map(_path, (actual, expected)), jobs) as workers:
        ours, theirs = _opened(actual), _opened(expected)
        with no_garbage():
            pairs = [pair_tensors(pair) for pair in _align(ours, theirs, known, step, rank)]
            measure(pairs, workers=workers, progress=progress)
            floors = _floors(theirs, noise, step, rank, workers) if noise else {}
            if workers is not None:
                workers.end()
    with no_garbage():
        lacks = lacking(ours, theirs, step, rank)
        wanted = replayer if replay and timeout > 0 else None
        comparison = _judge(ours, theirs, pairs, lacks, floors, wanted, timeout)
    comparison.verdict.imports = [str(each) for each in imports]
    return comparison


def _chosen(
    sides: tuple[Capture, Capture],
    noise: Sequence[Source],
    step: int | None,
    rank: int | None,
    *,
    at: tuple[str, ...],
    rows: str | None,
    within: float | None,
    known: CallMapping,
) -> Compared:
    # here: it takes numpy, which is not needed where other processes measure
    from tensorprobe.comparing.places.chosen_verdict import compare_chosen, wanted

    actual, expected = sides
    runs = [_opened(source) for source in noise]
    with no_garbage():
        places = wanted(at, rows, within, known)
        pairs, verdict, proposed = compare_chosen(actual, expected, places, runs, step, rank)
    verdict.notes += _general_notes(verdict, actual, expected)
    _tell_damage(verdict, (actual, expected), pairs)
    return Compared(actual, expected, pairs, verdict, proposed=proposed)


def _check_unchosen(rows: str | None, within: float | None, mapping: CallMapping) -> None:
    """Some things are for chosen places only."""
    wrong = (
        "`rows`" if rows is not None else "`within`" if within is not None
        else "a list of modules in `mapping`" if mapping.parts
        else "ignore in `mapping`" if mapping.ignore else None
    )  # fmt: skip
    if wrong is not None:
        raise BadUsage(f"{wrong} goes with chosen places, such as `at=modules`")


def _user_code(
    references: str | os.PathLike[str] | None, imports: Sequence[str | os.PathLike[str]]
) -> UserCode:
    file = None if references is None else Path(references)
    names = tuple(each if isinstance(each, str) else Path(each) for each in imports)
    return UserCode(file, names)


def _path(source: Source) -> str | os.PathLike[str]:
    return source.path if isinstance(source, Capture) else source


def _opened(source: Source) -> Capture:
    return source if isinstance(source, Capture) else load(source)


def _align(
    actual: Capture, expected: Capture, mapping: CallMapping, step: int | None, rank: int | None
) -> list[Pair]:
    ours, theirs = _common_units(actual, expected, step, rank)
    for side, found, capture in (("actual", ours, actual), ("expected", theirs, expected)):
        if not found:
            raise UnreadableCapture(
                f"nothing to compare: {side} '{capture.path}' has no calls"
                + (f" of step {step}" if step is not None else "")
                + (f" of rank {rank}" if rank is not None else "")
                + f"; it has steps {list(capture.steps)} and ranks {list(capture.ranks)}"
            )
    if are_one_each(ours, theirs):
        ((_, calls),) = ours.items()
        ((_, others),) = theirs.items()
        return align(calls, others, mapping)
    pairs: list[Pair] = []
    for key in sorted({*ours, *theirs}, key=lambda key: (key[0], key[1])):
        pairs += align(ours.get(key, []), theirs.get(key, []), mapping)
    return pairs


def _floors(
    expected: Capture,
    noise: Sequence[Source],
    step: int | None,
    rank: int | None,
    workers: Workers | None,
) -> dict[str, float]:
    """How far repeated runs of the expected side are apart, for each of its tensors."""
    floors: dict[str, float] = {}
    for source in noise:
        pairs = [pair_tensors(p) for p in _align(_opened(source), expected, NO_MAPPING, step, rank)]
        measure(pairs, workers=workers)
        for pair in pairs:
            for row in pair.tensors:
                if row.expected is not None and (found := distance(row)) and math.isfinite(found):
                    key = place(pair.call, row.expected)
                    floors[key] = max(floors.get(key, 0.0), found)
    return floors


def _judge(
    actual: Capture,
    expected: Capture,
    pairs: list[CallPair],
    lacks: Sequence[Lacking],
    floors: Mapping[str, float],
    replayer: Replayer | None,
    timeout: float,
) -> Compared:
    of_rank = by_rank(pairs)
    n_actual = sum(pair.pair.actual is not None for pair in pairs)
    n_expected = sum(pair.pair.expected is not None for pair in pairs)
    aligned = sum(pair.is_paired for pair in pairs)
    counts = {
        "calls_actual": n_actual,
        "calls_expected": n_expected,
        "aligned": aligned,
        "only_actual": n_actual - aligned,
        "only_expected": n_expected - aligned,
        "diverged": 0,
        "gaps": len(actual.gaps) + len(expected.gaps),
    }
    verdict = Verdict(
        verdict="match",
        actual=str(actual.path),
        expected=str(expected.path),
        mode=_mode(pairs),
        counts=counts,
        culprits=[],
        facts=facts_of_ranks(actual, expected, sorted(of_rank)),
    )
    narrow = is_narrow(actual), is_narrow(expected)
    if not _are_one_program(pairs, narrow):
        verdict.verdict = "incomparable"
        verdict.reason = _why_incomparable(actual, expected, pairs, aligned)
        return Compared(actual, expected, pairs, verdict)
    verdict.notes += coarsen(pairs, (actual.facts, expected.facts))
    if not any(map(sees_operators, pairs)):
        coarsen_modules(pairs)
    verdict.notes += dtype_notes(pairs)
    structure: list[str] = []
    findings: list[Findings] = []
    ranks = sorted(of_rank)
    replay = replayer is not None
    if replay and verdict.mode == "tensors":
        replay = _torch_is_there(verdict)
    hears, unheard = hears_for(of_rank, _are_all_ranks(actual, expected, ranks))
    verdict.notes += [unheard] if unheard else []
    by_number: dict[int, Findings] = {}
    deadline = time.monotonic() + timeout
    for rank in in_causal_order(of_rank):  # the time for replays is for those that may be origins
        by_number[rank] = blame(
            _recorded(_before_loss(of_rank, rank, lacks), narrow),
            replayer=replayer,
            replay=replay,
            seconds=max(deadline - time.monotonic(), 0.0),
            seconds_below=timeout / 4 / len(ranks),
            floors=floors,
            is_calibrated=covers(actual.facts) and covers(expected.facts),
            same_settings=not any(fact.startswith(_SUMS_DEPEND_ON) for fact in verdict.facts),
            hears=hears[rank],
        )
    for rank in ranks:
        findings.append(by_number[rank])
        structure += by_number[rank].structure
        verdict.ranks += _rank_results(rank, of_rank[rank], by_number[rank])
    verdict.culprits, verdict.received = settle_ranks(
        {rank: found.culprits for rank, found in zip(ranks, findings, strict=True)},
        {r: f.reach for r, f in zip(ranks, findings, strict=True) if f.reach is not None},
    )
    if len(ranks) > 1:
        verdict.origins = origins_of(verdict.culprits, verdict.received)
    counts["diverged"] = sum(sum(found.diverged.values()) for found in findings)
    if verdict.culprits:
        verdict.verdict = "diverged"
    verdict.notes = _notes(verdict, findings, actual, expected)
    _tell_what_lacks(verdict, lacks)
    _tell_damage(verdict, (actual, expected), pairs)
    return Compared(actual, expected, pairs, verdict, structure)


def _are_one_program(pairs: Sequence[CallPair], narrow: tuple[bool, bool]) -> bool:
    """Whether at least half of the model's calls align, in the ranks and steps of both sides.

    Optimizers step in several ways, and set-up is no part of the model: they do not count, nor what
    only one side shows inside of a module. Where one side was told to record some calls only, or
    makes more calls than the other with the same effects, those of the other are what could align.
    """
    units = opaque_modules(pairs)
    within = {at for inside in units.values() for at in inside}
    outside = [pair for i, pair in enumerate(pairs) if i not in within]
    counted = [pair for pair in outside if not _is_beside_model(pair)] or pairs
    counts: dict[tuple[int, int], list[int]] = {}
    for pair in counted:
        unit = counts.setdefault((pair.call.rank, pair.call.step), [0, 0, 0])
        unit[0] += pair.pair.actual is not None
        unit[1] += pair.pair.expected is not None
        unit[2] += pair.is_paired
    common = {key: unit for key, unit in counts.items() if unit[0] and unit[1]} or counts
    ours, theirs, aligned = (sum(unit[n] for unit in common.values()) for n in range(3))
    if aligned * 2 >= max(ours, theirs):
        return True
    shorter = 0 if ours < theirs else 1
    mine = [pair for pair in outside if (pair.call.rank, pair.call.step) in common]
    return aligned * 2 >= min(ours, theirs) and (any(narrow) or _effects_align(mine, shorter))


def _effects_align(pairs: Sequence[CallPair], shorter: int) -> bool:
    """Whether both sides have the same effects, and the longer one only more calls: it evaluates
    the model in between, say, or does the same in smaller steps."""
    if not any(pair.call.name.startswith(("Module.", "Optimizer.")) for pair in pairs):
        last = [next((p for p in reversed(pairs) if p.pair[side] is not None), None)
                for side in (0, 1)]  # fmt: skip
        return last[0] is not None and last[0] is last[1]
    for pair in pairs:
        if pair.is_paired:
            continue
        call = pair.call
        is_root = call.name.startswith("Module.") and call.parent is None
        if call.name.startswith("Optimizer.") or ".parameters_grad." in call.name:
            return False
        if is_root and call.direction == "forward" and pair.pair[shorter] is not None:
            return False
    return True


def _is_beside_model(pair: CallPair) -> bool:
    """Whether a call is a step of an optimizer's, or outside of all modules in forward."""
    return (pair.call.parent or "").startswith("Optimizer.") or _is_outside(pair.call)


def _is_outside(call: Call) -> bool:
    return call.direction == "forward" and not call.module and not call.name.startswith("Module.")


def _is_beside(call: Call) -> bool:
    """Whether a call is neither the model's nor an optimizer's."""
    return _is_outside(call) and not call.name.startswith("Optimizer.")


def _tell_what_lacks(verdict: Verdict, lacks: Sequence[Lacking]) -> None:
    """A step or rank that one side should have and has not is no match, whatever the rest says."""
    meant = [each for each in lacks if each.is_meant]
    if meant:
        verdict.notes.append(f"{_told(meant)}, as the other was told: not compared")
    beside = [each for each in lacks if not each.is_meant and not each.has_model]
    if beside:
        verdict.notes.append(f"{_told(beside)}: it has no call of the model")
    lost = [each for each in lacks if not each.is_meant and each.has_model]
    if not lost:
        return
    n_calls = sum(each.n_calls for each in lost)
    text = f"{_told(lost)}: {n_calls} calls could not be compared"
    if verdict.culprits:
        verdict.notes.append(text)
        return
    argument = "rank" if any(each.is_whole_rank for each in lost) else "step"
    verdict.verdict = "incomparable"
    verdict.reason = f"{text}. To compare one that both have: `{argument}=N`"


def _tell_damage(
    verdict: Verdict, captures: tuple[Capture, Capture], pairs: Sequence[CallPair]
) -> None:
    """What cannot be read is no match: it may be what differs."""
    if verdict.verdict != "match":
        return
    units = {(pair.call.rank, pair.call.step) for pair in pairs}
    for side, capture in zip(_SIDES, captures, strict=True):
        found = [gap for gap in damaged_records(capture) if (gap.rank, gap.step) in units]
        if found:
            lines = "1 line" if len(found) == 1 else f"{len(found)} lines"
            verdict.verdict = "incomparable"
            verdict.reason = (
                f"{lines} of {side} '{capture.path}' cannot be read, the first is {found[0].name}: "
                f"{found[0].reason}. All else matches. To see them: "
                f"tensorprobe show {quote(str(capture.path))} --gaps"
            )
            return
    lost = _lost(captures, pairs)
    if lost:
        number = f" and {count(len(lost) - 1, 'other')}" if lost[1:] else ""
        verdict.verdict = "incomparable"
        verdict.reason = f"{lost[0]}{number}: it could not be compared. All else matches"


def _lost(captures: tuple[Capture, Capture], pairs: Sequence[CallPair]) -> list[str]:
    """What one side has and the other has lost: it was killed, or its files are damaged."""
    unfinished = [set(capture.facts.get("unfinished") or ()) for capture in captures]
    found = []
    for pair in pairs:
        calls = (pair.pair.actual, pair.pair.expected)
        where = f"{pair.call.name} of step {pair.call.step}"
        unit = f"rank{pair.call.rank}/step{pair.call.step}"
        for side, n in zip(_SIDES, (0, 1), strict=True):
            mine, other = calls[n], calls[1 - n]
            if other is None or other.status == "begun":
                continue
            if mine is None:
                if unit in unfinished[n] and unit not in unfinished[1 - n]:
                    found.append(f"{side} ended before {where}")
            elif mine.status == "begun":
                found.append(f"{side} has no end of {where}")
            else:
                found += [
                    f"{side} has no value of {row.name} of {where}"
                    for row in pair.tensors
                    if _is_lost((row.actual, row.expected)[n], (row.expected, row.actual)[n])
                ]
    return found


def _is_lost(mine: TensorRecord | None, other: TensorRecord | None) -> bool:
    """Whether a value that the other side has was never written."""
    if mine is None or other is None or mine.gap != NOT_WRITTEN:
        return False
    return other.summary is not None or other.digest is not None


def _recorded(pairs: list[CallPair], narrow: tuple[bool, bool]) -> list[CallPair]:
    """Without the calls that the other side was told not to record."""
    if not any(narrow):
        return pairs
    return [
        pair
        for pair in pairs
        if not (narrow[0] and pair.pair.actual is None)
        and not (narrow[1] and pair.pair.expected is None)
    ]


def _torch_is_there(verdict: Verdict) -> bool:
    # importing it takes longer than comparing most captures: the first suspect does
    if importlib.util.find_spec("torch") is None:
        verdict.notes.append("torch is not installed: suspects were not replayed")
        return False
    return True


def _rank_results(rank: int, pairs: list[CallPair], found: Findings) -> Iterator[RankResult]:
    """A line a step, up to the first that has a culprit: later ones inherit from it."""
    for step in sorted({pair.call.step for pair in pairs}):
        unit = [pair for pair in pairs if pair.call.step == step]
        culprit = next((c.name for c in found.culprits if c.step == step), None)
        aligned = sum(pair.is_paired for pair in unit)
        verdict: Outcome = "diverged" if culprit else ("match" if aligned else "incomparable")
        yield RankResult(
            rank,
            step,
            verdict,
            aligned,
            sum(pair.pair.expected is None for pair in unit),
            sum(pair.pair.actual is None for pair in unit),
            found.diverged.get(step, 0),
            culprit,
        )
        if culprit:
            return


def _before_loss(
    of_rank: Mapping[int, list[CallPair]], rank: int, lacks: Sequence[Lacking]
) -> list[CallPair]:
    """Of several ranks, the calls of one up to a step that a side has lost: from there on nobody
    knows what it inherits."""
    lost = [e.step for e in lacks if e.rank == rank and e.has_model and not e.is_meant]
    if len(of_rank) < 2 or not lost:
        return of_rank[rank]
    return [pair for pair in of_rank[rank] if pair.call.step < min(lost)]


def _are_all_ranks(actual: Capture, expected: Capture, ranks: Sequence[int]) -> bool:
    """Whether every rank that was recorded is compared, and there are several."""
    if not all({*capture.ranks} <= {*ranks} for capture in (actual, expected)):
        return False
    worlds = {world_size(capture) for capture in (actual, expected)} - {None}
    return worlds == {len(ranks)} if worlds else len(ranks) > 1


def _mode(pairs: Sequence[CallPair]) -> Mode:
    """By what most tensors were compared."""
    counts: dict[Mode, int] = {}
    for pair in pairs:
        for row in pair.tensors:
            mode = content_mode(row)
            counts[mode] = counts.get(mode, 0) + 1
    if not counts or counts.keys() == {"structure"}:
        return "structure"
    counts.pop("structure", None)
    return max(counts, key=lambda mode: counts[mode])


def _why_incomparable(
    actual: Capture, expected: Capture, pairs: Sequence[CallPair], aligned: int
) -> str:
    total = max(
        sum(pair.pair.actual is not None for pair in pairs),
        sum(pair.pair.expected is not None for pair in pairs),
    )
    starts = [next(iter(capture.calls), None) for capture in (actual, expected)]
    text = f"{aligned} of {total} calls align"
    if all(starts):
        text += f"; actual starts {starts[0].name}, expected starts {starts[1].name}"  # type: ignore[union-attr]
    levels = [_level(capture) for capture in (actual, expected)]
    if levels[0] and levels[1] and levels[0] != levels[1]:
        text += (
            f": one was recorded at {levels[0]}, the other at {levels[1]}. "
            "Record both at the same level"
        )
    else:
        text += ". Compare runs of one program, or say what is the same: `mapping=FILE`"
    return text


def _level(capture: Capture) -> str | None:
    config = capture.facts.get("config") or capture.facts.get("configuration")
    if isinstance(config, dict) and isinstance(config.get("level"), str):
        return str(config["level"])
    return None


def _notes(
    verdict: Verdict, findings: Sequence[Findings], actual: Capture, expected: Capture
) -> list[str]:
    notes = [*verdict.notes, *_different_makes(actual, expected)]
    if verdict.mode in ("stats", "digest") and verdict.culprits:
        notes.append(_WEAKER_WITH_DIGESTS if verdict.mode == "digest" else _WEAKER)
    if verdict.mode == "structure":
        notes.append("no values were kept: only the set and order of calls were compared")
    left = sum(found.n_left for found in findings)
    if left:
        notes.append(
            f"{count(left, 'suspect')} not replayed for lack of time; a longer `timeout` gives more"
        )
    bits = next((found.first_bits for found in findings if found.first_bits), None)
    if verdict.verdict == "match" and bits:
        notes.append(f"bits differ from {bits} on, within what rounding explains")
        if verdict.mode == "tensors" and not (covers(actual.facts) and covers(expected.facts)):
            notes.append(
                "how kernels round on these machines is not known: errors below a few roundings "
                "were not looked for (docs/calibrating.md)"
            )
    if any(found.is_cut for found in findings):
        notes.append(
            "the model works on other pieces (micro-batches), or in another order: the gradients "
            "that optimizers were given were compared, and what is inside only by replaying it"
        )
    grown = next((found.grown for found in findings if found.grown), None)
    if verdict.verdict == "match" and grown and verdict.mode == "tensors":
        judged = "every call that was replayed" if left else "every call"
        notes.append(
            f"results are more than 10 % apart from {grown} on: rounding has grown, and {judged} "
            "is within rounding of its own inputs"
        )
    elif verdict.verdict == "match" and grown:
        notes.append(
            f"results are more than 0.1 % apart from {grown} on. Rounding that has grown may do "
            "that; whether a later call is wrong by as little, only keep=tensors can tell"
        )
    return [*notes, *_general_notes(verdict, actual, expected)]


def _general_notes(verdict: Verdict, actual: Capture, expected: Capture) -> Iterator[str]:
    """What is to be said of the recordings, whatever was compared."""
    if actual.path.resolve() == expected.path.resolve():
        yield "both sides are one capture: it was compared with itself"
    for side, capture in (("actual", actual), ("expected", expected)):
        if is_narrow(capture):
            yield f"{side} has a selection of its calls: the others were not compared"
    if verdict.counts["gaps"]:
        yield f"{verdict.counts['gaps']} gaps in the recordings: tensorprobe show RUN --gaps"


def _different_makes(actual: Capture, expected: Capture) -> Iterator[str]:
    """What two tools did so differently that it was not compared."""
    made = [
        {
            kind_of_digest(t.digest) or "tensorprobe"
            for call in c.calls
            for t in call.tensors
            if t.digest and not t.digest.startswith(IN_MEMORY)
        }
        for c in (actual, expected)
    ]
    if made[0] and made[1] and made[0].isdisjoint(made[1]):
        kinds = " and ".join(", ".join(sorted(kinds)) for kinds in made)
        yield f"digests of two kinds ({kinds}) were not compared: statistics were"
    backward = [
        {LAST_NODE in call.notes for call in c.calls(direction="backward")}
        for c in (actual, expected)
    ]
    if True in backward[0] ^ backward[1]:
        yield (
            "gradients that calls sent to their inputs were not compared: those of one side are "
            "msprobe's, which takes them at the last autograd node"
        )


class Lacking(NamedTuple):
    """A step of a rank that only one side has."""

    rank: int
    step: int
    only_in: Side
    n_calls: int
    is_whole_rank: bool  # the other side has no step of it
    is_meant: bool  # the other side was told not to record it
    has_model: bool  # or a step of an optimizer's; else what a program does before it ends


def units(capture: Capture, step: int | None, rank: int | None) -> Units:
    """The calls of each rank and step, of one step or rank where it is given."""
    found: Units = {}
    for call in capture.calls:
        if (step is None or call.step == step) and (rank is None or call.rank == rank):
            found.setdefault((call.rank, call.step), []).append(call)
    return found


def _common_units(
    actual: Capture, expected: Capture, step: int | None, rank: int | None
) -> tuple[Units, Units]:
    """The calls of both sides by rank and step; one rank each go together, whatever its number."""
    ours, theirs = units(actual, step, rank), units(expected, step, rank)
    ranks = [{rank for rank, _ in found} for found in (ours, theirs)]
    if len(ranks[0]) == len(ranks[1]) == 1 and ranks[0] != ranks[1]:
        (mine,) = ranks[0]
        theirs = {(mine, number): calls for (_, number), calls in theirs.items()}
    return ours, theirs


def are_one_each(actual: Units, expected: Units) -> bool:
    """One step each: they go together, whatever their numbers."""
    return len(actual) == len(expected) == 1


def lacking(
    actual: Capture, expected: Capture, step: int | None, rank: int | None
) -> list[Lacking]:
    """What one side has and the other has not."""
    ours, theirs = _common_units(actual, expected, step, rank)
    if are_one_each(ours, theirs):
        return []
    return [*_only("actual", ours, theirs, expected), *_only("expected", theirs, ours, actual)]


def _only(side: Side, here: Units, there: Units, other: Capture) -> Iterable[Lacking]:
    ranks = {rank for rank, _ in there}
    for (rank, step), calls in sorted(here.items()):
        if (rank, step) not in there:
            is_meant = _was_left_out(other, rank, step)
            has_model = rank not in ranks or not all(map(_is_beside, calls))
            yield Lacking(rank, step, side, len(calls), rank not in ranks, is_meant, has_model)


def is_narrow(capture: Capture) -> bool:
    """Whether the recorder was told to leave calls out: what is missing was not looked at."""
    config = capture.facts.get("config")
    if not isinstance(config, dict):
        return False
    if any(config.get(key) for key in ("calls", "between", "apis", "modules", "names")):
        return True
    directions = config.get("directions")
    return isinstance(directions, list) and len(directions) == 1


def _was_left_out(capture: Capture, rank: int, step: int) -> bool:
    config = capture.facts.get("config")
    if not isinstance(config, dict):
        return False
    if config.get("keep_last") or is_narrow(capture):
        return True
    chosen = (parse_numbers(key, config.get(key)) for key in ("steps", "ranks"))
    return any(
        numbers is not None and number not in numbers
        for numbers, number in zip(chosen, (step, rank), strict=True)
    )


def _told(lacks: Sequence[Lacking]) -> str:
    """Such as: rank 1 is only in expected, steps 2, 3 are only in actual."""
    parts: dict[tuple[str, Side], list[int]] = {}
    for each in lacks:
        noun = "rank" if each.is_whole_rank else "step"
        numbers = parts.setdefault((noun, each.only_in), [])
        number = each.rank if each.is_whole_rank else each.step
        if number not in numbers:
            numbers.append(number)
    return ", ".join(
        f"{noun}{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))} "
        f"{'are' if numbers[1:] else 'is'} only in {side}"
        for (noun, side), numbers in parts.items()
    )
