"""Processes that measure pairs of stored tensors, started while the captures are still read."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorprobe.numerics import stored_pairs
from tensorprobe.numerics.metrics import PairMetrics
from tensorprobe.numerics.stored_pairs import StoredPair, measure_stored

# Below this it is over before processes have started.
IN_PROCESS_NBYTES = 96 << 20
_EACH_NBYTES = 32 << 20  # of both sides; for less, one more process is not worth its start
_BATCH_NBYTES = 32 << 20
_LEAST_NBYTES = 1 << 20  # measured in about the time in which it is sent for
_BATCH = 256

Result = PairMetrics | str
Tell = Callable[[Sequence[int]], None]  # these are measured


class Workers:
    """A number of child processes; where one dies, what it leaves is measured here.

    Plain processes that run one function, not multiprocessing's: those would import the user's
    script again, which has no `__main__` guard.
    """

    def __init__(self, n: int, *, for_anything: bool = False) -> None:
        self.for_anything = for_anything  # also for what is sooner measured here
        self._children: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # the system's limit: fewer will do
            for _ in range(n):
                self._children.append(_start())

    def results(
        self, pairs: Sequence[StoredPair], nbytes: Sequence[int], tell: Tell
    ) -> list[Result]:
        """The metrics of each, or why there are none."""
        if not self._children:
            return [measure_stored(*pair) for pair in pairs]
        results: list[Result] = [""] * len(pairs)
        todo: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        n_batches = 0
        for batch in batches(nbytes, len(self._children)):
            todo.put(batch)
            n_batches += 1
        done: queue.SimpleQueue[tuple[list[int], list[Result]]] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_feed, args=(child, pairs, todo, done), daemon=True)
            for child in self._children
        ]
        for thread in threads:
            thread.start()
        for _ in range(n_batches):
            batch, found = done.get()
            for i, result in zip(batch, found, strict=True):
                results[i] = result
            tell(batch)
        for thread in threads:
            thread.join()
        return results

    def close(self) -> None:
        """They have nothing to lose: no need to wait until one has started."""
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(OSError), child:  # it may have died with something left to be sent
                pass


@contextmanager
def workers_for(
    sources: Iterable[str | os.PathLike[str]], processes: int | None
) -> Iterator[Workers | None]:
    """Processes for comparing what is at these paths; None where one does it as well."""
    n = processes or len(os.sched_getaffinity(0))
    if processes is None:
        n = min(n, _nbytes_up_to(sources, n * _EACH_NBYTES) // _EACH_NBYTES)
    if n <= 1:
        yield None
        return
    workers = Workers(n, for_anything=processes is not None)
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


def _start() -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from {stored_pairs.__name__} import serve; "
    return subprocess.Popen(
        [sys.executable, "-c", code + "serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _feed(
    child: subprocess.Popen[bytes],
    pairs: Sequence[StoredPair],
    todo: queue.SimpleQueue[list[int]],
    done: queue.SimpleQueue[tuple[list[int], list[Result]]],
) -> None:
    """One child and its batches."""
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        try:
            batch = todo.get_nowait()
        except queue.Empty:
            return
        work = [pairs[i] for i in batch]
        found: list[Result] = []
        if child.poll() is None:
            try:
                pickle.dump(work, child.stdin, pickle.HIGHEST_PROTOCOL)
                child.stdin.flush()
                found = pickle.load(child.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                child.kill()  # an answer that comes later would be taken for another's
        done.put((batch, found or [measure_stored(*pair) for pair in work]))
