"""Captures go into msprobe's layout and back, and what does not is said."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msprobe_making import SAMPLES, leaf, relu_dump, write_dump
from torch import nn

import tensorprobe as tp
from recorded import record
from tensorprobe.cli.main import main
from tensorprobe.operators import native_name
from tensorprobe.peers.msprobe import msprobe_layout as msprobe
from tensorprobe.records import Call, Capture
from tensorprobe.store import native


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x) * 2))


def trainer() -> Callable[[], None]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = torch.randn(2, 4), torch.tensor([0, 1])

    def train() -> None:
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return train


def strip(call: Call) -> tuple[object, ...]:
    tensors = [
        (native_name(t.name), t.role, t.dtype, t.shape, t.requires_grad, t.load().tolist())
        for t in call.tensors
    ]
    scalars = [arg for arg in call.args if isinstance(arg, int | float)]
    return native_name(call.name), call.direction, scalars, tensors


def kept(capture: Capture) -> list[tuple[object, ...]]:
    """What msprobe's layout has a place for."""
    return [
        strip(call)
        for call in capture.calls
        if not call.name.startswith("Optimizer.")
        and not (call.name.startswith("Module.") and not call.module)
    ]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_to_msprobe_and_back(tmp_path: Path, level: str) -> None:
    capture = record(tmp_path / "a", trainer(), level=level)
    assert main(["convert", str(tmp_path / "a"), "--to", "msprobe", "-o", str(tmp_path / "b")]) == 0
    there = tp.load(tmp_path / "b")
    assert there.layout == "msprobe"
    assert main(["convert", str(tmp_path / "b"), "--to", "native", "-o", str(tmp_path / "c")]) == 0
    back = tp.load(tmp_path / "c")
    assert back.layout == "native"
    assert not there.gaps
    assert not back.gaps
    assert kept(back) == kept(capture)
    if level != "L1":  # msprobe has no tree there
        assert back.call("Module.fc1.Linear.backward.0").module == "fc1"
    comparison = tp.compare(there, capture)
    assert comparison.verdict.verdict == "match"


def test_native_to_native_is_the_same(tmp_path: Path) -> None:
    capture = record(tmp_path / "a", trainer())
    assert native.write(capture, tmp_path / "b") == []
    again = tp.load(tmp_path / "b")
    fields = ("name", "op", "module", "direction", "parent", "stack", "status", "notes", "thread")
    for a, b in zip(capture.calls, again.calls, strict=True):
        assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]
        for t, u in zip(a.tensors, b.tensors, strict=True):
            assert (t.name, t.summary, t.digest, t.stride) == (
                u.name,
                u.summary,
                u.digest,
                u.stride,
            )
            assert torch.equal(t.load(), u.load())


def test_msprobe_to_native_and_back_keeps_every_name(tmp_path: Path) -> None:
    x = leaf(torch.ones(2))
    names = ["Tensor.__rmul__.0.forward", "Tensor.mul.0.forward", "Tensor.__add__.0.forward"]
    write_dump(tmp_path / "a", {name: {"output": [x]} for name in names})
    assert native.write(tp.load(tmp_path / "a"), tmp_path / "b") == []
    assert msprobe.write(tp.load(tmp_path / "b"), tmp_path / "c") == []
    for folder in "abc":
        assert [call.name for call in tp.load(tmp_path / folder).calls] == names


def test_files_as_msprobe_has_them(tmp_path: Path) -> None:
    msprobe.write(record(tmp_path / "a", trainer(), level="mix"), tmp_path / "b")
    folder = tmp_path / "b" / "step0" / "rank0"
    dump = json.loads((folder / "dump.json").read_text())
    assert list(dump) == ["task", "level", "framework", "dump_data_dir", "written_by", "data"]
    assert (dump["task"], dump["level"]) == ("tensor", "mix")
    assert list(dump["data"])[:3] == [
        "Functional.linear.0.forward",
        "Module.fc1.Linear.forward.0",
        "Tensor.__mul__.0.forward",
    ]
    module = dump["data"]["Module.fc1.Linear.forward.0"]
    assert list(module) == ["input_args", "input_kwargs", "output", "parameters"]
    assert list(module["parameters"]["weight"]) == [
        "type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "data_name",
    ]  # fmt: skip
    assert module["parameters"]["weight"]["data_name"] == (
        "Module.fc1.Linear.forward.0.parameters.weight.pt"
    )
    grads = dump["data"]["Module.fc1.Linear.parameters_grad.0"]
    assert grads["bias"][0]["data_name"] == "Module.fc1.Linear.parameters_grad.0.bias.pt"
    relu = dump["data"]["Functional.relu.0.forward"]
    assert relu["input_kwargs"] == {"inplace": {"type": "bool", "value": False}}
    names = {path.name for path in (folder / "dump_tensor_data").iterdir()}
    assert "Functional.linear.1.backward.output.2.pt" in names
    tree = json.loads((folder / "construct.json").read_text())
    assert tree["Functional.linear.0.forward"] == "Module.fc1.Linear.forward.0"
    assert tree["Functional.linear.1.backward"] == "Module.fc2.Linear.backward.0"
    assert tree["Module.fc1.Linear.forward.0"] is None
    assert tree["Tensor.add_.0.forward"] == "optimizer"
    stacks = json.loads((folder / "stack.json").read_text())
    frames = next(s for names, s in stacks.values() if "Tensor.__mul__.0.forward" in names)
    assert frames[0].startswith(f"File {__file__}, line ")
    assert frames[0].endswith(", in forward, \n return self.fc2(F.relu(self.fc1(x) * 2))")


def test_non_finite_statistics_are_those_of_torch(tmp_path: Path) -> None:
    """By which msprobe's own tools find overflows."""
    inf, nan = math.inf, math.nan
    values = [[1, inf, nan], [1, -inf], [inf, 2], [inf, -inf], [3.0, 4.0]]

    def program() -> None:
        for numbers in values:
            torch.tensor(numbers) * inf
        torch.tensor(-inf) * 1

    capture = record(tmp_path / "a", program, level="L1", keep="stats")
    msprobe.write(capture, tmp_path / "b")
    dump = json.loads((tmp_path / "b" / "step0" / "rank0" / "dump.json").read_text())["data"]

    def statistics(number: int) -> list[Any]:
        argument, factor = dump[f"Tensor.__mul__.{number}.forward"]["input_args"]
        assert factor in ({"type": "float", "value": inf}, {"type": "int", "value": 1})
        return [argument[key] for key in ("Max", "Min", "Mean", "Norm")]

    for number, numbers in enumerate(values):
        x = torch.tensor(numbers)
        expected = [x.max(), x.min(), x.mean(), x.norm()]
        assert statistics(number) == pytest.approx([t.item() for t in expected], nan_ok=True)
    assert statistics(len(values)) == [-inf] * 4
    text = (tmp_path / "b" / "step0" / "rank0" / "dump.json").read_text()
    # and from msprobe's files to native ones and back nothing of it is lost
    assert text.count("NaN") >= 4
    native.write(tp.load(tmp_path / "b"), tmp_path / "c")
    msprobe.write(tp.load(tmp_path / "c"), tmp_path / "d")
    again = (tmp_path / "d" / "step0" / "rank0" / "dump.json").read_text()
    assert [again.count(word) for word in ("NaN", "Infinity")] == [
        text.count(word) for word in ("NaN", "Infinity")
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "int64", "complex64"])
def test_every_dtype_is_exact(tmp_path: Path, dtype: str) -> None:
    x = torch.randn(5, 3).to(getattr(torch, dtype))
    capture = record(tmp_path / "a", x.clone, level="L1")
    msprobe.write(capture, tmp_path / "b")
    loaded = tp.load(tmp_path / "b").calls[0].tensor("output.0").load()
    assert loaded.dtype == x.dtype
    assert torch.equal(loaded.view(torch.uint8), x.view(torch.uint8))


def test_what_is_not_carried_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a", trainer(), keep="digest")
    main(["convert", str(tmp_path / "a"), "--to", "msprobe", "-o", str(tmp_path / "b")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("b (msprobe).")
    assert lines[1] == "not as it was: 2 calls are named as operators: the recording does not say who wrote a.add(b) for a + b"  # fmt: skip  # noqa: E501
    assert "not as it was: 1 optimizer steps (msprobe has the calls inside them only)" in lines
    assert any("digests (msprobe has a CRC-32" in line for line in lines)


def test_an_output_that_is_there_is_refused(tmp_path: Path) -> None:
    relu_dump(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    assert main(["convert", str(tmp_path / "a"), "--to", "native", "-o", str(tmp_path / "b")]) == 2


def test_hostile_names_stay_in_the_output_folder(tmp_path: Path) -> None:
    x = torch.ones(2)
    name = "Torch.../../../../evil.0.forward"
    write_dump(
        tmp_path / "a",
        {name: {"output": [leaf(x, data_name="x.pt")]}},
        task="tensor",
        tensors={"x.pt": x},
    )
    capture = tp.load(tmp_path / "a")
    msprobe.write(capture, tmp_path / "out" / "b")
    native.write(capture, tmp_path / "out" / "c")
    outside = [p for p in tmp_path.rglob("*evil*") if tmp_path / "out" not in p.parents]
    assert not outside
    assert tp.load(tmp_path / "out" / "b").calls[0].tensor("output.0").load().tolist() == [1, 1]


def test_a_crc_is_not_held_against_a_native_digest(tmp_path: Path) -> None:
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    capture = record(tmp_path / "a", lambda: F.relu(x), level="L1", keep="digest")
    record_ = {"input_args": [leaf(x, md5="403415c8")], "input_kwargs": {"inplace": None},
               "output": [leaf(x.relu(), md5="30087a34")]}  # fmt: skip
    write_dump(tmp_path / "b", {"Functional.relu.0.forward": record_})
    verdict = tp.compare(tmp_path / "b", capture).verdict
    assert verdict.verdict == "match"
    assert verdict.mode == "stats"
    assert verdict.notes[0] == (
        "digests of two kinds (crc32 and tensorprobe) were not compared: statistics were"
    )


def test_gradients_of_the_last_node_are_not_held_against_ours(tmp_path: Path) -> None:
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]], requires_grad=True)
    w = torch.ones(3, 2, requires_grad=True)
    capture = record(tmp_path / "a", lambda: F.linear(x, w).sum().backward(), level="L1")
    ones = torch.ones(2, 3)
    data = {
        "Functional.linear.0.forward": {
            "input_args": [leaf(x), leaf(w)], "input_kwargs": {}, "output": [leaf(F.linear(x, w))]},
        "Tensor.sum.0.forward": {"input_args": [leaf(F.linear(x, w))], "input_kwargs": {},
                                 "output": [leaf(F.linear(x, w).sum())]},
        "Tensor.sum.0.backward": {"input": [leaf(torch.tensor(1.0))], "output": [leaf(ones)]},
        # their order, and the weight's gradient transposed
        "Functional.linear.0.backward": {
            "input": [leaf(ones)], "output": [leaf(ones * 7), leaf(torch.ones(2, 2))]},
    }  # fmt: skip
    write_dump(tmp_path / "b", data)
    verdict = tp.compare(tmp_path / "b", capture).verdict
    assert verdict.verdict == "match"
    assert any("last autograd node" in note for note in verdict.notes)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no samples of the peer here")
def test_samples_of_one_run_at_three_keeps_match() -> None:
    dumps = SAMPLES / "dump"
    for level in ("L0", "L1", "mix"):
        stats = tp.load(dumps / f"{level}_statistics")
        for other in ("md5", "tensor"):
            verdict = tp.compare(dumps / f"{level}_{other}", stats).verdict
            assert verdict.counts["only_actual"] == verdict.counts["only_expected"] == 0


def test_the_three_layouts_compare_with_each_other(tmp_path: Path) -> None:
    record(tmp_path / "native", trainer(), level="L1")
    for name in ("msprobe", "ptdbg"):
        out = ["--to", name, "-o", str(tmp_path / name)]
        assert main(["convert", str(tmp_path / "native"), *out]) == 0
    for ours in ("native", "msprobe", "ptdbg"):
        for theirs in ("native", "msprobe", "ptdbg"):
            verdict = tp.compare(tmp_path / ours, tmp_path / theirs, timeout=5).verdict
            assert (ours, theirs, verdict.verdict) == (ours, theirs, "match")
            assert verdict.counts["aligned"] >= 14
