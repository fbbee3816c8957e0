"""Graphs: one op found by name or kernel, in every form a graph is dumped in."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
from ascend_files import KERNEL, graph_text, shared_data
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.ascend.graph import (
    _ops,
    find_ops,
    graph_files,
    kernel_base,
    node_of_kernel_name,
    read_graph,
)
from tensorprobe.ascend.textproto import Word, parse_text
from tensorprobe.cli.main import main
from tensorprobe.errors import BadArtefact

HERE = Path("t.txt")


def parse(text: str) -> dict:
    return parse_text(text, HERE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a: 1 a: -2 a: 0x10 a: 010", {"a": [1, -2, 16, 8]}),
        ("f: 1.5 f: -2e3 f: .5 f: 1f", {"f": [1.5, -2000.0, 0.5, 1.0]}),
        ("w: DT_FLOAT w: true w: -inf", {"w": ["DT_FLOAT", "true", "-inf"]}),
        ('s: "a: b { c } \\" \\\\ \\n"', {"s": ['a: b { c } " \\ \n']}),
        ("s: 'single' \"and\" 'more'", {"s": ["singleandmore"]}),
        ('s: "\\303\\251\\x41"', {"s": ["\u00e9A"]}),
        ('s: "\\377"', {"s": ["\u00ff"]}),
        ("m { a: 1 } m: { a: 2 } m < a: 3 >", {"m": [{"a": [1]}, {"a": [2]}, {"a": [3]}]}),
        ("a: [1, 2, 3] # comment\nb: 1; c: 2,", {"a": [1, 2, 3], "b": [1], "c": [2]}),
        ("m {\n}\n", {"m": [{}]}),
        ("[pkg.ext] { a: 1 }", {"[pkg.ext]": [{"a": [1]}]}),
    ],
)
def test_the_text_format(text: str, expected: dict) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["a {", "a { b: 1", "}", 'a: "x', "a:", "a: @", "@", "a: [1, {}]", "m {" * 300]
)
def test_broken_text_says_where(text: str) -> None:
    with pytest.raises(BadArtefact, match=r"t\.txt: line \d+ .*; expected"):
        parse(text)


@pytest.mark.slow
def test_a_file_of_braces_is_refused_in_bounded_memory() -> None:
    with pytest.raises(BadArtefact, match="2260000 messages"):
        parse("a{}" * 6_000_000)


def test_words_are_no_strings() -> None:
    assert isinstance(parse("a: DT_INT8")["a"][0], Word)
    assert not isinstance(parse('a: "DT_INT8"')["a"][0], Word)


def test_the_op_of_the_guide(tmp_path: Path) -> None:
    path = tmp_path / "ge_proto_00000011_Build.txt"
    path.write_text(graph_text())
    graph = read_graph(path)
    assert graph.stage == "Build"
    (op,) = find_ops([graph], kernel=f"{KERNEL}__kernel0")
    assert (op.name, op.type, op.kernel) == ("L2Loss", "L2Loss", f"{KERNEL}__kernel0")
    assert [(e.op, e.index, e.op_type) for e in op.edges] == [("Variable", 0, "Variable")]
    assert op.controls == ("atomic_addr_clean0_11_0",)
    assert (op.inputs[0].shape, op.inputs[0].dtype, op.inputs[0].format) == (
        (62, 62), "float32", "ND"
    )  # fmt: skip
    assert op.inputs[0].origin_shape == (62, 62)
    assert op.outputs[0].shape == op.outputs[0].origin_shape == ()
    assert op.fused_from == ("loss/L2Loss",)
    assert op.own_attributes == {"T": "float32"}  # dt: the other numbering
    assert not op.is_dynamic


def test_names_with_slashes_and_flattened_ones(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text('graph { op { name: "a/b.c" type: "Add" } op { name: "1x" type: "Mul" } }')
    graph = read_graph(path)
    assert find_ops([graph], name="a_b_c")[0].name == "a/b.c"
    assert node_of_kernel_name("2_0_11_a/b.c", [graph]) == "a/b.c"
    assert node_of_kernel_name("0_1_1x", [graph]) == "1x"
    assert node_of_kernel_name("0_1_other", [graph]) is None


@pytest.mark.parametrize(
    ("kernel", "base"),
    [
        ("te_add_1_2__kernel0", "te_add_1_2"),
        ("F_58_1000_mix_aic", "F_58_1000"),
        ("te_x_1__kernel0_mix_aiv", "te_x_1"),
        ("plain", "plain"),
    ],
)
def test_the_base_of_a_kernel(kernel: str, base: str) -> None:
    assert kernel_base(kernel) == base


def test_shared_kernels_are_told_apart_by_the_node(tmp_path: Path) -> None:
    attr = 'attr { key: "_kernelname" value { s: "k__kernel0" } }'
    path = tmp_path / "g.txt"
    path.write_text(
        f'graph {{ op {{ name: "a" type: "Add" {attr} }} op {{ name: "b" type: "Add" {attr} }} }}'
    )
    graph = read_graph(path)
    assert [op.name for op in find_ops([graph], kernel="k")] == ["a", "b"]
    assert [op.name for op in find_ops([graph], kernel="k", name="b")] == ["b"]


def test_atc_json(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    desc = {
        "dtype": "DT_FLOAT16",
        "shape": {"dim": ["2", 3]},
        "layout": "NHWC",
        "attr": [{"key": "origin_format", "value": {"s": "NCHW"}}],
    }
    op = {
        "name": "c", "type": "Cast", "input": ["x:1", "y:-1"], "input_desc": [desc],
        "output_desc": [desc],
        "attr": [
            {"key": "dst_type", "value": {"i": "0"}}, {"key": "l", "value": {"list": {"i": [1]}}}
        ],
    }  # fmt: skip
    path.write_text(json.dumps({"name": "m", "graph": [{"name": "g", "op": [op]}]}))
    (found,) = read_graph(path).ops
    assert (found.inputs[0].shape, found.inputs[0].dtype) == ((2, 3), "float16")
    assert found.inputs[0].origin_format == "NCHW"
    assert (found.edges[0].op, found.edges[0].index, found.controls) == ("x", 1, ("y",))
    assert found.own_attributes == {"dst_type": 0, "l": [1]}


def test_a_graph_that_calls_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text(
        'graph { name: "g" op { name: "call" type: "Call" input: "d:0" subgraph_name: "g" } '
        'op { name: "d" type: "Data" attr { key: "_parent_node_index" value { i: 0 } } } '
        'op { name: "out" type: "NetOutput" input: "call:0" } }'
    )
    assert len(read_graph(path).ops) == 3


ONNX = """ir_version: 6
producer_name: "GE"
graph {
  node { name: "sub" op_type: "subgraph" }
  node {
    input: "Unique:0"
    input: "clean:-1"
    output: "GatherV2:0"
    name: "GatherV2"
    op_type: "ge:GatherV2"
    attribute { name: "input_desc_dtype:0" s: "DT_FLOAT" type: STRING }
    attribute { name: "input_desc_layout:0" s: "ND" type: STRING }
    attribute { name: "input_desc_shape:0" ints: 64 ints: 2 type: INTS }
    attribute { name: "input_desc_origin_shape:0" ints: 64 ints: 2 type: INTS }
    attribute { name: "output_desc_dtype:0" s: "DT_INT32" type: STRING }
    attribute { name: "output_desc_shape:0" type: INTS }
    attribute { name: "batch_dims" type: INT }
    attribute {
      name: "body"
      g { name: "inner" node { name: "deep" op_type: "ge:Add" } }
      type: GRAPH
    }
  }
}
"""


def test_ge_onnx(tmp_path: Path) -> None:
    path = tmp_path / "ge_onnx_00000001_graph_11_Build.pbtxt"
    path.write_text(ONNX)
    graph = read_graph(path)
    assert {op.name for op in graph.ops} == {"deep", "GatherV2"}
    (op,) = find_ops([graph], name="GatherV2")
    assert (op.type, op.inputs[0].shape, op.inputs[0].dtype) == ("GatherV2", (64, 2), "float32")
    assert (op.outputs[0].dtype, op.outputs[0].shape) == ("int32", ())
    assert op.controls == ("clean",)
    assert op.attributes["batch_dims"] == 0


def test_the_last_build_comes_first(tmp_path: Path) -> None:
    for name in (
        "ge_proto_00000001_PreRunBegin.txt",
        "ge_proto_00000009_Build.txt",
        "ge_proto_00000010_graph_1_Build.txt",
        "ge_onnx_00000010_graph_1_Build.pbtxt",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "other.log").write_text("")
    assert [p.name for p in graph_files([tmp_path])] == [
        "ge_proto_00000010_graph_1_Build.txt",
        "ge_proto_00000009_Build.txt",
        "ge_onnx_00000010_graph_1_Build.pbtxt",
        "ge_proto_00000001_PreRunBegin.txt",
    ]


def test_the_verb(tmp_path: Path, capsys) -> None:
    path = tmp_path / "ge_proto_00000011_Build.txt"
    path.write_text(graph_text())
    assert main(["ascend", "graph", str(tmp_path), "--kernel", KERNEL]) == 0
    assert capsys.readouterr().out == (
        "L2Loss (L2Loss)\n"
        f"  graph   ge_default_20211201033720_11 in {path}\n"
        f"  kernel  {KERNEL}__kernel0\n"
        "  fused from loss/L2Loss\n"
        "  input 0: float32 [62, 62] ND, from Variable:0 (Variable)\n"
        "  output 0: float32 [] ND\n"
        "  after   atomic_addr_clean0_11_0\n"
        "  T = 'float32'\n"
    )
    assert main(["ascend", "graph", str(path), "--kernel", "0_11_L2Loss", "--json"]) == 0
    (op,) = json.loads(capsys.readouterr().out)
    assert op["inputs"][0]["from"] == "Variable:0"
    assert main(["ascend", "graph", str(path), "--op", "L2"]) == 1
    assert "Near: L2Loss" in capsys.readouterr().err
    (tmp_path / "ge_proto_00000012_Build.txt").write_text("graph {")
    assert main(["ascend", "graph", str(tmp_path), "--op", "L2Loss"]) == 0
    assert "closing braces" in capsys.readouterr().err
    (tmp_path / "bad.txt").write_text("nothing: 1")
    assert main(["ascend", "graph", str(tmp_path / "bad.txt"), "--op", "x"]) == 1


def synthetic_graph(ops: int) -> str:
    parts = ["graph {", '  name: "g"']
    for n in range(ops):
        attributes = "".join(
            f'    attr {{\n      key: "_key{i}"\n      value {{\n        list {{\n'
            f"          i: {i}\n          i: 1\n          val_type: VT_LIST_INT\n"
            "        }\n      }\n    }\n"
            for i in range(40)
        )
        parts.append(
            f'  op {{\n    name: "op{n}"\n    type: "Conv2D"\n    input: "op{n - 1}:0"\n'
            f'    attr {{\n      key: "_info"\n      value {{\n        s: "{{\\"a\\": [1]}}"\n'
            f"      }}\n    }}\n{attributes}  }}"
        )
    return "\n".join([*parts, "}"])


def test_megabytes_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    text = synthetic_graph(600)
    path.write_text(text)
    assert len(text) > 3_400_000
    began = time.process_time()
    assert len(read_graph(path).ops) == 600
    assert time.process_time() - began < 2


# --- python-protobuf as the oracle ----------------------------------------------------------


@functools.cache
def model_def():
    """Enough of ge.proto.ModelDef for real files, built here."""
    kinds = {"str": 9, "bytes": 12, "i64": 3, "u32": 13, "f": 2, "b": 8}
    layout = {
        "Shape": [("dim", 1, "i64", 3)],
        "AttrEntry": [("key", 1, "str", 1), ("value", 2, "Attr", 1)],
        "List": [
            ("s", 2, "bytes", 3), ("i", 3, "i64", 3), ("f", 4, "f", 3), ("b", 5, "b", 3),
            ("dt", 12, "i64", 3), ("val_type", 20, "ValType", 1),
        ],
        "Attr": [
            ("list", 1, "List", 1), ("s", 2, "bytes", 1), ("i", 3, "i64", 1), ("f", 4, "f", 1),
            ("b", 5, "b", 1), ("dt", 15, "i64", 1),
        ],
        "Desc": [
            ("name", 1, "str", 1), ("dtype", 2, "DataType", 1), ("shape", 3, "Shape", 1),
            ("layout", 4, "str", 1), ("attr", 5, "AttrEntry", 3), ("size", 10, "i64", 1),
        ],
        "Op": [
            ("name", 1, "str", 1), ("type", 2, "str", 1), ("input", 5, "str", 3),
            ("attr", 10, "AttrEntry", 3), ("id", 21, "i64", 1), ("stream_id", 22, "i64", 1),
            ("input_desc", 33, "Desc", 3), ("output_desc", 34, "Desc", 3),
        ],
        "Graph": [("name", 1, "str", 1), ("op", 6, "Op", 3), ("attr", 11, "AttrEntry", 3)],
        "Model": [("name", 1, "str", 1), ("graph", 7, "Graph", 3), ("attr", 11, "AttrEntry", 3)],
    }  # fmt: skip
    enums = {
        "DataType": ["DT_UNDEFINED", "DT_FLOAT", "DT_FLOAT16", "DT_INT8", "DT_UINT8", "DT_INT16",
                     "DT_UINT16", "DT_INT32", "DT_INT64", "DT_UINT32", "DT_UINT64", "DT_BOOL",
                     "DT_DOUBLE", "DT_STRING"],
        "ValType": ["VT_LIST_NONE", "VT_LIST_STRING", "VT_LIST_INT", "VT_LIST_FLOAT",
                    "VT_LIST_BOOL", "VT_LIST_BYTES", "VT_LIST_TENSOR_DESC", "VT_LIST_TENSOR",
                    "VT_LIST_GRAPH", "VT_LIST_NAMED_ATTRS", "VT_LIST_DATA_TYPE"],
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="ge.proto", package="g", syntax="proto3")
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for field, tag, kind, label in fields:
            entry = message.field.add(name=field, number=tag, label=label)
            entry.type = kinds.get(kind, 14 if kind in enums else 11)
            if kind not in kinds:
                entry.type_name = f".g.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("g.Model"))


def compare_with_protobuf(path: Path) -> None:
    model = model_def()()
    text_format.Parse(path.read_bytes(), model, allow_unknown_field=True)
    theirs = [op for graph in model.graph for op in graph.op]
    ours = read_graph(path).ops
    assert [op.name for op in ours] == [op.name for op in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.type == other.type
        for descs, descriptors in (
            (mine.inputs, other.input_desc),
            (mine.outputs, other.output_desc),
        ):
            assert [d.shape for d in descs] == [tuple(d.shape.dim) for d in descriptors]
            assert [d.format for d in descs] == [d.layout or "ND" for d in descriptors]
        for entry in other.attr:
            value = entry.value
            if value.s:
                assert mine.attributes[entry.key].encode("utf-8", "surrogateescape") == value.s
            elif value.i:
                assert mine.attributes[entry.key] == value.i
            elif value.list.i:
                assert mine.attributes[entry.key] == list(value.list.i)


def test_as_protobuf_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text(graph_text())
    compare_with_protobuf(path)
    path.write_text(synthetic_graph(5))
    compare_with_protobuf(path)


texts = st.one_of(st.text(max_size=12), st.sampled_from(['{"a": [1]}', "a: b", "\\", "'", "\n#"]))
integers = st.integers(-(2**63), 2**63 - 1)
attributes = st.one_of(
    texts.map(lambda s: ("s", s.encode())),
    integers.map(lambda i: ("i", i)),
    st.floats(width=32).map(lambda f: ("f", f)),
    st.booleans().map(lambda b: ("b", b)),
    st.lists(integers, max_size=4).map(lambda v: ("list", v)),
)
operators = st.tuples(
    texts, texts, st.lists(integers, max_size=4), st.dictionaries(texts, attributes)
)


@settings(max_examples=80, deadline=None)
@given(many=st.lists(operators, min_size=1, max_size=3), one_line=st.booleans())
def test_whatever_protobuf_prints_is_read_the_same(many, one_line) -> None:
    model = model_def()()
    graph = model.graph.add(name="g")
    for name, op_type, dims, values in many:
        op = graph.op.add(name=name, type=op_type)
        op.input_desc.add(dtype=1).shape.dim.extend(dims)
        for key, (kind, value) in values.items():
            entry = op.attr.add(key=key).value
            if kind == "list":
                entry.list.i.extend(value)
                entry.list.val_type = 2
            else:
                setattr(entry, kind, value)
    text = text_format.MessageToString(model, as_one_line=one_line)
    ours = list(_ops(parse(text), HERE))
    assert [(op.name, op.type) for op in ours] == [(name, kind) for name, kind, _, _ in many]
    for mine, (_, _, dims, values) in zip(ours, many, strict=True):
        assert mine.inputs[0].shape == tuple(dims)
        for key, (kind, value) in values.items():
            if kind == "s" and value:
                assert mine.attributes[key] == value.decode()
            elif kind == "f" and value == value and value:
                assert mine.attributes[key] == pytest.approx(value, rel=1e-6)
            elif value and kind != "f":
                assert mine.attributes[key] == value


@pytest.mark.parametrize(
    "name",
    [
        "incident-gatherv2/graph/ge_proto_00000000_Build.txt",
        "incident-gatherv2/graph/ge_proto_00000001_Build.txt",
        "incident-gatherv2d/ge_proto_00056_Build.txt",
        pytest.param(
            "graph-resnet50/ge_proto_00000062_Build.txt", marks=pytest.mark.slow
        ),  # protobuf takes long
    ],
)
def test_real_graphs_as_protobuf_reads_them(name: str) -> None:
    folder, _, file = name.partition("/")
    compare_with_protobuf(shared_data(folder) / file)


def test_the_real_resnet_in_under_two_seconds() -> None:
    path = shared_data("graph-resnet50") / "ge_proto_00000062_Build.txt"
    began = time.process_time()
    graph = read_graph(path)
    assert time.process_time() - began < 2
    assert len(graph.ops) == 170
    (op,) = find_ops([graph], kernel="te_transdata_a603142389973648_c50cf465894adb0d_1__kernel0")
    assert (op.name, op.type, op.own_attributes["dst_format"]) == (
        "trans_TransData_0", "TransData", "NC1HWC0"
    )  # fmt: skip


def test_the_real_gather_in_both_forms() -> None:
    folder = shared_data("incident-gatherv2") / "graph"
    graphs = [read_graph(path) for path in graph_files([folder])]
    (op,) = find_ops(graphs, name=node_of_kernel_name("2_0_11_GatherV2", graphs))
    assert op.path.name == "ge_proto_00000001_Build.txt"
    assert [d.name for d in op.inputs] == ["x", "indices", "axis"]
    assert op.is_dynamic
    sources = [(edge.producer, edge.source_type or edge.op_type) for edge in op.edges]
    assert sources == [
        ("Unique", "Unique"), ("GatherV2/indices", "Constant"), ("GatherV2/axis", "Constant")
    ]  # fmt: skip
    onnx = [g for g in graphs if g.path.suffix == ".pbtxt"]
    (same,) = find_ops(onnx, name="GatherV2")
    assert [d.dtype for d in same.inputs] == [d.dtype for d in op.inputs]
    assert [d.shape for d in same.inputs] == [d.shape for d in op.inputs]
