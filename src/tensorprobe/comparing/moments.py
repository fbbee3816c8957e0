"""What norm and mean tell of a result: rounding moves single numbers, and averages out in these."""

from __future__ import annotations

import math

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import RANGES, SAME_SUM, pair_roundoff, rms_size
from tensorprobe.comparing.scene import Node, Scene, summed_size
from tensorprobe.replay.kinds import kind_of

# In roundings. A Llama in bfloat16 on an H200 stays below 0.05 forward and below 0.75 backward,
# where it inherits as much; of two right ways to compute a call, neither adds more.
_SHIFT = 1.0
_PER_SHIFT_IN = 4.0
_ENOUGH = 256  # numbers of one size, for rounding to average out
_FEWEST = 8
_COARSE = 2.0**-11
_NEAR = 16  # times the smallest normal number
# In roundings: what another kernel of the same sums may move norm and mean by.
_MORE_THAN_ROUNDING = 1.9


def shift(row: TensorPair, floor: float = 0.0) -> float:
    """How far norm and mean are apart, the larger one, relative to the size of the numbers."""
    a, e = row.actual, row.expected
    s = a.summary if a is not None else None
    t = e.summary if e is not None else None
    if e is None or s is None or t is None or not e.numel:
        return 0.0
    if s.norm is None or t.norm is None or s.mean is None or t.mean is None:
        return 0.0
    root = math.sqrt(e.numel)
    size = max(t.norm / root, floor)
    moved = max(abs(s.norm - t.norm) / root, abs(s.mean - t.mean))
    return moved / size if size and math.isfinite(moved) else 0.0


def drifted(scene: Scene, node: Node) -> tuple[TensorPair, float] | None:
    """The result of a call whose norm or mean is moved by more than its inputs explain, and by how
    many roundings.

    Only where something is in 16 bit, and in the first step: once an optimizer has stepped, weights
    may be far apart without a trace in their norm.
    """
    if node.call.step != scene.first_step or node.i in scene.in_optimizer:
        return None
    forward = scene.forward_of(node)
    given = [*node.inputs, *(() if forward is None else (*forward.inputs, *forward.outputs))]
    if any(map(_is_too_small, (*given, *node.outputs))):
        return None
    inherited = max(map(shift, given), default=0.0)
    coarsest = scene.coarsest_unit(node.call.step)  # what was rounded so may be float32 again
    for row in node.outputs:
        unit = max(pair_roundoff(row), coarsest) if pair_roundoff(row) else 0.0
        if unit < _COARSE or row.role != "output" or (row.metrics and _was_replayed(node)):
            continue
        moved = shift(row, summed_size(node, row))
        if moved > _SHIFT * unit * _spread(row) + _PER_SHIFT_IN * inherited:
            return row, moved / unit
    return None


def _was_replayed(node: Node) -> bool:
    """Whether a replay can tell more exactly; none can of a call that draws random numbers."""
    return not node.is_random and not any(found.problem for found in node.evidence or ())


def _is_too_small(row: TensorPair) -> bool:
    """Whether many numbers are below what a dtype can give with its usual precision."""
    return any(
        record is not None and 0 < rms_size(record) < _NEAR * RANGES.get(record.dtype, (0.0,))[0]
        for record in (row.actual, row.expected)
    )


def _spread(row: TensorPair) -> float:
    """By how much less than in a large tensor rounding averages out: where few numbers make most
    of the norm, theirs is all there is."""
    assert row.expected is not None
    t = row.expected.summary
    if row.expected.numel < _FEWEST or t is None or not t.norm or t.min is None or t.max is None:
        return math.inf
    peak = max(abs(float(t.min)), abs(float(t.max)))
    share = (t.norm / peak) ** 2  # 0: garbage, of numbers whose squares no norm can hold
    return math.sqrt(max(1.0, _ENOUGH / share)) if share > 0 else math.inf


def tells(node: Node, row: TensorPair) -> bool:
    """Whether a result has other statistics than a call can make that was given equal ones, on
    machines where calls have come out alike so far."""
    return shift(row) > _MORE_THAN_ROUNDING * pair_roundoff(row) and _is_laid_out_alike(node)


def is_systematic(scene: Scene, node: Node, row: TensorPair) -> bool:
    """Whether a result of equal inputs, under the same settings, has a norm or mean that no other
    order of the same sums gives: the errors of many numbers average out, where they are not one."""
    if not scene.same_settings or node.call.direction != "forward" or node.container:
        return False
    if row.role != "output" or row.expected is None or not _is_laid_out_alike(node):
        return False
    numel, shape = row.expected.numel, row.expected.shape
    is_alone = node.op_kind in ("elementwise", "compound", "product")
    if not is_alone or "attention" in node.call.op:
        numel //= max(shape[-1], 1) if shape else 1  # a row has one mean, one sum of exponentials
    if numel < _FEWEST or _is_too_small(row):
        return False
    spread = max(_spread(row), math.sqrt(max(1.0, _ENOUGH / numel)))
    return shift(row) > _MORE_THAN_ROUNDING * pair_roundoff(row) * spread


def is_cast_otherwise(node: Node, row: TensorPair) -> bool:
    """Whether a cast of numbers with equal statistics has given other ones: it has one right
    answer."""
    call = node.call
    if call.direction != "forward" or kind_of(call) != "conversion" or row.expected is None:
        return False
    numel = row.expected.numel
    is_cast = any(given.expected and given.expected.numel == numel for given in node.inputs)
    return is_cast and not node.differences and shift(row) > SAME_SUM


def _is_laid_out_alike(node: Node) -> bool:
    """Whether tensors lie in memory in the same order: else sums are made in another one."""
    return all(
        row.actual is not None
        and row.expected is not None
        and row.actual.stride == row.expected.stride
        for row in (*node.inputs, *node.outputs)
    )
