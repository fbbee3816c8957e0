"""Every command in these pages runs, on the files the page gives, and prints what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recorded import ROOT, SRC

PAGE = (ROOT / "docs" / "compare.md").read_text()
PAGES = {"compare": PAGE, "converting": (ROOT / "docs" / "converting.md").read_text()}
FILES = re.compile(r"^`([\w.]+)`:\n\n```(?:python|yaml)\n(.*?)```", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands(page: str) -> list[tuple[str, str]]:
    """Each command with what it prints."""
    found = []
    for block in CONSOLE.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, text = part.partition("\n")
            found.append((command, text.strip()))
    return found


def plain(text: str) -> list[str]:
    """Without what differs from machine to machine: sizes of errors, and where the script is."""
    text = re.sub(r"\d\S*e[+-]\d+|\d+\.\d+ (?=roundings|%)|[\d,]*\d{3}[\d,]*", "#", text)
    lines = [re.sub(r"\S*/(\w+\.py)", r"\1", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines]


def test_the_page_names_every_option() -> None:
    code = "import tensorprobe.cli.main as m; m.main(['compare', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    options = set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help", "--output"}
    assert len(options) > 8
    assert {option for option in options if option not in PAGE} == set()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_print_what_the_page_shows(tmp_path: Path, page: str) -> None:
    for name, text in FILES.findall(PAGES[page]):
        (tmp_path / name).write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    assert len(commands(PAGES[page])) >= 5
    for command, shown in commands(PAGES[page]):
        words = shlex.split(command)
        assert words[0] == "tensorprobe"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environ,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert plain(done.stdout.strip()) == plain(shown), (command, done.stderr)
        assert done.returncode == (3 if shown.startswith("diverged") else 0)
