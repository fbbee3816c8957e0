"""A server of several processes, recorded as it is: a folder a process, by role and rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tensorprobe as tp
from ranks.gloo_ranks import SRC, needs_gloo

pytestmark = needs_gloo
ENGINE = Path(__file__).with_name("engine.py")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def serve(folder: Path, output: str, *words: str) -> str:
    start = ["-m", "tensorprobe", "run", "--keep", "tensors", "-o", output]
    return run(folder, *start, str(ENGINE), free_port(), *words).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_is_recorded_as_it_is(tmp_path: Path) -> None:
    bare = run(tmp_path, str(ENGINE), free_port()).stdout
    assert serve(tmp_path, "good") == bare  # every token
    capture = tp.load(tmp_path / "good")
    assert capture.ranks == (0, 1)  # the workers, by torch.distributed
    assert capture.facts["processes"] == ["engine", "main"]
    assert not (tmp_path / "good" / "earlier").exists()
    for rank in (0, 1):
        reduced = capture.call("Distributed.all_reduce.0.forward", step=0, rank=rank)
        assert reduced.collective is not None
        assert reduced.collective.group == (0, 1)
    scheduled = {call.name for call in tp.load(tmp_path / "good" / "engine").calls}
    assert "Tensor.add_.3.forward" in scheduled
    assert "Tensor.sum.2.forward" in {call.name for call in tp.load(tmp_path / "good/main").calls}

    assert (
        json.loads(serve(tmp_path, "bad", "fault").splitlines()[1])["r2"]
        != (json.loads(bare.splitlines()[1])["r2"])
    )
    verdict = tp.compare(tmp_path / "bad", tmp_path / "good", jobs=1).verdict
    assert verdict.verdict == "diverged"
    first = verdict.culprits[0]
    assert (first.name, first.step, first.rank) == ("Tensor.mul_.0.forward", 7, 1)
    assert any("other processes of the program" in note for note in verdict.notes)
    for role in ("engine", "main"):
        role_verdict = tp.compare(tmp_path / "bad" / role, tmp_path / "good" / role, jobs=1)
        assert role_verdict.ok == (role == "engine")  # main sums other tokens


PROGRAM = """
import multiprocessing, os, subprocess, sys
import torch

def work(number):
    print(torch.full((3,), number + 1.0).cumsum(0).tolist())

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.full((2,), float(index)).cosh()

if __name__ == "__main__":
    print(torch.ones(3).exp().sum().item())
    for method in sys.argv[1:]:
        if method == "python":
            for words in (["part.py"], ["-c", "print(0)"], ["part.py"]):
                done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
                print(done)
            continue
        if method == "loader":
            print(sum(torch.utils.data.DataLoader(Numbers(), num_workers=1)))
            continue
        context = multiprocessing.get_context(method)
        for number in range(2):
            process = context.Process(target=work, args=(number,), name=f"{method}:{number}")
            process.start()
            process.join()
    print(torch.ones(3).log1p().sum().item())
"""
PART = """
import os, sys
import torch
found = sorted(name for name in os.environ if name.startswith("TENSORPROBE"))
print(torch.ones(2).sinh().tolist(), os.environ.get("PYTHONPATH"), found, len(sys.path))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "part.py").write_text(PART)
    kinds = ("fork", "spawn", "python", "loader")
    bare = run(tmp_path, "program.py", *kinds)
    recorded = run(tmp_path, "-m", "tensorprobe", "run", "-o", "a", "program.py", *kinds)
    assert recorded.stdout == bare.stdout
    capture = tp.load(tmp_path / "a")
    names = ["fork.0", "fork.1", "part", "part-2", "spawn.0", "spawn.1"]
    assert capture.facts["processes"] == names  # no worker of a DataLoader, no Python without torch
    said = "each process has a folder of its own: fork.0, fork.1, part, part-2, spawn.0, spawn.1."
    assert said in recorded.stderr
    own = {call.name for call in capture.calls}
    assert {"Tensor.exp.0.forward", "Tensor.log1p.0.forward"} <= own
    assert not {"Tensor.cumsum.0.forward", "Tensor.cosh.0.forward"} & own
    for name in names:
        call = "Tensor.sinh.0.forward" if name.startswith("part") else "Tensor.cumsum.0.forward"
        assert call in {each.name for each in tp.load(tmp_path / "a" / name).calls}
    run(tmp_path, "-m", "tensorprobe", "run", "-o", "a", "program.py", "fork")  # a second run
    assert tp.load(tmp_path / "a").facts["processes"] == ["fork.0", "fork.1"]
    assert tp.load(tmp_path / "a/earlier/1").facts["processes"] == names


@pytest.mark.slow
def test_on_request_workers_and_none(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for chosen, kind, found in (("all", "loader", ["Process-1"]), ("none", "fork", None)):
        start = ["-m", "tensorprobe", "run", "--children", chosen, "-o", chosen]
        run(tmp_path, *start, "program.py", kind)
        assert tp.load(tmp_path / chosen).facts.get("processes") == found
    names = {call.name for call in tp.load(tmp_path / "all" / "Process-1").calls}
    assert "Tensor.cosh.0.forward" in names


def test_only_processes(tmp_path: Path) -> None:
    """A program that computes nothing itself: which recordings there are is said."""
    script = "import multiprocessing, program\nfor n in range(2):\n"
    script += (
        "    p = multiprocessing.Process(target=program.work, args=(n,)); p.start(); p.join()\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "start.py").write_text(script)
    run(tmp_path, "-m", "tensorprobe", "run", "-o", "a", "start.py")
    with pytest.raises(tp.UnreadableCapture) as told:
        tp.load(tmp_path / "a")
    assert "a recording of each process that the program started" in str(told.value)
    assert f"'{tmp_path}/a/Process-1'" in str(told.value)
    assert len(tp.load(tmp_path / "a" / "Process-1").calls) == 3
