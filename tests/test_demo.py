"""The demo ends in the right culprit, and tells the story that the README tells."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import tensorprobe as tp

SRC = str(Path(__file__).parents[1] / "src")
README = Path(__file__).parents[1] / "README.md"


def without_numbers(text: str) -> str:
    """Measured sizes, losses and errors as N; a stack's path without its folders."""
    text = re.sub(r"(?<=, )/\S*/(?=\w+\.py:)", "", text)
    text = re.sub(r"\d+(,\d{3})+|\d+\.\d+", "N", text)
    return re.sub(r"inherited \S+", "inherited N", text)


def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tensorprobe", "demo"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    told = README.read_text()
    story = told[told.index("1. Train a small") : told.index("```", told.index("5. To be sure"))]
    expected = without_numbers(story).splitlines()
    assert without_numbers(done.stdout).splitlines()[: len(expected)] == expected
    verdict = json.loads((tmp_path / "demo" / "report" / "verdict.json").read_text())
    assert [culprit["name"] for culprit in verdict["culprits"]] == [
        "Functional.layer_norm.2.forward"
    ]
    assert (tmp_path / "demo" / "repro" / "repro.py").exists()
    cured = json.loads((tmp_path / "demo" / "report-cured" / "verdict.json").read_text())
    assert cured["verdict"] == "match"
    capture = tp.load(tmp_path / "demo" / "cpu")
    weights = capture.call("Optimizer.AdamW.step.0", step=0).tensors
    assert all(t.blob is not None for t in weights if t.shape)
