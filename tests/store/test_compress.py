"""compress=True: the same capture in fewer bytes, for every reader of it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from store_making import open_writer, write_relu
from torch import nn

import tensorprobe as tp
from recorded import record, run_script, start_script
from tensorprobe.cli.main import main
from tensorprobe.errors import BadUsage
from tensorprobe.records import Capture
from tensorprobe.tensors import packing
from tensorprobe.tensors.packing import LEAST_NBYTES

WIDTH = 192  # its square is above LEAST_NBYTES in float32 and in bfloat16


def training(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers).to(dtype)
    data = torch.randn(WIDTH, WIDTH, dtype=dtype) * scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()

    return step


def contents(capture: Capture) -> dict[str, bytes]:
    found = {}
    for call in capture.calls:
        for kept in call.tensors:
            if kept.blob is not None:
                found[kept.name] = kept.array().tobytes()
    return found


def disk_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def n_packed(capture: Capture) -> int:
    blobs = [kept.blob for call in capture.calls for kept in call.tensors]
    return sum(blob is not None and blob.container == "packed" for blob in blobs)


@pytest.mark.parametrize(("dtype", "at_most"), [(torch.float32, 0.9), (torch.bfloat16, 0.8)])
def test_the_same_contents_in_fewer_bytes(
    tmp_path: Path, dtype: torch.dtype, at_most: float
) -> None:
    plain = record(tmp_path / "plain", training(dtype=dtype))
    small = record(tmp_path / "small", training(dtype=dtype), compress=True)
    assert contents(small) == contents(plain)
    assert n_packed(plain) == 0
    assert n_packed(small) > 20
    header = 256 << 10
    shares = disk_nbytes(tmp_path / "small") - header, disk_nbytes(tmp_path / "plain") - header
    assert shares[0] < at_most * shares[1]
    for call in small.calls:
        for kept in call.tensors:
            if kept.blob is not None and kept.dtype == "bfloat16":
                assert kept.load().dtype == torch.bfloat16
    shard = next((tmp_path / "small").rglob("*.safetensors"))
    with safe_open(shard, "pt") as file:  # the library opens it; a packed content is bytes to it
        kinds = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118 not a dict
    assert torch.uint8 in kinds


def test_comparing_with_one_that_is_not_compressed(tmp_path: Path) -> None:
    record(tmp_path / "plain", training())
    record(tmp_path / "small", training(), compress=True)
    record(tmp_path / "other", training(scale=1.5), compress=True)
    record(tmp_path / "other_plain", training(scale=1.5))
    assert main(["compare", f"{tmp_path}/small", f"{tmp_path}/plain", "-o", f"{tmp_path}/o"]) == 0
    measured = [
        tp.compare(tmp_path / a, tmp_path / b, jobs=jobs)
        for a, b, jobs in (
            ("other_plain", "plain", 1), ("other", "small", 1), ("other", "plain", 2)
        )
    ]  # fmt: skip
    rows = [
        [(row.name, row.metrics) for pair in found.pairs for row in pair.tensors]
        for found in measured
    ]
    assert rows[0] == rows[1] == rows[2]
    assert any(metrics is not None and metrics.max_abs for _, metrics in rows[0])


def test_a_damaged_content_is_told_and_the_rest_compared(tmp_path: Path) -> None:
    record(tmp_path / "plain", training(scale=1.5))
    small = record(tmp_path / "small", training(), compress=True)
    for call in small.calls:
        for kept in call.tensors:
            if kept.blob is not None and kept.blob.container == "packed":
                with kept.blob.path.open("r+b") as file:
                    file.seek(kept.blob.offset)
                    file.write(bytes(4))
    found = tp.compare(tmp_path / "small", tmp_path / "plain", jobs=1)
    told = [row.problem or "" for pair in found.pairs for row in pair.tensors]
    assert any("a packed content has blocks that do not fill its place" in text for text in told)
    assert "" in told


def test_repeats_are_stored_once_and_the_budget_counts_what_is_stored(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal(LEAST_NBYTES).astype(np.float32)
    out = open_writer(tmp_path / "a", compress=True, max_disk_nbytes=data.nbytes * 7 // 4)
    out.begin_step(0)
    for n, each in enumerate((data, data.copy(), -data, 2 * data)):
        write_relu(out, n, each)
    out.close()
    capture = tp.load(tmp_path / "a")
    kept = [call.tensors[0] for call in capture.calls]
    assert kept[0].blob == kept[1].blob
    assert kept[2].blob is not None  # a second one: plain ones would not have had the room
    assert kept[3].gap == "disk budget reached"
    assert np.array_equal(kept[2].array(), -data)


def test_nothing_is_packed_once_the_budget_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded: list[int] = []
    planes = packing._planes

    def counted(block: packing.Bytes, itemsize: int) -> packing.Coded:
        coded.append(block.nbytes)
        return planes(block, itemsize)

    monkeypatch.setattr(packing, "_planes", counted)
    data = np.random.default_rng(0).standard_normal(LEAST_NBYTES).astype(np.float32)
    out = open_writer(tmp_path / "a", compress=True, max_disk_nbytes=data.nbytes)
    out.begin_step(0)
    for n in range(4):
        write_relu(out, n, data + n)
    out.close()
    kept = [call.tensors[0].gap for call in tp.load(tmp_path / "a").calls]
    assert kept == [None, *3 * ["disk budget reached"]]
    assert sum(coded) == 2 * data.nbytes  # the first, and the one that found no room


def test_without_memory_for_it_contents_are_stored_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planes(block: object, itemsize: int) -> None:
        raise MemoryError

    monkeypatch.setattr(packing, "_planes", planes)
    data = np.zeros(LEAST_NBYTES, np.float32)
    out = open_writer(tmp_path / "a", compress=True)
    out.begin_step(0)
    write_relu(out, 0, data)
    out.close()
    capture = tp.load(tmp_path / "a")
    assert n_packed(capture) == 0
    assert not capture.gaps
    assert np.array_equal(capture.calls[0].tensors[0].array(), data)


def test_a_killed_run_is_read_up_to_there(tmp_path: Path) -> None:
    text = (
        "import os, signal, torch, tensorprobe as tp\n"
        "rec = tp.Recorder('runs/a', level='L1', keep='tensors', compress=True, flush='call')\n"
        "rec.start()\n"
        "x = torch.randn(256, 256)\n"
        "x.relu()\n"
        "print('now', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start_script(tmp_path, text)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    call = next(iter(tp.load(tmp_path / "runs/a").calls(op="*relu")))
    x, y = call.tensor("input.0"), call.tensor("output.0")
    assert x.blob is not None
    assert x.blob.container == "packed"
    assert np.array_equal(np.maximum(x.array(), 0), y.array())


def test_run_convert_show_check_and_repro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "layer = torch.nn.Linear(192, 192)\n"
        "layer(torch.randn(192, 192)).sum().backward()\n"
    )
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    options = ["--level", "L1", "--keep", "tensors"]
    command = ["-m", "tensorprobe", "run", *options, "--compress", "-o", "a", "train.py"]
    done = run_script(
        tmp_path, f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, *{command}]))"
    )
    assert done.returncode == 0, done.stderr
    small = tp.load("a")
    assert n_packed(small)
    assert main(["convert", "a", "--to", "native", "-o", "plain"]) == 0
    assert main(["convert", "plain", "--to", "native", "--compress", "-o", "again"]) == 0
    assert main(["convert", "a", "--to", "msprobe", "-o", "dump"]) == 0
    expected = contents(small)
    for name in ("plain", "again", "dump"):
        assert (
            contents(tp.load(name)).items()
            >= {key: value for key, value in expected.items() if "linear" in key}.items()
        )
    assert disk_nbytes(Path("again")) == disk_nbytes(Path("a")) < disk_nbytes(Path("plain"))
    capsys.readouterr()
    assert main(["convert", "a", "--to", "ptdbg", "--compress", "-o", "b"]) == 2
    assert "--compress needs --to native: tools for ptdbg could" in capsys.readouterr().err
    assert main(["show", "a", "Functional.linear.0.forward"]) == 0
    assert "147.5 kB stored in 1" in capsys.readouterr().out
    assert main(["check", "a", "--device", "cpu", "-o", "checked"]) == 0
    assert main(["repro", "a", "Functional.linear.0.forward", "-o", "case"]) == 0
    (case,) = Path("case").glob("**/*.py")
    assert run_script(case.parent, case.read_text()).returncode == 0


def test_equal_bytes_of_other_dtypes_are_each_converted(tmp_path: Path) -> None:
    def program() -> None:
        for dtype in (torch.complex64, torch.int64, torch.float64):  # two parts, or one
            torch.zeros(LEAST_NBYTES // 8, dtype=dtype).neg()

    plain = record(tmp_path / "a", program, level="L1")
    command = ["convert", f"{tmp_path}/a", "--to", "native", "--compress", "-o", f"{tmp_path}/b"]
    assert main(command) == 0
    assert contents(tp.load(tmp_path / "b")) == contents(plain)


@pytest.mark.parametrize("blob", [(0, -5, 9, 9), (0, 2**70, -(2**70)), (0, 300_000, 9, -8)])
def test_a_place_that_cannot_be_is_a_gap(tmp_path: Path, blob: tuple[int, ...]) -> None:
    out = open_writer(tmp_path / "a", compress=True)
    out.begin_step(0)
    write_relu(out, 0, np.zeros(LEAST_NBYTES, np.float32))
    out.close()
    log = tmp_path / "a/rank0/step0/calls.jsonl"
    text = re.sub(r'"blob":.*?]', f'"blob":{list(blob)}', log.read_text())
    log.write_text(text)
    (call,) = tp.load(tmp_path / "a").calls
    assert [kept.blob for kept in call.tensors] == [None, None]
    assert call.tensors[0].gap == f"calls.jsonl has a wrong place for it: {blob}"


def test_no_threads_are_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    record(tmp_path / "a", training(), compress=True)
    assert set(threading.enumerate()) <= before
    assert os.listdir(tmp_path) == ["a"]


def test_a_wrong_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="compress='yes': expected True or False"):
        tp.Recorder(tmp_path / "a", compress="yes")
