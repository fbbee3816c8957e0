"""Two ranks over HCCL on the real torch_npu: collectives, DDP, a dead peer, recording, blame."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorprobe as tp
from npu.hccl_programs import Net

PROGRAM = Path(__file__).with_name("hccl_programs.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def launch(
    *words: object, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    parts = [*TORCHRUN, *before, *map(str, words)]
    return subprocess.run(
        parts,
        env={**os.environ, "HCCL_EXEC_TIMEOUT": "60", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(name: str, folder: Path, **environment: str) -> None:
    done = launch(PROGRAM, name, folder, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_collective(tmp_path: Path) -> None:
    run("collectives", tmp_path)
    assert [json.loads((tmp_path / f"collectives{r}.json").read_text()) for r in (0, 1)] == [[], []]


def test_ddp_trains_as_one_process_with_both_halves(tmp_path: Path) -> None:
    run("ddp", tmp_path)
    both = [torch.load(tmp_path / f"ddp{rank}.pt") for rank in (0, 1)]
    weights = len(list(Net().parameters()))
    assert all(map(torch.equal, both[0][-weights:], both[1][-weights:]))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for rank in (0, 1):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 3, 0]))
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for actual, expected in zip(both[0][-weights:], model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_a_dead_peer_is_an_error_after_the_timeout(queue: str, tmp_path: Path) -> None:
    launch(PROGRAM, "dead", tmp_path, HCCL_EXEC_TIMEOUT="5", TASK_QUEUE_ENABLE=queue)
    told = json.loads((tmp_path / "dead.json").read_text())
    assert "EI0002" in told["said"], told
    assert 4 < told["took_s"] < 60, told


def test_recording_changes_no_bit_on_any_rank(tmp_path: Path) -> None:
    run("recorded", tmp_path)
    capture = tp.load(tmp_path / "capture")
    assert {call.rank for call in capture.calls} == {0, 1}
    assert not capture.gaps


def record(folder: Path, **environment: str) -> Path:
    words = ("tensorprobe", "run", "--keep", "tensors", "-o", folder, PROGRAM, "ddp", folder.parent)
    done = launch(*words, before=("-m",), **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_torchrun_of_an_unedited_script_and_a_wrong_collective(tmp_path: Path) -> None:
    right, again = record(tmp_path / "right"), record(tmp_path / "again")
    assert tp.compare(again, right).verdict.verdict == "match"
    wrong = record(tmp_path / "wrong", CANN_FAULTS="HcclAllReduce@1=scale:1.05")
    verdict = tp.compare(wrong, right).verdict
    assert verdict.verdict == "diverged"
    # DDP reduces in C++, where no call is seen: the verdict says between what it happened
    first = verdict.culprits[0]
    assert (first.kind, first.step) == ("boundary", 1), verdict
    assert "parameters_grad" in first.name
    wrong = record(tmp_path / "wrong_gelu", CANN_FAULTS="Gelu@2=scale:1.05")
    verdict = tp.compare(wrong, right).verdict
    assert verdict.culprits[0].name == "Functional.gelu.0.forward", verdict
    assert verdict.culprits[0].step == 2
