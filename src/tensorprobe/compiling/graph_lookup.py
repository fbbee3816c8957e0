"""Questions about recorded graphs: what they give, what reads what, where a value comes from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensorprobe.compiling.compile_records import GraphNode, RecordedGraph, node_name
from tensorprobe.compiling.graph_replay import nodes_read


def output_names(graph: RecordedGraph) -> list[str]:
    """The node of each result, in order; an empty name for what is no node."""
    output = next((node for node in reversed(graph.nodes) if node.kind == "output"), None)
    names: list[str] = []

    def collect(tree: Any) -> None:
        if isinstance(tree, dict):
            special = tree.get("special")
            if isinstance(special, list) and len(special) == 2:
                names.append(str(special[1]))
            elif "tuple" in tree:
                collect(tree["tuple"])
            elif "dict" in tree:
                for pair in tree["dict"]:
                    collect(pair[1])
            else:
                names.append("")
        elif isinstance(tree, list):
            for item in tree:
                collect(item)
        else:
            names.append("")

    if output is not None:
        args = output.args.get("tuple", []) if isinstance(output.args, dict) else []
        collect(args[0] if args else [])
    return names


def node_named(graph: RecordedGraph, name: str) -> GraphNode | None:
    return next((node for node in graph.nodes if node.name == name), None)


def ancestors(graph: RecordedGraph, names: Iterable[str]) -> set[str]:
    """All nodes that these come from, and these."""
    reads = {node.name: nodes_read(node) for node in graph.nodes}
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += reads.get(name, ())
    return found


def suspects(graph: RecordedGraph, wrong: list[str], fine: list[str]) -> list[str]:
    """Nodes that every wrong result comes from and no right one: a kernel of these is at fault."""
    inputs = {node.name for node in graph.inputs}
    common = set.intersection(*(ancestors(graph, [name]) for name in wrong))
    common -= ancestors(graph, fine) | inputs
    return [node.name for node in graph.nodes if node.name in common]


def last_write(graph: RecordedGraph, name: str) -> GraphNode | None:
    """The last node that writes in place to what comes of an input."""
    for node in reversed(graph.nodes):
        if not (node.target.endswith("_") or node.target in _WRITE) or node.kind == "input":
            continue
        args = node.args.get("tuple") if isinstance(node.args, dict) else None
        if args and name in ancestors(graph, [node_name(args[0])]):
            return node
    return None


_WRITE = frozenset(
    f"operator.{name}" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv")
)


def graphs_called(graph: RecordedGraph, node: GraphNode) -> list[str]:
    """The graphs that a node is given to run."""
    targets = {each.name: each.target for each in graph.nodes if each.kind == "graph"}
    return [targets[name] for name in nodes_read(node) if name in targets]
