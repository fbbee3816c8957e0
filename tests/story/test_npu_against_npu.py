"""NPU against NPU: after an upgrade only the vendor's own ops are recorded and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from npu_program import end, start

import tensorprobe as tp
from tensorprobe.cli.main import main

TRAIN = """\
import torch
import torch_npu
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(16, 16)

    def forward(self, x):
        normal = torch_npu.npu_rms_norm(x, self.gain)[0]
        return x + self.down(torch_npu.npu_swiglu(self.up(normal)))


torch.manual_seed(0)
model = nn.Sequential(Block(), Block()).npu()
optimizer = torch.optim.AdamW(model.parameters(), fused=False)
for _ in range(2):
    model(torch.randn(4, 16).npu()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FAULT = [{"op": "npu_swiglu_backward", "effect": "scale:1.001", "calls": [0, 2]}]


def test_only_custom_ops_name_the_culprit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["run", "--sim-npu", "--api", "NPU.*", "--keep", "tensors", "-o"]
    runs = (
        start(tmp_path, *command, "runs/before", "train.py"),
        start(
            tmp_path,
            *command,
            "runs/after",
            "train.py",
            TENSORPROBE_SIM_NPU_FAULTS=json.dumps(FAULT),
        ),
    )
    for process in runs:
        done = end(process)
        assert done.returncode == 0, done.stderr
    ops = {call.op for call in tp.load(tmp_path / "runs/after").calls}
    assert ops == {"torch.ops.npu.npu_rms_norm", "torch.ops.npu.npu_swiglu"}

    monkeypatch.chdir(tmp_path)
    assert main(["compare", "runs/after", "runs/before", "-o", "report"]) == 3
    verdict = json.loads(Path("report/verdict.json").read_text())
    (culprit, *_) = verdict["culprits"]
    # The backward of the second block runs first: the first execution of the kernel.
    assert culprit["name"] == "NPU.npu_swiglu.1.backward"
    assert (culprit["module"], culprit["step"], culprit["kind"]) == ("1", 0, "gradient")
    assert culprit["stack"][0].startswith(f"{tmp_path}/train.py:15 ")
    assert verdict["counts"]["only_actual"] == verdict["counts"]["only_expected"] == 0
