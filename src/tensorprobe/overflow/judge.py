"""The rules by which a call is at fault: it made a bad value, and neither read it, nor was told to,
nor put it there on purpose.

One set of rules for calls that are looked at as they end and for those whose numbers came late.
The latter are known by what was found in their tensors; of the former the tensors themselves are
there, and tell more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tensorprobe.follow.gradients import Path
from tensorprobe.overflow.call_kinds import ADDS, DIVIDES, LOGARITHMS, Kind, Plan
from tensorprobe.records import Direction
from tensorprobe.tensors.finiteness import (
    INFINITE,
    LIMITS,
    NAN,
    NEGATIVE,
    POSITIVE,
    Extent,
    readable,
)
from tensorprobe.tensors.summarizer import summarize
from tensorprobe.tensors.summary import TensorSummary

_WORDS = {NAN: "NaN", POSITIVE: "inf", NEGATIVE: "-inf"}
_ROWS = ("softmax", "log_softmax", "logsumexp")  # make NaN of a row that is masked as a whole
_CLOSE = 0.9  # of the limit of a dtype: to be warned of


class SeenTensor(NamedTuple):
    """A float tensor of a call, and what was found in it."""

    label: str  # input.0
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int  # for NaN, +inf and -inf
    top: float  # the largest magnitude
    numbers: torch.Tensor | None = None  # where they are still there
    summary: TensorSummary | None = None  # where they were counted

    @property
    def limit(self) -> float:
        return LIMITS[self.dtype]

    @property
    def is_at_limit(self) -> bool:
        return self.top >= self.limit

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def facts(self) -> dict[str, Any]:
        """What a finding says of it."""
        facts: dict[str, Any] = {"dtype": self.kind, "shape": list(self.shape)}
        if (found := self.summary) is None:
            holds = [word for bit, word in _WORDS.items() if self.bits & bit]
            return facts | {"holds": holds, "largest": self.top}
        counts = {"nan": found.nan_count, "inf": found.inf_count}
        return facts | counts | {"min": found.min, "max": found.max}

    def count(self, bits: int) -> int:
        """How many are NaN, or infinite."""
        if self.summary is None:
            return int(self.bits & bits != 0)
        return self.summary.nan_count if bits == NAN else self.summary.inf_count


class CallValues(NamedTuple):
    """What a call read and returned: all that it is judged by."""

    plan: Plan
    inputs: list[SeenTensor]
    outputs: list[SeenTensor]
    told: int = 0  # kinds of numbers, not finite, that the program itself wrote into the call
    direction: Direction = "forward"

    @property
    def name(self) -> str:
        return self.plan.api.api.rpartition(".")[2]

    @property
    def given(self) -> int:
        return bits_of(self.inputs)

    @property
    def found(self) -> int:
        return bits_of(self.outputs)

    @property
    def is_exact(self) -> bool:
        """Whether all numbers are there."""
        return all(each.numbers is not None for each in (*self.inputs, *self.outputs))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the outputs, and of the inputs if they were read for this call."""
        inputs = [each for each in self.inputs if each.summary is not None]
        return {each.label: each.facts for each in (*inputs, *self.outputs)}


def look_at(tensors: Iterable[tuple[torch.Tensor, Path]], side: str) -> list[SeenTensor]:
    """The float tensors among these, looked at in full; those that cannot be read are left out."""
    seen = []
    for tensor, path in tensors:
        content = readable(tensor)
        if content is None:
            continue
        summary = summarize(content)
        bits = NAN if summary.nan_count else 0
        bits |= POSITIVE if summary.max == math.inf else 0
        bits |= NEGATIVE if summary.min == -math.inf else 0
        top = max((abs(b) for b in (summary.min, summary.max) if b is not None), default=0.0)
        one = seen_as(content, path, side, Extent(bits, top))
        shape = tuple(tensor.shape)  # its own: of complex numbers the content is a view as real
        seen.append(one._replace(dtype=tensor.dtype, shape=shape, summary=summary))
    return seen


def seen_as(content: torch.Tensor, path: Path, side: str, extent: Extent) -> SeenTensor:
    """A readable tensor of which only this was asked."""
    label, storage = f"{side}.{'.'.join(path)}", content.untyped_storage()._cdata
    return SeenTensor(label, storage, content.dtype, tuple(content.shape), *extent, content)


def bits_of(tensors: Iterable[SeenTensor]) -> int:
    """The bits of all tensors together: NaN, infinity, and so on, in any of them."""
    bits = 0
    for each in tensors:
        bits |= each.bits
    return bits


def scalar_bits(args: Iterable[Any], kwargs: dict[str, Any]) -> int:
    """The kinds of non-finite numbers that the program itself wrote into the call."""
    bits = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, float) and not math.isfinite(value):
            bits |= NAN if value != value else POSITIVE if value > 0 else NEGATIVE
    return bits


# The rules


def fault(call: CallValues, origin: Callable[[SeenTensor], str]) -> str | None:
    """Why the outputs are this call's fault, in words; None where they are on purpose.

    `origin` says where NaN comes from that was there before, and is of no case that is known.
    """
    kind = call.plan.kind
    if call.direction == "backward":
        return _gradient_reason(call)
    if kind is Kind.COMMUNICATES:
        return None if call.given else _rank_reason(call)
    if kind is Kind.MAKES or not call.found:
        return None
    if call.given & NAN:  # to be reported by the first call that computes with it
        first = next(each for each in call.inputs if each.bits & NAN)
        count = "" if first.summary is None else f"{first.summary.nan_count} "
        reads = f"it reads {count}NaN in {first.label}{origin(first)}"
        return reads if kind is Kind.COMPUTES else None
    if call.found & NAN & ~call.told:
        return _nan_reason(call)
    if kind in (Kind.MOVES, Kind.PASSES) and (call.given or not call.found & ~call.told):
        return None  # it may move them, and change their signs
    if (call.given | call.told) & INFINITE:
        return _reason_beside_masks(call)
    return None if _is_mask(call, call.outputs) else _infinity_reason(call)


def is_pole(call: CallValues) -> bool:
    """Whether the call is right to give infinity: the logarithm of zero, or a division by it.

    Programs do that on purpose, and take other numbers instead where it happens. If the numbers
    are gone, its name decides.
    """
    if call.direction == "backward" or call.found & NAN or not call.outputs:
        return False
    if call.name not in DIVIDES and call.name not in LOGARITHMS:
        return False
    if not call.is_exact:
        return True
    zeros = [_numbers(each) == 0 for each in call.inputs]
    return bool(zeros) and not call.given and _explain(zeros, call.outputs)


def clamped(call: CallValues) -> str:
    """Why a call is at fault during which the overflow flag of a chip was raised that clamps."""
    if call.direction == "backward":
        return "the chip clamps, and its overflow flag was raised in its backward"
    at_limit = [each for each in call.outputs if each.is_at_limit]
    shown = f"{at_limit[0].label} reaches {at_limit[0].limit:g}" if at_limit else "in between"
    return f"the chip clamps, and its overflow flag was raised: {shown}"


def is_first_at_limit(call: CallValues) -> bool:
    """Whether the call reaches the limit of a dtype, its inputs being below."""
    limit = max((each.limit for each in call.outputs), default=0.0)
    at_limit = any(each.is_at_limit for each in call.outputs)
    return at_limit and all(each.top < limit for each in call.inputs)


def near_limit(call: CallValues) -> list[SeenTensor]:
    """Outputs with values above half the limit of their dtype. None of them if an input has values
    at the limit already: such an input is a mask."""
    near = [each for each in call.outputs if each.limit / 2 <= each.top < each.limit]
    if any(given.top >= each.limit for each in near for given in call.inputs):
        return []
    return near


class Growth:
    """Trouble to come: remembers how large the values of a call were in the step before, and warns
    once of each call whose values grow towards the limit of their dtype."""

    def __init__(self, warn: Callable[[str, int, str], None]) -> None:
        self._warn = warn
        self._tops: dict[str, tuple[int, float]] = {}
        self._warned: set[str] = set()

    def see(self, name: str, step: int, near: Iterable[SeenTensor]) -> None:
        """These tensors of a call are near their limit."""
        for each in near:
            self._see(f"{name}.{each.label}", step, each.top, each.limit)

    def _see(self, name: str, step: int, top: float, limit: float) -> None:
        before = self._tops.get(name)
        if before is not None and before[0] == step:
            top = max(top, before[1])
        self._tops[name] = (step, top)
        if before is None or before[0] == step or name in self._warned:
            return
        if top >= _CLOSE * limit and top > before[1]:
            self._warned.add(name)
            share = f"values up to {top:.5g} are {top / limit:.0%} of what their dtype holds"
            grow = f"and grow: {before[1]:.5g} in step {before[0]}"
            self._warn(name, step, f"{share}, {grow}")


# Masks


def _reason_beside_masks(call: CallValues) -> str | None:
    """A call that is given masks: is something infinite where no mask is?"""
    masked = call.given | call.told
    for output in call.outputs:
        if not output.bits:
            continue
        new = None
        if call.is_exact and not call.told & ~call.given:  # a number of the program has no place
            new = _unexplained([torch.isinf(_numbers(each)) for each in call.inputs], output)
        if new is None:
            if output.bits & ~masked and (call.is_exact or not _is_mask(call, [output])):
                return f"{_held(call.inputs)}, {_made([output], INFINITE)}"
        elif bool(new.any()) and not _is_mask(call, [output], new):
            count = int(new.sum())
            return f"{count} of {output.label} are infinite where no input is: it overflows"
    return None


def _is_mask(
    call: CallValues, outputs: list[SeenTensor], where: torch.Tensor | None = None
) -> bool:
    """Whether what is infinite was meant to be: the lowest number of a dtype, used as a mask and
    added to; or a mask of zeros and ones, multiplied or put through a logarithm."""
    inputs = call.inputs
    if call.name in ADDS:
        limit = max(each.limit for each in outputs)
        extremes = [each for each in inputs if each.top >= limit and not each.bits]
        if not call.is_exact:
            return bool(extremes) and bits_of(outputs) == NEGATIVE
        places = [_numbers(each).abs() >= limit for each in extremes]
        return bool(extremes) and _explain(places, outputs, where)
    if call.name in ("log", "mul", "mul_") and call.is_exact:
        return bool(inputs) and all(_is_zero_or_one(_numbers(each)) for each in inputs)
    return False


def _explain(
    places: list[torch.Tensor], outputs: list[SeenTensor], where: torch.Tensor | None = None
) -> bool:
    """Whether what is infinite in the outputs, or these places of it, are all among `places`."""
    left = [_unexplained(places, output, where) for output in outputs]
    return not any(each is None or bool(each.any()) for each in left)


def _unexplained(
    places: list[torch.Tensor], output: SeenTensor, where: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The infinite places of an output that are not among `places`. None if the shapes do not
    broadcast to that of the output: then the call does not work element by element."""
    new = torch.isinf(_numbers(output)) if where is None else where
    try:
        if torch.broadcast_shapes(*(each.shape for each in places), new.shape) != new.shape:
            return None
    except RuntimeError:
        return None
    for place in places:
        new = new & ~place
    return new


def _numbers(seen: SeenTensor) -> torch.Tensor:
    assert seen.numbers is not None
    return seen.numbers


def _is_zero_or_one(tensor: torch.Tensor) -> bool:
    ones = tensor == 1
    return bool(((tensor == 0) | ones).all()) and bool(ones.any())


# Words


def _nan_reason(call: CallValues) -> str:
    made = _made(call.outputs, NAN)
    source = next((each for each in call.inputs if each.bits), None)
    if source is None:
        return f"its inputs are finite{_range(call.inputs)}, {made}"
    if call.name in _ROWS:
        return f"a whole row of {source.label} is {_sign(source)}, {made}"
    return f"{source.label} holds {_sign(source)}, which it turns into NaN: {made}"


def _infinity_reason(call: CallValues) -> str:
    made = _made(call.outputs, INFINITE)
    if any(each.summary is not None and each.summary.zero_count for each in call.inputs):
        if call.name in DIVIDES:
            return f"it divides by zero, {made}"
        if call.name in LOGARITHMS:
            return f"it takes the logarithm of zero, {made}"
    return f"its inputs are finite{_range(call.inputs)}, {made}"


def _rank_reason(call: CallValues) -> str:
    bad = next(each for each in call.outputs if each.bits)
    why = "it came from another rank, or the sum overflows"
    return f"what this rank gave is finite, and {bad.label} is not: {why}"


def _gradient_reason(call: CallValues) -> str:
    worst = max(call.outputs, key=lambda each: each.count(NAN) + each.count(INFINITE))
    if worst.summary is None:
        return f"the gradients before it are finite, {_made(call.outputs, NAN | INFINITE)}"
    is_nan = worst.count(NAN) > 0
    count, word = worst.count(NAN if is_nan else INFINITE), "NaN" if is_nan else "infinite"
    numbers = "1 number" if count == 1 else f"{count} numbers"
    label = worst.label.replace("output.", "input.")
    verb = "is" if count == 1 else "are"
    made = f"{numbers} in the gradient of {label} ({worst.kind}) {verb} {word}"
    if not call.inputs:
        return made
    if call.given:
        return (
            f"it is given a gradient that is not finite though none was sent: the sum of the "
            f"gradients that meet there overflows, or the program began with it; {made}"
        )
    top = max(each.top for each in call.inputs)
    return f"the gradients it is given are finite (up to {top:.4g}), {made}"


def _made(outputs: list[SeenTensor], bits: int) -> str:
    """How many of an output are NaN, or infinite; which it holds, where they were not counted."""
    worst = max(outputs, key=lambda each: each.count(bits))
    if worst.summary is None:
        words = " and ".join(word for bit, word in _WORDS.items() if worst.bits & bit)
        return f"{worst.label} ({worst.kind}) holds {words}"
    total, word = math.prod(worst.shape), "NaN" if bits == NAN else "infinite"
    return f"{worst.count(bits)} of {total} in {worst.label} ({worst.kind}) are {word}"


def _range(inputs: list[SeenTensor]) -> str:
    if not inputs:
        return ""
    counted = [each.summary for each in inputs if each.summary is not None]
    if len(counted) < len(inputs):
        return f" (up to {max(each.top for each in inputs):.4g})"
    bounds = [b for each in counted for b in (each.min, each.max) if b is not None]
    return f" ({min(bounds):.4g} to {max(bounds):.4g})" if bounds else ""


def _held(inputs: list[SeenTensor]) -> str:
    source = next((each for each in inputs if each.bits), None)
    if source is None:
        return "it is told an infinite number"
    return f"{source.label} holds {_sign(source)}"


def _sign(seen: SeenTensor) -> str:
    return "inf" if seen.bits & POSITIVE else "-inf"
