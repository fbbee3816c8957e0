"""The story of a field note, told by commands: a group_norm whose backward raises on the NPU.

The engineer in it needed anomaly mode, launch blocking, tensors saved by hand, a script for the one
operator, and a model edited to run that operator on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from recorded import SRC

TRAIN = """
import sys
import torch
import torch_npu
from torch import nn
from tensorprobe.devices import sim_npu

sim_npu.plant("native_group_norm_backward", effect="raise")


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels, eps=1e-6)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(nn.functional.silu(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def save(module, args):
    torch.save((args[0].detach().cpu(), module.weight.detach().cpu()), "seen.pt")


torch.manual_seed(0)
model = Net().npu()
model.blocks[2].norm.register_forward_pre_hook(save)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4, 6, 6).npu()).square().mean()
    loss.backward()
    optimizer.step()
print("trained", float(loss))
"""
NAME = "Functional.group_norm.2"
GUARDED = ("tensorprobe", "run", "--sim-npu", "--guard", "errors")
ERROR = "RuntimeError: NPU error, error code is 507015 (planted): aicore exception in "


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a module of ours in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("note")
    (folder / "train.py").write_text(TRAIN)
    return folder


def test_found_saved_reproduced_and_confirmed(folder: Path) -> None:
    # Found, by one command, with the inputs saved and the call tried alone.
    found = run(folder, *GUARDED, "train.py", ASCEND_PROCESS_LOG_PATH=str(folder / "log"))
    assert found.returncode == 1
    assert found.stdout == ""
    assert f"tensorprobe: {NAME}.backward failed (step 0, rank 0): {ERROR}" in found.stderr
    line = TRAIN.splitlines().index(
        "        return x + self.conv(nn.functional.silu(self.norm(x)))"
    )
    assert f"called at train.py:{line + 1} in Block.forward" in found.stderr
    assert f"tensorprobe ascend incident --log {folder / 'log'}" in found.stderr
    assert f"{NAME}.backward: the call alone, on npu:0, raises the same error" in found.stderr
    (finding,) = json.loads((folder / "guard" / "findings.json").read_text())["findings"]
    assert (finding["name"], finding["kind"], finding["module"]) == (
        f"{NAME}.backward",
        "error",
        "blocks.2.norm",
    )
    assert finding["metrics"]["call"] == (
        "torch.nn.functional.group_norm(float32[2, 4, 6, 6] on npu:0, 2, "
        "weight=float32[4] on npu:0, bias=float32[4] on npu:0, eps=1e-06)"
    )
    # Saved, exactly, as tensors of the host.
    x, weight = torch.load(folder / "seen.pt", weights_only=True)
    call = tp.load(folder / finding["inputs"]).call(f"{NAME}.forward")
    assert call.tensor("input.0").load().equal(x)
    assert call.tensor("input.weight").load().equal(weight)
    assert call.tensor("input.0").device == "npu:0"
    shown = run(folder, "tensorprobe", "show", "guard/inputs", f"{NAME}.backward")
    assert "status   raised: RuntimeError: NPU error" in shown.stdout

    # Confirmed: with that one operator on the CPU the program runs.
    assert finding["next"] == (
        "tensorprobe run --no-record --reroute torch.nn.functional.group_norm=cpu --sim-npu "
        "train.py"
    )
    cured = run(folder, *finding["next"].split())
    assert cured.returncode == 0, cured.stderr
    assert cured.stdout.startswith("trained ")


@pytest.mark.slow
def test_another_operator_on_the_cpu_cures_nothing(folder: Path) -> None:
    rerouted = ("tensorprobe", "run", "--sim-npu", "--no-record", "--reroute")
    other = run(folder, *rerouted, "torch.silu=cpu", "train.py")
    assert other.returncode == 1
    assert ERROR in other.stderr


@pytest.mark.slow
def test_the_repro_by_hand(folder: Path) -> None:
    """On the broken device it fails, on a healthy one it does not."""
    run(folder, *GUARDED, "--guard-timeout", "0", "--guard-output", "by-hand", "train.py")
    made = run(folder, "tensorprobe", "repro", "by-hand/inputs", NAME, "-o", "bug")
    assert made.returncode == 0, made.stderr
    repro = ("tensorprobe.devices.sim_npu", "bug/repro.py", "--device", "npu")
    fault = '[{"op": "native_group_norm_backward", "effect": "raise"}]'
    alone = run(folder, *repro, TENSORPROBE_SIM_NPU_FAULTS=fault)
    assert alone.returncode == 3
    assert f"FAIL  raised {ERROR}" in alone.stdout
    healthy = run(folder, *repro)
    assert (healthy.returncode, healthy.stdout.splitlines()[-1]) == (0, "PASS")


@pytest.mark.slow
def test_where_memory_is_short_a_second_run_has_the_inputs(folder: Path) -> None:
    options = ["--guard-timeout", "0", "--inputs-budget", "1", "--guard-output", "first"]
    first = run(folder, *GUARDED, *options, "train.py")
    assert first.returncode == 1
    (finding,) = json.loads((folder / "first" / "findings.json").read_text())["findings"]
    assert finding["repro"] is None
    command = finding["next"].split()
    assert command[:2] == ["tensorprobe", "run"]
    second = run(folder, *command)
    assert second.returncode == 1
    assert "the call alone, on npu:0, raises the same error" in second.stderr
    x, _ = torch.load(folder / "seen.pt", weights_only=True)
    guard = tp.load(folder / "guard" / "inputs")
    assert guard.call(f"{NAME}.forward").tensor("input.0").load().equal(x)
