"""Every command in docs/ascend.md, run on the guide's incident, prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from ascend_files import write_incident

from tensorprobe.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"


def blocks() -> list[tuple[str, str]]:
    found = re.findall(
        r"```console\n\$ tensorprobe ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    return [(command, text) for command, text in found]


def sample(folder: Path) -> None:
    x = np.sin(np.arange(62 * 62, dtype=np.float64)).astype(np.float32).reshape(62, 62)
    x[3, 4] = np.nan
    write_incident(folder, x, output=np.nan)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    sample(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = blocks()
    assert len(commands) >= 6
    for command, expected in commands:
        main(shlex.split(command))
        printed = capsys.readouterr()
        lines = [line.rstrip() for line in (printed.err + printed.out).strip().splitlines()]
        wanted = expected.strip().splitlines()
        if "..." in wanted:  # the page leaves the middle out
            cut = wanted.index("...")
            tail = wanted[cut + 1 :]
            assert lines[:cut] == wanted[:cut], command
            assert lines[len(lines) - len(tail) :] == tail, command
        else:
            assert lines == wanted, command
