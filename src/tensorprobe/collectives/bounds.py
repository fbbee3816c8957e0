"""The result of a reduction by statistics alone: what they must be, given those of the members."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorprobe.collectives.links import Key, given, got
from tensorprobe.records import Call, TensorRecord
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

_PER_MEMBER = 4.0  # roundings of the sizes that are added up: far more than any order of sums makes


class OutOfBounds(NamedTuple):
    """A statistic of a result that what was given cannot have."""

    what: str  # "mean"
    found: float
    expected: float


def out_of_bounds(
    key: Key, op: str | None, here: Mapping[int, Call], members: Sequence[int], rank: int
) -> OutOfBounds | None:
    """What the result of this member cannot be; None where nothing can be said against it.

    The mean of a sum is the sum of the means, the largest of a maximum the largest of all.
    """
    if key.kind not in ("all_reduce", "reduce") or op not in ("sum", "avg", "max", "min"):
        return None
    parts = [given(here[member], key.kind) for member in members]
    results = got(here[rank], key.kind)
    if not results or any(len(part) != len(results) for part in parts):
        return None
    for i, result in enumerate(results):
        found = _judge(op, [part[i] for part in parts], result)
        if found is not None:
            return found
    return None


def _judge(op: str, parts: Sequence[TensorRecord], result: TensorRecord) -> OutOfBounds | None:
    made = result.summary
    gave = [part.summary for part in parts]
    if made is None or not made.is_finite or any(s is None or not s.is_finite for s in gave):
        return None
    if op in ("max", "min"):
        if made.max is None or made.min is None:
            return None
        pick = max if op == "max" else min
        ends = [s.max if op == "max" else s.min for s in gave if s is not None]
        known = [end for end in ends if end is not None]
        end = made.max if op == "max" else made.min
        if len(known) == len(parts) and float(end) != float(pick(known)):
            return OutOfBounds(op, float(end), float(pick(known)))
        return None
    means = [s.mean for s in gave if s is not None and s.mean is not None]
    norms = [s.norm for s in gave if s is not None and s.norm is not None]
    bits = FRACTION_BITS.get(result.dtype)
    if made.mean is None or bits is None or len(means) < len(parts) or len(norms) < len(parts):
        return None
    share = len(parts) if op == "avg" else 1
    expected = math.fsum(means) / share
    sizes = math.fsum(norms) / math.sqrt(max(result.numel, 1)) / share
    allowed = _PER_MEMBER * len(parts) * 2.0 ** -(bits + 1) * sizes
    if abs(made.mean - expected) > allowed:
        return OutOfBounds("mean", made.mean, expected)
    return None
