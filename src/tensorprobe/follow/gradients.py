"""What a call does in backward, read off the autograd graph without adding to it.

Before the call the graph edges of its inputs are noted; after it the graph is walked from the
outputs until those edges are met. A prehook on the node of an output sees the gradient that comes
in, a hook on a node at the boundary sees the gradient the call sends to an input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch.autograd.function import BackwardCFunction

from tensorprobe import native
from tensorprobe.follow.plain_arguments import POSITIONS
from tensorprobe.torch_versions import gradient_edge

Path = tuple[str, ...]
Edge = tuple[Any, int]  # an autograd node (held, so that its identity is stable) and output number
Gradients = tuple[torch.Tensor | None, ...]

# Sequence number of AccumulateGrad nodes, and of those that have no backward, nor a variable.
LEAF = 2**64 - 1
_next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


# Of an input: the tensor, its path, whether it needs a gradient, its node and output number,
# whether it is a view, and its version then.
_Note = tuple[torch.Tensor, Path, bool, Any, int, bool, int]


class InputEdges:
    """The graph as it was just before a call: where its inputs hang, and what is older than it."""

    __slots__ = ("aliases", "edges", "functions", "leaves", "start", "views")

    def __init__(self, inputs: Iterable[tuple[torch.Tensor, Path]] = ()) -> None:
        """Note the inputs; where one is a view, a write to it may give it a gradient later."""
        self.start: int = _next_sequence_nr()
        self.edges: dict[Edge, Path] = {}
        self.leaves: dict[int, tuple[torch.Tensor, Path]] = {}
        # views by identity; their path where they require a gradient, and their version
        self.views: dict[int, tuple[torch.Tensor, Path | None, int]] = {}
        self.aliases: dict[Path, Path] = {}
        self.functions: list[tuple[torch.Tensor, Any]] = []  # made by a custom autograd.Function
        for tensor, path in inputs:
            needs_gradient = tensor.requires_grad
            if tensor._is_view() and not tensor.is_inference():
                self._note_view(tensor, path, needs_gradient, tensor._version)
            if needs_gradient:
                node = tensor.grad_fn
                self._note(tensor, path, node, 0 if node is None else tensor.output_nr)

    @classmethod
    def noted(cls, start: int, notes: Iterable[_Note]) -> InputEdges:
        """Make these from what C++ noted before the call (`native`)."""
        self = cls()
        self.start = start
        for tensor, path, needs_gradient, node, number, is_view, version in notes:
            if is_view:
                self._note_view(tensor, path, needs_gradient, version)
            if needs_gradient:
                self._note(tensor, path, node, number)
        return self

    def _note_view(
        self, tensor: torch.Tensor, path: Path, needs_gradient: bool, version: int
    ) -> None:
        view = (tensor, path if needs_gradient else None, version)
        self.views.setdefault(id(tensor), view)

    def _note(self, tensor: torch.Tensor, path: Path, node: Any, number: int) -> None:
        if node is None:
            first = self.leaves.setdefault(id(tensor), (tensor, path))[1]
        else:
            first = self.edges.setdefault((node, number), path)
            if isinstance(node, BackwardCFunction):
                self.functions.append((tensor, node))
        if first is not path:
            self.aliases[path] = first

    @property
    def has_leaves(self) -> bool:
        return bool(self.leaves)

    @property
    def has_functions(self) -> bool:
        return bool(self.functions)

    @property
    def has_views(self) -> bool:
        return bool(self.views)

    def __bool__(self) -> bool:
        return bool(self.edges or self.leaves)

    def find(self, edge: Edge) -> Path | None:
        """The input that this edge leads to."""
        path = self.edges.get(edge)
        if path is None and self.leaves and edge[0]._sequence_nr() == LEAF:
            variable = getattr(edge[0], "variable", None)
            leaf = self.leaves.get(id(variable))
            if leaf is not None and leaf[0] is variable:
                return leaf[1]
        return path


def whole(edges: Any) -> InputEdges:
    """All there is to tell of InputEdges, or of their short form in C++."""
    return edges if isinstance(edges, InputEdges) else InputEdges.noted(*edges.notes())


def versions_of(inputs: list[tuple[torch.Tensor, Path]]) -> list[int]:
    """The versions of tensors; -1 of inference tensors, which keep none."""
    try:
        return [tensor._version for tensor, _ in inputs]
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor, _ in inputs]


class Window:
    """A view written in place: its share of the gradient of its base, as CopySlices carries it."""

    __slots__ = ("_base_size", "_base_stride", "_offset", "_size", "_stride")

    def __init__(self, view: torch.Tensor, base: torch.Tensor) -> None:
        self._size, self._stride = view.size(), view.stride()
        self._offset = view.storage_offset() - base.storage_offset()
        self._base_size, self._base_stride = base.size(), base.stride()

    def cut(self, base_gradient: torch.Tensor) -> torch.Tensor:
        """The part of a gradient of the base that belongs to the view."""
        if base_gradient.stride() != self._base_stride:
            strided = base_gradient.new_empty_strided(self._base_size, self._base_stride)
            base_gradient = strided.copy_(base_gradient)
        offset = base_gradient.storage_offset() + self._offset
        return base_gradient.as_strided(self._size, self._stride, offset)


# A place to listen at: output number or input position of a node, what it belongs to, its share.
Spot = tuple[int, Path, Window | None]


ONLY: Path = ("0",)  # the path of a result that is one tensor


class Way(NamedTuple):
    """The graph of a call that returned one tensor and sends one gradient to one input."""

    node: Any  # at which backward comes in; None: the edges have both, for their `listen`
    last: Any  # at which it goes out
    spots: tuple[Spot, ...]


class Trace(msgspec.Struct, eq=False):
    """Where to listen in the graph of one call: nodes of outputs, nodes at the inputs' edges."""

    outputs: dict[Any, list[Spot]] = {}
    boundary: dict[Any, list[Spot]] = {}  # of each node at least one
    notes: list[str] = []
    gaps: list[str] = []

    def contributions(self) -> dict[Path, int]:
        """How many times a gradient is sent to each input that gets several."""
        paths = [spot[1] for spots in self.boundary.values() for spot in spots]
        if len(paths) == len(set(paths)):
            return {}
        return {path: n for path, n in Counter(paths).items() if n > 1}

    def output_edges(self) -> set[Edge]:
        """The edges that lead to outputs."""
        return {(node, spot[0]) for node, spots in self.outputs.items() for spot in spots}

    def note_shared(self, shared: set[Edge]) -> None:
        """These outputs have users inside the call as well."""
        for node, spots in self.outputs.items():  # in their order: a set has one of chance
            for number, path, window in spots:
                if window is None and (node, number) in shared:
                    self.notes.append(
                        f"output.{'.'.join(path)} is also used inside: its gradient includes that"
                    )


def output_nodes(
    outputs: Iterable[tuple[torch.Tensor, Path]], inputs: InputEdges, trace: Trace
) -> None:
    """Note the nodes this call made for its outputs; tensors merely handed through have none."""
    for tensor, path in outputs:
        node = tensor.grad_fn
        if node is None:
            if id(tensor) not in inputs.leaves:
                continue
        else:
            number = tensor.output_nr
            if node._sequence_nr() >= inputs.start and (node, number) not in inputs.edges:
                written = id(tensor) in inputs.views and _view_write(tensor, path, inputs, trace)
                if not written:
                    trace.outputs.setdefault(node, []).append((number, path, None))
                continue
        trace.notes.append(f"output.{'.'.join(path) or '0'} is handed through")


def _view_write(view: torch.Tensor, path: Path, inputs: InputEdges, trace: Trace) -> bool:
    """Whether this call wrote to a view in place: both its gradients are windows of the base's.

    The write is a CopySlices node of the base, below the node through which the view reads it, so
    what comes in there is the gradient from all users of the written part, the base's and the
    view's. Writes to several views of one base follow each other.
    """
    writes = []
    node = view.grad_fn
    while node is not None and inputs.start <= node._sequence_nr() < LEAF:
        if node.name().endswith("CopySlices"):
            writes.append(node)
        elif writes:
            break
        node = node.next_functions[0][0] if node.next_functions else None
    base = view._base
    if not writes or base is None:
        return False
    window = Window(view, base)
    trace.outputs.setdefault(writes[0], []).append((0, path, window))
    input_path = inputs.views[id(view)][1]
    nothing_between = node is None or not inputs.start <= node._sequence_nr() < LEAF
    if input_path is not None and nothing_between:
        trace.boundary.setdefault(writes[-1], []).append((0, input_path, window))
    return True


def trace_call(outputs: Iterable[tuple[torch.Tensor, Path]], inputs: Any) -> Trace:
    """The graph of one operator call; it has no outputs when backward does not pass here."""
    inputs = whole(inputs)
    trace = Trace()
    output_nodes(outputs, inputs, trace)
    if not trace.outputs:
        return trace
    start, edges, leaves, boundary = inputs.start, inputs.edges, inputs.leaves, trace.boundary
    todo = list(trace.outputs)
    seen = set(todo)
    inner_edges = set()
    while todo:
        node = todo.pop()
        spots: list[Spot] = []
        for position, edge in enumerate(node.next_functions):
            path = edges.get(edge)
            if path is None:  # as `find` does it, for every edge
                after: Any = edge[0]
                if after is None:
                    continue
                sequence = after._sequence_nr()
                if sequence != LEAF:
                    if sequence >= start:
                        inner_edges.add(edge)
                        if after not in seen:
                            seen.add(after)
                            todo.append(after)
                    continue
                leaf = leaves.get(id(getattr(after, "variable", None))) if leaves else None
                if leaf is None:
                    continue
                path = leaf[1]
            spots.append((position, path, None))
        if spots:
            before = boundary.get(node)  # the windows of a view written in place
            boundary[node] = spots if before is None else before + spots
    if inner_edges:
        trace.note_shared(inner_edges & trace.output_edges())
    return trace


_BEFORE_ALL: Path = ()
_FAR = frozenset(POSITIONS[10:])  # of which the text has another order than the numbers


def one_node(output: torch.Tensor, inputs: InputEdges) -> tuple[Any, tuple[Spot, ...]] | None:
    """The node of a call that made one node and returned one tensor, and where it leads to the
    inputs; None where more than that is to be found, by `trace_call`."""
    node = output.grad_fn
    start, edges, leaves = inputs.start, inputs.edges, inputs.leaves
    if node is None or node._sequence_nr() < start or output.output_nr or inputs.aliases:
        return None
    if (node, 0) in edges or id(output) in inputs.views:
        return None
    spots: list[Spot] = []
    position, last = -1, _BEFORE_ALL
    for edge in node.next_functions:
        position += 1
        path = edges.get(edge)
        if path is None:
            after: Any = edge[0]
            if after is None:
                continue
            sequence = after._sequence_nr()
            if sequence != LEAF:
                if sequence >= start:
                    return None
                continue
            leaf = leaves.get(id(getattr(after, "variable", None)))
            if leaf is None:
                continue
            path = leaf[1]
        if path <= last or len(path) > 1 or path in _FAR:
            return None  # of a list of inputs; twice; not in their order
        last = path
        spots.append((position, path, None))
    return (node, tuple(spots)) if spots else None  # the garbage collector drops tuples


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


def trace_saved(tensors: Iterable[tuple[torch.Tensor, Path]], inputs: InputEdges) -> Trace:
    """Where the whole gradient of each of these tensors comes by, whoever uses them."""
    trace = Trace()
    for tensor, path in tensors:
        if tensor.requires_grad:
            node, number = gradient_edge(tensor)
            trace.outputs.setdefault(node, []).append((number, path, None))
    return trace


_LEAF_NODE: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# An edge that leaves a region, with the sequence number of the node it leads to (-1 of a leaf's),
# and the node and position that it leaves from.
_Leaving = tuple[int, Edge, Any, int]
_NO_EDGES: frozenset[Edge] = frozenset()


class Region(msgspec.Struct, eq=False):
    """The graph nodes that a module call made; once it returns, only the edges that leave it."""

    parent: Region | None = None
    leaving: list[_Leaving] = []
    used: frozenset[Edge] = _NO_EDGES  # edges inside that lead to outputs of the call, or a child's

    def use(self, edge: Edge) -> None:
        self.used |= {edge}


def new_owners() -> Any:
    """An empty table of which region a node belongs to, for `trace_module`."""
    return {} if native.MODULE is None else native.MODULE.Regions()


def trace_module(
    outputs: list[tuple[torch.Tensor, Path]], inputs: Any, owners: Any, leaves: bool = True
) -> Trace | Way:
    """The graph of one module call, in time linear in its nodes however deep modules nest.

    `owners` says which region a node (by sequence number) belongs to, for all module calls since
    the outermost began. Meeting a node of a finished child, the walk jumps to where the child ends.
    `leaves` says whether this call, or one around it, was given a leaf: the edges to all others
    (most are parameters) need not be carried outwards.
    """
    found: Any = None
    if isinstance(owners, dict):
        only = only_node(outputs, inputs)
        if only is not None:
            own = _walk([only], None, inputs, owners, leaves)
            found = _sent_to(inputs, own), own.used
            way = _only_way(inputs, only, *found)
            if way is not None:
                return way
    elif _is_only(outputs):  # the same in C++
        found = owners.only(inputs, outputs[0][0], leaves)
        if found is not None and len(found) == 1:
            return Way(None, None, found[0])
    return trace_found(outputs, inputs, owners, leaves, found)


def trace_found(
    outputs: list[tuple[torch.Tensor, Path]],
    inputs: Any,
    owners: Any,
    leaves: bool,
    found: tuple[Any, Any] | None,
) -> Trace:
    """The rest of `trace_module`: `found` is what the only result is made of, where it has a node
    of its own, as ([(node, spot)] of gradients sent to inputs, edges of results used inside)."""
    trace = Trace()
    if found is not None:
        sent, used = found
        trace.outputs[outputs[0][0].grad_fn] = [(0, ONLY, None)]
    else:
        output_nodes(outputs, whole(inputs), trace)
        if not trace.outputs:
            return trace
        # No edge of a graph without cycles leads back to its only end.
        ends = trace.output_edges() if len(trace.outputs) > 1 else None
        nodes = list(trace.outputs)
        if isinstance(owners, dict):
            own = _walk(nodes, ends, inputs, owners, leaves)
            sent, used = _sent_to(inputs, own), own.used
        else:
            sent, used = owners.walk(inputs, nodes, None if ends is None else list(ends), leaves)
    boundary = trace.boundary
    for node, spot in sent:
        boundary.setdefault(node, []).append(spot)
    if used:
        trace.note_shared(trace.output_edges() & set(used))
    if inputs.has_views:
        inputs = whole(inputs)
        lost = {path for spots in boundary.values() for _, path, _ in spots}
        trace.gaps.extend(_lost_views(inputs, lost))
    return trace


def _sent_to(inputs: InputEdges, own: Region) -> list[tuple[Any, Spot]]:
    """The gradients that a module's call sends to its inputs, with the nodes they leave from."""
    edges = inputs.edges
    sent: list[tuple[Any, Spot]] = []
    for _, edge, node, position in own.leaving:
        path = edges.get(edge) or (inputs.find(edge) if inputs.leaves else None)
        if path is not None:
            sent.append((node, (position, path, None)))
    return sent


def _only_way(
    inputs: InputEdges, only: Any, sent: list[tuple[Any, Spot]], used: frozenset[Edge]
) -> Way | None:
    if len(sent) != 1 or inputs.aliases or (only, 0) in used:
        return None
    last, spot = sent[0]
    path = spot[1]
    if len(path) != 1 or (inputs.views and _lost_views(inputs, {path})):
        return None
    return Way(only, last, (spot,))


def _is_only(outputs: list[tuple[torch.Tensor, Path]]) -> bool:
    return len(outputs) == 1 and outputs[0][1] == ONLY


def only_node(outputs: list[tuple[torch.Tensor, Path]], inputs: InputEdges) -> Any:
    """The node of a call's only result, where that is one tensor made by the call and no view it
    was given; what `output_nodes` finds of any."""
    if not _is_only(outputs):
        return None
    output = outputs[0][0]
    node = output.grad_fn
    if node is None or node._sequence_nr() < inputs.start or output.output_nr:
        return None
    return None if (node, 0) in inputs.edges or id(output) in inputs.views else node


def _walk(
    todo: list[Any],
    ends: set[Edge] | None,
    inputs: InputEdges,
    owners: dict[int, Region],
    leaves: bool,
) -> Region:
    """The region of the call that made the nodes `todo`; `ends` are the edges to its outputs.

    It is written for speed: a module has few nodes, but a model many modules.
    """
    own = Region()
    start, outside = inputs.start, own.leaving
    young = None
    for edge in inputs.edges:  # from another thread, or to a view whose base was written to
        if edge[0]._sequence_nr() >= start:
            young = inputs.edges
    while todo:
        node = todo.pop()
        sequence = node._sequence_nr()
        region = owners.get(sequence)
        if region is not None:
            for place in _join(region, own):
                sequence, edge, _, _ = place
                if ends is not None and edge in ends:
                    own.use(edge)
                if sequence >= start and (young is None or edge not in young):
                    todo.append(edge[0])
                else:
                    outside.append(place)
            continue
        owners[sequence] = own
        position = -1
        for edge in node.next_functions:
            position += 1
            after = edge[0]
            if type(after) is _LEAF_NODE:
                if leaves:
                    outside.append((-1, edge, node, position))
            elif after is not None:
                if ends is not None and edge in ends:
                    own.use(edge)
                sequence = after._sequence_nr()
                if sequence >= start and (young is None or edge not in young):
                    todo.append(after)
                else:
                    outside.append((sequence, edge, node, position))
    return own


def _join(region: Region, own: Region) -> list[_Leaving]:
    """Make a finished child's region part of its caller's; the edges that left it."""
    while region.parent is not None:
        region = region.parent
    if region is own:
        return []
    region.parent = own
    own.used |= region.used
    leaving, region.leaving, region.used = region.leaving, [], _NO_EDGES
    return leaving


def _lost_views(inputs: InputEdges, found: set[Path]) -> list[str]:
    """Gaps of a module that writes to views it was given: their own edge is gone from the graph."""
    return [
        f"input.{'.'.join(path)} is a view written in place inside: its gradient is not followed"
        for tensor, path, version in inputs.views.values()
        if path is not None and path not in found and tensor._version != version
    ]


class LeafListener(NamedTuple):
    """A hook on the node of a leaf, which some programs keep for ever: to be removed in time."""

    node: Any  # held: a leaf that nothing uses yet forgets its node
    handle: Any


def listen(
    trace: Trace,
    incoming: Callable[[list[Spot], Gradients], None],
    outgoing: Callable[[list[Spot], Gradients, Gradients], None],
) -> list[LeafListener]:
    """Call `incoming` and `outgoing` when backward comes by. Neither may return a gradient.

    `outgoing` is given the gradients that came in as well.
    """
    leaves = []
    for node, spots in trace.outputs.items():
        handle = node.register_prehook(partial(incoming, spots))
        if node._sequence_nr() == LEAF:
            leaves.append(LeafListener(node, handle))
    for node, spots in trace.boundary.items():
        node.register_hook(partial(outgoing, spots))
    return leaves
