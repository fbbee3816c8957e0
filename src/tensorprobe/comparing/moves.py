"""Calls that move numbers and were told to move them elsewhere: statistics alone do not show it."""

from __future__ import annotations

from collections.abc import Hashable

from tensorprobe.comparing import arguments
from tensorprobe.comparing.align import content, is_constant
from tensorprobe.comparing.converging import converge
from tensorprobe.comparing.culprit import Found, accuse
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import same_bits
from tensorprobe.comparing.scene import FAINT, Node, Scene, has_other_shape
from tensorprobe.comparing.suspects import Replays
from tensorprobe.records import Call, digests_tell
from tensorprobe.replay.kinds import first_read

_MAX_CALLS = 500  # that are looked at, back from where a difference shows


class Moves:
    """Keeps the calls that `roll`, `flip` or index with other arguments on the two sides, to
    results with the same statistics. Whether it matters is tried on numbers that are made up."""

    def __init__(self, scene: Scene, replays: Replays) -> None:
        self._scene = scene
        self._replays = replays
        self._found: dict[int, bool | None] = {}  # by place: whether arguments matter, once tried
        self._of_one_side: dict[int, bool | None] = {}  # the same of calls of one side

    def leave(self, node: Node) -> None:
        """Remember a call that may have moved its numbers elsewhere."""
        if node.container or node.op_kind != "exact" or node.call.direction != "forward":
            return
        if not node.is_paired:
            if _gives_the_same(node.call):
                self._of_one_side[node.i] = None
        elif (
            node.differences
            and not any(map(has_other_shape, node.inputs))
            and any(map(_is_hidden, node.outputs))
        ):
            self._found[node.i] = None

    def behind(self, node: Node) -> Found:
        """The last such call before one whose result differs though its inputs have equal
        statistics; or one that only one side makes."""
        if not self._found and not self._of_one_side:
            return None
        contents: set[Hashable] = set()
        todo, seen = [node.i], {node.i}
        while todo and len(seen) < _MAX_CALLS:
            at = todo.pop(0)
            if at != node.i and self._matters(at):
                return self._accused(at)
            for row in self._scene.nodes[at].inputs:
                contents |= {content(r) for r in (row.actual, row.expected) if r is not None}
                for maker in self._scene.flow.producers(at, row.name):
                    if maker is not None and maker not in seen:
                        seen.add(maker)
                        todo.append(maker)
        return self._made_by_one_side(node, contents - {None})

    def _made_by_one_side(self, node: Node, contents: set[Hashable]) -> Found:
        for at in reversed(self._of_one_side):
            call = self._scene.nodes[at].call
            made = {content(record) for record in call.tensors if record.role == "output"}
            if call.step != node.call.step or not made & contents:
                continue
            moves = self._of_one_side[at]
            if moves is None:
                moves = self._of_one_side[at] = self._replays.moves(call)
            if moves:
                side = (
                    "actual" if self._scene.nodes[at].pair.pair.actual is not None else "expected"
                )
                reason = (
                    f"only {side} makes this call: its result has the statistics of what it was "
                    "given, and tried on other numbers it gives them in another order"
                )
                return at, accuse(self._scene.nodes[at], "structure", reason, 0.0)
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
    if a is None or e is None or row.metrics is not None or digests_tell(a, e):
        return False
    return a.shape == e.shape and same_bits(row) is not False and not is_constant(e)


def _gives_the_same(call: Call) -> bool:
    """Whether a call gives as many numbers as it is given, with the same statistics."""
    given = first_read(call)
    made = next((record for record in call.tensors if record.role == "output"), None)
    if given is None or made is None or given.shape != made.shape:
        return False
    return content(given) is not None and content(given) == content(made)
