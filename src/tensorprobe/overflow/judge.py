"""Whether a call made a bad value, read one, or was told to: the call's own tensors decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorprobe.overflow.call_kinds import ADDS, DIVIDES, LOGARITHMS, Kind, Plan
from tensorprobe.tensors.finiteness import (
    INFINITE,
    LIMITS,
    NAN,
    NEGATIVE,
    POSITIVE,
    readable,
)
from tensorprobe.tensors.summarizer import summarize

Named = tuple[str, torch.Tensor]  # "input.0" and the tensor


class Seen(NamedTuple):
    """A float tensor of a call, looked at in full."""

    label: str
    tensor: torch.Tensor  # its numbers
    bits: int
    facts: dict[str, Any]  # dtype, shape, how many NaN and inf, min and max

    @property
    def top(self) -> float:
        bounds = [abs(b) for b in (self.facts["min"], self.facts["max"]) if b is not None]
        return max(bounds, default=0.0)

    @property
    def limit(self) -> float:
        return LIMITS[self.tensor.dtype]


def look_at(tensors: Iterable[Named]) -> list[Seen]:
    """What the float tensors among these hold; those that cannot be read are left out."""
    seen = []
    for label, tensor in tensors:
        content = readable(tensor)
        if content is None:
            continue
        summary = summarize(content)
        bits = NAN if summary.nan_count else 0
        if summary.max == math.inf:
            bits |= POSITIVE
        if summary.min == -math.inf:
            bits |= NEGATIVE
        facts = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "nan": summary.nan_count,
            "inf": summary.inf_count,
            "min": summary.min,
            "max": summary.max,
        }
        seen.append(Seen(label, content, bits, facts))
    return seen


def scalar_bits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The kinds of non-finite numbers that the program itself wrote into the call."""
    bits = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, float) and not math.isfinite(value):
            bits |= NAN if value != value else POSITIVE if value > 0 else NEGATIVE
    return bits


def bits_of(tensors: Iterable[Seen]) -> int:
    """What is found in any of them."""
    bits = 0
    for each in tensors:
        bits |= each.bits
    return bits


def fault(plan: Plan, inputs: list[Seen], outputs: list[Seen], told: int) -> str | None:
    """Why the outputs are this call's fault, in words; None where they are on purpose.

    `told` are the kinds of numbers it was told to put in. Inputs that hold NaN are judged before:
    here none does, and infinite ones are masks or initial values.
    """
    found, given = bits_of(outputs), bits_of(inputs)
    if plan.kind is Kind.MAKES or not found:
        return None
    if found & NAN & ~told:
        return _nan_reason(plan, inputs, outputs, given)
    if plan.kind is Kind.MOVES:
        return None if not found & ~(given | told) else _inf_reason(plan, inputs, outputs)
    if given & INFINITE or told & INFINITE:
        return _fresh_beside_masks(plan, inputs, outputs, given | told)
    if _is_mask(plan, inputs, outputs):
        return None
    return _inf_reason(plan, inputs, outputs)


def is_pole(plan: Plan, inputs: list[Seen], outputs: list[Seen]) -> bool:
    """Whether the call is right to give infinity: the logarithm of zero, or a division by it.

    Programs do that on purpose, and take other numbers instead where it happens.
    """
    name = plan.api.api.rpartition(".")[2]
    if bits_of(outputs) & NAN or bits_of(inputs) or name not in (*DIVIDES, *LOGARITHMS):
        return False
    zeros = [each.tensor == 0 for each in inputs]
    for output in outputs:
        if not zeros or not _fit(zeros, output.tensor):
            return False
        new = torch.isinf(output.tensor)
        for zero in zeros:
            new = new & ~zero
        if bool(new.any()):
            return False
    return True


def _nan_reason(plan: Plan, inputs: list[Seen], outputs: list[Seen], given: int) -> str:
    made = _made(outputs, "nan", "NaN")
    if not given:
        return f"its inputs are finite{_range(inputs)}, {made}"
    source = next(each for each in inputs if each.bits)
    what = "inf" if source.bits & POSITIVE else "-inf"
    if plan.api.api.rpartition(".")[2] in ("softmax", "log_softmax", "logsumexp"):
        return f"a whole row of {source.label} is {what}, {made}"
    return f"{source.label} holds {what}, which it turns into NaN: {made}"


def _inf_reason(plan: Plan, inputs: list[Seen], outputs: list[Seen]) -> str:
    made = _made(outputs, "inf", "infinite")
    name = plan.api.api.rpartition(".")[2]
    if name in DIVIDES and any(_has_zero(each) for each in inputs):
        return f"it divides by zero, {made}"
    if name in LOGARITHMS and any(_has_zero(each) for each in inputs):
        return f"it takes the logarithm of zero, {made}"
    return f"its inputs are finite{_range(inputs)}, {made}"


def _fresh_beside_masks(
    plan: Plan, inputs: list[Seen], outputs: list[Seen], given: int
) -> str | None:
    """A call that is given masks: is something infinite where no mask is?"""
    for output in outputs:
        if not output.bits:
            continue
        masks = [_infinite(each) for each in inputs]
        fits = _fit(masks, output.tensor)
        if fits and not (given & ~bits_of(inputs)):  # a number written by the program has no place
            new = torch.isinf(output.tensor)
            for mask in masks:
                new = new & ~mask
            if bool(new.any()) and not _is_mask(plan, inputs, [output], new):
                count = int(new.sum())
                return f"{count} of {output.label} are infinite where no input is: it overflows"
        elif output.bits & ~given:
            return f"{_held(inputs)}, {_made([output], 'inf', 'infinite')}"
    return None


def _is_mask(
    plan: Plan, inputs: list[Seen], outputs: list[Seen], where: torch.Tensor | None = None
) -> bool:
    """Whether what is infinite was meant to be: the lowest number of a dtype, used as a mask and
    added to; or a mask of zeros and ones, multiplied or put through a logarithm."""
    name = plan.api.api.rpartition(".")[2]
    if name in ADDS:
        extremes = [each for each in inputs if each.top >= each.limit and not each.bits]
        for output in outputs:
            if not extremes or not _fit([each.tensor for each in extremes], output.tensor):
                return False
            new = torch.isinf(output.tensor) if where is None else where
            for each in extremes:
                new = new & ~(each.tensor.abs() >= each.limit)
            if bool(new.any()):
                return False
        return bool(extremes)
    if name in ("log", "mul", "mul_"):
        return bool(inputs) and all(_is_zero_or_one(each.tensor) for each in inputs)
    return False


def _infinite(seen: Seen) -> torch.Tensor:
    return torch.isinf(seen.tensor)


def _is_zero_or_one(tensor: torch.Tensor) -> bool:
    ones = tensor == 1
    return bool(((tensor == 0) | ones).all()) and bool(ones.any())


def _has_zero(seen: Seen) -> bool:
    return bool((seen.tensor == 0).any())


def _fit(tensors: list[torch.Tensor], output: torch.Tensor) -> bool:
    """Whether these, broadcast, have the shape of the output: the call works number by number."""
    shapes = [tensor.shape for tensor in tensors]
    try:
        return bool(torch.broadcast_shapes(*shapes, output.shape) == output.shape)
    except RuntimeError:
        return False


def _made(outputs: list[Seen], fact: str, word: str) -> str:
    worst = max(outputs, key=lambda each: each.facts[fact])
    count, total = worst.facts[fact], math.prod(worst.facts["shape"])
    return f"{count} of {total} in {worst.label} ({worst.facts['dtype']}) are {word}"


def _range(inputs: list[Seen]) -> str:
    bounds = [b for each in inputs for b in (each.facts["min"], each.facts["max"]) if b is not None]
    return f" ({min(bounds):.4g} to {max(bounds):.4g})" if bounds else ""


def _held(inputs: list[Seen]) -> str:
    source = next((each for each in inputs if each.bits), None)
    if source is None:
        return "it is told an infinite number"
    return f"{source.label} holds {'inf' if source.bits & POSITIVE else '-inf'}"
