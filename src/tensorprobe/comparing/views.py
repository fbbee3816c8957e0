"""Tensors that were changed in place through a view: no call gives their new content as a whole."""

from __future__ import annotations

from tensorprobe.comparing.judge import ROUNDING, distance
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.nodes import Node
from tensorprobe.comparing.scene import Scene
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import TensorRecord

# Of the numbers: a view that leaves fewer of them alone is taken for another tensor.
_LEFT_ALONE = 0.05
_LOOK_BACK = 200


def written_through_view(scene: Scene, node: Node, row: TensorPair) -> Node | None:
    """The call that last wrote into part of an input, where some call gave it as it was before.

    `h[:4].add_(1)` has the slice as its result; `h` as a whole is nobody's.
    """
    record = row.actual
    if record is None:
        return None
    writer: Node | None = None
    for at in range(node.i - 1, max(-1, node.i - _LOOK_BACK), -1):
        earlier = scene.nodes[at]
        if earlier.container or earlier.pair.pair.actual is None:
            continue
        if _writes_part(earlier, record):
            writer = writer or earlier
        elif writer is not None and any(_was(r.actual, record) for r in earlier.outputs):
            return writer if _explains(row, earlier, writer) else None
    return None


def _writes_part(node: Node, whole: TensorRecord) -> bool:
    name = node.call.op.rpartition(".")[2]
    if not name.endswith("_") or name.endswith("__"):
        return False
    parts = [row.actual for row in node.outputs if row.actual is not None]
    return any(part.dtype == whole.dtype and part.numel < whole.numel for part in parts)


def _was(before: TensorRecord | None, after: TensorRecord) -> bool:
    """Whether one tensor may be the other before part of it was written to."""
    if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if before.blob is None or after.blob is None:
        return True  # nobody can tell
    try:
        return bool((before.array() == after.array()).mean() > _LEFT_ALONE)
    except UnreadableCapture:
        return True


def _explains(row: TensorPair, before: Node, writer: Node) -> bool:
    """Whether what was there, and what was written, account for the difference."""
    if before.taint or writer.taint:
        return True
    return distance(row) <= ROUNDING * (1 + max(before.d_out, writer.d_out, writer.d_in))
