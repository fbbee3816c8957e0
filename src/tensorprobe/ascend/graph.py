"""GE graphs as text dumps: which op is it, who feeds it, in what shapes, types and formats."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.ascend.artefact_files import files_below, open_file, require_file
from tensorprobe.ascend.dump import MAX_DIMS
from tensorprobe.ascend.element_types import dtype_of_name, ge_dtype, proto_dtype
from tensorprobe.ascend.textproto import MAX_DEPTH, Message, Word, most_parts, parse_text
from tensorprobe.errors import BadArtefact

MAX_FILE_NBYTES = 1 << 30
_FUSION = "_datadump_original_op_names"
_STAGE = re.compile(r"^ge_(?:proto|onnx)_(\d+)(?:_graph_(\d+))?_(.+)\.(?:txt|pbtxt)$")


class TensorDesc(msgspec.Struct, frozen=True):
    """What a graph says of one input or output. -1 in a shape: known only at run time."""

    shape: tuple[int, ...]
    dtype: str
    format: str
    origin_shape: tuple[int, ...] | None = None
    origin_format: str | None = None
    name: str | None = None

    @property
    def is_dynamic(self) -> bool:
        return any(size < 0 for size in self.shape)


class Edge(msgspec.Struct, frozen=True):
    """Where an input comes from: an op's n-th output.

    `source` is the op that makes the value, where `op` only passes it into or out of a subgraph.
    """

    op: str
    index: int
    op_type: str | None = None
    source: str | None = None
    source_type: str | None = None

    @property
    def producer(self) -> str:
        return self.source or self.op

    def __str__(self) -> str:
        text = f"{self.op}:{self.index}" + (f" ({self.op_type})" if self.op_type else "")
        return text + (f", that is {self.source} ({self.source_type})" if self.source else "")


class Op(msgspec.Struct, frozen=True):
    """One node of a graph."""

    name: str
    type: str
    graph: str
    path: Path
    edges: tuple[Edge | None, ...]
    controls: tuple[str, ...]
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]
    attributes: dict[str, Any]
    stream_id: int | None = None
    id: int | None = None
    subgraphs: tuple[str, ...] = ()

    @property
    def kernel(self) -> str | None:
        """The device function: named by an attribute, in graphs of the Build stage only."""
        for key in (f"{self.name}_kernelname", "_kernelname", "_tbe_kernel_name_for_load"):
            if isinstance(self.attributes.get(key), str):
                return str(self.attributes[key])
        for key, value in self.attributes.items():
            if key.endswith("_kernelname") and isinstance(value, str):
                return value
        return None

    @property
    def fused_from(self) -> tuple[str, ...]:
        """The ops this one was fused from, where the graph says so."""
        value = self.attributes.get(_FUSION)
        names = value if isinstance(value, list) else [value] if value else []
        return tuple(str(name) for name in names if name)

    @property
    def is_dynamic(self) -> bool:
        unknown = self.attributes.get("_is_unknown_shape") in (True, 1)
        return unknown or any(desc.is_dynamic for desc in (*self.inputs, *self.outputs))

    @property
    def own_attributes(self) -> dict[str, Any]:
        """The attributes of the operator itself, without those that the compiler added."""
        return {key: value for key, value in self.attributes.items() if _is_own(key, self.name)}


_COMPILER_KEYS = re.compile(
    r"^(?:_.*|tvm_.*|op_para_size|compile_info_.*|imply_type|INPUT_IS_VAR|OUTPUT_IS_VAR|"
    r"is_first_node|is_last_node|fe_.*|isCheckSupported|src_graph.*|support_dynamicshape|"
    r"format_for_int|continuous_.*|reference|NeedReCompile|op_kernel_lib.*|kernel_list_first_name|"
    r"atomic_.*|.*_kernelname|.*_pattern|need_infer_again.*|OwnerGraphIsUnknown|invalid_format.*|"
    r"t_in_datatype|t_out_datatype|is_static_graph_infer.*|input_desc_.*|output_desc_.*|dst_name|"
    r"dst_index|src_name|src_index|input_i|output_i|input_name|is_input_const|id|stream_id|"
    r"workspace.*|op_func_name|op_file_path|has_out_attr|dynamic_.*|slice_info.*|"
    r"globalworkspace_.*|opt_module.*|fusion_.*|INPUT_OUTPUT_.*|memory_.*|ub_atomic.*|"
    r"core_type_value|input_para_type_list|optionalInputMode|tbe_op_.*|wspMode|LxFusion.*|op_def|"
    r"node_def|framework_type|original_type)$"
)


def _is_own(key: str, op_name: str) -> bool:
    return not _COMPILER_KEYS.match(key) and not key.startswith(f"{op_name}_")


class Graph(msgspec.Struct, frozen=True):
    """All ops of one file, subgraphs included."""

    path: Path
    ops: tuple[Op, ...]

    @property
    def stage(self) -> str:
        match = _STAGE.match(self.path.name)
        return match[3] if match else ""


def read_graph(path: Path | str) -> Graph:
    """Read a ge_proto text graph, a ge_onnx pbtxt or the JSON that `atc --mode=5` makes."""
    path = Path(path)
    text = _read_text(path)
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        root = _from_json(path, text)
    else:
        root = parse_text(text, path)
    ops = tuple(_resolved(list(_ops(root, path))))
    if not ops:
        raise BadArtefact(
            f"{path}: no op in it (fields: {', '.join(list(root)[:5]) or 'none'}); expected a GE "
            "graph: ge_proto_*.txt, ge_onnx_*.pbtxt or JSON made by atc --mode=5"
        )
    return Graph(path, ops)


def _read_text(path: Path) -> str:
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_FILE_NBYTES:
            raise BadArtefact(
                f"{path}: {nbytes} bytes; expected at most {MAX_FILE_NBYTES}. Dump the "
                "graph without weights: export DUMP_GE_GRAPH=2"
            )
        head = file.read(1 << 12)
        if b"\0" in head:
            raise BadArtefact(
                f"{path}: at byte {head.index(0)}: binary data; expected a graph as text"
            )
        return (head + file.read(nbytes)).decode("utf-8", "replace")


def graph_files(paths: Sequence[Path]) -> list[Path]:
    """The graph files among paths and in directories, the last build stage first."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += files_below(path, _is_graph, links=True)
            if not found:
                every = files_below(path, lambda file: file.suffix == ".json", links=True)
                found += (file for file in every if b'"op"' in _head(file))
        else:
            require_file(path)
            found.append(path)
    return sorted(dict.fromkeys(found), key=_newest_build_first)


def _is_graph(path: Path) -> bool:
    suffixes = (".txt", ".pbtxt", ".json")
    return path.name.startswith(("ge_proto", "ge_onnx")) and path.suffix in suffixes


def _head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(1 << 16)


def _newest_build_first(path: Path) -> tuple[bool, bool, int, str]:
    match = _STAGE.match(path.name)
    number, stage = (int(match[1]), match[3]) if match else (0, "")
    # Kernel names are in ge_proto files of the Build stage only.
    return not stage.endswith("Build"), path.suffix == ".pbtxt", -number, path.name


# --- from a parsed file to ops --------------------------------------------------------------


def _ops(root: Message, path: Path) -> Iterator[Op]:
    graphs = [graph for graph in root.get("graph", []) if isinstance(graph, dict)]
    if not graphs and "op" in root:
        graphs = [root]
    for graph in graphs:
        if "node" in graph:
            yield from _onnx_ops(graph, path)
        else:
            yield from _ge_ops(graph, path)


def _ge_ops(graph: Message, path: Path) -> Iterator[Op]:
    name = str(_one(graph, "name", ""))
    for op in graph.get("op", []):
        if isinstance(op, dict):
            yield _ge_op(op, name, path)


def _ge_op(op: Message, graph: str, path: Path) -> Op:
    edges: list[Edge | None] = []
    controls: list[str] = []
    for text in op.get("input", []):
        edge = _edge(str(text))
        if edge is not None and edge.index < 0:
            controls.append(edge.op)
        else:
            edges.append(edge)
    name = str(_one(op, "name", ""))
    where = f"{path}: op {name}"
    inputs = tuple(_desc(desc, where) for desc in _messages(op.get("input_desc", [])))
    outputs = tuple(_desc(desc, where) for desc in _messages(op.get("output_desc", [])))
    if len(inputs) < len(edges):  # optional inputs that are not there have an edge and no desc
        edges = [edge for edge in edges if edge is not None]
    attributes = _attributes(op.get("attr", []))
    return Op(
        name, str(_one(op, "type", "")), graph, path, tuple(edges),
        tuple(controls), _named(inputs, attributes, "input"),
        _named(outputs, attributes, "output"), attributes,
        _int(_one(op, "stream_id", None)), _int(_one(op, "id", None)),
        tuple(str(name) for name in op.get("subgraph_name", [])),
    )  # fmt: skip


def _named(
    descs: tuple[TensorDesc, ...], attributes: dict[str, Any], side: str
) -> tuple[TensorDesc, ...]:
    """With the names the operator's definition gives its inputs or outputs."""
    keys, values = attributes.get(f"_{side}_name_key"), attributes.get(f"_{side}_name_value")
    if not isinstance(keys, list) or not isinstance(values, list):
        return descs
    pairs = zip(values, keys, strict=False)
    names = {index: key for index, key in pairs if _int(index) is not None}
    return tuple(
        msgspec.structs.replace(desc, name=str(names[i])) if i in names and not desc.name else desc
        for i, desc in enumerate(descs)
    )


def _edge(text: str) -> Edge | None:
    if not text:
        return None
    op, _, index = text.rpartition(":")
    number = _int(index)
    return Edge(text, 0) if not op or number is None else Edge(op, number)


def _desc(desc: Message, where: str) -> TensorDesc:
    attributes = _attributes(desc.get("attr", []))
    shape = _one(desc, "shape", {})
    dims = shape.get("dim", []) if isinstance(shape, dict) else []
    origin = attributes.get("origin_shape")
    layout = attributes.get("origin_format")
    return TensorDesc(
        _shape(dims, where),
        _dtype(_one(desc, "dtype", 0)),
        str(_one(desc, "layout", "ND")),
        _shape(origin, where) if isinstance(origin, list) else None,
        layout if isinstance(layout, str) else None,
        str(desc["name"][0]) if desc.get("name") else None,
    )


def _dims(values: Any) -> tuple[int, ...]:
    numbers = (_int(value) for value in values) if isinstance(values, list) else ()
    return tuple(number for number in numbers if number is not None)


def _shape(values: Any, where: str) -> tuple[int, ...]:
    dims = _dims(values)
    if len(dims) > MAX_DIMS:
        raise BadArtefact(f"{where}: a shape of {len(dims)} sizes; expected at most {MAX_DIMS}")
    return dims


def _dtype(value: Any) -> str:
    number = _int(value)
    return dtype_of_name(str(value)) if number is None else proto_dtype(number)


def _int(value: Any) -> int | None:
    """JSON writes 64-bit integers as strings."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and len(value) < 21 and value.removeprefix("-").isdecimal():
        value = int(value)
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 64 else None


def _one(message: Message, key: str, default: Any) -> Any:
    values = message.get(key)
    return values[-1] if values else default


_SCALARS = ("s", "i", "f", "b", "bt", "expression")
_LISTS = ("s", "i", "f", "b", "bt")


def _attributes(entries: Iterable[Any]) -> dict[str, Any]:
    return {
        str(_one(entry, "key", "")): _attribute(_one(entry, "value", {}))
        for entry in entries
        if isinstance(entry, dict)
    }


def _attribute(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in _SCALARS:
        if key in value:
            return _scalar(key, value[key][-1])
    if "dt" in value:  # not the numbering of `dtype`
        number = _int(value["dt"][-1])
        return ge_dtype(number) if number is not None else str(value["dt"][-1])
    if "list" in value:
        return _attribute_list(_one(value, "list", {}))
    if "list_list_int" in value:
        return [
            _dims(inner.get("list_i", []))
            for outer in _messages(value["list_list_int"])
            for inner in _messages(outer.get("list_list_i", []))
        ]
    if "t" in value or "td" in value:
        return "<tensor>"
    if "g" in value:
        return "<graph>"
    if "func" in value:
        functions = _messages(value["func"])
        return str(_one(functions[-1], "name", "<function>")) if functions else "<function>"
    return None


def _messages(values: list[Any]) -> list[Message]:
    return [value for value in values if isinstance(value, dict)]


def _attribute_list(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        return []
    for key in _LISTS:
        if key in value:
            return [_scalar(key, item) for item in value[key]]
    if "dt" in value:
        return [ge_dtype(_int(item) or 0) for item in value["dt"]]
    return ["<value>" for key in ("t", "td", "g", "na") for _ in value.get(key, [])]


def _scalar(key: str, value: Any) -> Any:
    if key == "b":
        return value in ("true", "True", "t", 1, True)
    if key == "i":
        number = _int(value)
        return value if number is None else number
    if key == "f":
        return _float(value)
    return str(value) if isinstance(value, Word) else value


def _float(value: Any) -> Any:
    """A Word may be `inf` or `nan`; what is no number stays as it is."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _onnx_ops(graph: Message, path: Path) -> Iterator[Op]:
    """ge_onnx: descriptions are attributes (`input_desc_shape:0`), subgraphs nodes of their own."""
    name = str(_one(graph, "name", ""))
    for node in graph.get("node", []):
        if not isinstance(node, dict):
            continue
        values = {
            str(_one(item, "name", "")): item
            for item in node.get("attribute", [])
            if isinstance(item, dict)
        }
        for item in values.values():
            for inner in item.get("g", []):
                if isinstance(inner, dict):
                    yield from _onnx_ops(inner, path)
        op_type = str(_one(node, "op_type", "")).removeprefix("ge:")
        if op_type == "subgraph":
            continue
        attributes = {key: _onnx_value(item) for key, item in values.items()}
        edges = [_edge(str(text)) for text in node.get("input", [])]
        node_name = str(_one(node, "name", ""))
        where = f"{path}: op {node_name}"
        yield Op(
            node_name, op_type, name, path,
            tuple(e for e in edges if e is None or e.index >= 0),
            tuple(e.op for e in edges if e is not None and e.index < 0),
            tuple(_onnx_descs(attributes, "input", where)),
            tuple(_onnx_descs(attributes, "output", where)),
            {k: v for k, v in attributes.items() if not re.match(r"(?:in|out)put_desc_", k)},
            _int(attributes.get("stream_id")), _int(attributes.get("id")),
        )  # fmt: skip


def _onnx_value(item: Message) -> Any:
    kind = str(_one(item, "type", ""))
    if kind in ("INTS", "FLOATS", "STRINGS") or len(item.get("ints", [])) > 0:
        return [*item.get("ints", []), *item.get("floats", []), *item.get("strings", [])]
    for key, default in (("s", ""), ("i", 0), ("f", 0.0)):
        if key in item:
            return item[key][-1]
        if {"s": "STRING", "i": "INT", "f": "FLOAT"}[key] == kind:
            return default
    return None


def _onnx_descs(attributes: dict[str, Any], side: str, where: str) -> Iterator[TensorDesc]:
    index = 0
    while (dtype := attributes.get(f"{side}_desc_dtype:{index}")) is not None:
        origin = attributes.get(f"{side}_desc_origin_shape:{index}")
        layout = attributes.get(f"{side}_desc_origin_layout:{index}")
        yield TensorDesc(
            _shape(attributes.get(f"{side}_desc_shape:{index}"), where),
            dtype_of_name(str(dtype)),
            str(attributes.get(f"{side}_desc_layout:{index}", "ND")),
            _shape(origin, where) if isinstance(origin, list) else None,
            str(layout) if layout else None,
        )
        index += 1


def _from_json(path: Path, text: str) -> Message:
    parts, limit = text.count("{") + text.count("["), most_parts(len(text))
    if parts > limit:
        raise BadArtefact(f"{path}: {parts} objects and lists; expected at most {limit}")
    try:
        message = _listed(json.loads(text), 0)
    except (ValueError, RecursionError) as error:
        raise BadArtefact(f"{path}: no JSON ({error}); expected the output of atc") from error
    return message if isinstance(message, dict) else {}


def _listed(value: Any, depth: int) -> Any:
    """JSON in the shape the text format has: every field a list."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_listed(item, depth + 1) for item in value]
    if isinstance(value, dict):
        listed = {key: _listed(item, depth + 1) for key, item in value.items()}
        return {key: item if isinstance(item, list) else [item] for key, item in listed.items()}
    return value


_MAX_HOPS = 32  # through nested subgraphs; a hostile graph may call itself


class _Subgraphs:
    """How values pass between graphs: in through Data ops, out through NetOutput."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = {(op.graph, op.name): op for op in ops}
        self.any_graph = {op.name: op for op in ops}
        self.callers = {name: op for op in ops for name in op.subgraphs}
        self.results = {op.graph: op for op in ops if op.type == "NetOutput"}

    def find(self, graph: str, name: str) -> Op | None:
        return self.ops.get((graph, name)) or self.any_graph.get(name)

    def source(self, graph: str, edge: Edge) -> Op | None:
        """The op that makes the value of an edge, when another graph does."""
        op, index, hops = self.find(graph, edge.op), edge.index, 0
        while op is not None and hops < _MAX_HOPS:
            hops += 1
            place = op.attributes.get("_parent_node_index")
            if op.type == "Data" and isinstance(place, int) and op.graph in self.callers:
                step, index = self.callers[op.graph], place
            elif op.subgraphs and op.subgraphs[0] in self.results:
                step = self.results[op.subgraphs[0]]
            else:
                return op if hops > 1 else None
            onward = step.edges[index] if 0 <= index < len(step.edges) else None
            if onward is None:
                return None
            op, index = self.find(step.graph, onward.op), onward.index
        return None


def _resolved(ops: list[Op]) -> Iterator[Op]:
    """Edges with the type of the op they come from, and the real one behind subgraphs."""
    graphs = _Subgraphs(ops)
    for op in ops:
        edges: list[Edge | None] = []
        for edge in op.edges:
            if edge is not None:
                near, far = graphs.find(op.graph, edge.op), graphs.source(op.graph, edge)
                edge = Edge(
                    edge.op, edge.index, near.type if near else None,
                    far.name if far else None, far.type if far else None,
                )  # fmt: skip
            edges.append(edge)
        yield msgspec.structs.replace(op, edges=tuple(edges))


# --- finding one op -------------------------------------------------------------------------

_KERNEL_END = re.compile(r"(?:__kernel\d{1,20}|_mix_ai[cv])$")


def kernel_base(kernel: str) -> str:
    """A device function's name without what is appended per function: that of its files."""
    base = kernel.strip()
    end = len(base)
    while match := _KERNEL_END.search(base, max(0, end - 30), end):
        end = match.start()
    return base[:end]


def flattened(name: str) -> str:
    """A node's name as it is in the name of its dump."""
    return re.sub(r"[./\\ ]", "_", name)


def find_ops(
    graphs: Iterable[Graph], *, name: str | None = None, kernel: str | None = None
) -> list[Op]:
    """The ops of that node name, that kernel, or both; all of them when several fit.

    Several ops may share one kernel: with both given, those that agree on both come alone.
    """
    every = [op for graph in graphs for op in graph.ops]
    by_name = [op for op in every if name is not None and op.name == name]
    if name is not None and not by_name:
        by_name = [op for op in every if flattened(op.name) == flattened(name)]
    base = kernel_base(kernel) if kernel is not None else None
    by_kernel = [op for op in every if base and op.kernel and kernel_base(op.kernel) == base]
    if name is None or kernel is None:
        return _distinct(by_name or by_kernel)
    of_kernel = set(map(id, by_kernel))
    both = [op for op in by_name if id(op) in of_kernel]
    return _distinct(both or by_kernel or by_name)


def node_of_kernel_name(kernel_name: str, graphs: Iterable[Graph]) -> str | None:
    """The node in a `fault kernel_name`: the longest op name behind a prefix of numbers."""
    best: str | None = None
    for graph in graphs:
        for op in graph.ops:
            if (
                op.name
                and kernel_name.endswith(op.name)
                and re.fullmatch(r"[-\d_]*", kernel_name[: -len(op.name)])
                and len(op.name) > len(best or "")
            ):
                best = op.name
    return best


def _distinct(ops: list[Op]) -> list[Op]:
    """One op is in many stages: the first file (the last build) speaks for it."""
    first: dict[tuple[str, str], Op] = {}
    for op in ops:
        known = first.setdefault((op.name, op.type), op)
        if known.kernel is None and op.kernel is not None:
            first[op.name, op.type] = op
    return list(first.values())
