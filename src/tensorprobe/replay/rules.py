"""How each kind of operation is judged, as data; docs/check.md has the measurements behind it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.kinds import Kind

if TYPE_CHECKING:
    from tensorprobe.replay.rebuild import Source

Measure = Literal["equal", "selection", "ulp", "unit", "dropout", "random", "none"]


class RoundingRule(NamedTuple):
    """What is measured, and what a healthy kernel may show of it.

    `wide` is the limit for float32 and float64, `narrow` that for 16 bits and fewer, whose kernels
    compute in float32 and round once. Errors grow with the square root of the length of a sum, the
    more so the more of it cancels: `growth` times that is added to the limit. One element may be
    `peak` times as far off as all together.
    """

    measure: Measure
    wide: float = 0.0
    narrow: float = 0.0
    growth: float = 0.0
    peak: float = 8.0
    means: str = ""


RULES: dict[Kind, RoundingRule] = {
    "exact": RoundingRule("equal", means="every bit of it is determined"),
    "conversion": RoundingRule("equal", means="held against the same conversion on the CPU"),
    "selection": RoundingRule(
        "selection", means="values are determined, which of equal ones is not"
    ),
    "elementwise": RoundingRule("ulp", wide=8.0, narrow=1.5, means="units in the last place"),
    "compound": RoundingRule("ulp", wide=8.0, narrow=1.5, means="beside a rounding of each step"),
    "reduction": RoundingRule(
        "unit", wide=16.0, narrow=4.0, growth=1.0, means="rounding along a sum"
    ),
    "product": RoundingRule(
        "unit", wide=16.0, narrow=2.0, growth=1.0, means="rounding along a product"
    ),
    "scatter": RoundingRule("unit", wide=16.0, narrow=4.0, growth=4.0, means="sums in any order"),
    "general": RoundingRule("unit", wide=16.0, narrow=4.0, growth=1.0, means="rounding"),
    "dropout": RoundingRule("dropout", means="share of zeros near p, scale of the rest"),
    "random": RoundingRule("random", means="mean and spread of what was drawn"),
    "uninitialised": RoundingRule("none", means="content is not defined"),
}
# An elementwise gradient is computed from rounded results, and summed where inputs were broadcast.
ELEMENTWISE_BACKWARD = RoundingRule(
    "unit", wide=16.0, narrow=2.0, growth=1.0, means="rounding of what backward saved"
)


def rule_for(kind: Kind, direction: str) -> RoundingRule:
    """The rule for one direction of a call that has a reference.

    Random calls have one where their numbers could be drawn again.
    """
    if kind == "dropout":
        return RULES["general"]
    if kind == "random":
        return RULES["exact"]
    if direction == "backward" and kind in ("elementwise", "compound"):
        return ELEMENTWISE_BACKWARD
    return RULES[kind]


def limit(rule: RoundingRule, roundoff: float, length: float) -> float:
    """The limit for results of this precision, each made from about `length` numbers."""
    base = rule.wide if roundoff <= 2.0**-24 else rule.narrow
    return base + rule.growth * (math.sqrt(max(length, 1.0)) - 1.0)


def length(call: Call, backward: Call | None, kind: Kind, numel: int, source: Source) -> float:
    """About how many numbers go into each of the `numel` results."""
    calls = [call] if backward is None else [call, backward]
    records = [t for each in calls for t in each.tensors if t.role == "input"]
    total = sum(t.numel for t in records) / max(numel, 1)
    if kind == "scatter":
        hits = max((_most_hits(t, source) for t in records), default=1)
        total = max(total, (hits / 8) ** 2)  # one after the other, rounded each time
    return total


def _most_hits(record: TensorRecord, source: Source) -> int:
    if record.dtype not in ("int64", "int32") or record.numel == 0:
        return 1
    return int(source(record).unique(return_counts=True)[1].max())
