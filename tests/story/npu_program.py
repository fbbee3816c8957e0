"""A training as an NPU user writes it, the chip it runs on, and the commands to run it with."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from recorded import SRC

# Written for `python train.py npu` and `python train.py cpu`; what is dumped goes where it says.
TRAIN = """\
import sys
import torch
from torch import nn
from ptdbg_ascend import *

device = sys.argv[1]
if device == "npu":
    import torch_npu


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 24)

    def forward(self, x):
        return self.fc(nn.functional.gelu(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([Block(16), Block(24)])
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x))).flatten(2)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def step():
    x, target = torch.randn(2, 3, 4, 4).to(device), torch.tensor([0, 1]).to(device)
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())


seed_all()
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""

# The chip: it rounds in its own way, and its layer norm is wrong for rows of 24.
NPU = """\
import runpy
from tensorprobe.devices import sim_npu

sim_npu.noise(1)
sim_npu.plant("native_layer_norm", effect=lambda y: y.flip(-1) if y.shape[-1] == 24 else y)
"""
BROKEN = "Functional_layer_norm_1_forward"


def write(folder: Path, name: str, body: str) -> None:
    """`train_{name}.py`, the training with `body` below it, and `npu_{name}.py` for the chip."""
    (folder / f"train_{name}.py").write_text(TRAIN + body)
    script = str(folder / f"train_{name}.py")
    (folder / f"npu_{name}.py").write_text(f"{NPU}runpy.run_path({script!r}, run_name='__main__')")


def start(folder: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    """Start `tensorprobe` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """What it printed, and its status."""
    stdout, stderr = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return end(start(folder, *words, **environ))


def on_npu(name: str, *options: str) -> list[str]:
    """The words that run `npu_{name}.py` through the door, on the simulated chip."""
    return ["run", "--sim-npu", "--as", "ptdbg_ascend", *options, f"npu_{name}.py", "npu"]


def on_cpu(name: str) -> list[str]:
    return ["run", "--as", "ptdbg_ascend", f"train_{name}.py", "cpu"]


def rows(folder: Path) -> list[dict[str, str]]:
    """The one table of a folder, as a spreadsheet shows it."""
    (path,) = folder.glob("compare_result_*.csv")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def call_of(tensor: str) -> str:
    """`Functional_gelu_0_forward` of `Functional_gelu_0_forward_output.0`."""
    return tensor.partition("ward_")[0] + "ward"
