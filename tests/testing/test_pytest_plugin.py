"""The plugin of pytest as a project uses it, and `ok`, `bool` and `assert_match`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorprobe as tp
from recorded import SRC

MODULE = "tensorprobe.testing.pytest_plugin"
TEST = """\
import torch

FACTOR = {factor}


def run():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    hidden = model[1](model[0](torch.ones(2, 4))) * FACTOR
    model[2](hidden).sum().backward()


def test_model(tensorprobe_match):
    tensorprobe_match(run, "golden/model")
"""


def run_pytest(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = any(each.value == MODULE for each in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", MODULE]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CI", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *options],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**environment, "PYTHONPATH": str(SRC), "COLUMNS": "200", **environ},
    )  # fmt: skip


def test_a_golden_run(tmp_path: Path) -> None:
    """Missing, made, matched, diverged: as a project goes through it."""
    (tmp_path / "checks").mkdir()
    test = tmp_path / "checks" / "test_model.py"
    test.write_text(TEST.format(factor=1))
    golden = tmp_path / "checks" / "golden" / "model"

    missing = run_pytest(tmp_path)
    assert missing.returncode == 1
    assert (
        f"nothing is stored at '{golden}'. To store what this test records: "
        "pytest checks/test_model.py::test_model --tensorprobe-update" in missing.stdout
    )

    refused = run_pytest(tmp_path, "--tensorprobe-update", CI="true")
    assert refused.returncode == 4
    assert "--tensorprobe-update where CI is set" in refused.stderr
    assert not golden.exists()

    made = run_pytest(tmp_path, "checks/test_model.py::test_model", "--tensorprobe-update")
    assert made.returncode == 0, made.stdout
    assert f"stored {golden}: look at it before you commit it" in made.stdout
    assert tp.load(golden).call("Functional.linear.1.forward")

    matched = run_pytest(tmp_path, CI="true")
    assert matched.returncode == 0, matched.stdout

    test.write_text(TEST.format(factor=1.01))
    diverged = run_pytest(tmp_path)
    assert diverged.returncode == 1
    assert "AssertionError: diverged at Tensor.mul.0.forward" in diverged.stdout
    assert "it was called with other arguments" in diverged.stdout
    assert "matching.py" not in diverged.stdout.partition("short test summary")[0]

    renewed = run_pytest(tmp_path, "--tensorprobe-update")
    assert renewed.returncode == 0
    assert run_pytest(tmp_path).returncode == 0
    assert sorted(path.name for path in golden.parent.iterdir()) == ["model"]


def test_what_is_no_capture_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(TEST.format(factor=1))
    precious = tmp_path / "golden" / "model" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    done = run_pytest(tmp_path, "--tensorprobe-update")
    assert done.returncode == 1
    assert "is there and is no capture: it is not replaced" in done.stdout
    assert precious.read_text() == "years of work"


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    code = (
        f"import sys, {MODULE}\n"
        "print(sorted({'torch', 'numpy', 'msgspec', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr
    project = (SRC.parent / "pyproject.toml").read_text()
    declared = project.partition("[project.entry-points.pytest11]")[2].splitlines()[1]
    assert declared == f'tensorprobe = "{MODULE}"'


def record(path: Path, scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with tp.Recorder(path, keep="tensors", log=lambda text: None):
        torch.mul(layer(torch.ones(2, 4)), scale)


def test_assert_match(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        record(tmp_path / name, scale)
    comparison = tp.assert_match(tmp_path / "a", tmp_path / "b", jobs=1)
    assert comparison.ok
    assert comparison.verdict.ok
    with pytest.raises(AssertionError, match=r"^diverged at Torch.mul.0.forward"):
        tp.assert_match(tmp_path / "c", tmp_path / "b", jobs=1)
    other = tmp_path / "other"
    with tp.Recorder(other, log=lambda text: None):
        for _ in range(9):
            torch.exp(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"^incomparable: "):
        tp.assert_match(other, tmp_path / "b", jobs=1)


def test_a_verdict_has_no_truth(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("c", 1.5)):
        record(tmp_path / name, scale)
    comparison = tp.compare(tmp_path / "c", tmp_path / "a", jobs=1)
    assert not comparison.ok
    with pytest.raises(tp.BadUsage, match=r"this one is diverged: ask \.ok"):
        bool(comparison.verdict)
    with pytest.raises(tp.BadUsage, match=r"neither true nor false, this one is diverged: ask"):
        assert comparison
