"""A script that trains something small, for `tensorprobe run --monitor`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[2] / "src"
SCRIPT = """
import os, signal, sys, torch
from torch import nn
torch.set_num_threads(1)
seed, fault, steps = (int(word) for word in sys.argv[1:4])
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
groups = [{"params": [*model[:4].parameters()]}, {"params": [*model[4].parameters()]}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
weights = torch.randn(8, 3, generator=torch.Generator().manual_seed(99))
for step in range(steps):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), (x @ weights).argmax(1)).backward()
    if 0 < fault <= step:
        model[2].weight.grad.mul_(0.5)
    if 0 < -fault == step:
        model[2].requires_grad_(False)
    optimizer.step()
    if len(sys.argv) > 4 and step == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, *words: Any, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    """`tensorprobe` with these words, in a folder that has the script as train.py."""
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", *(str(word) for word in words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "TENSORPROBE_BUILD": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
