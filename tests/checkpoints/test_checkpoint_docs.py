"""The example of docs/checkpoints.md, run as it is written."""

import re
import shlex
from pathlib import Path

import pytest

from tensorprobe.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    console = re.search(r"```console\n\$ tensorprobe (.*?)\n(.*?)```", text, re.DOTALL)
    assert program
    assert console
    exec(compile(program[1], str(PAGE), "exec"), {})
    assert main(shlex.split(console[1])) == 3
    assert capsys.readouterr().out == console[2]
