"""Processes that measure pairs of stored tensors, started while the captures are still read."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.errors import BadUsage

if TYPE_CHECKING:  # not at run time: this process needs no numpy while others measure
    from tensorprobe.tensors.pair_metrics import PairMetrics
    from tensorprobe.tensors.stored_pairs import StoredPair

    Result = PairMetrics | str
    _Done = tuple[list[int], list[Result]]  # a batch

# Below this it is over before processes have started.
IN_PROCESS_NBYTES = 96 << 20
_EACH_NBYTES = 32 << 20  # of both sides; for less, one more process is not worth its start
_BATCH_NBYTES = 32 << 20
_LEAST_NBYTES = 1 << 20  # measured in about the time in which it is sent for
_BATCH = 256
_SPARE = 4  # lines given up where the system has no more files: to start takes some

# A process is one thread. glibc gives memory back whenever this much is free, and every page of it
# costs a fault when it is needed again: a fifth of the time, for arrays of 128 KiB.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}

Tell = Callable[[Sequence[int]], None]  # these are measured


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
        env=os.environ | _ENVIRONMENT,
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
