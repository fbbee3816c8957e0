"""Every command in docs/reroute.md and docs/bisect.md prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recorded import SRC

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the page's console blocks, with the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ tensorprobe "), []))
            else:
                found[-1][1].append(line)
    return found


def write_script(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "reroute.md").read_text(), re.DOTALL)
    (folder / "train.py").write_text(next(block for block in blocks if "sim_npu" in block))


def printed_by(command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    return done.stdout


def as_pattern(lines: list[str]) -> str:
    """The lines as a pattern: "..." stands for any text, and seconds are as they come."""
    text = re.escape("\n".join(lines))
    text = re.sub(r"\\\(\d+\\\.\d\\ s\\\)", r"\\(\\d+\\.\\d\\ s\\)", text)
    return text.replace(r"\.\.\.", "(?s:.*)")


@pytest.mark.parametrize("page", ["reroute.md", pytest.param("bisect.md", marks=pytest.mark.slow)])
def test_the_page(page: str, tmp_path: Path) -> None:
    write_script(tmp_path)
    shown = commands(page)
    assert shown
    for command, lines in shown:
        printed = printed_by(command, tmp_path).strip()
        assert re.fullmatch(as_pattern(lines), printed), f"{command}\n{printed}"
