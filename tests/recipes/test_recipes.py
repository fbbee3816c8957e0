"""Every recipe does what its page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.recipe_pages import PAGES, commands, printed_by, run, write_files

SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
FAST = {"upgrade", "half", "quantised", "rollout"}


def plain(text: str) -> list[str]:
    """Without what differs from machine to machine: sizes of errors, and where a package is."""
    text = re.sub(r"\d\S*e[+-]\d+|\d+\.\d+|[\d,]*\d{3}[\d,]*", "#", text)
    lines = [re.sub(r"\S*/(\w+\.py)", r"\1", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem in FAST else SLOW, id=page.stem) for page in PAGES],
)
def test_a_recipe(tmp_path: Path, page: Path) -> None:
    text = page.read_text()
    write_files(text, tmp_path)
    for command, shown in commands(text):
        done = run(command, tmp_path)
        assert plain(printed_by(done, tmp_path)) == plain(shown), (command, done.stderr)


def test_the_four_that_always_run_are_there() -> None:
    assert {page.stem for page in PAGES} >= FAST
