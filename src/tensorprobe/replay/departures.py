"""How far a result departs from its float64 reference, in the units of the laws of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from tensorprobe.replay.rounding_laws import Breach, Departure, Law, Where, breach

_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # with the leading one
_SIGMAS = 6.0
_HUGE = 1e30  # masks
_SMALL = 64  # a number so much smaller than those around it is what cancellation has left
_BLOCK = 16
_FEWEST = 37  # of fewer numbers no sum is six times its own spread
_FP32 = 2.0**-24
_LARGEST = 1 << 24  # numbers that are looked at: this takes 50 bytes for each


def settle(
    found: torch.Tensor,
    reference: torch.Tensor,
    law: Law,
    length: float,
    moved: Callable[[float], Sequence[torch.Tensor]],
) -> tuple[Departure, Breach | None]:
    """How a result departs from its reference, and the law it breaks, if it does.

    Only where it seems to is `moved` asked how far inputs that are moved by a part of their size,
    its argument, move the reference.
    """
    found, reference = _part(found), _part(reference)
    quick = depart(found, reference)
    broken = breach(quick, law, length)
    if broken is None:
        return quick, None
    # what a kernel rounds on its way is as coarse as its result, where it rounds often
    step = _FP32 if law.kind == "once" else 2.0 ** -_BITS[found.dtype]
    noise = [_part(each) for each in moved(step)]
    slow = depart(found, reference, step=step, moved=noise, distinct=True)
    return slow, breach(slow, law, length)


def can_judge(dtype: torch.dtype) -> bool:
    """Whether there is a law for results of this dtype, apart from exact ones."""
    return dtype in _BITS


def depart(
    found: torch.Tensor,
    reference: torch.Tensor,
    *,
    step: float = _FP32,
    moved: Sequence[torch.Tensor] = (),
    distinct: bool = False,
) -> Departure:
    """How far a result departs from its float64 reference.

    `moved` are differences to the reference when inputs are moved by the part `step` of their size:
    where that moves a result by more, an ill-conditioned call, the departure counts for less.
    With `distinct`, numbers that occur more than once count once: they have one rounding error.
    """
    bits = _BITS[found.dtype]
    u = 2.0**-bits
    x, y = found.to(torch.float64), reference.to(torch.float64)
    least = float(torch.finfo(found.dtype).smallest_normal)
    size = y.abs()
    usable = x.isfinite() & y.isfinite() & (size >= least) & (size < _HUGE) & (x.abs() < _HUGE)
    n = int(usable.sum())
    if not n:
        return Departure()
    x, y = torch.where(usable, x, 0.0), torch.where(usable, y, 0.0)
    d = x - y
    if not bool(d.any()):
        return Departure(n=n)
    noise = _noise(moved, usable)
    beyond, n_beyond, counted = 0.0, 0, n
    if found.dtype is not torch.float32:
        beyond, n_beyond, counted = _beyond(d, y, usable, bits, noise, step)
    weight = _weights(x, y, usable) if distinct else None
    factor, offset = 0.0, 0.0
    where_factor: Where = ""
    where_offset: Where = ""
    for where, parts in _groups(d, y, noise, weight):
        worst = _systematic(parts, u, step)
        if worst[0] > factor:
            factor, where_factor = worst[0], where
        if worst[1] > offset:
            offset, where_offset = worst[1], where
    return Departure(beyond, factor, offset, where_factor, where_offset, n_beyond, counted)


def exact_breach(found: torch.Tensor, reference: torch.Tensor) -> Breach | None:
    """Numbers that were only moved, chosen or compared: they are the same, or are wrong."""
    same = found == reference
    if found.is_floating_point() or found.is_complex():
        same |= found.isnan() & reference.isnan()
        if found.is_floating_point():  # a device may take the smallest numbers for zero
            least = float(torch.finfo(found.dtype).smallest_normal)
            same |= (found.double().abs() < least) & (reference.double().abs() < least)
    n = int((~same).sum())
    return Breach("exact", float(n), n, n=n, of=found.numel()) if n else None


def cast_breach(found: torch.Tensor, source: torch.Tensor) -> Breach | None:
    """A conversion between floating dtypes: the nearest number, at a tie the even one."""
    wide = source.to(torch.float64)
    limits = torch.finfo(found.dtype)
    size = wide.abs()
    usable = found.to(torch.float64).isfinite() & (size <= limits.max)
    usable &= (size >= limits.smallest_normal) | (size == 0)
    x = found.to(torch.float64)
    down, up = _neighbours(wide, found.dtype)
    middle = (down + up) / 2  # exact in float64 for all that is narrower
    nearest = torch.where(wide > middle, up, down)
    nearest = torch.where(wide == middle, source.to(found.dtype).to(torch.float64), nearest)
    # by way of float32, as torch converts float64, a number close to a tie may be rounded twice
    twice = source.to(torch.float32).to(found.dtype).to(torch.float64)
    wrong = usable & (x != nearest) & (x != twice)
    n, of = int(wrong.sum()), int(usable.sum())
    if not n:
        return None
    towards_zero = torch.where(wide >= 0, down, up)
    inexact = usable & (down != up)
    cut = bool((x == towards_zero)[inexact].all())
    return Breach("truncated" if cut else "cast", float(n), n, n=n, of=of)


def _part(x: torch.Tensor) -> torch.Tensor:
    """The first rows of a tensor that is very large."""
    if x.numel() <= _LARGEST:
        return x
    rows = _as_rows(x)
    return rows[: _LARGEST // rows.shape[1]] if rows.shape[1] <= _LARGEST else rows[0, :_LARGEST]


def _neighbours(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of `dtype` below and above; twice the same where it has the number itself."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(torch.clamp(wide.abs(), min=limits.smallest_normal)).exponent - 1
    spacing = torch.ldexp(torch.full_like(wide, limits.eps), exponent)
    return torch.floor(wide / spacing) * spacing, torch.ceil(wide / spacing) * spacing


def _noise(moved: Sequence[torch.Tensor], usable: torch.Tensor) -> torch.Tensor | None:
    """The mean square of how far the reference is moved, for each number."""
    if not moved:
        return None
    squares = [torch.where(usable, part.to(torch.float64), 0.0).square() for part in moved]
    found: torch.Tensor = torch.stack(squares).mean(0)
    return found


def _beyond(
    d: torch.Tensor,
    y: torch.Tensor,
    usable: torch.Tensor,
    bits: int,
    noise: torch.Tensor | None,
    step: float,
) -> tuple[float, int, int]:
    """How far beyond half the distance of two neighbours the furthest number is; how many are
    beyond it clearly, of how many."""
    level = math.sqrt(float(y.square().sum()) / max(int(usable.sum()), 1))
    rows = _as_rows(y)
    around = torch.clamp(rows.square().mean(1, keepdim=True).sqrt(), min=level)
    around = torch.maximum(around, rows.square().mean(0, keepdim=True).sqrt())
    around = around.reshape(y.shape)
    kept = usable & (y.abs() >= around / _SMALL)
    if not bool(kept.any()):
        return 0.0, 0, 0
    exponent = torch.frexp(torch.where(kept, y, 1.0)).exponent
    spacing = torch.ldexp(torch.ones_like(y), exponent - bits)
    over = torch.where(kept, d.abs() / spacing - 0.5, 0.0)
    if noise is not None:
        square = torch.clamp(_as_rows(noise).mean(1, keepdim=True), min=float(noise.mean()))
        around = torch.clamp(rows.square().mean(1, keepdim=True), min=1e-300)
        condition = (square / around).sqrt() / step
        over = over / torch.clamp(condition, min=1.0).expand_as(rows).reshape(y.shape)
    return max(float(over.max()), 0.0), int((over > 0.005).sum()), int(kept.sum())


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    last = x.shape[-1] if x.dim() and x.shape[-1] else 1
    return x.reshape(-1, last)


class _Sums(msgspec.Struct):
    """Sums over each group of numbers: what z-values are made of."""

    dy: torch.Tensor
    dy2: torch.Tensor
    y2: torch.Tensor
    d: torch.Tensor
    d2: torch.Tensor
    y1: torch.Tensor
    noise: torch.Tensor | None


def _systematic(sums: _Sums, u: float, step: float) -> tuple[float, float]:
    """The largest factor and offset over the groups, less six times what chance leaves of them."""
    scale = u * torch.clamp(sums.y2, min=1e-300)
    size = u * torch.clamp(sums.y1, min=1e-300)
    if sums.noise is not None:
        condition = (sums.noise / torch.clamp(sums.y2, min=1e-300)).sqrt() / step
        condition = torch.clamp(condition, min=1.0)
        scale, size = scale * condition, size * condition
    factor = (sums.dy.abs() - _SIGMAS * sums.dy2.sqrt()) / scale
    offset = (sums.d.abs() - _SIGMAS * sums.d2.sqrt()) / size
    return max(float(factor.max()), 0.0), max(float(offset.max()), 0.0)


def _groups(
    d: torch.Tensor, y: torch.Tensor, noise: torch.Tensor | None, weight: torch.Tensor | None
) -> Iterator[tuple[Where, _Sums]]:
    """The whole, each row, column, slice along a dimension (a head, a channel) and 16x16 block."""
    w = torch.ones_like(y) if weight is None else weight
    planes = [w * d * y, w * (d * y).square(), w * y.square(), w * d, w * d.square(), w * y.abs()]
    if noise is not None:
        planes.append(w * noise)
    stack = torch.stack(planes)
    yield "tensor", _sums(stack.reshape(len(planes), -1).sum(1, keepdim=True))
    shape = y.shape
    n = y.numel()
    if len(shape) < 2 or n < 2 * _FEWEST:
        return
    rows = stack.reshape(len(planes), -1, shape[-1])
    n_rows, width = rows.shape[1], rows.shape[2]
    if width >= _FEWEST and n_rows > 1:
        yield "row", _sums(rows.sum(2))
    if n_rows >= _FEWEST and width > 1:
        yield "column", _sums(rows.sum(1))
    for axis in range(len(shape) - 1):
        if shape[axis] > 1 and n // shape[axis] >= _FEWEST and len(shape) > 2:
            others = [i + 1 for i in range(len(shape)) if i != axis]
            yield "slice", _sums(stack.sum(others))
    if len(shape) >= 4 and math.prod(shape[2:]) >= _FEWEST:
        yield "slice", _sums(stack.reshape(len(planes), shape[0] * shape[1], -1).sum(2))
    if n_rows >= _BLOCK and width >= _BLOCK:
        high, wide = n_rows // _BLOCK, width // _BLOCK
        cut = rows[:, : high * _BLOCK, : wide * _BLOCK]
        blocks = cut.reshape(len(planes), high, _BLOCK, wide, _BLOCK).sum((2, 4))
        yield "block", _sums(blocks.reshape(len(planes), -1))
        if wide > 1:
            yield "block", _sums(blocks.sum(1))


def _sums(parts: torch.Tensor) -> _Sums:
    noise = parts[6] if len(parts) > 6 else None
    return _Sums(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], noise)


def _weights(x: torch.Tensor, y: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """One over how often each number occurs together with its reference."""
    high, low = (part.to(torch.float32).flatten().view(torch.int32).long() for part in (y, x))
    pairs = (high << 32) ^ (low & 0xFFFFFFFF)
    _, at, counts = torch.unique(pairs, return_inverse=True, return_counts=True)
    weight = 1.0 / counts[at].to(torch.float64)
    return torch.where(usable, weight.reshape(y.shape), 0.0)
