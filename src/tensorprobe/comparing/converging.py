"""Whether two sides that compute in other ways come to the same results."""

from __future__ import annotations

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import (
    ENOUGH,
    ROUNDING,
    distance,
    is_moved,
    pair_roundoff,
    roundoff,
    same_bits,
    summary_distance,
)
from tensorprobe.comparing.scene import AMPLIFIES, FAINT, Node, Scene, relative
from tensorprobe.records import TensorRecord, digests_tell

_MAX_CALLS = 2000  # that are looked at before a difference counts as one that stays


def converge(
    scene: Scene, start: Node, *, same_calls: bool = False, is_moved_on: bool = False
) -> bool:
    """Whether every way from a call on leads to calls of both sides that agree, or to results that
    the other side has too: `x + (y + z)` and `(x + y) + z`.

    Other results of the same calls (a list in another order) are a difference, even where a sum
    over them agrees: one side must make calls on the way that the other does not. `same_calls`:
    not so, if all ways lead to calls that agree. `is_moved_on`: it gives the same numbers in other
    places.
    """
    # Statistics are those of the same numbers in other places, too.
    is_moved_on = is_moved_on or any(map(is_moved, start.inputs))
    if _agrees(start, is_moved_on, anywhere=True):
        return True  # `x + y` and `y + x`
    todo, seen = [start.i], {start.i}
    agrees = at_end = False
    inside = scene.inside(start) if start.container else set()
    is_other_way = any(map(scene.flow.is_one_sided, _makers(scene, start) | inside))
    while todo:
        node = scene.nodes[todo.pop()]
        if _writes_others(node):
            return False
        if _agrees(node, is_moved_on):
            agrees = True
            is_other_way |= any(map(scene.flow.is_one_sided, _makers(scene, node)))
            continue
        if scene.is_effect(node):
            return False
        is_other_way |= not node.is_paired
        users = _users(scene, node)
        if not users and not _has_twins(scene, node):
            return False
        at_end |= not users
        for at in users - seen:
            seen.add(at)
            todo.append(at)
        if len(seen) > _MAX_CALLS:
            return False
    return (agrees or at_end) and (is_other_way or (same_calls and not at_end))


def _writes_others(node: Node) -> bool:
    """Whether a call leaves other running statistics, which are an effect whatever it gives."""
    for row in node.outputs:
        if row.role != "buffer" or same_bits(row):
            continue
        if relative(row, distance(row, 0.0)) > ROUNDING * AMPLIFIES * pair_roundoff(row):
            return True
    return False


def _agrees(node: Node, is_moved_on: bool, *, anywhere: bool = False) -> bool:
    """Whether the results of a call agree; where numbers were in other places before, statistics
    tell that of few numbers only."""
    if not node.is_paired or not node.outputs or node.d_out > FAINT:
        return False
    if node.container and not anywhere:
        return False
    if node.call.name.startswith("Optimizer.") and any(map(_is_of_one_side, node.outputs)):
        return False  # a parameter that only one side steps
    return not is_moved_on or all(map(_is_seen, node.outputs))


def _is_of_one_side(row: TensorPair) -> bool:
    return row.actual is None or row.expected is None


def _is_seen(row: TensorPair) -> bool:
    """Whether a permutation of the numbers would have been seen."""
    a, e = row.actual, row.expected
    if a is None or e is None or row.metrics is not None or digests_tell(a, e):
        return True
    return e.numel < ENOUGH


def _makers(scene: Scene, node: Node) -> set[int]:
    """The calls that made what this one was given."""
    found = (at for row in node.inputs for at in scene.flow.producers(node.i, row.name))
    return {at for at in found if at is not None}


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
