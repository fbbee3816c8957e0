"""Errors on a CUDA device, which is broken for its whole process once a kernel has failed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe as tp
from recorded import SRC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
table = nn.Embedding(5, 8).cuda()
norm = nn.LayerNorm(8).cuda()
index = torch.tensor([0, 4, 1]).cuda()
norm(table(index)).sum().backward()
index[1] = 9
loss = norm(table(index)).sum()
loss.backward()
torch.cuda.synchronize()
"""


def guarded(folder: Path, **environ: str) -> tuple[int, str, dict[str, Any]]:
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **environ}
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", "--guard", "errors", "script.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    (finding,) = json.loads((folder / "guard" / "findings.json").read_text())["findings"]
    return done.returncode, done.stderr, finding


def test_a_broken_device_is_not_needed_to_save_the_inputs(tmp_path: Path) -> None:
    status, said, finding = guarded(tmp_path)
    assert status == 1
    assert "device-side assert triggered" in said
    assert (finding["name"], finding["step"]) == ("Functional.embedding.0.forward", 1)
    assert "missing" not in finding["metrics"]
    call = tp.load(tmp_path / finding["inputs"]).call(finding["name"])
    assert call.tensor("input.0").load().tolist() == [0, 9, 1]
    assert call.tensor("input.1").shape == (5, 8)
    assert finding["metrics"]["alone"] == "reproduced"


def test_without_launch_blocking_the_finding_says_that_it_may_be_late(tmp_path: Path) -> None:
    status, _, finding = guarded(tmp_path, CUDA_LAUNCH_BLOCKING="0")
    assert status == 1
    assert finding["metrics"]["notes"][0] == (
        "errors of cuda surface late, so an earlier call may be the guilty one. "
        "Run once more with CUDA_LAUNCH_BLOCKING=1"
    )


def test_same_bits_and_no_memory_kept(tmp_path: Path) -> None:
    def train(step: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.LayerNorm(64), torch.nn.GELU()
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train(lambda: None)
    gc.collect()  # what earlier tests left in cycles
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    with tp.Guard(tmp_path, watch="errors", log=lambda text: None) as guard:
        actual = train(guard.step)
        guard.step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
    assert guard.findings == ()
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
