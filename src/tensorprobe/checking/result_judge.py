"""One result against its reference: how far it is, how far it may be, and the verdict."""

from __future__ import annotations

import math

import numpy as np
import torch

from tensorprobe.checking.row import Judgement
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.kinds import api_of
from tensorprobe.replay.rebuild import load
from tensorprobe.replay.reference import HUGE, ROUNDOFF, Replayed, misplaced, rms, smallest
from tensorprobe.replay.rules import RoundingRule, limit, rule_for

_STEP = ROUNDOFF["float32"]


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def judge(
    name: str,
    found: torch.Tensor,
    replayed: Replayed,
    direction: str,
    length: float,
    roundoff: float | None = None,
) -> Judgement:
    """Judge one output or gradient; `roundoff` overrules that of its dtype (TF32)."""
    expected = replayed.outputs[name]
    found = found.detach().cpu()
    rule = rule_for(replayed.kind, direction)
    verdict = Judgement(
        name=name,
        shape=tuple(found.shape),
        device_dtype=dtype_name(found),
        reference_dtype=dtype_name(expected),
        measure=rule.measure,
        error=0.0,
        limit=0.0,
        ok=True,
        reason="",
    )
    if found.shape != expected.shape:
        return _failed(verdict, f"shape {list(found.shape)}, expected {list(expected.shape)}")
    if found.is_floating_point() != expected.is_floating_point():
        return _failed(verdict, f"{dtype_name(found)}, expected {dtype_name(expected)}")
    if found.numel() == 0:
        return verdict
    if not (expected.is_floating_point() or expected.is_complex()):
        return _equal(verdict, found, expected)
    difference = _difference(found, expected)
    verdict.max_abs = float(difference.max())
    verdict.max_rel = _max_rel(difference, expected)
    if rule.measure in ("equal", "selection"):
        return _equal(verdict, found, expected)
    bad = misplaced(found.to(expected.dtype), expected, found.dtype)
    if bool(bad.any()):
        return _failed(verdict, _nonfinite(found, expected, bad))
    if rule.measure == "ulp" and direction == "forward":
        return _ulp(verdict, found, difference, replayed, rule)
    return _unit(verdict, found, difference, replayed, rule, length, roundoff)


def _failed(verdict: Judgement, reason: str) -> Judgement:
    verdict.ok, verdict.error, verdict.reason = False, None, reason
    return verdict


def _difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|found - expected| in float64, 0 where there is nothing to subtract."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (found.to(wide) - expected.to(wide)).abs()
    usable = difference.isfinite() & (expected.abs() < HUGE)
    return torch.where(usable, difference, 0.0)


def _max_rel(difference: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.abs().to(torch.float64)
    relative = torch.where(size > 0, difference / size.clamp_min(1e-300), 0.0)
    return float(relative.nan_to_num(0.0, 0.0, 0.0).max())


def _equal(verdict: Judgement, found: torch.Tensor, expected: torch.Tensor) -> Judgement:
    expected = expected.to(found.dtype)
    unequal = found != expected
    if found.is_floating_point() or found.is_complex():
        unequal &= ~(found.isnan() & expected.isnan())
    count = int(unequal.sum())
    verdict.measure, verdict.error = "elements", float(count)
    if count:
        verdict.ok = False
        where = tuple(int(i) for i in unequal.nonzero()[0])
        verdict.reason = (
            f"{count} of {found.numel()} elements are not equal; first at {list(where)}: "
            f"{_show(found[where])}, expected {_show(expected[where])}"
        )
    return verdict


def _show(number: torch.Tensor) -> str:
    value = number.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _nonfinite(found: torch.Tensor, expected: torch.Tensor, bad: torch.Tensor) -> str:
    where = tuple(int(i) for i in bad.nonzero()[0])
    return (
        f"{int(bad.sum())} elements are NaN or infinite on one side only; first at {list(where)}: "
        f"{_show(found[where])}, expected {_show(expected[where])}"
    )


def _ulp(
    verdict: Judgement,
    found: torch.Tensor,
    difference: torch.Tensor,
    replayed: Replayed,
    rule: RoundingRule,
) -> Judgement:
    """Units in the last place, beside what a rounding of the inputs does: in float32, in which
    kernels for fewer bits calculate, or in the dtype itself where they may round each step."""
    roundoff = ROUNDOFF.get(dtype_name(found), 2.0**-24)
    tiny = float(torch.finfo(found.dtype).smallest_normal)
    size = replayed.outputs[verdict.name].abs().to(torch.float64).clamp_min(tiny)
    ulp = 2 * roundoff * torch.exp2(torch.floor(torch.log2(size)))
    moved = replayed.moved.get(verdict.name)
    if moved is not None:
        step = roundoff if replayed.kind == "compound" else min(roundoff, _STEP)
        ulp = ulp + moved.abs().nan_to_num(0.0, 0.0, 0.0) * (step / _STEP)
    errors = torch.where(difference > 0, difference / ulp, 0.0)
    verdict.measure, verdict.limit = "ulp", limit(rule, roundoff, 1.0)
    return _held(verdict, float(errors.max()), errors)


def _unit(
    verdict: Judgement,
    found: torch.Tensor,
    difference: torch.Tensor,
    replayed: Replayed,
    rule: RoundingRule,
    length: float,
    roundoff: float | None,
) -> Judgement:
    """Root mean square in units of rounding, and the worst element in a unit of its own."""
    expected = replayed.outputs[verdict.name]
    coarse = max(replayed.roundoff, roundoff or 0.0)
    noise = replayed.noise.get(verdict.name, 0.0) * coarse / max(replayed.roundoff, 1e-300)
    # numbers too small to be normal have an absolute precision, lost anew with every addend
    floor = smallest(found.dtype) * math.sqrt(max(length, 1.0))
    size = rms(expected)
    unit = math.hypot(coarse * size, noise, floor)
    if unit == 0.0:
        return _equal(verdict, found, expected)
    verdict.limit = limit(rule, coarse, length)
    own = torch.sqrt((coarse * (expected.abs() + size)) ** 2 + noise**2 + floor**2)
    peaks = torch.where(difference > 0, difference / own, 0.0)
    error = max(rms(difference) / unit, float(peaks.max()) / rule.peak)
    return _held(verdict, error, peaks)


def _held(verdict: Judgement, error: float, errors: torch.Tensor) -> Judgement:
    if not math.isfinite(error):
        return _failed(verdict, "its distance from the reference is not a number")
    verdict.error = error
    verdict.ok = error <= verdict.limit
    if not verdict.ok:
        where = [int(i) for i in np.unravel_index(int(errors.argmax()), tuple(errors.shape))]
        verdict.reason = (
            f"{error:.3g} {_WORDS[verdict.measure]}, {verdict.limit:.3g} allowed; "
            f"worst at {where}, max abs error {verdict.max_abs:.3g}"
        )
    return verdict


_WORDS = {"ulp": "units in the last place", "unit": "times what rounding explains"}


# Where `dim` stands among the positional arguments, and what it is when it is not given.
_DIM: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "mode": (1, -1),
    "cummax": (1, None),
    "cummin": (1, None),
}


def same_choice(call: Call, found: dict[str, torch.Tensor], expected: Replayed) -> bool:
    """Whether indices that differ choose equal values: of equal numbers any may be taken."""
    source = next((t for t in call.tensors if t.role == "input" and t.blob is not None), None)
    if source is None:
        return False
    try:
        values = load(source)
    except NotReplayable:
        return False
    place, default = _DIM.get(api_of(call.op), (1, None))
    dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else default)
    for name, reference in expected.outputs.items():
        actual = found[name].cpu()
        if actual.is_floating_point() or actual.dtype is torch.bool:
            if not torch.equal(actual, reference.to(actual.dtype)):
                return False
        elif not isinstance(dim, int | None) or not _choose(values, actual, reference, dim):
            return False
    return True


def _choose(
    values: torch.Tensor, actual: torch.Tensor, reference: torch.Tensor, dim: int | None
) -> bool:
    if dim is None or values.dim() == 0:
        values, actual, reference, dim = (
            values.reshape(-1),
            actual.reshape(-1),
            reference.reshape(-1),
            0,
        )
    if actual.dim() < values.dim():
        actual, reference = actual.unsqueeze(dim), reference.unsqueeze(dim)
    if int(actual.min()) < 0 or int(actual.max()) >= values.shape[dim]:
        return False
    return torch.equal(values.gather(dim, actual), values.gather(dim, reference))
