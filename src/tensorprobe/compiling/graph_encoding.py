"""Graphs of torch.fx as data: each node the name of what it calls, and its arguments as a tree."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from tensorprobe.compiling.compile_records import GraphNode, NodeKind
from tensorprobe.follow.function_mode import name_of
from tensorprobe.follow.naming import Namer
from tensorprobe.records import Special
from tensorprobe.store.tree import encode

_MAX_STACK = 8
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s*(.*))?')
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SHOWN = (str, bool, int, float, complex, type(None))


class EncodedGraph(NamedTuple):
    """The nodes of a graph, of the graphs that it calls, and the tensors that it holds."""

    nodes: tuple[GraphNode, ...]
    inner: dict[str, tuple[GraphNode, ...]]
    constants: dict[str, torch.Tensor]


class GraphEncoder:
    """Turns graphs into data."""

    def __init__(self) -> None:
        self._namer = Namer(name_of)

    def __call__(self, module: GraphModule) -> EncodedGraph:
        inner: dict[str, tuple[GraphNode, ...]] = {}
        constants: dict[str, torch.Tensor] = {}
        nodes = self._nodes(module, "", inner, constants)
        return EncodedGraph(nodes, inner, constants)

    def _nodes(
        self,
        module: GraphModule,
        path: str,
        inner: dict[str, tuple[GraphNode, ...]],
        constants: dict[str, torch.Tensor],
    ) -> tuple[GraphNode, ...]:
        graph: Graph = module.graph
        found = []
        for node in graph.nodes:
            kind, target = self._target(node)
            if node.op == "get_attr":
                value = _attribute(module, str(node.target))
                target = f"{path}{node.target}"
                if isinstance(value, GraphModule):
                    kind = "graph"
                    if target not in inner:
                        inner[target] = ()
                        inner[target] = self._nodes(value, f"{target}.", inner, constants)
                elif isinstance(value, torch.Tensor):
                    constants[target] = value
            found.append(_encoded(node, kind, target))
        return tuple(found)

    def _target(self, node: Node) -> tuple[NodeKind, str]:
        if node.op == "placeholder":
            return "input", str(node.target)
        if node.op == "output":
            return "output", ""
        if node.op == "get_attr":
            return "constant", str(node.target)
        if node.op == "call_method":
            return "method", f"torch.Tensor.{node.target}"
        if node.op == "call_module":
            return "call", f"module.{node.target}"
        target: Any = node.target
        home = getattr(target, "__module__", "") or ""
        if home in ("_operator", "math"):
            return "call", f"{home.removeprefix('_')}.{target.__name__}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            return "call", f"higher_order.{target.__name__}"
        return "call", self._namer(target).op


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _encoded(node: Node, kind: NodeKind, target: str) -> GraphNode:
    meta = node.meta
    value = meta.get("val", meta.get("example_value"))
    dtype = shape = ""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = f"[{', '.join(str(n) for n in value.shape)}]"
    aten = meta.get("original_aten")
    return GraphNode(
        name=node.name,
        kind=kind,
        target=target,
        args=_tree(node.args),
        kwargs=_tree(node.kwargs),
        stack=_stack(node.stack_trace),
        origin=_origin(meta),
        aten="" if aten is None else str(aten),
        dtype=dtype,
        shape=shape,
    )


def _origin(meta: Any) -> str:
    """The first of the nodes that this one was made from."""
    source = meta.get("from_node")
    while source:
        first = source[0]
        name, source = str(getattr(first, "name", "")), getattr(first, "from_node", None)
        if not source:
            return name
    return ""


def _stack(text: str | None) -> tuple[str, ...]:
    frames = _FRAME.findall(text or "")
    lines = [
        f"{file}:{line}, in {name}: {code.strip()}"
        for file, line, name, code in frames
        if not file.startswith(_OURS)  # dynamo looks through our mode
    ]
    return tuple(reversed(lines[-_MAX_STACK:]))


def _tree(value: Any) -> Any:
    return encode(_plain(value), lambda record: None)


def _plain(value: Any) -> Any:
    """Arguments as `store.tree` knows them."""
    if isinstance(value, Node):
        return Special("node", value.name)
    if isinstance(value, _SHOWN) and type(value) in _SHOWN:
        return value
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is ...:
        return value
    for kind, names in _NAMED.items():
        if isinstance(value, kind):
            return Special(names, str(value))
    return Special("unsupported", type(value).__name__)


_NAMED: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
