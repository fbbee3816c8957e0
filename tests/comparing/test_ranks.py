"""Captures of two real processes under torchrun: each rank has its own culprit, or lacks a side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import tensorprobe as tp
from recorded import SRC
from tensorprobe.cli.main import main
from tensorprobe.comparing.comparison import Compared

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)
HERE = Path(__file__).parent
SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import tensorprobe as tp
from planting import Device, Fault, gain


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return self.second(F.gelu(torch.tanh(self.first(x))))


def run(folder, faults):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    fault = Fault(faults[rank], 0, gain(1.01)) if rank in faults else None
    with Device(True, fault, seed=rank), tp.Recorder(folder, keep="tensors") as recorder:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


dist.init_process_group("gloo")
rank = dist.get_rank()
run("expected", {})
run("one", {1: "tanh"})
run("two", {0: "gelu", 1: "tanh"})
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two ranks: healthy, rank 1 at fault, each rank with a fault of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{SRC}:{HERE}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def table(found: Compared) -> list[tuple[int, int, str, str | None]]:
    return [(r.rank, r.step, r.verdict, r.culprit) for r in found.verdict.ranks]


def test_each_rank_has_its_own_culprit(runs: Path) -> None:
    found = tp.compare(runs / "two", runs / "expected")
    assert [(c.rank, c.name) for c in found.verdict.culprits] == [
        (0, "Functional.gelu.0.forward"),
        (1, "Torch.tanh.0.forward"),
    ]
    assert table(found) == [
        (0, 0, "diverged", "Functional.gelu.0.forward"),
        (1, 0, "diverged", "Torch.tanh.0.forward"),
    ]


def test_the_rank_that_is_at_fault_comes_first(runs: Path) -> None:
    found = tp.compare(runs / "one", runs / "expected").verdict
    first = found.culprits[0]
    assert (first.rank, first.step, first.name) == (1, 0, "Torch.tanh.0.forward"), str(found)
    assert all(c.step > 0 for c in found.culprits if c.rank == 0), str(found)


def test_a_rank_that_one_side_lacks_is_said_and_the_rest_compared(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = shutil.copytree(runs / "two", tmp_path / "half")
    shutil.rmtree(half / "rank0")
    assert main(["compare", str(half), str(runs / "expected")]) == 3
    text = capsys.readouterr().out
    assert text.startswith("diverged at Torch.tanh.0.forward (step 0, rank 1)")
    assert "note: rank 0 is only in expected: " in text
    assert [(r.rank, r.verdict) for r in tp.compare(half, runs / "expected").verdict.ranks] == [
        (0, "incomparable"), (0, "incomparable"), (1, "diverged"),
    ]  # fmt: skip
    found = tp.compare(runs / "expected", half).verdict
    assert (found.culprits[0].name, found.culprits[0].side) == ("Torch.tanh.0.forward", "expected")


def test_one_rank_alone(runs: Path) -> None:
    found = tp.compare(runs / "two", runs / "expected", rank=1).verdict
    assert [(c.rank, c.name) for c in found.culprits] == [(1, "Torch.tanh.0.forward")]
    assert {r.rank for r in found.ranks} == {1}
