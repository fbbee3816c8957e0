"""Pairs the tensors of paired calls and measures them, in processes, in bounded memory."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import msgspec

from tensorprobe.compare.align import Pair
from tensorprobe.errors import TensorprobeError
from tensorprobe.numerics.metrics import (
    FRACTION_BITS,
    PairMetrics,
    equal_metrics,
    measure_pair,
)
from tensorprobe.records import Call, TensorRecord, TensorSummary
from tensorprobe.store.msprobe import LAST_NODE

# Below this it is over before processes have started.
_IN_PROCESS_NBYTES = 96 << 20
_BATCH_NBYTES = 64 << 20
_BATCH = 256


class Done(NamedTuple):
    """How far measuring has come: bytes of both sides, and calls."""

    nbytes: int
    of_nbytes: int
    calls: int
    of_calls: int


Progress = Callable[[Done], None]


class TensorPair(msgspec.Struct, gc=False):
    """One tensor of a pair of calls: its two records, and how far they are apart."""

    name: str  # without the call: "input.0"
    actual: TensorRecord | None
    expected: TensorRecord | None
    metrics: PairMetrics | None = None
    problem: str | None = None  # why there are no metrics where there could be some
    distance: float | None = None  # judge's, kept once it is known

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
    keyword on the other, by order and shape."""
    ours = _by_suffix(pair.actual)
    theirs = _by_suffix(pair.expected)
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
            if same:
                other = same[0]
                free.remove(other)
        rows.append(_tensor_pair(name, record, other))
    prefix = pair.expected.name + "." if pair.expected else ""
    rows += [TensorPair(record.name.removeprefix(prefix), None, record) for record in free]
    return CallPair(pair, rows)


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
    if a is not None and e is not None and digest_kind(a) != digest_kind(e):
        actual = msgspec.structs.replace(actual, digest=None)
        expected = msgspec.structs.replace(expected, digest=None)
    s, t = actual.summary, expected.summary
    if s is not None and t is not None and not (s.counted and t.counted):
        actual = msgspec.structs.replace(actual, summary=_as_peers(s, t))
        expected = msgspec.structs.replace(expected, summary=_as_peers(t, s))
    return TensorPair(name, actual, expected)


def digest_kind(digest: str) -> str:
    """What a digest was made by: "crc32" of "crc32:8fa00131"; ours carry no word."""
    return digest.partition(":")[0] if ":" in digest else ""


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
    pairs: Iterable[CallPair], *, processes: int | None = None, progress: Progress | None = None
) -> None:
    """Fill in the metrics of every tensor whose content both sides kept."""
    pairs = list(pairs)
    jobs: dict[tuple[Any, ...], list[tuple[int, TensorPair]]] = {}
    for i, pair in enumerate(pairs):
        for row in pair.tensors:
            key = _job(row)
            if key is not None:
                jobs.setdefault(key, []).append((i, row))
    rows = [(group[0][1].actual, group[0][1].expected) for group in jobs.values()]
    tell = _Counter(len(pairs), jobs.values(), progress) if progress is not None else None
    for group, result in zip(jobs.values(), _results(rows, processes, tell), strict=True):
        for _, row in group:
            if isinstance(result, str):
                row.problem = result
            else:
                row.metrics = result


def _job(row: TensorPair) -> tuple[Any, ...] | None:
    """What has to be read to measure a pair; None where nothing has."""
    a, e = row.actual, row.expected
    if a is None or e is None or a.blob is None or e.blob is None:
        return None
    if a.shape != e.shape:
        row.problem = f"shapes differ: {list(a.shape)} and {list(e.shape)}"
        return None
    if a.digest is not None and a.digest == e.digest and a.dtype == e.dtype:
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
        progress: Progress,
    ) -> None:
        self._owners = [[i for i, _ in group] for group in groups]
        self._left = Counter(i for owners in self._owners for i in owners)
        self._calls = n_calls - len(self._left)
        self._n_calls = n_calls
        self._nbytes = 0
        self._progress = progress

    def __call__(self, jobs: Iterable[int], nbytes: int, total: int) -> None:
        self._nbytes += nbytes
        for job in jobs:
            for i in self._owners[job]:
                self._left[i] -= 1
                self._calls += not self._left[i]
        self._progress(Done(self._nbytes, total, self._calls, self._n_calls))


Work = tuple[TensorRecord, TensorRecord]


def _results(
    work: list[Any], processes: int | None, tell: _Counter | None
) -> Iterator[PairMetrics | str]:
    """The metrics of each, or why there are none, in order."""
    nbytes = [_nbytes(item) for item in work]
    total = sum(nbytes)
    n = processes or len(os.sched_getaffinity(0))
    n = min(n, len(work))
    if n <= 1 or (processes is None and total < _IN_PROCESS_NBYTES):
        for i, (item, size) in enumerate(zip(work, nbytes, strict=True)):
            yield measure_records(*item)
            if tell:
                tell((i,), size, total)
        return
    yield from _in_processes(work, nbytes, n, tell)


def _nbytes(item: Work) -> int:
    return sum(record.blob.nbytes for record in item if record.blob)


def measure_records(actual: TensorRecord, expected: TensorRecord) -> PairMetrics | str:
    """The metrics of two stored tensors, or why they cannot be had."""
    try:
        return measure_pair(actual.array(), expected.array())
    except (TensorprobeError, OSError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _batches(nbytes: list[int]) -> Iterator[range]:
    start = size = 0
    for i, n in enumerate(nbytes):
        size += n
        if size >= _BATCH_NBYTES or i - start >= _BATCH - 1:
            yield range(start, i + 1)
            start, size = i + 1, 0
    if start < len(nbytes):
        yield range(start, len(nbytes))


def _in_processes(
    work: list[Any], nbytes: list[int], n: int, tell: _Counter | None
) -> Iterator[PairMetrics | str]:
    """Plain child processes that run this module, not multiprocessing's: those would import the
    user's script again, which has no `__main__` guard."""
    batches = list(_batches(nbytes))
    results: list[PairMetrics | str | None] = [None] * len(work)
    todo: queue.SimpleQueue[range] = queue.SimpleQueue()
    for batch in batches:
        todo.put(batch)
    done: queue.SimpleQueue[tuple[range, list[PairMetrics | str]]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_feed, args=(work, todo, done), daemon=True)
        for _ in range(min(n, len(batches)))
    ]
    for thread in threads:
        thread.start()
    total = sum(nbytes)
    for _ in batches:
        batch, found = done.get()
        for i, result in zip(batch, found, strict=True):
            results[i] = result
        if tell:
            tell(batch, sum(nbytes[i] for i in batch), total)
    for thread in threads:
        thread.join()
    for found_result in results:
        assert found_result is not None
        yield found_result


def _feed(
    work: list[Any],
    todo: queue.SimpleQueue[range],
    done: queue.SimpleQueue[tuple[range, list[PairMetrics | str]]],
) -> None:
    """One child process and its batches; what a dead child leaves is measured here."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    alive = True
    with child:
        while True:
            try:
                batch = todo.get_nowait()
            except queue.Empty:
                break
            items = [work[i] for i in batch]
            found: list[PairMetrics | str] = []
            if alive:
                try:
                    pickle.dump(items, child.stdin, protocol=pickle.HIGHEST_PROTOCOL)
                    child.stdin.flush()
                    found = pickle.load(child.stdout)
                except (OSError, EOFError, pickle.UnpicklingError):
                    alive = False
            done.put((batch, found or [measure_records(*item) for item in items]))
        if alive:
            child.stdin.close()


def serve(stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
    """The child: batches in, metrics out, until the parent closes the pipe or is gone."""
    source, sink = stdin or sys.stdin.buffer, stdout or sys.stdout.buffer
    while True:
        try:
            items = pickle.load(source)
        except EOFError:
            return
        pickle.dump([measure_records(*item) for item in items], sink, protocol=5)
        sink.flush()


class TerminalProgress:
    """A bar on a terminal: calls, gigabytes, and how long it will take."""

    def __init__(self, delay_s: float = 0.5) -> None:
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

        text = TextColumn("comparing {task.fields[calls]}/{task.fields[of_calls]} calls")
        columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        fields = {"calls": done.calls, "of_calls": done.of_calls}
        self._task = self._bar.add_task("", total=done.of_nbytes, **fields)
        self._bar.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
