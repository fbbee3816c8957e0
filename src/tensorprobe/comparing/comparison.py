"""Two captures become a comparison: paired calls, measured tensors, and a verdict."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import msgspec

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.blame import Findings
from tensorprobe.comparing.evidence import UserCode, replayer_for
from tensorprobe.comparing.lost_values import Lost, lost_values
from tensorprobe.comparing.mapping import NO_MAPPING, read_mapping
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import (
    CallPair,
    Progress,
    TensorPair,
    Workers,
    measure,
    workers_for,
)
from tensorprobe.comparing.one_sided import OneSided, add_one_sided
from tensorprobe.comparing.one_sided import one_sided as one_sided_of
from tensorprobe.comparing.rank_causes import origins_of, settle_ranks
from tensorprobe.comparing.rank_facts import facts_of_ranks, world_size
from tensorprobe.comparing.rank_pairs import LoadedRanks, RankPart, RankSource
from tensorprobe.comparing.rank_streams import (
    MetricsStore,
    PairsOfRanks,
    RankStreams,
    streams_for,
)
from tensorprobe.comparing.rank_survey import (
    CallsSeen,
    RankSurvey,
    aligned_of_model,
    are_one_program,
    calls_seen,
)
from tensorprobe.comparing.rank_work import (
    Blamed,
    BlameRanks,
    Engine,
    Here,
    JudgeCommunications,
    RankFailed,
    SurveyRanks,
    ToBlame,
)
from tensorprobe.comparing.received import NOTHING_GIVEN, Exchanges
from tensorprobe.comparing.rounding import Mode, distance, dtype_notes, switch_notes
from tensorprobe.comparing.scene import place
from tensorprobe.comparing.units import (
    Lacking,
    Size,
    is_beside,
    is_narrow,
    is_outside,
    lacking,
    lacking_told,
)
from tensorprobe.comparing.verdict import Side, Verdict, in_short
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.garbage import no_garbage
from tensorprobe.notebooks import html_of
from tensorprobe.records import Call, Capture, count
from tensorprobe.replay.calibration import covers
from tensorprobe.store.loading import load
from tensorprobe.store.native import damaged_records
from tensorprobe.store.rank_folders import RankByRank
from tensorprobe.store.remote import is_url, local_copy

Source = str | os.PathLike[str] | Capture
# Facts by which a healthy kernel may sum in another order.
_SUMS_DEPEND_ON = ("torch.", "numerics.", "cuda.", "npu.", "environment.", "packages.torch")
_WEAKER = "only statistics were kept: the verdict is weaker than one from tensors"
_WEAKER_WITH_DIGESTS = (
    "only digests and statistics were kept: the verdict is weaker than one from tensors"
)
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
        alone: OneSided | None = None,
    ) -> None:
        self.actual = actual
        self.expected = expected
        self.pairs = pairs
        self.verdict = verdict
        self.structure = structure  # differences in calls that are not blamed
        self.proposed = proposed or {}  # a mapping of modules that were paired by their weights
        self._alone = alone

    @property
    def ok(self) -> bool:
        """Whether the runs match; False where they are incomparable, too."""
        return self.verdict.ok

    def __bool__(self) -> bool:
        found = self.verdict.verdict
        raise BadUsage(f"a comparison is neither true nor false, this one is {found}: ask .ok")

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

    @property
    def alone(self) -> OneSided:
        """The same by names without numbers, of the steps that both sides have."""
        if self._alone is None:
            self._alone = one_sided_of(self.pairs)
        return self._alone

    def of_rank(self, rank: int) -> list[CallPair]:
        """The pairs of one rank."""
        if isinstance(self.pairs, PairsOfRanks):
            return self.pairs.of_rank(rank)
        return [pair for pair in self.pairs if pair.call.rank == rank]

    def __repr__(self) -> str:
        return f"<Comparison {in_short(self.verdict)}>"

    def _repr_html_(self) -> str:
        return html_of(self)


def compare_captures(
    actual: Source,
    expected: Source,
    *,
    noise: Sequence[Source] = (),
    mapping: str | os.PathLike[str] | Mapping[str, Any] | CallMapping | None = None,
    at: str | Sequence[str] = (),
    rows: str | None = None,
    within: float | None = None,
    layout: str | os.PathLike[str] | None = None,
    step: int | None = None,
    rank: int | None = None,
    jobs: int | Workers | None = None,
    timeout: float = 120.0,
    replay: bool = True,
    references: str | os.PathLike[str] | None = None,
    imports: Sequence[str | os.PathLike[str]] = (),
    engine: str | None = None,
    progress: Progress | None = None,
) -> Compared:
    """What tp.compare does, without its files; `jobs` may also be processes that run already."""
    known = NO_MAPPING if mapping is None else _known(mapping)
    actual, expected = (local_copy(each) if is_url(each) else each for each in (actual, expected))
    places = (at,) if isinstance(at, str) else tuple(at)
    if layout is not None:
        if places:
            raise BadUsage("`layout` compares all of two runs: leave out `at`")
        return _of_other_layouts((_opened(actual), _opened(expected)), Path(layout), step, rank)
    if places:
        sides = _opened(actual), _opened(expected)
        return _chosen(sides, noise, step, rank, at=places, rows=rows, within=within, known=known)
    _check_unchosen(rows, within, known)
    code = _user_code(references, imports)
    if references is not None or imports:
        replayer_for(code).start()  # what is wrong with it is told before the work, not after it
    streams = streams_for(
        (actual, expected), known, step, rank, jobs, engine, has_noise=bool(noise)
    )
    wanted = code if replay and timeout > 0 else None
    if streams is not None:
        with streams:
            comparison = _streamed(streams, wanted, timeout, progress)
    else:
        with workers_for(map(_path, (actual, expected)), jobs) as workers:
            sides = _opened(actual), _opened(expected)
            if _are_of_other_layouts(*sides, rank):
                if workers is not None:
                    workers.end()
                return _of_other_layouts(sides, None, step, rank)
            with no_garbage():
                loaded = _loaded(sides, known, step, rank)
                measure(loaded.all, workers=workers, progress=progress)
                floors = _floors(sides[1], noise, step, rank, workers) if noise else {}
                if workers is not None:
                    workers.end()
        with no_garbage():
            judging = _Judging(loaded, Here(), wanted, timeout, floors)
            lacks = lacking(_sizes(loaded.ours), _sizes(loaded.theirs), *sides)
            surveys = judging.survey(loaded.parts())
            comparison = judging.judge(sides, surveys, loaded.all, lacks)
    comparison.verdict.imports = [str(each) for each in imports]
    return comparison


def _streamed(
    streams: RankStreams, code: UserCode | None, timeout: float, progress: Progress | None
) -> Compared:
    """Rank by rank; where each side turns out to have calls of one rank only, both are loaded."""
    judging = _Judging(streams.source, streams.engine, code, timeout, {}, streams.store)
    surveys = judging.survey(streams.told(streams.parts, progress))
    if judging.failed and not surveys:
        raise UnreadableCapture(f"no rank could be compared: {next(iter(judging.failed.values()))}")
    sides, sizes = streams.captures(surveys)
    for n, side in enumerate(_SIDES):
        if not sizes[n]:
            raise _nothing(side, sides[n], streams.step, None)
    if _are_of_other_layouts(*sides, None):
        whole = load(sides[0].path), load(sides[1].path)
        return _of_other_layouts(whole, None, streams.step, None)
    if len({rank for rank, _ in sizes[0]}) == 1 == len({rank for rank, _ in sizes[1]}):
        return compare_captures(
            load(sides[0].path), load(sides[1].path), mapping=streams.mapping, step=streams.step,
            jobs=1, timeout=timeout, replay=code is not None,
            references=None if code is None else code.references,
            imports=() if code is None else code.imports,
        )  # fmt: skip
    coarse = _coarse_of_all(surveys)
    if any(
        each.coarse.get(step, 0.0) != coarse.get(step, 0.0)
        for each in surveys
        for step in each.autocast
    ):
        for part in streams.parts:
            part.coarse = coarse
        judging = _Judging(streams.source, streams.engine, code, timeout, {}, streams.store)
        surveys = judging.survey(iter(streams.parts))
    lacks = lacking(*sizes, *sides)
    return judging.judge(sides, surveys, streams.pairs(surveys), lacks)


def _coarse_of_all(surveys: Sequence[RankSurvey]) -> dict[int, float]:
    """What rounding.coarsen_modules is to be given for all ranks."""
    found: dict[int, float] = {}
    if not any(each.sees_operators for each in surveys):
        for each in surveys:
            for step, unit in each.autocast.items():
                found[step] = max(found.get(step, 0.0), unit)
    return found


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
    _tell_what_is_lost(verdict, sides, pairs)
    return Compared(actual, expected, pairs, verdict, proposed=proposed)


def _are_of_other_layouts(actual: Capture, expected: Capture, rank: int | None) -> bool:
    """Whether the runs had other numbers of ranks, and all are to be compared."""
    if rank is not None or max(len(actual.ranks), len(expected.ranks)) == 1:
        return False
    from tensorprobe.comparing.layouts.layout_verdict import have_other_layouts

    return have_other_layouts(actual, expected)


def _of_other_layouts(
    sides: tuple[Capture, Capture], layout: Path | None, step: int | None, rank: int | None
) -> Compared:
    # here: it takes numpy, which is not needed where other processes measure
    from tensorprobe.comparing.layouts.layout_verdict import compare_layouts

    actual, expected = sides
    with no_garbage():
        pairs, verdict = compare_layouts(actual, expected, layout, step, rank)
    verdict.notes += _general_notes(verdict, actual, expected)
    _tell_what_is_lost(verdict, sides, pairs)
    return Compared(actual, expected, pairs, verdict)


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


def _known(mapping: str | os.PathLike[str] | Mapping[str, Any] | CallMapping) -> CallMapping:
    return mapping if isinstance(mapping, CallMapping) else read_mapping(mapping)


def _loaded(
    sides: tuple[Capture, Capture], mapping: CallMapping, step: int | None, rank: int | None
) -> LoadedRanks:
    """The ranks of two captures that are in memory."""
    loaded = LoadedRanks(*sides, mapping, step, rank)
    for side, capture, units in zip(_SIDES, sides, (loaded.ours, loaded.theirs), strict=True):
        if not units:
            raise _nothing(side, capture, step, rank)
    return loaded


def _nothing(side: Side, capture: Capture, step: int | None, rank: int | None) -> UnreadableCapture:
    return UnreadableCapture(
        f"nothing to compare: {side} '{capture.path}' has no calls"
        + (f" of step {step}" if step is not None else "")
        + (f" of rank {rank}" if rank is not None else "")
        + f"; it has steps {list(capture.steps)} and ranks {list(capture.ranks)}"
    )


def _sizes(units: Mapping[tuple[int, int], Sequence[Call]]) -> dict[tuple[int, int], Size]:
    return {key: Size(len(calls), all(map(is_beside, calls))) for key, calls in units.items()}


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
        pairs = _loaded((_opened(source), expected), NO_MAPPING, step, rank).all
        measure(pairs, workers=workers)
        for pair in pairs:
            for row in pair.tensors:
                if row.expected is not None and (found := distance(row)) and math.isfinite(found):
                    key = place(pair.call, row.expected)
                    floors[key] = max(floors.get(key, 0.0), found)
    return floors


class _Judging:
    """Goes through all ranks twice: to see how far they are apart, then to blame."""

    def __init__(
        self,
        source: RankSource,
        engine: Engine,
        code: UserCode | None,  # None: suspects are not replayed
        timeout: float,
        floors: Mapping[str, float],
        store: MetricsStore | None = None,  # None: the pairs are kept in memory
    ) -> None:
        self._source, self._engine = source, engine
        self._code, self._timeout, self._floors, self._store = code, timeout, floors, store
        self._exchanges = Exchanges()
        self._parts: dict[int, RankPart] = {}
        self.failed: dict[int, str] = {}  # ranks that could not be read, and why

    def survey(self, parts: Iterable[RankPart]) -> list[RankSurvey]:
        """Look through all ranks, and keep what is small."""
        surveys = []
        for part, found in self._engine.run(SurveyRanks(self._source), iter(parts)):
            if isinstance(found, RankFailed):
                self.failed[part.rank] = str(found)
                continue
            if self._store is not None:
                self._store.put(part.rank, found.measured)
                found.measured = b""
            if found.n_pairs:
                self._parts[part.rank] = part
                self._exchanges.add(part.rank, found.gave)
            part.coarse = found.coarse
            found.gave = NOTHING_GIVEN
            surveys.append(found)
        return surveys

    def judge(
        self,
        sides: tuple[Capture, Capture],
        surveys: Sequence[RankSurvey],
        pairs: Sequence[CallPair],
        lacks: Sequence[Lacking],
    ) -> Compared:
        """The verdict of what was surveyed."""
        actual, expected = sides
        surveys = [each for each in surveys if each.n_pairs]
        ranks = [each.rank for each in surveys]
        aligned = sum(unit.of_all[2] for each in surveys for unit in each.units)
        n_actual, n_expected = (
            sum(unit.of_all[n] for each in surveys for unit in each.units) for n in (0, 1)
        )
        verdict = Verdict(
            verdict="match",
            actual=str(actual.path),
            expected=str(expected.path),
            mode=_mode(surveys),
            counts={
                "calls_actual": n_actual,
                "calls_expected": n_expected,
                "aligned": aligned,
                "only_actual": n_actual - aligned,
                "only_expected": n_expected - aligned,
                "diverged": 0,
                "gaps": len(actual.gaps) + len(expected.gaps),
            },
            culprits=[],
            facts=facts_of_ranks(actual, expected, ranks),
        )
        narrow = is_narrow(actual), is_narrow(expected)
        if not are_one_program(surveys, narrow):
            verdict.verdict = "incomparable"
            verdict.reason = _why_incomparable(actual, expected, surveys, pairs)
            return Compared(actual, expected, pairs, verdict)
        verdict.notes += switch_notes(_added(each.switches for each in surveys))
        verdict.notes += dtype_notes(_added(each.dtypes for each in surveys))
        is_whole = not self.failed and _are_all_ranks(actual, expected, ranks)
        self._exchanges.settle(ranks)
        self._exchanges.judge(lambda to_judge: self._engine.run(JudgeCommunications(), to_judge))
        verdict.notes += self._exchanges.missing_notes()
        replay = self._code is not None
        if replay and verdict.mode == "tensors":
            replay = _torch_is_there(verdict)
        work = BlameRanks(
            source=self._source,
            ranks=ranks,
            is_whole=is_whole,
            narrow=narrow,
            floors=self._floors,
            code=self._code,
            replay=replay,
            seconds_below=self._timeout / 4 / len(ranks),
            is_calibrated=covers(actual.facts) and covers(expected.facts),
            same_settings=not any(fact.startswith(_SUMS_DEPEND_ON) for fact in verdict.facts),
            keeps=self._store is None,
        )
        blamed: dict[int, Blamed] = {}
        for task, found in self._engine.run(work, self._to_blame(surveys, lacks)):
            rank = task.part.rank
            if isinstance(found, RankFailed):
                self.failed[rank] = str(found)
            else:
                blamed[rank] = found
                self._parts[rank].anew = found.anew
        return self._settled(verdict, sides, surveys, pairs, lacks, blamed)

    def _to_blame(
        self, surveys: Sequence[RankSurvey], lacks: Sequence[Lacking]
    ) -> Iterator[ToBlame]:
        """The ranks in causal order: first those that differ before the others can have told them
        anything. The time for replays is for those that may be origins."""
        deadline = time.monotonic() + self._timeout
        lost: dict[int, int] = {}
        if len(surveys) > 1:
            for each in lacks:
                if each.has_model and not each.is_meant:
                    lost[each.rank] = min(each.step, lost.get(each.rank, each.step))
        for survey in sorted(surveys, key=lambda each: (each.first_difference, each.rank)):
            rank = survey.rank
            part = self._parts[rank]
            if self._store is not None:
                part = msgspec.structs.replace(part, measured=self._store.get(rank))
            seconds = max(deadline - time.monotonic(), 0.0)
            yield ToBlame(part, self._exchanges.heard_by(rank), lost.get(rank), seconds)

    def _settled(
        self,
        verdict: Verdict,
        sides: tuple[Capture, Capture],
        surveys: Sequence[RankSurvey],
        pairs: Sequence[CallPair],
        lacks: Sequence[Lacking],
        blamed: Mapping[int, Blamed],
    ) -> Compared:
        """What was found in all ranks together."""
        found = {rank: blamed[rank] for rank in sorted(blamed)}
        findings = [each.findings for each in found.values()]
        alone: OneSided = {}
        structure: list[str] = []
        for each in found.values():
            verdict.ranks += each.results
            structure += map(sys.intern, each.findings.structure)
            add_one_sided(alone, each.one_sided)
        verdict.culprits, verdict.received = settle_ranks(
            {rank: each.findings.culprits for rank, each in found.items()},
            {
                rank: each.findings.reach
                for rank, each in found.items()
                if each.findings.reach is not None
            },
        )
        self._source.switches.name(verdict.culprits)
        if len(found) > 1:
            verdict.origins = origins_of(verdict.culprits, verdict.received)
        verdict.counts["diverged"] = sum(sum(each.diverged.values()) for each in findings)
        if verdict.culprits:
            verdict.verdict = "diverged"
        verdict.notes = _notes(verdict, findings, *sides)
        _tell_what_lacks(verdict, lacks)
        _tell_failed(verdict, self.failed)
        units = {unit.unit for each in surveys for unit in each.units}
        _tell_damage(verdict, sides, units, [each.lost for each in found.values()])
        return Compared(*sides, pairs, verdict, structure, alone=alone)


_Key = TypeVar("_Key")


def _added(counts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for each in counts:
        for key, n in each.items():
            found[key] = found.get(key, 0) + n
    return found


def _tell_failed(verdict: Verdict, failed: Mapping[int, str]) -> None:
    """A rank that no process could read is no match."""
    if not failed:
        return
    texts = sorted(set(failed.values()))
    text = f"{listed(sorted(failed))} could not be compared: {texts[0]}"
    if verdict.culprits:
        verdict.notes.append(text)
        return
    verdict.verdict = "incomparable"
    verdict.reason = text


def _tell_what_lacks(verdict: Verdict, lacks: Sequence[Lacking]) -> None:
    """A step or rank that one side should have and has not is no match, whatever the rest says."""
    meant = [each for each in lacks if each.is_meant]
    if meant:
        verdict.notes.append(f"{lacking_told(meant)}, as the other was told: not compared")
    beside = [each for each in lacks if not each.is_meant and not each.has_model]
    if beside:
        verdict.notes.append(f"{lacking_told(beside)}: it has no call of the model")
    lost = [each for each in lacks if not each.is_meant and each.has_model]
    if not lost:
        return
    n_calls = sum(each.n_calls for each in lost)
    text = f"{lacking_told(lost)}: {n_calls} calls could not be compared"
    if verdict.culprits:
        verdict.notes.append(text)
        return
    argument = "rank" if any(each.is_whole_rank for each in lost) else "step"
    verdict.verdict = "incomparable"
    verdict.reason = f"{text}. To compare one that both have: `{argument}=N`"


def _tell_damage(
    verdict: Verdict,
    captures: tuple[Capture, Capture],
    units: set[tuple[int, int]],
    lost: Sequence[Lost],
) -> None:
    """What cannot be read is no match: it may be what differs."""
    if verdict.verdict != "match":
        return
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
    n = sum(each.n for each in lost)
    if n:
        first = next(each.first for each in lost if each.n)
        number = f" and {count(n - 1, 'other')}" if n > 1 else ""
        verdict.verdict = "incomparable"
        verdict.reason = f"{first}{number}: it could not be compared. All else matches"


def _tell_what_is_lost(
    verdict: Verdict, sides: tuple[Capture, Capture], pairs: Sequence[CallPair]
) -> None:
    """The same for pairs that are all in memory."""
    units = {(pair.call.rank, pair.call.step) for pair in pairs}
    unfinished = [set(side.facts.get("unfinished") or ()) for side in sides]
    _tell_damage(verdict, sides, units, [lost_values(pairs, (unfinished[0], unfinished[1]))])


def _torch_is_there(verdict: Verdict) -> bool:
    # importing it takes longer than comparing most captures: the first suspect does
    if importlib.util.find_spec("torch") is None:
        verdict.notes.append("torch is not installed: suspects were not replayed")
        return False
    return True


def _are_all_ranks(actual: Capture, expected: Capture, ranks: Sequence[int]) -> bool:
    """Whether every rank that was recorded is compared, and there are several."""
    if not all({*capture.ranks} <= {*ranks} for capture in (actual, expected)):
        return False
    worlds = {world_size(capture) for capture in (actual, expected)} - {None}
    return worlds == {len(ranks)} if worlds else len(ranks) > 1


def _mode(surveys: Sequence[RankSurvey]) -> Mode:
    """By what most tensors were compared."""
    counts = _added(each.modes for each in surveys)
    if not counts or counts.keys() == {"structure"}:
        return "structure"
    counts.pop("structure", None)
    return max(counts, key=lambda mode: counts[mode])


def _why_incomparable(
    actual: Capture,
    expected: Capture,
    surveys: Sequence[RankSurvey],
    pairs: Sequence[CallPair],
) -> str:
    aligned, total = aligned_of_model(surveys)
    starts = [_seen(capture).first_name for capture in (actual, expected)]
    text = f"{aligned} of {total} calls align"
    if all(starts) and starts[0] != starts[1]:
        text += f"; actual starts {starts[0]}, expected starts {starts[1]}"
    elif (parting := _first_alone(pairs)) is not None:
        text += parting
    levels = [_level(capture) for capture in (actual, expected)]
    if levels[0] and levels[1] and levels[0] != levels[1]:
        text += (
            f": one was recorded at {levels[0]}, the other at {levels[1]}. "
            "Record both at the same level"
        )
    else:
        text += ". Compare runs of one program, or say what is the same: `mapping=FILE`"
    return text


def _first_alone(pairs: Sequence[CallPair]) -> str | None:
    """The first call of a model's that only one side makes, and what it comes after."""
    before = "the start"
    for pair in pairs:
        if pair.is_paired:
            before = pair.call.name
        elif not is_outside(pair.call):
            side = "actual" if pair.pair.actual is not None else "expected"
            return f"; after {before} only {side} makes {pair.call.name}"
    return None


def _seen(capture: Capture) -> CallsSeen:
    """What has to be known of all calls of a capture."""
    return capture.seen if isinstance(capture, RankByRank) else calls_seen(capture.calls)


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
    if objects := next((found.objects for found in findings if found.objects), None):
        notes.append(
            f"ranks send each other Python objects that are not the same (from {objects} on): "
            "these were not compared"
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
    known = [set(capture.facts.get("processes", ())) for capture in (actual, expected)]
    if others := sorted(known[0] | known[1]):
        shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if others[4:] else "")
        yield (
            f"other processes of the program were not compared: {shown}. Each is a recording of "
            f"its own, in the folder of its name"
        )
    if verdict.counts["gaps"]:
        yield f"{verdict.counts['gaps']} gaps in the recordings: tensorprobe show RUN --gaps"


def _different_makes(actual: Capture, expected: Capture) -> Iterator[str]:
    """What two tools did so differently that it was not compared."""
    ours, theirs = _seen(actual), _seen(expected)
    if ours.digests and theirs.digests and ours.digests.isdisjoint(theirs.digests):
        kinds = " and ".join(", ".join(sorted(each.digests)) for each in (ours, theirs))
        yield f"digests of two kinds ({kinds}) were not compared: statistics were"
    if True in ours.ends_at_last_node ^ theirs.ends_at_last_node:
        yield (
            "gradients that calls sent to their inputs were not compared: those of one side are "
            "msprobe's, which takes them at the last autograd node"
        )
