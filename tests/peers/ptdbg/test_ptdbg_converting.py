"""Captures written as ptdbg dumps and read back; the widening of what .npy files cannot hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tensorprobe as tp
from recorded import SRC, record
from tensorprobe.peers.foreign_records import file_name
from tensorprobe.peers.peer_names import peer_name, renamed
from tensorprobe.peers.ptdbg import ptdbg_layout as ptdbg
from tensorprobe.peers.ptdbg.ptdbg_names import native_name, parse_name, stem_of
from tensorprobe.peers.ptdbg.ptdbg_writing import Style, write_dump
from tensorprobe.records import Call, Capture, TensorRecord
from tensorprobe.store import loading as layouts
from tensorprobe.tensors.dtypes import numpy_dtype
from tensorprobe.tensors.widening import narrow, widen

FLOATS_8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", FLOATS_8)
def test_every_8_bit_float_comes_back(dtype: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    wide = widen(bits.view(numpy_dtype(dtype)), dtype)
    assert wide.dtype == np.float32
    assert len(set(wide.view(np.uint32).tolist())) == 256  # NaNs too keep what they are
    assert np.array_equal(narrow(wide, dtype).view(np.uint8), bits)
    values = bits.view(numpy_dtype(dtype)).astype(np.float32)
    assert np.array_equal(wide, values, equal_nan=True)


def test_every_bfloat16_comes_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = widen(bits.view(numpy_dtype("bfloat16")), "bfloat16")
    assert np.array_equal(narrow(wide, "bfloat16").view(np.uint16), bits)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(width=32), max_size=20))
def test_numbers_that_never_were_narrow_are_rounded(values: list[float]) -> None:
    array = np.array(values, np.float32)
    for dtype in ("bfloat16", "float8_e5m2"):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = array.astype(numpy_dtype(dtype)).astype(np.float32)
        assert np.array_equal(narrow(array, dtype).astype(np.float32), expected, equal_nan=True)


def program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(3, 4)).float().softmax(dim=-1).sum()
    loss.backward()
    optimizer.step()


def contents(capture: Capture) -> dict[str, bytes]:
    """The bytes of every tensor, by rank, step and name."""
    return {
        f"{call.rank}/{call.step}/{ptdbg.spelt_name(call)}/{record.name.removeprefix(call.name)}":
        record.array().tobytes()
        for call in capture.calls
        for record in call.tensors
        if record.blob is not None
    }  # fmt: skip


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_there_and_back(level: str, tmp_path: Path) -> None:
    native = record(tmp_path / "native", program, level=level)
    lost = ptdbg.write(native, tmp_path / "dump")
    back = tp.load(tmp_path / "dump")
    assert back.gaps == ()
    calls = [renamed(call, peer_name) for call in native.calls]  # a + b is Tensor.__add__ there
    native = Capture(native.path, "native", calls)
    names = [ptdbg.spelt_name(call) for call in native.calls]
    assert [ptdbg.spelt_name(call) for call in back.calls] == names
    ours, theirs = contents(native), contents(back)
    positional = {name for name in ours if name.rpartition(".")[2].isdigit()}
    assert positional <= theirs.keys()
    assert len(ours) == len(theirs)
    assert all(theirs[name] == ours[name] for name in positional)
    for mine, other in zip(native.calls, back.calls, strict=True):
        assert other.direction == mine.direction
        assert other.stack == mine.stack
        if not mine.name.startswith(("Module.", "Optimizer.", "Function.")):
            assert other.op == mine.op
    found = tp.compare(back, native)
    assert found.verdict.verdict == "match", str(found.verdict)
    assert found.verdict.counts["only_actual"] == 0
    assert any("keyword" in line for line in lost) or level == "L0"


def test_several_steps_have_folders(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "native", level="L1", keep="tensors") as recorder:
        for _ in range(3):
            torch.ones(2).abs()
            recorder.step()
    ptdbg.write(tp.load(tmp_path / "native"), tmp_path / "dump")
    back = tp.load(tmp_path / "dump")
    assert back.steps == (0, 1, 2)
    assert (tmp_path / "dump" / "ptdbg_dump_v5.0" / "step2" / "rank0").is_dir()


@pytest.mark.parametrize("keep", ["stats", "structure"])
def test_without_tensors(keep: str, tmp_path: Path) -> None:
    native = record(tmp_path / "native", program, level="L1", keep=keep)
    ptdbg.write(native, tmp_path / "dump")
    assert not list(tmp_path.rglob("*.npy"))
    back = tp.load(tmp_path / "dump")
    assert len(back.calls) == len(native.calls)


def test_the_command_converts_between_all_layouts(tmp_path: Path) -> None:
    record(tmp_path / "native", program, level="L1")
    last = tmp_path / "native"
    for number, layout in enumerate(("msprobe", "ptdbg", "native")):
        target = tmp_path / f"{number}_{layout}"
        words = ["convert", str(last), "--to", layout, "-o", str(target)]
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", *words],
            env={"PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert tp.load(target).layout == layout
        last = target
    ours, theirs = tp.load(last), tp.load(tmp_path / "native")
    found = tp.compare(_forward(ours), _forward(theirs))
    assert found.verdict.verdict == "match", str(found.verdict)


def test_the_layouts_compare_with_each_other(tmp_path: Path) -> None:
    native = record(tmp_path / "native", program, level="L1")
    for layout in ("ptdbg", "msprobe"):
        layouts.layout(layout).write(native, tmp_path / layout)
    found = tp.compare(tmp_path / "ptdbg", tmp_path / "msprobe")
    # of an optimizer's step msprobe has the calls inside only
    assert {call.name.partition(".")[0] for call, _ in found.one_sided} <= {"Optimizer"}
    assert not [c for c in found.verdict.culprits if c.direction == "forward"], str(found.verdict)
    model = nn.Linear(4, 8)

    def other() -> None:
        torch.manual_seed(0)
        model(torch.ones(3, 4))

    layouts.layout("msprobe").write(record(tmp_path / "x", other, level="L1"), tmp_path / "m")
    model.weight.data *= 2
    layouts.layout("ptdbg").write(record(tmp_path / "y", other, level="L1"), tmp_path / "p")
    found = tp.compare(tmp_path / "p", tmp_path / "m")
    assert found.verdict.culprits[0].name == "Functional.linear.0.forward"


def _forward(capture: Capture) -> Capture:
    """Without backward: in it the dumps number what we call by its keyword."""
    return Capture(capture.path, capture.layout, capture.calls(direction="forward"))


apis = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
kinds = st.sampled_from(["Tensor", "Torch", "Functional", "NPU", "VF", "Aten", "Distributed"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kinds, apis, st.integers(0, 10**6), st.sampled_from(["forward", "backward"]))
def test_a_name_comes_back_from_its_spelling(
    kind: str, api: str, number: int, direction: str
) -> None:
    name = f"{kind}.{api}.{number}.{direction}"
    call = Call(index=0, name=name, op="", direction=direction)
    found = parse_name(stem_of(call) + "_input.0")
    assert found is not None
    assert stem_of(Call(index=0, name=native_name(found), op="", direction=direction)) == stem_of(
        call
    )


def test_names_from_outside_stay_in_the_folder(tmp_path: Path) -> None:
    evil = TensorRecord("x", "input", "float32", (1,), gap="none")
    call = Call(
        index=0,
        name="Saved.../../../evil.0.forward",
        op="",
        args=({"../../up": evil, "long" * 200: evil, "nul\0": evil},),
        tensors=(evil,),
    )
    write_dump([call], tmp_path / "d" / "a.pkl", Style())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    assert tp.load(tmp_path / "d" / "a.pkl").gaps == ()
    assert "/" not in file_name("a/b", "")


def test_a_full_disk_is_said_and_harms_nothing(tmp_path: Path) -> None:
    from tensorprobe.errors import WriteFailed

    (tmp_path / "rank0").write_text("a file where a folder should be")
    with pytest.raises(WriteFailed, match="could not be written"):
        write_dump([], tmp_path / "rank0" / "a.pkl", Style())
