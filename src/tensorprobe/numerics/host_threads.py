"""Statistics of large arrays by several threads, which change no bit of them. No torch.

Every chunk gives a tally of its own and the tallies are merged in the order of the chunks, whoever
made them. numpy lets go of the interpreter in all that takes long.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

from tensorprobe.numerics import host
from tensorprobe.numerics.host import Array, Tally
from tensorprobe.records import TensorSummary

EACH = 4 * host.CHUNK  # elements; for fewer, no other thread is worth being woken
MAX_THREADS = 16  # more wait for the interpreter


class _Pool:
    """The threads that help, started when they are first needed, and again after a fork."""

    def __init__(self) -> None:
        self._process = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, array: Array, dtype: str) -> Future[list[Tally]] | None:
        """Have this part tallied; None where the interpreter is ending and starts no threads."""
        executor = self._executor
        if executor is None or self._process != os.getpid():
            executor = ThreadPoolExecutor(MAX_THREADS - 1, "tensorprobe-statistics")
            self._executor, self._process = executor, os.getpid()
        try:
            return executor.submit(_tally_chunks, array, dtype)
        except RuntimeError:
            return None


_POOL = _Pool()


def summarize_array(
    array: Array, dtype: str, *, repeat: int = 1, threads: int = 1
) -> TensorSummary:
    """As `host.summarize_array`, to the last bit, by as many threads as are of use."""
    threads = min(threads, MAX_THREADS, array.size // EACH)
    if threads < 2 or dtype in host.FLOAT8 or not array.flags.c_contiguous:
        return host.summarize_array(array, dtype, repeat=repeat)
    tally = Tally()
    for part in _tally_by(threads, array.reshape(-1), dtype):
        tally.merge(part)
    return host.finish(tally, array, dtype, repeat)


def _tally_by(threads: int, flat: Array, dtype: str) -> list[Tally]:
    chunks = -(-flat.size // host.chunk_size(dtype))
    each = -(-chunks // threads) * host.chunk_size(dtype)
    parts = [flat[start : start + each] for start in range(0, flat.size, each)]
    helped = [_POOL.submit(part, dtype) for part in parts[1:]]
    tallies = _tally_chunks(parts[0], dtype)
    for part, future in zip(parts[1:], helped, strict=True):
        tallies += _tally_chunks(part, dtype) if future is None else future.result()
    return tallies


def _tally_chunks(array: Array, dtype: str) -> list[Tally]:
    tallies = []
    for chunk in host.chunks(array, host.chunk_size(dtype)):
        tally = Tally()
        host.add_array(tally, chunk, dtype)
        tallies.append(tally)
    return tallies
