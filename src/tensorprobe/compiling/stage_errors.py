"""How far a value of one stage is from that of another, in units of what rounding explains."""

from __future__ import annotations

import math
from typing import Any

import torch

from tensorprobe.replay.reference import misplaced, rms, smallest

LIMIT = 16.0  # units of what rounding explains, as for recorded calls
_PEAK = 64.0  # of one number, in roundings of its size
_FEW = 0.01  # of the numbers: decisions that rounding may turn over


def value_error(actual: Any, wide: Any, native: Any, moved: Any, u: float) -> float:
    """How far a value is from its reference in units of rounding; 0 where it is as good as eager's.

    `wide` is the reference; `native` and `moved` say how far rounding alone takes the same graph.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(wide, torch.Tensor):
        if isinstance(actual, torch.Tensor) or isinstance(wide, torch.Tensor):
            return math.inf
        return _number_error(actual, wide, native, moved, u)
    if actual.shape != wide.shape:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    actual, wide = actual.detach(), wide.detach()
    if not (wide.is_floating_point() or wide.is_complex()):
        return _discrete_error(actual, wide, native, moved, u)
    found = actual.to(wide.dtype)
    eager = native.detach().to(wide.dtype)
    if torch.equal(found, eager):
        return 0.0
    dtype = actual.dtype
    wrong = misplaced(found, wide, dtype)
    if bool(wrong.any()) and bool(misplaced(found, eager, dtype).any()):
        return math.inf
    finite = found.isfinite() & wide.isfinite() & eager.isfinite()
    found, wide, eager = (torch.where(finite, each, 0.0) for each in (found, wide, eager))
    shaken = torch.where(finite, moved.detach().to(wide.dtype), 0.0)
    shaken = torch.where(shaken.isfinite(), shaken, wide)
    return _float_error(found, wide, eager, shaken, u, smallest(dtype))


def _float_error(found: Any, wide: Any, eager: Any, shaken: Any, u: float, least: float) -> float:
    """Of numbers that are all finite: as a whole, and of the one that is the furthest off."""
    size = rms(wide)
    unit = math.sqrt((u * size) ** 2 + rms(eager - wide) ** 2 + rms(shaken - wide) ** 2)
    whole = min(rms(found - wide), rms(found - eager)) / max(unit, least)
    allowed = _PEAK * u * (wide.abs() + size) / LIMIT + least
    allowed = allowed + (eager - wide).abs().max() + (shaken - wide).abs().max()
    apart = torch.minimum((found - wide).abs(), (found - eager).abs())
    error = max(whole, float((apart / allowed).max()))
    return math.inf if math.isnan(error) else error  # squares of such numbers overflow


def _discrete_error(actual: Any, wide: Any, native: Any, moved: Any, u: float) -> float:
    """Of whole numbers and masks: rounding may turn over a few of those that it decides on."""
    if actual.dtype != wide.dtype:
        return math.inf
    flips = min(int((actual != wide).sum()), int((actual != native).sum()))
    if not flips:
        return 0.0
    by_rounding = int((native != wide).sum()) + int((moved != wide).sum())
    if not by_rounding and u == 0.0:
        return math.inf
    expected = by_rounding + u * actual.numel()
    error = flips / max(expected, 1.0)
    return error if flips > _FEW * actual.numel() or error <= LIMIT else LIMIT


def _number_error(actual: Any, wide: Any, native: Any, moved: Any, u: float) -> float:
    """Of what is no tensor: sizes are exact, numbers that were read from a tensor are rounded."""
    if actual == wide or (actual != actual and wide != wide):
        return 0.0
    numbers = actual, wide, native, moved
    if not all(isinstance(each, int | float) for each in numbers) or not isinstance(wide, float):
        return math.inf if isinstance(actual, int | float) else 0.0
    unit = abs(native - wide) + abs(moved - wide) + u * abs(wide)
    return abs(actual - wide) / unit if unit > 0 else math.inf


def shifted(right: Any, noisy: Any, wide: Any) -> Any:
    """`right`, off by what `noisy` is off from `wide`."""
    if not all(isinstance(each, torch.Tensor) for each in (right, noisy, wide)):
        return right
    if right.shape != wide.shape or not right.is_floating_point():
        return right
    return right + (noisy.to(right.dtype) - wide.to(right.dtype))


def moved_by_rounding(value: Any, u: float, generator: torch.Generator) -> Any:
    """A tensor each number of which is a rounding larger or smaller."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8)
    return value.to(torch.float64) * (1 + u * (2 * signs.to(torch.float64) - 1))


def far(error: float) -> str:
    """An error, in words."""
    return "not like" if math.isinf(error) else f"{error:.3g} roundings off"
