"""msprobe's dumps are read at any depth, with all that they say, whatever variant they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from msprobe_making import SAMPLES, leaf, relu_dump, write_dump

import tensorprobe as tp
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Fields, Special, TensorSummary


def test_any_depth(tmp_path: Path) -> None:
    dump = relu_dump(tmp_path / "run" / "step3" / "rank1")
    paths = [dump, dump.parent, dump.parent.parent, dump / "dump.json"]
    paths.append(dump / "dump_tensor_data")
    for path in paths:
        capture = tp.load(path)
        assert capture.layout == "msprobe"
        (call,) = capture.calls
        assert (call.step, call.rank) == (3, 1)
        assert call.op == "torch.nn.functional.relu"
        assert call.kwargs == {"inplace": False}
        assert call.tensor("output.0").load().tolist() == [[0, 2], [3, 0]]


def test_modules_come_before_what_they_call(tmp_path: Path) -> None:
    x = torch.ones(2)
    forward = {"input_args": [leaf(x)], "input_kwargs": {}, "output": [leaf(x)]}
    backward = {"input": [leaf(x)], "output": [leaf(x)]}
    write_dump(
        tmp_path / "step0" / "proc7",
        {
            "Functional.linear.0.forward": forward,
            "Module.net.fc.Linear.forward.0": {**forward, "parameters": {"weight": leaf(x)}},
            "Tensor.__add__.0.forward": forward,
            "Module.net.Block.forward.0": {**forward, "parameters": {}},
            "Tensor.__add__.0.backward": backward,
            "Module.net.fc.Linear.parameters_grad.0": {"weight": [leaf(x)]},
            "Module.net.fc.Linear.backward.0": {"input": [leaf(x)], "output": []},
            "Tensor.add_.0.forward": forward,
        },
        level="mix",
        construct={
            "Functional.linear.0.forward": "Module.net.fc.Linear.forward.0",
            "Module.net.fc.Linear.forward.0": "Module.net.Block.forward.0",
            "Tensor.__add__.0.forward": ["Module.net.Block.forward.0", 0],
            "Module.net.Block.forward.0": None,
            "optimizer": None,
            "Tensor.add_.0.forward": "optimizer",
            "megatron_micro_step_number": 1,
        },
        stack={"0": [["Tensor.__add__.0.forward"], ["File /m.py, line 8, in forward, \n a + b"]]},
    )
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls] == [
        "Module.net.Block.forward.0",
        "Module.net.fc.Linear.forward.0",
        "Functional.linear.0.forward",
        "Tensor.__add__.0.forward",
        "Tensor.__add__.0.backward",
        "Module.net.fc.Linear.backward.0",
        "Module.net.fc.Linear.parameters_grad.0",
        "Tensor.add_.0.forward",
    ]
    assert [call.index for call in capture.calls] == list(range(8))
    add = capture.call("Tensor.__add__.0.forward")
    assert add.op == "torch.Tensor.add"
    assert (add.module, add.parent) == ("net", "Module.net.Block.forward.0")
    assert add.stack == ("/m.py:8 in forward",)
    linear = capture.call("Module.net.fc.Linear.forward.0")
    assert linear.tensor("parameters.weight").role == "parameter"
    grads = capture.call("Module.net.fc.Linear.parameters_grad.0")
    assert (grads.direction, grads.tensors[0].role) == ("backward", "parameter_grad")
    assert not capture.gaps


def test_stacks_by_name_as_they_were_until_2025(tmp_path: Path) -> None:
    site = "/usr/lib/python3/site-packages"
    frames = [
        f"File {site}/msprobe/core/data_dump/api_registry.py, line 95, in api_function, \n x",
        "File /home/me/resnet.py, line 155, in forward, \n out = self.relu(out)",
        f"File {site}/msprobe/pytorch/hook_module/hook_module.py, line 48, in __call__, \n y",
        "File /home/me/msprobe/train.py, line 3, in <module>, \n model(x)",
    ]
    record = {"input_args": [], "input_kwargs": {}, "output": []}
    write_dump(
        tmp_path,
        {"Functional.relu.0.forward": record, "Functional.relu.1.forward": record},
        stack={"Functional.relu.0.forward": frames, "Functional.relu.1.forward": []},
    )
    capture = tp.load(tmp_path)
    assert not capture.gaps
    first, second = capture.calls
    assert first.stack == (
        "/home/me/resnet.py:155 in forward",
        "/home/me/msprobe/train.py:3 in <module>",
    )
    assert second.stack == ()


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    args = [
        {"type": "int", "value": 3},
        {"type": "float", "value": 0.5},
        {"type": "float", "value": None, "nonfinite": "-inf"},
        {"type": "str", "value": "mean"},
        {"type": "slice", "value": [0, None, 2]},
        {"type": "ellipsis", "value": "..."},
        {"type": "torch.Size", "value": [2, 3]},
        {"type": "torch.dtype", "value": "torch.float16"},
        {"type": "torch.device", "value": "cuda:0"},
        {"type": "torch.memory_format", "format": "channels_last"},
        {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "x"},
        {"type": "numpy.ndarray", "dtype": "float32", "shape": [2], "Max": 1.0},
        {"type": "somebody.Else"},
        None,
        [{"type": "bool", "value": True}],
    ]
    write_dump(tmp_path, {"Torch.f.0.forward": {"input_args": args, "input_kwargs": {}}})
    (call,) = tp.load(tmp_path).calls
    assert call.args == (
        3,
        0.5,
        -math.inf,
        "mean",
        slice(0, None, 2),
        ...,
        (2, 3),
        Special("dtype", "torch.float16"),
        Special("device", "cuda:0"),
        Special("memory_format", "torch.channels_last"),
        Special("process_group", "ranks [0, 1]"),
        Special("numpy", "float32[2]"),
        Special("unsupported", "somebody.Else None"),
        None,
        [True],
    )


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        ({"Max": 2.0, "Min": -1.0, "Mean": 0.5, "Norm": 3.0}, (-1.0, 2.0, 0.5, 3.0, 0, 0, 0)),
        ({"Max": 5, "Min": 0, "Mean": None, "Norm": None}, (0, 5, None, None, 0, 0, 0)),
        ({"Max": True, "Min": False, "Mean": None}, (False, True, None, None, 0, 0, 0)),
        ({"Max": math.nan, "Min": math.nan}, (None, None, None, None, 1, 0, 0)),
        ({"Max": math.inf, "Min": 1.0, "Mean": math.inf}, (1.0, math.inf, None, None, 0, 1, 0)),
        # their fp16 norm of 100000 times 300
        ({"Max": 3.0, "Min": 1.0, "Mean": 2.0, "Norm": math.inf}, (1.0, 3.0, 2.0, None, 0, 0, 0)),
        ({"Max": None, "Min": None, "Mean": None, "Norm": None}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_statistics(tmp_path: Path, fields: dict[str, object], summary: object) -> None:
    base = {"type": "torch.Tensor", "dtype": "torch.float16", "shape": [2], "requires_grad": True}
    write_dump(tmp_path, {"Torch.f.0.forward": {"output": [{**base, **fields}]}})
    (call,) = tp.load(tmp_path).calls
    expected = TensorSummary(*summary, counted=False) if isinstance(summary, tuple) else None
    assert call.tensor("output.0").summary == expected


@pytest.mark.parametrize(
    ("md5", "digest"),
    [
        ("8fa00131", "crc32:8fa00131"),
        ("0x3fb46b9701ce3df9", "xor:0x3fb46b9701ce3df9"),
        (0.7175, "xor:0.7175"),
        ("d41d8cd98f00b204e9800998ecf8427e", "md5:d41d8cd98f00b204e9800998ecf8427e"),
    ],
)
def test_checksums_carry_their_kind(tmp_path: Path, md5: object, digest: str) -> None:
    write_dump(tmp_path, {"Torch.f.0.forward": {"output": [leaf(torch.ones(2), md5=md5)]}})
    (call,) = tp.load(tmp_path).calls
    assert call.tensor("output.0").digest == digest


def test_outputs_keep_their_shape(tmp_path: Path) -> None:
    x = leaf(torch.ones(2))
    write_dump(
        tmp_path,
        {
            "Torch.one.0.forward": {"output": [x]},
            "Torch.two.0.forward": {"output": [x, x]},
            "Module.b.Block.forward.0": {"output": {"a": x}},
            "Module.d.Block.forward.0": {"output": [{"a": x}]},
            "Torch.one.0.backward": {"input": [x], "output": [x, None, x]},
            "Torch.none.0.forward": {"input_args": [], "input_kwargs": {}},
        },
    )
    capture = tp.load(tmp_path)
    names = {
        call.name: [record.name.removeprefix(call.name + ".") for record in call.tensors]
        for call in capture.calls
    }
    assert names == {
        "Torch.one.0.forward": ["output.0"],
        "Torch.two.0.forward": ["output.0", "output.1"],
        "Module.b.Block.forward.0": ["output.a"],
        "Module.d.Block.forward.0": ["output.a"],
        "Torch.one.0.backward": ["input.0", "output.0", "output.2"],
        "Torch.none.0.forward": [],
    }
    assert isinstance(capture.call("Module.b.Block.forward.0").outputs, Fields)


def test_saved_values(tmp_path: Path) -> None:
    x = torch.ones(2)
    write_dump(
        tmp_path / "step0" / "rank0",
        {
            "h.0.debug": leaf(x, data_name="h.0.debug.pt"),
            "h_grad.0.debug": leaf(x),
            "nested.0.debug": {"a": leaf(x), "b": [{"type": "int", "value": 1}, leaf(x)]},
        },
        level="debug",
        file="debug.json",
        tensors={"h.0.debug.pt": x},
    )
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls] == [
        "Saved.h.0.forward",
        "Saved.h.0.backward",
        "Saved.nested.0.forward",
    ]
    assert capture.calls[0].tensor("output.0").load().tolist() == [1, 1]
    assert [t.name for t in capture.calls[2].tensors] == [
        "Saved.nested.0.forward.output.a",
        "Saved.nested.0.forward.output.b.1",
    ]


def test_the_structure_alone(tmp_path: Path) -> None:
    write_dump(
        tmp_path,
        {},
        task="structure",
        level="mix",
        construct={"Functional.linear.0.forward": "Module.fc.Linear.forward.0",
                   "Module.fc.Linear.forward.0": None, "optimizer": None},
    )  # fmt: skip
    capture = tp.load(tmp_path)
    assert [call.name for call in capture.calls] == [
        "Module.fc.Linear.forward.0",
        "Functional.linear.0.forward",
    ]


def test_the_newest_of_two_processes_is_read_and_the_other_named(tmp_path: Path) -> None:
    import os

    relu_dump(tmp_path / "step0" / "proc9")
    old = relu_dump(tmp_path / "step0" / "proc100")
    os.utime(old / "dump.json", (1, 1))
    capture = tp.load(tmp_path)
    assert len(capture.calls) == 1
    assert [gap.name for gap in capture.gaps] == ["step0/proc100"]
    assert len(tp.load(old).calls) == 1


def test_the_rank_of_a_lone_process_had_no_number_until_2026(tmp_path: Path) -> None:
    for step in (0, 1):
        relu_dump(tmp_path / f"step{step}" / "rank")
    for path in (tmp_path, tmp_path / "step1", tmp_path / "step1" / "rank"):
        capture = tp.load(path)
        assert (capture.ranks, capture.gaps) == ((0,), ())
    assert [call.step for call in tp.load(tmp_path).calls] == [0, 1]
    relu_dump(tmp_path / "step1" / "rank2")
    capture = tp.load(tmp_path / "step1")
    assert capture.ranks == (2,)
    assert [gap.name for gap in capture.gaps] == ["step1/rank"]


def test_another_tools_dump_json_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(json.dumps({"dump": {"dump_path": "./x"}}))
    with pytest.raises(UnreadableCapture, match="is not a capture"):
        tp.load(tmp_path)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no samples of the peer here")
@pytest.mark.parametrize(
    ("sample", "n_calls"),
    [
        ("L0_md5", 6), ("L0_statistics", 6), ("L0_tensor", 6), ("L1_md5", 14),
        ("L1_statistics", 14), ("L1_tensor", 14), ("L1_xor", 14), ("debug_statistics", 5),
        ("debug_tensor", 5), ("dist_mix", 21), ("edge_mix_tensor", 59), ("mix_md5", 20),
        ("mix_statistics", 20), ("mix_tensor", 20), ("structure", 18),
    ],
)  # fmt: skip
def test_samples_of_msprobe_itself(sample: str, n_calls: int) -> None:
    capture = tp.load(SAMPLES / "dump" / sample)
    assert len(capture.calls) == n_calls
    missing = [gap for gap in capture.gaps if "is missing" not in gap.reason]
    assert not missing
    for call in capture.calls:
        for record in call.tensors:
            if record.blob is not None:
                assert record.load().isfinite().all()
