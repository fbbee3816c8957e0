"""The sketch of a tensor: sixteen sums that see where its numbers are. No torch, no numpy.

The numbers x[i] are the elements of the tensor in their logical order, row by row, however they lie
in memory (of complex ones the parts; what is not finite counts as 0). They lie in tiles of 256, and
in those in cells of 8. Each is multiplied by the weight of its tile and the weight of its cell, and
added to the sum `i // 256 % 4 * 4 + i % 4` in float64; the last four of a cell are subtracted.

The weight of a number is a mix of its bits: a sign and a magnitude from 1 to 2, in 20 bits. So two
places have the same weight only by chance, the first tile has other weights than the second, and
numbers that change places change the sums. A weight is made of integers, so that every device has
the same; two weights and a float32 have so few bits that their product is exact.

Two tensors differ by about as much as their sums do: see `difference`. That two sketches are equal
proves nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

BUCKETS = 16
TILE = 256
ROUND = 1024  # after so many the sums come in the same order again
CELL = 8
QUARTER = 4  # sums that a tile is added to
FIRST = 0x7F4A7C15  # what is mixed, of the first tile
FACTORS = 0x9E3779B1, 0x85EBCA77
# The number of the first cell, which no tile has; the first eight cells have weights far apart.
CELLS = 0x7DB06470
SIGN_AND_FRACTION = 0x800FFFFF  # of the upper half of a float64
ONE = 0x3FF00000  # its exponent for 1 to 2
MEAN_SQUARE = 7 / 3  # of a weight
NBYTES = 8 * BUCKETS

_PACKED = struct.Struct(f"<{BUCKETS}d")


def pack(buckets: Iterable[float]) -> bytes | None:
    """The sums as bytes; None where one has left the range of float64."""
    sums = tuple(buckets)
    return _PACKED.pack(*sums) if all(map(math.isfinite, sums)) else None


def check(packed: bytes) -> bytes:
    """The same bytes if they are a sketch, else ValueError."""
    if len(packed) != NBYTES or not all(map(math.isfinite, _PACKED.unpack(packed))):
        raise ValueError(f"no sketch of a tensor: {len(packed)} bytes, {packed[:16].hex()}")
    return packed


def difference(a: bytes, b: bytes) -> float:
    """About the norm of the difference of two tensors: its square is right on average."""
    pairs = zip(_PACKED.unpack(a), _PACKED.unpack(b), strict=True)
    return math.hypot(*(x - y for x, y in pairs)) / MEAN_SQUARE
