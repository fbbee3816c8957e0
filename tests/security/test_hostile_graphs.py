"""Graphs of compiled parts from somebody else: what they name, what they ask for, what is written.

A script of a stage is run too, uncompiled, also by `python -O`.
"""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacks
import pytest
from hostile_captures import Attack, lay_out_bait, planted
from hostile_files import X, node, of, plain_nodes, write_graphs
from test_attacks import assert_harmless
from victims import Sandbox, Step, Victim, reading_graphs

from tensorprobe.compiling.compile_records import GraphNode

RELU = "torch.ops.aten.relu.default"


def end(name: str) -> GraphNode:
    return node("output", "output", [of(name)], kind="output")


def after(*nodes: GraphNode) -> tuple[GraphNode, ...]:
    """Nodes whose last is the result."""
    return X, *nodes, end(nodes[-1].name)


def of_attack(attack: Attack) -> tuple[GraphNode, ...]:
    """An attack of the corpus as a node behind the result: it is written, and not run."""
    args = attack.call.get("args", [])
    bad = node("bad", str(attack.call.get("op", RELU)), *[_without_tensors(a) for a in args])
    return *plain_nodes(), bad


def _without_tensors(tree: Any) -> Any:
    return of("x") if isinstance(tree, dict) and "tensor" in tree else tree


def squared(target: str, *, listed: bool = False) -> tuple[GraphNode, ...]:
    """A number that is squared a hundred times."""
    nodes = [node("n0", "torch.ops.aten.sym_size.int", of("x"), 1)]
    for number in range(1, 100):
        before = of(f"n{number - 1}")
        arguments = ([before, before],) if listed else (before, before)
        nodes.append(node(f"n{number}", target, *arguments))
    return after(*nodes, node("relu", RELU, of("x")))


BREAKING = ("x = os.system('touch @M@')", "relu(); open('@M@','w')", "__import__", "lambda", "x\n")
TEXTS = (attacks.EXPRESSION, attacks.NO_SPACE, 'x"', "x'", "\\", "{0.__class__}", "\x1b[2J\u202e")
TAKEN = ("torch", "os", "float", "slice", "sys", "graph", "__debug__", "__", "None")
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]

GRAPHS: dict[str, tuple[GraphNode, ...]] = {
    **{f"op {a.name[:60]}": of_attack(a) for a in [*attacks.WALKS[:40], *attacks.ENTRIES[:60]]},
    **{
        f"run {a.name[:60]}": (X, of_attack(a)[-1], end("bad"))
        for a in [*attacks.WALKS[:20], *attacks.ENTRIES[:40]]
        if a.call.get("op") not in ("torch.arange", "torch.zeros")
    },
    **{
        f"name {text!r}": (X, node(text, RELU, of("x")), end(text)) for text in (*BREAKING, *TEXTS)
    },
    **{
        f"name of an input {text!r}": (
            GraphNode(name=text, kind="input", target=text), node("a", RELU, of(text)), end("a"),
        )
        for text in (*BREAKING, *TEXTS, *TAKEN)
    },
    **{f"target {text!r}": after(node("a", text, of("x"))) for text in (*BREAKING, *TEXTS)},
    **{
        f"getattr {text!r}": after(node("a", "builtins.getattr", of("x"), text))
        for text in ("__class__", "__reduce__", "data", "T", *TEXTS)
    },
    **{
        f"special {kind} {text!r}": after(node("a", RELU, of("x")), node(
            "b", "torch.Tensor.to", of("a"), {"special": [kind, text]}, kind="method"))
        for kind in ("dtype", "device", "layout", "memory_format", "node", "graph", "function")
        for text in ("torch.os", "torch.load", "os.system", *TEXTS[:2])
    },
    **{
        f"text {text!r}": after(node("a", "torch.ops.aten.gelu.default", of("x"), text))
        for text in TEXTS
    },
    "squared": squared("operator.mul"),
    "squared in place": squared("operator.imul"),
    "squared by a list": squared("math.prod", listed=True),
    "a power": after(node("a", "operator.pow", 64, 64), node("b", "operator.pow", of("a"), 64),
                     node("c", "operator.pow", of("b"), 64)),
    "a shift": after(*(node(f"s{n}", "operator.lshift", 1 << 62, 64) for n in range(3))),
    "a list in itself": after(node("a", "torch.ops.aten.split.Tensor", of("x"), 1),
                              node("b", "operator.setitem", of("a"), 0, of("a")),
                              node("c", "operator.eq", of("a"), of("a"))),
    "a deep argument": after(node("a", RELU, DEEP)),
    "a deep result": (X, node("output", "output", DEEP, kind="output")),
    "a result that is no list": (X, GraphNode("output", "output", "output", {"tuple": {"a": 1}})),
    "a result that is a dict": (X, GraphNode("output", "output", "output",
                                             {"tuple": [{"dict": [1, 2]}]})),
    "no arguments": (X, GraphNode("a", "call", RELU, None, None), end("a")),
    "arguments that are none": (X, GraphNode("a", "call", RELU, {"tuple": 7}, {"dict": 7}),
                                end("a")),
    "memory": after(node("a", "torch.ops.aten.zeros.default", [1 << 40])),
    "places": after(node("a", "torch.ops.aten.as_strided.default", of("x"), [1 << 20, 1 << 20],
                         [0, 0]), node("b", RELU, of("a"))),
    "random": after(node("a", "torch.ops.prims.inductor_random.default",
                         [1 << 33, 1 << 33], 1, "rand")),
    "seeds": after(node("a", "torch.ops.prims.inductor_seeds.default", 1 << 50)),
    "a graph of its own": after(GraphNode(name="g", kind="graph", target="g"),
                                node("a", "higher_order.wrap", of("g"), of("x"))),
    "autocast": after(node("a", "torch.amp.autocast_mode._enter_autocast", "cpu", None, True),
                      node("b", "torch.amp.autocast_mode._exit_autocast", of("x")),
                      node("c", RELU, of("x"))),
    "what comes after": (*plain_nodes(), node("late", RELU, of("nobody"))),
    "twice": (X, X, node("a", RELU, of("x")), node("a", RELU, of("x")), end("a")),
    "a huge number": after(node("a", "operator.add", {"int": "9" * 4000}, 1),
                           node("b", RELU, of("x"))),
    "a complex number": after(node("a", "torch.ops.aten.mul.Tensor", of("x"),
                                   {"complex": [{"float": "nan"}, {"float": "inf"}]})),
}  # fmt: skip
# A library that is loaded, memory that nobody has: each ends by itself or by the limit of memory.
_PARTS = 8


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, _PARTS))]
)
def test_graphs_of_others(recorded: Path, victim: Victim, sandbox: Sandbox, part: int) -> None:
    lay_out_bait(sandbox)
    steps: list[Step] = []
    names = list(GRAPHS)[part::_PARTS]
    for number, name in enumerate(names):
        _write(recorded, sandbox, f"a{number}", GRAPHS[name], number)
        steps += reading_graphs(f"a{number}", f"a{number}", f"out/{number}")[3:4]
        steps.append({"script": f"out/{number}/stages/repro0/repro.py"})
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told or "\u202e" in told for told in outcome.texts)
    for script in sandbox.out.rglob("repro.py"):
        _assert_plain(script)


def _write(
    recorded: Path, sandbox: Sandbox, name: str, nodes: tuple[GraphNode, ...], number: int
) -> None:
    folder = sandbox.folder / name
    write_graphs(recorded / "L0", folder, nodes)
    log = folder / "rank0" / "compiled" / "compiled.jsonl"
    lines = [planted(json.loads(line), sandbox, number) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _assert_plain(script: Path) -> None:
    """Names of torch and of its own alone."""
    tree = ast.parse(script.read_text())
    imported = [
        n.name for each in ast.walk(tree) if isinstance(each, ast.Import) for n in each.names
    ]
    assert sorted(imported) == ["os", "sys", "torch"]
    function = next(each for each in tree.body if getattr(each, "name", "") == "graph")
    for each in ast.walk(function):
        if isinstance(each, ast.Call):
            called = ast.unparse(each.func)
            assert called.startswith("torch.") or called in ("slice", "float", "complex"), called
            assert not called.startswith(("torch.os", "torch.load", "torch.hub")), called


@pytest.mark.slow
def test_scripts_without_asserts(recorded: Path, careless: Victim, sandbox: Sandbox) -> None:
    lay_out_bait(sandbox)
    steps: list[Step] = []
    names = [name for name in GRAPHS if name.startswith(("name", "text", "op Functional", "what"))]
    for number, name in enumerate(names):
        _write(recorded, sandbox, f"a{number}", GRAPHS[name], number)
        steps += reading_graphs(f"a{number}", f"a{number}", f"out/{number}")[3:4]
        steps.append({"script": f"out/{number}/stages/repro0/repro.py"})
    assert_harmless(careless.run(sandbox, steps))


# Lines and files


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[list[dict[str, Any]]], None]:
    def edit(lines: list[dict[str, Any]]) -> None:
        run = lines[-1]
        change(run)

    return edit


TENSORS: dict[str, Any] = {
    "shape": [[-3, 4], [1 << 50, 4], [1] * 1000, [], [3, 4, 1, 1], [0, 4], [True, 4]],
    "stride": [[-4, 1], [1 << 40, 1], [4], [0, 0], [1, 3], [1 << 20, 1]],
    "dtype": ["load", "os.system", "O", "float64", "int4", "float8_e8m0fnu", "", "bool"],
    "shard": [-1, 1 << 70, 7, 10**400],
    "offset": [-1, 1 << 60, 7, 47],
    "nbytes": [-1, 1 << 60, 0, 47],
    "device": ["cuda:0", "\x1b[2J", "npu:99"],
}


def test_tensors_that_cannot_be(recorded: Path, victim: Victim, sandbox: Sandbox) -> None:
    steps: list[Step] = []
    number = 0
    for field, values in TENSORS.items():
        for value in values:
            for side in ("inputs", "outputs"):
                name = f"a{number}"
                write_graphs(recorded / "L0", sandbox.folder / name)
                log = sandbox.folder / name / "rank0" / "compiled" / "compiled.jsonl"
                *lines, run = [json.loads(line) for line in log.read_text().splitlines()]
                run[side][0][field] = value
                if number % 3 == 0:
                    run["rng"] = run[side][0]
                log.write_text("".join(json.dumps(line) + "\n" for line in (*lines, run)))
                steps += reading_graphs(name, name, f"out/{number}")[3:4]
                number += 1
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert not any("\x1b" in told for told in outcome.texts)


@pytest.mark.parametrize("what", ["FIFO", "link out", "folder", "socket", "deep", "zeros"])
def test_what_is_no_file(recorded: Path, victim: Victim, sandbox: Sandbox, what: str) -> None:
    steps: list[Step] = []
    for number, name in enumerate(("compiled.jsonl", "tensors-0.safetensors")):
        folder = sandbox.folder / f"a{number}"
        write_graphs(recorded / "L0", folder)
        path = folder / "rank0" / "compiled" / name
        path.unlink()
        if what == "FIFO":
            os.mkfifo(path)
        elif what == "link out":
            path.symlink_to(sandbox.secret)
        elif what == "folder":
            path.mkdir()
        elif what == "deep":
            path.write_text('{"type":"graph","nodes":' + "[" * 100_000 + "]" * 100_000 + "}\n")
        elif what == "zeros":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        else:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path is short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
            os.chdir(here)
        steps += reading_graphs(f"a{number}", f"a{number}", f"out/{number}")
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert "not for you" not in "".join(outcome.texts)


def test_an_output_that_leads_elsewhere(recorded: Path, victim: Victim, sandbox: Sandbox) -> None:
    """A folder of results may come along with a recording."""
    write_graphs(recorded / "L0", sandbox.folder / "a")
    elsewhere = sandbox.folder / "elsewhere"
    elsewhere.mkdir()
    for number, name in enumerate(("link", "file")):
        out = sandbox.out / str(number)
        (out / "stages").mkdir(parents=True)
        if name == "link":
            (out / "stages" / "repro0").symlink_to(elsewhere)
        else:
            (out / "stages" / "repro0").mkdir()
            (out / "stages" / "repro0" / "repro.py").symlink_to(elsewhere / "x.py")
    steps = [step for n in range(2) for step in reading_graphs("a", "a", f"out/{n}")[3:4]]
    outcome = victim.run(sandbox, steps)
    assert_harmless(outcome)
    assert outcome.statuses == [2, 2]
    assert all("cannot write to" in told for told in outcome.texts)
