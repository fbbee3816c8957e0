"""How a device writes down what it found in a tensor, and how the host reads it. No torch.

A row is FIELDS numbers of 64 bits. Those named in FLOATS hold the bits of a float64. Numbers above
BIG are summed times 2**-SCALE and squares of numbers below SMALL times 2**(2*SCALE), in fields of
their own, so that one pass over a float64 tensor cannot overflow (after J. L. Blue, 1978). From
SKETCH on come the sums of the sketch, float64 too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from tensorprobe.tensors.digest import Array, finish_all
from tensorprobe.tensors.host import SCALE, STORAGE, times_power_of_two
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.sketch import BUCKETS, NBYTES
from tensorprobe.tensors.summary import TensorSummary

SKETCH = 12
FIELDS = SKETCH + BUCKETS
LOW, HIGH, TOTAL, SQUARE, TOTAL_BIG, SQUARE_BIG, SQUARE_SMALL, NAN, INF, ZERO, DIGEST = range(11)
FLOATS = (TOTAL, SQUARE, TOTAL_BIG, SQUARE_BIG, SQUARE_SMALL)
BIG = 2.0**480
SMALL = 2.0**-480
_WITH_FRACTION = frozenset(name for name in STORAGE if name.startswith(("float", "bf", "complex")))
TOP_BIT = 1 << 63  # flipped in uint64 bounds, which makes them ordered as int64


def as_float(bits: int) -> float:
    """The float64 with these bits, given as an int64."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def as_bits(value: float) -> int:
    """The bits of a float64 as an int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


# Whose numbers a row will hold: the result, the dtype, how many different elements, how often each
# is there, the bytes of all, and whether there is a sketch of them.
# A plain tuple, made for every tensor: the garbage collector, which leaves out results, soon leaves
# it out too.
Ticket = tuple[Result, str, int, int, int, bool]


def complete(
    tickets: Sequence[Ticket | None], numbers: Array, *, stats: bool, digest: bool
) -> None:
    """Fill in the results of tickets from the rows that belong to them."""
    started = [slot for slot, ticket in enumerate(tickets) if ticket is not None]
    if not started:
        return
    if len(started) < len(tickets):
        numbers = numbers[started]
    results, dtypes, counts, repeats, sizes, sketched = zip(*filter(None, tickets), strict=True)
    if digest:
        for result, text in zip(results, finish_all(numbers[:, DIGEST], sizes), strict=True):
            result.digest = text
    summaries: list[TensorSummary | None] = [None] * len(results)
    if stats:
        summaries[:] = _summaries(dtypes, counts, repeats, _sketches(numbers, sketched), numbers)
    for result, summary in zip(results, summaries, strict=True):
        result.summary = summary
        result.ready = True  # at last: another thread may look


def _sketches(numbers: Array, sketched: Sequence[bool]) -> list[bytes | None]:
    sums = np.ascontiguousarray(numbers[:, SKETCH:])
    known = np.isfinite(sums.view(np.float64)).all(axis=1) & np.array(sketched)
    raw = sums.tobytes()
    return [raw[i * NBYTES : (i + 1) * NBYTES] if k else None for i, k in enumerate(known.tolist())]


def _summaries(
    dtypes: Sequence[str],
    counts: Sequence[int],
    repeats: Sequence[int],
    sketches: Sequence[bytes | None],
    numbers: Array,
) -> list[TensorSummary]:
    floats, times = numbers.view(np.float64), np.array(repeats)
    finite = np.array(counts) - numbers[:, NAN] - numbers[:, INF]
    with np.errstate(all="ignore"):  # other kinds of rows, decoded one by one
        means = floats[:, TOTAL] / finite
        norms = np.sqrt(floats[:, SQUARE]) * np.sqrt(times)
    occurrences = [numbers[:, field] * times for field in (NAN, INF, ZERO)]
    columns = [floats[:, LOW], floats[:, HIGH], means, norms, *occurrences]
    counted = [True] * len(dtypes)
    lists = [column.tolist() for column in columns]
    summaries = list(map(TensorSummary, *lists, counted, sketches))
    others = (finite <= 0) | numbers[:, TOTAL_BIG:NAN].any(axis=1)
    if not _WITH_FRACTION.issuperset(dtypes):
        others |= np.array([dtype not in _WITH_FRACTION for dtype in dtypes])
    for slot in np.flatnonzero(others).tolist():
        row = numbers[slot].tolist()
        summaries[slot] = decode(row, dtypes[slot], counts[slot], repeats[slot], sketches[slot])
    return summaries


def decode(
    row: Sequence[int], dtype: str, count: int, repeat: int, sketch: bytes | None
) -> TensorSummary:
    """The summary of a tensor of `count` different elements, each there `repeat` times."""
    nan, inf, zero = row[NAN], row[INF], row[ZERO]
    counts = nan * repeat, inf * repeat, zero * repeat
    low: float | None = None
    high: float | None = None
    if count > nan:
        low, high = _bound(row[LOW], dtype), _bound(row[HIGH], dtype)
    if dtype == "bool":
        return TensorSummary(low, high, None, None, *counts, sketch=sketch)
    finite = count - nan - inf
    if not finite:
        return TensorSummary(low, high, None, None, *counts, sketch=sketch)
    floats = [as_float(row[field]) for field in FLOATS]
    return TensorSummary(
        low,
        high,
        _mean(floats[0], floats[2], finite),
        _norm(floats[1], floats[3], floats[4], repeat),
        *counts,
        sketch=sketch,
    )


def _bound(bits: int, dtype: str) -> float | int | bool:
    if dtype == "bool":
        return bool(bits)
    if dtype == "uint64":
        return bits + TOP_BIT
    if dtype.startswith(("int", "uint")):
        return bits
    return as_float(bits)


def _mean(total: float, total_big: float, finite: int) -> float:
    if not total_big:
        return total / finite
    scaled = total_big + times_power_of_two(total, -SCALE)
    return times_power_of_two(scaled / finite, SCALE)


def _norm(square: float, square_big: float, square_small: float, repeat: int) -> float:
    if square_big:
        root = math.sqrt(square_big + times_power_of_two(square, -2 * SCALE))
        return times_power_of_two(root * math.sqrt(repeat), SCALE)
    if square:
        small = times_power_of_two(square_small, -2 * SCALE)
        return math.sqrt(square + small) * math.sqrt(repeat)
    return times_power_of_two(math.sqrt(square_small) * math.sqrt(repeat), -SCALE)
