"""What was written is what is read: every kind of line, every dtype, damaged files too."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from store_making import (
    SUMMARY,
    Ready,
    open_writer,
    tensor,
    write_bytes,
    write_capture,
    write_relu,
)

import tensorprobe
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Fields, Gap, Special, TensorRecord, TensorSummary
from tensorprobe.store.claim import claim
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine

_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu complex64 complex128 complex32 int64 int32 int16 int8 uint64 uint32 uint16 "
    "uint8 bool"
)
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]
LOG = "rank0/step0/calls.jsonl"
SHARD = "rank0/step0/tensors-0.safetensors"


def raw_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits: NaNs of every payload, infinities, subnormals."""
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(shape)
    )


def raw_bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    values = [raw_tensor(dtype, shape) for shape in [(3, 5), (), (0, 4), (1,)]]
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    out.tensor(99, "pad", "uint8", (1,), np.zeros(1, np.uint8))  # what follows is not aligned
    out.value(99)
    args = [{"tensor": TensorLine(name, tuple(v.shape), value=i)} for i, v in enumerate(values)]
    out.call(CallLine(id=0, name="C", op="op", args=args))
    for i, value in enumerate(values):
        out.tensor(i, f"k{i}", name, value.shape, np.frombuffer(raw_bytes(value), np.uint8))
        out.value(i, Ready())
    out.close()
    for record, value in zip(
        tensorprobe.load(tmp_path / "a").calls[0].tensors, values, strict=True
    ):
        back = record.load()
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert raw_bytes(back) == raw_bytes(value)
        array = record.array()
        assert array.tobytes() == raw_bytes(value)
        assert array.shape == tuple(value.shape)
        assert not array.size or not array.flags.writeable
    with safe_open(tmp_path / "a" / SHARD, "pt") as file:
        assert raw_bytes(file.get_tensor("k0")) == raw_bytes(values[0])


def test_every_kind_of_line_comes_back(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(4)
    out.stack(StackLine(3, ["model.py:120 in forward", "train.py:7 in <module>"]))
    out.gap(GapLine("Torch.odd.0.forward", "a quantised tensor"))
    strided = TensorLine("bfloat16", (2, 3), (1, 2), "cuda:1", True, 5, None, "input.0")
    out.call(
        CallLine(
            id=17,
            name="Module.fc.Linear.forward.0",
            op="torch.nn.Linear",
            module="fc",
            direction="backward",
            thread="Worker",
            parent="Module.net.Net.forward.0",
            stack=3,
            args=[tensor(5), {"tuple": [1, {"tensor": strided}]}, {"special": ["dtype", "int8"]}],
            kwargs={"mask": None, "extra": {"fields": ["dataclass", "m.T", {"x": tensor(6)}]}},
            parameters={"weight": TensorLine("float32", (2, 2), value=6)},
            buffers={"mean": TensorLine("int64", (), gap="not kept")},
            notes=["recomputed"],
        )
    )
    out.value(5, Ready(TensorSummary(-math.inf, math.inf, None, math.nan, 1, 2, 3), None))
    out.value(6, Ready())
    out.end(
        EndLine(
            id=17,
            outputs={"tuple": [tensor(6), None]},
            parameter_grads={"weight": TensorLine("float32", (2, 2), value=6)},
            status="raised",
            error="ValueError: no",
            notes=["compiled"],
        )
    )
    out.close()
    capture = tensorprobe.load(tmp_path / "a")
    assert capture.gaps == (Gap("Torch.odd.0.forward", "a quantised tensor", 4, 0),)
    assert capture.facts["note"] == "facts"
    assert capture.facts["ranks"][0]["device"] == "cpu"
    (call,) = capture.calls
    assert (call.index, call.step, call.rank) == (0, 4, 0)
    assert (call.module, call.direction, call.thread) == ("fc", "backward", "Worker")
    assert call.parent == "Module.net.Net.forward.0"
    assert call.stack == ("model.py:120 in forward", "train.py:7 in <module>")
    assert (call.status, call.error) == ("raised", "ValueError: no")
    assert call.notes == ("recomputed", "compiled")
    names = [record.name.removeprefix(call.name + ".") for record in call.tensors]
    assert names == [
        "input.0", "input.1.1", "input.extra.x", "parameters.weight", "buffers.mean",
        "parameters_grad.weight", "output.0",
    ]  # fmt: skip
    roles = [record.role for record in call.tensors]
    assert roles == [
        "input", "input", "input", "parameter", "buffer", "parameter_grad", "output",
    ]  # fmt: skip
    assert call.args[1][0] == 1
    assert call.args[2] == Special("dtype", "int8")
    assert call.kwargs["mask"] is None
    assert isinstance(call.kwargs["extra"], Fields)
    assert call.outputs[1] is None
    view = call.tensor("input.1.1")
    assert view == call.args[1][1]
    assert (view.stride, view.device, view.requires_grad) == ((1, 2), "cuda:1", True)
    assert view.alias_of == f"{call.name}.input.0"
    assert view.summary is not None
    assert (view.summary.min, view.summary.max) == (-math.inf, math.inf)
    assert math.isnan(view.summary.norm or 0)
    assert call.tensor("output.0").summary == SUMMARY
    assert call.tensor("output.0").digest == "0123456789abcdef"
    assert call.tensor("buffers.mean").gap == "not kept"


def test_lines_are_strict_json(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    out.call(CallLine(id=0, name="caf\udce9", op="op", args=[tensor(0), {"float": "nan"}]))
    out.value(0, Ready(TensorSummary(math.nan, math.inf, -math.inf, None, 0, 0, 0)))
    out.close()

    def refuse(token: str) -> None:
        raise ValueError(token)

    for line in (tmp_path / "a" / LOG).read_text("utf-8").splitlines():
        json.loads(line, parse_constant=refuse)
    for file in ("capture.json", "rank0/rank.json"):
        json.loads((tmp_path / "a" / file).read_text("utf-8"), parse_constant=refuse)
    assert tensorprobe.load(tmp_path / "a").calls[0].name == r"caf\udce9"


def test_any_depth_loads_and_a_step_stands_alone(tmp_path: Path) -> None:
    root = tmp_path / "a"
    out = open_writer(root)
    for step in (0, 2, 10):
        out.begin_step(step)
        for n in range(2):
            write_relu(out, n, np.full(4, step, np.float32))
    out.close()
    capture = tensorprobe.load(str(root))
    assert capture.steps == (0, 2, 10)
    assert [call.index for call in capture.calls] == list(range(6))
    assert [call.step for call in capture.calls] == [0, 0, 2, 2, 10, 10]
    assert tensorprobe.load(root / "capture.json").steps == (0, 2, 10)
    assert tensorprobe.load(root / "rank0").facts["note"] == "facts"
    assert tensorprobe.load(root / "rank0" / "rank.json").steps == (0, 2, 10)
    assert tensorprobe.load(root / "rank0" / "step2").steps == (2,)
    assert tensorprobe.load(root / "rank0/step2/tensors-0.safetensors").steps == (2,)
    shutil.rmtree(root / "rank0" / "step0")
    assert tensorprobe.load(root).steps == (2, 10)
    shutil.move(root / "rank0" / "step2", tmp_path / "alone")
    (call, _) = tensorprobe.load(tmp_path / "alone").calls
    assert call.tensors[0].array().tolist() == [2, 2, 2, 2]


def test_stopped_and_started_in_the_same_step(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    for part in range(3):
        if part == 2:
            out.close()
        out.begin_step(0)  # ids begin anew each time
        write_relu(out, 0, np.full(200, part, np.float32))
        out.call(CallLine(id=1, name=f"begun.{part}", op="op", args=[tensor(0, (200,))]))
    out.close()
    capture = tensorprobe.load(tmp_path / "a")
    assert [call.name for call in capture.begun] == ["begun.0", "begun.1", "begun.2"]
    assert [call.tensors[0].array()[0] for call in capture.calls] == [0, 0, 1, 1, 2, 2]
    assert capture.gaps == ()


@pytest.mark.parametrize("name", ["with space", "c++", "café-日本", "a'b\"c", "100%"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    root = write_capture(tmp_path / name)
    record = tensorprobe.load(root).calls[2].tensors[0]
    assert record.array().tolist() == [0, 1, 2, 3, 4, 5]


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    out.call(CallLine(id=0, name="C", op="op", args=[tensor(i, (1000,)) for i in range(4)]))
    for i in range(4):
        write_bytes(out, i, f"k{i}", np.full(1000, i // 2, np.float32))
    out.close()
    blobs = [record.blob for record in tensorprobe.load(tmp_path / "a").calls[0].tensors]
    assert blobs[0] == blobs[1]
    assert blobs[2] == blobs[3]
    assert blobs[0] != blobs[2]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tensorprobe\n"
        "from tensorprobe.errors import MissingDependency\n"
        f"record = tensorprobe.load({str(root)!r}).calls[0].tensors[0]\n"
        "assert record.array().tolist() == [0, 1, 2, 3]\n"
        "try: record.load()\n"
        "except MissingDependency as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environ()
    )
    assert "needs torch, which is not installed" in done.stdout


def _environ() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "PATH": ""}


# -- what is not as it should be --------------------------------------------------------------


def test_a_last_line_cut_off_at_any_byte(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a", n_calls=4)
    whole = (root / LOG).read_bytes()
    begin = whole.index(b'{"type":"call","id":3')
    for end in range(begin + 1, whole.index(b"\n", begin), 7):
        (root / LOG).write_bytes(whole[:end])
        capture = tensorprobe.load(root)
        assert len(capture.calls) == 3
        assert capture.facts["unfinished"] == ["rank0/step0"]
        (gap,) = capture.gaps
        number = whole[:begin].count(b"\n") + 1
        assert gap.name == f"{LOG}:{number}"
        assert gap.reason == "cut off: the run ended while it was written"


def test_a_run_that_ended_early(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    write_relu(out, 0)
    out.call(CallLine(id=1, name="Torch.exp.0.forward", op="torch.exp", args=[tensor(7)]))
    out.drain()
    capture = tensorprobe.load(tmp_path / "a")  # while it is being written
    assert [call.status for call in capture.calls] == ["complete", "begun"]
    assert [call.name for call in capture.begun] == ["Torch.exp.0.forward"]
    assert capture.calls[1].tensors[0].gap == "value not written (the run ended before)"
    with pytest.raises(UnreadableCapture, match="value not written"):
        capture.calls[1].tensors[0].array()
    out.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"\0\0\0\0", b'{"type":"call"}', b'{"type":"nonsense","id":1}', b"[1,2", b"\xff\xfe",
        b'{"type":"call","id":1,"name":"x","op":"y","args":[{"what":1}]}',
        b'{"type":"call","id":1,"name":"x","op":"y","args":[{"tensor":{"shape":[1]}}]}',
        b'{"type":"call","id":1,"name":"x","op":"y","args":[{"tensor":1}]}',
        b'{"type":"end","id":77}', b'{"type":"stack","id":1,"frames":["\xff"]}',
    ],
)  # fmt: skip
def test_a_damaged_line_leaves_the_rest(tmp_path: Path, damage: bytes) -> None:
    root = write_capture(tmp_path / "a", n_calls=4)
    whole = (root / LOG).read_bytes().splitlines()
    at = next(i for i, line in enumerate(whole) if b'"call","id":2' in line)
    for position in (0, at, len(whole)):
        (root / LOG).write_bytes(b"\n".join([*whole[:position], damage, *whole[position:], b""]))
        capture = tensorprobe.load(root)
        assert len(capture.calls) == 4
        assert all(call.tensors[0].array().size for call in capture.calls)
        (gap,) = capture.gaps
        assert gap.name == f"{LOG}:{position + 1}"
        assert gap.reason


def test_a_damaged_shard(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a")
    whole = (root / SHARD).read_bytes()

    def arrays() -> list[TensorRecord]:
        return [call.tensors[0] for call in tensorprobe.load(root).calls]

    (root / SHARD).write_bytes(whole[:20] + b"####" + whole[24:])
    capture = tensorprobe.load(root)
    (gap,) = capture.gaps
    assert gap.name == SHARD
    assert gap.reason.startswith("its header is damaged: JSON is malformed")
    assert capture.calls[1].tensors[0].array().tolist() == [0, 1, 2, 3, 4]

    (root / SHARD).write_bytes(whole[:12] + b"\xff" + whole[13:])
    (gap,) = tensorprobe.load(root).gaps
    assert gap.reason.startswith("its header is damaged: 'utf-8' codec can't decode byte 0xff")

    (root / SHARD).write_bytes(whole[:-5])
    assert [record.gap for record in arrays()] == [
        None,
        None,
        f"tensors-0.safetensors ends at byte {len(whole) - 5}, before its content",
    ]
    (root / SHARD).write_bytes(b"")
    assert all("ends at byte 0" in (record.gap or "") for record in arrays())

    (root / SHARD).unlink()
    capture = tensorprobe.load(root)
    (gap,) = capture.gaps
    assert gap == Gap(SHARD, "missing: its tensors have statistics only")
    assert capture.calls[0].tensors[0].summary == SUMMARY
    assert capture.calls[0].tensors[0].gap == "tensors-0.safetensors is missing"


def test_what_is_no_capture(tmp_path: Path) -> None:
    def text(path: Path) -> str:
        with pytest.raises(UnreadableCapture) as caught:
            tensorprobe.load(path)
        return str(caught.value).replace(str(tmp_path), "")

    expected = (
        "expected a folder with capture.json, or a folder of ranks or steps in one; "
        "or a dump of msprobe or ptdbg_ascend"
    )
    assert text(tmp_path / "no") == (
        "no capture at '/no': there is no such path. To record one: tensorprobe run -o /no SCRIPT"
    )
    (tmp_path / "empty").mkdir()
    assert text(tmp_path / "empty") == (
        f"'/empty' is not a capture: it is an empty folder; {expected}"
    )
    (tmp_path / "other").mkdir()
    for name in "abcdef":
        (tmp_path / "other" / name).touch()
    assert text(tmp_path / "other") == (
        f"'/other' is not a capture: it holds a, b, c, d and 2 more; {expected}"
    )
    assert (
        text(tmp_path / "other" / "a") == f"'/other/a' is not a capture: it is a file; {expected}"
    )
    claim(tmp_path / "begun", 0, "killed at once", {}, {}, str)
    assert text(tmp_path / "begun") == (
        "capture '/begun' is empty: the run ended before its first recorded step"
    )
    root = write_capture(tmp_path / "newer")
    facts = json.loads((root / "capture.json").read_text())
    (root / "capture.json").write_text(json.dumps({**facts, "format": 3}))
    assert text(root) == (
        "capture '/newer' was written by format 3; this version reads 1. "
        "Upgrade: pip install -U tensorprobe"
    )


def test_damaged_facts_do_not_hide_the_calls(tmp_path: Path) -> None:
    root = write_capture(tmp_path / "a")
    (root / "capture.json").write_text("{")
    (root / "rank0/rank.json").write_bytes(b'{"format":1,"host":"\xff"}')
    capture = tensorprobe.load(root)
    assert len(capture.calls) == 3
    assert [gap.name for gap in capture.gaps] == ["capture.json", "rank.json"]
    (root / "rank0/rank.json").unlink()
    assert [gap.name for gap in tensorprobe.load(root).gaps] == ["capture.json"]
