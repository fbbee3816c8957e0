"""Processes that a program spawns by itself: each has the folder of its rank, in one run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tensorprobe as tp
from ranks.gloo_ranks import PROGRAMS, SRC, needs_gloo

pytestmark = needs_gloo


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("when", ["first", pytest.param("later", marks=pytest.mark.slow)])
def test_the_rank_is_that_of_torch_distributed(tmp_path: Path, when: str) -> None:
    done = run(tmp_path, str(PROGRAMS / "spawned_ranks.py"), free_port(), when)
    assert done.returncode == 0, done.stderr
    capture = tp.load(tmp_path / "runs")
    assert not (tmp_path / "runs" / "earlier").exists()
    assert capture.gaps == ()
    assert capture.ranks == (0, 1)
    assert [capture.facts["ranks"][rank]["rank"] for rank in (0, 1)] == [0, 1]
    for rank in (0, 1):
        linear = capture.call("Functional.linear.0.forward", rank=rank)
        assert linear.tensor("input.0").load().tolist() == [[rank, rank]]


def test_run_records_spawned_ranks(tmp_path: Path) -> None:
    script = str(PROGRAMS / "spawned_by_run.py")
    done = run(tmp_path, "-m", "tensorprobe", "run", "-o", "runs", script, free_port())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: [3.0, 3.0]", "rank 1: [3.0, 3.0]"]
    capture = tp.load(tmp_path / "runs")
    assert capture.gaps == ()
    for rank in (0, 1):
        reduced = capture.call("Distributed.all_reduce.0.forward", rank=rank)
        assert reduced.collective is not None
        assert reduced.collective.group == (0, 1)
    assert not (tmp_path / "runs" / "earlier").exists()
