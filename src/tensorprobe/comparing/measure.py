"""Pairs the tensors of paired calls and measures each pair of contents once."""

from __future__ import annotations

import os
import pickle
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensorprobe.comparing.align import Pair
from tensorprobe.comparing.mapping import plain_path
from tensorprobe.errors import BadUsage
from tensorprobe.records import (
    LAST_NODE,
    Call,
    TensorRecord,
    TensorSummary,
    digests_tell,
    kind_of_digest,
)
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.pair_metrics import FRACTION_BITS, PairMetrics, equal_metrics

if TYPE_CHECKING:
    from tensorprobe.tensors.stored_pairs import StoredPair

    Result = PairMetrics | str
    _Done = tuple[list[int], list[Result]]

# Below this it is over before processes have started.
IN_PROCESS_NBYTES = 96 << 20
_EACH_NBYTES = 32 << 20  # of both sides; for less, one more process is not worth its start
_BATCH_NBYTES = 32 << 20
_LEAST_NBYTES = 1 << 20  # measured in about the time in which it is sent for
_BATCH = 256
_SPARE = 4  # lines given up where the system has no more files: to start takes some
# A process is one thread. glibc gives memory back whenever this much is free, and every page of it
# costs a fault when it is needed again: a fifth of the time, for arrays of 128 KiB.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
Tell = Callable[[Sequence[int]], None]  # these are measured


class Done(NamedTuple):
    """How far measuring has come: bytes of both sides, and calls."""

    nbytes: int
    of_nbytes: int
    calls: int
    of_calls: int


Progress = Callable[[Done], None]
_PLACE = re.compile(r"\.(?:input|output)\.\d+$")
_Job = tuple[Blob, Blob, str, str]  # the contents of both sides, and their dtypes


class TensorPair(msgspec.Struct, gc=False):
    """One tensor of a pair of calls: its two records, and how far they are apart."""

    name: str  # without the call: "input.0"
    actual: TensorRecord | None
    expected: TensorRecord | None
    metrics: PairMetrics | None = None
    problem: str | None = None  # why there are no metrics where there could be some
    distance: float | None = None  # rounding.distance's, kept once it is known
    coarse: float = 0.0  # the unit roundoff of the arithmetic, where that is coarser than the dtype
    is_made_anew: bool = False  # computed of other numbers: equal statistics are no permutation

    @property
    def role(self) -> str:
        record = self.actual or self.expected
        assert record is not None
        return record.role


class CallPair(msgspec.Struct, gc=False):
    """A pair of calls, or a call of one side, with its tensors."""

    pair: Pair
    tensors: list[TensorPair]

    @property
    def call(self) -> Call:
        call = self.pair.actual or self.pair.expected
        assert call is not None
        return call

    @property
    def is_paired(self) -> bool:
        return self.pair.actual is not None and self.pair.expected is not None


def pair_tensors(pair: Pair) -> CallPair:
    """The tensors of a pair, by name; where an argument is given by position on one side and by
    keyword on the other, by order and shape. A gradient of one place is never that of another."""
    ours = _by_suffix(pair.actual)
    theirs = _by_suffix(pair.expected)
    if ours.keys() != theirs.keys() and ours and theirs:
        ours, theirs = _without_wrappers(ours), _without_wrappers(theirs)
    if _last_node(pair.actual) != _last_node(pair.expected) and ours and theirs:
        ours, theirs = _without_outputs(ours), _without_outputs(theirs)
    if ours.keys() == theirs.keys() or not ours or not theirs:
        names: Iterable[str] = ours or theirs
        return CallPair(pair, [_tensor_pair(n, ours.get(n), theirs.get(n)) for n in names])
    rows = []
    free = [record for name, record in theirs.items() if name not in ours]
    for name, record in ours.items():
        other = theirs.get(name)
        if other is None:
            same = [r for r in free if r.role == record.role and r.shape == record.shape]
            if same and not (
                _has_place(pair.actual, record) and _has_place(pair.expected, same[0])
            ):
                other = same[0]
                free.remove(other)
        rows.append(_tensor_pair(name, record, other))
    prefix = pair.expected.name + "." if pair.expected else ""
    rows += [TensorPair(record.name.removeprefix(prefix), None, record) for record in free]
    return CallPair(pair, rows)


def _has_place(call: Call | None, record: TensorRecord) -> bool:
    """Whether it is the gradient of a value that is known by its place: "output.1" of backward."""
    if call is None or call.direction != "backward":
        return False
    return _PLACE.search(record.name) is not None


def _without_wrappers(records: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Parameters of a compiled or wrapped model by the names that they have without it."""
    plain = {plain_path(name): record for name, record in records.items()}
    return plain if len(plain) == len(records) else records


def _last_node(call: Call | None) -> bool:
    """Whether its outputs are what msprobe takes for gradients: those of the last node."""
    return call is not None and LAST_NODE in call.notes


def _without_outputs(records: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    return {name: record for name, record in records.items() if record.role != "output"}


def _tensor_pair(
    name: str, actual: TensorRecord | None, expected: TensorRecord | None
) -> TensorPair:
    """A pair with no more in its records than what both sides know in the same way."""
    if actual is None or expected is None:
        return TensorPair(name, actual, expected)
    a, e = actual.digest, expected.digest
    if a is not None and e is not None and kind_of_digest(a) != kind_of_digest(e):
        actual = msgspec.structs.replace(actual, digest=None)
        expected = msgspec.structs.replace(expected, digest=None)
    s, t = actual.summary, expected.summary
    if s is not None and t is not None and not (s.counted and t.counted):
        actual = msgspec.structs.replace(actual, summary=_as_peers(s, t))
        expected = msgspec.structs.replace(expected, summary=_as_peers(t, s))
    return TensorPair(name, actual, expected)


def _as_peers(summary: TensorSummary, other: TensorSummary) -> TensorSummary:
    """A summary as far as the peers' go, whose statistics a NaN or an infinity spoils."""
    if summary.nan_count or other.nan_count:
        nan = min(summary.nan_count, 1)
        return TensorSummary(None, None, None, None, nan, 0, 0, counted=False)
    whole = other.mean is not None and summary.is_finite and other.is_finite
    return TensorSummary(
        summary.min,
        summary.max,
        summary.mean if whole else None,
        summary.norm if whole and other.norm is not None else None,
        0,
        min(summary.inf_count, 1),
        0,
        counted=False,
    )


def _by_suffix(call: Call | None) -> dict[str, TensorRecord]:
    if call is None:
        return {}
    start = len(call.name) + 1
    prefix = call.name + "."
    return {
        record.name[start:] if record.name.startswith(prefix) else record.name: record
        for record in call.tensors
    }


def measure(
    pairs: Iterable[CallPair], *, workers: Workers | None = None, progress: Progress | None = None
) -> None:
    """Fill in the metrics of every tensor whose content both sides kept."""
    pairs = list(pairs)
    jobs: dict[_Job, list[tuple[int, TensorPair]]] = {}
    for i, pair in enumerate(pairs):
        for row in pair.tensors:
            key = _job(row)
            if key is not None:
                jobs.setdefault(key, []).append((i, row))
    work = [_stored_pair(group[0][1]) for group in jobs.values()]
    nbytes = [key[0].nbytes + key[1].nbytes for key in jobs]
    tell = _Counter(len(pairs), jobs.values(), nbytes, progress)
    for group, result in zip(jobs.values(), _results(work, nbytes, workers, tell), strict=True):
        for _, row in group:
            if isinstance(result, str):
                row.problem = result
            else:
                row.metrics = result


def _job(row: TensorPair) -> _Job | None:
    """What has to be read to measure a pair; None where nothing has."""
    a, e = row.actual, row.expected
    if a is None or e is None or a.blob is None or e.blob is None:
        return None
    if a.shape != e.shape:
        row.problem = f"shapes differ: {list(a.shape)} and {list(e.shape)}"
        return None
    if digests_tell(a, e) and a.digest == e.digest and a.dtype == e.dtype:
        norm = e.summary.norm if e.summary else None
        row.metrics = equal_metrics(e.numel, norm, e.dtype in FRACTION_BITS)
        return None
    return a.blob, e.blob, a.dtype, e.dtype


class _Counter:
    """Counts bytes, and calls all of whose tensors are measured."""

    def __init__(
        self,
        n_calls: int,
        groups: Iterable[list[tuple[int, TensorPair]]],
        nbytes: Sequence[int],
        progress: Progress | None,
    ) -> None:
        self._progress = progress
        if progress is None:
            return
        self._owners = [[i for i, _ in group] for group in groups]
        self._left = Counter(i for owners in self._owners for i in owners)
        self._calls = n_calls - len(self._left)
        self._n_calls = n_calls
        self._sizes = nbytes
        self._nbytes = 0
        self._total = sum(nbytes)

    def __call__(self, jobs: Sequence[int]) -> None:
        if self._progress is None:
            return
        for job in jobs:
            self._nbytes += self._sizes[job]
            for i in self._owners[job]:
                self._left[i] -= 1
                self._calls += not self._left[i]
        self._progress(Done(self._nbytes, self._total, self._calls, self._n_calls))


def _results(
    work: list[StoredPair], nbytes: list[int], workers: Workers | None, tell: _Counter
) -> Iterable[PairMetrics | str]:
    """The metrics of each, or why there are none, in order."""
    if workers is None or (sum(nbytes) < IN_PROCESS_NBYTES and not workers.for_anything):
        return _one_by_one(work, tell)
    return workers.results(work, nbytes, tell)


def _one_by_one(work: list[StoredPair], tell: _Counter) -> Iterator[PairMetrics | str]:
    for i, pair in enumerate(work):
        yield from measured_here([pair])
        tell((i,))


def _stored_pair(row: TensorPair) -> StoredPair:
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    assert a.blob is not None
    assert e.blob is not None
    return (a.name, a.dtype, a.shape, a.blob), (e.name, e.dtype, e.shape, e.blob)


class TerminalProgress:
    """A bar on a terminal: calls (or another noun), gigabytes, and how long it will take."""

    def __init__(self, delay_s: float = 0.5, noun: str = "calls") -> None:
        self._noun = noun
        self._delay_s = delay_s  # what is over sooner needs no bar
        self._bar: Any = None
        self._task: Any = None
        self._begun = time.monotonic()

    def __call__(self, done: Done) -> None:
        if self._bar is None:
            if time.monotonic() - self._begun < self._delay_s:
                return
            self._start(done)
        self._bar.update(self._task, completed=done.nbytes, calls=done.calls)

    def _start(self, done: Done) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        text = TextColumn(
            f"comparing {{task.fields[calls]}}/{{task.fields[of_calls]}} {self._noun}"
        )
        columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        fields = {"calls": done.calls, "of_calls": done.of_calls}
        self._task = self._bar.add_task("", total=done.of_nbytes, **fields)
        self._bar.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


class Workers:
    """A number of processes; where one dies, what it leaves is measured here.

    One Python is started, imports what it takes to measure, and forks the others: imports take
    longer than reading the captures, and each would do them again. It runs one function and not
    multiprocessing's, which would import the user's script again, that has no `__main__` guard.
    """

    def __init__(self, n: int, *, for_anything: bool = False) -> None:
        self.for_anything = for_anything  # also for what is sooner measured here
        self._lines: list[_Line] = []
        self._first: subprocess.Popen[bytes] | None = None
        self._till: socket.socket | None = None  # whose end is theirs
        ends: list[socket.socket] = []
        try:
            for _ in range(n):
                mine, its = socket.socketpair()
                self._lines.append(_Line(mine))
                ends.append(its)
        except OSError:  # the system's limit: fewer will do
            for _ in range(min(_SPARE, len(ends))):
                self._lines.pop().close()
                ends.pop().close()
        with suppress(OSError):
            self._till, its = socket.socketpair()
            with its:
                self._first = _start([end.fileno() for end in ends], its)
        for end in ends:
            end.close()

    def results(
        self, pairs: Sequence[StoredPair], nbytes: Sequence[int], tell: Tell
    ) -> list[Result]:
        """The metrics of each, or why there are none."""
        if not self._lines:
            return measured_here(pairs)
        results: list[Result] = [""] * len(pairs)
        todo: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for batch in batches(nbytes, len(self._lines)):
            todo.put(batch)
        done: queue.SimpleQueue[_Done | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_feed, args=(line, pairs, todo, done), daemon=True)
            for line in self._lines
        ]
        for thread in threads:
            thread.start()
        for batch, found in _all_done(done, len(threads)):
            for i, result in zip(batch, found, strict=True):
                results[i] = result
            tell(batch)
        while not todo.empty():  # what the dead have left
            for i in todo.get():
                (results[i],) = measured_here([pairs[i]])
                tell((i,))
        return results

    def end(self) -> None:
        """They have nothing to lose: no need to wait until one has started or is done."""
        if self._first is not None:
            self._first.terminate()  # while it imports; later it waits for the next line
        if self._till is not None:
            with suppress(OSError):
                self._till.shutdown(socket.SHUT_RDWR)  # a process the program forked has it too
            self._till.close()
        while self._lines:
            self._lines.pop().close()

    def close(self) -> None:
        """Wait until they are gone."""
        self.end()
        if self._first is not None:
            with self._first:
                pass


class _Line:
    """The way to one process and back."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._to, self._from = end.makefile("wb"), end.makefile("rb")

    def ask(self, work: Sequence[StoredPair]) -> list[Result]:
        """What it has measured; nothing where it is gone."""
        try:
            pickle.dump(work, self._to, pickle.HIGHEST_PROTOCOL)
            self._to.flush()
            found: list[Result] = pickle.load(self._from)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            self.close()  # an answer that comes later would be taken for another's
            return []
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer gets none
        for each in (self._to, self._from, self._end):
            with suppress(OSError):  # it may have died with something left to be sent
                each.close()


@contextmanager
def workers_for(
    sources: Iterable[str | os.PathLike[str]], jobs: int | Workers | None
) -> Iterator[Workers | None]:
    """Processes for comparing what is at these paths; None where one does it as well."""
    if isinstance(jobs, Workers):
        yield jobs
        return
    if jobs is not None and jobs < 1:
        raise BadUsage(f"jobs={jobs}: expected 1 or more")
    n = jobs or len(os.sched_getaffinity(0))
    if jobs is None:
        n = min(n, _nbytes_up_to(sources, n * _EACH_NBYTES) // _EACH_NBYTES)
    if n <= 1:
        yield None
        return
    workers = Workers(n, for_anything=jobs is not None)
    try:
        yield workers
    finally:
        workers.close()


def batches(nbytes: Sequence[int], n: int) -> Iterator[list[int]]:
    """What goes to a process at a time: the largest first, each alone, so that none is left for
    the end; the rest as it lies in the files, in smaller portions towards the end."""
    total = sum(nbytes)
    alone = max(min(total // (8 * n), _BATCH_NBYTES), _LEAST_NBYTES)
    large = [i for i, size in enumerate(nbytes) if size >= alone]
    large.sort(key=lambda i: -nbytes[i])
    yield from ([i] for i in large)
    left = total - sum(nbytes[i] for i in large)
    batch: list[int] = []
    size = 0
    for i, each in enumerate(nbytes):
        if each >= alone:
            continue
        batch.append(i)
        size += each
        portion = max(min(left // (4 * n), _BATCH_NBYTES), _LEAST_NBYTES)
        if len(batch) >= _BATCH or size >= portion:
            yield batch
            left -= size
            batch, size = [], 0
    if batch:
        yield batch


def _nbytes_up_to(sources: Iterable[str | os.PathLike[str]], enough: int) -> int:
    """How much there is to read, as far as the sizes of files tell, counted to `enough`."""
    total = 0
    for source in sources:
        path = Path(source)
        for folder, _, files in os.walk(path.parent if path.is_file() else path):
            for file in files:
                if file.endswith((".safetensors", ".npy", ".pt")):
                    with suppress(OSError):
                        total += os.stat(os.path.join(folder, file)).st_blocks * 512
                if total >= enough:
                    return enough
    return total


def _start(ends: Sequence[int], till: socket.socket) -> subprocess.Popen[bytes]:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import gc; gc.disable()\n"  # for the imports; serve_all enables it
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # this process ends it
        "from tensorprobe.tensors.stored_pairs import serve_all\n"
        f"serve_all({list(ends)})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=till.fileno(),
        pass_fds=ends,
        env=os.environ | WORKER_ENVIRONMENT,
    )


def _feed(
    line: _Line,
    pairs: Sequence[StoredPair],
    todo: queue.SimpleQueue[list[int]],
    done: queue.SimpleQueue[_Done | None],
) -> None:
    """One process and its batches, then None; where it dies, another can have the batch."""
    with suppress(queue.Empty):
        while True:
            batch = todo.get_nowait()
            found = line.ask([pairs[i] for i in batch])
            if not found:
                todo.put(batch)
                break
            done.put((batch, found))
    done.put(None)


def _all_done(done: queue.SimpleQueue[_Done | None], n: int) -> Iterator[_Done]:
    """What comes in until all of n have ended."""
    while n:
        found = done.get()
        if found is None:
            n -= 1
        else:
            yield found


def measured_here(pairs: Sequence[StoredPair]) -> list[Result]:
    """The same in this process."""
    from tensorprobe.tensors.stored_pairs import measure_stored

    return [measure_stored(*pair) for pair in pairs]
