"""No false alarm: every call of a training step of real models, in three precisions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recorded import ROOT, SRC


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "t5", "vit", "convnext"])
def test_a_healthy_device_fails_no_call_of_a_model(model: str) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "benchmarks/check_models.py", "--models", model],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    results = {row[1].strip(): [int(cell) for cell in row[2:7]] for row in rows[2:]}
    assert set(results) == {"fp32", "bf16", "fp16"}
    for calls, passed, failed, crashed, skipped in results.values():
        assert (failed, crashed) == (0, 0), done.stdout
        assert passed + skipped == calls
        assert passed > 300
