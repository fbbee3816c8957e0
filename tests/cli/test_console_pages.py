"""The consoles of docs/run.md, show.md and convert.md, run in turn, print what the pages show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recorded import ROOT, SRC
from tensorprobe.cli.main import main

PAGES = ("run.md", "show.md", "convert.md")


def consoles(page: str) -> list[tuple[list[str], str]]:
    """Each command of a page, without the program's name, and the text below it."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for part in block.split("$ tensorprobe ")[1:]:
            command, _, text = part.partition("\n")
            found.append((shlex.split(command), text))
    return found


def as_pattern(text: str) -> str:
    """Numbers and the width of columns differ between versions of torch; "..." is any folder."""
    lines = (re.escape(" ".join(line.split())) for line in text.strip().splitlines())
    pattern = re.sub(r"\d+", r"\\d+", "\n".join(lines))
    return pattern.replace(r"\.\.\.", r"\S*")


def recorded(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, *others = ((ROOT / "docs" / page).read_text() for page in PAGES)
    [script] = re.findall(r"```python\n(.*?)```", run, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    [(command, shown)] = consoles(run)
    printed = {shown: recorded(command, tmp_path)}
    for page in others:
        assert consoles(page)
        for command, shown in consoles(page):
            main(command)
            printed[shown] = "".join(capsys.readouterr())
    for shown, text in printed.items():
        lines = "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
        assert re.fullmatch(as_pattern(shown), lines), text
