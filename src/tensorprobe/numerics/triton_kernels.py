# mypy: ignore-errors
# Triton reads these functions as a language of its own, which has no types for mypy.
"""Triton kernels: partial tallies of a tensor, its digest, and the reduction of partials.

Imported only where Triton is installed. With TRITON_INTERPRET=1 they run on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tensorprobe.numerics.digest import CHUNK_WORDS, GOLD
from tensorprobe.numerics.host import SCALE
from tensorprobe.numerics.rows import BIG, SMALL

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
def _store_bits(pointer, value):
    tl.store(pointer, value.to(tl.int64, bitcast=True))


# Counters of the caller must not be specialised: every new value would compile a kernel.
@triton.jit(do_not_specialize=["n", "row", "slot"])
def tally_floats(
    x, table, rows, meta, n, row, slot,
    KIND: tl.constexpr, WIDE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of tallies per program over float or complex elements, `n` in all."""
    n = n.to(tl.int64)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    narrow = tl.float64 if (WIDE or KIND == _COMPLEX) else tl.float32
    low = tl.full([BLOCK], float("inf"), narrow)
    high = tl.full([BLOCK], float("-inf"), narrow)
    total = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    total_big = tl.zeros([BLOCK], tl.float64)
    square_big = tl.zeros([BLOCK], tl.float64)
    square_small = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    zeros = tl.zeros([BLOCK], tl.int32)
    steps = tl.cdiv(n, programs * BLOCK)
    at = pid.to(tl.int64) * BLOCK + lane
    for _ in range(steps):
        inside = at < n
        if KIND == _COMPLEX:
            re = tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float64)
            im = tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float64)
            nan = inside & ((re != re) | (im != im))
            inf = inside & ((tl.abs(re) == float("inf")) | (tl.abs(im) == float("inf"))) & (~nan)
            finite = inside & (~nan) & (~inf)
            re = tl.where(finite, re, 0.0)
            im = tl.where(finite, im, 0.0)
            wide = _magnitude(re, im)
            value = tl.where(inf, float("inf"), wide)
            squared = re * re + im * im
            size = tl.maximum(tl.abs(re), tl.abs(im))
        else:
            if KIND == _BFLOAT16:
                bits = tl.load(x + at, mask=inside, other=0).to(tl.int32) << 16
                value = bits.to(tl.float32, bitcast=True)
            elif KIND == _TABLE:
                value = tl.load(table + tl.load(x + at, mask=inside, other=0).to(tl.int32))
            else:
                value = tl.load(x + at, mask=inside, other=0.0).to(narrow)
            nan = inside & (value != value)
            inf = inside & (tl.abs(value) == float("inf"))
            finite = inside & (~nan) & (~inf)
            wide = tl.where(finite, value, 0.0).to(tl.float64)
            squared = wide * wide
            size = tl.abs(wide)
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
        at += programs * BLOCK
    to = rows + (row + pid).to(tl.int64) * FIELDS
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
    if pid == 0:
        tl.store(meta + slot * _META, row)
        tl.store(meta + slot * _META + 1, programs)
        tl.store(meta + slot * _META + 2, 1)


@triton.jit(do_not_specialize=["n", "row", "slot"])
def tally_integers(
    x, rows, meta, n, row, slot,
    KIND: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of tallies per program over integer or bool elements, `n` in all."""
    n = n.to(tl.int64)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], _INT64_MAX, tl.int64)
    high = tl.full([BLOCK], _INT64_MIN, tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    zeros = tl.zeros([BLOCK], tl.int32)
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
        at += programs * BLOCK
    to = rows + (row + pid).to(tl.int64) * FIELDS
    tl.store(to + 0, tl.min(low, 0))
    tl.store(to + 1, tl.max(high, 0))
    _store_bits(to + 2, tl.sum(total, 0))
    _store_bits(to + 3, tl.sum(square, 0))
    for field in tl.static_range(4, 9):
        tl.store(to + field, tl.zeros([], tl.int64))
    tl.store(to + 9, tl.sum(zeros.to(tl.int64), 0))
    if pid == 0:
        tl.store(meta + slot * _META, row)
        tl.store(meta + slot * _META + 1, programs)
        tl.store(meta + slot * _META + 2, 0)


@triton.jit(do_not_specialize=["n", "slot"])
def flag_floats(
    x, table, flags, n, slot, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join to a slot: bits for NaN (1), +inf (2), -inf (4), and the largest finite magnitude."""
    n = n.to(tl.int64)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    narrow = tl.float64 if WIDE else tl.float32
    bits = tl.zeros([BLOCK], tl.int32)
    top = tl.zeros([BLOCK], narrow)
    steps = tl.cdiv(n, programs * BLOCK)
    at = pid.to(tl.int64) * BLOCK + lane
    for _ in range(steps):
        inside = at < n
        if KIND == _BFLOAT16:
            raw = tl.load(x + at, mask=inside, other=0).to(tl.int32) << 16
            value = raw.to(tl.float32, bitcast=True)
        elif KIND == _TABLE:
            value = tl.load(table + tl.load(x + at, mask=inside, other=0).to(tl.int32))
            value = tl.where(inside, value, 0.0)
        else:
            value = tl.load(x + at, mask=inside, other=0.0).to(narrow)
        nan = value != value
        plus = value == float("inf")
        minus = value == float("-inf")
        bits = bits | nan.to(tl.int32) | (plus.to(tl.int32) << 1) | (minus.to(tl.int32) << 2)
        top = tl.maximum(top, tl.where(nan | plus | minus, 0.0, tl.abs(value)))
        at += programs * BLOCK
    nans = tl.max(bits & 1, 0)
    pluses = tl.max(bits & 2, 0)
    minuses = tl.max(bits & 4, 0)
    found = nans | pluses | minuses
    # A magnitude has no sign bit, so its bits compare as integers do; as float32 for one word.
    largest = tl.max(top, 0).to(tl.float32).to(tl.int32, bitcast=True)
    to = flags + slot.to(tl.int64) * 2
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
    x, weights, digests, units, slot, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one chunk of words a program to a slot's digest; x has `units` loads of UNIT bytes."""
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
def reduce_rows(
    rows, meta, digests, out, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per slot: its rows become one, and the slot is ready to be used again."""
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
    tl.store(to + 10, tl.load(digests + slot))
    tl.store(digests + slot, tl.zeros([], tl.int64))
    tl.store(meta + slot * _META + 1, tl.zeros([], tl.int32))
