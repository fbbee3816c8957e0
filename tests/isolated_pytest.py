"""Runs files of tests in a process of its own, for what changes a whole process.

The simulated NPU is one: once installed, PyTorch has another device until the process ends. Such
files are not named test_*, so that an ordinary run leaves them alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_isolated(paths: list[Path], marks: str = "not slow", timeout_s: float = 280) -> None:
    """Fail with the output of the inner run if any of its tests fails, or if it has none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTEST_ADDOPTS", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-m", marks, *map(str, paths)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{[path.name for path in paths]} failed:\n{done.stdout}\n{done.stderr}"
    )
