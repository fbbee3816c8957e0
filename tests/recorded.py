"""Record a function in this process, or run a script in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorprobe as tp
from tensorprobe.records import Capture

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"


def record(folder: Path, program: Callable[[], Any], **options: Any) -> Capture:
    """What a recorder around `program()` leaves behind, tensors kept unless told otherwise."""
    with tp.Recorder(folder, **{"keep": "tensors", **options}):
        program()
    return tp.load(folder)


def start_script(folder: Path, text: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start `text` as a script in `folder`, with this source tree on PYTHONPATH."""
    script = folder / f"script{len(list(folder.glob('script*.py')))}.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, script.name, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(
    folder: Path, text: str, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    process = start_script(folder, text, *arguments, **environ)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def stems(capture: Capture) -> list[str]:
    """The forward calls in order, without number and direction: "Functional.linear"."""
    return [
        call.name.removesuffix(".forward").rpartition(".")[0]
        for call in capture.calls(direction="forward")
        if not call.name.startswith(("Module.", "Optimizer."))
    ]
