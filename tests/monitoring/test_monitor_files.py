"""The files of a monitor: bounded, readable at every moment, in several forms."""

from __future__ import annotations

import gc
import json
import math
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorprobe as tp
from tensorprobe.errors import BadArtefact, MissingDependency
from tensorprobe.monitoring.event_files import EventFile, crc32c, masked_crc
from tensorprobe.monitoring.exporting import export
from tensorprobe.monitoring.scalar_writers import MlflowWriter, WandbWriter
from tensorprobe.monitoring.series import COLUMNS, StepTable, StepValues
from tensorprobe.monitoring.series_files import SeriesFiles, last_steps, segments
from tensorprobe.monitoring.series_reading import read_steps, read_trends


def a_step(number: int, names: tuple[str, ...] = ("a", "b")) -> StepValues:
    columns = {name: np.arange(len(names)) + number / 7 for name in COLUMNS}
    for name in ("nan", "inf", "zero", "count"):
        columns[name] = np.full(len(names), float(number if name != "nan" else 0))
    scalars = {"loss": math.inf if number == 3 else number / 3}
    return StepValues(number, 0.5, scalars, {"gradient": StepTable(names, columns)})


def write(folder: Path, steps: range, **options: Any) -> SeriesFiles:
    files = SeriesFiles(folder, header={}, **{"max_disk": 1 << 20, **options})
    for number in steps:
        files.write(a_step(number))
    return files


def same(one: StepValues, other: StepValues) -> bool:
    tables = one.tables.keys() == other.tables.keys() and all(
        table.names == other.tables[kind].names
        and all(
            np.array_equal(column, other.tables[kind].column(name), equal_nan=True)
            for name, column in table.columns.items()
        )
        for kind, table in one.tables.items()
    )
    return one[:3] == other[:3] and tables


def test_what_is_written_is_read_at_every_moment(tmp_path: Path) -> None:
    files = SeriesFiles(tmp_path, max_disk=1 << 20, header={})
    for number in range(6):
        files.write(a_step(number, ("a", "b") if number < 4 else ("a", "c", "b")))
        read = [*read_steps(tmp_path, pytest.fail)]
        assert len(read) == number + 1
        assert same(read[-1], a_step(number, ("a", "b") if number < 4 else ("a", "c", "b")))
    files.close()
    assert [step.step for step in last_steps(tmp_path, 2)] == [4, 5]


def test_a_line_that_was_cut_off_costs_one_step(tmp_path: Path) -> None:
    write(tmp_path, range(5)).close()
    (segment,) = segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-20])
    told: list[str] = []
    assert [step.step for step in read_steps(tmp_path, told.append)] == [0, 1, 2, 3]
    assert len(told) == 1
    assert told[0].endswith("cut off while it was written")


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b'{"step": 1}', b'{"step": "x", "time": 0, "scalars": {}, "tables": {}}',
        b'{"step": 1, "time": 0, "scalars": {}, "tables": {"a": {"names": 9}}}',
        b'{"names": 0, "list": ["a"]}\n'
        b'{"step": 1, "time": 0, "scalars": {}, "tables": {"a": {"names": 0, "norm": [1, 2]}}}',
        b"[" * 100_000,
    ],
    ids=range(7),
)  # fmt: skip
def test_a_damaged_line_is_a_gap(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, range(3)).close()
    (segment,) = segments(tmp_path)
    with segment.path.open("ab") as file:
        file.write(line + b"\n")
    told: list[str] = []
    assert [step.step for step in read_steps(tmp_path, told.append)] == [0, 1, 2]
    assert len(told) == 1


def test_files_of_others_are_no_series(tmp_path: Path) -> None:
    (tmp_path / "steps-00000000-00.jsonl").write_text('{"format": 2, "kind": "monitor"}\n')
    (rank,) = read_trends(tmp_path)
    assert "another format than 1" in rank.gaps[0]
    outside = tmp_path / "outside.jsonl"
    outside.write_text("{}")
    (tmp_path / "steps-00000001-00.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(BadArtefact, match="link that leads out"):
        [*read_steps(tmp_path, lambda text: None)]


@pytest.mark.parametrize("max_disk", [1 << 16, pytest.param(1 << 18, marks=pytest.mark.slow)])
def test_old_steps_are_thinned_out(tmp_path: Path, max_disk: int) -> None:
    kept = {100, 101, 102}
    files = write(tmp_path, range(6000), max_disk=max_disk, keep=kept)
    files.close()
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert max_disk / 4 < nbytes <= max_disk
    steps = [step.step for step in read_steps(tmp_path, pytest.fail)]
    assert steps == sorted(set(steps))
    assert kept < set(steps)
    assert steps[-1] == 5999
    gaps = np.diff(steps)
    assert gaps[-5:].max() == 1  # the newest are all there
    assert np.median(gaps[:50]) > np.median(gaps[-50:])  # the oldest are the thinnest
    assert steps[0] < 300  # and are there
    assert len(segments(tmp_path)) < 80
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    files = write(tmp_path, range(3000), max_disk=1 << 18, format="parquet")
    assert segments(tmp_path)[-1].path.suffix == ".jsonl"  # the one that grows
    files.close()
    assert {each.path.suffix for each in segments(tmp_path)} == {".parquet"}
    read = [*read_steps(tmp_path, pytest.fail)]
    assert read[-1].step == 2999
    assert all(same(step, a_step(step.step)) for step in read)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 18


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'tensorprobe\[monitor\]'"):
        SeriesFiles(Path("x"), max_disk=1 << 20, format="parquet", header={})


# TensorBoard


def fields(content: bytes) -> list[tuple[int, Any]]:
    """The fields of a protobuf message, read by a few lines that share nothing with the writer."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(content):
        key = varint()
        if key & 7 == 0:
            value: Any = varint()
        elif key & 7 == 2:
            size = varint()
            value = content[at : at + size]
            at += size
        else:
            size, form = (8, "<d") if key & 7 == 1 else (4, "<f")
            (value,) = struct.unpack(form, content[at : at + size])
            at += size
        found.append((key >> 3, value))
    return found


def test_event_files(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # of the standard
    assert crc32c(bytes(32)) == 0x8A9136AA
    events = EventFile(tmp_path)
    events.write(7, {"loss": 0.5, "gradient/ünïcode": 1e300, "b": math.nan}, at=2.0)
    events.close()
    (path,) = tmp_path.iterdir()
    content, messages = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        assert struct.unpack("<I", content[8:12]) == (masked_crc(content[:8]),)
        event = content[12 : 12 + size]
        assert struct.unpack("<I", content[12 + size : 16 + size]) == (masked_crc(event),)
        messages.append(fields(event))
        content = content[16 + size :]
    assert messages[0][1] == (3, b"brain.Event:2")
    assert messages[1][:2] == [(1, 2.0), (2, 7)]
    values = [dict(fields(value)) for _, value in fields(messages[1][2][1])]
    assert values[0] == {1: b"loss", 2: 0.5}
    assert values[1] == {1: "gradient/ünïcode".encode(), 2: math.inf}
    assert math.isnan(values[2][2])


def test_event_files_open_in_tensorboard(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path / "rank0", range(20)).close()
    (folder,) = export(tmp_path, "tensorboard", tmp_path / "events", pytest.fail)
    events = loading.EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "gradient/norm", "gradient/a", "gradient/b"}
    read = events.Scalars("gradient/b")
    assert [each.step for each in read] == [*range(20)]
    assert read[7].value == np.float32(a_step(7).tables["gradient"].column("norm")[1])


def test_writers_without_a_run_of_theirs_do_nothing() -> None:
    for writer in (WandbWriter(), MlflowWriter()):
        writer.write(0, {"loss": 1.0})
        writer.close()


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        MlflowWriter().write(3, {"loss": 1.5, "gradient/a[0]": 2.0})
    metrics = mlflow.get_run(run.info.run_id).data.metrics
    assert metrics == {"tensorprobe/loss": 1.5, "tensorprobe/gradient/a_0_": 2.0}


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path), project="x") as run:
        WandbWriter().write(3, {"loss": 1.5})
        run.log({"mine": 1})
        assert run.step == 1  # the program's own counter
        assert run.summary["tensorprobe/loss"] == 1.5


# The user's own


class Small:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def test_numbers_of_ones_own(tmp_path: Path) -> None:
    training = Small()
    with tp.Monitor(tmp_path, log=lambda text: None) as monitor:
        for number in range(4):
            loss = training.step()
            monitor.log(loss=loss.detach() * 2, reward=number)
            monitor.step()
        with pytest.raises(tp.BadUsage, match="loss has 3 elements; expected a number"):
            monitor.log(loss=torch.ones(3))
        with pytest.raises(tp.BadUsage, match="loss='x': expected a number"):
            monitor.log(loss="x")
    steps = [*read_steps(tmp_path / "rank0", pytest.fail)]
    assert [step.scalars["reward"] for step in steps] == [0, 1, 2, 3]
    assert steps[-1].scalars["loss"] == pytest.approx(2 * float(loss.detach()))
    assert json.loads((tmp_path / "rank0" / "monitor.json").read_text())["every"]["gradients"] == 1


def test_the_numbers_are_those_of_torch(tmp_path: Path) -> None:
    """With the loss found, gradients before and after clipping, and the update."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    expected: dict[str, float] = {}
    with tp.Monitor(tmp_path, every={"activations": 1}, log=lambda text: None):
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            loss = model(x).square().sum()
            loss.backward()
            weight = model[2].weight
            expected["gradient.backward"] = float(weight.grad.norm())
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            expected["gradient"] = float(weight.grad.norm())
            before = weight.detach().clone()
            hidden = model[1](model[0](x)).detach()
            optimizer.step()
            expected["update"] = float((weight.detach() - before).norm())
            expected["parameter"] = float(weight.detach().norm())
            buffer = optimizer.state[weight]["momentum_buffer"]
            expected["moment.momentum_buffer"] = float(buffer.norm())
    last = [*read_steps(tmp_path / "rank0", pytest.fail)][-1]
    assert last.scalars["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert last.scalars["lr.0"] == 0.5
    first = next(read_steps(tmp_path / "rank0", pytest.fail))
    for kind, value in expected.items():
        step = first if kind == "parameter" else last
        table = step.tables[kind]
        found = table.column("norm")[table.names.index("2.weight")]
        if kind != "parameter":
            assert found == pytest.approx(value, rel=1e-5), kind
    table = last.tables["activation"]
    assert table.column("norm")[table.names.index("1")] == pytest.approx(float(hidden.norm()), 1e-5)


def test_nothing_is_disturbed(tmp_path: Path) -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        monitor = tp.Monitor(tmp_path, every={"activations": 1}, log=lambda text: None)
        if watched:
            monitor.start()
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        monitor.close()
        return [*(each.detach() for each in model.parameters()), torch.get_rng_state()]

    for bare, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(bare, watched)


def test_memory_is_flat(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training = Small()
    counts = []
    with tp.Monitor(tmp_path, max_disk=1 << 16, log=lambda text: None):
        for number in range(901):
            training.step()
            if number in (300, 900):
                counts.append(objects_at_rest())
    assert counts[1] - counts[0] < 60


def objects_at_rest() -> int:
    """How many objects there are while no thread is at work on an old segment: what it reads is
    there only as long as that takes."""
    for thread in threading.enumerate():
        if thread.name == "tensorprobe monitor":
            thread.join(60)
    gc.collect()
    return len(gc.get_objects())
