"""Finds calls with an error of their own, by replaying those whose outputs drift from their
inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tensorprobe.comparing.culprit import (
    Culprit,
    Side,
    accuse,
    accuse_nonfinite,
    kind_by_direction,
    percent,
)
from tensorprobe.comparing.evidence import OwnError
from tensorprobe.comparing.judge import ROUNDING, number_text, pair_roundoff
from tensorprobe.comparing.nodes import FAINT, Node, nonfinite_differs
from tensorprobe.comparing.replays import Replays, score, worst
from tensorprobe.comparing.scene import Scene


def hunt(scene: Scene, replays: Replays, *, faint: bool) -> None:
    """Accuse every call of the earliest step that has an error of its own."""
    for node in _faint_suspects(scene) if faint else _strong_suspects(scene):
        if scene.culprits and node.call.step > scene.culprits[0][1].step:
            break  # later steps inherit
        if not replays.in_time:
            replays.n_left += 1
            continue
        found = _own(node, replays, faint)
        if found is None:
            continue
        forward = scene.forward_of(node)
        if forward is not None:
            if replays.is_cleared_by_recomputation(node, FAINT if faint else ROUNDING):
                continue
            if any(at == forward.i for at, _ in scene.culprits):
                continue  # its forward call did it: what backward reuses of that is wrong too
            if earlier := _forward_did_it(forward, found, replays):
                scene.culprits.append((forward.i, earlier))
                continue
        scene.culprits.append((node.i, found))
    scene.culprits.sort(key=lambda item: item[0])


def _strong_suspects(scene: Scene) -> Iterator[Node]:
    for node in scene.nodes:
        if node.container or not node.is_paired or node.same_out:
            continue
        if node.d_out > ROUNDING / 2 and (node.r_out > 1.2 * node.r_in or node.r_in == math.inf):
            yield node


def _faint_suspects(scene: Scene) -> Iterator[Node]:
    for node in scene.nodes:
        if node.container or not node.is_paired or node.same_out or node.d_out < 2:
            continue
        if max((pair_roundoff(row) for row in node.outputs), default=0.0) >= 2.0**-11:
            yield node


def _forward_did_it(node: Node, backward: Culprit, replays: Replays) -> Culprit | None:
    """The forward call, where its result is off too: what it saved for backward is wrong.

    A loss averages an error of thousands away until it is below what a long sum may have.
    """
    if backward.side is None or not node.is_paired:
        return None
    sides = tuple(replays.evidence(node, side, noise=True) for side in (0, 1))
    if any(evidence.problem for evidence in sides):
        return None
    mine, other = sides if backward.side == "actual" else sides[::-1]
    own, their = mine.worst, other.worst
    if own is None or their is None:
        return None
    size = max(own.size, abs(own.gain) if abs(own.gain) > 8 * own.gain_sigma else 0.0)
    if size <= max(FAINT, 3 * their.size):
        return None
    return _accuse(node, backward.side, own, own.size, backward.weak)


def _own(node: Node, replays: Replays, faint: bool) -> Culprit | None:
    """The call as a culprit, where a replay shows an error of its own."""
    threshold = FAINT if faint else ROUNDING
    sides = replays.of(node, threshold)
    if sides is None:
        return None
    a, e = (worst(node, evidence) for evidence in sides)
    score_a, score_e = score(node, a), score(node, e)
    ratio = 3.0 if faint else 2.0
    if a is not None and score_a > threshold and score_a > ratio * score_e:
        return _accuse(node, "actual", a, score_a, faint)
    if e is not None and score_e > threshold and score_e > ratio * score_a:
        return _accuse(node, "expected", e, score_e, faint)
    return None


def _accuse(node: Node, side: Side, own: OwnError, size: float, faint: bool) -> Culprit:
    row = next((row for row in node.outputs if row.name == own.name), None)
    other = "expected" if side == "actual" else "actual"
    what = "result" if node.call.direction == "forward" else "gradient"
    if math.isinf(own.rms) and row is not None and nonfinite_differs(row):
        return accuse_nonfinite(node, row, "replayed")
    if math.isinf(own.rms):
        text = "does not have the values that its inputs give"
    else:
        share = percent(own.relative)
        text = f"is off by {share} of its size, {number_text(size)} times what rounding explains"
    reason = (
        f"replayed in float64 on its own inputs, the {side} {what} {own.name} {text}; "
        f"the {other} side's is within rounding"
    )
    return accuse(
        node,
        kind_by_direction(node),
        reason,
        size,
        row=row,
        side=side,
        proof="replayed",
        weak=faint,
    )
