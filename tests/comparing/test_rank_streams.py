"""Runs of several ranks that are gone through one by one: the same answers as all at once."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import SRC
from tensorprobe.cli.main import main
from tensorprobe.comparing import large_runs, rank_pairs
from tensorprobe.comparing.rank_processes import RankProcesses
from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.comparing.rank_work import RankFailed
from tensorprobe.report.saving import Comparison
from tensorprobe.store.rank_folders import read_rank

RANKS = 6
PROGRAM = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
import tensorprobe as tp


class Kernels(TorchDispatchMode):
    sines = reductions = 0

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("sin"):
            self.sines += 1
            if self.kind == "wrong" and self.sines == 4:
                result.mul_(1.01)
        if "allreduce" in func.__name__:
            self.reductions += 1
            if self.kind != "healthy" and self.reductions == 2:
                args[0][0].mul_(1.001)
        return result


dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
for keep in ("tensors", "stats"):
    for kind in ("healthy", "wrong", "received"):
        torch.manual_seed(0)
        folder = f"{keep}-{kind}"
        with Kernels(kind), tp.Recorder(folder, keep=keep, log=lambda text: None) as recorder:
            x = torch.randn(8, 16)
            for n in range(12):
                y = torch.cos(torch.sin(x))
                if n % 3 == 2:
                    dist.all_reduce(y)
                x = x + y * 0.1
                if n == 7:
                    recorder.step()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run of six ranks and one whose rank 4 is wrong, with tensors and with statistics:
    copies of what one process recorded."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "program.py").write_text(PROGRAM)
    subprocess.run(
        [sys.executable, "program.py"], cwd=folder, check=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for keep in ("tensors", "stats"):
        for side in ("actual", "expected"):
            run = folder / f"{keep}-{side}"
            run.mkdir()
            shutil.copy(folder / f"{keep}-healthy" / "capture.json", run)
            for rank in range(RANKS):
                kind = "healthy"
                if side == "actual":
                    kind = "wrong" if rank == 4 else "received"
                shutil.copytree(folder / f"{keep}-{kind}" / "rank0", run / f"rank{rank}")
    return folder


def saved(found: Comparison, folder: Path) -> tuple[str, list[list[object]]]:
    """verdict.json and comparison.csv, the numbers of which may be written in several ways."""
    found.save(folder)
    with (folder / "comparison.csv").open(newline="") as file:
        rows = [[_number(cell) for cell in row] for row in csv.reader(file)]
    return (folder / "verdict.json").read_text(), rows


def _number(cell: str) -> object:
    try:
        return repr(float(cell))
    except ValueError:
        return cell


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize("how", ["processes", "one by one"])
def test_the_answer_is_that_of_all_at_once(
    runs: Path, keep: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = runs / f"{keep}-actual", runs / f"{keep}-expected"
    at_once = tp.compare(*sides)
    assert not isinstance(at_once.pairs, PairsOfRanks)
    if how == "one by one":
        monkeypatch.setattr(large_runs, "LARGE_NBYTES", 1)
    streamed = tp.compare(*sides, jobs=2 if how == "processes" else 1)
    assert isinstance(streamed.pairs, PairsOfRanks)
    assert at_once.verdict.origins == [4], str(at_once.verdict)
    assert saved(streamed, tmp_path / "s") == saved(at_once, tmp_path / "a")
    assert len(streamed.pairs) == len(at_once.pairs)
    names = [pair.call.name for pair in at_once.pairs]
    assert [pair.call.name for pair in streamed.pairs] == names
    assert streamed.pairs[-3].call.name == names[-3]
    assert [pair.call.name for pair in streamed.pairs[5:90:7]] == names[5:90:7]
    assert streamed.alone == at_once.alone
    assert streamed.actual.ranks == at_once.actual.ranks
    assert streamed.actual.steps == at_once.actual.steps
    assert len(streamed.actual.calls) == len(at_once.actual.calls)


def test_the_command_prints_and_writes_the_same(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for options in ([], ["-j", "2"]):
        out = str(tmp_path / "out")
        sides = str(runs / "stats-actual"), str(runs / "stats-expected")
        assert main(["compare", *sides, "-o", out, *options]) == 3
        told.append((capsys.readouterr().out, (tmp_path / "out" / "verdict.json").read_bytes()))
        shutil.rmtree(out)
    assert told[0] == told[1]


def test_a_rank_that_cannot_be_read_is_told_and_the_others_are_compared(
    runs: Path, tmp_path: Path
) -> None:
    for side in ("actual", "expected"):
        shutil.copytree(runs / f"stats-{side}", tmp_path / side)
    for step in ("step0", "step1"):
        log = tmp_path / "actual" / "rank2" / step / "calls.jsonl"
        log.unlink()
        log.mkdir()
    (tmp_path / "actual" / "rank1" / "step1" / "calls.jsonl").write_bytes(b"\0" * 400 + b"\n")
    sides = tmp_path / "actual", tmp_path / "expected"
    at_once, streamed = tp.compare(*sides).verdict, tp.compare(*sides, jobs=2).verdict
    assert json.dumps(streamed.to_json()) == json.dumps(at_once.to_json())
    assert streamed.origins == [4]
    assert any("only in expected" in note for note in streamed.notes), streamed.notes
    assert streamed.counts["gaps"] >= 2


def test_a_rank_on_a_disk_that_fails_is_told_and_the_others_are_compared(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, steps: list[Path]) -> object:
        if steps[0].parent.name == "rank2":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(steps[0]))
        return read_rank(path, steps)

    monkeypatch.setattr(large_runs, "LARGE_NBYTES", 1)
    monkeypatch.setattr(rank_pairs, "read_rank", failing)
    sides = runs / "stats-actual", runs / "stats-expected"
    verdict = tp.compare(*sides, jobs=1).verdict
    assert verdict.origins == [4], str(verdict)
    assert any(
        note.startswith("rank 2 could not be compared: [Errno 5]") for note in verdict.notes
    ), verdict.notes
    same = tp.compare(sides[0], sides[0], jobs=1).verdict
    assert same.verdict == "incomparable"
    assert (same.reason or "").startswith("rank 2 could not be compared")


def test_nothing_to_compare_is_said_as_before(runs: Path) -> None:
    sides = runs / "stats-actual", runs / "stats-expected"
    texts = []
    for jobs in (None, 2):
        with pytest.raises(tp.TensorprobeError) as refused:
            tp.compare(*sides, step=77, jobs=jobs)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert "has no calls of step 77" in texts[0]


class Dying:
    """Kills the process that does it: always, or the first one."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def do(self, task: int) -> int:
        if task == 2 or (task == 1 and not self.mark.exists()):
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task * 10


def test_a_killed_process_is_replaced_and_its_task_done_again(tmp_path: Path) -> None:
    engine = RankProcesses(2)
    try:
        found = dict(engine.run(Dying(tmp_path / "mark"), iter(range(4))))
    finally:
        engine.close()
    assert [found[n] for n in (0, 1, 3)] == [0, 10, 30]
    assert isinstance(found[2], RankFailed)
    assert "3 processes have died of it, the last by SIGKILL" in str(found[2])


def test_a_rank_of_which_processes_die_is_no_match(runs: Path, tmp_path: Path) -> None:
    """Reading it takes more memory than there is, say: here a process is killed when it does."""
    sides = runs / "stats-expected", runs / "stats-expected"
    script = f"""
import os, signal, sys
import tensorprobe as tp
from tensorprobe.comparing import rank_pairs, rank_processes

if __name__ == "__main__":
    start = rank_processes._code
    rank_processes._code = lambda end: (
        "import sys; sys.path[:] = %r\\n" % sys.path
        + "import os, signal; from tensorprobe.comparing import rank_pairs\\n"
        + "read = rank_pairs.read_rank\\n"
        + "def deadly(path, steps):\\n"
        + "    if steps[0].parent.name == 'rank3': os.kill(os.getpid(), signal.SIGKILL)\\n"
        + "    return read(path, steps)\\n"
        + "rank_pairs.read_rank = deadly\\n"
        + start(end)
    )
    verdict = tp.compare({str(sides[0])!r}, {str(sides[1])!r}, jobs=2).verdict
    print(verdict.verdict, "|", verdict.reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=250,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.stdout == (
        "incomparable | rank 3 could not be compared: 3 processes have died of it, "
        "the last by SIGKILL\n"
    ), done.stderr


def test_processes_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from tensorprobe.comparing.rank_processes import RankProcesses\n"
        "engine = RankProcesses(2)\n"
        "print(*(each._child.pid for each in engine._processes), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=100,
    )  # fmt: skip
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 100
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def no_ray() -> Iterator[None]:
    try:
        import ray  # noqa: F401
    except ImportError:
        yield
    else:
        pytest.skip("ray is installed: make test-ray has its tests")


@pytest.mark.usefixtures("no_ray")
def test_without_ray_one_line_says_what_to_install(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = str(runs / "stats-actual"), str(runs / "stats-expected")
    assert main(["compare", *sides, "--engine", "ray"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'tensorprobe[ray]'" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "dask"], "engine 'dask': expected ray or ray://HOST:PORT"),
        (["--engine", "ray", "--rank", "1"], "not with `rank` or `noise`"),
    ],
)
def test_an_engine_that_cannot_be_is_wrong_usage(
    runs: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = str(runs / "stats-actual"), str(runs / "stats-expected")
    assert main(["compare", *sides, *options]) == 2
    assert said.replace("`rank`", "--rank").replace("`noise`", "--noise") in (
        capsys.readouterr().err
    )
