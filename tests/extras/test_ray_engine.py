"""compare --engine ray, with a Ray of this machine and with one that is joined: make test-ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.two_runs import write_run

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray has an environment")
pytestmark = pytest.mark.slow
SRC = Path(__file__).parents[2] / "src"
RANKS = 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "actual", RANKS, faulty=3)
    write_run(folder / "expected", RANKS)
    return folder


def compared(runs: Path, out: Path, *options: str, **environ: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "compare", "actual", "expected", "-o", str(out),
         *options],
        cwd=runs, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": str(SRC), **environ},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_verdict_is_the_same_byte_for_byte(runs: Path, tmp_path: Path) -> None:
    files = []
    for name, options in (("ray", ["--engine", "ray"]), ("alone", [])):
        status, said, wrong = compared(runs, tmp_path / name, *options)
        assert status == 3, wrong
        assert said.startswith("diverged at Torch.exp.0.forward (step 0, rank 3)")
        files.append((tmp_path / name / "verdict.json").read_bytes())
    assert files[0] == files[1]


def test_a_broken_rank_is_told_and_the_others_are_compared(runs: Path, tmp_path: Path) -> None:
    log = write_run(tmp_path / "actual", RANKS, faulty=3) / "rank1" / "step0" / "calls.jsonl"
    write_run(tmp_path / "expected", RANKS)
    log.unlink()
    log.mkdir()
    status, said, wrong = compared(tmp_path, tmp_path / "out", "--engine", "ray")
    assert status == 3, wrong
    assert said.startswith("diverged at Torch.exp.0.forward (step 0, rank 3)")
    assert "rank 1 is only in expected" in said


class DiesOnce:
    """Kills the worker that does it; the second time the file is there."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def do(self, task: int) -> int:
        if task == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task * 10


def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    from tensorprobe.comparing.ray_engine import RayEngine

    engine = RayEngine(None, 2)
    try:
        found = [result for _, result in engine.run(DiesOnce(tmp_path / "mark"), iter(range(4)))]
    finally:
        engine.close()
    assert found == [0, 10, 20, 30]
    assert (tmp_path / "mark").exists()


def test_a_cluster_that_is_not_there_is_one_line(runs: Path, tmp_path: Path) -> None:
    status, _, said = compared(runs, tmp_path / "out", "--engine", "ray://127.0.0.1:9")
    assert (status, said.count("\n")) == (1, 1), said
    assert "no Ray cluster could be used at 'ray://127.0.0.1:9'" in said


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A head with a server for clients, ended with the test; it knows no password."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = "9919"
    head = subprocess.Popen(
        [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
         "--port=6479", f"--ray-client-server-port={port}", "--num-cpus=2",
         "--include-dashboard=false", "--disable-usage-stats"],
        env={**os.environ, "PYTHONPATH": f"{SRC}:{SRC.parent / 'tests'}"},
        cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield f"ray://127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)


def test_a_cluster_is_joined(runs: Path, tmp_path: Path, cluster: str) -> None:
    end = time.monotonic() + 300
    while True:  # until it has started
        status, said, wrong = compared(runs, tmp_path / "ray", "--engine", cluster)
        if status == 3:
            break
        assert time.monotonic() < end, wrong
        time.sleep(2)
    assert said.startswith("diverged at Torch.exp.0.forward (step 0, rank 3)")
    assert compared(runs, tmp_path / "alone")[0] == 3
    one, other = ((tmp_path / name / "verdict.json").read_bytes() for name in ("ray", "alone"))
    assert one == other
