"""`tensorprobe run --guard errors`: the script's traceback, output and exit status stay its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from recorded import SRC

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset


class Killed(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def multiply(x):
    return x @ torch.ones(5, 5)


def main(how):
    x = torch.ones(2, 3, requires_grad=True)
    print("begins", os.environ.get("CUDA_LAUNCH_BLOCKING"))
    if how == "worker":
        next(iter(DataLoader(Killed(), num_workers=1)))
    if how == "value":
        raise ValueError("mine")
    if how == "backward":
        torch.linalg.qr(x.sin(), mode="r")[1].sum().backward()
    try:
        multiply(x)
    except RuntimeError:
        if how == "raised":
            raise
    print("goes on")
    if how == "exit":
        sys.exit(7)


main(sys.argv[1])
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    environ.pop("CUDA_LAUNCH_BLOCKING", None)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def guarded(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    options = ["--guard", "errors", "--guard-output", how, "--guard-timeout", "0"]
    return run(folder, "-m", "tensorprobe", "run", *options, "script.py", how)


def findings(folder: Path, how: str) -> list[str]:
    written = json.loads((folder / how / "findings.json").read_text())
    return [finding["name"] for finding in written["findings"]]


def trace(text: str) -> str:
    """From the head of a traceback to the exception, without the marks and torch's own mode."""
    lines = [line for line in text.splitlines() if not re.fullmatch(r"[ ~^]+", line)]
    begin = lines.index("Traceback (most recent call last):")
    end = next(n for n, line in enumerate(lines[begin:], begin) if re.match(r"\w+Error: ", line))
    return "\n".join(lines[begin : end + 1])


def test_an_error_nobody_catches(tmp_path: Path) -> None:
    bare = run(tmp_path, "script.py", "raised")
    done = guarded(tmp_path, "raised")
    assert (done.returncode, bare.returncode) == (1, 1)
    assert (bare.stdout, done.stdout) == ("begins None\n", "begins 1\n")
    assert trace(done.stderr) == trace(bare.stderr)
    assert findings(tmp_path, "raised") == ["Tensor.matmul.0.forward"]


def test_an_error_in_backward(tmp_path: Path) -> None:
    done = guarded(tmp_path, "backward")
    assert done.returncode == 1
    assert 'torch.linalg.qr(x.sin(), mode="r")[1].sum().backward()' in trace(done.stderr)
    assert "tensorprobe" not in trace(done.stderr)
    assert findings(tmp_path, "backward") == ["Torch.linalg.qr.0.backward"]


def test_the_status_of_a_script_that_goes_on(tmp_path: Path) -> None:
    done = guarded(tmp_path, "exit")
    assert (done.returncode, done.stdout) == (7, "begins 1\ngoes on\n")
    assert findings(tmp_path, "exit") == ["Tensor.matmul.0.forward"]
    done = guarded(tmp_path, "caught")
    assert (done.returncode, done.stdout) == (3, "begins 1\ngoes on\n")


def test_errors_that_are_not_torchs(tmp_path: Path) -> None:
    done = guarded(tmp_path, "value")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("tensorprobe")]
    assert said == ["tensorprobe: guard: nothing found. All of it: value/findings.json"]
    done = guarded(tmp_path, "worker")
    assert done.returncode == 1
    assert findings(tmp_path, "worker") == []
    assert re.search(
        r"tensorprobe: DataLoader worker process \d+ ended without an exception .*: not in a torch "
        r"call of this process",
        done.stderr,
    )
