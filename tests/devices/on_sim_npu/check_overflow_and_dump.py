"""Float status in both modes, and ACL dumps in the binary layout of the real ones."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tensorprobe.devices import device_layer, explain, sim_npu
from tensorprobe.devices.sim_npu.acl_dump import encode
from tensorprobe.devices.sim_npu.chip import CHIP
from tensorprobe.errors import BadUsage

BIG = 60000.0


def overflow() -> torch.Tensor:
    x = torch.full((3,), BIG, device="npu", dtype=torch.float16)
    return x * torch.tensor([1.0, 2.0, -2.0], device="npu", dtype=torch.float16)


def test_inf_nan_mode_shows_overflows_in_the_values() -> None:
    assert torch_npu.npu.utils.is_support_inf_nan()
    assert overflow().tolist() == [BIG, float("inf"), -float("inf")]
    assert torch_npu.npu.utils.npu_check_overflow(overflow())
    assert not torch_npu.npu.utils.npu_check_overflow(torch.ones(2, device="npu"))
    assert torch_npu.npu.utils.npu_check_overflow(float("nan"))
    with pytest.raises(RuntimeError, match="use npu_check_overflow"):
        torch_npu.npu.utils.get_npu_overflow_flag()
    with pytest.warns(UserWarning, match="does nothing in INF/NAN mode"):
        torch_npu.npu.utils.clear_npu_overflow_flag()
    flag = device_layer("npu").overflow_flag
    assert flag is not None
    assert not flag.is_needed()


def test_saturation_mode_clamps_and_raises_the_flag() -> None:
    sim_npu.set_overflow_mode("saturation")
    utils, flag = torch_npu.npu.utils, device_layer("npu").overflow_flag
    assert flag is not None
    assert flag.is_needed()
    assert not flag.is_raised()
    (torch.ones(3, device="npu") * 2).sum()
    assert not utils.get_npu_overflow_flag()
    assert overflow().tolist() == [BIG, 65504.0, -65504.0]
    assert flag.is_raised()
    assert utils.get_npu_overflow_flag()
    assert utils.npu_check_overflow(torch.ones(1, device="npu"))  # reads the flag, and clears it
    assert not flag.is_raised()
    assert (torch.zeros(1, device="npu") / 0).tolist() == [0.0]  # NaN becomes zero
    assert flag.is_raised()
    flag.clear()
    assert not flag.is_raised()


def test_saturation_leaves_masks_alone() -> None:
    sim_npu.set_overflow_mode("saturation")
    mask = torch.full((2, 2), -float("inf"), device="npu").triu(1)
    assert mask[0, 1].item() == -float("inf")
    scores = torch.zeros(2, 2, device="npu").masked_fill(mask == -float("inf"), -float("inf"))
    assert scores[0, 1].item() == -float("inf")
    assert not torch_npu._C._check_overflow_npu()


def test_float_status_ops() -> None:
    sim_npu.set_overflow_mode("saturation")
    status = torch_npu.npu_alloc_float_status(torch.ones(1, device="npu"))
    assert status.tolist() == [0.0] * 8
    overflow()
    assert torch_npu.npu_get_float_status(status).cpu()[0] == 1
    assert status.cpu()[0] == 1
    torch_npu.npu_clear_float_status(status)
    assert torch_npu.npu_get_float_status(torch.zeros(8).npu()).cpu()[0] == 0


def test_the_variable_chooses_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_ENABLE", "0")
    sim_npu.install()
    assert not torch_npu._C._npu_is_support_inf_nan()
    monkeypatch.delenv("INF_NAN_MODE_ENABLE")
    sim_npu.install()
    assert torch_npu._C._npu_is_support_inf_nan()
    with pytest.raises(BadUsage, match="it is 'inf-nan' or 'saturation'"):
        sim_npu.set_overflow_mode("both")  # type: ignore[arg-type]


def test_a_runtime_call_without_a_device_is_107002(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHIP, "has_context", False)
    with pytest.raises(RuntimeError, match="107002") as caught:
        torch_npu._C._clear_overflow_npu()
    assert "torch.npu.set_device('npu:0')" in str(explain(caught.value))
    torch.npu.set_device("npu:0")
    torch_npu._C._clear_overflow_npu()


# ---- dump files, read with protobuf's own decoder ----------------------------------------------


def message_type() -> Any:
    """DumpData, as far as it is needed, from its published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="dump.proto", package="t", syntax="proto3")
    fields = descriptor_pb2.FieldDescriptorProto
    shapes: dict[str, list[tuple[str, int, int, str]]] = {
        "Shape": [("dim", 1, fields.TYPE_UINT64, "repeated")],
        "OpInput": [
            ("data_type", 1, fields.TYPE_INT32, ""), ("format", 2, fields.TYPE_INT32, ""),
            ("shape", 3, 0, "Shape"), ("size", 5, fields.TYPE_UINT64, ""),
            ("original_shape", 6, 0, "Shape"),
        ],
        "OpOutput": [
            ("data_type", 1, fields.TYPE_INT32, ""), ("format", 2, fields.TYPE_INT32, ""),
            ("shape", 3, 0, "Shape"), ("size", 6, fields.TYPE_UINT64, ""),
            ("original_shape", 7, 0, "Shape"),
        ],
        "DumpData": [
            ("version", 1, fields.TYPE_STRING, ""), ("dump_time", 2, fields.TYPE_UINT64, ""),
            ("output", 3, 0, "OpOutput*"), ("input", 4, 0, "OpInput*"),
            ("op_name", 6, fields.TYPE_STRING, ""),
        ],
    }  # fmt: skip
    for name, members in shapes.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in members:
            added = message.field.add(name=field, number=number, type=kind or fields.TYPE_MESSAGE)
            repeated = of == "repeated" or of.endswith("*")
            added.label = fields.LABEL_REPEATED if repeated else fields.LABEL_OPTIONAL
            if not kind:
                added.type_name = f".t.{of.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.DumpData"))


DumpData = message_type()
DTYPES = {1: np.float32, 2: np.float16, 7: np.int32, 8: np.int64, 11: np.bool_, 12: np.float64}


def read(content: bytes) -> tuple[Any, list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    (length,) = struct.unpack("<Q", content[:8])
    header = DumpData.FromString(content[8 : 8 + length])
    header.DiscardUnknownFields()
    assert header.ByteSize() == length
    place, sides = 8 + length, []
    for tensors in (header.input, header.output):
        arrays = []
        for tensor in tensors:
            block = content[place : place + tensor.size]
            place += tensor.size
            dtype = DTYPES.get(tensor.data_type, np.uint8)
            array = np.frombuffer(block, dtype)
            arrays.append(array.reshape(list(tensor.shape.dim)) if dtype != np.uint8 else array)
            assert list(tensor.original_shape.dim) == list(tensor.shape.dim)
            assert tensor.format == 2
        sides.append(arrays)
    assert place == len(content)
    return header, sides[0], sides[1]


@pytest.mark.parametrize(
    ("tensor", "data_type"),
    [
        (torch.arange(6.0).view(2, 3), 1),
        (torch.arange(6.0).view(2, 3).t(), 1),
        (torch.ones(2, dtype=torch.float16), 2),
        (torch.tensor(5), 8),
        (torch.tensor([True, False]), 11),
        (torch.ones(2, dtype=torch.float64), 12),
        (torch.ones(3, dtype=torch.bfloat16), 27),
        (torch.ones(3).to(torch.float8_e4m3fn), 35),
        (torch.ones(2, dtype=torch.complex64), 16),
        (torch.zeros(0, 4), 1),
        (torch.arange(8.0).as_strided((1, 1), (5, 3), 2), 1),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else None,
)
def test_encoding(tensor: torch.Tensor, data_type: int) -> None:
    header, inputs, outputs = read(encode("name", 123, [tensor], [tensor, tensor]))
    assert (header.version, header.dump_time, header.op_name) == ("2.0", 123, "name")
    assert [t.data_type for t in (*header.input, *header.output)] == [data_type] * 3
    assert list(header.input[0].shape.dim) == list(tensor.shape)
    assert header.input[0].size == tensor.numel() * tensor.element_size()
    for array in (*inputs, *outputs):
        if data_type in DTYPES:
            assert np.array_equal(array, tensor.numpy())
        else:
            assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def config(folder: Path, **fields: Any) -> str:
    path = folder / "dump.json"
    dump = {"dump_list": [], "dump_path": str(folder / "out"), "dump_mode": "all",
            "dump_op_switch": "on", **fields}  # fmt: skip
    path.write_text(json.dumps({"dump": dump}))
    return str(path)


def dumped(folder: Path) -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in sorted((folder / "out").rglob("*.*"))}


def test_dump_writes_the_tree_of_the_guide(tmp_path: Path) -> None:
    x, w = torch.randn(2, 3, device="npu"), torch.randn(3, 4, device="npu")
    torch_npu.npu.init_dump()
    torch_npu.npu.set_dump(config(tmp_path))
    y = (x @ w).exp().t()  # the transpose is a view: no kernel, no file
    y.mul_(2)
    torch_npu.npu.finalize_dump()
    y.exp()
    files = sorted((tmp_path / "out").rglob("*.*"), key=lambda p: int(p.name.split(".")[2]))
    assert [path.name.split(".")[0] for path in files] == ["MatMulV2", "Exp", "Mul"]
    for path in files:
        pattern = r"out/\d{14}/0/0/(\w+)\.\1\.\d+\.0\.\d{16}"
        assert re.fullmatch(pattern, str(path.relative_to(tmp_path)))
    header, inputs, outputs = read(files[0].read_bytes())
    assert header.op_name == "MatMulV2"
    assert np.array_equal(inputs[0], x.cpu().numpy())
    assert np.array_equal(inputs[1], w.cpu().numpy())
    assert np.array_equal(outputs[0], (x @ w).cpu().numpy())
    _, inputs, outputs = read(files[2].read_bytes())
    assert np.array_equal(inputs[0] * 2, outputs[0])  # the input as it was before


@pytest.mark.parametrize(("mode", "counts"), [("input", (1, 0)), ("output", (0, 1))])
def test_dump_mode(tmp_path: Path, mode: str, counts: tuple[int, int]) -> None:
    dump = device_layer("npu").kernel_dump
    assert dump is not None
    with dump(Path(config(tmp_path, dump_mode=mode))):
        torch.ones(3, device="npu").exp()
    _, inputs, outputs = read(dumped(tmp_path)["Exp"].read_bytes())
    assert (len(inputs), len(outputs)) == counts
    assert CHIP.dump is None


def test_a_dump_begins_once(tmp_path: Path) -> None:
    torch.ones(1, device="npu")
    torch_npu.npu.init_dump()
    with pytest.raises(RuntimeError, match="initialized already"):
        torch_npu.npu.init_dump()
    torch_npu.npu.finalize_dump()
    torch_npu.npu.init_dump()
    torch_npu.npu.finalize_dump()


def test_dump_switch_is_off_by_default(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({"dump": {"dump_path": str(tmp_path / "out")}}))
    torch.npu.set_dump(str(path))
    torch.ones(3, device="npu").exp()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "no object 'dump'"), ({"dump": {}}, "no field 'dump_path'"),
     ({"dump": {"dump_path": "x", "dump_mode": "some"}}, "not one of input, output, all")],
)  # fmt: skip
def test_a_wrong_dump_json_is_explained(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BadUsage, match=message):
        torch.npu.set_dump(str(path))


def test_the_dump_shows_what_a_fault_left(tmp_path: Path) -> None:
    torch.npu.set_dump(config(tmp_path))
    with sim_npu.plant(op="exp", effect="scale:3"):
        torch.zeros(2, device="npu").exp()
    _, _, outputs = read(dumped(tmp_path)["Exp"].read_bytes())
    assert outputs[0].tolist() == [3, 3]
