# mypy: ignore-errors
# Triton reads these functions as a language of its own, which has no types for mypy.
"""Triton kernels: partial tallies of a tensor, its digest, and the reduction of partials.

Imported only where Triton is installed. With TRITON_INTERPRET=1 they run on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tensorprobe.tensors.digest import CHUNK_WORDS, GOLD
from tensorprobe.tensors.host import SCALE
from tensorprobe.tensors.sketch import (
    BUCKETS,
    CELLS,
    FACTORS,
    FIRST,
    ONE,
    QUARTER,
    ROUND,
    SIGN_AND_FRACTION,
    TILE,
)
from tensorprobe.tensors.tally_rows import BIG, SKETCH, SMALL

# How the elements are to be read.
FLOAT, BFLOAT16, TABLE, INTEGER, UNSIGNED64, BOOL, COMPLEX = range(7)
META = 4  # numbers a slot tells the reduction: first row, rows, whether the bounds are floats

_FLOAT = tl.constexpr(FLOAT)
_BFLOAT16 = tl.constexpr(BFLOAT16)
_TABLE = tl.constexpr(TABLE)
_INTEGER = tl.constexpr(INTEGER)
_UNSIGNED64 = tl.constexpr(UNSIGNED64)
_BOOL = tl.constexpr(BOOL)
_COMPLEX = tl.constexpr(COMPLEX)
_META = tl.constexpr(META)
_BIG = tl.constexpr(BIG)
_SMALL = tl.constexpr(SMALL)
_DOWN = tl.constexpr(2.0**-SCALE)
_UP = tl.constexpr(2.0**SCALE)
_CHUNK_WORDS = tl.constexpr(CHUNK_WORDS)
# As int64: the same bits, and no literal that one version types differently from another.
_GOLD = tl.constexpr(GOLD - (1 << 64))
_FMIX_1 = tl.constexpr(0xFF51AFD7ED558CCD - (1 << 64))
_FMIX_2 = tl.constexpr(0xC4CEB9FE1A85EC53 - (1 << 64))
_SKETCH = tl.constexpr(SKETCH)
_BUCKETS = tl.constexpr(BUCKETS)
_SKETCH_TILE = tl.constexpr(TILE)
_ROUND = tl.constexpr(ROUND)
_QUARTER = tl.constexpr(QUARTER)
# As int32, likewise.
_FACTOR_1 = tl.constexpr(FACTORS[0] - (1 << 32))
_FACTOR_2 = tl.constexpr(FACTORS[1] - (1 << 32))
_FIRST = tl.constexpr(FIRST)
_CELLS = tl.constexpr(CELLS)
_SIGN_AND_FRACTION = tl.constexpr(SIGN_AND_FRACTION - (1 << 32))
_ONE = tl.constexpr(ONE)
_INT64_MIN = tl.constexpr(-(1 << 63))
_INT64_MAX = tl.constexpr((1 << 63) - 1)


@triton.jit
def _magnitude(re, im):
    # Not sqrt(re*re + im*im): that leaves the range of float64 where the magnitude does not.
    re = tl.abs(re)
    im = tl.abs(im)
    large = tl.maximum(re, im)
    small = tl.minimum(re, im)
    ratio = small / tl.where(large == 0.0, 1.0, large)
    return large * tl.sqrt(1.0 + ratio * ratio)


@triton.jit
def _await_others(EARLY: tl.constexpr):
    """Wait for what the kernels before this one write, which may have begun as they ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _store_bits(pointer, value):
    tl.store(pointer, value.to(tl.int64, bitcast=True))


@triton.jit
def _weight(number):
    """The weights of tiles or cells with these numbers, in the sketch."""
    x = number.to(tl.int32) * _FACTOR_1 + _FIRST
    x = (x ^ (x.to(tl.uint32, bitcast=True) >> 15).to(tl.int32, bitcast=True)) * _FACTOR_2
    upper = (x & _SIGN_AND_FRACTION) | _ONE
    return (upper.to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def _weight_within(at):
    """What numbers at these positions are multiplied by, but for the weight of the tile."""
    within = (at & 255).to(tl.int32)
    weight = _weight((within >> 3) + _CELLS)
    return tl.where((within & 4) == 0, weight, -weight)


@triton.jit
def _weights_at(at):
    """What numbers at these positions are multiplied by."""
    return _weight(at >> 8) * _weight_within(at)


@triton.jit
def _halves(numbers, LANES: tl.constexpr, EACH: tl.constexpr):
    """The first EACH and the last EACH numbers of each lane."""
    pairs = tl.reshape(numbers, [LANES, 2, EACH])
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def _add_weighed(sketch, wide, start, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Add vectors, one a lane, from the position `start` of a tile on, by their places in a
    quarter. What depends on the lane alone is left to `_lane_weights`."""
    lane = tl.arange(0, LANES)
    by_tile = _weight((start >> 8).to(tl.int32) + (lane * VECTOR >> 8))[:, None]
    if VECTOR == 16:
        one, two = _halves(wide, LANES, 8)
        cell = lane * VECTOR
        one = _of_cell(one, LANES) * _weight_within(cell)[:, None]
        wide = one + _of_cell(two, LANES) * _weight_within(cell + 8)[:, None]
    if VECTOR == 8:
        wide = _of_cell(wide, LANES)
    return sketch + wide * by_tile


@triton.jit
def _of_cell(numbers, LANES: tl.constexpr):
    one, two = _halves(numbers, LANES, 4)
    return one - two


@triton.jit
def _lane_weights(LANES: tl.constexpr, VECTOR: tl.constexpr):
    """What the sums of lanes that hold VECTOR numbers each are multiplied by at last."""
    weights = tl.full([LANES], 1.0, tl.float64)
    if VECTOR < 16:
        weights = _weight_within(tl.arange(0, LANES) * VECTOR)
    return weights[:, None]


@triton.jit
def _in_buckets(places, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The sums of a sketch, of lanes that hold VECTOR numbers each, and together whole rounds."""
    places *= _lane_weights(LANES, VECTOR)
    rounds: tl.constexpr = LANES * VECTOR // _ROUND
    places = tl.reshape(places, [rounds, _BUCKETS // _QUARTER, _SKETCH_TILE // VECTOR, _QUARTER])
    return tl.reshape(tl.sum(tl.sum(places, 2), 0), [_BUCKETS])


@triton.jit
def _in_tiles(signed, at):
    """Numbers at any positions, in the rows of the four tiles that they may be in."""
    tile = (at >> 8 & 3).to(tl.int32)
    row = tl.arange(0, _BUCKETS // _QUARTER)
    return tl.where(row[:, None] == tile[None, :], signed[None, :], 0.0)


@triton.jit
def _of_tiles(rows, N: tl.constexpr):
    """The sums of a sketch, of N numbers in rows of tiles."""
    rows = tl.reshape(rows, [_BUCKETS // _QUARTER, N // _QUARTER, _QUARTER])
    return tl.reshape(tl.sum(rows, 1), [_BUCKETS])


@triton.jit
def _store_sketch(to, buckets):
    _store_bits(to + _SKETCH + tl.arange(0, _BUCKETS), buckets)


@triton.jit
def _merge(
    low_a, high_a, total_a, square_a, zeros_a, low_b, high_b, total_b, square_b, zeros_b,
):  # fmt: skip
    return (
        tl.minimum(low_a, low_b),
        tl.maximum(high_a, high_b),
        total_a + total_b,
        square_a + square_b,
        zeros_a + zeros_b,
    )


@triton.jit
def _store_finite(to, low, high, total, square, zeros):
    _store_bits(to + 0, low.to(tl.float64))
    _store_bits(to + 1, high.to(tl.float64))
    _store_bits(to + 2, total)
    _store_bits(to + 3, square)
    for field in tl.static_range(4, 9):
        tl.store(to + field, tl.zeros([], tl.int64))
    tl.store(to + 9, zeros)


@triton.jit
def _values(x, table, at, inside, KIND: tl.constexpr, narrow: tl.constexpr):
    """The elements at these places as `narrow`, 0 outside."""
    return _numbers(tl.load(x + at, mask=inside, other=0), table, KIND, narrow)


@triton.jit
def _numbers(raw, table, KIND: tl.constexpr, narrow: tl.constexpr):
    """What was read, as `narrow`."""
    if KIND == _TABLE:
        return tl.load(table + raw.to(tl.int32))
    if KIND == _BFLOAT16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(narrow)


# Counters of the caller must not be specialised: every new value would compile a kernel.
@triton.jit(do_not_specialize=["n", "row", "slot"])
def tally_floats(
    x, table, rows, meta, n, row, slot,
    KIND: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, SKETCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of tallies per program over float or complex elements, `n` in all."""
    _await_others(EARLY)
    _tally(
        x, table, rows, meta, n.to(tl.int64), 1, 1, 1, 0, 0, 0, row, slot,
        KIND, WIDE, VECTOR, False, FIELDS, LANES, SKETCHED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "run", "n1", "n2", "s0", "s1", "s2", "row", "slot"])
def tally_runs(
    x, table, rows, meta, n, run, n1, n2, s0, s1, s2, row, slot,
    KIND: tl.constexpr, VECTOR: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, SKETCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same of elements that lie in `memory.Runs`: whole vectors, in 31 bits."""
    _await_others(EARLY)
    _tally(
        x, table, rows, meta, n, run, n1, n2, s0, s1, s2, row, slot,
        KIND, False, VECTOR, True, FIELDS, LANES, SKETCHED,
    )  # fmt: skip


@triton.jit
def _place(at, run, n1, n2, s0, s1, s2, RUNS: tl.constexpr, UNIT: tl.constexpr):
    """Where the UNIT elements of this number lie, counted in such units."""
    if RUNS:
        piece = at // (run // UNIT)
        outer = piece // n2
        first = outer // n1
        at = at - piece * (run // UNIT) + (piece - outer * n2) * (s2 // UNIT)
        at += (outer - first * n1) * (s1 // UNIT) + first * (s0 // UNIT)
    return at


@triton.jit
def _tile(
    sketch, x, table, index, run, n1, n2, s0, s1, s2,
    KIND: tl.constexpr, VECTOR: tl.constexpr, RUNS: tl.constexpr, LANES: tl.constexpr,
    SKETCHED: tl.constexpr,
):  # fmt: skip
    """What the elements of the whole tile of this number give to the tallies, each for itself; and
    to the sketch.

    Zeros are counted as floats, two instructions each; of integers the compiler makes masks and
    counts their bits, in three and more.
    """
    vector = tl.arange(0, LANES)
    first = tl.zeros([], tl.int64) + index * (LANES * VECTOR)
    if RUNS:
        vector = _place(index * LANES + vector, run, n1, n2, s0, s1, s2, RUNS, VECTOR)
    else:  # one sum in 64 bits for all lanes
        x += index * (LANES * VECTOR)
    raw = tl.load(x + (vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]))
    value = _numbers(raw, table, KIND, tl.float32)
    wide = value.to(tl.float64)
    if SKETCHED:
        sketch = _add_weighed(sketch, wide, first, LANES, VECTOR)
    return (value, value, wide, wide * wide, (value == 0.0).to(tl.float32)), sketch


@triton.jit
def _tally(
    x, table, rows, meta, n, run, n1, n2, s0, s1, s2, row, slot,
    KIND: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, RUNS: tl.constexpr,
    FIELDS: tl.constexpr, LANES: tl.constexpr, SKETCHED: tl.constexpr,
):  # fmt: skip
    """The rows of all programs.

    A tile is LANES x VECTOR elements, VECTOR of them side by side in one thread: a load of 16
    bytes, and each thread keeps one set of sums. Whole tiles are read without a mask, which alone
    lets the loads be that wide. The last are read first: what a kernel wrote at last is in the
    cache, and the kernel after this one begins with what was read at last. Sums of numbers that are
    all finite are finite here, so NaN and infinity are looked for only where a sum says that there
    are any.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    to = rows + (row + pid).to(tl.int64) * FIELDS
    if WIDE or KIND == _COMPLEX:
        _tally_with_care(
            x, table, to, n, run, n1, n2, s0, s1, s2, pid, programs,
            KIND, WIDE, RUNS, LANES, LANES * VECTOR, SKETCHED,
        )  # fmt: skip
    else:
        low = tl.full([LANES], float("inf"), tl.float32)
        high = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float64)
        square = tl.zeros([LANES], tl.float64)
        zeros = tl.zeros([LANES], tl.float32)
        sketch = tl.zeros([LANES, _QUARTER], tl.float64)
        tile: tl.constexpr = LANES * VECTOR
        lane = tl.arange(0, LANES)
        whole = n // tile
        last = whole - 1 - pid
        # Two tiles at a time, joined at once: else their loads would wait for each other.
        pairs = tl.maximum(tl.cdiv(whole - programs - pid, 2 * programs), 0)
        for pair in range(pairs):
            index = last - pair * 2 * programs
            one, sketch = _tile(
                sketch, x, table, index, run, n1, n2, s0, s1, s2, KIND, VECTOR, RUNS, LANES,
                SKETCHED,
            )  # fmt: skip
            index -= programs
            two, sketch = _tile(
                sketch, x, table, index, run, n1, n2, s0, s1, s2, KIND, VECTOR, RUNS, LANES,
                SKETCHED,
            )  # fmt: skip
            # All at once: a pass of Triton 3.6 fails on a sum that stands alone in a loop.
            low, high, total, square, zeros = _merge(
                low, high, total, square, zeros, *tl.reduce(_merge(*one, *two), 1, _merge)
            )
        for done in range(pairs * 2 * programs, whole - pid, programs):
            one, sketch = _tile(
                sketch, x, table, last - done, run, n1, n2, s0, s1, s2, KIND, VECTOR, RUNS, LANES,
                SKETCHED,
            )  # fmt: skip
            low, high, total, square, zeros = _merge(
                low, high, total, square, zeros, *tl.reduce(one, 1, _merge)
            )
        tallies = (low, high, total, square, zeros.to(tl.int64))
        low, high, total, square, zeros = tl.reduce(tallies, 0, _merge)
        if SKETCHED:
            buckets = _in_buckets(sketch, LANES, VECTOR)
        if pid == whole % programs:
            rest = tl.zeros([_BUCKETS // _QUARTER, LANES], tl.float64)
            for start in range(whole * tile, n, LANES):
                inside = start + lane < n
                at = _place(start + lane, run, n1, n2, s0, s1, s2, RUNS, 1)
                value = _values(x, table, at, inside, KIND, tl.float32)
                wide = tl.where(inside, value, 0.0).to(tl.float64)
                tallies = (
                    tl.where(inside, value, float("inf")),
                    tl.where(inside, value, float("-inf")),
                    wide,
                    wide * wide,
                    (inside & (value == 0.0)).to(tl.int64),
                )
                low, high, total, square, zeros = _merge(
                    low, high, total, square, zeros, *tl.reduce(tallies, 0, _merge)
                )
                if SKETCHED:
                    rest += _in_tiles(wide * _weights_at(start + lane), start + lane)
            if SKETCHED:
                buckets += _of_tiles(rest, LANES)
        if total - total == 0.0:
            _store_finite(to, low, high, total, square, zeros)
            if SKETCHED:
                _store_sketch(to, buckets)
        else:
            _tally_with_care(
                x, table, to, n, run, n1, n2, s0, s1, s2, pid, programs,
                KIND, WIDE, RUNS, LANES, tile, SKETCHED,
            )  # fmt: skip
    if pid == 0:
        tl.store(meta + slot * _META, row)
        tl.store(meta + slot * _META + 1, programs)
        tl.store(meta + slot * _META + 2, 1)


@triton.jit
def _tally_with_care(
    x, table, to, n, run, n1, n2, s0, s1, s2, pid, programs,
    KIND: tl.constexpr, WIDE: tl.constexpr, RUNS: tl.constexpr, LANES: tl.constexpr,
    tile: tl.constexpr, SKETCHED: tl.constexpr,
):  # fmt: skip
    """The row of one program where some numbers are not finite, or leave the range squared."""
    narrow: tl.constexpr = tl.float64 if (WIDE or KIND == _COMPLEX) else tl.float32
    low = tl.full([LANES], float("inf"), narrow)
    high = tl.full([LANES], float("-inf"), narrow)
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    total_big = tl.zeros([LANES], tl.float64)
    square_big = tl.zeros([LANES], tl.float64)
    square_small = tl.zeros([LANES], tl.float64)
    numbers: tl.constexpr = 2 * LANES if KIND == _COMPLEX else LANES
    sketch = tl.zeros([_BUCKETS // _QUARTER, numbers], tl.float64)
    nans = tl.zeros([LANES], tl.int32)
    infs = tl.zeros([LANES], tl.int32)
    zeros = tl.zeros([LANES], tl.int32)
    lane = tl.arange(0, LANES)
    parts: tl.constexpr = tile // LANES
    whole = n // tile
    for done in range(pid, tl.cdiv(n, tile), programs):
        index = done * parts
        if done < whole:  # the same tiles as above
            index = (whole - 1 - done) * parts
        for part in range(parts):
            at = (index + part) * LANES + lane
            inside = at < n
            if KIND == _COMPLEX:
                re = tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float64)
                im = tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float64)
                nan = inside & ((re != re) | (im != im))
                inf = inside & (~nan)
                inf = inf & ((tl.abs(re) == float("inf")) | (tl.abs(im) == float("inf")))
                finite = inside & (~nan) & (~inf)
                re = tl.where(finite, re, 0.0)
                im = tl.where(finite, im, 0.0)
                wide = _magnitude(re, im)
                value = tl.where(inf, float("inf"), wide)
                squared = re * re + im * im
                size = tl.maximum(tl.abs(re), tl.abs(im))
                if SKETCHED:
                    both = tl.reshape(tl.join(re, im), [numbers])
                    first = 2 * (index + part) * LANES + tl.arange(0, numbers)
                    sketch += _in_tiles(both * _weights_at(first), first)
            else:
                place = _place(at, run, n1, n2, s0, s1, s2, RUNS, 1)
                value = _values(x, table, place, inside, KIND, narrow)
                nan = inside & (value != value)
                inf = inside & (tl.abs(value) == float("inf"))
                finite = inside & (~nan) & (~inf)
                wide = tl.where(finite, value, 0.0).to(tl.float64)
                squared = wide * wide
                size = tl.abs(wide)
                if SKETCHED:
                    sketch += _in_tiles(wide * _weights_at(at), at)
            known = inside & (~nan)
            low = tl.minimum(low, tl.where(known, value, float("inf")))
            high = tl.maximum(high, tl.where(known, value, float("-inf")))
            nans += nan.to(tl.int32)
            infs += inf.to(tl.int32)
            zeros += (known & (value == 0.0)).to(tl.int32)
            if WIDE:
                big = size > _BIG
                small = size < _SMALL
                middle = finite & (~big) & (~small)
                total += tl.where(big, 0.0, wide)
                square += tl.where(middle, squared, 0.0)
                if KIND == _COMPLEX:
                    down = _magnitude(re * _DOWN, im * _DOWN)
                    up = _magnitude(tl.where(small, re, 0.0) * _UP, tl.where(small, im, 0.0) * _UP)
                else:
                    down = wide * _DOWN
                    up = tl.where(small, wide, 0.0) * _UP
                down = tl.where(big, down, 0.0)
                total_big += down
                square_big += down * down
                square_small += up * up
            else:
                total += wide
                square += squared
    _store_bits(to + 0, tl.min(low, 0).to(tl.float64))
    _store_bits(to + 1, tl.max(high, 0).to(tl.float64))
    _store_bits(to + 2, tl.sum(total, 0))
    _store_bits(to + 3, tl.sum(square, 0))
    _store_bits(to + 4, tl.sum(total_big, 0))
    _store_bits(to + 5, tl.sum(square_big, 0))
    _store_bits(to + 6, tl.sum(square_small, 0))
    tl.store(to + 7, tl.sum(nans.to(tl.int64), 0))
    tl.store(to + 8, tl.sum(infs.to(tl.int64), 0))
    tl.store(to + 9, tl.sum(zeros.to(tl.int64), 0))
    if SKETCHED:
        _store_sketch(to, _of_tiles(sketch, numbers))


@triton.jit(do_not_specialize=["n", "row", "slot"])
def tally_integers(
    x, rows, meta, n, row, slot,
    KIND: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, SKETCHED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row of tallies per program over integer or bool elements, `n` in all."""
    _await_others(EARLY)
    n = n.to(tl.int64)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], _INT64_MAX, tl.int64)
    high = tl.full([BLOCK], _INT64_MIN, tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    zeros = tl.zeros([BLOCK], tl.int32)
    sketch = tl.zeros([BLOCK], tl.float64)
    steps = tl.cdiv(n, programs * BLOCK)
    at = pid.to(tl.int64) * BLOCK + lane
    for _ in range(steps):
        inside = at < n
        raw = tl.load(x + at, mask=inside, other=0)
        if KIND == _UNSIGNED64:
            wide = raw.to(tl.float64)
            value = raw.to(tl.int64, bitcast=True)
            zeros += (inside & (value == 0)).to(tl.int32)
            value = value ^ _INT64_MIN
        else:
            value = raw.to(tl.int64)
            if KIND == _BOOL:
                value = (value != 0).to(tl.int64)
            wide = value.to(tl.float64)
            zeros += (inside & (value == 0)).to(tl.int32)
        low = tl.minimum(low, tl.where(inside, value, _INT64_MAX))
        high = tl.maximum(high, tl.where(inside, value, _INT64_MIN))
        total += wide
        square += wide * wide
        if SKETCHED:
            sketch += wide * _weight(at >> 8)
        at += programs * BLOCK
    to = rows + (row + pid).to(tl.int64) * FIELDS
    tl.store(to + 0, tl.min(low, 0))
    tl.store(to + 1, tl.max(high, 0))
    _store_bits(to + 2, tl.sum(total, 0))
    _store_bits(to + 3, tl.sum(square, 0))
    for field in tl.static_range(4, 9):
        tl.store(to + field, tl.zeros([], tl.int64))
    tl.store(to + 9, tl.sum(zeros.to(tl.int64), 0))
    if SKETCHED:
        places = tl.reshape(sketch, [BLOCK // _QUARTER, _QUARTER])
        _store_sketch(to, _in_buckets(places, BLOCK // _QUARTER, _QUARTER))
    if pid == 0:
        tl.store(meta + slot * _META, row)
        tl.store(meta + slot * _META + 1, programs)
        tl.store(meta + slot * _META + 2, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["n", "slot"])
def flag_floats(
    x, table, flags, n, slot,
    KIND: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
    LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join to a slot: bits for NaN (1), +inf (2), -inf (4), and the largest finite magnitude.

    Without their sign the bits of floats compare as integers do, infinity above all numbers and
    NaN above that: one maximum tells whether a closer look is needed.
    """
    _await_others(EARLY)
    n = n.to(tl.int64)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    to = flags + slot.to(tl.int64) * 2
    tile: tl.constexpr = LANES * VECTOR
    if WIDE or KIND == _TABLE:
        _flag_with_care(x, table, to, n, pid, programs, KIND, WIDE, LANES, tile)
    else:
        place = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        tops = tl.zeros([LANES], tl.int32)
        whole = n // tile
        for done in range(pid, whole, programs):
            index = whole - 1 - done
            bits = _magnitude_bits(tl.load(x + index * tile + place), VECTOR)
            tops = tl.maximum(tops, tl.reduce(bits, 1, _larger))
        top = tl.max(tops, 0)
        if pid == whole % programs:
            lane = tl.arange(0, LANES)
            for start in range(whole * tile, n, LANES):
                raw = tl.load(x + start + lane, mask=start + lane < n, other=0)
                top = tl.maximum(top, tl.max(_magnitude_bits(raw, VECTOR), 0))
        if KIND == _BFLOAT16:
            value = (top << 16).to(tl.float32, bitcast=True)
        elif VECTOR == 8:
            value = top.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            value = top.to(tl.float32, bitcast=True)
        if value - value == 0.0:
            tl.atomic_max(to + 1, value.to(tl.int32, bitcast=True))
        else:
            _flag_with_care(x, table, to, n, pid, programs, KIND, WIDE, LANES, tile)


@triton.jit
def _magnitude_bits(raw, VECTOR: tl.constexpr):
    if VECTOR == 8:
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        bits = raw.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def _flag_with_care(
    x, table, to, n, pid, programs,
    KIND: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    narrow: tl.constexpr = tl.float64 if WIDE else tl.float32
    bits = tl.zeros([LANES], tl.int32)
    top = tl.zeros([LANES], narrow)
    lane = tl.arange(0, LANES)
    parts: tl.constexpr = tile // LANES
    whole = n // tile
    for done in range(pid, tl.cdiv(n, tile), programs):
        index = done * parts
        if done < whole:  # the same tiles as above
            index = (whole - 1 - done) * parts
        for part in range(parts):
            at = (index + part) * LANES + lane
            inside = at < n
            value = tl.where(inside, _values(x, table, at, inside, KIND, narrow), 0.0)
            nan = value != value
            plus = value == float("inf")
            minus = value == float("-inf")
            bits = bits | nan.to(tl.int32) | (plus.to(tl.int32) << 1) | (minus.to(tl.int32) << 2)
            top = tl.maximum(top, tl.where(nan | plus | minus, 0.0, tl.abs(value)))
    found = tl.max(bits & 1, 0) | tl.max(bits & 2, 0) | tl.max(bits & 4, 0)
    # As float32, for one word; a magnitude has no sign bit.
    largest = tl.max(top, 0).to(tl.float32).to(tl.int32, bitcast=True)
    if found != 0:
        tl.atomic_or(to, found)
    tl.atomic_max(to + 1, largest)


@triton.jit
def _shift_right(value, bits: tl.constexpr):
    return (value.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def _fmix(value):
    value = (value ^ _shift_right(value, 33)) * _FMIX_1
    value = (value ^ _shift_right(value, 33)) * _FMIX_2
    return value ^ _shift_right(value, 33)


@triton.jit(do_not_specialize=["units", "slot"])
def digest_chunks(
    x, weights, digests, units, slot, UNIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add one chunk of words a program to a slot's digest; x has `units` loads of UNIT bytes."""
    _await_others(EARLY)
    units = units.to(tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    per_word: tl.constexpr = 8 // UNIT
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, _CHUNK_WORDS, BLOCK):
        word = (chunk * _CHUNK_WORDS + start + lane) * per_word
        q = tl.zeros([BLOCK], tl.int64)
        for part in tl.static_range(per_word):
            raw = tl.load(x + word + part, mask=word + part < units, other=0)
            q |= raw.to(tl.int64) << (8 * UNIT * part)
        q ^= _shift_right(q, 29)
        sums += q * tl.load(weights + start + lane)
    mixed = _fmix(tl.sum(sums, 0) + (chunk + 1) * _GOLD)
    tl.atomic_add(digests + slot, mixed)


@triton.jit
def _merge_digested(
    sum_a, low_a, high_a, total_a, square_a, zeros_a,
    sum_b, low_b, high_b, total_b, square_b, zeros_b,
):  # fmt: skip
    low, high, total, square, zeros = _merge(
        low_a, high_a, total_a, square_a, zeros_a, low_b, high_b, total_b, square_b, zeros_b
    )
    return sum_a + sum_b, low, high, total, square, zeros


@triton.jit
def _element(word, k: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr):
    """The k-th float in words of 64 bits, as float32."""
    bits = _shift_right(word, 8 * UNIT * k) if k else word
    if UNIT == 4:
        return bits.to(tl.int32).to(tl.float32, bitcast=True)
    if KIND == _BFLOAT16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _digest_and_tally(word, weight, inside, KIND: tl.constexpr, UNIT: tl.constexpr):
    """What these words give to the digest and to the tallies, each for itself."""
    mixed = (word ^ _shift_right(word, 29)) * weight
    value = _element(word, 0, KIND, UNIT)
    wide = tl.where(inside, value, 0.0).to(tl.float64)
    low = tl.where(inside, value, float("inf"))
    high = tl.where(inside, value, float("-inf"))
    square = wide * wide
    zeros = (inside & (value == 0.0)).to(tl.float32)
    for k in tl.static_range(1, 8 // UNIT):
        value = _element(word, k, KIND, UNIT)
        more = tl.where(inside, value, 0.0).to(tl.float64)
        low = tl.minimum(low, tl.where(inside, value, float("inf")))
        high = tl.maximum(high, tl.where(inside, value, float("-inf")))
        wide += more
        square += more * more
        zeros += (inside & (value == 0.0)).to(tl.float32)
    return mixed, low, high, wide, square, zeros


@triton.jit
def _weighed(word, at, KIND: tl.constexpr, UNIT: tl.constexpr):
    """What the elements of words give to the sketch, in their order; the words have these numbers.
    The elements of one word have one weight."""
    weights = _weights_at(at * (8 // UNIT))
    one = _element(word, 0, KIND, UNIT).to(tl.float64) * weights
    two = _element(word, 1, KIND, UNIT).to(tl.float64) * weights
    if UNIT == 2:
        three = _element(word, 2, KIND, UNIT).to(tl.float64) * weights
        four = _element(word, 3, KIND, UNIT).to(tl.float64) * weights
        one, two = tl.join(one, three), tl.join(two, four)
    return tl.join(one, two)


@triton.jit
def _pair_elements(pairs, k: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr):
    """The k-th elements of both words of pairs, as float64."""
    return tl.split(_element(pairs, k, KIND, UNIT).to(tl.float64))


@triton.jit
def _add_pairs(
    q0, q1, q2, q3, pairs, start, KIND: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add pairs of words, one a lane, from the position `start` of a tile on, to sums by places in
    a quarter."""
    by_tile = _weight((start >> 8).to(tl.int32) + (tl.arange(0, LANES) * (16 // UNIT) >> 8))
    one, two = _pair_elements(pairs, 0, KIND, UNIT)
    three, four = _pair_elements(pairs, 1, KIND, UNIT)
    if UNIT == 4:
        q0 += one * by_tile
        q1 += three * by_tile
        q2 += two * by_tile
        q3 += four * by_tile
    else:
        five, six = _pair_elements(pairs, 2, KIND, UNIT)
        seven, eight = _pair_elements(pairs, 3, KIND, UNIT)
        q0 += (one - two) * by_tile
        q1 += (three - four) * by_tile
        q2 += (five - six) * by_tile
        q3 += (seven - eight) * by_tile
    return q0, q1, q2, q3


@triton.jit
def _pairs(
    x, weights, chunk, start, run, n1, n2, s0, s1, s2,
    UNIT: tl.constexpr, RUNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pairs of words of a chunk, one a lane, from its word `start` on; and their weights."""
    pair = tl.arange(0, LANES)
    at = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    weight = tl.load(weights + start + at)
    if RUNS:
        pair += chunk * (_CHUNK_WORDS // 2) + start // 2
        pair = _place(pair, run, n1, n2, s0, s1, s2, RUNS, 16 // UNIT)
        at = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        x += chunk * _CHUNK_WORDS + start
    return tl.load(x + at), weight


@triton.jit(do_not_specialize=["words", "row", "slot"])
def digest_and_tally_floats(
    x, elements, weights, rows, meta, digests, words, row, slot,
    KIND: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, SKETCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """digest_chunks and tally_floats in one pass over whole words; x and elements are one place."""
    _await_others(EARLY)
    _digest_and_tally_all(
        x, elements, weights, rows, meta, digests, words.to(tl.int64), 1, 1, 1, 0, 0, 0, row, slot,
        KIND, UNIT, False, FIELDS, LANES, SKETCHED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words", "run", "n1", "n2", "s0", "s1", "s2", "row", "slot"])
def digest_and_tally_runs(
    x, elements, weights, rows, meta, digests, words, run, n1, n2, s0, s1, s2, row, slot,
    KIND: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, SKETCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same of elements that lie in `memory.Runs`: pairs of words, in 31 bits."""
    _await_others(EARLY)
    _digest_and_tally_all(
        x, elements, weights, rows, meta, digests, words, run, n1, n2, s0, s1, s2, row, slot,
        KIND, UNIT, True, FIELDS, LANES, SKETCHED,
    )  # fmt: skip


@triton.jit
def _digest_and_tally_all(
    x, elements, weights, rows, meta, digests, words, run, n1, n2, s0, s1, s2, row, slot,
    KIND: tl.constexpr, UNIT: tl.constexpr, RUNS: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, SKETCHED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    to = rows + (row + pid).to(tl.int64) * FIELDS
    tile: tl.constexpr = 2 * LANES
    per_pair: tl.constexpr = 16 // UNIT
    lane = tl.arange(0, LANES)
    low = tl.full([LANES], float("inf"), tl.float32)
    high = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float64)
    square = tl.zeros([LANES], tl.float64)
    zeros = tl.zeros([LANES], tl.float32)
    q0 = tl.zeros([LANES], tl.float64)
    q1 = tl.zeros([LANES], tl.float64)
    q2 = tl.zeros([LANES], tl.float64)
    q3 = tl.zeros([LANES], tl.float64)
    mixed = tl.zeros([], tl.int64)
    whole = words // _CHUNK_WORDS
    for done in range(pid, whole, programs):
        chunk = whole - 1 - done
        sums = tl.zeros([LANES], tl.int64)
        for start in range(0, _CHUNK_WORDS, 2 * tile):
            one, by_one = _pairs(
                x, weights, chunk, start, run, n1, n2, s0, s1, s2, UNIT, RUNS, LANES
            )
            two, by_two = _pairs(
                x, weights, chunk, start + tile, run, n1, n2, s0, s1, s2, UNIT, RUNS, LANES
            )
            if SKETCHED:
                at = (tl.zeros([], tl.int64) + chunk * _CHUNK_WORDS + start) * (8 // UNIT)
                q0, q1, q2, q3 = _add_pairs(q0, q1, q2, q3, one, at, KIND, UNIT, LANES)
                at += tile * (8 // UNIT)
                q0, q1, q2, q3 = _add_pairs(q0, q1, q2, q3, two, at, KIND, UNIT, LANES)
            tallies = _digest_and_tally(one, by_one, True, KIND, UNIT)
            sums, low, high, total, square, zeros = _merge_digested(
                sums, low, high, total, square, zeros, *tl.reduce(tallies, 1, _merge_digested)
            )
            tallies = _digest_and_tally(two, by_two, True, KIND, UNIT)
            sums, low, high, total, square, zeros = _merge_digested(
                sums, low, high, total, square, zeros, *tl.reduce(tallies, 1, _merge_digested)
            )
        number = tl.zeros([], tl.int64) + chunk + 1  # a Python number, where it is interpreted
        mixed += _fmix(tl.sum(sums, 0) + number * _GOLD)
    lanes = (low, high, total, square, zeros.to(tl.float64))
    low, high, total, square, zeros = tl.reduce(lanes, 0, _merge)
    if SKETCHED:
        sketch = tl.reshape(tl.join(tl.join(q0, q2), tl.join(q1, q3)), [LANES, _QUARTER])
        buckets = _in_buckets(sketch, LANES, per_pair)
    rest_numbers: tl.constexpr = LANES * per_pair // 2
    first = whole * _CHUNK_WORDS
    if (pid == whole % programs) & (first < words):
        sums = tl.zeros([], tl.int64)
        rest = tl.zeros([_BUCKETS // _QUARTER, rest_numbers], tl.float64)
        for start in range(0, words - first, LANES):
            at = first + start + lane
            inside = at < words
            word_number = at
            if RUNS:
                pair = _place(at // 2, run, n1, n2, s0, s1, s2, RUNS, per_pair)
                at = pair * 2 + at % 2
            word = tl.load(x + at, mask=inside, other=0)
            weight = tl.load(weights + start + lane, mask=inside, other=0)
            if SKETCHED:
                weighed = _weighed(word, word_number, KIND, UNIT)
                position = (first + start) * (per_pair // 2) + tl.arange(0, rest_numbers)
                rest += _in_tiles(tl.reshape(weighed, [rest_numbers]), position)
            tallies = _digest_and_tally(word, weight, inside, KIND, UNIT)
            sums, low, high, total, square, zeros = _merge_digested(
                sums, low, high, total, square, zeros, *tl.reduce(tallies, 0, _merge_digested)
            )
        if SKETCHED:
            buckets += _of_tiles(rest, rest_numbers)
        mixed += _fmix(sums + (tl.zeros([], tl.int64) + whole + 1) * _GOLD)
    tl.atomic_add(digests + slot, mixed)
    if total - total == 0.0:
        _store_finite(to, low, high, total, square, zeros.to(tl.int64))
        if SKETCHED:
            _store_sketch(to, buckets)
    else:
        per_word: tl.constexpr = 8 // UNIT
        _tally_with_care(
            elements, weights, to, words * per_word, run, n1, n2, s0, s1, s2, pid, programs,
            KIND, False, RUNS, LANES, _CHUNK_WORDS * per_word, SKETCHED,
        )  # fmt: skip
    if pid == 0:
        tl.store(meta + slot * _META, row)
        tl.store(meta + slot * _META + 1, programs)
        tl.store(meta + slot * _META + 2, 1)


@triton.jit
def reduce_rows(
    rows, meta, digests, out, FIELDS: tl.constexpr, BLOCK: tl.constexpr, SKETCHED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per slot: its rows become one, and the slot is ready to be used again."""
    _await_others(EARLY)
    slot = tl.program_id(0)
    first = tl.load(meta + slot * _META).to(tl.int64)
    count = tl.load(meta + slot * _META + 1)
    floats = tl.load(meta + slot * _META + 2)
    lane = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    least = tl.full([BLOCK], _INT64_MAX, tl.int64)
    most = tl.full([BLOCK], _INT64_MIN, tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    total_big = tl.zeros([BLOCK], tl.float64)
    square_big = tl.zeros([BLOCK], tl.float64)
    square_small = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.int64)
    infs = tl.zeros([BLOCK], tl.int64)
    zeros = tl.zeros([BLOCK], tl.int64)
    bucket = tl.arange(0, _BUCKETS)
    sketch = tl.zeros([BLOCK, _BUCKETS], tl.float64)
    for start in range(0, count, BLOCK):
        inside = start + lane < count
        at = rows + (first + start + lane) * FIELDS
        lows = tl.load(at + 0, mask=inside, other=0)
        highs = tl.load(at + 1, mask=inside, other=0)
        least = tl.minimum(least, tl.where(inside, lows, _INT64_MAX))
        most = tl.maximum(most, tl.where(inside, highs, _INT64_MIN))
        # The bits of integers may look like NaN, which these two pass on to nobody: see below.
        low = tl.minimum(low, tl.where(inside, lows.to(tl.float64, bitcast=True), float("inf")))
        high = tl.maximum(high, tl.where(inside, highs.to(tl.float64, bitcast=True), float("-inf")))
        total += tl.load(at + 2, mask=inside, other=0).to(tl.float64, bitcast=True)
        square += tl.load(at + 3, mask=inside, other=0).to(tl.float64, bitcast=True)
        total_big += tl.load(at + 4, mask=inside, other=0).to(tl.float64, bitcast=True)
        square_big += tl.load(at + 5, mask=inside, other=0).to(tl.float64, bitcast=True)
        square_small += tl.load(at + 6, mask=inside, other=0).to(tl.float64, bitcast=True)
        nans += tl.load(at + 7, mask=inside, other=0)
        infs += tl.load(at + 8, mask=inside, other=0)
        zeros += tl.load(at + 9, mask=inside, other=0)
        if SKETCHED:
            sums = tl.load(at[:, None] + (bucket + _SKETCH)[None, :], mask=inside[:, None], other=0)
            sketch += sums.to(tl.float64, bitcast=True)
    to = out + slot.to(tl.int64) * FIELDS
    if floats == 1:
        _store_bits(to + 0, tl.min(low, 0))
        _store_bits(to + 1, tl.max(high, 0))
    else:
        tl.store(to + 0, tl.min(least, 0))
        tl.store(to + 1, tl.max(most, 0))
    _store_bits(to + 2, tl.sum(total, 0))
    _store_bits(to + 3, tl.sum(square, 0))
    _store_bits(to + 4, tl.sum(total_big, 0))
    _store_bits(to + 5, tl.sum(square_big, 0))
    _store_bits(to + 6, tl.sum(square_small, 0))
    tl.store(to + 7, tl.sum(nans, 0))
    tl.store(to + 8, tl.sum(infs, 0))
    tl.store(to + 9, tl.sum(zeros, 0))
    if SKETCHED:
        _store_sketch(to, tl.sum(sketch, 0))
    tl.store(to + 10, tl.load(digests + slot))
    tl.store(digests + slot, tl.zeros([], tl.int64))
    tl.store(meta + slot * _META + 1, tl.zeros([], tl.int32))
