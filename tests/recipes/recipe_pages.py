"""The pages of docs/recipes: their files, their commands, and what these print.

Renew what the pages show after a change that is meant:
python tests/recipes/recipe_pages.py [PAGE ...]
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
PAGES = [ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
FILES = re.compile(
    r"^`([\w.]+)`(?::|\uff1a)\n\n```(?:python|yaml)\n(.*?)```", re.MULTILINE | re.DOTALL
)
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
    """A command of a page, as its reader types it; `2>&1` has what it says beside its result."""
    words = shlex.split(command)
    beside = subprocess.STDOUT if words[-1] == "2>&1" else subprocess.PIPE
    words = [word for word in words if word != "2>&1"]
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    start = starts.get(words[0], ["-m", words[0]])
    return subprocess.run(
        [sys.executable, *start, *words[1:]],
        cwd=folder, stdout=subprocess.PIPE, stderr=beside, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
             "TENSORPROBE_BUILD": "0"},
    )  # fmt: skip


def printed_by(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """What a page shows of a command: paths as its reader has them, and a status other than 0."""
    text = re.sub(r"[^\s\"']*/site-packages/", "", done.stdout.strip())
    text = text.replace(f"{folder}/", "").replace(str(Path.home()), "~")
    is_found = done.returncode == 3 and text.startswith(("diverged", "fault"))
    if done.returncode and not is_found:
        text += f"\n[exit status {done.returncode}]"
    return text.strip()


def renewed(page: str) -> str:
    """The page with what its commands print now."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        write_files(page, folder)

        def again(found: re.Match[str]) -> str:
            lines = []
            for command, _ in commands(found[0]):
                text = printed_by(run(command, folder), folder)
                lines.append(f"$ {command}\n" + (f"{text}\n" if text else ""))
            return found[1] + "".join(lines) + found[3]

        return CONSOLE.sub(again, page)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or PAGES:
        path.write_text(renewed(path.read_text()))
