"""What checkpointing computed a second time: backward calls were given that, not the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tensorprobe.comparing.content import content
from tensorprobe.comparing.nodes import Node
from tensorprobe.comparing.scene import Scene
from tensorprobe.records import Call, Fields, TensorRecord


def recomputed_forwards(scene: Scene, node: Node) -> Iterator[tuple[Call, Call]]:
    """Forward calls, of actual and expected, that a backward call may have been given.

    The same call run again; or, since recomputation stops early, the first with inputs that were
    made again.
    """
    forward = scene.forward_of(node)
    if forward is None or not forward.is_paired:
        return
    for twin in scene.recomputed(forward):
        ours, theirs, _ = twin.pair.pair
        if ours is not None and theirs is not None:
            yield ours, theirs
    sides = [_with_new_inputs(scene, forward, side) for side in (0, 1)]
    if sides[0] is not None and sides[1] is not None:
        yield sides[0], sides[1]


def _with_new_inputs(scene: Scene, forward: Node, side: int) -> Call | None:
    call = forward.pair.pair[side]
    if not isinstance(call, Call):
        return None
    new: dict[str, TensorRecord] = {}
    for row in forward.inputs:
        record = row.actual if side == 0 else row.expected
        at = scene.flow.producer.get((side, forward.i, row.name))
        if record is None or at is None:
            continue
        found = _made_again(scene, scene.nodes[at], record, side)
        if found is not None:
            kept = {key: getattr(found, key) for key in ("blob", "digest", "summary")}
            new[record.name] = msgspec.structs.replace(record, **kept)
    if not new:
        return None
    return msgspec.structs.replace(
        call,
        args=_replaced(call.args, new),
        kwargs=_replaced(call.kwargs, new),
        tensors=_replaced(call.tensors, new),
    )


def _made_again(
    scene: Scene, producer: Node, record: TensorRecord, side: int
) -> TensorRecord | None:
    for row in producer.outputs:
        made = row.actual if side == 0 else row.expected
        if made is None or content(made) != content(record):
            continue
        for twin in scene.recomputed(producer):
            for other in twin.outputs:
                again = other.actual if side == 0 else other.expected
                if other.name == row.name and again is not None:
                    return again
    return None


def _replaced(tree: Any, new: dict[str, TensorRecord]) -> Any:
    if isinstance(tree, TensorRecord):
        return new.get(tree.name, tree)
    if isinstance(tree, tuple):
        return tuple(_replaced(part, new) for part in tree)
    if isinstance(tree, list):
        return [_replaced(part, new) for part in tree]
    if isinstance(tree, dict):
        return {key: _replaced(part, new) for key, part in tree.items()}
    if isinstance(tree, Fields):
        return msgspec.structs.replace(tree, fields=_replaced(tree.fields, new))
    return tree
