"""Statistics and digests of large arrays by several threads, which change no bit. No torch.

Every chunk gives a tally of its own and the tallies are merged in the order of the chunks, whoever
made them. numpy lets go of the interpreter in all that takes long.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tensorprobe.numerics import digest, host
from tensorprobe.numerics.digest import Digester
from tensorprobe.numerics.host import Array, Tally
from tensorprobe.records import TensorSummary

EACH = 2 * host.CHUNK  # elements; for fewer, no other thread is worth being woken
MAX_THREADS = 8  # between the calls that read, one at a time runs; more would wait for it

_Part = tuple[list[Tally], int]  # the tallies of its chunks, and its part of the digest


class _Pool:
    """The threads that help, started when they are first needed, and again after a fork."""

    def __init__(self) -> None:
        self._process = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, array: Array, dtype: str, digester: Digester | None) -> Future[_Part] | None:
        """Have this part read; None where the interpreter is ending and starts no threads."""
        executor = self._executor
        if executor is None or self._process != os.getpid():
            executor = ThreadPoolExecutor(MAX_THREADS - 1, "tensorprobe-statistics")
            self._executor, self._process = executor, os.getpid()
        try:
            return executor.submit(_read, array, dtype, digester)
        except RuntimeError:
            return None


_POOL = _Pool()


def summarize_array(
    array: Array, dtype: str, *, repeat: int = 1, threads: int = 1
) -> TensorSummary:
    """As `host.summarize_array`, to the last bit, by as many threads as are of use."""
    threads = _of_use(threads, array, dtype)
    if threads < 2:
        return host.summarize_array(array, dtype, repeat=repeat)
    tally, _ = _read_by(threads, array.reshape(-1), dtype, digests=False)
    return host.finish(tally, array, dtype, repeat)


def summarize_and_digest(
    array: Array, dtype: str, *, threads: int = 1
) -> tuple[TensorSummary, str]:
    """As `host.summarize_and_digest`, likewise."""
    threads = _of_use(threads, array, dtype)
    if threads < 2:
        return host.summarize_and_digest(array, dtype)
    tally, mixed_sum = _read_by(threads, array.reshape(-1), dtype, digests=True)
    return host.finish(tally, array, dtype, 1), digest.finish(mixed_sum, array.nbytes)


def _of_use(threads: int, array: Array, dtype: str) -> int:
    if dtype in host.FLOAT8 or not array.flags.c_contiguous:
        return 1
    return min(threads, MAX_THREADS, array.size // EACH)


def _read_by(threads: int, flat: Array, dtype: str, *, digests: bool) -> tuple[Tally, int]:
    chunk = host.chunk_size(dtype)
    each = -(-flat.size // (chunk * threads)) * chunk
    parts = []
    for start in range(0, flat.size, each):
        digester = Digester() if digests else None
        if digester is not None:
            digester.reset(start * flat.itemsize // digest.CHUNK_NBYTES)
        parts.append((flat[start : start + each], dtype, digester))
    helped = [_POOL.submit(*part) for part in parts[1:]]
    read = [_read(*parts[0])]
    for part, future in zip(parts[1:], helped, strict=True):
        read.append(_read(*part) if future is None else future.result())
    tally = Tally()
    for tallies, _ in read:
        for other in tallies:
            tally.merge(other)
    return tally, sum(mixed_sum for _, mixed_sum in read)


def _read(array: Array, dtype: str, digester: Digester | None) -> _Part:
    tallies = []
    for chunk in host.chunks(array, host.chunk_size(dtype)):
        tally = Tally()
        host.add_array(tally, chunk, dtype)
        tallies.append(tally)
        if digester is not None:
            digester.update(chunk.view(np.uint8))
    return tallies, 0 if digester is None else digester.mixed_sum()
