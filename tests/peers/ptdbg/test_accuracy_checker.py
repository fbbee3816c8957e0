"""Records of api_accuracy_checker as captures; hostile ones too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ptdbg_reading import flip, read_everything

import tensorprobe as tp
from tensorprobe.errors import UnreadableCapture
from tensorprobe.peers.ptdbg import accuracy_checker
from tensorprobe.records import Special

TENSOR = {
    "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], "Max": 1.5, "Min": -1.0,
    "requires_grad": True,
}  # fmt: skip
FORWARD = {
    "Functional*linear*0": {"args": [TENSOR, TENSOR], "kwargs": {"bias": TENSOR}},
    "Tensor*sum*1": {
        "args": [TENSOR, [{"type": "int", "value": 0}, {"type": "int", "value": 1}]],
        "kwargs": {
            "keepdim": {"type": "bool", "value": True},
            "dtype": {"type": "torch.dtype", "value": "torch.float64"},
        },
    },
    "Tensor*index*0": {"args": [TENSOR, {"type": "slice", "value": [0, None, 2]}], "kwargs": {}},
}


def write(folder: Path, forward: Any = FORWARD, backward: Any = None, pid: int = 7) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"forward_info_{pid}.json"
    path.write_text(json.dumps(forward))
    if backward is not None:
        (folder / f"backward_info_{pid}.json").write_text(json.dumps(backward))
    return path


def test_arguments_of_every_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "step1", backward={"Functional*linear*0": [TENSOR]})
    (tmp_path / "step1" / "stack_info_7.json").write_text(
        json.dumps({"Functional*linear*0": ["File /a/m.py, line 8, in forward, \n y = f(x)"]})
    )
    for place in (path, tmp_path / "step1", tmp_path):
        capture = tp.load(place)
        assert capture.layout == "api_accuracy_checker"
        assert capture.gaps == ()
        assert [call.name for call in capture.calls] == [
            "Functional.linear.0.forward",
            "Tensor.sum.1.forward",
            "Tensor.index.0.forward",
            "Functional.linear.0.backward",
        ]
        linear, total, index, backward = capture.calls
        assert (linear.op, linear.step) == ("torch.nn.functional.linear", 1)
        assert linear.stack == ("/a/m.py:8 in forward",)
        assert linear.kwargs["bias"].name == "Functional.linear.0.forward.input.bias"
        assert total.args[1] == [0, 1]
        assert total.kwargs == {"keepdim": True, "dtype": Special("dtype", "torch.float64")}
        assert index.args[1] == slice(0, None, 2)
        assert backward.tensor("input.0").summary is not None


def test_stored_tensors_are_found_by_their_own_name(tmp_path: Path) -> None:
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    folder = tmp_path / "forward_real_data" / "rank7"
    folder.mkdir(parents=True)
    torch.save(x, folder / "Functional.relu.0.0.pt")
    leaf = {
        "type": "torch.Tensor", "requires_grad": False,
        "datapath": "/somewhere/else/forward_real_data/rank7/Functional.relu.0.0.pt",
    }  # fmt: skip
    write(tmp_path, {"Functional.relu.0": {"args": [leaf], "kwargs": {}}})
    record = tp.load(tmp_path).calls[0].tensor("input.0")
    assert torch.equal(record.load(), x)
    secret = {**leaf, "datapath": "../../../../etc/passwd"}
    write(tmp_path, {"Functional.relu.0": {"args": [secret], "kwargs": {}}})
    capture = tp.load(tmp_path)
    assert "passwd is missing" in capture.gaps[0].reason


@pytest.mark.parametrize(
    "forward",
    [
        {"Functional.relu.0": 5},
        {"no name": {"args": []}},
        {"Functional.relu.0": {"args": [{"type": "torch.Tensor"}]}},
        {"Functional.relu.0": {"args": [{**TENSOR, "shape": [-1]}]}},
        {"Functional.relu.0": {"args": [{**TENSOR, "dtype": "os.system"}]}},
        {"Functional.relu.0": {"args": {"a": 1}}},
        {"Functional.relu.0": {"args": ["text"]}},
    ],
)
def test_damage_is_a_gap(forward: Any, tmp_path: Path) -> None:
    capture = tp.load(write(tmp_path, {**FORWARD, **forward}))
    assert len(capture.calls) == 3
    assert len(capture.gaps) == 1


def test_flipped_bytes(tmp_path: Path) -> None:
    chance = random.Random(3)
    path = write(tmp_path, backward={"Functional*linear*0": [TENSOR]})
    good = path.read_bytes()
    for _ in range(300):
        path.write_bytes(flip(good, chance))
        try:
            capture = accuracy_checker.read(path)
        except UnreadableCapture:
            continue
        read_everything(capture.calls)


def test_a_record_can_be_checked(tmp_path: Path) -> None:
    """What such records are for: each call alone, on data made from their ranges."""
    linear = {"Functional*relu*0": {"args": [TENSOR], "kwargs": {}}}
    checked = tp.check(write(tmp_path / "r", linear), tmp_path / "out")
    assert [(row.name, row.verdict) for row in checked.rows] == [
        ("Functional.relu.0.forward", "pass")
    ]
