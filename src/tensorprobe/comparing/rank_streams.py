"""Two runs of several ranks that are not held in memory, and the pairs of one at a time."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, overload

import msgspec

from tensorprobe.comparing.evidence import has_own_references
from tensorprobe.comparing.large_runs import are_large, log_nbytes, whole_runs
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import CallPair, Done, Progress, Workers, workers_for
from tensorprobe.comparing.rank_pairs import FolderRanks, RankPart
from tensorprobe.comparing.rank_processes import RankProcesses, engine_named
from tensorprobe.comparing.rank_survey import CallsSeen, RankSurvey
from tensorprobe.comparing.rank_switches import RankSwitches
from tensorprobe.comparing.rank_work import Engine, Here
from tensorprobe.comparing.units import Size
from tensorprobe.errors import BadUsage
from tensorprobe.records import Capture, Gap
from tensorprobe.store.native import check_readable
from tensorprobe.store.rank_folders import RankByRank, RankFolders

Sizes = dict[tuple[int, int], Size]


class MetricsStore:
    """The metrics of each rank's tensors, in a file that is gone with this."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[int, tuple[int, int]] = {}

    def put(self, rank: int, metrics: bytes) -> None:
        if not metrics:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (see below)
            weakref.finalize(self, self._file.close)
        self._places[rank] = self._file.seek(0, os.SEEK_END), len(metrics)
        self._file.write(metrics)

    def get(self, rank: int) -> bytes:
        if self._file is None or rank not in self._places:
            return b""
        offset, nbytes = self._places[rank]
        self._file.seek(offset)
        return self._file.read(nbytes)


class PairsOfRanks(Sequence[CallPair]):
    """The pairs of all ranks, of which one is read at a time."""

    def __init__(
        self,
        source: FolderRanks,
        parts: Iterable[RankPart],
        store: MetricsStore,
        surveys: Sequence[RankSurvey],
        jobs: int,
    ) -> None:
        self.source = source
        self.n_pairs = {each.rank: each.n_pairs for each in surveys if each.n_pairs}
        self.n_rows = sum(each.n_rows for each in surveys)
        self.jobs = jobs  # processes that may go through them
        self._parts = {part.rank: part for part in parts if part.rank in self.n_pairs}
        self._store = store

    def parts(self) -> Iterator[RankPart]:
        """Each rank with all that it takes to make its pairs again."""
        for rank in self.n_pairs:
            yield self.part(rank)

    def part(self, rank: int) -> RankPart:
        return msgspec.structs.replace(self._parts[rank], measured=self._store.get(rank))

    def of_rank(self, rank: int) -> list[CallPair]:
        """The pairs of one rank."""
        return self.source.pairs(self.part(rank)).pairs if rank in self.n_pairs else []

    def __len__(self) -> int:
        return sum(self.n_pairs.values())

    def __iter__(self) -> Iterator[CallPair]:
        for rank in self.n_pairs:
            yield from self.of_rank(rank)

    @overload
    def __getitem__(self, index: int) -> CallPair: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallPair]: ...
    def __getitem__(self, index: int | slice) -> CallPair | list[CallPair]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step > 0:
                return list(islice(self, start, stop, step))
            return [self[i] for i in range(start, stop, step)]
        left = range(len(self))[index]
        for rank, n in self.n_pairs.items():
            if left < n:
                return self.of_rank(rank)[left]
            left -= n
        raise IndexError(index)


class RankStreams:
    """Two runs, the processes that go through their ranks, and where these are."""

    def __init__(
        self,
        paths: tuple[Path, Path],
        mapping: CallMapping,
        step: int | None,
        jobs: int | None,
        engine: str | None,
    ) -> None:
        self.mapping, self.step = mapping, step
        self.store = MetricsStore()
        self._folders = RankFolders(paths[0]), RankFolders(paths[1])
        ranks = sorted({*self._folders[0].steps, *self._folders[1].steps})
        self.parts = [
            RankPart(
                rank,
                (self._folders[0].steps.get(rank, []), self._folders[1].steps.get(rank, [])),
            )
            for rank in ranks
        ]
        if engine is not None:  # its processes may be in another folder
            for part in self.parts:
                part.steps = (
                    [each.absolute() for each in part.steps[0]],
                    [each.absolute() for each in part.steps[1]],
                )
            paths = paths[0].absolute(), paths[1].absolute()
        switches = RankSwitches((self._folders[0].facts, self._folders[1].facts), ranks)
        self.source = FolderRanks(paths, switches, mapping, step)
        self.jobs = min(jobs or len(os.sched_getaffinity(0)), len(ranks))
        self._workers: Workers | None = None
        self.engine = self._engine(paths, jobs, engine)

    def _engine(self, paths: tuple[Path, Path], jobs: int | None, engine: str | None) -> Engine:
        if has_own_references():  # they are functions of this process
            if engine is not None:
                raise BadUsage(
                    "references that this program has registered are not known where `engine` "
                    "works. Put them into a file: `references=FILE`"
                )
            self.jobs = 1
            return Here()
        if engine is not None:
            return engine_named(engine, jobs)
        if jobs is None and self.jobs < len(os.sched_getaffinity(0)):
            # more cores than ranks: where tensors are to be measured, all cores do one rank's
            context = workers_for(paths, None)
            self._workers = context.__enter__()
            weakref.finalize(self, context.__exit__, None, None, None)
            if self._workers is not None:
                self.source.workers = self._workers
                self.jobs = 1
        return RankProcesses(self.jobs) if self.jobs > 1 else Here()

    def __enter__(self) -> RankStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        if self._workers is not None:
            self._workers.end()
            self.source.workers = None

    def told(self, parts: Sequence[RankPart], progress: Progress | None) -> Iterator[RankPart]:
        """The parts, and how far one has come."""
        if progress is None:
            yield from parts
            return
        sizes = [sum(map(log_nbytes, (*part.steps[0], *part.steps[1]))) for part in parts]
        done = 0
        for n, part in enumerate(parts):
            progress(Done(done, sum(sizes), n, len(parts)))
            done += sizes[n]
            yield part

    def captures(
        self, surveys: Sequence[RankSurvey]
    ) -> tuple[tuple[Capture, Capture], tuple[Sizes, Sizes]]:
        """Both runs, and how much they have of each step."""
        first, second = (self._side(n, surveys) for n in (0, 1))
        return (first[0], second[0]), (first[1], second[1])

    def _side(self, n: int, surveys: Sequence[RankSurvey]) -> tuple[Capture, Sizes]:
        folders = self._folders[n]
        gaps, end_gaps = list(folders.gaps), list[Gap]()
        unfinished: list[str] = []
        unopened: list[str] = []
        seen = CallsSeen()
        ranks = []
        sizes: Sizes = {}
        for survey in surveys:
            assert survey.sides is not None
            side = survey.sides[n]
            gaps += side.gaps
            end_gaps += side.end_gaps
            unfinished += side.unfinished
            unopened += side.unopened
            seen.add(side.seen)
            if side.seen.n_calls:
                ranks.append(survey.rank)
            for step, n_calls in side.n_calls.items():
                sizes[survey.rank, step] = Size(n_calls, step in side.beside)
        check_readable(folders.path, seen.n_calls, len(gaps), unopened)
        found = RankByRank(folders, [*gaps, *end_gaps], unfinished, sorted(seen.steps), ranks, seen)
        return found, sizes

    def pairs(self, surveys: Sequence[RankSurvey]) -> PairsOfRanks:
        """The pairs of all ranks, once these have been surveyed."""
        return PairsOfRanks(self.source, self.parts, self.store, surveys, self.jobs)


def streams_for(
    sources: tuple[object, object],
    mapping: CallMapping,
    step: int | None,
    rank: int | None,
    jobs: object,
    engine: str | None,
    *,
    has_noise: bool = False,
) -> RankStreams | None:
    """What goes through two runs rank by rank, where that is worth it; else None."""
    paths = whole_runs(sources)
    may = paths is not None and rank is None and not has_noise and not isinstance(jobs, Workers)
    if not may or paths is None:
        if engine is not None:
            raise BadUsage(
                "`engine` spreads the ranks of two whole native runs over processes: "
                + ("these are not such" if paths is None else "not with `rank` or `noise`")
            )
        return None
    n = jobs if isinstance(jobs, int) else None
    if n is not None and n < 1:
        return None  # what is wrong is said elsewhere
    if engine is None and (n or 1) == 1 and not are_large(paths):
        return None
    return RankStreams(paths, mapping, step, n, engine)
