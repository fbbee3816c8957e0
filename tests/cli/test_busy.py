"""What is said on a terminal while a command works, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from ranks.gloo_ranks import SRC

PROGRAM = """
import time
from tensorprobe import terminal
terminal._PATIENCE_S = 0.1
with terminal.busy("reading [runs/a]"):
    time.sleep(WORK)
print("done")
"""


@pytest.mark.parametrize(("work", "is_told"), [(1.5, True), (0.0, False)])
def test_it_is_told_after_a_while(work: float, is_told: bool) -> None:
    ours, theirs = pty.openpty()
    code = PROGRAM.replace("WORK", str(work))
    environment = {**os.environ, "PYTHONPATH": SRC, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, text=True,
        check=True, env=environment,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while block := os.read(ours, 4096):
            said += block
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert (b"reading [runs/a]" in said) == is_told
    assert done.stdout == "done\n"


def test_elsewhere_nothing_is_told() -> None:
    code = PROGRAM.replace("WORK", "0.5")
    environment = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
