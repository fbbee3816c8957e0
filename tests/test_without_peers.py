"""The package without peers/: everything native works, and what is missing is named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
PROGRAM = """\
import torch
model = torch.nn.Linear(4, 4)
model(torch.arange(8.0).reshape(2, 4)).relu().sum().backward()
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that has no peers/, and a program to record beside it."""
    home = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("__pycache__", "peers")
    shutil.copytree(SRC / "tensorprobe", home / "src" / "tensorprobe", ignore=ignored)
    (home / "train.py").write_text(PROGRAM)
    return home


def run(home: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", *words], cwd=home, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(home / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_is_native_works(without: Path) -> None:
    for name in ("a", "b"):
        options = ("--seed", "1", "--level", "mix", "--keep", "tensors")
        assert run(without, "run", "-o", name, *options, "train.py")[0] == 0
    status, said = run(without, "compare", "a", "b", "-o", "report")
    assert (status, said.splitlines()[0][:5]) == (0, "match"), said
    status, said = run(without, "show", "a")
    assert status == 0
    assert "Functional.linear.0.forward" in said
    status, said = run(without, "check", "a", "-o", "checked")
    assert status == 0, said
    status, said = run(without, "convert", "a", "--to", "native", "-o", "copy")
    assert status == 0, said
    assert run(without, "compare", "a", "copy")[0] == 0


NEEDS = "needs tensorprobe.peers, which is not installed. Install all of it: pip install"


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("msprobe", "step0/rank0/dump.json"),
        ("msprobe", "dump.json"),
        ("ptdbg", "dump_v2.3/rank0/dump.pkl"),
        ("ptdbg", "forward_info_17.json"),
    ],
)
def test_a_dump_of_a_peer_is_named(without: Path, tmp_path: Path, layout: str, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"task": "statistics", "level": "L1"}')
    for place, sign in ((tmp_path, file), (path, path.name)):
        status, said = run(without, "show", str(place))
        assert status == 1
        begin = f"'{place}' looks like a dump of {layout} ({sign}): layout='{layout}' {NEEDS}"
        assert begin in said


def test_what_else_needs_a_peer_says_so(without: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"task": "statistics", "dump_path": "dump"}')
    assert run(without, "run", "-o", "c", "train.py")[0] == 0
    for words, what in (
        (("convert", "c", "--to", "msprobe", "-o", "d"), "layout='msprobe'"),
        (("compare", "c", "c", "--columns", "ptdbg", "-o", "e"), "--columns ptdbg"),
        (("check", "c", "-o", "f", "--peer-tables"), "tables='peers'"),
        (("run", "--config", str(config), "train.py"), "--config msprobe"),
    ):
        status, said = run(without, *words)
        assert status == 1, said
        assert f"{what} {NEEDS}" in said
