"""The pages of docs/recipes: their files, their commands, and what these print.

Renew what the pages show after a change that is meant:  python tests/recipes/recipe_pages.py
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
FILES = re.compile(r"^`([\w.]+)`:\n\n```python\n(.*?)```", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)


def write_files(page: str, folder: Path) -> None:
    """The files that a page gives its reader."""
    for name, text in FILES.findall(page):
        (folder / name).write_text(text)


def commands(page: str) -> list[tuple[str, str]]:
    """Each command with what the page says that it prints."""
    found = []
    for _, block, _ in CONSOLE.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, text = part.partition("\n")
            found.append((command, text.strip()))
    return found


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of a page, as its reader types it."""
    words = shlex.split(command)
    start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", words[0]]
    return subprocess.run(
        [*start, *words[1:]], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
             "TENSORPROBE_BUILD": "0"},
    )  # fmt: skip


def renewed(page: str) -> str:
    """The page with what its commands print now."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_files(page, folder)

        def again(found: re.Match[str]) -> str:
            lines = []
            for command, _ in commands(found[0]):
                printed = run(command, folder).stdout.strip()
                text = re.sub(r"\S*/site-packages/", "", printed)
                lines.append(f"$ {command}\n" + (f"{text}\n" if text else ""))
            return found[1] + "".join(lines) + found[3]

        return CONSOLE.sub(again, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text()))
