"""Which later calls each culprit has reached: one bit a culprit, carried along by the tensors."""

from __future__ import annotations

from tensorprobe.comparing.content import content
from tensorprobe.comparing.judge import same_bits
from tensorprobe.comparing.nodes import Node
from tensorprobe.comparing.scene import Scene


class Taint:
    """The bits that calls take over from what they were given, in execution order."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.bad_contents: dict[object, int] = {}  # leaves that differ -> where they are blamed
        self.in_backward: set[int] = set()  # steps whose backward has begun
        self._gradients = 0
        self._own: dict[int, int] = {}

    def begin(self) -> None:
        """Start from the first call, with the culprits known by now."""
        self._own = {at: bit for bit, (at, _) in enumerate(self.scene.culprits)}
        self._gradients = 0
        self.in_backward.clear()

    def is_culprit(self, node: Node) -> bool:
        """Whether a call has been accused."""
        return node.i in self._own

    def add(self, at: int) -> None:
        """The culprit that was added last is at this node: it and what follows is tainted."""
        bit = len(self.scene.culprits) - 1
        self._own.setdefault(at, bit)
        self.scene.nodes[at].taint |= 1 << bit

    def inherited(self, node: Node) -> int:
        """The bits of what a call was given, and its own."""
        scene, taint = self.scene, 0
        for row in node.inputs:
            producers = scene.flow.producers(node.i, row.name)
            for at in producers:
                if at is not None:
                    taint |= scene.nodes[at].taint
            if self.bad_contents:
                for record in (row.actual, row.expected):
                    if record is not None:
                        taint |= self._bit_at(self.bad_contents.get(content(record)))
            if self._gradients and producers == (None, None) and not same_bits(row):
                # several gradients that the engine has added up, or a gradient that was kept
                # or that the optimizer is given
                taint |= self._gradients
        forward = scene.forward_of(node)
        if forward is not None:
            taint |= forward.taint
            for twin in scene.recomputed(forward):
                if twin.i < node.i:
                    taint |= twin.taint
        return taint | self._bit_at(node.i)

    def _bit_at(self, at: int | None) -> int:
        bit = None if at is None else self._own.get(at)
        return 0 if bit is None else 1 << bit

    def leave(self, node: Node) -> None:
        """Go on from a call whose bits are settled."""
        if node.call.direction == "backward":
            self._gradients |= node.taint
            self.in_backward.add(node.call.step)

    def spread(self) -> None:
        """Work out again which calls each culprit has reached."""
        self.begin()
        for node in self.scene.nodes:
            node.taint = self.inherited(node)
            self.leave(node)
