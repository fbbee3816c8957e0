"""Judges what a rank got from others: by communications, and by reductions of its gradients."""

from __future__ import annotations

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.culprit import Found, accuse, magnitude, percent, proof_of
from tensorprobe.comparing.heard import Heard
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import (
    ROUNDING,
    number_text,
    pair_roundoff,
    same_bits,
)
from tensorprobe.comparing.scene import (
    AMPLIFIES,
    FAINT,
    Node,
    Scene,
    exceeds,
    label_of,
    nonfinite_differs,
    relative,
)
from tensorprobe.comparing.verdict import Culprit, Side

_SIDES: tuple[Side, Side] = ("actual", "expected")
_MOVES = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "message")


def communicated(scene: Scene, node: Node) -> Found:
    """A communication whose result is not what its members gave."""
    heard = node.heard
    row = scene.furthest(node)
    if heard is None or row is None or not node.is_paired:
        return None
    if found := _by_tensors(node, heard, row):
        return node.i, found
    if all(heard.judged) or heard.otherwise or node.taint:
        return None
    if any(map(nonfinite_differs, node.inputs)) or any(r.nonfinite_differs for r in heard.rows):
        return None
    if heard.is_partial:
        if node.d_out > ROUNDING and exceeds(node):
            return node.i, _entered(scene, node, heard, row)
        return None
    if _is_moved_wrongly(node, heard) or exceeds(node, max(1.0, len(heard.members) ** 0.5)):
        reason = (
            f"its {len(heard.members)} members gave what they gave on the other side, and what "
            f"this rank got, {row.name}, differs {magnitude(node.d_out)}"
        )
        proof = proof_of(row)
        return node.i, accuse(node, "output", reason, node.d_out, row=row, proof=proof)
    return None


def _by_tensors(node: Node, heard: Heard, row: TensorPair) -> Culprit | None:
    """By the result in float64 of what all members gave, on each side."""
    ours, theirs = heard.judged
    wrong = [judged is not None and judged.is_wrong for judged in heard.judged]
    if not any(wrong) or node.d_out <= FAINT:
        return None
    if all(wrong):
        return None  # nothing is known of how it is reduced: compared
    side = _SIDES[wrong.index(True)]
    judged = ours if side == "actual" else theirs
    assert judged is not None
    other = _SIDES[1 - _SIDES.index(side)]
    good = heard.judged[1 - _SIDES.index(side)]
    reason = (
        f"the {side} {judged.tensor.name.removeprefix(node.call.name + '.')} is off by "
        f"{percent(judged.relative)} of its size from what its {len(heard.members)} members "
        "gave, worked out in float64"
    )
    if judged.allowed:
        reason += (
            f": {number_text(judged.error)} roundings, where {judged.allowed:.0f} are explained"
        )
    if good is not None:
        reason += f"; the {other} side's is right"
    return accuse(
        node, "output", reason, judged.error, row=row, side=side, proof="replayed", inherited=0.0
    )


def _is_moved_wrongly(node: Node, heard: Heard) -> bool:
    """Whether equal content came out as another, of what only moves it."""
    if heard.key.kind not in _MOVES or not node.same_in:
        return False
    known = [*map(same_bits, node.inputs), *(row.same_bits for row in heard.rows)]
    return bool(known) and all(known) and not node.same_out


def _entered(scene: Scene, node: Node, heard: Heard, row: TensorPair) -> Culprit:
    missing = f" ({listed(heard.missing)})" if heard.missing else ""
    reason = (
        f"entered rank {node.call.rank} through {heard.words}: what this rank gave agrees, and "
        f"what it got differs {magnitude(node.d_out)}. Other members{missing} were not compared; "
        "compare all ranks to find the origin"
    )
    return accuse(node, "boundary", reason, node.d_out, row=row, proof=proof_of(row), inherited=0.0)


def is_reduced(scene: Scene, node: Node, row: TensorPair) -> bool:
    """Whether a parameter's gradient has been reduced over ranks by a call that is not recorded,
    as DDP does in C++, and what backward sent to the parameter is known."""
    if row.role != "parameter_grad" or node.call.name.startswith("Optimizer."):
        return False
    place = node.call.step, label_of(node.call, row)
    if place not in scene.hears.own_gradients:
        return False
    return place in scene.hears.gradients or node.call.step in scene.hears.ddp_steps


def reduced_otherwise(scene: Scene, node: Node) -> Found:
    """A parameter's gradient that differs by more than what backward sent to it on all ranks
    explains: its reduction over the ranks was another."""
    for row in node.inputs:
        if row.actual is None or row.expected is None or same_bits(row):
            continue
        if not is_reduced(scene, node, row):
            continue
        place = node.call.step, label_of(node.call, row)
        apart, size = scene.hears.own_gradients[place]
        others = scene.hears.gradients.get(place)
        if others is not None:
            apart, size = max(apart, others.apart), max(size, others.size)
        d = scene.distance(node, row, size if size < 1e30 else 0.0)
        if relative(row, d) > ROUNDING * (pair_roundoff(row) + AMPLIFIES * apart):
            return node.i, _accuse_reduction(scene, node, row, d, others is not None)
    return None


def _accuse_reduction(
    scene: Scene, node: Node, row: TensorPair, d: float, knows_others: bool
) -> Culprit:
    label = label_of(node.call, row)
    rank = node.call.rank
    if knows_others and scene.hears.is_whole:
        hook = _hook_of_one_side(scene, node)
        reason = (
            f"what backward sent to {label} agrees on every rank, and its gradient after DDP's "
            f"gradient reduction (a bucket, a hook in C++) differs {magnitude(d)}"
        )
        if hook:
            reason += f"; inside backward only one side calls {hook}: another communication hook"
    else:
        reason = (
            f"entered rank {rank} through its gradient reduction: what backward sent to {label} "
            f"agrees, and its gradient differs {magnitude(d)}; compare all ranks to find the origin"
        )
    return accuse(node, "boundary", reason, d, row=row, proof=proof_of(row), inherited=0.0)


def _hook_of_one_side(scene: Scene, node: Node) -> str:
    """What only one side calls inside the backward of this step, before a gradient was seen."""
    names = [
        other.call.name
        for other in scene.nodes[: node.i]
        if not other.is_paired
        and other.call.step == node.call.step
        and "inside backward" in other.call.notes
    ]
    return ", ".join(names[:3])
