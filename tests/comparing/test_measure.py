"""Measuring in processes: everything once, the largest first, and a dead process costs nothing."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tensorprobe.comparing.measure import Workers, batches, workers_for
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.metrics import measure_pair
from tensorprobe.tensors.stored_pairs import Stored, StoredPair, measure_stored

MB = 1 << 20


@pytest.mark.parametrize("n", [1, 2, 16])
def test_every_pair_is_in_one_batch(n: int) -> None:
    rng = random.Random(n)
    sizes = [int(rng.lognormvariate(10, 3)) for _ in range(5000)]
    found = list(batches(sizes, n))
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(sizes)))
    assert all(found)


def test_no_batch_is_larger_than_its_share() -> None:
    sizes = [64 * MB, *[MB] * 200, 100 * MB, *[100] * 1000]
    found = [sum(sizes[i] for i in batch) for batch in batches(sizes, 16)]
    assert found[:2] == [100 * MB, 64 * MB]
    assert max(found[2:]) <= 2 * sum(sizes) / (8 * 16)
    assert found[-1] <= MB


def stored(path: Path, array: np.ndarray, dtype: str = "float32") -> Stored:
    path.write_bytes(b"abc" + array.tobytes())
    return (path.name, dtype, array.shape, Blob(path, 3, array.nbytes))


def make_pairs(folder: Path, count: int) -> list[StoredPair]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        x = rng.standard_normal(1000 + i).astype(np.float32)
        found.append(
            (stored(folder / f"a{i}", x * np.float32(1.0001)), stored(folder / f"e{i}", x))
        )
    return found


def nothing(batch: Sequence[int]) -> None:
    pass


def test_processes_measure_what_this_one_does(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path, 300)
    (tmp_path / "a7").unlink()
    os.truncate(tmp_path / "e8", 100)
    told: list[int] = []
    workers = Workers(3)
    try:
        found = workers.results(pairs, [2000] * len(pairs), told.extend)
        again = workers.results(pairs[:5], [2000] * 5, nothing)
    finally:
        workers.close()
    assert found == [measure_stored(*pair) for pair in pairs]
    assert again == found[:5]
    assert sorted(told) == list(range(300))
    assert isinstance(found[7], str)
    assert "a7" in found[7]
    assert found[8] == f"ValueError: {tmp_path / 'e8'} ends at byte 100, before its content"


def test_what_a_dead_process_leaves_is_measured_all_the_same(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path, 40)
    workers = Workers(2)
    try:
        found = [workers.results(pairs, [2000] * len(pairs), nothing)]
        first, second = processes_of(workers)
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)  # and nobody has noticed
            found.append(workers.results(pairs, [2 * MB] * len(pairs), nothing))
    finally:
        workers.close()
    assert all(each == [measure_stored(*pair) for pair in pairs] for each in found)


def test_processes_that_do_not_start_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = make_pairs(tmp_path, 3)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workers = Workers(2)
    found = workers.results(pairs, [2 * MB] * len(pairs), nothing)
    workers.close()
    assert found == [measure_stored(*pair) for pair in pairs]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_measures(tmp_path: Path, how: signal.Signals) -> None:
    """Also in the middle of their work: nobody waits for it."""
    size = 1 << 40
    sides = [tmp_path / name for name in ("a", "e")]
    for side in sides:
        side.touch()
        os.truncate(side, size)
    a, e = (("x", "float32", (size // 4,), Blob(side, 0, size)) for side in sides)
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import PosixPath
from tensorprobe.comparing.measure import Workers
from tensorprobe.tensors.blob import Blob
workers = Workers(2)
print(workers._first.pid, flush=True)
try:
    workers.results([({a!r}, {e!r})] * 2, [{size}] * 2, print)
finally:
    workers.close()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        first = int(child.stdout.readline())
        pids = [first, *children_of(first, 2)]
        child.send_signal(how)
        assert child.wait(30) == -how
    wait_until(lambda: not any(map(is_running, pids)))


def processes_of(workers: Workers) -> list[int]:
    assert workers._first is not None
    return children_of(workers._first.pid, len(workers._lines))


def children_of(pid: int, n: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: len(path.read_text().split()) == n)
    return [int(word) for word in path.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # dead, though nobody has asked for it


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_the_program_forks_meanwhile_keeps_nobody_waiting(tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path, 3)
    workers = Workers(2)
    assert len(workers.results(pairs, [1] * 3, nothing)) == 3
    child = os.fork()
    if child == 0:  # it has all that this process has open
        time.sleep(30)
        os._exit(0)
    try:
        began = time.monotonic()
        workers.close()
        assert time.monotonic() - began < 10
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_program_that_ignores_what_becomes_of_its_children() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from tensorprobe.comparing.measure import Workers\n"
        "workers = Workers(2); time.sleep(1); workers.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_pieces_are_the_arrays(tmp_path: Path) -> None:
    """More than one piece, and numbers that lie at odd places in the file."""
    x = np.random.default_rng(1).standard_normal(100_000)
    for dtype in (np.float64, np.float16, np.complex64, np.int32, np.bool_):
        a, e = (x * 1.01).astype(dtype), x.astype(dtype)
        pair = stored(tmp_path / "a", a, a.dtype.name), stored(tmp_path / "e", e, e.dtype.name)
        assert measure_stored(*pair) == measure_pair(a, e)


def test_a_small_capture_starts_no_process(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(bytes(1000))
    with workers_for([tmp_path, tmp_path / "x.npy", tmp_path / "gone"], None) as workers:
        assert workers is None
    with workers_for([tmp_path], 2) as workers:
        assert workers is not None
