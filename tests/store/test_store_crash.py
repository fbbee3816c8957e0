"""Killed at any moment, or on a full disk: what was flushed is there and right."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from store_making import open_writer, write_relu

import tensorprobe
from tensorprobe.store.shard import FREE

# Says after which call everything was flushed; content follows from the number of the call.
RUN = """
import os, sys
from pathlib import Path
import numpy as np
from store_making import open_writer, write_relu
out = open_writer(Path(sys.argv[1]))
count, elements = int(sys.argv[2]), int(sys.argv[3])
for n in range(count):
    if n % 300 == 0:
        out.begin_step(n // 300)
    write_relu(out, n % 300, np.arange(n, n + elements, dtype=np.float32))
    if n % 101 == 0:
        out.drain()
        os.write(1, b"%d\\n" % n)
os.write(1, b"done\\n")
sys.stdin.readline()
"""


def kill_one(root: Path, seed: int, count: int, elements: int, within_s: float) -> None:
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(root), str(count), str(elements)]
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()  # it has begun
    assert line == "0\n"
    time.sleep(random.Random(seed).uniform(0, within_s))
    process.send_signal(signal.SIGKILL)
    said = [line, *process.stdout.readlines()]
    process.wait()
    process.stdin.close()
    process.stdout.close()
    flushed = max(int(text) for text in said if text.endswith("\n") and text != "done\n")
    check(root, flushed, elements)
    shutil.rmtree(root)  # of twenty of them 16 GB would stay


def check(root: Path, flushed: int, elements: int) -> None:
    capture = tensorprobe.load(root)
    assert len(capture.calls) > flushed
    assert len(capture.gaps) <= 1, "at most a line that was being written"
    for n, call in enumerate(capture.calls):
        assert (call.step, call.name) == (n // 300, f"Torch.relu.{n % 300}.forward")
        for record in call.tensors:
            if record.blob is not None:
                expected = np.arange(n, n + elements, dtype=np.float32)
                np.testing.assert_array_equal(record.array(), expected)
        if n <= flushed:
            assert call.status == "complete"
            assert all(record.blob is not None for record in call.tensors)
    for path in root.rglob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            keys = set(file.keys()) - {FREE}
            assert all(file.get_slice(key).get_shape() == [elements] for key in keys)


@pytest.mark.parametrize("seed", range(3))
def test_killed(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path / "a", seed, count=4000, elements=4000, within_s=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_while_writing_hundreds_of_megabytes(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path / "a", 100 + seed, count=12_000, elements=25_000, within_s=3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user cannot mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_killed_between_two_steps(tmp_path: Path) -> None:
    out = open_writer(tmp_path)
    out.begin_step(0)
    write_relu(out, 0)
    out.end_step()
    out.drain()
    assert tensorprobe.load(tmp_path).facts["unfinished"] == ["rank0"]
    assert tensorprobe.load(tmp_path / "rank0" / "step0").facts["unfinished"] == []
    out.close()
    assert tensorprobe.load(tmp_path).facts["unfinished"] == []
    out.begin_step(1)  # recorded on: it may be killed again
    write_relu(out, 0)
    out.end_step()
    out.drain()
    assert tensorprobe.load(tmp_path).facts["unfinished"] == ["rank0"]
    out.close()
    capture = tensorprobe.load(tmp_path)
    assert (capture.facts["unfinished"], capture.gaps) == ([], ())


def test_a_folder_deleted_while_it_is_written(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    told: list[Exception] = []
    out._on_error = told.append
    for step in range(3):
        out.begin_step(step)
        write_relu(out, 0)
        write_relu(out, 1)
        if step == 1:
            shutil.rmtree(tmp_path / "a")
    out.close()
    out.count_deleted()
    assert (out.n_calls, out.lost, out.n_lost_steps) == (0, {0: 2, 1: 2, 2: 2}, 3)
    (error,) = told
    assert isinstance(error, FileNotFoundError)
    assert "deleted while it was recorded" in str(error)


def test_one_step_deleted_while_others_are_written(tmp_path: Path) -> None:
    out = open_writer(tmp_path)
    for step in range(3):
        out.begin_step(step)
        write_relu(out, 0)
        out.end_step()
        out.drain()
    shutil.rmtree(tmp_path / "rank0" / "step1")
    out.close()
    assert out.lost == {}
    out.count_deleted()
    assert (out.n_calls, out.lost) == (2, {1: 1})
    capture = tensorprobe.load(tmp_path)
    assert len(capture.calls) == 2
    assert [(gap.step, gap.name) for gap in capture.gaps] == [(1, "calls")]


@pytest.mark.parametrize("with_tensors", [True, False])
def test_a_full_disk(small_disk: Path, with_tensors: bool) -> None:
    out = open_writer(small_disk / "a")
    out.begin_step(0)
    for n in range(60_000):
        data = np.full(1000, n, np.float32) if with_tensors and n % 20 == 0 else None
        write_relu(out, n, data)
        if out.error is not None:
            break
    for late in range(n + 1, n + 50):  # the program does not stop at once
        write_relu(out, late, np.zeros(1000, np.float32))
    out.begin_step(1)
    write_relu(out, 0)
    out.close()
    assert isinstance(out.error, OSError)
    assert out.error.errno == errno.ENOSPC
    capture = tensorprobe.load(small_disk / "a")
    refused = "[Errno 28] No space left on device"
    lost = n + 50 - len(capture.calls)
    assert out.lost == {0: lost, 1: 1}
    reasons = [(gap.step, gap.name, gap.reason) for gap in capture.gaps if gap.name == "calls"]
    assert reasons == [(0, "calls", f"{lost} lost: {refused}"), (1, "calls", f"1 lost: {refused}")]
    assert (out.n_calls, out.n_gaps) == (len(capture.calls), len(capture.gaps))
    assert capture.facts["unfinished"] == ["rank0/step0"]
    assert len(capture.calls) > 500
    for call in capture.calls:
        record = call.tensors[0]
        if record.blob is not None:
            assert record.array().tolist() == [int(call.name.split(".")[2])] * 1000
