"""Ranks that die, are stopped or raise, and runs of two nodes: what is left, and who is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import tensorprobe as tp
from recorded import SRC
from tensorprobe.cli.main import main

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo"
)
PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist

how, victim = sys.argv[1], 1
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    y = torch.tanh(model(torch.ones(2, 8)))
    if rank == victim and step == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("this rank is out of data")
        if how == "overflows":
            y = torch.log(y - 2)
    dist.all_reduce(y)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended", rank, flush=True)
dist.destroy_process_group()
"""


def launched(
    folder: Path, how: str, *options: str, launcher: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    """Three ranks under torchrun, recorded to the folder `how`."""
    (folder / "train.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "torch.distributed.run", *launcher]
    return subprocess.Popen(
        [*words, "-m", "tensorprobe", "run", *options, "train.py", how],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=280)
    return process.returncode, said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of three ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("deaths")
    three = ("--standalone", "--nproc-per-node=3")
    status, said = ended(launched(folder, "healthy", "-o", "healthy", launcher=three))
    assert status == 0, said
    return folder


@pytest.mark.parametrize("how", ["killed", "raises", "overflows"])
def test_the_others_end_and_the_verdict_says_who_died_where(
    place: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    three = ("--standalone", "--nproc-per-node=3")
    # the guard ends its program at the first finding, with status 3
    options = (
        ["--guard", "overflow", "--guard-output", f"guard-{how}"] if how == "overflows" else []
    )
    status, said = ended(launched(place, how, "-o", how, *options, launcher=three))
    assert status != 0
    assert "ended 1" not in said
    capture = tp.load(place / how)  # readable, all three
    assert capture.ranks == (0, 1, 2)
    assert {call.step for call in capture.calls(rank=1)} >= {0, 1}
    verdict = tp.compare(place / how, place / "healthy").verdict
    if how == "overflows":
        assert verdict.verdict == "diverged"
        first = verdict.culprits[0]
        assert (first.rank, first.step) == (1, 1), str(verdict)
        findings = json.loads((place / "guard-overflows" / "rank1" / "findings.json").read_text())
        assert findings["findings"][0]["rank"] == 1
    else:
        assert verdict.verdict != "match", str(verdict)
        assert "rank 1" in str(verdict), str(verdict)
    capsys.readouterr()
    assert main(["ranks", str(place / how)]) == 3
    lines = capsys.readouterr().out.splitlines()
    # the guard looks at the end of the step: until then the ranks agree, in NaN
    told = [line for line in lines if line.startswith("first NaN")] if how == "overflows" else lines
    assert "rank 1" in told[0], lines


def test_two_nodes_record_into_one_shared_folder(place: Path) -> None:
    """Each has its own launcher, as on two machines."""
    meet = "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29713", "--rdzv-id=shared"
    nodes = [
        launched(
            place, "healthy", "-o", "shared",
            launcher=("--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", *meet),
        )
        for node in range(2)
    ]  # fmt: skip
    told = [ended(node) for node in nodes]
    assert [status for status, _ in told] == [0, 0], told
    capture = tp.load(place / "shared")
    assert capture.ranks == (0, 1)
    assert not (place / "shared" / "earlier").exists()
    assert len(capture.calls(rank=0)) == len(capture.calls(rank=1))
    assert not capture.gaps
    for rank in (0, 1):
        alone = tp.compare(place / "shared" / f"rank{rank}", place / "shared").verdict
        assert alone.verdict == "incomparable"  # the other rank is there, and is not compared
    assert tp.compare(place / "shared", place / "shared", jobs=2).verdict.verdict == "match"
