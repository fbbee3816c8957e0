"""What the peers do silently wrong while recording, as tests that it does not happen here.

The numbers are those of the measurements: A for msprobe 26.2, S for ptdbg_ascend 2.3 to 6.0.
"""

from __future__ import annotations

import collections
import copy
import io
import itertools
import json
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from recorded import record, run_script, start_script, stems
from tensorprobe.errors import BadUsage, NothingRecorded

LEVELS = ["L0", "L1", "L2", "mix"]


class OpLog(torch.utils._python_dispatch.TorchDispatchMode):
    """Every operator that runs, with the process's state of mind left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(f"torch.ops.{func}")
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Small, with what trips tools: in-place activations, views, a norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.conv(x)))
        return self.head(F.dropout(x.flatten(1), 0.2))


def train(steps: int = 1) -> dict[str, torch.Tensor]:
    """A few steps of a seeded training; parameters, gradients and what the RNG has come to."""
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(2, 1, 4, 4)), torch.tensor([0, 2]))
        loss.backward()
        optimizer.step()
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    state |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**state, "loss": loss.detach(), "rng": torch.get_rng_state()}


# The tool's own work (S1, A1.16)


@pytest.mark.parametrize("keep", ["stats", "digest", "tensors"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_operator_runs_that_did_not_run_before(tmp_path: Path, level: str, keep: str) -> None:
    with OpLog() as bare:
        expected = train(2)
    with OpLog() as recorded:
        with tp.Recorder(tmp_path, level=level, keep=keep):
            actual = train(2)
    assert recorded.ops == bare.ops
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].equal(tensor), name


def test_exactly_the_programs_operators_are_recorded(tmp_path: Path) -> None:
    with OpLog() as log:
        train()
    capture = record(tmp_path, train, level="L2")
    operators = [c.op for c in capture.calls if not c.name.startswith("Optimizer.")]
    # what profilers are told makes no tensor content
    assert operators == [op for op in log.ops if not op.startswith("torch.ops.profiler.")]


def test_two_recorders_do_not_see_each_others_work(tmp_path: Path) -> None:
    """Nor does the second become the first, with the first one's settings (A3)."""
    alone = record(tmp_path / "alone", train, level="L1", keep="tensors")
    with tp.Recorder(tmp_path / "outer", level="L1", keep="stats"):
        inner = record(tmp_path / "inner", train, level="L1", keep="tensors")
    outer = tp.load(tmp_path / "outer")
    names = [call.name for call in alone.calls]
    assert [call.name for call in inner.calls] == names
    assert [call.name for call in outer.calls] == names
    assert outer.calls[0].tensors[0].blob is None
    assert inner.calls[0].tensors[0].blob is not None


IMPORTING = """
import random, sys, warnings
import numpy as np, torch, torch.distributed as dist

def state():
    functions = {
        (id(owner), function.__name__): id(function)
        for owner, group in torch.overrides.get_overridable_functions().items()
        for function in group
    }
    owners = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.fft, torch.special,
              torch.autograd, torch.autograd.graph, torch.optim.Optimizer, torch.nn.Module, dist,
              torch.utils.data.DataLoader, torch.jit)
    attributes = {(id(o), name): id(value) for o in owners for name, value in vars(o).items()}
    flags = (
        torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.backends.mkldnn.enabled, torch.is_anomaly_enabled(), sys.getrecursionlimit(),
        list(warnings.filters), sys.excepthook, sys.displayhook, sys.getswitchinterval(),
    )
    random_states = (
        torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),
    )
    hooks = (
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
        len(torch.nn.modules.module._global_backward_hooks),
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
    )
    return functions, attributes, flags, random_states, hooks

def changed(before, after):
    return [i for i, (a, b) in enumerate(zip(before, after)) if a != b]

before = state()
import tensorprobe as tp
tp.Recorder, tp.load, tp.seed_all
assert not changed(before, state()), changed(before, state())
rec = tp.Recorder("out", level="mix", keep="tensors")
assert not changed(before, state()), changed(before, state())
with rec:
    torch.ones(2).relu()
    during = state()
assert changed(before, during) in ([1, 2, 4], [1, 4]), changed(before, during)
replaced = {key for key, value in during[1].items() if before[1][key] != value}
assert {name for _, name in replaced} == {"_engine_run_backward"}, replaced
assert during[0] == before[0] and during[3] == before[3]
assert not changed(before, state()), changed(before, state())
print(len(before[0]), len(before[1]))
"""


def test_importing_and_recording_change_no_function_flag_or_random_state(tmp_path: Path) -> None:
    """S7. The one function replaced while recording is the engine's entry; it is put back."""
    result = run_script(tmp_path, IMPORTING)
    assert result.returncode == 0, result.stderr
    assert all(int(number) > 1000 for number in result.stdout.split())


# Going on after trouble (S2, S3, A2.14)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_that_the_program_catches_does_not_end_recording(
    tmp_path: Path, level: str
) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(7, 7)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fails, self.last = nn.Linear(3, 3), Fails(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(3):
                try:
                    x = self.fails(x)
                except RuntimeError:
                    x = x * 2
            return self.last(x)

    model = Outer()
    capture = record(tmp_path, lambda: model(torch.ones(1, 3)).sum().backward(), level=level)
    if level in ("L0", "mix"):
        last = capture.call("Module.last.Linear.forward.0")
        assert (last.module, last.parent) == ("last", "Module.Outer.forward.0")
        assert capture.call("Module.last.Linear.backward.0")
        failed = list(capture.calls(name="Module.fails", direction="forward"))
        assert [call.status for call in failed] == ["raised"] * 3
        assert "mat1 and mat2 shapes cannot be multiplied" in failed[0].error
    if level in ("L1", "mix"):
        linear = capture.call("Functional.linear.1.forward")
        assert (linear.module, linear.status) == ("last", "complete")
        assert capture.call("Functional.linear.0.backward").status == "complete"
    if level == "L2":
        assert capture.call("Aten.addmm.1.forward").module == "last"
        assert any(call.direction == "backward" for call in capture.calls)


def kinds_of_tensors() -> Iterator[tuple[str, Callable[[], Any]]]:
    x = torch.randn(3, 3)
    yield "bfloat16", lambda: x.bfloat16() * 2
    yield "complex", lambda: (x + 1j * x).conj().abs()
    yield "complex norm", lambda: torch.linalg.eig(x)
    yield "0-d index", lambda: x[torch.tensor(1)]
    yield "float8", lambda: x.to(torch.float8_e4m3fn).float()
    yield "sparse", lambda: torch.eye(3).to_sparse() @ x
    yield "sparse csr", lambda: torch.eye(3).to_sparse_csr().to_dense()
    yield "quantised", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    yield "nested", lambda: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged) * 2
    yield "empty", lambda: torch.empty(0, 3).sum()
    yield "bool", lambda: (x > 0).any()
    yield "int", lambda: torch.arange(3) // 2
    yield "uint16", lambda: torch.arange(3).to(torch.uint16)
    yield "expanded", lambda: x[:1].expand(5, 3).clone()
    yield "conjugated view", lambda: torch.view_as_real(torch.view_as_complex(x[:, :2].clone()))
    yield "meta", lambda: torch.ones(3, device="meta") * 2
    yield "inference", lambda: torch.inference_mode()(lambda: torch.ones(2).add_(1))()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per")
@pytest.mark.filterwarnings("ignore:.*[qQ]uanti")
@pytest.mark.parametrize("level", ["L1", "L2"])
def test_no_kind_of_tensor_raises_in_the_program(tmp_path: Path, level: str) -> None:
    """S3. What cannot be summarised is a gap on that tensor, and the call is there."""
    programs = dict(kinds_of_tensors())

    def program() -> None:
        for run in programs.values():
            run()

    capture = record(tmp_path, program, level=level)
    assert [c.name for c in capture.calls if c.status != "complete"] == []
    without = [t for c in capture.calls for t in c.tensors if t.summary is None]
    assert all(tensor.gap for tensor in without), [t for t in without if not t.gap]


TROUBLE = """
import os, sys, time
import torch, tensorprobe as tp

def work(x):
    for n in range(20):
        x = x + 1
    return x

with tp.Recorder("out", level="L1", keep="tensors", flush="call") as rec:
    x = work(torch.zeros(3))
    rec.step()
    x = work(x)
    how = sys.argv[1]
    if how == "exception":
        raise KeyError("the program's own")
    if how == "interrupt":
        print("ready", flush=True)
        time.sleep(60)
    if how == "_exit":
        os._exit(9)
    torch.ones(3) @ torch.ones(4)
"""


@pytest.mark.parametrize(
    ("how", "status", "last_words"),
    [
        ("exception", 1, 'KeyError: "the program\'s own"'),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("_exit", 9, ""),
        ("torch", 1, "inconsistent tensor size"),
    ],
)
def test_however_it_ends_the_capture_is_complete_up_to_there(
    tmp_path: Path, how: str, status: int, last_words: str
) -> None:
    process = start_script(tmp_path, TROUBLE, how)
    if how == "interrupt":
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    assert last_words in stderr
    assert stderr.count("Traceback") == (1 if last_words else 0)
    capture = tp.load(tmp_path / "out")
    assert capture.steps == (0, 1)
    last = capture.call("Tensor.add.19.forward", step=1)
    assert last.tensor("output.0").load().equal(torch.full((3,), 40.0))
    expected = ["rank0/step1"] if how == "_exit" else []
    assert capture.facts["unfinished"] == expected
    if how == "torch":
        assert capture.calls[-1].status == "raised"


# What is recorded is what was (A1.6 to A1.9, A1.12, A1.18)


@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_inputs_of_in_place_ops_are_those_before_them(tmp_path: Path, level: str) -> None:
    """Large and many, so that a copy or digest made too late would see the next value."""

    def program() -> None:
        x = torch.zeros(1 << 16)
        for _ in range(30):
            x.add_(1)
        x.view(256, 256)[0].fill_(-1)

    capture = record(tmp_path, program, level=level)
    calls = [call for call in capture.calls if ".add_." in call.name]
    assert [call.tensor("input.0").summary.max for call in calls] == [float(n) for n in range(30)]
    assert [call.tensor("output.0").summary.max for call in calls] == [n + 1.0 for n in range(30)]
    for before, after in itertools.pairwise(calls):
        assert before.tensor("output.0").digest == after.tensor("input.0").digest
    assert len({call.tensor("input.0").digest for call in calls}) == 30
    assert calls[7].tensor("input.0").load().equal(torch.full((1 << 16,), 7.0))


@pytest.mark.parametrize("level", LEVELS)
def test_running_statistics_are_those_before_each_update(tmp_path: Path, level: str) -> None:
    """Kernels write them behind autograd's back, and micro-batches do so twice in a step."""
    norm = nn.BatchNorm1d(2)
    x = torch.tensor([[1.0, 5.0], [3.0, 7.0]])
    expected: list[torch.Tensor] = []

    def program() -> None:
        for _ in range(3):
            expected.append(norm.running_mean.clone())
            norm(x)

    capture = record(tmp_path, program, level=level)
    if level in ("L0", "mix"):
        calls = capture.calls(name="Module.BatchNorm1d.forward")
        seen = [call.tensor("buffers.running_mean").load() for call in calls]
        assert [a.equal(b) for a, b in zip(seen, expected, strict=True)] == [True] * 3
    if level != "L0":
        calls = capture.calls(op="*batch_norm*")
        place = "input.3" if level == "L2" else "input.1"
        seen = [call.tensor(place).load() for call in calls]
        assert [a.equal(b) for a, b in zip(seen, expected, strict=True)] == [True] * 3


def test_parameters_are_those_before_the_optimizer_and_after_it(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    bias = layer.bias.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)

    def program() -> None:
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    capture = record(tmp_path, program)
    assert capture.call("Functional.linear.0.forward").tensor("input.2").load().equal(bias)
    step = capture.call("Optimizer.SGD.step.0")
    assert step.args[0]["lr"] == 0.25  # A1.14: a wrong rate shows where it enters
    assert step.tensor("parameters.bias").load().equal(bias)
    assert step.tensor("output.bias").load().equal(bias - 0.25)


def test_half_precision_norms_do_not_overflow(tmp_path: Path) -> None:
    half = torch.full((100_000,), 300.0, dtype=torch.float16)
    brain = torch.full((100_000,), 300.0, dtype=torch.bfloat16)
    capture = record(tmp_path, lambda: (half.clone(), brain.clone()), keep="stats")
    for call in capture.calls:
        summary = call.tensor("output.0").summary
        assert summary.norm == pytest.approx(300 * 100_000**0.5, rel=1e-12)
        assert summary.mean == 300.0


def test_input_gradient_of_cross_entropy_is_the_gradient_of_its_input(tmp_path: Path) -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3])
    capture = record(tmp_path, lambda: F.cross_entropy(logits, target).backward())
    call = capture.call("Functional.cross_entropy.0.backward")
    assert call.tensor("output.0").load().equal(logits.grad)
    assert call.tensor("input.0").load().equal(torch.ones(()))


def test_gradients_are_in_the_order_of_the_arguments(tmp_path: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    layer = nn.Linear(3, 4)
    capture = record(tmp_path, lambda: layer(x).square().sum().backward())
    call = capture.call("Functional.linear.0.backward")
    for place, expected in enumerate((x.grad, layer.weight.grad, layer.bias.grad)):
        assert call.tensor(f"output.{place}").load().equal(expected)


def test_every_gradient_of_a_call_with_several_outputs(tmp_path: Path) -> None:
    """Each output may have a graph node of its own, whose gradient comes when it comes."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.weight * 3, x * 2, x.exp(), x.tanh()

    x = torch.zeros(2, requires_grad=True)

    def program() -> None:
        outputs = Heads()(x)
        sum((n + 1) * output.sum() for n, output in enumerate(outputs[:3])).backward()

    capture = record(tmp_path, program)
    calls = list(capture.calls(name="Module.Heads.backward"))
    assert len(calls) == 1
    maxima = {t.name.partition("backward.0.")[2]: t.summary.max for t in calls[0].tensors}
    assert maxima == {"input.0": 1.0, "input.1": 2.0, "input.2": 3.0, "output.0": 7.0}
    assert x.grad.equal(torch.full((2,), 7.0))


def test_in_place_relu_has_its_backward_and_so_has_the_layer_before(tmp_path: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    capture = record(tmp_path, lambda: model(x).sum().backward())
    names = {call.name for call in capture.calls(direction="backward")}
    for stem in ("Module.0.Linear", "Module.1.ReLU", "Module.2.Linear"):
        assert f"{stem}.backward.0" in names
    for name in ("Functional.linear.0", "Functional.relu.0", "Functional.linear.1"):
        assert f"{name}.backward" in names, names
    assert capture.call("Module.0.Linear.backward.0").tensor("output.0").load().equal(x.grad)
    assert capture.gaps == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_seen_and_marked(tmp_path: Path, reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)

    def program() -> None:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    capture = record(tmp_path, program)
    first, again = capture.calls(op="*.linear", direction="forward")
    assert not any(note.startswith("inside backward") for note in first.notes)
    assert any(note.startswith("inside backward") for note in again.notes)
    assert first.tensor("output.0").digest == again.tensor("output.0").digest
    gradients = [
        call.tensor("output.0").load()
        for call in capture.calls(op="*.linear", direction="backward")
    ]
    assert len(gradients) == 1
    assert gradients[0].equal(x.grad)


def test_casts_and_copies_are_seen(tmp_path: Path) -> None:
    """A1.11: what the peer's default leaves out, being 'low risk'."""
    x = torch.randn(4)

    def program() -> None:
        x.half().float().bfloat16().to(torch.float64).type(torch.float32)
        torch.cat([x, x]).clamp(0, 1).to("cpu", copy=True)

    capture = record(tmp_path, program, level="L1")
    apis = [stem.rpartition(".")[2] for stem in stems(capture)]
    assert apis == ["half", "float", "bfloat16", "to", "type", "cat", "clamp", "to"]


# Nothing of the program's is replaced (A1.17, E18)


def test_saved_functions_pickle_and_compare_equal(tmp_path: Path) -> None:
    functions = [F.gelu, F.silu, F.relu, F.layer_norm, torch.relu, torch.add, torch.Tensor.add]
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    before = pickle.dumps(functions)

    def program() -> None:
        assert pickle.dumps(functions) == before
        assert all(a is b for a, b in zip(pickle.loads(before), functions, strict=True))
        model(torch.ones(1, 2))
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert twin(torch.ones(1, 2)).equal(model(torch.ones(1, 2)))
        torch.save(model.state_dict(), io.BytesIO())

    capture = record(tmp_path, program)
    assert capture.gaps == ()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_functions_compile_and_run_while_recording(tmp_path: Path) -> None:
    def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
        return F.gelu(x) * scale

    before = torch.jit.script(scaled)
    x = torch.randn(3)
    expected = before(x, 2.0)

    def program() -> None:
        during = torch.jit.script(scaled)
        assert during(x, 2.0).equal(expected)
        assert before(x, 2.0).equal(expected)

    record(tmp_path / "api", program, level="mix")
    operators = record(tmp_path / "ops", program, level="L2")
    assert [c.op for c in operators.calls].count("torch.ops.aten.gelu.default") == 2


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_collectives_return_what_they_returned(tmp_path: Path, level: str) -> None:
    x = torch.arange(3.0)
    gathered = [torch.zeros(3)]
    returned: list[Any] = []

    def program() -> None:
        work = dist.all_reduce(x, async_op=True)
        returned.extend([type(work).__name__, work.wait(), work.is_completed()])
        returned.append(dist.broadcast(x, 0))
        returned.append(dist.all_gather(gathered, x))

    program()
    bare, returned[:] = list(returned), []
    capture = record(tmp_path / "out", program, level=level)
    assert returned == bare
    assert returned[1:4] == [True, True, None]
    gather = capture.call("Distributed.all_gather.0.forward")
    assert gather.status == "complete"
    assert any(tensor.role == "output" and tensor.load().equal(x) for tensor in gather.tensors), (
        gather
    )
    assert capture.gaps == ()


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_compiled_part_runs_and_is_said_to_be_opaque(tmp_path: Path, level: str) -> None:
    """A1.15, A2.11: the peer leaves its calls out without a word, or refuses to run."""
    torch._dynamo.reset()
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled = torch.compile(inner, backend="aot_eager")
    head = nn.Linear(3, 1)
    x = torch.randn(2, 3)
    expected = head(inner(x))
    results: list[torch.Tensor] = []

    def program() -> None:
        results.append(head(compiled(x)))
        results[0].sum().backward()

    capture = record(tmp_path, program, level=level)
    assert torch.allclose(results[0], expected)
    assert any(gap.name == "torch.compile" and "opaque" in gap.reason for gap in capture.gaps)
    assert any("Linear" in call.name or "linear" in call.name for call in capture.calls)


# Configuration (A3, A2.7, A2.10)


def test_rank_0_of_a_single_process_is_recorded(tmp_path: Path) -> None:
    assert len(record(tmp_path, lambda: torch.ones(2), ranks=[0]).calls) == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"task": "statistics", "statistics": {"sumary_mode": "md5"}}, "summary_mode"),
        ({"task": "statistics", "summary_mode": "md5"}, "summary_mode"),
        ({"task": "statistic"}, "statistics"),
        ({"task": "overflow_check"}, "Guard"),
        ({"level": "L3"}, "L0, L1, L2, mix"),
        ({"ranks": [0]}, "'rank'"),
    ],
)
def test_a_misspelt_configuration_is_an_error_that_names_it(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dump_path": str(tmp_path / "out"), **config}))
    with pytest.raises(BadUsage, match=named) as caught:
        tp.Recorder.from_config(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_misspelt_argument_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="Did you mean 'modules'"):
        tp.Recorder(tmp_path / "out", module=["*.attn"])


def test_a_selection_that_matched_nothing_is_an_error(tmp_path: Path) -> None:
    calls = ["Torch.relu.7.forward"]
    with pytest.raises(NothingRecorded, match=r"Torch\.relu\.0\.forward"):
        record(tmp_path, lambda: torch.relu(torch.ones(2)), calls=calls, strict=True)


def test_a_host_with_one_processor(tmp_path: Path) -> None:
    script = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.cpu_count = lambda: 1
import torch, tensorprobe as tp
torch.set_num_threads(1)
with tp.Recorder("out", keep="tensors"):
    torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
print(tp.load("out").facts["cpu_count"])
"""
    result = run_script(tmp_path, script)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr


def test_every_file_is_strict_json_and_keeps_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and infinity are no JSON; and the environment is not carried along whole."""
    monkeypatch.setenv("HF_TOKEN", "hf_thisisnobodysbusiness00")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--api-key", "thisneither"])
    infinite = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    capture = record(tmp_path, lambda: torch.clamp(infinite, max=float("inf")))

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    files = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl")]
    assert len(files) == 5
    for file in files:
        text = file.read_text()
        assert "nobodysbusiness" not in text
        assert "thisneither" not in text
        for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
            json.loads(line, parse_constant=refuse)
    call = capture.calls[0]
    assert call.kwargs["max"] == float("inf")
    summary = call.tensor("input.0").summary
    assert (summary.min, summary.max) == (-float("inf"), float("inf"))
    assert (summary.nan_count, summary.inf_count, summary.norm) == (1, 2, 1.0)


def test_a_capture_is_read_at_any_depth_of_its_folder(tmp_path: Path) -> None:
    record(tmp_path / "out", lambda: torch.ones(2).relu())
    step = tmp_path / "out" / "rank0" / "step0"
    for path in (tmp_path / "out", step.parent, step, step / "calls.jsonl"):
        assert stems(tp.load(path)) == ["Torch.ones", "Tensor.relu"]


# Threads (S4)


def test_backward_of_every_thread_is_recorded(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]

    def work(model: nn.Module) -> None:
        model(torch.ones(1, 2)).sum().backward()

    def program() -> None:
        threads = [
            threading.Thread(target=work, args=(model,), name=f"worker {n}")
            for n, model in enumerate(models)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work(models[0])

    capture = record(tmp_path, program)
    for direction in ("forward", "backward"):
        calls = list(capture.calls(op="*.linear", direction=direction))
        assert len({call.name for call in calls}) == len(calls) == 4
    weights = [
        call.tensor("output.1").load()
        for call in capture.calls(op="*.linear", direction="backward")
    ]
    assert all(weight.equal(torch.ones(2, 2)) for weight in weights)
    threads = {call.thread for call in capture.calls(op="*.linear", direction="forward")}
    assert threads == {"MainThread", "worker 0", "worker 1", "worker 2"}


# The order of things (FAQ 1.5), with a real generating model


@pytest.mark.parametrize("order", ["recorder first", "model first"])
def test_generating_with_a_static_cache(tmp_path: Path, order: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )

    def build() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()

    def generate(model: LlamaForCausalLM) -> torch.Tensor:
        tokens = torch.tensor([[1, 5, 7]])
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=4,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )

    expected = generate(build())
    model = build() if order == "model first" else None
    if model is not None:
        generate(model)  # its cache is there before the recorder
    recorder = tp.Recorder(tmp_path, keep="digest", step_on="auto").start()
    model = model or build()
    actual = generate(model)
    recorder.close()
    assert actual.equal(expected)
    capture = tp.load(tmp_path)
    assert capture.gaps == ()
    assert len(capture.steps) == 4
    layers = {call.module for call in capture.calls if call.op.endswith(".linear")}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= layers


def test_root_modules_and_unused_ones_are_told_apart(tmp_path: Path) -> None:
    """A3: the peer never records the root."""
    model = nn.Sequential(nn.Linear(2, 2))
    capture = record(tmp_path, lambda: model(torch.ones(1, 2)).sum().backward(), level="L0")
    counts = collections.Counter(call.op.rpartition(".")[2] for call in capture.calls)
    assert counts["Sequential"] == 2
    assert counts["Linear"] == 3
