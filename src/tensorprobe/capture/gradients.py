"""What a call does in backward, read off the autograd graph without adding to it.

Before the call the graph edges of its inputs are noted; after it the graph is walked from the
outputs until those edges are met. A prehook on the node of an output sees the gradient that comes
in, a hook on a node at the boundary sees the gradient the call sends to an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

Path = tuple[str, ...]
Edge = tuple[Any, int]  # an autograd node (held, so that its identity is stable) and output number
Gradients = tuple[torch.Tensor | None, ...]

LEAF = 2**64 - 1  # sequence number of AccumulateGrad nodes


class InputEdges:
    """The graph as it was just before a call: where its inputs hang, and what is older than it."""

    __slots__ = ("aliases", "edges", "functions", "leaves", "start", "views")

    def __init__(self) -> None:
        self.start: int = torch._C._autograd._get_sequence_nr()
        self.edges: dict[Edge, Path] = {}
        self.leaves: dict[int, tuple[torch.Tensor, Path]] = {}
        self.views: list[tuple[torch.Tensor, Path]] = []
        self.aliases: dict[Path, Path] = {}
        self.functions: list[tuple[torch.Tensor, Any]] = []  # made by a custom autograd.Function

    def add(self, tensor: torch.Tensor, path: Path) -> None:
        if not tensor.requires_grad:
            return
        node = tensor.grad_fn
        if node is None:
            first = self.leaves.setdefault(id(tensor), (tensor, path))[1]
        else:
            first = self.edges.setdefault((node, tensor.output_nr), path)
            if tensor._is_view():
                self.views.append((tensor, path))
            if isinstance(node, BackwardCFunction):
                self.functions.append((tensor, node))
        if first is not path:
            self.aliases[path] = first

    def __bool__(self) -> bool:
        return bool(self.edges or self.leaves)

    def find(self, node: Any, number: int) -> Path | None:
        """The input that this edge leads to."""
        path = self.edges.get((node, number))
        if path is None and self.leaves and node._sequence_nr() == LEAF:
            leaf = self.leaves.get(id(node.variable))
            if leaf is not None and leaf[0] is node.variable:
                return leaf[1]
        return path


class Window:
    """A view written in place: its share of the gradient of its base, as CopySlices carries it."""

    __slots__ = ("offset", "size", "stride")

    def __init__(self, view: torch.Tensor) -> None:
        self.size, self.stride = view.size(), view.stride()
        self.offset = view.storage_offset()

    @staticmethod
    def of(view: torch.Tensor) -> Window | None:
        """None where the gradient cannot be cut out: the base is not dense from its first byte."""
        base = view._base
        if base is None or base.storage_offset() or not base.is_contiguous():
            return None
        return Window(view)

    def cut(self, base_gradient: torch.Tensor) -> torch.Tensor:
        return base_gradient.contiguous().as_strided(self.size, self.stride, self.offset)


class Trace:
    """Where to listen in the graph of one call: nodes of outputs, nodes at the inputs' edges."""

    __slots__ = ("boundary", "gaps", "notes", "outputs")

    def __init__(self) -> None:
        # node -> [(its output number or input position, path, window)]
        self.outputs: dict[Any, list[tuple[int, Path, Window | None]]] = {}
        self.boundary: dict[Any, list[tuple[int, Path, Window | None]]] = {}
        self.notes: list[str] = []
        self.gaps: list[str] = []

    def contributions(self) -> dict[Path, int]:
        """How many nodes send a gradient to each input."""
        counts: dict[Path, int] = {}
        for places in self.boundary.values():
            for _, path, _ in places:
                counts[path] = counts.get(path, 0) + 1
        return counts


def output_nodes(
    outputs: Iterable[tuple[torch.Tensor, Path]], inputs: InputEdges, trace: Trace
) -> None:
    """Note the nodes this call made for its outputs; tensors merely handed through have none."""
    for tensor, path in outputs:
        node = tensor.grad_fn
        if node is None:
            continue
        if (node, tensor.output_nr) in inputs.edges or node._sequence_nr() < inputs.start:
            trace.notes.append(f"output.{'.'.join(path) or '0'} is handed through")
            continue
        trace.outputs.setdefault(node, []).append((tensor.output_nr, path, None))


def trace_call(outputs: Iterable[tuple[torch.Tensor, Path]], inputs: InputEdges) -> Trace | None:
    """The graph of one operator call; None when it has no part in backward."""
    trace = Trace()
    output_nodes(outputs, inputs, trace)
    if not trace.outputs:
        return None
    seen = set(trace.outputs)
    todo = list(trace.outputs)
    while todo:
        node = todo.pop()
        if inputs.views and node.name() == "CopySlices":
            _trace_view_write(node, inputs, trace)
        for position, (after, number) in enumerate(node.next_functions):
            if after is None:
                continue
            path = inputs.find(after, number)
            if path is not None:
                trace.boundary.setdefault(node, []).append((position, path, None))
            elif after not in seen and inputs.start <= after._sequence_nr() < LEAF:
                seen.add(after)
                todo.append(after)
    return trace


def trace_function(node: Any) -> Trace:
    """The graph of a custom autograd.Function: its one node."""
    trace = Trace()
    # a node does not tell how many outputs it has; the gradients that come in do
    trace.outputs[node] = [(number, (str(number),), None) for number in range(32)]
    trace.boundary[node] = [
        (position, (str(position),), None)
        for position, (after, _) in enumerate(node.next_functions)
        if after is not None
    ]
    return trace


def trace_saved(tensors: Iterable[tuple[torch.Tensor, Path]], inputs: InputEdges) -> Trace | None:
    """Where the whole gradient of each of these tensors comes by, whoever uses them."""
    trace = Trace()
    for tensor, path in tensors:
        if tensor.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(tensor)
            trace.outputs.setdefault(edge.node, []).append((edge.output_nr, path, None))
    return trace


def _trace_view_write(node: Any, inputs: InputEdges, trace: Trace) -> None:
    """An in-place write to a view: both its gradients are windows of the base's."""
    tensor, path = inputs.views[0]
    if len(inputs.views) > 1:
        written = [item for item in inputs.views if item[0].grad_fn not in _nodes(inputs)]
        tensor, path = written[0] if written else inputs.views[0]
    window = Window.of(tensor)
    if window is None:
        trace.gaps.append("gradient of an in-place write to a view of a strided base")
        return
    trace.outputs.clear()
    trace.outputs[node] = [(0, ("0",), window)]
    trace.boundary.setdefault(node, []).append((0, path, window))


def _nodes(inputs: InputEdges) -> set[Any]:
    return {node for node, _ in inputs.edges}


class Region:
    """The graph nodes that a module call made; once it returns, only the edges that leave it."""

    __slots__ = ("frontier", "parent")

    def __init__(self) -> None:
        self.parent: Region | None = None
        self.frontier: dict[Edge, list[tuple[Any, int]]] = {}

    def top(self) -> Region:
        region = self
        while region.parent is not None:
            region = region.parent
        return region


def trace_module(
    outputs: Iterable[tuple[torch.Tensor, Path]],
    inputs: InputEdges,
    owners: dict[int, Region],
) -> Trace | None:
    """The graph of one module call, in time linear in its nodes however deep modules nest.

    `owners` says which region a node (by sequence number) belongs to, for all module calls since
    the outermost began. Meeting a node of a finished child, the walk jumps to where the child ends.
    """
    trace = Trace()
    output_nodes(outputs, inputs, trace)
    if not trace.outputs:
        return None
    own = Region()
    output_edges = {
        (node, number) for node, places in trace.outputs.items() for number, _, _ in places
    }
    todo = list(trace.outputs)
    shared = False
    while todo:
        node = todo.pop()
        sequence = node._sequence_nr()
        owner = owners.get(sequence)
        region = owner.top() if owner is not None else None
        if region is own:
            continue
        if region is None:
            owners[sequence] = own
            leaving: Iterable[tuple[Edge, list[tuple[Any, int]]]] = (
                (edge, [(node, position)])
                for position, edge in enumerate(node.next_functions)
                if edge[0] is not None
            )
        else:
            region.parent = own
            leaving = region.frontier.items()
        for edge, places in leaving:
            shared = shared or edge in output_edges
            if inputs.start <= edge[0]._sequence_nr() < LEAF and edge not in inputs.edges:
                todo.append(edge[0])
            else:
                own.frontier.setdefault(edge, []).extend(places)
        if region is not None:
            region.frontier = {}
    for edge, places in own.frontier.items():
        path = inputs.find(*edge)
        if path is not None:
            for node, position in places:
                trace.boundary.setdefault(node, []).append((position, path, None))
    if shared:
        trace.notes.append("an output is also used inside: its gradient includes that use")
    return trace


def listen(
    trace: Trace,
    incoming: Callable[[list[tuple[int, Path, Window | None]], Gradients], None],
    outgoing: Callable[[list[tuple[int, Path, Window | None]], Gradients], None],
) -> None:
    """Call `incoming` and `outgoing` when backward comes by. Neither may return a gradient."""
    for node, places in trace.outputs.items():
        node.register_prehook(_Prehook(places, incoming))
    for node, places in trace.boundary.items():
        node.register_hook(_Hook(places, outgoing))


class _Prehook:
    __slots__ = ("places", "receive")

    def __init__(self, places: Any, receive: Any) -> None:
        self.places, self.receive = places, receive

    def __call__(self, gradients: Gradients) -> None:
        self.receive(self.places, gradients)


class _Hook(_Prehook):
    __slots__ = ()

    def __call__(self, gradients: Gradients, incoming: Gradients = ()) -> None:
        self.receive(self.places, gradients)
