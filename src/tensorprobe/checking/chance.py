"""Dropout and random numbers: no two devices draw the same, so shares and moments are judged."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tensorprobe.checking.result_judge import dtype_name
from tensorprobe.checking.row import Judgement
from tensorprobe.records import Call
from tensorprobe.replay.kinds import api_of
from tensorprobe.replay.reference import ROUNDOFF, drop_probability

SIGMAS = 6.0  # a healthy generator goes beyond once in five hundred million draws
_FEW = 30  # fewer numbers say nothing about a distribution


def _verdict(name: str, found: torch.Tensor, measure: str) -> Judgement:
    return Judgement(
        name=name,
        shape=tuple(found.shape),
        device_dtype=dtype_name(found),
        reference_dtype="",
        measure=measure,
        error=0.0,
        limit=SIGMAS,
        ok=True,
        reason="",
    )


def judge_dropout(
    call: Call,
    given: torch.Tensor,
    found: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor] | None,
) -> list[Judgement]:
    """Share of zeros near p, the rest scaled by 1 / (1 - p), the same places in backward."""
    p = drop_probability(call) or 0.0
    given, found = given.detach().cpu().to(torch.float64), found.detach().cpu()
    verdict = _verdict("output.0", found, "share of zeros, in sigmas")
    alive = given != 0
    kept = (found != 0) & alive
    n = int(alive.sum())
    if n >= _FEW and 0 < p < 1 and _is_elementwise(call):
        share = 1 - int(kept.sum()) / n
        verdict.error = abs(share - p) / math.sqrt(p * (1 - p) / n)
        if verdict.error > SIGMAS:
            verdict.ok = False
            verdict.reason = f"{share:.3%} of {n} elements are zero, p is {p:.3%}"
    if verdict.ok and p < 1 and "alpha" not in call.op:
        _judge_scale(verdict, found, given / (1 - p), kept)
    judgements = [verdict]
    if gradients is not None:
        incoming, sent = (each.detach().cpu() for each in gradients)
        back = _verdict("output.0", sent, "gradient where the output is")
        wanted = incoming.to(torch.float64) / (1 - p) if p < 1 else incoming.to(torch.float64)
        stray = (sent != 0) & (found == 0) & alive
        if bool(stray.any()):
            back.ok, back.error = False, None
            back.reason = f"{int(stray.sum())} gradients flow where the output was dropped"
        elif "alpha" not in call.op:
            _judge_scale(back, sent, wanted, kept)
        judgements.append(back)
    return judgements


def _is_elementwise(call: Call) -> bool:
    """dropout2d and its like drop whole channels: too few draws for a share of elements."""
    return api_of(call.op) in ("dropout", "native_dropout", "Dropout", "alpha_dropout")


def _judge_scale(
    verdict: Judgement, found: torch.Tensor, wanted: torch.Tensor, where: torch.Tensor
) -> None:
    # 1 / (1 - p) is rounded to the dtype, and so is the product
    allowed = 4 * ROUNDOFF.get(verdict.device_dtype, 2.0**-24)
    tiny = float(torch.finfo(found.dtype).smallest_normal) if found.is_floating_point() else 0.0
    error = (found.to(torch.float64) - wanted).abs()
    error = torch.where(where & wanted.isfinite(), error - tiny, 0.0)
    relative = error / wanted.abs().clamp_min(1e-300)
    verdict.max_abs, verdict.max_rel = float(error.max().clamp_min(0)), float(relative.max())
    if verdict.max_rel > allowed:
        verdict.ok = False
        verdict.reason = f"kept elements are off by {verdict.max_rel:.3g}, {allowed:.3g} allowed"


def _number(call: Call, name: str, position: int, default: float) -> float:
    value = call.kwargs.get(name, call.args[position] if len(call.args) > position else default)
    return float(value) if isinstance(value, int | float) else default


Moments = tuple[float, float, float, float]  # mean, spread, lowest, highest


def _uniform(low: float, high: float) -> Moments:
    return (low + high) / 2, (high - low) / math.sqrt(12), low, high


def _randint(call: Call) -> Moments:
    bounds = [a for a in call.args if type(a) is int]
    low = int(_number(call, "low", 99, bounds[0] if len(bounds) > 1 else 0))
    high = int(_number(call, "high", 99, bounds[-1] if bounds else 1))
    n = high - low
    return (low + high - 1) / 2, math.sqrt((n * n - 1) / 12), low, high - 1


def _bernoulli(call: Call) -> Moments:
    p = _number(call, "p", 1, 0.5)
    return p, math.sqrt(p * (1 - p)), 0.0, 1.0


_MOMENTS: dict[str, Callable[[Call], Moments]] = {
    "rand": lambda call: _uniform(0.0, 1.0),
    "rand_like": lambda call: _uniform(0.0, 1.0),
    "randn": lambda call: (0.0, 1.0, -math.inf, math.inf),
    "randn_like": lambda call: (0.0, 1.0, -math.inf, math.inf),
    "uniform": lambda call: _uniform(  # a and b: torch.nn.init.uniform_
        _number(call, "from", 1, _number(call, "a", 1, 0.0)),
        _number(call, "to", 2, _number(call, "b", 2, 1.0)),
    ),
    "normal": lambda call: (
        _number(call, "mean", 1, 0.0), _number(call, "std", 2, 1.0), -math.inf, math.inf
    ),
    "exponential": lambda call: (
        1 / _number(call, "lambd", 1, 1.0), 1 / _number(call, "lambd", 1, 1.0), 0.0, math.inf
    ),
    "randint": _randint,
    "bernoulli": _bernoulli,
}  # fmt: skip


def judge_random(call: Call, found: dict[str, torch.Tensor]) -> list[Judgement] | None:
    """Mean and spread of drawn numbers; None where no distribution is known for the call."""
    moments = _MOMENTS.get(api_of(call.op).removesuffix("_"))
    given = [arg for arg in call.args[1:] if not isinstance(arg, int | float | tuple | list)]
    if moments is None or given or call.op == "torch.bernoulli":  # p is a tensor
        return None
    mean, spread, lowest, highest = moments(call)
    judgements = []
    for name, tensor in found.items():
        drawn = tensor.detach().cpu().to(torch.float64)
        verdict = _verdict(name, tensor, "mean, in sigmas")
        n = drawn.numel()
        if n >= _FEW and spread > 0:
            verdict.error = abs(float(drawn.mean()) - mean) / (spread / math.sqrt(n))
            off = abs(float(drawn.std()) / spread - 1)
            if verdict.error > SIGMAS or off > SIGMAS * 1.5 / math.sqrt(n):
                verdict.ok = False
                verdict.reason = (
                    f"mean {float(drawn.mean()):.4g} and spread {float(drawn.std()):.4g} of {n} "
                    f"numbers, expected {mean:.4g} and {spread:.4g}"
                )
        if n and (float(drawn.min()) < lowest or float(drawn.max()) > highest):
            verdict.ok = False
            verdict.reason = f"outside of {lowest:g} to {highest:g}"
        judgements.append(verdict)
    return judgements
