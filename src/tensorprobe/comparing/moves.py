"""Calls that move numbers and were told to move them elsewhere: statistics alone do not show it."""

from __future__ import annotations

from tensorprobe.comparing import arguments
from tensorprobe.comparing.align import is_constant
from tensorprobe.comparing.converging import converge
from tensorprobe.comparing.culprit import Found, accuse
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import same_bits
from tensorprobe.comparing.scene import FAINT, Node, Scene
from tensorprobe.comparing.suspects import Replays

_MAX_CALLS = 500  # that are looked at, back from where a difference shows


class Moves:
    """Keeps the calls that `roll`, `flip` or index with other arguments on the two sides, to
    results with the same statistics. Whether it matters is tried on numbers that are made up."""

    def __init__(self, scene: Scene, replays: Replays) -> None:
        self._scene = scene
        self._replays = replays
        self._found: dict[int, bool | None] = {}  # by place: whether arguments matter, once tried

    def leave(self, node: Node) -> None:
        """Remember a call that may have moved its numbers elsewhere."""
        if not node.is_paired or node.container or node.op_kind != "exact" or not node.differences:
            return
        if node.call.direction == "forward" and any(map(_is_hidden, node.outputs)):
            self._found[node.i] = None

    def behind(self, node: Node) -> Found:
        """The last such call before one whose result differs though its inputs have equal
        statistics."""
        todo, seen = [node.i], {node.i}
        while todo and self._found and len(seen) < _MAX_CALLS:
            at = todo.pop(0)
            if at != node.i and self._matters(at):
                return self._accused(at)
            for row in self._scene.nodes[at].inputs:
                for maker in self._scene.flow.producers(at, row.name):
                    if maker is not None and maker not in seen:
                        seen.add(maker)
                        todo.append(maker)
        return None

    def unhealed(self) -> Found:
        """The first such call that nothing is seen to undo, where nobody else is blamed: its
        results are other ones, and so is what is made of them."""
        undone: set[int] = set()
        for at in self._found:
            node = self._scene.nodes[at]
            if at in undone or not self._matters(at):
                continue
            if later := self._reached(at) & self._found.keys():
                undone |= later  # which may move the numbers back
            elif not converge(self._scene, node, same_calls=True, is_moved_on=True):
                return self._accused(at)
        return None

    def _reached(self, start: int) -> set[int]:
        """The calls that were given what was made of its results."""
        todo, seen = [start], {start}
        while todo and len(seen) < _MAX_CALLS:
            for row in self._scene.nodes[todo.pop(0)].outputs:
                new = {at for at in self._scene.flow.readers(row) if at > start} - seen
                seen |= new
                todo += new
        return seen - {start}

    def _matters(self, at: int) -> bool:
        if at not in self._found:
            return False
        matters = self._found[at]
        if matters is None:
            actual, expected, _ = self._scene.nodes[at].pair.pair
            assert actual is not None
            assert expected is not None
            moved = self._replays.tried(actual, arguments.graft(actual, expected))
            matters = self._found[at] = moved is not None and moved > FAINT
        return matters

    def _accused(self, at: int) -> Found:
        node = self._scene.nodes[at]
        reason = (
            f"called with other arguments: {'; '.join(node.differences[:4])}. Its results have "
            "equal statistics, and tried on other numbers the arguments change their places"
        )
        row = next(filter(_is_hidden, node.outputs), None)
        return at, accuse(node, "argument", reason, node.d_out, row=row, proof="statistics")


def _is_hidden(row: TensorPair) -> bool:
    """Whether numbers of a result may be in other places, and nobody can see it."""
    a, e = row.actual, row.expected
    if a is None or e is None or row.metrics is not None or a.has_digest_like(e):
        return False
    return a.shape == e.shape and same_bits(row) is not False and not is_constant(e)
