"""Accuses a call, in words and numbers, and tells when its difference heals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from typing import Any

import msgspec

from tensorprobe.comparing.align import content
from tensorprobe.comparing.converging import converge
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import (
    RANGES,
    ROUNDING,
    is_moved,
    number_text,
    pair_roundoff,
    rms_size,
    same_bits,
)
from tensorprobe.comparing.scene import (
    AMPLIFIES,
    Node,
    Scene,
    nonfinite_counts,
    relative,
    unit_growth,
)
from tensorprobe.comparing.verdict import Cause, Culprit, CulpritKind, Place, Side
from tensorprobe.records import digests_tell

Found = tuple[int, Culprit] | None  # with the node that it is at
_MOST_GROWN = 1e-3  # of its size: what rounding of many calls is taken to make of a gradient
_CAUSES: dict[CulpritKind, Cause] = {
    "argument": "argument",
    "parameter": "weights",
    "input": "data",
    "structure": "structure",
    "boundary": "boundary",
}


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
    cause: Cause | None = None,
) -> Culprit:
    """The call of a node as a culprit."""
    call, other = node.call, node.pair.pair.expected
    return Culprit(
        name=call.name,
        cause=cause or _cause(node, kind, row, proof),
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


def _cause(node: Node, kind: CulpritKind, row: TensorPair | None, proof: str) -> Cause:
    if kind in _CAUSES:
        return _CAUSES[kind]
    is_seen = row is not None and proof != "replayed"
    return "dtype" if is_seen and row is not None and _is_out_of_range(row) else "result"


def _is_out_of_range(row: TensorPair) -> bool:
    """Whether the two sides give another dtype, and one of them has no room for such numbers."""
    a, e = row.actual, row.expected
    if a is None or e is None or a.dtype == e.dtype or a.summary is None or e.summary is None:
        return False
    for record, other in ((a, e), (e, a)):
        smallest, largest = RANGES.get(record.dtype, (0.0, math.inf))
        t = other.summary
        if t is not None and t.min is not None and t.max is not None:
            peak = max(abs(float(t.min)), abs(float(t.max)))
            if peak > largest or 0 < rms_size(other) < smallest:
                return True
    return False


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
    if is_moved(row):
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


def heals(scene: Scene, found: tuple[int, Culprit], seen_at: Node | None = None) -> bool:
    """Whether what is made of a difference agrees again, on every way to an effect. `seen_at` is
    the call at which it was seen, where that is not the culprit.

    A result that is wrong does not heal: who can tell what else it changes.
    """
    at, culprit = found
    node = scene.nodes[at]
    seen_at = seen_at or node
    if any(row.role == "buffer" and not same_bits(row) for row in node.outputs):
        return False  # running statistics are an effect
    if culprit.kind in ("nonfinite", "argument"):
        starts = [node]
        if node.call.direction == "backward":  # moved in forward, and its gradients moved back
            forward = scene.forward_of(node)
            if forward is None or culprit.kind != "argument":
                return False
            # Sums of the same numbers may differ in their last digit, or not, by chance: where that
            # is all there is to see, what forward comes to tells whether they are moved back.
            starts = [forward] if is_only_moved(node) else [node, forward]
        if not all(converge(scene, start, same_calls=True) for start in starts):
            return False
        return gradients_agree(scene, node)
    if culprit.kind not in ("boundary", "structure", "input"):
        return False
    if seen_at.call.direction == "backward" and _optimizers(scene, seen_at):
        # a GradScaler: what the optimizer is given is unscaled again
        return gradients_agree(scene, seen_at)
    return converge(scene, seen_at) and gradients_agree(scene, seen_at)


def is_only_moved(node: Node) -> bool:
    """Whether nothing but the last digits of statistics tells the results of a call apart."""
    return all(
        same_bits(row) is not False
        or (is_moved(row) and row.metrics is None and not is_told_by_digests(row))
        for row in node.outputs
    )


def is_told_by_digests(row: TensorPair) -> bool:
    """Whether digests say if two tensors are equal."""
    a, e = row.actual, row.expected
    return a is not None and e is not None and digests_tell(a, e)


def gradients_agree(scene: Scene, node: Node, *, in_pieces: bool = False) -> bool:
    """Whether what the optimizers of its step were given agrees, by the coarsest dtype in it and by
    how far the model is apart in forward.

    Made of other pieces (`in_pieces`), they have the rounding of all calls behind them.
    """
    unit = scene.coarsest_unit(node.call.step)
    grown = 0.0
    if in_pieces:
        n_calls = sum(other.call.step == node.call.step for other in scene.nodes)
        grown = min(unit * unit_growth(n_calls), _MOST_GROWN)
    inherited = AMPLIFIES * scene.forward_difference(node.call.step)
    return all(
        relative(row, scene.gradient_distance(other, row))
        <= max(ROUNDING * max(unit, pair_roundoff(row)), grown) + inherited
        for other in _optimizers(scene, node)
        for row in other.inputs
        if row.role == "parameter_grad"
    )


def is_cut_otherwise(scene: Scene) -> bool:
    """Whether the model works on other pieces (micro-batches) than on the other side, or on the
    same in another order."""
    forward = [node for node in scene.nodes if node.is_paired and node.call.direction == "forward"]
    modules = [node for node in forward if node.call.name.startswith("Module.")]
    given = modules or [node for node in forward if node.call.module]
    return _is_reordered(scene) or any(map(_is_given_other_shapes, given))


def _is_given_other_shapes(node: Node) -> bool:
    return any(
        row.actual is not None
        and row.expected is not None
        and row.actual.shape != row.expected.shape
        for row in node.inputs
        if row.role == "input"
    )


def unlike_gradients(scene: Scene) -> Found:
    """The first optimizer that is given other gradients than on the other side."""
    for node in scene.nodes:
        if not node.call.name.startswith("Optimizer."):
            continue
        if gradients_agree(scene, node, in_pieces=True):
            continue
        rows = [row for row in node.inputs if row.role == "parameter_grad"]
        row = max(rows, key=lambda row: scene.gradient_distance(node, row))
        d = scene.gradient_distance(node, row)
        reason = (
            f"the model works on other pieces (micro-batches), or in another order, and the "
            f"gradients that this optimizer is given differ, {row.name} {magnitude(d)}"
        )
        proof = proof_of(row)
        return node.i, accuse(node, "boundary", reason, d, row=row, proof=proof, inherited=0.0)
    return None


def has_steps(scene: Scene) -> bool:
    """Whether optimizers step, each of them on both sides."""
    steps = [node for node in scene.nodes if node.call.name.startswith("Optimizer.")]
    return bool(steps) and all(node.is_paired for node in steps)


def _is_reordered(scene: Scene) -> bool:
    """Whether some step gives the model the same data in another order."""
    given: dict[int, tuple[list[Hashable], list[Hashable]]] = {}
    for node in scene.nodes:
        call = node.call
        if not call.name.startswith("Module.") or call.direction != "forward" or call.parent:
            continue
        sides = given.setdefault(call.step, ([], []))
        for row in node.inputs:
            for side, record in enumerate((row.actual, row.expected)):
                if record is not None and row.role == "input":
                    sides[side].append(content(record))
    return any(
        ours != theirs and None not in ours and Counter(ours) == Counter(theirs)
        for ours, theirs in given.values()
    )


def _optimizers(scene: Scene, node: Node) -> list[Node]:
    return [
        other
        for other in scene.nodes[node.i :]
        if other.call.step == node.call.step and other.call.name.startswith("Optimizer.")
    ]
