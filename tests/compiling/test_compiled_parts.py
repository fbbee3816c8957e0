"""The inside of compiled parts: what is recorded, and which stage is blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from recorded import SRC
from tensorprobe.compiling.compile_records import (
    CompiledParts,
    GraphNode,
    GraphRun,
    RecordedGraph,
    read_compiled,
)
from tensorprobe.compiling.compile_stages import judge_compiled
from tensorprobe.compiling.graph_encoding import GraphEncoder
from tensorprobe.compiling.graph_replay import GraphReplay
from tensorprobe.compiling.inductor_operators import inductor_random
from tensorprobe.compiling.kernel_calls import kernel_calls
from tensorprobe.compiling.kernel_watch import KernelWatch
from tensorprobe.compiling.random_draws import broken_law
from tensorprobe.compiling.stage_findings import StageFinding
from tensorprobe.compiling.stage_repro import write_repro
from tensorprobe.errors import BadArtefact, NotReplayable, UnreadableCapture
from tensorprobe.torch_versions import can_see_compiling

PROGRAMS = Path(__file__).with_name("compile_programs.py")


def python(folder: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(SRC),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # a fault must not stay in torch's caches
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def program(folder: Path, *words: str, **environ: str) -> str:
    done = python(folder, PROGRAMS, *words, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "tensorprobe", "compiled", *words)


# Without compiling


def node(name: str, target: str, *args: object, kind: str = "call") -> GraphNode:
    return GraphNode(name=name, kind=kind, target=target, args={"tuple": list(args)},
                     kwargs={"dict": []})  # fmt: skip


def of(name: str) -> dict[str, list[str]]:
    return {"special": ["node", name]}


X = GraphNode(name="x", kind="input", target="x")


def test_a_graph_survives_being_written_and_replayed() -> None:
    def function(x, y):
        h = torch.nn.functional.gelu(x @ y, approximate="tanh")
        return h[:, 1:].to(torch.float64), h.sum(dim=-1, keepdim=True) * 2 + x.shape[0]

    graph = GraphEncoder()(torch.fx.symbolic_trace(function))
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    replay = GraphReplay(graph.nodes, graph.inner, graph.constants)
    for actual, expected in zip(replay.run([x, y]), function(x, y), strict=True):
        assert torch.equal(actual, expected)
    wide = GraphReplay(graph.nodes, graph.inner, graph.constants, dtype=torch.float64)
    outputs = wide.run([x.double(), y.double()])
    assert [each.dtype for each in outputs] == [torch.float64, torch.float64]
    torch.testing.assert_close(outputs[1].float(), function(x, y)[1])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (node("a", "os.system", "true"), "is not an operator of torch"),
        (node("a", "torch.ops.aten.from_file.default", "/etc/passwd"), "not run"),
        (node("a", "torch.load", "/etc/passwd"), "not an operator"),
        (node("a", "builtins.getattr", of("x"), "__class__"), "not run: the attribute"),
        (node("a", "operator.mod", "%1000000000d", 1), "on text"),
        (node("a", "operator.pow", 10, 10**9), "too large"),
        (node("a", "operator.add", [1], [2]), "no number and no tensor"),
        (node("a", "operator.attrgetter", "x"), "not an operator"),
        (node("a", "higher_order.wrap", of("x")), "was not recorded"),
        (node("a", "torch.ops.aten.sin.default", of("later")), "which comes later"),
        (node("a", "torch.ops.aten.sin.default", {"tensor": {}}), "damaged"),
        (node("a", "torch.Tensor.__reduce_ex__", of("x"), 2, kind="method"), "not run"),
        (node("a", "module.layer", of("x")), "not an operator"),
    ],
)
def test_a_graph_calls_nothing_but_operators(bad: GraphNode, says: str) -> None:
    with pytest.raises(NotReplayable, match=says):
        GraphReplay([X, bad], {}, {}).run([torch.ones(2)])


@pytest.mark.parametrize(
    "compilation", ['0/0"""\nimport os; os.system("touch x")\n"""', "0/0\n", "0/0 ", "../x"]
)
def test_a_name_of_a_compilation_is_numbers(tmp_path: Path, compilation: str) -> None:
    """It stands in the title of scripts."""
    line = {"type": "graph", "id": 0, "stage": "dynamo", "compilation": compilation, "nodes": []}
    folder = tmp_path / "rank0" / "compiled"
    folder.mkdir(parents=True)
    (folder / "compiled.jsonl").write_text(json.dumps(line) + "\n")
    (parts,) = read_compiled(tmp_path)
    assert not parts.graphs
    assert "damaged" in parts.gaps[0].why


@pytest.mark.parametrize(
    "target", ["torch.os.system", "torch.os.system.sym_size.int", "torch.hub.load", "os.system"]
)
def test_a_script_names_nothing_but_operators(tmp_path: Path, target: str) -> None:
    nodes = (X, node("a", target, of("x")), node("output", "", of("a"), kind="output"))
    graph = RecordedGraph(id=0, stage="forward", compilation="0/0", nodes=nodes)
    finding = StageFinding(
        stage="kernel", rank=0, step=0, run=0, compilation="0/0", direction="forward", node=None,
        text="", error=1.0, graph=graph, inputs=[torch.ones(2)],
    )  # fmt: skip
    with pytest.raises(NotReplayable, match=r"not run|cannot be written"):
        write_repro(finding, tmp_path / "repro")
    assert not (tmp_path / "repro").exists()


def test_parts_that_lie_elsewhere_are_not_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "compiled.jsonl").write_text("")
    (tmp_path / "run" / "rank0").mkdir(parents=True)
    (tmp_path / "run" / "rank0" / "compiled").symlink_to(elsewhere)
    with pytest.raises(BadArtefact, match="leads out of the capture"):
        read_compiled(tmp_path / "run")


def test_graphs_that_call_themselves_end() -> None:
    graph = node("g", "g", kind="graph")
    call = node("a", "higher_order.wrap", of("g"), of("x"))
    with pytest.raises(NotReplayable, match="too deeply"):
        GraphReplay([X, graph, call], {"g": (X, graph, call)}, {}).run([torch.ones(2)])


def test_the_kernels_of_generated_code_are_read_as_text() -> None:
    text = (
        "def call(self, args):\n"
        "    extern_kernels.addmm(a, b, reinterpret_tensor(c, (2, 3), (1, 2), 0), out=buf0)\n"
        "    cpp_fused_gelu_0(buf2, reinterpret_tensor(buf1, (4,), (1,), 0), a)\n"
    )
    assert list(kernel_calls(text)) == [
        ("extern_kernels.addmm", ["buf0"]),
        ("cpp_fused_gelu_0", ["buf2", "reinterpret_tensor(buf1, (4,), (1,), 0)", "a"]),
    ]


def test_random_numbers_follow_their_law_and_their_seed() -> None:
    numbers = inductor_random([64, 64], torch.tensor(7), "rand")
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert torch.equal(numbers, inductor_random([64, 64], 7, "rand"))
    assert not torch.equal(numbers, inductor_random([64, 64], 8, "rand"))
    normal = inductor_random([64, 64], 7, "randn")
    assert abs(float(normal.std()) - 1) < 0.05


def test_a_recording_without_graphs_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCapture, match="compiled='graphs'"):
        read_compiled(tmp_path)
    done = compiled(tmp_path, "missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tensorprobe compiled: no recording at 'missing'\n"


@pytest.mark.parametrize("text", [b"{\n", b'{"type":"run"}\n', b"[[[[", b'{"type":"nothing"}\n'])
def test_damaged_lines_are_gaps(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "rank0" / "compiled"
    folder.mkdir(parents=True)
    (folder / "compiled.jsonl").write_bytes(text)
    (parts,) = read_compiled(tmp_path)
    assert len(parts.gaps) == 1
    assert judge_compiled(parts).n_judged == 0


def test_numbers_are_held_to_their_law() -> None:
    torch.manual_seed(0)
    uniform = node("r", "torch.ops.aten.rand.default")
    normal = node("n", "torch.randn_like")
    assert not broken_law(uniform, torch.rand(64, 64))
    assert not broken_law(normal, torch.randn(64, 64))
    assert "from 0 to 1" in broken_law(uniform, torch.rand(64, 64) * 1.5)
    assert "of the mean" in broken_law(uniform, torch.rand(64, 64) * 0.9)
    assert "variance" in broken_law(normal, torch.randn(64, 64) * 1.5)
    assert not broken_law(node("d", "torch.ops.aten.add.Tensor"), torch.full((9,), 7.0))


def test_names_that_come_again_after_a_reset_are_other_compilations() -> None:
    def graph(number: int, stage: str) -> RecordedGraph:
        return RecordedGraph(id=number, stage=stage, compilation="0/0", nodes=(X,))

    stages = ["dynamo", "inference", "inductor", "dynamo", "inference", "inductor"]
    graphs = [graph(number, stage) for number, stage in enumerate(stages)]
    parts = CompiledParts(Path(), list(graphs))
    assert [each.id for each in parts.of(graphs[5], "dynamo")] == [3]
    assert [each.id for each in parts.of(graphs[2], "dynamo")] == [0]
    assert parts.before_inductor(graphs[2]) is graphs[1]


def test_a_part_of_which_not_all_could_be_judged_is_no_match(tmp_path: Path) -> None:
    """One run is right, the other was compiled before recording began."""
    nodes = (X, node("a", "torch.ops.aten.sin.default", of("x")),
             node("output", "", {"tuple": [of("a")]}, kind="output"))  # fmt: skip
    folder = tmp_path / "rank0" / "compiled"
    folder.mkdir(parents=True)
    lines = [
        RecordedGraph(id=0, stage="inference", compilation="0/0", nodes=nodes, inductor=0),
        RecordedGraph(id=1, stage="inductor", compilation="0/0", nodes=nodes, inductor=0),
        GraphRun(id=0, step=0, graph=1, inputs=(1.0,), outputs=(None,)),
        GraphRun(id=1, step=0, graph=-1, inputs=(), outputs=()),
    ]
    (folder / "compiled.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    )
    done = compiled(tmp_path, ".")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "match" not in done.stdout
    assert "compiled before recording began" in done.stdout


def test_kernels_are_put_back_when_the_last_of_two_runs_ends() -> None:
    def kernel(*args: object) -> None:
        pass

    names = {"extern_kernels": torch, "assert_size_stride": None, "cpp_fused_add_0": kernel}
    exec("def call(x): cpp_fused_add_0(x); return extern_kernels.sin(x)", names)
    watch, seen = KernelWatch(), []
    runs = [watch.begin(names["call"], lambda *kernel: seen.append(kernel[0])) for _ in range(2)]
    names["call"](torch.ones(1))
    assert seen == ["cpp_fused_add_0", "extern_kernels.sin"]
    for run in runs:
        assert names["extern_kernels"] is not torch
        watch.end(run)
    assert (names["extern_kernels"], names["cpp_fused_add_0"]) == (torch, kernel)


# Compiled by inductor


@pytest.mark.skipif(not can_see_compiling(), reason="this torch does not show its graphs")
def test_a_healthy_program_matches_and_is_not_disturbed(tmp_path: Path) -> None:
    """Kernels recorded, dropout drawn again to the bit; the bare run prints the same."""
    bare = program(tmp_path, "healthy", COUNTERS="1")
    recorded = program(tmp_path, "healthy", "--inside", "kernels", "-o", "run", COUNTERS="1")
    assert recorded == bare
    done = compiled(tmp_path, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("match: 4 of 4 runs of compiled graphs give what")
    assert "not judged" not in done.stdout
    assert "not recorded" not in done.stdout
    (parts,) = read_compiled(tmp_path / "run")
    assert all(run.kernels for run in parts.runs)
    assert {graph.stage for graph in parts.graphs.values()} == {
        "dynamo", "joint", "forward", "backward", "inductor",
    }  # fmt: skip
    lines = [each.stack[0] for each in parts.graphs[0].nodes if each.stack]
    assert all(line.startswith(f"{PROGRAMS}:") for line in lines)
    assert any("F.gelu(self.norm(self.a(x)))" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "node"),
    [
        ("decomposition", "aot_autograd", "h"),
        ("backward", "aot_autograd", "h"),
        ("dropout", "aot_autograd", "dropout"),
        ("alias", "aot_autograd", "add_"),
        ("passes", "inductor's graph passes", "rsqrt"),
        ("lowering", "kernel", "mul_4"),
        ("seed", "kernel", None),
        ("shape", "kernel", "mean"),
        ("no copy", "inductor's graph passes", "add"),
        ("lost write", "aot_autograd", "add_"),
        ("uniform", "aot_autograd", "rand_like"),
        ("kernel numbers", "kernel", None),
        ("gradient", "aot_autograd", "embedding"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, kind: str, stage: str, node: str | None) -> None:
    program(tmp_path, kind, "--inside", "kernels", "-o", "run")
    done = compiled(tmp_path, "run", "--json", "-o", "report")
    assert done.returncode == 3, done.stdout + done.stderr
    findings = json.loads(done.stdout)["ranks"][0]["findings"]
    assert {each["stage"] for each in findings} == {stage}
    assert node is None or findings[0]["node"] == node
    if kind == "shape":
        assert {each["step"] for each in findings} == {1}
    if kind == "lowering":
        assert findings[0]["kernel"].startswith("cpp_fused_")
        script = findings[0]["script"]
        code = (
            f"import runpy, sys; sys.path.insert(0, {str(PROGRAMS.parent)!r}); import torch\n"
            f"from compile_programs import plant; {{}}\nrunpy.run_path({script!r})"
        )
        assert python(tmp_path, "-c", code.format("plant('lowering')")).returncode == 1
        assert python(tmp_path, "-c", code.format("pass")).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no copy", "uniform", "gradient"])
def test_the_same_program_without_a_fault_matches(tmp_path: Path, kind: str) -> None:
    """Writes to buffers, random numbers where nothing needs a gradient, an embedding."""
    bare = program(tmp_path, kind, "--clean", COUNTERS="1")
    assert program(tmp_path, kind, "--clean", "-o", "run", COUNTERS="1") == bare
    done = compiled(tmp_path, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("match: ")


ODD = """\
import os, sys, torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(3)
kind = sys.argv[1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, k):
        y = self.a(x)
        if kind == "breaks":
            if y.sum() > 0:
                y = y * 2
            torch._dynamo.graph_break()
        z = self.b(y.sin()) * k
        if kind == "breaks":
            print("mean", float(z.detach().mean()) > 5)
        return z.cos()


model = Block()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
run = model if kind == "optimizer" else torch.compile(model)
step = torch.compile(optimizer.step) if kind == "optimizer" else optimizer.step
for number, rows in enumerate((4, 4, 7)):
    if kind == "reset":
        torch._dynamo.reset()
    result = run(torch.randn(rows, 8), 1.5 + number)
    result.sum().backward()
    step()
    print(repr(result.double().sum().item()), repr(model.a.weight.double().sum().item()))
print(counters["stats"]["unique_graphs"], dict(counters["inductor"]).get("extern_calls"))
cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
names = [name for _, _, files in os.walk(cache) for name in files]
print(sorted(name for name in names if name.endswith((".cpp", ".py"))))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["breaks", "optimizer", "reset"])
def test_recording_changes_nothing_that_is_compiled(tmp_path: Path, kind: str) -> None:
    """The same results, graphs and generated files, whatever runs between the compiled parts."""
    (tmp_path / "odd.py").write_text(ODD)
    bare = python(tmp_path, "odd.py", kind, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "bare"))
    words = ["run", "--compiled", "kernels", "--keep", "tensors", "-o", "run", "odd.py", kind]
    done = python(tmp_path, "-m", "tensorprobe", *words,
                  TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "recorded"))  # fmt: skip
    assert bare.returncode == 0, bare.stderr
    assert done.stdout == bare.stdout
    judged = compiled(tmp_path, "run")
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.slow
def test_what_is_in_torchs_caches_is_recorded_all_the_same(tmp_path: Path) -> None:
    settings = {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    program(tmp_path, "no copy", "--clean", **settings)
    assert list((tmp_path / "cache" / "aotautograd").iterdir())
    program(tmp_path, "no copy", "--clean", "-o", "run", **settings)
    done = compiled(tmp_path, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    (parts,) = read_compiled(tmp_path / "run")
    assert {"dynamo", "inference", "inductor"} <= {each.stage for each in parts.graphs.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guard", "branch"])
def test_a_graph_that_no_longer_fits_is_dynamos_fault(tmp_path: Path, kind: str) -> None:
    program(tmp_path, kind, "-o", "run")
    program(tmp_path, kind, "--eager", "-o", "eager")
    assert compiled(tmp_path, "run").returncode == 0
    done = compiled(tmp_path, "run", "--against", "eager", "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    (finding,) = json.loads(done.stdout)["ranks"][0]["findings"]
    assert (finding["stage"], finding["step"]) == ("dynamo", 1)


BISECTED = """\
import sys, torch, torch.nn.functional as F
from torch._inductor import lowering

good = lowering.lowerings[torch.ops.aten.erf.default]
lowering.lowerings[torch.ops.aten.erf.default] = lambda x: lowering.mul(good(x), 1.01)
x = torch.linspace(-1, 1, 64)
sys.exit(not torch.allclose(torch.compile(F.gelu)(x), F.gelu(x), atol=1e-5))
"""


@pytest.mark.slow
def test_bisect_names_the_lowering(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BISECTED)
    done = python(tmp_path, "-m", "tensorprobe", "bisect", "--compile", "--", "train.py")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "inductor: lowerings, application" in done.stdout
    assert "what it was applied to: erf" in done.stdout
    tried = done.stdout.rpartition("as it was tried out: ")[2].split()
    variables = dict(word.split("=") for word in tried if "=" in word)
    assert python(tmp_path, "train.py", **variables).returncode == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "cpu"], "--compile switches passes of torch.compile off"),
        (["--sim-npu"], "--compile does not go with --sim-npu"),
    ],
)
def test_options_that_do_not_go_with_compile(tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["bisect", "--compile", *options, "--", "train.py"]
    done = python(tmp_path, "-m", "tensorprobe", *words)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.slow
def test_other_random_numbers_are_not_dynamos_fault(tmp_path: Path) -> None:
    program(tmp_path, "healthy", "-o", "run")
    program(tmp_path, "healthy", "--eager", "-o", "eager")
    done = compiled(tmp_path, "run", "--against", "eager")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "inductor draws other random numbers than eager torch" in done.stdout
