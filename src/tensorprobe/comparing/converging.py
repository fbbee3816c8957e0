"""Whether two sides that compute in other ways come to the same results."""

from __future__ import annotations

from tensorprobe.comparing.rounding import ROUNDING, roundoff, summary_distance
from tensorprobe.comparing.scene import FAINT, Node, Scene
from tensorprobe.records import TensorRecord

_MAX_CALLS = 2000  # that are looked at before a difference counts as one that stays


def converge(scene: Scene, start: Node) -> bool:
    """Whether every way from a call on leads to calls of both sides that agree, or to results that
    the other side has too: `x + (y + z)` and `(x + y) + z`."""
    todo, seen, agrees = [start.i], {start.i}, False
    while todo:
        node = scene.nodes[todo.pop()]
        if node.is_paired and not node.container and node.outputs and node.d_out <= FAINT:
            agrees = True
            continue
        users = _users(scene, node)
        if not users and not _has_twins(scene, node):
            return False
        agrees = agrees or not users
        for at in users - seen:
            seen.add(at)
            todo.append(at)
        if len(seen) > _MAX_CALLS:
            return False
    return agrees


def _users(scene: Scene, node: Node) -> set[int]:
    """The later calls, no modules, that were given a result of this one."""
    return {
        at
        for row in node.outputs
        for at in scene.flow.readers(row)
        if at > node.i and not scene.nodes[at].container
    }


def _has_twins(scene: Scene, node: Node) -> bool:
    """Whether each result that nobody reads is a result of the other side too."""
    if not node.is_paired and node.op_kind == "exact":
        return True  # moved, and nothing was made of it
    return all(
        _twin(scene, node, record, side)
        for row in node.outputs
        for side, record in enumerate((row.actual, row.expected))
        if record is not None
    )


def _twin(scene: Scene, node: Node, record: TensorRecord, side: int) -> bool:
    for other in scene.nodes:
        if other.container or other.call.step != node.call.step:
            continue
        for row in other.outputs:
            found = row.expected if side == 0 else row.actual
            if found is not None and _are_alike(record, found):
                return True
    return False


def _are_alike(a: TensorRecord, e: TensorRecord) -> bool:
    if a.shape != e.shape or a.summary is None or e.summary is None:
        return False
    unit = max(roundoff(a.dtype), roundoff(e.dtype))
    return summary_distance(a, e) <= ROUNDING * unit
