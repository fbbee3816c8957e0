"""The accuracy pre-check on the device: from a recording to a repro that fails only there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from npu_program import run

from recorded import SRC
from tensorprobe.cli.main import main

# The model of the field note: group norms, whose backward is what the chip gets wrong.
TRAIN = """\
import torch
import torch_npu
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8, eps=1e-6), nn.SiLU(), nn.Flatten(),
    nn.Linear(128, 2),
).npu()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
images, labels = torch.randn(4, 3, 4, 4).npu(), torch.tensor([0, 1, 0, 1]).npu()
loss = nn.functional.cross_entropy(model(images), labels)
loss.backward()
optimizer.step()
"""
FAULT = json.dumps([{"op": "native_group_norm_backward", "effect": "scale:1.002"}])
NAME = "Functional.group_norm.0.forward"


def repro(folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    """Run the repro as the person does who gets it, on the faulty chip or on the CPU."""
    chip = ["-m", "tensorprobe.devices.sim_npu"] if device == "npu" else []
    return subprocess.run(
        [sys.executable, *chip, "repro.py", "--device", device],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(SRC),
            "OMP_NUM_THREADS": "1",
            "TENSORPROBE_SIM_NPU_FAULTS": FAULT,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_from_a_recording_to_a_repro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORPROBE_SIM_NPU_FAULTS", FAULT)
    Path("train.py").write_text(TRAIN)
    done = run(tmp_path, *shlex.split("run --sim-npu --keep tensors --level L1 -o npu train.py"))
    assert done.returncode == 0, done.stderr

    # Which op is inaccurate? One, in backward, and the check prints how to show it alone.
    assert main(shlex.split("check npu --device npu --sim-npu -o checked")) == 3
    printed = capsys.readouterr().out
    result = json.loads(Path("checked/check.json").read_text())
    (row,) = (row for row in result["calls"] if row["verdict"] == "fail")
    assert (row["name"], row["forward"], row["backward"]) == (NAME, "pass", "fail")
    assert result["counts"]["crashed"] == 0
    assert row["repro"] in printed

    words = shlex.split(row["repro"])
    assert main(words[1:]) == 0
    folder = tmp_path / words[-1]
    there, here = repro(folder, "npu"), repro(folder, "cpu")
    assert (there.returncode, there.stdout.splitlines()[-1]) == (3, "FAIL"), there.stderr
    ending = "PASS on cpu; what was recorded is wrong"
    assert (here.returncode, here.stdout.splitlines()[-1]) == (0, ending), here.stderr
    assert "FAIL  npu       gradient of" in there.stdout
    assert "FAIL  recorded  gradient of" in here.stdout  # what was recorded is wrong, the CPU not


@pytest.mark.slow
def test_a_healthy_chip_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check without the fault finds nothing."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    done = run(tmp_path, *shlex.split("run --sim-npu --keep tensors --level L1 -o npu train.py"))
    assert done.returncode == 0, done.stderr
    assert main(shlex.split("check npu --device npu --sim-npu -o checked")) == 0
