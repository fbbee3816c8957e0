"""Every console block of docs/guard.md, run on the script of its page, prints what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from recorded import SRC

PAGE = Path(__file__).parents[2] / "docs" / "guard.md"


def run(folder: Path, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_the_overflow_of_the_page(tmp_path: Path) -> None:
    page = PAGE.read_text()
    [script] = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    blocks = re.findall(
        r"```console\n\$ (tensorprobe run --guard overflow [^\n]*)\n(.*?)```", page, re.DOTALL
    )
    assert blocks
    for command, expected in blocks:
        assert run(tmp_path, command) == expected
    run(tmp_path, "tensorprobe run --guard overflow --keep-last 3 -o runs/history train.py")
    assert {path.name for path in (tmp_path / "runs/history/rank0").glob("step*")} == {
        "step0", "step1", "step2",
    }  # fmt: skip
