"""Small systematic errors in statistics: rounding averages out in a norm, a factor does not."""

from __future__ import annotations

import math

from tensorprobe.comparing.culprit import Culprit, accuse, kind_by_direction, proof_of
from tensorprobe.comparing.judge import number_text, roundoff
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.nodes import Node
from tensorprobe.comparing.scene import Scene

# In roundings of a norm. Noise of 1-2 ULP on every kernel of seven models moved the norm of a
# result by 1.7 at most where the norms that went in agreed; four ULP more move it by 5.6.
_SHIFT = 4.0
_PER_SHIFT_IN = 8.0
_ENOUGH = 256  # numbers, for rounding to average out
_COARSE = 2.0**-11


def drifted(scene: Scene) -> tuple[int, Culprit] | None:
    """The first forward call, in 16 bit, whose norm is moved by more than those of its inputs."""
    for node in scene.nodes:
        if node.container or not node.is_paired or node.call.direction != "forward":
            continue
        if node.is_random or node.i in scene.in_optimizer:
            continue
        given = max((_shift(row) for row in node.inputs), default=0.0)
        for row in node.outputs:
            moved = _shift(row)
            if _is_coarse(row) and moved > max(_SHIFT * _unit(row), _PER_SHIFT_IN * given):
                return node.i, _accuse(node, row, moved)
    return None


def _accuse(node: Node, row: TensorPair, moved: float) -> Culprit:
    size = moved / _unit(row)
    reason = (
        f"its inputs agree, and the norm of {row.name} is moved by {number_text(size)} roundings, "
        "more than rounding moves one: a small factor, seen in statistics only"
    )
    kind = kind_by_direction(node)
    return accuse(node, kind, reason, size, row=row, proof=proof_of(row), weak=True)


def _is_coarse(row: TensorPair) -> bool:
    e = row.expected
    return e is not None and e.numel >= _ENOUGH and _unit(row) >= _COARSE


def _unit(row: TensorPair) -> float:
    a, e = row.actual, row.expected
    return max((roundoff(record.dtype) for record in (a, e) if record is not None), default=0.0)


def _shift(row: TensorPair) -> float:
    """How far the two norms are apart, relative to their size."""
    s = row.actual.summary if row.actual is not None else None
    t = row.expected.summary if row.expected is not None else None
    if s is None or t is None or s.norm is None or not t.norm:
        return 0.0
    moved = abs(s.norm - t.norm) / t.norm
    return moved if math.isfinite(moved) else 0.0
