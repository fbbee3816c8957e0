"""A call's own error: what it gave against its float64 replay on its own inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.records import Call, TensorRecord

if TYPE_CHECKING:
    import torch

HUGE = 1e30
_SHAKES = 2  # replays on inputs moved by a rounding, for what rounding explains
_ROW = 64  # numbers in a row where the last dimension is too short to average over


class OwnError(msgspec.Struct, frozen=True):
    """How far one output is from its replay, in units of what rounding explains.

    `rms` is over the whole tensor, `row` over the worst row, `gain` the share of the result that
    is a systematic factor, in roundings, with its standard error `gain_sigma`.
    """

    name: str
    rms: float
    row: float
    gain: float
    gain_sigma: float
    relative: float
    exact: bool = False  # there is one right answer

    @property
    def size(self) -> float:
        return max(self.rms, self.row / 2)


class Evidence(msgspec.Struct, frozen=True):
    """What replaying a call on one side has shown, or why it could not be replayed."""

    errors: dict[str, OwnError] = {}
    problem: str | None = None

    @property
    def worst(self) -> OwnError | None:
        return max(self.errors.values(), key=lambda error: error.size, default=None)


def own_error(forward: Call, backward: Call | None = None, *, noise: bool = True) -> Evidence:
    """Replay a call, or the backward of one, and hold its recorded outputs against the result.

    Without `noise` it takes half the time and the errors may come out larger than they are.
    """
    try:
        return _own_error(forward, backward, noise)
    except (NotReplayable, UnreadableCapture) as error:
        return Evidence(problem=str(error))


def _own_error(forward: Call, backward: Call | None, noise: bool) -> Evidence:
    from tensorprobe.replay.reference import replay

    subject = backward or forward
    moved = []
    replayed = replay(forward, backward=backward, noise=False)
    if noise and replayed.kind not in ("exact", "conversion"):
        moved = [
            replay(
                forward,
                backward=backward,
                noise=False,
                source=_shaken(replayed.roundoff, seed),
            ).outputs
            for seed in range(_SHAKES)
        ]
    errors = {}
    blind = _blind(forward) if replayed.kind == "dropout" and backward is not None else None
    for record in subject.tensors:
        name = record.name.removeprefix(subject.name + ".")
        reference = replayed.outputs.get(name)
        if record.role != "output" or record.blob is None or reference is None:
            continue
        found = record.load()
        if tuple(reference.shape) != tuple(found.shape):
            continue
        if blind is not None and blind.shape == found.shape:
            found, reference = found.clone(), reference.clone()
            found[blind], reference[blind] = 0, 0
        shaken = [outputs[name] - reference for outputs in moved if name in outputs]
        exact = replayed.kind in ("exact", "conversion") and backward is None
        given = _incoming(backward, record) if backward is not None else None
        errors[name] = _compare(name, found, reference, replayed.roundoff, shaken, given, exact)
    if not errors:
        return Evidence(problem=f"{subject.name}: its replay gives none of what was recorded")
    return Evidence(errors)


def _shaken(roundoff: float, seed: int) -> Callable[[TensorRecord], torch.Tensor]:
    """Loads inputs with each number moved up or down by one rounding."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def load(record: TensorRecord) -> torch.Tensor:
        found = record.load()
        if not (found.is_floating_point() or found.is_complex()):
            return found
        wide = found.to(torch.complex128 if found.is_complex() else torch.float64)
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8) * 2 - 1
        return wide * (1 + roundoff * signs.to(wide.dtype))  # of int8 it would be float32's 1

    return load


def _incoming(backward: Call, record: TensorRecord) -> torch.Tensor | None:
    """The gradient that came in, where it has the shape of the one that went out."""
    import torch

    for other in backward.tensors:
        if other.role == "input" and other.shape == record.shape and other.blob is not None:
            return torch.nan_to_num(other.load().to(torch.float64), 0.0, 0.0, 0.0)
    return None


def _blind(dropout: Call) -> torch.Tensor | None:
    """Where a mask that is read off the output cannot be told: what went in was zero."""
    given = next((r for r in dropout.tensors if r.role == "input" and r.blob is not None), None)
    made = next((r for r in dropout.tensors if r.role == "output" and r.blob is not None), None)
    if given is None or made is None:
        return None
    # a number so small that its scaled copy was rounded to zero tells nothing either
    return given.load().abs() < 1e-30 if made.dtype != "float16" else given.load().abs() < 1e-7


def matters(call: Call, other: Call) -> float | None:
    """How far the replay of a call moves when it is given the arguments of another, in roundings;
    None when that cannot be tried."""
    from tensorprobe.replay.reference import replay, rms

    try:
        own = replay(call, noise=False)
        theirs = replay(other, noise=False)
    except (NotReplayable, UnreadableCapture):
        return None
    worst = 0.0
    for name, mine in own.outputs.items():
        got = theirs.outputs.get(name)
        if got is None or got.shape != mine.shape:
            return math.inf
        unit = own.roundoff * rms(mine)
        moved = rms(mine.double() - got.double())
        if moved:
            worst = max(worst, moved / unit if unit else math.inf)
    return worst


def _compare(
    name: str,
    found: torch.Tensor,
    reference: torch.Tensor,
    u: float,
    shaken: list[torch.Tensor],
    given: torch.Tensor | None,
    exact: bool,
) -> OwnError:
    import torch

    if not (found.is_floating_point() or found.is_complex()):
        wrong = int((found != reference.to(found.dtype)).sum())
        size = math.inf if wrong else 0.0
        return OwnError(name, size, size, 0.0, 0.0, size, exact)
    if found.is_complex():
        found, reference = torch.view_as_real(found), torch.view_as_real(reference)
    x, y = found.to(torch.float64), reference.to(torch.float64)
    limit = torch.finfo(found.dtype).max * (1 + torch.finfo(found.dtype).eps / 4)
    y = torch.where(y.abs() > limit, y.sign() * math.inf, y)
    finite = x.isfinite() & y.isfinite()
    alike = finite | (x == y) | (x.isnan() & y.isnan())
    if not bool(alike.all()):
        return OwnError(name, math.inf, math.inf, 0.0, 0.0, math.inf, exact)
    usable = finite & (x.abs() < HUGE) & (y.abs() < HUGE)
    x, y = torch.where(usable, x, 0.0), torch.where(usable, y, 0.0)
    d = x - y
    if not bool(d.any()):
        return OwnError(name, 0.0, 0.0, 0.0, 0.0, 0.0, exact)
    n = max(int(usable.sum()), 1)
    rms_y = float(y.norm()) / math.sqrt(n)
    rms_d = float(d.norm()) / math.sqrt(n)
    tiny = float(torch.finfo(found.dtype).smallest_normal) * float(torch.finfo(found.dtype).eps)
    noise = [torch.where(usable, part.to(torch.float64), 0.0) for part in shaken]
    square_noise = sum((float(part.norm()) ** 2 for part in noise), 0.0) / max(len(noise), 1) / n
    scale = max(math.hypot(u * rms_y, math.sqrt(square_noise)), tiny)
    rows_d, rows_y = _row_rms(d), _row_rms(y)
    row_unit = (u * rows_y).square()
    for part in noise:
        row_unit = row_unit + _row_rms(part).square() / len(noise)
    if given is not None:
        # what backward saved of the result was rounded too, which no shaking of inputs shows
        row_unit = row_unit + (u * _row_rms(given)).square()
    # a row far smaller than the whole is what cancellation leaves of it
    row_unit = torch.clamp(row_unit.sqrt(), min=scale / 2)
    square = float(y.flatten() @ y.flatten())
    gain = float(d.flatten() @ y.flatten()) / square if square else 0.0
    sigma = rms_d / (rms_y * math.sqrt(n)) if rms_y else math.inf
    return OwnError(
        name,
        rms_d / scale,
        float((rows_d / row_unit).max()),
        gain / u if u else 0.0,
        sigma / u if u else 0.0,
        rms_d / rms_y if rms_y else math.inf,
        exact,
    )


def _row_rms(x: torch.Tensor) -> torch.Tensor:
    last = x.shape[-1] if x.dim() else 1
    if last >= _ROW // 4 and x.numel() > last:
        rows = x.reshape(-1, last)
    else:
        flat = x.reshape(-1)
        rows = (
            flat[: flat.numel() // _ROW * _ROW].reshape(-1, _ROW)
            if flat.numel() > _ROW
            else flat[None]
        )
    result: torch.Tensor = rows.pow(2).mean(1).sqrt()
    return result
