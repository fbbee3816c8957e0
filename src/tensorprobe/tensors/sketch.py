"""The sketch of a tensor: sixteen sums that see where its numbers are. No torch, no numpy.

The numbers x[i] are the different elements of the tensor in the order of memory, the dimension of
the largest stride first (of complex ones the parts; what is not finite counts as 0). They lie in
tiles of 256. Each is added to one of sixteen sums, `i // 256 % 4 * 4 + i % 4`, in float64 and with
a sign. The signs of a tile come from eight bits of its number (`signs.sign_bits`). In a tile, i is
in step `i // 16 % 16` and quarter `i // 4 % 4`; its bit is that of the quarter, in the upper four
if SECOND has the step. These are integers, so every device has the same signs.

Two tensors differ by about as much as their sums do: the squares of the sixteen differences add up
to the square of the norm of the difference, on average over signs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

BUCKETS = 16
TILE = 256
ROUND = 1024  # after so many the sums come in the same order again
STEP = 16
QUARTER = 4  # elements of one sign
SECOND = 0x1ED8
FACTORS = 0x9E3779B1, 0x85EBCA77
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
    """About the norm of the difference of two tensors."""
    pairs = zip(_PACKED.unpack(a), _PACKED.unpack(b), strict=True)
    return math.hypot(*(x - y for x, y in pairs))
