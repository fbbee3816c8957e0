"""Scripts as people have them run unedited under `run --as`, and leave the files that they should.

`usages.py` has one for each kind of script that public repositories and guides have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msprobe_making import ROOT
from usages import USAGES

import tensorprobe as tp


def run(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    usage = USAGES[name]
    content = {"task": "statistics", "dump_path": "./dump", "rank": [], "step": [], "level": "L1"}
    (folder / "config.json").write_text(json.dumps({**content, **usage.config}))
    (folder / "train.py").write_text(usage.script)
    return subprocess.run(
        [sys.executable, "-m", "tensorprobe", "run", "--as", "ptdbg_ascend,msprobe", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if use.quick else pytest.mark.slow)
        for name, use in USAGES.items()
    ],
)
def test_every_kind_of_script(tmp_path: Path, name: str) -> None:
    usage = USAGES[name]
    done = run(tmp_path, name)
    printed = done.stdout + done.stderr
    assert done.returncode == usage.status, printed
    for text in usage.says:
        assert text in printed
    if usage.status == 0:
        assert "Traceback" not in printed
    found = sorted(str(p.parents[1].relative_to(tmp_path)) for p in tmp_path.rglob("dump.json"))
    assert found == sorted(usage.dumps)
    if found:
        assert not tp.load(tmp_path / found[0]).gaps
    if name.startswith("13"):
        (index,) = tmp_path.rglob("*.pkl")
        assert '["Optimizer_Adam.step_0_forward_parameters.0.weight"' in index.read_text()
    if name.startswith("20"):
        (path,) = tmp_path.rglob("debug.json")
        saved = json.loads(path.read_text())["data"]
        assert list(saved) == ["nest.0.debug", "nest_grad.0.debug"]
        assert saved["nest_grad.0.debug"]["a"][0]["Max"] == 1
        assert saved["nest_grad.0.debug"]["n"] is None


def test_one_of_each_family_is_quick() -> None:
    assert 5 <= sum(usage.quick for usage in USAGES.values()) <= 8
