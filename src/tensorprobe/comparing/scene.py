"""All paired calls of one rank: their distances, what flows between them, what lies inside what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorprobe.comparing import arguments
from tensorprobe.comparing.content import content
from tensorprobe.comparing.culprit import Culprit
from tensorprobe.comparing.dataflow import Dataflow, find_containers
from tensorprobe.comparing.judge import distance, same_bits
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.nodes import Node, make_node, relative, size_floor
from tensorprobe.records import Call, TensorRecord

_OPERATORS = ("Functional.", "Torch.", "Tensor.")


class Scene:
    """What is known of the calls of one rank, in execution order, and who has been accused.

    `floors` gives, for a tensor, how far repeated runs of the expected side are apart.
    """

    def __init__(
        self, pairs: Sequence[CallPair], floors: Mapping[str, float] | None = None
    ) -> None:
        self.floors = floors or {}
        self.culprits: list[tuple[int, Culprit]] = []  # with the node each is at
        containers = find_containers(pairs)
        self.flow = Dataflow(pairs, containers)
        self.nodes = [make_node(i, p, containers[i]) for i, p in enumerate(pairs)]
        for node in self.nodes:
            self._measure(node)
        for node in self.nodes:
            self._inherit(node)
        self.has_tensors = any(
            row.metrics is not None for node in self.nodes for row in node.pair.tensors
        )
        self.parameter_names = self._parameter_names()
        # at L0 and L2 much of what makes a tensor goes unseen
        self.sees_all = any(node.call.name.startswith(_OPERATORS) for node in self.nodes)
        self.first_step = min((node.call.step for node in self.nodes), default=0)
        self._children = self._find_children()
        self._recomputed: dict[object, list[Node]] | None = None
        self.in_optimizer = {
            at
            for node in self.nodes
            if node.call.name.startswith("Optimizer.")
            for at in (node.i, *self.inside(node))
        }

    def _measure(self, node: Node) -> None:
        for row in node.inputs:
            d = self.distance(node, row)
            if d:
                node.d_in, node.r_in = max(node.d_in, d), max(node.r_in, relative(row, d))
            if same_bits(row) is False:
                node.same_in = False
        for row in node.outputs:
            d = self.distance(node, row)
            if d:
                d = self.distance(node, row, size_floor(node, row))
                node.d_out, node.r_out = max(node.d_out, d), max(node.r_out, relative(row, d))
            if same_bits(row) is False:
                node.same_out = False
        actual, expected, _ = node.pair.pair
        if actual is not None and expected is not None:
            node.differences = arguments.differences(actual, expected)

    def _inherit(self, node: Node) -> None:
        """A backward call depends on what its forward call was given and made of it."""
        at = self.flow.forward.get(node.i)
        if at is not None:
            forward = self.nodes[at]
            node.d_in = max(node.d_in, forward.d_in, forward.d_out)
            node.r_in = max(node.r_in, forward.r_in, forward.r_out)
            node.same_in = node.same_in and forward.same_in and forward.same_out

    def distance(self, node: Node, row: TensorPair, floor: float = 0.0) -> float:
        """How far a tensor is from its partner, less where repeated runs are as far apart."""
        found = distance(row, floor)
        if self.floors and row.expected is not None:
            noise = self.floors.get(place(node.call, row.expected), 0.0)
            if found <= 3 * noise:
                return min(found, 1.0)
        return found

    def furthest(self, node: Node) -> TensorPair | None:
        """The output that differs most."""
        return max(node.outputs, key=lambda row: self.distance(node, row), default=None)

    def forward_of(self, node: Node) -> Node | None:
        """Of a backward call, its forward call."""
        at = self.flow.forward.get(node.i)
        return None if at is None else self.nodes[at]

    def recomputed(self, node: Node) -> list[Node]:
        """Forward calls like this one that ran after backward had begun."""
        if self._recomputed is None:
            self._recomputed = {}
            in_backward: set[int] = set()
            for other in self.nodes:
                if other.call.direction == "backward":
                    in_backward.add(other.call.step)
                elif other.call.step in in_backward:
                    self._recomputed.setdefault(_likeness(other), []).append(other)
        found = self._recomputed.get(_likeness(node), [])
        return [other for other in found if other is not node]

    def inside(self, node: Node) -> set[int]:
        """What ran inside a module, or as part of an optimizer's step."""
        if node.call.name.startswith("Optimizer."):
            return self._inside_optimizer(node)
        found: set[int] = set()
        todo = [node]
        while todo:
            call = todo.pop().call
            for at in self._children.get((call.step, call.name), ()):
                if at > node.i and at not in found:
                    found.add(at)
                    todo.append(self.nodes[at])
        return found

    def _inside_optimizer(self, node: Node) -> set[int]:
        found = set()
        for at in range(node.i + 1, len(self.nodes)):
            if self.nodes[at].call.name.startswith(("Module.", "Optimizer.")):
                break
            found.add(at)
        return found

    def _find_children(self) -> dict[tuple[int, str], list[int]]:
        children: dict[tuple[int, str], list[int]] = {}
        for node in self.nodes:
            if node.call.parent is not None:
                children.setdefault((node.call.step, node.call.parent), []).append(node.i)
        return children

    def _parameter_names(self) -> dict[object, str]:
        names: dict[object, str] = {}
        for node in self.nodes:
            call = node.call
            for row in node.inputs:
                if row.role not in ("parameter", "buffer"):
                    continue
                label = row.name.partition(".")[2]
                full = label if call.name.startswith("Optimizer.") else f"{call.module}.{label}"
                for record in (row.actual, row.expected):
                    if record is not None and (key := content(record)) is not None:
                        names.setdefault(key, full.strip("."))
        return names


def _likeness(node: Node) -> object:
    call = node.call
    return call.step, call.op, call.module, tuple(record.shape for record in call.tensors)


def place(call: Call, record: TensorRecord) -> str:
    """What a tensor is known by among repeated runs."""
    return f"{call.rank}/{call.step}/{record.name}"
