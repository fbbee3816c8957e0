"""What a monitor, an environment file and an uploader meet is not the program's trouble."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent.parent / "src"
PROGRAM = """
import os, shutil, signal, sys, torch
import tensorprobe as tp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(meanwhile=lambda: None):
    for number in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print("loss", loss.item(), flush=True)
        if number == 1:
            meanwhile()
def kill_children():
    for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split():
        os.kill(int(pid), signal.SIGKILL)
"""
WAYS = {
    "none": "train()",
    "no folder": "with tp.Monitor('/proc/nope'):\n    train()",
    "deleted": "with tp.Monitor('m'):\n    train(lambda: shutil.rmtree('m'))",
    "environment": "tp.env('/proc/nope/env.json', model=model)\ntrain()",
    "uploader": "with tp.Recorder(f'file://{os.getcwd()}/up/run'):\n    train(kill_children)",
    "no storage": "with tp.Recorder('file:///proc/nope/run'):\n    train()",
}
SAYS = {
    "no folder": "the monitor in /proc/nope cannot be written",
    "deleted": "deleted while it was written",
    "environment": "no environment in '/proc/nope/env.json'",
    "uploader": "the process that uploads ended with -9",
    "no storage": "Next: tensorprobe upload",
}


@pytest.mark.parametrize("ending", ["", "raise ValueError('mine')", "sys.exit(7)"])
@pytest.mark.parametrize("way", SAYS)
def test_a_program_ends_as_without(tmp_path: Path, way: str, ending: str) -> None:
    if ending and way not in ("deleted", "uploader"):
        pytest.skip("two of them are enough")
    plain, watched = (_run(tmp_path, f"{WAYS[name]}\n{ending}") for name in ("none", way))
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout), watched.stderr
    assert SAYS[way] in watched.stderr
    if "raise" in ending:
        assert watched.stderr.count("Traceback") == 1
        assert watched.stderr.rstrip().endswith("ValueError: mine")


def _run(folder: Path, ways: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM + ways)
    environ = {**os.environ, "PYTHONPATH": str(SRC), "TENSORPROBE_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, script], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
