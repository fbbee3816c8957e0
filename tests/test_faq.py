"""Every entry of the FAQs of ptdbg_ascend (001) and msprobe (002), as a test of what happens here.

Each test is named by the entry it answers; docs/faq.md has the same entries for people.
"""

from __future__ import annotations

import ast
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, relu
from torch.utils.data import DataLoader, TensorDataset

import tensorprobe as tp
from default_device import host_only
from recorded import ROOT, SRC, record, run_script, start_script, stems
from tensorprobe import torch_versions
from tensorprobe.checking.one import check_one
from tensorprobe.devices import device_layer
from tensorprobe.follow.naming import Namer
from tensorprobe.operators import symbol_of
from tensorprobe.records import Fields, Special
from tensorprobe.replay.pairing import pair

ENTRIES = [
    *(f"001-U{n}" for n in range(1, 3)),
    *(f"001-Q{n}" for n in range(1, 5)),
    *(f"001-E{n}" for n in range(1, 20)),
    *(f"002-1.{n}" for n in range(1, 7)),
    *(f"002-2.{n}" for n in range(1, 7)),
    "002-3.1.1",
    *(f"002-3.2.{n}" for n in range(1, 4)),
    *(f"002-3.3.{n}" for n in range(1, 12)),
]
# Cannot be a test: the entry is about another product's version.
ONLY_DOCUMENTED = {"001-E3", "002-3.3.1"}


def entries_with_a_test() -> list[str]:
    """The ids in the names of this file's tests: 001-E13, 002-3.3.7."""
    pattern = re.compile(r"test_(001|002)_([UQE]\d+|[12]_\d+|3_\d_\d+)_[a-z]")
    tree = ast.parse(Path(__file__).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [pattern.match(name) for name in names]
    return [f"{match[1]}-{match[2].replace('_', '.')}" for match in found if match]


def test_every_entry_is_answered_once() -> None:
    assert len(ENTRIES) == 52
    answered = collections.Counter([*entries_with_a_test(), *ONLY_DOCUMENTED])
    assert answered == collections.Counter(ENTRIES)


def test_every_entry_has_its_paragraph() -> None:
    text = (ROOT / "docs" / "faq.md").read_text()
    anchor, *parts = re.split(r'<a id="([^"]+)"></a>', text)
    assert anchor.startswith("# ")
    ids, paragraphs = parts[::2], parts[1::2]
    assert ids == ENTRIES
    for entry, paragraph in zip(ids, paragraphs, strict=True):
        assert len(paragraph.strip()) > 40, entry


# 001: ptdbg_ascend, using it


def test_001_U1_source_tree_needs_no_version_file(tmp_path: Path) -> None:
    tree = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SRC / "tensorprobe", tree / "tensorprobe", ignore=ignore)
    code = "import tensorprobe as tp; print(tp.__version__, tp.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-B", "-c", code]
    result = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    expected = f"{tp.__version__} {tree / 'tensorprobe' / '__init__.py'}\n"
    assert (result.stdout, result.stderr) == (expected, "")


if hasattr(torch.library, "custom_op"):  # from torch 2.4 on

    @torch.library.custom_op("faq::scaled_masked_softmax", mutates_args=())
    def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).masked_fill(mask, -1e4).softmax(-1)


def test_001_U2_fused_op_is_recorded_without_a_list(tmp_path: Path) -> None:
    x, mask = torch.randn(2, 3), torch.tensor([False, False, True])

    def program() -> None:
        scaled_masked_softmax(x, mask, 0.5)
        torch.ops.faq.scaled_masked_softmax(x, mask, scale=2.0)

    capture = record(tmp_path, program, level="L1")
    first, second = capture.calls
    assert first.name == "Ops.faq.scaled_masked_softmax.0.forward"
    assert second.name == "Ops.faq.scaled_masked_softmax.1.forward"
    assert [first.args[2], second.kwargs["scale"]] == [0.5, 2.0]
    assert first.tensor("input.0").load().equal(x)
    assert first.tensor("input.1").load().equal(mask)
    expected = (x * 0.5).masked_fill(mask, -1e4).softmax(-1)
    assert first.tensor("output.0").load().equal(expected)


# 001: common questions


def test_001_Q1_recording_twice_into_one_folder_keeps_both(tmp_path: Path) -> None:
    record(tmp_path, lambda: torch.ones(3).relu(), level="L1")
    record(tmp_path, lambda: torch.ones(3).tanh(), level="L1")
    assert stems(tp.load(tmp_path)) == ["Torch.ones", "Tensor.tanh"]
    assert stems(tp.load(tmp_path / "earlier" / "1")) == ["Torch.ones", "Tensor.relu"]


def test_001_Q2_several_models_are_all_recorded(tmp_path: Path) -> None:
    generator = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(3, 1))
    critic = nn.Bilinear(3, 3, 1)

    def program() -> None:
        fake = generator(torch.ones(4, 2))
        (discriminator(fake).mean() + critic(fake, fake).mean()).backward()

    capture = record(tmp_path, program)
    forward = {call.name for call in capture.calls(name="Module", direction="forward")}
    assert forward == {
        "Module.Sequential.forward.0",
        "Module.0.Linear.forward.0",
        "Module.1.Tanh.forward.0",
        "Module.Sequential_1.Sequential.forward.0",
        "Module.Sequential_1.0.Linear.forward.0",
        "Module.Bilinear.forward.0",
    }
    backward = {call.name for call in capture.calls(name="*.parameters_grad.*")}
    assert len(backward) == 3


def test_001_Q3_operators_are_recorded_at_L2(tmp_path: Path) -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)

    def program() -> None:
        F.linear(x, weight).relu().sum().backward()

    capture = record(tmp_path, program, level="L2")
    forward = [call.op for call in capture.calls(direction="forward")]
    assert "torch.ops.aten.mm.default" in forward
    assert "torch.ops.aten.relu.default" in forward
    backward = {call.op: call for call in capture.calls(direction="backward")}
    threshold = backward["torch.ops.aten.threshold_backward.default"]
    assert threshold.parent == "Aten.relu.0.forward"
    assert backward["torch.ops.aten.mm.default"].parent == "Aten.mm.0.forward"


class Block(nn.Module):
    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        self.extra = extra
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.extra:  # one device's code path makes one call more
            x = F.relu(x.clone())
        return self.down(F.relu(x))


def test_001_Q4_calls_line_up_whatever_their_numbers(tmp_path: Path) -> None:
    captures = []
    for extra in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(extra=extra), Block(extra=False))
        captures.append(
            record(tmp_path / str(extra), lambda m=model: m(torch.ones(2, 4)), level="L1")
        )
    found = tp.compare(captures[1], captures[0])
    # the last relu of both sides: another number, the same place
    names = {(p.pair.actual.name, p.pair.expected.name) for p in found.pairs if p.is_paired}
    assert ("Functional.relu.2.forward", "Functional.relu.1.forward") in names
    assert [(call.op, call.module) for call, _ in found.one_sided] == [
        ("torch.Tensor.clone", "0"),
        ("torch.nn.functional.relu", "0"),
    ]
    assert found.verdict.counts["only_actual"] == 2
    assert found.verdict.verdict == "match"  # relu of relu changes nothing


# 001: abnormal situations


def test_001_E1_shadowed_and_odd_python_paths(tmp_path: Path) -> None:
    """Folders on PYTHONPATH that carry the name of the tool, or of the peers', hide nothing."""
    (tmp_path / "tools" / "tensorprobe" / "ptdbg_ascend").mkdir(parents=True)
    (tmp_path / "tools" / "ptdbg_ascend").mkdir()
    (tmp_path / "tools" / "ptdbg_ascend" / "__init__.py").touch()
    entries = ["", str(tmp_path / "tools"), str(tmp_path / "missing"), f"{SRC}/", ""]
    script = """
from tensorprobe import *
import ptdbg_ascend
seed_all(7)
with Recorder("out"):
    import torch
    torch.ones(2).relu()
assert not hasattr(ptdbg_ascend, "Recorder")
print(len(load("out").calls))
"""
    result = run_script(tmp_path, script, PYTHONPATH=os.pathsep.join(entries))
    assert (result.stdout, result.returncode) == ("2\n", 0), result.stderr


RANKS = """
import sys
import torch, torch.distributed as dist
import tensorprobe as tp

rank = int(sys.argv[1])
# before the group is there, on every rank
recorders = [tp.Recorder(level, level=level, keep="tensors") for level in ("L1", "L2")]
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for rec in recorders:
    with rec:
        for step in range(2):
            x = torch.full((3,), float(rank + step))
            work = dist.all_reduce(x, async_op=True)
            assert work.wait() is True
            assert x.equal(torch.full((3,), 1.0 + 2 * step))
            rec.step()
dist.destroy_process_group()
"""


def test_001_E2_every_rank_has_its_own_folder(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [start_script(tmp_path, RANKS, str(rank), store, **environ) for rank in (0, 1)]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    for level, place in (("L1", "0"), ("L2", "0.0")):
        capture = tp.load(tmp_path / level)
        assert (capture.ranks, capture.steps, capture.gaps) == ((0, 1), (0, 1), ())
        assert {path.name for path in (tmp_path / level).glob("rank*")} == {"rank0", "rank1"}
        for rank in (0, 1):
            call = capture.call("Distributed.all_reduce.0.forward", step=1, rank=rank)
            assert call.tensor(f"input.{place}").summary.max == rank + 1
            assert call.tensor(f"output.{place}").summary.max == 3


class NpuOfAnotherProcess(types.ModuleType):
    """A torch_npu whose device was not set: every question to it fails as the real one does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("NPU error, error code is 107002")


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_001_E4_no_device_is_touched_before_a_tensor_is_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", NpuOfAnotherProcess("torch_npu"))
    capture = record(tmp_path / "run", lambda: nn.Linear(2, 2)(torch.ones(2)), level=level)
    assert capture.gaps == ()
    assert "Functional.linear" in stems(capture)
    with tp.Guard(tmp_path / "guard", "errors", log=lambda text: None) as guard:
        nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    assert guard.findings == ()


def test_001_E5_extra_data_in_a_line_costs_that_line_only(tmp_path: Path) -> None:
    capture = record(tmp_path, lambda: torch.ones(2).relu().tanh(), level="L1")
    log = tmp_path / "rank0" / "step0" / "calls.jsonl"
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"Tensor.relu.0.forward"' in line)
    lines[at] += lines[at]  # as two processes that append to one file leave it
    log.write_text("\n".join(lines) + "\n")
    damaged = tp.load(tmp_path)
    assert stems(capture) == ["Torch.ones", "Tensor.relu", "Tensor.tanh"]
    assert stems(damaged) == ["Torch.ones", "Tensor.tanh"]
    assert any(gap.name == f"rank0/step0/calls.jsonl:{at + 1}" for gap in damaged.gaps)


def test_001_E6_no_list_of_ops_has_to_fit_the_torch_version(tmp_path: Path) -> None:
    """Every function this torch lets be overridden has a name; none is known beforehand."""
    namer = Namer(torch.overrides.resolve_name)
    functions = {f for fs in torch.overrides.get_overridable_functions().values() for f in fs}
    assert len(functions) > 1000
    for function in functions:
        name = namer(function)
        assert name.api
        assert "?" not in name.stem, name
    assert not [p for p in SRC.rglob("*") if p.suffix in (".yaml", ".yml")]


def lstm_inputs(capture: tp.records.Capture) -> list[str]:
    call = capture.call("VF.lstm.0.forward")
    return [t.name.removeprefix("VF.lstm.0.forward.") for t in call.tensors if t.role == "input"]


def test_001_E7_nested_inputs_are_named_by_their_place(tmp_path: Path) -> None:
    lstm = nn.LSTM(2, 3)
    x, state = torch.randn(4, 1, 2), (torch.zeros(1, 1, 3), torch.ones(1, 1, 3))
    capture = record(tmp_path, lambda: lstm(x, state))
    weights = [f"input.2.{n}" for n in range(4)]
    assert lstm_inputs(capture) == ["input.0", "input.1.0", "input.1.1", *weights]
    call = capture.call("VF.lstm.0.forward")
    assert call.tensor("input.1.1").load().equal(state[1])
    assert call.args[1][1] is call.tensor("input.1.1")  # the nest itself is there too


def test_001_E8_exit_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    script = """
import torch, tensorprobe as tp
rec = tp.Recorder("out", level="L1", keep="tensors")
rec.start()
x = torch.arange(6.0)
for n in range(50):
    x = x + 1
exit(5)
rec.stop()
"""
    result = run_script(tmp_path, script)
    assert result.returncode == 5
    capture = tp.load(tmp_path / "out")
    assert (len(capture.calls), len(capture.begun), capture.facts["unfinished"]) == (51, 0, [])
    last = capture.call("Tensor.add.49.forward")
    assert last.tensor("output.0").load().equal(torch.arange(6.0) + 50)


def test_001_E9_captures_with_and_without_stacks_are_read_alike(tmp_path: Path) -> None:
    captures = {
        stacks: record(tmp_path / str(stacks), lambda: torch.ones(2).relu(), stacks=stacks)
        for stacks in (True, False)
    }
    assert all(call.stack for call in captures[True].calls)
    assert not any(call.stack for call in captures[False].calls)
    assert stems(captures[True]) == stems(captures[False])
    assert [captures[s].facts["config"]["stacks"] for s in (True, False)] == [True, False]
    for actual, expected in ((True, False), (False, True)):
        found = tp.compare(captures[actual], captures[expected]).verdict
        assert (found.verdict, found.counts["only_actual"]) == ("match", 0)


@host_only("about machines without torch_npu")
def test_001_E10_operators_of_one_backward_need_no_torch_npu(tmp_path: Path) -> None:
    assert "torch_npu" not in sys.modules
    weight = torch.randn(3, 3, requires_grad=True)

    def program() -> None:
        torch.mm(torch.ones(3, 3), weight).tanh().sum().backward()

    capture = record(tmp_path, program, level="L2", directions="backward", apis="aten.mm")
    assert [call.name for call in capture.calls] == ["Aten.mm.1.backward"]
    assert capture.calls[0].tensor("output.0").load().equal(weight.grad)


@pytest.mark.parametrize(
    "name", ["abc++", "with space", "数据", "a'b\"c", "$HOME;*?", "x" * 200, "-o", "ends."]
)
def test_001_E11_any_path_will_do(tmp_path: Path, name: str) -> None:
    capture = record(tmp_path / name / "dump", lambda: torch.ones(2).relu())
    assert capture.calls[-1].tensor("output.0").load().equal(torch.ones(2))


def test_001_E12_the_order_and_number_of_calls_do_not_matter(tmp_path: Path) -> None:
    first = tp.Recorder(tmp_path / "a", level="L1")
    second = tp.Recorder(tmp_path / "b", level="L1")
    second.start()
    first.start().start()  # once more changes nothing
    torch.ones(2)
    first.stop()
    first.stop()
    torch.zeros(2)
    first.start()
    torch.eye(2)
    second.close()
    first.close()
    first.close()
    assert stems(tp.load(tmp_path / "a")) == ["Torch.ones", "Torch.eye"]
    assert stems(tp.load(tmp_path / "b")) == ["Torch.ones", "Torch.zeros", "Torch.eye"]
    with pytest.raises(tp.errors.BadUsage, match="closed"):
        first.start()


def test_001_E13_weight_gradient_of_3d_linear_without_bias(tmp_path: Path) -> None:
    layer = nn.Linear(4, 5, bias=False)
    x = torch.randn(2, 3, 4, requires_grad=True)
    capture = record(tmp_path, lambda: layer(x).square().sum().backward())
    call = capture.call("Functional.linear.0.backward")
    assert call.tensor("output.0").load().equal(x.grad)
    assert call.tensor("output.1").load().equal(layer.weight.grad)
    own = capture.call("Module.Linear.parameters_grad.0")
    assert own.tensor("weight").load().equal(layer.weight.grad)


def test_001_E14_half_precision_is_stored_as_such(tmp_path: Path) -> None:
    x = torch.randn(3, 4).half()
    capture = record(tmp_path, lambda: x * 3)
    output = capture.call("Tensor.mul.0.forward").tensor("output.0")
    assert (output.dtype, output.array().dtype) == ("float16", np.float16)
    assert output.load().dtype == torch.float16
    assert output.load().equal(x * 3)


ENDING = """
import torch, tensorprobe as tp
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.arange(40.0).reshape(20, 2)), batch_size=2, num_workers=1)
with tp.Recorder("out", steps="1-2", stop_after_last_step=True) as rec:
    for (batch,) in data:
        print(batch[0, 0].item())
        rec.step()
"""


def test_001_E15_ending_after_the_last_step_is_no_exception(tmp_path: Path) -> None:
    result = run_script(tmp_path, ENDING)
    assert (result.stdout.split(), result.returncode) == (["0.0", "4.0", "8.0"], 0)
    assert "Traceback" not in result.stderr
    assert "steps 1-2 are recorded: ending the program" in result.stderr
    assert tp.load(tmp_path / "out").steps == (1, 2)


def test_001_E16_the_recorder_needs_no_model(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path, keep="stats") as rec:
        torch.ones(2).relu()
        model = nn.Sequential(nn.Linear(2, 2))  # made while recording
        model(torch.ones(1, 2)).sum().backward()
        rec.step()
    capture = tp.load(tmp_path)
    assert capture.call("Tensor.relu.0.forward").module == ""
    assert capture.call("Functional.linear.0.backward").module == "0"
    assert capture.call("Module.0.Linear.forward.0")


def outcome(function: Any) -> tuple[type, str]:
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 whatever it is, it must stay the same
        return type(error), str(error)
    return type(value), repr(value)


SCALAR, CUBE = torch.tensor(2), torch.arange(24).reshape(2, 3, 4)
SLICINGS = {
    "0-d index": lambda: CUBE[0, SCALAR],
    "0-d slice": lambda: CUBE[:, SCALAR:],
    "0-d tuple": lambda: CUBE[(SCALAR - 1, ..., SCALAR)],
    "list of 0-d": lambda: CUBE[[SCALAR - 1, SCALAR - 2]],
    "too many": lambda: CUBE[0, 0, 0, 0],
    "of 0-d": lambda: SCALAR[0],
    "len of 0-d": lambda: len(SCALAR),
    "iter of 0-d": lambda: list(SCALAR),
    "mask": lambda: CUBE[CUBE > 3],
    "none": lambda: CUBE[None, ..., -1],
    "out of range": lambda: CUBE[7],
    "wrong type": lambda: CUBE["x"],
    "assign": lambda: CUBE.clone().__setitem__((0, SCALAR), 7),
    "as number": lambda: [1, 2, 3][SCALAR],
    "bool of many": lambda: bool(CUBE),
}


@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_001_E17_slicing_and_len_raise_just_what_they_raised(tmp_path: Path, level: str) -> None:
    bare = {name: outcome(slicing) for name, slicing in SLICINGS.items()}
    assert bare["len of 0-d"] == (TypeError, "len() of a 0-d tensor")
    assert bare["too many"][0] is IndexError
    recorded: dict[str, Any] = {}

    def program() -> None:
        for name, slicing in SLICINGS.items():
            recorded[name] = outcome(slicing)

    capture = record(tmp_path, program, level=level)
    assert recorded == bare
    raised = [call for call in capture.calls if call.status == "raised"]
    assert any("too many indices" in (call.error or "") for call in raised) or level == "L2"


def megatron_like(activation: Any) -> str:
    """As fused kernels' front ends do: they ask which function it is."""
    if activation is not F.gelu and activation not in (F.silu, F.relu):
        raise ValueError("activation_func must be F.gelu")
    return str(activation.__name__)


def test_001_E18_functions_keep_their_identity(tmp_path: Path) -> None:
    saved = (F.gelu, F.silu, F.relu, torch.relu, torch.Tensor.add, torch.nn.Linear.forward)

    def program() -> None:
        assert (F.gelu, F.silu, F.relu, torch.relu, torch.Tensor.add, nn.Linear.forward) == saved
        assert all(a is b for a, b in zip((F.gelu, F.silu, F.relu), saved, strict=False))
        assert megatron_like(saved[0]) == "gelu"
        assert megatron_like(F.gelu) == "gelu"
        saved[0](torch.ones(2))

    capture = record(tmp_path, program)
    assert stems(capture)[-1] == "Functional.gelu"


class OpLog(torch.utils._python_dispatch.TorchDispatchMode):
    """Every operator that reaches the device, the tool's own included if there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def transposing() -> None:
    weight = torch.randn(3, 5, requires_grad=True)
    x = torch.randn(2, 4, 3).transpose(0, 1)
    y = (x @ weight).transpose(1, 2)
    (y[..., ::2] * weight.t()[None, :, :1]).sum().backward()


@pytest.mark.parametrize("level", ["L1", "L2", "mix"])
def test_001_E19_t_and_transpose_need_no_exemption(tmp_path: Path, level: str) -> None:
    """Views are recorded as they are, and no operator runs that did not run before."""
    with OpLog() as bare:
        transposing()
    with OpLog() as recorded:
        capture = record(tmp_path, transposing, level=level)
    assert recorded.ops == bare.ops
    assert capture.gaps == ()
    if level != "L2":
        assert {"Tensor.transpose", "Tensor.t"} <= set(stems(capture))
    view = capture.call("Aten.t.0.forward" if level == "L2" else "Tensor.t.0.forward")
    source, result = view.tensor("input.0"), view.tensor("output.0")
    assert (result.shape, result.stride) == ((5, 3), (1, 5))
    assert result.load().equal(source.load().t())


# 002: msprobe, recording


def test_002_1_1_none_unsupported_and_bool_are_three_things(tmp_path: Path) -> None:
    class Handle:
        pass

    class Takes(nn.Module):
        def forward(self, mask: Any, nothing: Any, handle: Any) -> Any:
            return mask

    mask = torch.tensor([[True, False, False]])
    capture = record(tmp_path, lambda: Takes()(mask, None, Handle()), level="L0")
    call = capture.call("Module.Takes.forward.0")
    tensor, nothing, handle = call.args
    assert nothing is None
    assert isinstance(handle, Special)
    assert handle.kind == "unsupported"
    assert handle.text.endswith("Handle")
    summary = tensor.summary
    assert (summary.mean, summary.norm) == (None, None)
    assert (summary.min, summary.max, summary.zero_count) == (False, True, 2)
    assert (summary.nan_count, summary.inf_count, tensor.gap) == (0, 0, None)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_002_1_2_namedtuple_outputs_keep_their_type(tmp_path: Path) -> None:
    class Splits(nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x * 2, x * 3)

    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []

    def program() -> None:
        seen.append(Splits()(x))
        (seen[0].left.sum() + seen[0].right.sum()).backward()
        assert type(torch.max(x, 0)) is torch.return_types.max

    capture = record(tmp_path, program)
    assert type(seen[0]) is Pair
    forward = capture.call("Module.Splits.forward.0")
    assert isinstance(forward.outputs, Fields)
    assert (forward.outputs.kind, forward.outputs.type.endswith("Pair")) == ("namedtuple", True)
    assert forward.tensor("output.right").load().equal(torch.tensor([3.0, 3.0]))
    backward = capture.call("Module.Splits.backward.0")
    assert backward.tensor("output.0").load().equal(x.grad)
    assert backward.tensor("input.left").load().equal(torch.ones(2))


def test_002_1_3_directly_imported_function_is_recorded(tmp_path: Path) -> None:
    x = torch.tensor([-1.0, 2.0])
    with tp.Recorder(tmp_path, level="L1", keep="tensors"):
        relu(x)
    call = tp.load(tmp_path).call("Torch.relu.0.forward")
    assert call.tensor("output.0").load().equal(torch.tensor([0.0, 2.0]))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")  # torch's own advice
def test_002_1_4_modules_with_the_deprecated_backward_hook(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    model = nn.Sequential(layer, nn.Tanh())
    seen: list[Any] = []
    layer.register_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))
    x = torch.ones(1, 3, requires_grad=True)
    capture = record(tmp_path, lambda: model(x).sum().backward(), level="L0")
    assert len(seen) == 1
    call = capture.call("Module.0.Linear.backward.0")
    assert call.tensor("input.0").load().equal(seen[0][0])
    assert call.tensor("output.0").load().equal(x.grad)


@pytest.fixture
def default_device() -> Any:
    yield
    torch.set_default_device(None)


class Engine:
    """As an inference engine does: it takes the device over, then makes its model and caches."""

    def __init__(self) -> None:
        torch.set_default_device("meta")
        self.model = nn.Linear(2, 2)
        self.cache = torch.zeros(2)
        torch.set_default_device(None)
        self.model = self.model.to_empty(device="cpu")
        nn.init.ones_(self.model.weight)
        nn.init.zeros_(self.model.bias)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(x) + self.cache.new_zeros(2, device="cpu")


@host_only("the engine chooses the default device itself")
@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("first", ["recorder", "engine"])
def test_002_1_5_recorder_before_or_after_the_engine(tmp_path: Path, first: str) -> None:
    engine = Engine() if first == "engine" else None
    recorder = tp.Recorder(tmp_path, keep="tensors").start()
    engine = engine or Engine()
    result = engine.generate(torch.ones(1, 2))
    recorder.close()
    capture = tp.load(tmp_path)
    assert result.device.type == "cpu"
    call = capture.call("Functional.linear.0.forward")
    assert call.tensor("output.0").load().equal(torch.full((1, 2), 2.0))
    assert capture.gaps == ()


def test_002_1_6_another_tool_on_the_same_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent-data-corruption detection hooks the same modules; here both see every call."""
    monkeypatch.setenv("NPU_ASD_ENABLE", "1")
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append("forward")
    )
    gradients = nn.modules.module.register_module_full_backward_hook(
        lambda module, grad_in, grad_out: seen.append("backward")
    )
    x = torch.ones(1, 2, requires_grad=True)
    try:
        capture = record(tmp_path, lambda: model(x).sum().backward())
    finally:
        before.remove()
        gradients.remove()
    assert sorted(seen) == ["backward"] * 3 + ["forward"] * 3
    names = {call.name for call in capture.calls}
    assert {"Module.0.Linear.backward.0", "Module.1.LayerNorm.backward.0"} <= names
    assert {"Functional.linear.0.backward", "Functional.layer_norm.0.backward"} <= names
    assert capture.facts["environment"]["NPU_ASD_ENABLE"] == "1"


# 002: msprobe, checking single calls


def test_002_2_1_jit_compile_is_in_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_npu: Any = types.ModuleType("torch_npu")
    torch_npu.npu = types.SimpleNamespace(
        is_initialized=lambda: True, is_jit_compile_false=lambda: True
    )
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    capture = record(tmp_path / "run", lambda: torch.ones(2).exp(), level="L1")
    assert capture.facts["npu"]["jit_compile"] is False
    # and `check` says where it stands otherwise than it did
    (tmp_path / "jit.py").write_text(
        "from tensorprobe.devices import sim_npu\nsim_npu.install()\n"
        "import torch_npu\ntorch_npu.npu.set_compile_mode(jit_compile=True)\n"
    )
    monkeypatch.delitem(sys.modules, "torch_npu")
    checked = tp.check(
        tmp_path / "run", tmp_path / "out", device="npu", references=tmp_path / "jit.py"
    )
    assert checked.notes == ["jit_compile was False when it was recorded and is True here"]


def test_002_2_2_dtype_conversions_are_calls_with_both_dtypes(tmp_path: Path) -> None:
    x, like = torch.tensor([1.0001, 3e38]), torch.ones(1, dtype=torch.float16)
    capture = record(tmp_path, lambda: (x.type_as(like), x.to(torch.bfloat16), x.double()))
    call = capture.call("Tensor.type_as.0.forward")
    dtypes = [tensor.dtype for tensor in call.tensors]
    assert dtypes == ["float32", "float16", "float16"]
    assert call.tensor("output.0").summary.inf_count == 1
    assert stems(capture) == ["Tensor.type_as", "Tensor.to", "Tensor.double"]
    assert capture.call("Tensor.to.0.forward").args[1] == Special("dtype", "torch.bfloat16")
    # the reference is the conversion itself: overflow to infinity is right, and nothing is raised
    for each in pair(capture.calls):
        row = check_one(each, torch.device("cpu"))
        assert (row.verdict, row.kind, row.reference) == ("pass", "conversion", "as recorded")
        assert row.reference_dtype == row.device_dtype


def test_002_2_3_bfloat16_is_exact_without_torch_too(tmp_path: Path) -> None:
    x = torch.randn(5, 7).bfloat16()
    capture = record(tmp_path, lambda: x @ x.T)
    record_of_x = capture.call("Tensor.matmul.0.forward").tensor("input.0")
    array = record_of_x.array()
    assert (array.dtype.name, array.shape) == ("bfloat16", (5, 7))
    assert np.array_equal(array.view(np.uint16), x.cpu().view(torch.uint16).numpy())
    assert record_of_x.load().equal(x)
    summary = record_of_x.summary
    assert summary.norm == pytest.approx(x.double().norm().item(), rel=1e-12)


def test_002_2_4_dropout_can_be_judged_from_its_record(tmp_path: Path) -> None:
    """Its p, input and output are there: what fell out, how much, and how the rest was scaled."""
    x = torch.rand(100, 100) + 0.5

    def program() -> None:
        tp.seed_all(3)
        F.dropout(x, p=0.25)

    runs = [record(tmp_path / name, program, level="L1") for name in "ab"]
    call = runs[0].call("Functional.dropout.0.forward")
    assert call.kwargs["p"] == 0.25
    source, output = call.tensor("input.0").load(), call.tensor("output.0")
    dropped = output.summary.zero_count / output.numel
    assert dropped == pytest.approx(0.25, abs=0.02)
    kept = output.load() != 0
    assert torch.allclose(output.load()[kept], source[kept] / 0.75)
    # and so is the state of the generator: from there it drops the same values again
    state = call.tensor("buffers.rng_state").load().cpu()
    device_layer(torch_versions.default_device()).set_rng_state(state)
    assert F.dropout(source, p=0.25).equal(output.load())
    # with one seed the two runs drew alike; recording itself draws nothing
    assert runs[1].call(call.name).tensor("output.0").digest == output.digest
    # where the device draws other numbers, share and scale are judged, and the row says so
    (dropout,) = pair(runs[0].calls(name="*dropout*"))
    row = check_one(dropout, torch.device("cpu"))
    same_generator = torch_versions.default_device().type == "cpu"
    assert row.verdict == "pass"
    assert row.reference == ("float64" if same_generator else "its distribution")
    without_state = msgspec.structs.replace(
        call, tensors=tuple(t for t in call.tensors if t.role != "buffer")
    )
    row = check_one(dropout._replace(forward=without_state), torch.device("cpu"))
    assert (row.verdict, row.reference) == ("pass", "its distribution")
    assert row.tensors[0].measure == "share of zeros, in sigmas"


def test_002_2_5_every_tensor_has_the_dtype_it_had(tmp_path: Path) -> None:
    layer, device = nn.Linear(4, 4), torch_versions.default_device().type

    def program() -> None:
        with torch.autocast(device, torch.bfloat16):
            layer(torch.ones(2, 4)).float()

    capture = record(tmp_path, program)
    call = capture.call("Functional.linear.0.forward")
    assert [tensor.dtype for tensor in call.tensors] == ["float32"] * 3 + ["bfloat16"]
    assert f"autocast {device} torch.bfloat16" in call.notes
    cast = capture.call("Tensor.float.0.forward")
    assert [tensor.dtype for tensor in cast.tensors] == ["bfloat16", "float32"]
    # a check calculates its reference in higher precision, and shows both dtypes
    linear = next(each for each in pair(capture.calls) if each.forward.name == call.name)
    row = check_one(linear, torch.device("cpu"))
    assert (row.verdict, row.device_dtype, row.reference_dtype) == ("pass", "bfloat16", "float64")


MAGIC = {
    "__add__": "a + b",
    "__and__": "a & b",
    "__bool__": "bool(a)",
    "__div__": "a / b",
    "__eq__": "a == b",
    "__ge__": "a >= b",
    "__gt__": "a > b",
    "__iadd__": "a += b",
    "__iand__": "a &= b",
    "__idiv__": "a /= b",
    "__ifloordiv__": "a //= b",
    "__ilshift__": "a <<= b",
    "__imod__": "a %= b",
    "__imul__": "a *= b",
    "__ior__": "a |= b",
    "__irshift__": "a >>= b",
    "__isub__": "a -= b",
    "__ixor__": "a ^= b",
    "__lshift__": "a << b",
    "__matmul__": "a @ b",
    "__mod__": "a % b",
    "__mul__": "a * b",
    "__nonzero__": "bool(a)",
    "__or__": "a | b",
    "__radd__": "a + b",
    "__rmul__": "a * b",
    "__rshift__": "a >> b",
    "__sub__": "a - b",
    "__truediv__": "a / b",
    "__xor__": "a ^ b",
}


def symbol(code: str) -> str:
    return "bool()" if code == "bool(a)" else code.split()[1]


def test_002_2_6_methods_are_shown_as_they_are_written(tmp_path: Path) -> None:
    for name, code in MAGIC.items():
        assert str(symbol_of(f"Tensor.{name}")).removesuffix(" reversed") == symbol(code)
    a, b = torch.tensor([6, 5]), torch.tensor([1, 2])

    def program() -> None:
        for text in dict.fromkeys(MAGIC.values()):
            scope = {"a": a.float() if "/=" in text and "//" not in text else a.clone(), "b": b}
            exec(text if "(" not in text else "bool(a[0])", scope)

    capture = record(tmp_path, program, level="L1")
    assert set(map(symbol, MAGIC.values())) <= {symbol_of(call.op) for call in capture.calls}


# 002: msprobe, comparing


class FusedSoftmax(torch.autograd.Function):
    """A fused kernel as libraries ship them: outside torch's operators, with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = (x * scale).softmax(-1)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return (grad - (grad * y).sum(-1, keepdim=True)) * y * ctx.scale, None


def test_002_3_1_1_fused_kernel_with_its_own_backward_is_recorded(tmp_path: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    weight = torch.randn(2, 3)

    def program() -> None:
        (FusedSoftmax.apply(x, 0.5) * weight).sum().backward()

    capture = record(tmp_path, program, level="L1")
    forward = capture.call("Function.FusedSoftmax.0.forward")
    assert forward.tensor("output.0").load().equal((x * 0.5).softmax(-1).detach())
    backward = capture.call("Function.FusedSoftmax.0.backward")
    assert backward.tensor("input.0").load().equal(weight)
    assert backward.tensor("output.0").load().equal(x.grad)
    x.grad = None
    capture = record(tmp_path / "loss", lambda: FusedLoss.apply(x).backward())
    assert capture.call("Function.FusedLoss.0.forward").tensor("output.0").load() >= 0
    backward = capture.call("Function.FusedLoss.0.backward")
    assert backward.tensor("output.0").load().equal(x.grad)


class FusedLoss(torch.autograd.Function):
    """A fused loss: backward begins from what it returns, and no other call ever sees that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def test_002_3_2_1_a_third_recording_destroys_neither(tmp_path: Path) -> None:
    """Also when an earlier one ended badly, and whatever else lies in the folder."""
    (tmp_path / "notes.txt").write_text("mine")
    for value in (1.0, 2.0, 3.0):
        recorder = tp.Recorder(tmp_path, level="L1").start()
        torch.full((2,), value)
        if value == 2.0:
            with (tmp_path / "rank0" / "step0" / "calls.jsonl").open("a") as log:
                log.write('{"type": "ca')  # cut off
        recorder.close()
    folders = [tmp_path / "earlier" / "1", tmp_path / "earlier" / "2", tmp_path]
    assert [tp.load(f).calls[0].args[1] for f in folders] == [1.0, 2.0, 3.0]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_002_3_2_2_operators_are_one_option_on_any_device(tmp_path: Path) -> None:
    config = {"task": "tensor", "level": "L2", "dump_path": str(tmp_path / "out"), "step": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with tp.Recorder.from_config(tmp_path / "config.json") as rec:
        nn.functional.layer_norm(torch.randn(2, 4), (4,))
        rec.step()
        torch.ones(1)
    capture = tp.load(tmp_path / "out")
    assert [call.op for call in capture.calls][-1] == "torch.ops.aten.native_layer_norm.default"
    assert len(capture.calls[-1].outputs) == 3


def test_002_3_2_3_selecting_less_renumbers_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)))
    x = torch.ones(1, 2)
    full = record(tmp_path / "full", lambda: model(x).sum().backward())
    model.zero_grad()
    narrow = record(tmp_path / "narrow", lambda: model(x).sum().backward(), modules=["2*"])
    names = [call.name for call in full.calls]
    assert 0 < len(narrow.calls) < len(names) / 2
    for call in narrow.calls:
        twin = full.call(call.name)
        assert (call.module, call.op) == (twin.module, twin.op)
        assert [t.digest for t in call.tensors] == [t.digest for t in twin.tensors]
    found = tp.compare(narrow, full)
    assert found.verdict.verdict == "match", str(found.verdict)
    assert found.verdict.counts["aligned"] == len(narrow.calls)
    assert len(found.one_sided) == len(full.calls) - len(narrow.calls)


def test_002_3_3_2_error_107002_cannot_come_from_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that was never set stays untouched at every step and rank."""
    monkeypatch.setitem(sys.modules, "torch_npu", NpuOfAnotherProcess("torch_npu"))
    monkeypatch.setenv("RANK", "3")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tp.Recorder(tmp_path, level="L2", keep="digest") as rec:
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            rec.step()
    capture = tp.load(tmp_path)
    assert (capture.ranks, capture.steps, capture.gaps) == ((3,), (0, 1), ())
    guard = tp.Guard(tmp_path / "guard", "errors", log=lambda text: None, timeout=0)
    with pytest.raises(RuntimeError), guard:
        model(torch.ones(3))
    (finding,) = guard.findings
    assert (finding.name, finding.rank) == ("Functional.linear.0.forward", 3)


def test_002_3_3_3_deeper_nests_are_named_by_their_place(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, nest: Any, *, options: Any) -> Any:
            return {"logits": nest[0][2], "past": [(nest[0][0],)]}

    tensors = [torch.full((1,), float(n)) for n in range(4)]

    def program() -> None:
        Takes()([tensors[:3]], options={"mask": tensors[3]})

    capture = record(tmp_path, program, level="L0")
    call = capture.call("Module.Takes.forward.0")
    values = {t.name.removeprefix(call.name + "."): t.summary.max for t in call.tensors}
    assert values == {
        "input.0.0.0": 0.0,
        "input.0.0.1": 1.0,
        "input.0.0.2": 2.0,
        "input.options.mask": 3.0,
        "output.logits": 2.0,
        "output.past.0.0": 0.0,
    }


def test_002_3_3_4_a_stack_tells_the_line_that_called(tmp_path: Path) -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)  # this line

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    capture = record(tmp_path / "x", lambda: helper(x), level="L1")
    (frame, *_) = capture.call("Torch.relu.0.forward").stack
    file, line, function = re.fullmatch(r"(.+):(\d+) in (.+)", frame).groups()
    assert Path(file).read_text().splitlines()[int(line) - 1].endswith("# this line")
    assert function.endswith("helper")
    other = record(tmp_path / "y", lambda: helper(y), level="L1")
    assert f"{Path(file).name}:{line} in {function}" in str(tp.compare(capture, other).verdict)


@host_only("about machines without torch_npu")
def test_002_3_3_5_operators_of_one_call_without_torch_npu(tmp_path: Path) -> None:
    """Operators of one module, forward and backward, on a device that is no NPU."""
    assert "torch_npu" not in sys.modules
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    capture = record(
        tmp_path, lambda: model(torch.ones(1, 2)).sum().backward(), level="L2", modules=["1"]
    )
    assert [call.name for call in capture.calls(direction="forward")] == ["Aten.gelu.0.forward"]


def test_002_3_3_6_a_relative_path_below_odd_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "abc++ ü" / os.fsdecode(b"not utf-8 \xff")
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    capture = record(Path("./dump"), lambda: torch.ones(2).relu())
    assert (folder / "dump" / "capture.json").is_file()
    assert stems(capture) == ["Torch.ones", "Tensor.relu"]


def test_002_3_3_7_both_gradients_of_matmul_in_any_dimension(tmp_path: Path) -> None:
    for number, (left, right) in enumerate(
        [
            ((2, 3), (3, 4)),
            ((5, 2, 3), (3, 4)),
            ((5, 2, 3), (5, 3, 4)),
            ((3,), (3, 4)),
            ((3,), (3,)),
        ]
    ):
        x = torch.randn(left, requires_grad=True)
        w = torch.randn(right, requires_grad=True)
        folder = tmp_path / str(number)
        capture = record(folder, lambda x=x, w=w: x.matmul(w).square().sum().backward())
        call = capture.call("Tensor.matmul.0.backward")
        assert call.tensor("output.0").load().equal(x.grad)
        assert call.tensor("output.1").load().equal(w.grad)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
)
def test_002_3_3_8_record_and_file_have_one_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -2.0]).to(dtype)
    capture = record(tmp_path, lambda: x.clone())
    for tensor in capture.call("Tensor.clone.0.forward").tensors:
        assert f"torch.{tensor.dtype}" == str(dtype)
        assert tensor.array().dtype.itemsize == x.element_size()
        assert tensor.load().view(torch.uint8).equal(x.view(torch.uint8))


def test_002_3_3_9_the_program_goes_on_after_the_last_step(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
    seen = 0
    with tp.Recorder(tmp_path, steps=[1]) as rec:
        for (batch,) in data:
            batch.sum()
            seen += 1
            rec.step()
    assert seen == 5
    capture = tp.load(tmp_path)
    assert capture.steps == (1,)
    assert capture.call("Tensor.sum.0.forward").tensor("output.0").summary.max == 5.0


def test_002_3_3_10_type_checks_of_libraries_hold_whenever_recording_began(tmp_path: Path) -> None:
    """`Only support fusion of gelu and swiglu`: functions kept before, during and after agree."""
    kept: list[Any] = [F.gelu, F.silu, type(F.gelu), type(F.silu)]
    with tp.Recorder(tmp_path, level="L1"):
        kept += [F.gelu, F.silu, type(F.gelu), type(F.silu)]
        for activation in (kept[0], kept[5]):
            activation(torch.ones(2))
    kept += [F.gelu, F.silu, type(F.gelu), type(F.silu)]
    assert all(a is b is c for a, b, c in zip(kept[:4], kept[4:8], kept[8:], strict=True))
    assert stems(tp.load(tmp_path))[1::2] == ["Functional.gelu", "Functional.silu"]


def test_002_3_3_11_transposed_outputs_and_gradients_are_read_as_they_lie(tmp_path: Path) -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    weights = torch.randn(5, 3, 4)
    capture = record(tmp_path, lambda: (x.permute(2, 0, 1) * weights).sum().backward())
    call = capture.call("Tensor.permute.0.forward")
    output = call.tensor("output.0")
    assert output.stride == (1, 20, 5)
    assert output.load().equal(x.detach().permute(2, 0, 1))
    backward = capture.call("Tensor.permute.0.backward")
    assert backward.tensor("output.0").load().equal(weights.permute(1, 2, 0))
