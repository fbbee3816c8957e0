"""What is done rank by rank, here or in other processes: look through a rank, then blame in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from tensorprobe.comparing.blame import Findings, blame
from tensorprobe.comparing.evidence import UserCode, replayer_for
from tensorprobe.comparing.lost_values import Lost, lost_values
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.one_sided import OneSided, one_sided
from tensorprobe.comparing.rank_pairs import RankPart, RankSource, stored_anew
from tensorprobe.comparing.rank_survey import RankSurvey
from tensorprobe.comparing.received import Hears, Judged, ToJudge, judged_one, rank_hears
from tensorprobe.comparing.verdict import Outcome, RankResult
from tensorprobe.garbage import no_garbage

Task = TypeVar("Task")
Result = TypeVar("Result")
Task_ = TypeVar("Task_", contravariant=True)
Result_ = TypeVar("Result_", covariant=True)


class Work(Protocol[Task_, Result_]):
    """Something that is done to many things, each by itself; it can be sent to other processes."""

    def do(self, task: Task_) -> Result_: ...


class RankFailed(Exception):
    """Why a task has no result: the processes that were given it have died."""


class Engine(Protocol):
    """Where work is done."""

    def run(
        self, work: Work[Task, Result], tasks: Iterator[Task]
    ) -> Iterator[tuple[Task, Result | RankFailed]]:
        """The result of each task, in their order."""

    def close(self) -> None: ...


class Here:
    """Does it in this process, one after the other."""

    def run(
        self, work: Work[Task, Result], tasks: Iterator[Task]
    ) -> Iterator[tuple[Task, Result | RankFailed]]:
        for task in tasks:
            yield task, work.do(task)

    def close(self) -> None:
        """There is nothing to end."""


class SurveyRanks(msgspec.Struct):
    """Reads and measures ranks."""

    source: RankSource

    def do(self, task: RankPart) -> RankSurvey | RankFailed:
        try:
            return self.source.survey(task)
        except OSError as error:  # one rank lies on a disk that fails, say
            return RankFailed(str(error))


class JudgeCommunications(msgspec.Struct):
    """Holds the results of communications against what was given."""

    def do(self, task: ToJudge) -> dict[int, Judged]:
        return judged_one(task)


class ToBlame(NamedTuple):
    """A rank, and what concerns it alone."""

    part: RankPart
    hears: Hears
    before_step: int | None = None  # later ones inherit from what one side has lost
    seconds: float = 120.0


class Blamed(NamedTuple):
    """What was found in one rank."""

    findings: Findings
    results: list[RankResult]
    lost: Lost
    one_sided: OneSided
    anew: bytes  # see RankPart


class BlameRanks(msgspec.Struct):
    """Names the culprits of ranks."""

    source: RankSource
    ranks: list[int]
    is_whole: bool
    narrow: tuple[bool, bool]
    floors: Mapping[str, float]
    code: UserCode | None  # None: no call is replayed
    replay: bool
    seconds_below: float
    is_calibrated: bool
    same_settings: bool
    keeps: bool  # the pairs stay as they are in memory

    def do(self, task: ToBlame) -> Blamed | RankFailed:
        try:
            with no_garbage():
                return self._do(task)
        except OSError as error:
            return RankFailed(str(error))

    def _do(self, task: ToBlame) -> Blamed:
        pairs, unfinished = self.source.pairs(task.part)
        mine = pairs
        if task.before_step is not None:
            mine = [pair for pair in pairs if pair.call.step < task.before_step]
        hears = rank_hears(task.part.rank, pairs, task.hears, self.ranks, self.is_whole)
        findings = blame(
            _recorded(mine, self.narrow),
            replayer=None if self.code is None else replayer_for(self.code),
            replay=self.replay,
            seconds=task.seconds,
            seconds_below=self.seconds_below,
            floors=self.floors,
            is_calibrated=self.is_calibrated,
            same_settings=self.same_settings,
            hears=hears,
        )
        return Blamed(
            findings,
            list(_rank_results(task.part.rank, pairs, findings)),
            lost_values(pairs, unfinished, of_several=len(self.ranks) > 1),
            one_sided(pairs),
            b"" if self.keeps else stored_anew(pairs),
        )


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


def _rank_results(rank: int, pairs: Sequence[CallPair], found: Findings) -> Iterator[RankResult]:
    """A line a step, up to the first that has a culprit: later ones inherit from it."""
    steps: dict[int, list[CallPair]] = {}
    for pair in pairs:
        steps.setdefault(pair.call.step, []).append(pair)
    for step, unit in sorted(steps.items()):
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
