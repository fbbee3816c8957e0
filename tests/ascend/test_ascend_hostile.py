"""Ascend artefacts made to do harm: nothing of them runs, waits, escapes or exhausts."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ascend_files import (
    DUMP_NAME,
    FAILURE,
    KERNEL,
    SCREEN_LOG,
    Tensor,
    chunk,
    dump_bytes,
    graph_text,
    number,
    varint,
    write_dump,
    write_incident,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.ascend.dump import parse_dump_name, read_dump
from tensorprobe.ascend.graph import find_ops, kernel_base, read_graph
from tensorprobe.ascend.incident import CrashEvidence, incident_of_op, investigate
from tensorprobe.ascend.kernel import KernelFolder
from tensorprobe.ascend.log import MAX_FAULTS, read_logs
from tensorprobe.ascend.missing import GivenFiles, missing_pieces
from tensorprobe.ascend.opcase import CaseTensor, OpCase, write_case
from tensorprobe.ascend.operator_references import check_outputs
from tensorprobe.ascend.writing import safe_name
from tensorprobe.cli.main import main
from tensorprobe.errors import BadArtefact

X = np.linspace(-1, 1, 62 * 62, dtype=np.float32).reshape(62, 62)
NASTY = [
    '__import__("os").system("touch MARKER")', "'''+open('MARKER','w').write('')+'''",
    '"""\nopen("MARKER","w")\n"""', "{0.__class__}", "%(x)s", "{case}", "../../MARKER", "/MARKER",
    "a\nimport os", "a\r\nimport os", "a\\", "a\\'", "\\", "'", '"', "\0", "\x1b[2J", "\x85",
    "\u2028open('MARKER')", "\u2029", "\u202egnp.exe", "\u200b", "\ufeff", "\udcff", "\ud800",
    "\uff4f\uff53", "\u043es", "\x0c", "coding: unicode_escape", "-*- coding: utf-7 -*-", "+AGEA-",
    "$(touch MARKER)", "`touch MARKER`", "; touch MARKER", "-rf", "--help", "NUL", "con.txt", "..",
    ".", "", " ", "x" * 5000, "日本語" * 200,
]  # fmt: skip
texts = st.one_of(
    st.sampled_from(NASTY),
    st.lists(st.sampled_from(NASTY), max_size=3).map("".join),
    st.text(st.characters(exclude_categories=()), max_size=40),
)


# --- the case that is written as Python -----------------------------------------------------


def skeleton(source: bytes) -> str:
    """What a module does: all of it but its literals. Bytes, as an interpreter reads it."""
    tree = ast.parse(source, feature_version=(3, 7))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    # A size below zero is an expression of its own.
    text = ast.dump(tree)
    return text.replace(
        "UnaryOp(op=USub(), operand=Constant(value='int'))", "Constant(value='int')"
    )


def case_of(op_type: str, name: str, fmt: str, dtype: str, node: str, soc: str, attributes: dict):
    tensors = (
        CaseTensor("input", (2, -1), dtype, fmt, (3,), fmt, name),
        CaseTensor("output", (), dtype, fmt),
    )
    return OpCase(op_type, name, tensors, None, node, attributes, soc=soc)


@pytest.fixture(scope="module")
def plain_skeleton(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    write_case(case_of("Add", "kernel", "ND", "int8", "n", "all", {}), folder)
    return skeleton((folder / "main.py").read_bytes())


@given(texts, texts, texts, texts, texts, texts, texts, texts)
@settings(max_examples=100, deadline=None)
def test_a_case_holds_text_as_text(
    tmp_path_factory, plain_skeleton, op_type, name, fmt, dtype, node, soc, key, value
) -> None:
    folder = tmp_path_factory.mktemp("case")
    attributes = {key: value, f"{key} ": [value, 1.5, float("nan")]}
    write_case(case_of(op_type, name, fmt, dtype, node, soc, attributes), folder)
    source = (folder / "main.py").read_bytes()
    assert skeleton(source) == plain_skeleton
    module = ast.parse(source)
    strings = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
    assert {op_type, fmt, dtype, soc, safe_name(name, 200)} <= strings
    config = json.loads((folder / "case.json").read_text())
    assert config["kernel_name"] == name
    assert {p.name for p in folder.iterdir()} == {"main.py", "case.json"}


def test_the_literals_are_where_they_belong(tmp_path: Path) -> None:
    """Every argument of the case reads back as the very value that went in."""
    evil = NASTY[0]
    write_case(case_of(evil, evil, evil, evil, evil, evil, {}), tmp_path)
    module = ast.parse((tmp_path / "main.py").read_bytes())
    (case,) = (n for n in ast.walk(module) if isinstance(n, ast.Dict) and len(n.keys) == 3)
    first, second = (ast.literal_eval(entry) for entry in case.values[0].elts)
    assert first == {
        "shape": (2, -1), "dtype": evil, "format": evil, "ori_shape": (3,), "ori_format": evil,
        "param_type": "input",
    }  # fmt: skip
    assert second["ori_shape"] == ()


def test_no_name_chooses_the_encoding_of_the_case(tmp_path: Path, plain_skeleton: str) -> None:
    """A comment in one of the first two lines may: under this one, `\\n` in a literal ends it."""
    evil = "x coding: unicode_escape"
    attack = "\\nopen(MARKER, 'w')#"
    attributes = {"a": attack, "b": "\\x27\\x0aimport this"}
    write_case(case_of(attack, "k", evil, "int8", evil, "all", attributes), tmp_path)
    source = (tmp_path / "main.py").read_bytes()
    assert skeleton(source) == plain_skeleton


def run_case(folder: Path, cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The case under a frame that does nothing."""
    frame = cwd / "frame" / "op_test_frame"
    frame.mkdir(parents=True, exist_ok=True)
    (frame / "__init__.py").write_text("")
    (frame / "ut.py").write_text(
        "class OpUT:\n"
        "    def __init__(self, *a): print(ascii(a[0]))\n"
        "    def add_direct_case(self, case): pass\n"
        "    def run(self, soc): pass\n"
    )
    return subprocess.run(
        [sys.executable, *flags, str(folder / "main.py")],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(frame.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_attacks_in_a_graph_are_data_in_its_case(tmp_path: Path, flags: list[str], capsys) -> None:
    evil = 'x", __import__("os").system("touch MARKER"), "\n#coding: unicode_escape\n'
    text = graph_text().replace('type: "L2Loss"', f"type: {json.dumps(evil)}")
    text = text.replace('layout: "ND"', 'layout: "\'+open(\\"MARKER\\",\\"w\\")+\'"')
    text = text.replace('key: "T"', r'key: "\nopen(\"MARKER\", \"w\")\n#"')
    text = text.replace("origin_format", "origin_format_").replace(
        'attr { key: "origin_format_" value { s: "ND" } }',
        'attr { key: "origin_format" value { f: nan } }',
    )
    graph = tmp_path / "ge_proto_1_Build.txt"
    graph.write_text(text)
    words = ["ascend", "opcase", "--graph", str(graph), "--op", "L2Loss"]
    assert main([*words, "-o", str(tmp_path / "case")]) == 0
    done = run_case(tmp_path / "case", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii(evil)
    assert not list(tmp_path.rglob("MARKER"))
    assert capsys.readouterr().out.count("\n") == 2  # the case, and that no reference exists


def test_an_encoding_in_a_name_does_not_run_the_values(tmp_path: Path, capsys) -> None:
    """Under that encoding the value's line end is one: what follows was run."""
    node = "x coding: unicode_escape"
    op_type = "x'''\nif 1:\n  def f():\n    a=\"\"\n    a=('"
    value = "\nopen('MARKER','w')\n'''"
    graph = tmp_path / "ge_proto_1_Build.txt"
    graph.write_text(
        f'graph {{ name: "g" op {{ name: "{node}" type: {json.dumps(op_type)} '
        'attr { key: "_kernelname" value { s: "k" } } '
        f'attr {{ key: "k" value {{ s: {json.dumps(value)} }} }} '
        'output_desc { dtype: DT_FLOAT layout: "ND" } } }'
    )
    words = ["ascend", "opcase", "--graph", str(graph), "--op", node]
    assert main([*words, "-o", str(tmp_path / "case")]) == 0
    done = run_case(tmp_path / "case", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii(op_type)
    assert not (tmp_path / "MARKER").exists()


@given(texts, texts)
def test_names_of_files_stay_in_their_folder(name: str, other: str) -> None:
    for longest in (None, 200):
        made = safe_name(name, longest)
        assert made
        assert made.strip(". ")
        assert not set(made) & set('/\\\0\n\r<>:"|?*\x1b')
        assert Path("out", made).parent == Path("out")
        assert longest is None or len(os.fsencode(made)) <= longest
    long, also = "x" * 300 + name, "x" * 300 + other
    assert (safe_name(long, 200) == safe_name(also, 200)) == (long == also)


@given(texts)
def test_commands_to_paste_are_one_word_a_name(name: str) -> None:
    from tensorprobe.ascend.kernel import FaultPlace, KernelFiles
    from tensorprobe.ascend.log import Fault

    missing = missing_pieces(
        Fault({}, "log"), None, KernelFiles(name), FaultPlace(4), has_dump=True,
        has_allocations=True, given=GivenFiles(True, True, True),
    )  # fmt: skip
    command, again = next(m for m in missing if m.what == "object dump").settings
    words = shlex.split(command, comments=True)
    assert words[:3] == ["cce-objdump", "-d", "--line-numbers"]
    assert words[4] == ">"
    assert len(words) == 6
    assert words[3].removeprefix("./") == f"{name}.o".removeprefix("./")
    assert not words[3].startswith("-")
    assert shlex.split(again)[-1] == words[5]


def test_a_long_name_of_a_dump_still_gets_its_case(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    long = f"L2Loss.L2Loss{'x' * 200}.3.1638329841577837"
    (tmp_path / "dump" / DUMP_NAME).rename(tmp_path / "dump" / long)
    words = ["ascend", "incident", "--log", str(tmp_path / "log"), "--graph", str(tmp_path)]
    assert main([*words, "--dump", str(tmp_path / "dump"), "-o", str(tmp_path / "out")]) == 3
    (value,) = (tmp_path / "out" / "case_0" / "data").glob("*.input.0.npy")
    assert len(value.name) < 255


def test_two_names_that_become_one_are_not_written_over_each_other(tmp_path: Path, capsys) -> None:
    for name in ("A.b:c.1.2", "A.b_c.1.2"):
        write_dump(tmp_path / "in" / name, inputs=[Tensor(X)])
    assert main(["ascend", "convert", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2
    assert "would write the same files" in capsys.readouterr().err


# --- what is no file ------------------------------------------------------------------------


def make(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.unlink()
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket may have 107 characters
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def told(capsys, words: list[str], status: int = 1) -> str:
    """The one line that a command says when it refuses."""
    assert main(["ascend", *words]) == status
    said = capsys.readouterr()
    (line,) = said.err.strip().split("\n")
    return line


KINDS = ["a named pipe", "a socket", "a device"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pipe_socket_or_device_is_read(tmp_path: Path, kind: str, capsys) -> None:
    write_incident(tmp_path, X)
    out = ["-o", str(tmp_path / "out")]
    bad = tmp_path / "bad"
    make(kind, bad)
    log, graph = ["--log", str(tmp_path / "log")], ["--graph", str(tmp_path / "graph")]
    op = ["--op", "L2Loss"]
    for words in (
        ["convert", str(bad), *out],
        ["inspect", str(bad)],
        ["graph", str(bad), *op],
        ["incident", "--log", str(bad), *out],
        ["incident", *log, "--graph", str(bad), *out],
        ["incident", *log, *graph, "--kernel-meta", str(bad), *out],
        ["incident", *log, "--dump", str(bad), *out],
        ["incident", *log, "--objdump", str(bad), *out],
        ["incident", *log, "--case-log", str(bad), *out],
        ["opcase", "--graph", str(bad), *op, *out],
        ["opcase", *graph, *op, "--kernel-meta", str(bad), *out],
    ):
        assert f"{bad}: {kind}; expected a regular file" in told(capsys, words), words
    make(kind, npy := tmp_path / "bad.npy")
    assert f"{npy}: {kind}" in told(capsys, ["inspect", str(npy)])


@pytest.mark.parametrize("kind", ["a named pipe", "a socket"])
def test_none_is_read_in_a_folder_either(tmp_path: Path, kind: str, capsys) -> None:
    write_incident(tmp_path, X)
    out = ["-o", str(tmp_path / "out")]
    where = {
        name: ["--" + name.replace("_", "-"), str(tmp_path / name)]
        for name in ("log", "graph", "kernel_meta", "dump")
    }
    for name, file in (
        ("log", "a.log"),
        ("graph", "ge_proto_1_Build.txt"),
        ("kernel_meta", f"{KERNEL}_loc.json"),
        ("dump", "L2Loss.L2Loss.4.1638329841577838"),
    ):
        make(kind, tmp_path / name / file)
        words = [word for pair in where.values() for word in pair]
        line = told(capsys, ["incident", *words, *out])
        assert line.endswith(f"{tmp_path / name / file}: {kind}; expected a regular file")
        if name == "dump":
            for verb in (
                ["convert", str(tmp_path / name), *out],
                ["inspect", str(tmp_path / name)],
            ):
                assert f"{file}: {kind}" in told(capsys, verb)
        (tmp_path / name / file).unlink()
    make(kind, tmp_path / "dump" / "mapping.csv")
    shutil.copy(tmp_path / "dump" / DUMP_NAME, tmp_path / "dump" / "123")
    line = told(capsys, ["convert", str(tmp_path / "dump"), *out])
    assert f"mapping.csv: {kind}" in line


def test_a_folder_in_place_of_a_file(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    (tmp_path / "d").mkdir()
    words = ["incident", "--log", str(tmp_path / "log"), "-o", str(tmp_path / "out")]
    for option in ("--objdump", "--case-log"):
        line = told(capsys, [*words, option, str(tmp_path / "d")])
        assert line.endswith(f"{tmp_path / 'd'}: a directory; expected a regular file")
    (tmp_path / "npy" / "x.npy").mkdir(parents=True)
    assert "no dump or npy file in" in told(capsys, ["inspect", str(tmp_path / "npy")], 2)


def test_links_that_lead_out_of_a_folder_are_refused(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    out = ["-o", str(tmp_path / "out")]
    base = ["incident", "--log", str(tmp_path / "log"), "--graph", str(tmp_path / "graph")]
    base += ["--kernel-meta", str(tmp_path / "kernel_meta"), "--dump", str(tmp_path / "dump"), *out]
    for link in (
        tmp_path / "log" / "more.log",
        tmp_path / "graph" / "ge_proto_2_Build.txt",
        tmp_path / "kernel_meta" / f"{KERNEL}.cce",
        tmp_path / "dump" / "L2Loss.L2Loss.4.1638329841577838",
    ):
        for target in (secret, Path("/nowhere")):
            link.symlink_to(target)
            line = told(capsys, base)
            link.unlink()
            assert line.endswith(
                f"{link}: a link that leads out of its folder, to {target}; copy the file there"
            )
    for folder in (tmp_path / "log", tmp_path / "dump"):
        (folder / "more").symlink_to(tmp_path)
        assert "a link that leads out of its folder" in told(capsys, base)
        (folder / "more").unlink()
    (tmp_path / "dump" / "mapping.csv").symlink_to(secret)
    shutil.copy(tmp_path / "dump" / DUMP_NAME, tmp_path / "dump" / "123")
    assert "mapping.csv: a link that leads out" in told(capsys, base)
    # One that stays inside is as good as the file, and a circle ends.
    (tmp_path / "dump" / "mapping.csv").unlink()
    (tmp_path / "graph" / "ge_proto_2_Build.txt").symlink_to("ge_proto_00000011_Build.txt")
    (tmp_path / "log" / "circle").symlink_to("circle")
    assert main(["ascend", *base]) == 3


def test_the_output_does_not_leave_its_folder_through_a_link(tmp_path: Path, capsys) -> None:
    write_dump(tmp_path / "in" / "a" / "b" / "A.b.1.2", inputs=[Tensor(X)])
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "outside")
    assert main(["ascend", "convert", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    assert not list((tmp_path / "outside").iterdir())


# --- sizes, shapes, depths ------------------------------------------------------------------


def head(message: bytes, nbytes: int = 0) -> bytes:
    return struct.pack("<Q", len(message)) + message + bytes(nbytes)


def sized(size: int, dims: list[int], dtype: int = 1) -> bytes:
    shape = chunk(3, chunk(1, b"".join(map(varint, dims))))
    return chunk(4, number(1, dtype) + number(2, 2) + shape + number(5, size))


HUGE = 10**15
DUMPS = {
    "a header of 10**15 bytes": struct.pack("<Q", HUGE) + bytes(100),
    "a block of 10**15 bytes": head(sized(HUGE, [4]), 16),
    "a field of 10**15 bytes": head(varint(4 << 3 | 2) + varint(HUGE) + bytes(8)),
    "cut": dump_bytes(inputs=[Tensor(X)])[:-1],
    "cut in its header": dump_bytes(inputs=[Tensor(X)])[:30],
    "groups in groups": head(varint(9 << 3 | 3) * 100_000),
    "33 dims": head(sized(4, [1] * 33), 4),
    "a name of 17 MB": head(chunk(6, b"x" * (17 << 20))),
    "300,000 fields": head(number(2, 1) * 300_000),
    "zeros": bytes(4096),
    "ATB without type": b"dims=1\n$End=1\n" + bytes(8),
    "ATB of many digits": b"dtype=1\ndims=" + b"9" * 5000 + b"\n$End=1\n",
    "ATB beyond 64 bits": b"dtype=1\ndims=" + b"9" * 300 + b"\n$End=1\n",
    "ATB with another line's end": b"dtype=\x0b1\x0b\ndims=1\x1c2\n$End=1\n" + bytes(8),
}  # fmt: skip


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_that_lies(tmp_path: Path, name: str, capsys) -> None:
    path = tmp_path / "L2Loss.L2Loss.3.1638329841577837"
    path.write_bytes(DUMPS[name])
    for words in (["inspect", str(path)], ["convert", str(path), "-o", str(tmp_path / "out")]):
        line = told(capsys, words)
        assert f"{path}: at byte " in line
    write_incident(tmp_path / "x", X)
    shutil.copy(path, tmp_path / "x" / "dump" / DUMP_NAME)
    words = ["incident", "--log", str(tmp_path / "x" / "log"), "-o", str(tmp_path / "out")]
    assert main(["ascend", *words, "--dump", str(tmp_path / "x" / "dump")]) == 3
    assert "dump not read" in (tmp_path / "out" / "report.txt").read_text()


@pytest.mark.parametrize(
    "dims",
    [[2**62, 2**62], [0, 2**62, 2**62], [-1], [-5, 3], [2**63 - 1], [0] * 32, [2**31] * 32, [5]],
)
def test_shapes_that_cannot_be(tmp_path: Path, dims: list[int], capsys) -> None:
    path = tmp_path / DUMP_NAME
    path.write_bytes(head(sized(16, dims), 16))
    (tensor,) = read_dump(path).tensors
    assert tensor.array().size <= 4
    assert main(["ascend", "inspect", str(path)]) == 0
    for to in ("npy", "bin", "safetensors"):
        words = ["ascend", "convert", str(path), "-o", str(tmp_path / to), "--to", to]
        assert main(words) == 0
    (made,) = (tmp_path / "npy").glob("*.npy")
    np.load(made)
    words = ["ascend", "convert", str(path), "-o", str(tmp_path / "o"), "--format", "ND"]
    assert main(words) in (0, 1)


NPY = {
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "text": "{'descr': '<U9', 'fortran_order': False, 'shape': (1,)}",
    "a call": "{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (1,)}",
    "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}",
    "negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    "nested": "(" * 5000,
    "fields": "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
    "no dtype": "{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,)}",
}


@pytest.mark.parametrize("name", NPY)
def test_an_npy_that_lies(tmp_path: Path, name: str, capsys) -> None:
    path = tmp_path / "x.npy"
    text = NPY[name].encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
    assert "expected an npy file of numbers" in told(capsys, ["inspect", str(path)])
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert str(path) in told(capsys, ["inspect", str(path)])


def ge(value: str) -> str:
    return f'graph {{ name: "g" op {{ name: "n" type: "t" {value} }} }}'


GRAPHS = {
    "deep": "a{" * 5000 + "}" * 5000,
    "deep lists": "a: " + "[" * 5000,
    "deep JSON": '{"a":' * 5000 + "1" + "}" * 5000,
    "deep JSON lists": '{"graph":[{"op":[{"name":"n","attr":[{"key":"k","value":'
    + "[" * 900 + "]" * 900 + "}]}]}]}",
    "braces": "a{}" * 400_000,
    "fields": "".join(f"a{i}:1 " for i in range(100_000)),
    "binary": "\0" * 5000,
    "cut": graph_text()[:-20],
    "nothing": "",
    "a number of 100,000 digits": ge("id: " + "9" * 100_000 + "x"),
    "more than 64 bits": ge("id: 0x" + "f" * 5000),
    "40 sizes": ge("input_desc { shape { " + "dim: 9 " * 40 + "} }"),
    "spaces": "a" + " " * 300_000 + "!",
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_lies(tmp_path: Path, name: str, capsys) -> None:
    path = tmp_path / "ge_proto_1_Build.txt"
    path.write_text(GRAPHS[name])
    line = told(capsys, ["graph", str(path), "--op", "n"])
    assert f"{path}: " in line
    assert len(line) < 1000
    words = ["opcase", "--graph", str(tmp_path), "--op", "n", "-o", str(tmp_path / "out")]
    assert told(capsys, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value",
    [
        'attr { key: "k" value { f: abc } }', 'attr { key: "k" value { list_list_int: 5 } }',
        'attr { key: "k" value { list_list_int { list_list_i: 5 } } }',
        'attr { key: "k" value { func: "f" } }', 'attr { key: "k" value { func { name: 5 } } }',
        'attr { key: "k" value: 5 }', "attr: 5", "input_desc: 5", "input_desc { shape: 5 }",
        'attr { key: "_input_name_key" value { list { s: "x" } } } '
        'attr { key: "_input_name_value" value { list { s { a: 1 } } } } input_desc { }',
        'input_desc { dtype: "²" }',
        'input_desc { attr { key: "origin_format" value { f: nan } } }',
        'input_desc { shape { dim: "--5" dim: "²" dim: -5 dim: 18446744073709551615 } }',
        'input: "x:' + "9" * 5000 + '"', "id: 1e400 stream_id: nan", 'name { a: 1 } type: 5',
        "subgraph_name: 5", 'attr { key: "k" value { i: 18446744073709551615 } }',
        'attr { key: "k" value { list { i: 5 i: abc dt: 99 b: 7 } } }',
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_in_a_graph(tmp_path: Path, value: str, capsys) -> None:
    path = tmp_path / "ge_proto_1_Build.txt"
    path.write_text(ge(value + ' output_desc { dtype: DT_FLOAT layout: "ND" }'))
    (graph,) = [read_graph(path)]
    op = find_ops([graph], name=graph.ops[0].name)[0]
    write_case(incident_of_op(op, CrashEvidence(())).case(), tmp_path / "case")
    ast.parse((tmp_path / "case" / "main.py").read_bytes())
    for more in ([], ["--all"], ["--json", "--all"]):
        assert main(["ascend", "graph", str(path), "--op", op.name, *more]) == 0
        capsys.readouterr()


def test_an_onnx_graph_with_values_of_the_wrong_kind(tmp_path: Path, capsys) -> None:
    attributes = "".join(
        f'attribute {{ name: "{side}_desc_{what}:0" {value} }} '
        for side in ("input", "output")
        for what, value in (
            ("dtype", "i: 5 type: INT"), ("shape", "i: 7 type: INT"), ("origin_shape", 's: "x"'),
            ("layout", "ints: 5"), ("origin_layout", "floats: 1.5 type: FLOATS"),
        )
    )  # fmt: skip
    path = tmp_path / "ge_onnx_1_graph_1_Build.pbtxt"
    path.write_text(f'graph {{ node {{ name: "n" op_type: "ge:t" {attributes} }} }}')
    assert main(["ascend", "graph", str(path), "--op", "n", "--all"]) == 0


def test_kernel_files_of_the_wrong_kind(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    path = tmp_path / "kernel_meta" / f"{KERNEL}.json"
    words = ["incident", "--log", str(tmp_path / "log"), "-o", str(tmp_path / "out")]
    words += ["--kernel-meta", str(tmp_path / "kernel_meta")]
    for content in (
        "[" * 100_000, "5", '{"kernelName": ' + "[" * 500 + "]" * 500 + "}", "\0", "",
        '{"supportInfo": {"inputs": 5, "outputs": {"a": 1}}, "parameters": 5, "workspace": 5}',
        '{"supportInfo": {"inputs": [{"dtype": [1]}]}, "opParaSize": "x", "blockDim": NaN}',
        '{"kernelName": 5, "kernelList": 7, "compileInfo": [[]]}',
    ):  # fmt: skip
        path.write_text(content)
        assert main(["ascend", *words]) == 3, content[:80]
        capsys.readouterr()
    core = "The error from device(0), serial number is 1, there is an aicore error, core id is 0, "
    core += "error code = 0x1, dump info: pc start: 0x10, current: 0x20, vec error info: 0x1\n"
    (tmp_path / "log" / "screen.log").write_text(core + SCREEN_LOG)
    (tmp_path / "kernel_meta" / f"{KERNEL}.o.txt").write_text("a.cce:7\n 0: x\n 10: y\n 20: z\n")
    (tmp_path / "kernel_meta" / f"{KERNEL}.cce").write_bytes(b"x" * 100_000 + b"\n" * 10)
    for content in (
        '[{"cce_line2loc": 5}]', '[{"cce_line2loc": [{"cce_line": 1, "loc": ["f", "²"]}]}]',
        '{"cce_line2loc": [{"cce_line": true, "loc": [["f"], 1]}, 5]}', "[" * 100_000,
    ):  # fmt: skip
        (tmp_path / "kernel_meta" / f"{KERNEL}_loc.json").write_text(content)
        assert main(["ascend", *words]) == 3
        capsys.readouterr()


LOGS = {
    "an input of number 10**15": "[AIC_INFO] node_name:n, node_type:t, stream_id:5, task_id:3\n"
    f"[AIC_INFO] input:{HUGE};shape:[1];format:ND;dtype:DT_FLOAT;addr:0x1\n",
    "digits": FAILURE.replace("task_id=3", "task_id=" + "9" * 5000) + "\n",
    "other digits": FAILURE.replace("task_id=3", "task_id=²") + "\n",
    "a code of 60,000 digits": "The error from device(0), serial number is 1, there is an aicore "
    "error, core id is 0, error code = 0x" + "f" * 60_000 + "\n",
    "a core of 5000 digits": f"coreId({'9' * 5000}):0x1\n",
    "sizes": f"DevMalloc: Succ, size={'9' * 5000}, ptr=0x{'f' * 5000}\nDevFree: mem={'9' * 5000}\n",
    "a shape": "[AIC_INFO] node_name:n, node_type:t\n"
    f"[AIC_INFO] input:0;shape:[{'9,' * 249}];format:ND;dtype:DT_FLOAT;addr:0x1\n",
    "a long name": FAILURE.replace("L2Loss", "x" * 50_000) + "\n",
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_lies(tmp_path: Path, name: str, capsys) -> None:
    (tmp_path / "a.log").write_text(LOGS[name] + SCREEN_LOG + LOGS[name])
    words = ["incident", "--log", str(tmp_path / "a.log"), "-o", str(tmp_path / "out")]
    assert main(["ascend", *words]) == 3
    json.loads((tmp_path / "out" / "incident.json").read_text())


def test_errors_without_end_are_cut_and_said(tmp_path: Path) -> None:
    lines = (f"Aicore kernel execute failed, task_id={i}, func_name=k{i}\n" for i in range(20_000))
    (tmp_path / "a.log").write_text("".join(lines) + "coreId(1):0x1" * 50_000)
    facts = read_logs([tmp_path / "a.log"])
    assert len(facts.faults) == MAX_FAULTS
    assert any("was not looked at" in note for note in facts.faults[-1].notes)


LINES = [
    "begin to load ", "AtomicLaunchKernelWithFlag_", "a", "1.", "[AIC_INFO] node_name:", "a:1",
    "<exception_print>TIME:1device_id=1stream_id=1task_id=1", "DevMalloc: Succ,size=1", "coreId(",
    "[AIC_INFO] args before execute:", "0x", " ", "\\[", "hash = ", "error string: ", "E19999[PID:",
    "[INFO] a(1,", "Aicore kernel execute failed", "exception dump file path is a.1.1",
]  # fmt: skip


@pytest.mark.timeout(120)  # each takes a second or two; the square of its length would take hours
@pytest.mark.parametrize(
    "unit", [*LINES[:3], *(pytest.param(unit, marks=pytest.mark.slow) for unit in LINES[3:])]
)
def test_a_line_without_end_is_no_work_without_end(tmp_path: Path, unit: str) -> None:
    starts = ("", "AIC_INFO ", "[AIC_INFO] tiling_data:", "[Dump][Exc] ", "begin to load ",
              "The error from device(0), serial number is 1, there is a, core id is 0, "
              "error code = 0 dump info:", "exception dump file path is ")  # fmt: skip
    lines = [(start + unit * (1 << 20))[: 1 << 16] + "!" for start in starts]
    text = SCREEN_LOG + "\n".join(lines)
    (tmp_path / "a.log").write_text(text + "\n" + (unit * (1 << 20))[: 1 << 20] + "!")
    facts, _ = investigate(CrashEvidence((tmp_path / "a.log",)))
    assert facts.files
    parse_dump_name((unit * (1 << 20))[: 1 << 20])
    kernel_base("k" + "__kernel0" * 100_000 + "x")
    kernel_base("k" + "__kernel0" * 100_000)


def test_a_reference_is_not_asked_for_more_than_there_is() -> None:
    row, column = np.ones((1, 100_000), np.int8), np.ones((100_000, 1), np.int8)
    out = [np.ones(1, np.int8)]
    for name in ("Add", "MatMul", "Select"):
        x = [column, row] if name == "MatMul" else [row, column, row][: 2 + (name == "Select")]
        check = check_outputs(name, x, out, ["int8"], {})
        assert check.agrees is None
        assert "too much work" in check.text
    places = np.zeros(100_000, np.int64)
    check = check_outputs("Gather", [column.reshape(1, -1), places], out, ["int8"], {"axis": 0})
    assert "too much work" in check.text
    small = check_outputs("Gather", [column, places[:5]], [column[:5]], ["int8"], {"axis": 0})
    assert small.agrees is True


def test_sparse_files_of_a_gigabyte(tmp_path: Path, capsys) -> None:
    for name in ("ge_proto_1_Build.txt", "A.b.1.2", "x.npy", f"{KERNEL}.json", "screen.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    for words in (
        ["graph", str(tmp_path / "ge_proto_1_Build.txt"), "--op", "n"],
        ["inspect", str(tmp_path / "A.b.1.2")],
        ["inspect", str(tmp_path / "x.npy")],
        ["convert", str(tmp_path / "A.b.1.2"), "-o", str(tmp_path / "out")],
        ["incident", "--log", str(tmp_path), "--case-log", str(tmp_path / "screen.txt"),
         "-o", str(tmp_path / "out")],
    ):  # fmt: skip
        assert str(tmp_path) in told(capsys, words)
    assert KernelFolder([tmp_path]).find([KERNEL]).info == {}


# --- the terminal ---------------------------------------------------------------------------

EVIL = "a\x1b[2J\x9b\x07\u202eb\u2066\u200b\ufeff\u2028\nfake line\r\x7f"


def test_names_reach_the_terminal_as_text(tmp_path: Path, capsys) -> None:
    text = graph_text().replace('"Variable', json.dumps(EVIL)[:-1])
    text = text.replace('"T"', json.dumps(EVIL)).replace("loss/L2Loss", json.dumps(EVIL)[1:-1])
    write_incident(tmp_path, X)
    (tmp_path / "graph" / "ge_proto_00000011_Build.txt").write_text(text)
    (tmp_path / "log" / "screen.log").write_text(
        SCREEN_LOG.replace("L2Loss", "L2Loss\x1b[2J\u202e")
    )
    (tmp_path / "dump" / "A.\x1b[2J\n\u202e.1.2").write_bytes(b"no dump at all")
    graph = str(tmp_path / "graph")
    out = ["-o", str(tmp_path / "out")]
    for words in (
        ["graph", graph, "--op", "L2Loss", "--all"],
        ["graph", graph, "--op", "L2Loss", "--all", "--json"],
        ["graph", graph, "--op", "\x1b"],
        ["graph", graph + "\x1b[2J", "--op", "x"],
        ["incident", "--log", str(tmp_path / "log"), "--graph", graph, *out],
        ["opcase", "--graph", graph, "--op", "L2Loss", *out],
        ["convert", str(tmp_path / "dump"), *out],
        ["inspect", str(tmp_path / "dump")],
    ):
        main(["ascend", *words])
        said = capsys.readouterr()
        shown = said.out + said.err
        assert shown
        assert not set(shown) & set(EVIL) - set("abfkeline [2J\n"), words
        assert "\nfake line" not in shown
    report = (tmp_path / "out" / "report.txt").read_text()
    assert not set(report) & set("\x1b\u202e\u2028")
    failed = (tmp_path / "out" / "convert_failed_file_list.txt").read_text()
    assert failed.count("\n") == 1


def test_a_terminal_that_cannot_encode_a_name(tmp_path: Path) -> None:
    graph = tmp_path / "ge_proto_1_Build.txt"
    graph.write_text(graph_text().replace('"Variable', '"日本\\ud800é'), encoding="utf-8")
    for name, status in (("L2Loss", 0), ("没有", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", "ascend", "graph", str(graph), "--op", name],
            env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == status
        assert b"Traceback" not in done.stderr
        assert rb"\u65e5" in done.stdout + done.stderr


def test_what_is_not_there_is_wrong_usage(tmp_path: Path, capsys) -> None:
    write_incident(tmp_path, X)
    no, out = str(tmp_path / "no"), ["-o", str(tmp_path / "out")]
    log, graph = ["--log", str(tmp_path / "log")], ["--graph", str(tmp_path / "graph")]
    for words in (
        ["convert", no, *out],
        ["inspect", no],
        ["graph", no, "--op", "x"],
        ["incident", "--log", no, *out],
        ["incident", *log, "--graph", no, *out],
        ["incident", *log, "--kernel-meta", no, *out],
        ["incident", *log, "--dump", no, *out],
        ["incident", *log, "--objdump", no, *out],
        ["incident", *log, "--case-log", no, *out],
        ["opcase", *graph, "--op", "L2Loss", "--dump", no, *out],
    ):
        assert f"{no}: no such file" in told(capsys, words, 2), words
    taken = tmp_path / "taken"
    taken.write_text("")
    for words in (
        ["convert", str(tmp_path / "dump"), "-o", str(taken)],
        ["incident", *log, "-o", str(taken)],
        ["opcase", *graph, "--op", "L2Loss", "-o", str(taken)],
    ):
        assert str(taken) in told(capsys, words, 1)


def test_a_table_of_names_that_is_none(tmp_path: Path, capsys) -> None:
    write_dump(tmp_path / "in" / "123", inputs=[Tensor(X)])
    (tmp_path / "in" / "mapping.csv").write_text("123," + "x" * 200_000 + "\n")
    words = ["convert", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert "mapping.csv: field larger" in told(capsys, words)


def test_bad_artefacts_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(BadArtefact, match=r"x: a directory; expected a regular file"):
        read_dump(tmp_path / "x")
