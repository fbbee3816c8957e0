"""Statistics of numbers in host memory: by the library of `tally`, else with numpy. No torch.

numpy goes chunk by chunk in the cache. It also does what the library leaves to it: complex numbers,
float8, and sums that left the range of float64.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from tensorprobe.tensors import sketch
from tensorprobe.tensors import tally as compiled
from tensorprobe.tensors.digest import CHUNK_NBYTES, Digester
from tensorprobe.tensors.dtypes import ML_DTYPES
from tensorprobe.tensors.summary import TensorSummary
from tensorprobe.tensors.weighing import add_weighed

Array = np.ndarray[Any, Any]

# Elements at a time: the buffers of a chunk stay in the second-level cache.
CHUNK = 65536
# At most: numpy's BLAS starts threads for a dot product of more than 10000, a matrix of 9216.
DOT = 8192
ROW = 512
SMALL = DOT // 2  # fits one chunk in every dtype
# A float64 whose square leaves the normal range is squared as x * 2**-600 or x * 2**600 instead.
SCALE = 600
BIG_SQUARE = 2.0**1000
SMALL_SQUARE = 2.0**-900

FLOAT8 = {name: kind for name, kind in ML_DTYPES.items() if name.startswith("float8")}
# How the memory of each dtype is read. Where numpy has no such number, the bits as integers.
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "float64": "<f8",
        "float32": "<f4",
        "float16": "<i2",
        "bfloat16": "<u2",
        "complex128": "<c16",
        "complex64": "<c8",
        "complex32": "<u4",
        "int64": "<i8",
        "int32": "<i4",
        "int16": "<i2",
        "int8": "<i1",
        "uint64": "<u8",
        "uint32": "<u4",
        "uint16": "<u2",
        "uint8": "<u1",
        "bool": "?",
        **dict.fromkeys(FLOAT8, "<u1"),
    }.items()
}


@functools.cache
def float8_values(name: str) -> Array:
    """The 256 values of a float8 dtype as float64, by bit pattern."""
    with np.errstate(all="ignore"):
        values: Array = np.arange(256, dtype=np.uint8).view(FLOAT8[name]).astype(np.float64)
    return values


def times_power_of_two(value: float, exponent: int) -> float:
    """`value * 2**exponent` with one rounding at most; infinite where it is too large."""
    try:
        return math.ldexp(value, exponent) if exponent else value
    except OverflowError:
        return math.copysign(math.inf, value)


class Tally:
    """The running totals of one tensor.

    `low` and `high` are over what is not NaN, `total` and `square` (of the sum and the sum of
    squares) over what is finite. They stand for `total * 2**total_scale` and
    `square * 2**(2 * square_scale)`.
    """

    __slots__ = (
        "buckets",
        "count",
        "high",
        "inf",
        "low",
        "nan",
        "square",
        "square_scale",
        "total",
        "total_scale",
        "zero",
    )

    def __init__(self) -> None:
        self.count = self.nan = self.inf = self.zero = 0
        self.low: Any = None
        self.high: Any = None
        self.total = self.square = 0.0
        self.total_scale = self.square_scale = 0
        self.buckets = np.zeros(sketch.BUCKETS)

    def bounds(self, low: Any, high: Any) -> None:
        if self.low is None:
            self.low, self.high = low, high
            return
        if low < self.low:
            self.low = low
        if high > self.high:
            self.high = high

    def summary(self, repeat: int = 1) -> TensorSummary:
        """The summary of all that was tallied, every element counted `repeat` times."""
        mean = norm = None
        finite = self.count - self.nan - self.inf
        if finite:
            mean = times_power_of_two(self.total / finite, self.total_scale)
            root = math.sqrt(self.square) * math.sqrt(repeat)
            norm = times_power_of_two(root, self.square_scale)
        if self.low == 0:  # a zero without its sign, which would depend on the order
            self.low = abs(self.low)
        if self.high == 0:
            self.high = abs(self.high)
        return TensorSummary(
            self.low,
            self.high,
            mean,
            norm,
            self.nan * repeat,
            self.inf * repeat,
            self.zero * repeat,
            sketch=sketch.pack(self.buckets),
        )


class Scratch:
    """The buffers that one thread needs to read a chunk."""

    def __init__(self) -> None:
        self.bits = _aligned(CHUNK, np.uint32)
        self.wide = _aligned(CHUNK, np.float64)
        self.magnitude = _aligned(CHUNK, np.float64)
        self.flags = np.empty(CHUNK, np.bool_)
        self.singles = self.bits.view(np.float32)


def _aligned(size: int, dtype: type[np.generic]) -> Array:
    """A new array that begins with a line of the cache: BLAS takes half the time."""
    line = 64 // np.dtype(dtype).itemsize
    room = np.empty(size + line, dtype)
    start = -room.ctypes.data % 64 // room.itemsize
    return room[start : start + size]


Step = Callable[[Tally, Array, Scratch], None]


def tally_float(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add float32 or float64 numbers."""
    low, high = _ends(chunk)
    _tally_bounded(tally, chunk, low, high, scratch)


def _ends(chunk: Array) -> tuple[Any, Any]:
    """The smallest and the largest number; NaN if there is one."""
    # argmin finds a NaN as min does, and is the quicker call (where the array is writeable: it
    # copies any other).
    return chunk.item(chunk.argmin()), chunk.item(chunk.argmax())


def _tally_bounded(tally: Tally, chunk: Array, low: float, high: float, scratch: Scratch) -> None:
    tally.count += chunk.size
    if not (math.isfinite(high) and math.isfinite(low)):
        # Either of the two is NaN when there is a NaN, so this chunk has something to leave out.
        chunk = _leave_out_nonfinite(tally, chunk, scratch)
    else:
        tally.bounds(low, high)
        if low <= 0.0 <= high:
            tally.zero += _count_zeros(chunk, scratch)
    if chunk.dtype == np.float64:
        _add_sums(tally, chunk)
    else:
        wide = scratch.wide[: chunk.size]
        wide[:] = chunk
        _add_sums(tally, wide)


def _add_sums(tally: Tally, wide: Array) -> None:
    """Add the numbers that were counted last."""
    tally.total += _sum(wide)
    tally.square += sum_of_squares(wide)
    add_weighed(tally.buckets, wide, tally.count - wide.size)


def _sum(wide: Array) -> float:
    if wide.size <= DOT:
        return float(wide.dot(_ONES[: wide.size]))
    rest = wide.size % DOT
    # Sixteen rows of a matrix at a time: BLAS reads the ones once for all of them.
    sums: Array = np.matmul(wide[: wide.size - rest].reshape(-1, DOT // ROW, ROW), _ONES[:ROW])
    return float(sums.reshape(-1).dot(_ONES[: sums.size])) + (_sum(wide[-rest:]) if rest else 0.0)


def sum_of_squares(wide: Array) -> float:
    """The sum of squares of float64 numbers, by pieces for which BLAS starts no threads."""
    if wide.size <= DOT:
        return float(wide.dot(wide))
    rest = wide.size % DOT
    whole = wide[: wide.size - rest]
    squares: Array = np.matmul(whole.reshape(-1, 1, DOT), whole.reshape(-1, DOT, 1))
    total = float(squares.reshape(-1).dot(_ONES[: squares.size]))
    return total + (sum_of_squares(wide[-rest:]) if rest else 0.0)


_ONES = _aligned(DOT, np.float64)
_ONES[:] = 1.0
_ONES.flags.writeable = False


def _count_zeros(chunk: Array, scratch: Scratch) -> int:
    flags = scratch.flags[: chunk.size]
    np.equal(chunk, 0, out=flags)
    return int(np.count_nonzero(flags))


def _leave_out_nonfinite(tally: Tally, chunk: Array, scratch: Scratch) -> Array:
    """Count what is not finite and give back the chunk with zeros in its place."""
    with np.errstate(all="ignore"):
        return _finite_alone(tally, chunk, scratch)


def _finite_alone(tally: Tally, chunk: Array, scratch: Scratch) -> Array:
    nan = np.isnan(chunk)
    nans = int(np.count_nonzero(nan))
    finite = np.isfinite(chunk)
    tally.nan += nans
    tally.inf += chunk.size - nans - int(np.count_nonzero(finite))
    tally.zero += _count_zeros(chunk, scratch)
    if nans < chunk.size:
        known = chunk[~nan]  # not fmin: at a signaling NaN it forgets what came before
        tally.bounds(float(known.min()), float(known.max()))
    return np.where(finite, chunk, chunk.dtype.type(0))


def tally_bfloat16(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add bfloat16 numbers given as bits: the upper half of a float32."""
    bits = scratch.bits[: chunk.size]
    np.copyto(bits, chunk)
    np.left_shift(bits, 16, out=bits)
    tally_float(tally, scratch.singles[: chunk.size], scratch)


def tally_float16(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add float16 numbers given as bits."""
    numbers = _widen_float16(chunk, scratch)
    low, high = _ends(numbers)
    if high >= 65536.0 or low <= -65536.0:
        np.copyto(numbers, chunk.view(np.float16))
        tally_float(tally, numbers, scratch)
    else:
        _tally_bounded(tally, numbers, low, high, scratch)


def _widen_float16(chunk: Array, scratch: Scratch) -> Array:
    # Exponent and mantissa moved to float32's place give the number times 2**-112, subnormals too;
    # twice as fast as numpy's conversion. Infinities and NaN come out wrong, as 65536 or more.
    bits, singles = scratch.bits[: chunk.size], scratch.singles[: chunk.size]
    np.copyto(bits.view(np.int32), chunk)
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, _FLOAT16_BITS, out=bits)
    np.multiply(singles, _FLOAT16_UNIT, out=singles)
    return singles


_FLOAT16_BITS = np.uint32(0x8FFFE000)
_FLOAT16_UNIT = np.float32(2.0**112)


def tally_integer(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add integers; the bounds stay exact."""
    size = chunk.size
    tally.count += size
    tally.bounds(*_ends(chunk))
    tally.zero += size - int(np.count_nonzero(chunk))
    wide = scratch.wide[:size]
    wide[:] = chunk
    _add_sums(tally, wide)


def tally_bool(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add truth values."""
    true = int(np.count_nonzero(chunk))
    tally.count += chunk.size
    tally.zero += chunk.size - true
    tally.bounds(true == chunk.size, true > 0)
    add_weighed(tally.buckets, chunk.astype(np.float64), tally.count - chunk.size)


def tally_complex64(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add complex numbers by their magnitude."""
    _tally_parts(tally, chunk.view(np.float32), scratch)


def tally_complex128(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add complex numbers by their magnitude."""
    _tally_parts(tally, chunk.view(np.float64), scratch)


def tally_complex32(tally: Tally, chunk: Array, scratch: Scratch) -> None:
    """Add complex numbers of two float16, given as bits."""
    parts = scratch.singles[: chunk.size * 2]
    np.copyto(parts, chunk.view(np.float16))
    _tally_parts(tally, parts, scratch)


def _tally_parts(tally: Tally, parts: Array, scratch: Scratch) -> None:
    size = parts.size // 2
    wide = scratch.wide[: parts.size]
    np.copyto(wide, parts)
    magnitude = scratch.magnitude[:size]
    np.hypot(wide[0::2], wide[1::2], out=magnitude)
    tally.count += size
    if not np.isfinite(wide).all():
        pairs = wide.reshape(size, 2)
        nan = np.isnan(pairs).any(axis=1)
        inf = np.isinf(pairs).any(axis=1) & ~nan
        tally.nan += int(np.count_nonzero(nan))
        tally.inf += int(np.count_nonzero(inf))
        pairs[nan | inf] = 0
        known = magnitude[~nan]
        tally.zero += int(np.count_nonzero(known == 0))
        if known.size:
            tally.bounds(float(known.min()), float(known.max()))
        magnitude[nan | inf] = 0
    else:
        tally.bounds(*_ends(magnitude))
        tally.zero += _count_zeros(magnitude, scratch)
    tally.total += _sum(magnitude)
    tally.square += sum_of_squares(wide)
    add_weighed(tally.buckets, wide, 2 * (tally.count - size))


STEPS: dict[str, Step] = {
    "float64": tally_float,
    "float32": tally_float,
    "float16": tally_float16,
    "bfloat16": tally_bfloat16,
    "complex128": tally_complex128,
    "complex64": tally_complex64,
    "complex32": tally_complex32,
    "bool": tally_bool,
    **dict.fromkeys((n for n in STORAGE if n.startswith(("int", "uint"))), tally_integer),
}


# Those whose arithmetic in float64 neither overflows nor underflows: numpy has nothing to warn of.
_QUIET = frozenset(STEPS) - {"float64", "complex128", "complex64", "complex32"}


class _Local(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()
        self.digester = Digester()


_LOCAL = _Local()


def summarize_array(
    array: Array,
    dtype: str,
    *,
    repeat: int = 1,
    digester: Digester | None = None,
) -> TensorSummary:
    """The summary of an array whose memory holds numbers of `dtype` (torch's name for it).

    The array has the dtype that STORAGE names. With `repeat`, as if every element were there so
    often; then there is no sketch. A digester is given the bytes on the way, while they are in the
    cache.
    """
    summary = None
    if digester is None and compiled.LIBRARY is not None and dtype in compiled.KINDS and array.size:
        summary = _by_library(compiled.LIBRARY, array, dtype, repeat)
    if summary is None:
        summary = _by_numpy(array, dtype, repeat, digester)
    if repeat == 1:
        return summary
    return msgspec.structs.replace(summary, sketch=None)


def _by_numpy(array: Array, dtype: str, repeat: int, digester: Digester | None) -> TensorSummary:
    if dtype in FLOAT8:
        return _count_float8(array, dtype, digester).summary(repeat)
    tally = Tally()
    if digester is None and array.ndim == 1 and 0 < array.size <= SMALL and dtype in _QUIET:
        STEPS[dtype](tally, np.ascontiguousarray(array), _LOCAL.scratch)
    else:
        add_array(tally, array, dtype, digester)
    return finish(tally, array, dtype, repeat)


def _by_library(
    library: compiled.TallyLibrary, array: Array, dtype: str, repeat: int
) -> TensorSummary | None:
    layout: compiled.Layout | None = None
    if not array.flags.c_contiguous:
        layout = array.shape, tuple(step // array.itemsize for step in array.strides)
    reader = compiled.Reader(
        library, dtype, array.nbytes, repeat, stats=True, digest=False, layout=layout
    )
    outcome = reader.read(array.ctypes.data)
    return None if outcome is None else outcome[0]


def add_array(tally: Tally, array: Array, dtype: str, digester: Digester | None = None) -> None:
    """Add the numbers of an array; those of float8 are counted another way."""
    scratch, step = _LOCAL.scratch, STEPS[dtype]
    with np.errstate(all="ignore"):
        for chunk in chunks(array, chunk_size(dtype)):
            if digester is not None:
                digester.update(chunk.view(np.uint8))
            step(tally, chunk, scratch)


def finish(tally: Tally, array: Array, dtype: str, repeat: int) -> TensorSummary:
    """The summary of the array that was tallied."""
    if dtype == "float64" or dtype == "complex128":
        with np.errstate(all="ignore"):
            _rescale(tally, array, dtype)
    if dtype != "bool":
        return tally.summary(repeat)
    packed = sketch.pack(tally.buckets)
    return TensorSummary(
        tally.low, tally.high, None, None, 0, 0, tally.zero * repeat, sketch=packed
    )


def digest_strided(array: Array) -> str:
    """The digest of an array of any strides, copied piece by piece and never as a whole."""
    digester = _LOCAL.digester
    if array.flags.c_contiguous:
        return digester.whole(array.reshape(-1).view(np.uint8))
    digester.reset()
    for piece in _pieces(array, CHUNK):
        digester.update(piece.view(np.uint8))
    return digester.hexdigest()


def summarize_and_digest(array: Array, dtype: str) -> tuple[TensorSummary, str]:
    """Both of a contiguous array, in one pass over its memory."""
    digester = _LOCAL.digester
    if compiled.LIBRARY is not None:  # whose two passes are faster than numpy's one
        return summarize_array(array, dtype), digester.whole(array.view(np.uint8))
    if array.nbytes <= CHUNK_NBYTES:  # stays in the cache between the two
        return summarize_array(array, dtype), digester.whole(array.view(np.uint8))
    digester.reset()
    summary = summarize_array(array, dtype, digester=digester)
    return summary, digester.hexdigest()


def chunk_size(dtype: str) -> int:
    """Elements of a chunk, such that its parts fit the buffers."""
    return CHUNK // 2 if dtype.startswith("complex") else CHUNK


def chunks(array: Array, size: int) -> Iterator[Array]:
    """One-dimensional contiguous pieces that cover the array, in the order of its elements."""
    if not array.flags.c_contiguous:
        yield from _pieces(array, size)
        return
    flat = array.reshape(-1)
    if 0 < flat.size <= size:
        yield flat
    else:
        for start in range(0, flat.size, size):
            yield flat[start : start + size]


def _pieces(array: Array, size: int) -> Iterator[Array]:
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    access: Any = [["readonly", "contig"]]
    pieces: Any = np.nditer(array, flags, access, order="C", buffersize=size)
    for piece in pieces:
        # The size is a wish: without need of a buffer the iterator gives what lies in one piece.
        yield from chunks(piece, size)


def _count_float8(array: Array, dtype: str, digester: Digester | None) -> Tally:
    """From how often each of the 256 bit patterns occurs."""
    counts = np.zeros(256, np.int64)
    values = float8_values(dtype)
    numbers = np.where(np.isfinite(values), values, 0.0)
    tally = Tally()
    for chunk in chunks(array, CHUNK):
        if digester is not None:
            digester.update(chunk)
        counts += np.bincount(chunk, minlength=256)
        add_weighed(tally.buckets, numbers[chunk], tally.count)
        tally.count += chunk.size
    tally.nan = int(counts[np.isnan(values)].sum())
    tally.inf = int(counts[np.isinf(values)].sum())
    tally.zero = int(counts[values == 0].sum())
    seen = values[(counts > 0) & ~np.isnan(values)]
    if seen.size:
        tally.bounds(float(seen.min()), float(seen.max()))
    finite = np.isfinite(values)
    tally.total = float(np.dot(counts[finite], values[finite]))
    tally.square = float(np.dot(counts[finite], values[finite] ** 2))
    return tally


def _rescale(tally: Tally, array: Array, dtype: str) -> None:
    """Sum again, scaled, where a sum left the range of float64 and the result need not."""
    large_total = not math.isfinite(tally.total)
    large_square = tally.square > BIG_SQUARE
    nonzero = tally.count - tally.nan - tally.inf - tally.zero
    small_square = tally.square < SMALL_SQUARE and nonzero > 0
    if not (large_total or large_square or small_square):
        return
    exponent = SCALE if small_square else -SCALE
    scaled, scratch, step = Tally(), _LOCAL.scratch, STEPS[dtype]
    for chunk in chunks(array, CHUNK // 2):
        parts = np.ldexp(chunk.view(np.float64), exponent)
        step(scaled, parts.view(chunk.dtype), scratch)
    if large_total:
        tally.total, tally.total_scale = scaled.total, -exponent
    if large_square or small_square:
        tally.square, tally.square_scale = scaled.square, -exponent
