"""Statistics of large CPU tensors with torch's operations, which use all threads torch has.

A tensor is summed row by row, each row by one thread, and the rows are added in their order: how
many threads there are changes no bit. Blocks of rows are small enough to stay in the cache.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from tensorprobe.numerics import host, memory
from tensorprobe.numerics.host import Array, Tally
from tensorprobe.records import TensorSummary

LARGE = 1 << 17  # elements; below, numpy's calls cost less than torch's
ROW = 4096
_EACH = 65536  # elements for a thread: in float64 they fit its second-level cache
_MAX_THREADS = 32
_FEW = 4  # threads; with fewer, numpy counts zeros faster
# The others are rare among large tensors, or float64 does not simply hold their sums.
_DTYPES = frozenset(["float32", "float16", "bfloat16"])


class _Local(threading.local):
    def __init__(self) -> None:
        self.single = torch.empty(0)
        self.double = torch.empty(0, dtype=torch.float64)
        self.flags = np.empty(_EACH * _FEW, np.bool_)

    def buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many numbers at least."""
        if self.single.numel() < size:
            self.single = torch.empty(size)
            self.double = torch.empty(size, dtype=torch.float64)
        return self.single, self.double


_LOCAL = _Local()


def summarize(tensor: torch.Tensor, name: str) -> TensorSummary | None:
    """The summary of a large tensor without holes; None where numpy is the better way."""
    if name not in _DTYPES or tensor.numel() < LARGE:
        return None
    count, repeat = tensor.numel(), 1
    if not tensor.is_contiguous():
        shape, strides, repeat = memory.without_repeats(tensor)
        count = math.prod(shape)
        if count < LARGE or not memory.is_dense(shape, strides):
            return None
    tally = Tally()
    with memory.kernels_only():
        flat = tensor.as_strided((count,), (1,))
        rest = _add_rows(tally, flat, name)
        if rest.numel():
            _add_by_numpy(tally, rest, name)
    return tally.summary(repeat)


def _add_rows(tally: Tally, flat: torch.Tensor, name: str) -> torch.Tensor:
    """Add all whole rows; gives back what is left."""
    rows = flat.numel() // ROW
    totals = _Totals(tally, name, rows)
    block = _EACH * min(torch.get_num_threads(), _MAX_THREADS)
    for start in range(0, rows * ROW, block):
        part = flat[start : min(start + block, rows * ROW)]
        if not totals.add(part, start // ROW):
            # Pieces of one size, however many threads there are.
            for offset in range(0, part.numel(), _EACH):
                piece = part[offset : offset + _EACH]
                if not totals.add(piece, (start + offset) // ROW):
                    _add_by_numpy(tally, piece, name)
    totals.finish()
    return flat[rows * ROW :]


class _Totals:
    """The sum and the norm of every row of a tensor."""

    def __init__(self, tally: Tally, name: str, rows: int) -> None:
        self._tally = tally
        self._name = name
        self._sums = torch.zeros(rows, dtype=torch.float64)
        self._norms = torch.zeros(rows, dtype=torch.float64)

    def add(self, part: torch.Tensor, row: int) -> bool:
        """Add whole rows, of which this is the first; False if not all of them is finite."""
        ends = torch.aminmax(part)
        low, high = float(ends.min), float(ends.max)
        if not (math.isfinite(low) and math.isfinite(high)):  # a NaN makes both of them NaN
            return False
        tally, size = self._tally, part.numel()
        single, double = _LOCAL.buffers(size)
        if self._name != "float32":  # the way over float32 takes a fourth of the time
            part = single[:size].copy_(part)
        tally.count += size
        tally.bounds(low, high)
        if low <= 0.0 <= high:
            tally.zero += _count_zeros(part)
        wide = double[:size].copy_(part).view(-1, ROW)
        last = row + size // ROW
        torch.sum(wide, 1, out=self._sums[row:last])
        torch.linalg.vector_norm(wide, dim=1, out=self._norms[row:last])
        return True

    def finish(self) -> None:
        """Add the rows up, in their order."""
        self._tally.total += float(np.add.reduce(_array(self._sums)))
        self._tally.square += host.sum_of_squares(_array(self._norms))


def _count_zeros(part: torch.Tensor) -> int:
    if torch.get_num_threads() >= _FEW:
        return part.numel() - int(torch.count_nonzero(part))
    array = memory.borrow(part, host.STORAGE["float32"], (part.numel(),))
    return int(np.count_nonzero(np.equal(array, 0, out=_LOCAL.flags[: part.numel()])))


def _add_by_numpy(tally: Tally, part: torch.Tensor, name: str) -> None:
    """What is not finite has to be left out, and what is no whole row added."""
    array = memory.borrow(part, host.STORAGE[name], (part.numel(),))
    host.add_array(tally, array, name)


def _array(numbers: torch.Tensor) -> Array:
    return memory.borrow(numbers, host.STORAGE["float64"], (numbers.numel(),))
