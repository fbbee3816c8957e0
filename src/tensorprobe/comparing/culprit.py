"""A call that caused a difference, and the words and numbers that say how large it is."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from tensorprobe.comparing.judge import moved_values, number_text
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.nodes import Node, nonfinite_counts

CulpritKind = Literal[
    "output", "gradient", "argument", "parameter", "input", "structure", "nonfinite"
]
Side = Literal["actual", "expected"]


class Place(msgspec.Struct):
    """Which call of a capture it is."""

    name: str
    step: int
    rank: int


class Culprit(msgspec.Struct, kw_only=True):
    """A call that caused a difference, in the form of verdict.json."""

    name: str
    kind: CulpritKind
    direction: str
    step: int
    rank: int
    module: str
    op: str
    stack: tuple[str, ...]
    reason: str
    own_error: float
    inherited_error: float
    metrics: dict[str, Any] = {}
    affected: int = 0
    side: Side | None = None
    proof: str = "compared"  # replayed | compared | statistics | digests
    tensor: str | None = None
    weak: bool = False
    expected: Place | None = None  # what it is called on the expected side, where that has it

    def __repr__(self) -> str:
        return f"<Culprit {self.name}, step {self.step}, rank {self.rank}: {self.reason}>"


def accuse(
    node: Node,
    kind: CulpritKind,
    reason: str,
    own: float,
    *,
    row: TensorPair | None = None,
    side: Side | None = None,
    proof: str = "compared",
    weak: bool = False,
    inherited: float | None = None,
) -> Culprit:
    """The call of a node as a culprit."""
    call, other = node.call, node.pair.pair.expected
    return Culprit(
        name=call.name,
        kind=kind,
        direction=call.direction,
        step=call.step,
        rank=call.rank,
        module=call.module,
        op=call.op,
        stack=call.stack,
        reason=reason,
        own_error=own,
        inherited_error=node.d_in if inherited is None else inherited,
        metrics=_metrics(row),
        side=side,
        proof=proof,
        tensor=row.name if row is not None else None,
        weak=weak,
        expected=None if other is None else Place(other.name, other.step, other.rank),
    )


def accuse_nonfinite(node: Node, row: TensorPair, proof: str) -> Culprit:
    """The call as one that makes NaN or infinity."""
    counts = [nonfinite_counts(record) for record in (row.actual, row.expected)]
    side: Side = "actual" if sum(counts[0]) >= sum(counts[1]) else "expected"
    nan, inf = counts[0 if side == "actual" else 1]
    what = " and ".join(text for n, text in ((nan, f"{nan} NaN"), (inf, f"{inf} infinite")) if n)
    reason = (
        f"the {side} {row.name} has {what or 'other'} values where the other side's are "
        "finite, and its inputs have none"
    )
    return accuse(
        node, "nonfinite", reason, math.inf, row=row, side=side, proof=proof, inherited=0.0
    )


def kind_by_direction(node: Node) -> CulpritKind:
    """What a wrong result of this call is."""
    return "output" if node.call.direction == "forward" else "gradient"


def proof_of(row: TensorPair) -> str:
    """By what two tensors were seen to differ."""
    if row.metrics is not None:
        return "compared"
    if row.actual is not None and row.actual.digest is not None:
        return "digests"
    return "statistics"


def digest_reason(row: TensorPair) -> str:
    """Why other bits are blamed on a call, where only digests and statistics are known."""
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    if a.summary and e.summary and moved_values(a.summary, e.summary):
        return f"its inputs are equal bit for bit; {row.name} has the same numbers in other places"
    return f"its inputs are equal bit for bit; {row.name} is not"


def percent(relative: float) -> str:
    """A relative error for a person to read."""
    if math.isinf(relative) or relative > 10:
        return "more than its whole size" if math.isinf(relative) else f"{relative:.3g} times"
    share = 100 * relative
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def magnitude(d: float) -> str:
    """A distance for a person to read: "by 12 roundings of its size"."""
    if math.isinf(d):
        return "altogether"
    return f"by {number_text(d)} roundings of its size"


def _metrics(row: TensorPair | None) -> dict[str, Any]:
    if row is None:
        return {}
    if row.metrics is not None:
        return msgspec.structs.asdict(row.metrics)
    a, e = row.actual, row.expected
    if a is None or e is None or a.summary is None or e.summary is None:
        return {}
    return {
        f"{key}_{side}": getattr(summary, key)
        for key in ("max", "min", "mean", "norm")
        for side, summary in (("actual", a.summary), ("expected", e.summary))
    }
