"""Contents that are damaged on the disk: what can be read is carried, the rest is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe.checking.one import check_one
from tensorprobe.cli.main import main
from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay import rebuild
from tensorprobe.replay.pairing import ForwardBackward

LAYOUTS = ("native", "msprobe", "ptdbg")
INPUT = "Functional.relu.0.forward.input.0"
OUTPUT = "Functional.linear.1.forward.output.0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    options = {"level": "L1", "keep": "tensors", "compress": True}
    with tp.Recorder(folder, log=lambda text: None, **options):
        model(torch.randn(128, 256)).sum().backward()
    return folder


def find(folder: Path, name: str) -> TensorRecord:
    records = (record for call in tp.load(folder).calls for record in call.tensors)
    return next(record for record in records if record.name == name)


def copied(whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder / "run")
    return folder / "run"


def spoil(folder: Path, name: str) -> None:
    """Let what is packed be no packed content; a later tensor may have the same."""
    blob = find(folder, name).blob
    assert blob is not None
    assert blob.container == "packed"
    with blob.path.open("r+b") as file:
        file.seek(blob.offset)
        file.write(b"\xff" * 64)


def names_without_content(folder: Path) -> set[str]:
    found = set()
    for call in tp.load(folder).calls:
        for record in call.tensors:
            try:
                record.array()
            except UnreadableCapture:
                found.add(record.name)
    return found


def undotted(names: set[str]) -> set[str]:
    return {name.replace(".output.0", ".output") for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversions_go_on(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    run, out = copied(whole, tmp_path), tmp_path / "out"
    spoil(run, OUTPUT)
    lost = names_without_content(run)
    assert main(["convert", str(run), "--to", layout, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    first = f"{run}/rank0/step0/tensors-0.safetensors: a packed content has blocks"
    assert OUTPUT in said
    assert first in said
    assert len([line for line in said.splitlines() if "without content" in line]) == 1
    assert undotted(names_without_content(out)) == undotted(lost)
    assert len(tp.load(out).calls) == len(tp.load(run).calls)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_conversions_tell_of_a_shard_that_is_cut_or_gone(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, layout: str
) -> None:
    run, out = copied(whole, tmp_path), tmp_path / "out"
    (shard,) = run.glob("rank0/step0/*.safetensors")
    if damage == "cut":
        os.truncate(shard, 8 + (256 << 10))
    else:
        shard.unlink()
    count = len(names_without_content(run))
    assert main(["convert", str(run), "--to", layout, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    reason = "ends at byte 262152, before its content" if damage == "cut" else "is missing"
    assert f"not as it was: {count} tensors are without content: " in said
    assert f"The first: tensors-0.safetensors {reason}\n" in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversions_count_the_tensors_of_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with tp.Recorder(run, level="L1", keep="tensors", log=lambda text: None) as rec:
        for step in range(2):
            torch.full((64,), float(step)).neg()
            rec.step()
    for shard in run.glob("rank0/*/*.safetensors"):
        shard.unlink()
    assert main(["convert", str(run), "--to", layout, "-o", str(out)]) == 0
    names = (
        "Torch.full.0.forward.output.0, Tensor.neg.0.forward.input.0, "
        "Tensor.neg.0.forward.output.0 and 3 more"
    )
    assert f"not as it was: 6 tensors are without content: {names}. " in capsys.readouterr().out


def test_a_repro_names_the_input_that_cannot_be_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copied(whole, tmp_path), tmp_path / "out"
    spoil(run, INPUT)
    assert main(["repro", str(run), "Functional.relu.0.forward", "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert said == (
        f"tensorprobe repro: {INPUT} cannot be read: {run}/rank0/step0/tensors-0.safetensors: "
        "a packed content has blocks that do not fill its place\n"
    )
    assert not out.exists()


def test_a_repro_does_without_outputs(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copied(whole, tmp_path), tmp_path / "out"
    spoil(run, OUTPUT)
    assert main(["repro", str(run), "Functional.linear.1.forward", "-o", str(out)]) == 0
    assert f"1 tensor is without content: {OUTPUT}. " in capsys.readouterr().err
    assert "recorded.output.0" not in torch.load(out / "tensors.pt")


def test_a_check_skips_what_it_cannot_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copied(whole, tmp_path), tmp_path / "out"
    spoil(run, INPUT)
    assert main(["check", str(run), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"skipped  Functional.relu.0.forward: {INPUT} cannot be read: {run}" in said
    assert " 0 fail, 0 crashed, " in said


def without_input(call: Call) -> Call:
    """As it is read when the file of its input is gone."""

    def lost(value: object) -> object:
        if isinstance(value, TensorRecord):
            return msgspec.structs.replace(value, blob=None, gap="gone")
        return value

    inputs = {record.name: lost(record) for record in call.tensors if record.role == "input"}
    return msgspec.structs.replace(
        call,
        args=tuple(lost(value) for value in call.args),
        tensors=tuple(inputs.get(record.name, record) for record in call.tensors),
    )


def test_generated_inputs_say_nothing_of_what_was_recorded(whole: Path) -> None:
    call = tp.load(whole).calls(op="*relu", direction="forward")[0]
    row = check_one(ForwardBackward(without_input(call), None), torch.device("cpu"))
    assert (row.verdict, row.recorded, row.generated) == ("pass", "", True)


def test_a_file_that_is_cut_after_the_capture_was_loaded(whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    record = find(run, "Functional.linear.0.forward.input.2")  # too small to be packed
    assert record.blob is not None
    assert record.blob.container == "raw"
    os.truncate(record.blob.path, 100)
    with pytest.raises(UnreadableCapture, match=r"input\.2: .*tensors-0\.safetensors cannot be"):
        record.array()
    record.blob.path.unlink()
    with pytest.raises(UnreadableCapture, match=r"cannot be read: No such file"):
        record.array()
    with pytest.raises(NotReplayable, match=r"^Functional\.linear\.0\.forward\.input\.2 cannot"):
        rebuild.load(record)
