"""Calls that one side lacks, and inputs that come from elsewhere, where values differ by it."""

from __future__ import annotations

from collections.abc import Sequence

from tensorprobe.comparing.content import is_constant
from tensorprobe.comparing.culprit import Culprit, Side, accuse, kind_by_direction, percent
from tensorprobe.comparing.judge import ROUNDING, number_text, pair_roundoff
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.nodes import AMPLIFIES, Node, relative
from tensorprobe.comparing.replays import Replays, score, worst
from tensorprobe.comparing.scene import Scene


def wired_otherwise(scene: Scene, replays: Replays, node: Node) -> tuple[int, Culprit] | None:
    """An input that comes from elsewhere than on the other side, and differs by it."""
    if node.taint:
        return None
    for row in node.inputs:
        d = scene.distance(node, row)
        if d <= ROUNDING or row.actual is None or row.expected is None:
            continue
        ours, theirs = scene.flow.producers(node.i, row.name)
        if ours == theirs:
            continue
        if node.call.direction == "backward" and None in (ours, theirs):
            continue
        origin = [at for at in (ours, theirs) if at is not None]
        known, region = _region(scene, origin)
        if any(scene.nodes[at].taint for at in (*known, *region)):
            continue
        if not region and (is_constant(row.actual) or is_constant(row.expected)):
            continue  # many calls make the same constant: who made this one is a guess
        before = max((scene.nodes[at].r_out for at in known), default=0.0)
        if relative(row, d) > ROUNDING * (pair_roundoff(row) + AMPLIFIES * before):
            return (
                _faulty_one_sided(scene, replays, region)
                or _one_sided(scene, node, row, region, d)
                or (node.i, _from_elsewhere(scene, node, row, ours, theirs, d))
            )
    return None


def _region(scene: Scene, origin: Sequence[int]) -> tuple[set[int], list[int]]:
    """The calls of one side only that lead to `origin`, and the paired calls before them."""
    known: set[int] = set()
    region: list[int] = []
    todo = list(origin)
    seen = set(todo)
    while todo:
        at = todo.pop()
        node = scene.nodes[at]
        if node.is_paired:
            known.add(at)
            continue
        region.append(at)
        for row in node.inputs:
            for before in scene.flow.producers(at, row.name):
                if before is not None and before not in seen:
                    seen.add(before)
                    todo.append(before)
    return known, sorted(region)


def _by_side(scene: Scene, region: list[int]) -> tuple[list[int], list[int]]:
    mine = [at for at in region if scene.nodes[at].pair.pair.actual is not None]
    return mine, [at for at in region if scene.nodes[at].pair.pair.actual is None]


def _faulty_one_sided(
    scene: Scene, replays: Replays, region: list[int]
) -> tuple[int, Culprit] | None:
    mine, other = _by_side(scene, region)
    for at in (*mine, *other):
        found = _own_error(scene.nodes[at], replays)
        if found is not None:
            return at, found
    return None


def _own_error(node: Node, replays: Replays) -> Culprit | None:
    """A call that only one side has, with an error of its own."""
    side = 0 if node.pair.pair.actual is not None else 1
    if not replays.enabled or node.container or node.is_random is not None:
        return None
    evidence = replays.evidence(node, side, noise=True)
    replays.n_replayed += 1
    own = worst(node, evidence)
    if own is None or score(node, own) <= ROUNDING:
        return None
    name: Side = "actual" if side == 0 else "expected"
    reason = (
        f"only in {name}; replayed in float64 on its own inputs, its {own.name} is off by "
        f"{percent(own.relative)}, {number_text(own.size)} times what rounding explains"
    )
    row = next((row for row in node.outputs if row.name == own.name), None)
    kind = kind_by_direction(node)
    return accuse(node, kind, reason, own.size, row=row, side=name, proof="replayed")


def _one_sided(
    scene: Scene, node: Node, row: TensorPair, region: list[int], d: float
) -> tuple[int, Culprit] | None:
    mine, other = _by_side(scene, region)
    if not mine and not other:
        return None
    at = (mine or other)[0]
    lists = [f"{_names(scene, mine)} only in actual" if mine else "",
             f"{_names(scene, other)} only in expected" if other else ""]  # fmt: skip
    where = " and ".join(text for text in lists if text)
    reason = f"{where}: after it, {row.name} of {node.call.name} differs"
    return at, accuse(scene.nodes[at], "structure", reason, d, row=row, inherited=0.0)


def _from_elsewhere(
    scene: Scene, node: Node, row: TensorPair, ours: int | None, theirs: int | None, d: float
) -> Culprit:
    names = [scene.nodes[p].call.name if p is not None else "no call" for p in (ours, theirs)]
    reason = f"{row.name} comes from {names[0]} in actual, from {names[1]} in expected"
    return accuse(node, "structure", reason, d, row=row, inherited=0.0)


def _names(scene: Scene, at: Sequence[int]) -> str:
    names = [scene.nodes[i].call.name for i in at]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
