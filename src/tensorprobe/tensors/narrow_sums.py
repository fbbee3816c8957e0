"""Sums of float32 numbers on a device that has no float64, such as an NPU.

Sums and squares are kept as pairs of float32, of which the second is what the first has lost (after
O. Møller and T. J. Dekker), and numbers are scaled by powers of two, so that no square leaves the
range. The host adds the pairs in float64. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch

# Numbers from _LARGE on are scaled by 2**-_DOWN, those below _TINY by 2**_UP: then the squares of
# 2**22 of them can be added, and what the squares lose is no smaller than float32 can be.
_LARGE, _TINY = 2.0**40, 2.0**-48
_DOWN, _UP = 80, 100
_SPLIT = 4097.0  # 2**12 + 1: cuts the 24 bits of a float32 in two halves

# Of a tensor: lowest, highest, and for the large, the usual and the tiny numbers the pairs of their
# sum and of the sum of their squares.
FIELDS = 2 + 3 * 4
Pair = tuple[torch.Tensor, torch.Tensor]


def tally(value: torch.Tensor, finite: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """The FIELDS of one piece: `value` with its NaN and infinities, and `finite` without."""
    size = finite.abs()
    large, tiny = size >= _LARGE, size < _TINY
    parts = (
        finite.masked_fill(~large, 0) * 2.0**-_DOWN,
        finite.masked_fill(large | tiny, 0),
        # in two steps: the device may not take a factor that makes the middle of it too large
        finite.masked_fill(~tiny, 0) * 2.0 ** (_UP // 2) * 2.0 ** (_UP // 2),
    )
    low = value.masked_fill(nan, math.inf).amin()
    high = value.masked_fill(nan, -math.inf).amax()
    found = [low, high]
    for part in parts:
        flat = part.reshape(-1)
        found += _sum(flat, torch.zeros_like(flat))
        found += _sum(*_square(flat))
    return torch.stack(found)


def combine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The FIELDS of two pieces as those of both."""
    found = [torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])]
    for field in range(2, FIELDS, 2):
        total, lost = _add(one[field], other[field])
        found += [total, one[field + 1] + other[field + 1] + lost]
    return torch.stack(found)


def decode(fields: list[float]) -> tuple[float, float, float, float]:
    """Lowest, highest, sum and sum of squares, in float64."""
    total = square = 0.0
    for scale, at in ((_DOWN, 2), (0, 6), (-_UP, 10)):
        a, b, c, d = fields[at : at + 4]
        total += math.ldexp(a + b, scale)
        square += math.ldexp(c + d, 2 * scale)
    return fields[0], fields[1], total, square


def _sum(total: torch.Tensor, lost: torch.Tensor) -> list[torch.Tensor]:
    """The sum of pairs, half of them to the other half again and again, as one pair."""
    while len(total) > 1:
        if len(total) % 2:
            total, lost = (torch.cat([x, x.new_zeros(1)]) for x in (total, lost))
        half = len(total) // 2
        total, rest = _add(total[:half], total[half:])
        lost = lost[:half] + lost[half:] + rest
    return [total.reshape(()), lost.reshape(())]


def _add(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """A sum, and exactly what its rounding has lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _square(x: torch.Tensor) -> Pair:
    """Squares, and exactly what their rounding has lost."""
    square = x * x
    scaled = x * _SPLIT
    high = scaled - (scaled - x)
    low = x - high
    return square, ((high * high - square) + high * low * 2.0) + low * low
