"""`tensorprobe run --guard overflow`: exit status, what is written, what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tensorprobe as tp
from recorded import SRC

TRAIN = """\
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bad = int(sys.argv[1])
for step in range(5):
    x = torch.ones(2, 4) * (1e38 if step == bad else 1)
    loss = (model(x) * (1e4 if step == bad else 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""


def run(folder: Path, options: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", *options, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def findings(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "findings.json").read_text())["findings"]
    return found


def test_the_program_is_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, ["--guard", "overflow"], "3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    [finding] = findings(tmp_path / "guard")
    assert finding["name"] == "Tensor.mul.1.forward"
    assert finding["step"] == 3
    assert "tensorprobe run: stopped by the guard, values overflowed once" in done.stderr
    assert not (tmp_path / "runs").exists()
    call = tp.load(tmp_path / "guard" / "capture").calls[0]
    assert call.name == "Tensor.mul.1.forward"


def test_it_goes_on_and_ends_with_3(tmp_path: Path) -> None:
    options = ["--guard", "overflow", "--overflow-nums", "-1", "--guard-output", "found"]
    done = run(tmp_path, options, "4")
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert len(findings(tmp_path / "found")) == 1


@pytest.mark.parametrize(("arguments", "status"), [(("9",), 0), (("9", "7"), 7), (("4", "7"), 7)])
def test_the_status_of_the_script_counts(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    done = run(tmp_path, ["--guard", "overflow", "--overflow-nums", "-1"], *arguments)
    assert (done.returncode, done.stdout) == (status, "trained\n")
    assert bool(findings(tmp_path / "guard")) == (arguments[0] == "4")


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    done = run(tmp_path, ["--guard", "overflow", "--keep-last", "2", "-o", "kept"], "3")
    assert done.returncode == 3, done.stderr
    assert tp.load(tmp_path / "kept").steps == (2, 3)
    done = run(tmp_path, ["--guard", "overflow", "--keep-last", "2", "-o", "well"], "9")
    assert done.returncode == 0, done.stderr
    assert tp.load(tmp_path / "well").steps == (3, 4)
    assert "in 5 steps, the last 2 kept" in done.stderr


def test_the_command_it_prints_records_the_call(tmp_path: Path) -> None:
    done = run(tmp_path, ["--guard", "overflow", "--look-every", "1000"], "3")
    assert done.returncode == 3, done.stderr
    command = str(findings(tmp_path / "guard")[0]["next"]).split()
    assert command[:2] == ["tensorprobe", "run"]
    again = run(tmp_path, command[2 : command.index("train.py")], "3")
    assert again.returncode == 0, again.stderr
    [call] = tp.load(tmp_path / "guard" / "again").calls
    assert call.name == "Tensor.mul.1.forward"
    assert call.tensor("output.0").summary.inf_count == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--guard", "all"], "unknown guard 'all': expected overflow or errors, or both"),
        (["--guard", "overflow", "--overflow-nums", "0"], "expected a number from 1, or -1"),
        (["--guard", "overflow", "--keep-last", "0"], "--keep-last 0: expected a number from 1"),
    ],
)
def test_wrong_options(tmp_path: Path, options: list[str], message: str) -> None:
    done = run(tmp_path, options, "3")
    assert done.returncode == 2
    assert message in done.stderr


def test_ranks_count_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "x = torch.full((2,), 1e30) * (1e30 if os.environ['RANK'] == '1' else 1)\n"
        "print('done')\n"
    )
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "PYTHONPATH": str(SRC)}
    for rank, status in (("0", 0), ("1", 3)):
        done = subprocess.run(
            [sys.executable, "-m", "tensorprobe", "run", "--guard", "overflow", "train.py"],
            cwd=tmp_path,
            env={**os.environ, **environ, "RANK": rank, "LOCAL_RANK": rank},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
    assert findings(tmp_path / "guard" / "rank0") == []
    [finding] = findings(tmp_path / "guard" / "rank1")
    assert finding["rank"] == 1
