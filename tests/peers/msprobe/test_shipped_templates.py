"""The configurations that msprobe shipped over the years, taken from its own releases."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorprobe.errors import BadUsage
from tensorprobe.msprobe.pytorch import PrecisionDebugger

RELEASES = [
    "1.0.1", "1.0.3", "1.0.4", "1.1.0", "1.1.1", "1.2.0", "1.2.1", "1.2.2", "1.3.0",
    "8.1.0", "8.1.1", "8.1.2", "8.2.0", "8.2.1", "8.3.0", "8.3.1", "8.3.2", "8.3.3",
    "26.0.0", "26.1.0", "26.1.0.post1", "26.2.0",
]  # fmt: skip
# Tasks that are other work here; each answer says which.
ELSEWHERE = {
    "acc_check": "tensorprobe check",
    "run_ut": "tensorprobe check",
    "free_benchmark": "tensorprobe check",
    "grad_probe": "level 'L0'",
}
pytestmark = pytest.mark.slow


def template(release: str, folder: Path) -> dict[str, object]:
    """config.json as this release has it, beside its package."""
    wanted = f"mindstudio-probe=={release}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, wanted]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{wanted} cannot be had from the index")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = {"msprobe/config.json", "msprobe/config/config.json"} & {*archive.namelist()}
        found = json.loads(archive.read(name))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_template_and_each_of_its_tasks(
    tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = template(release, tmp_path / "wheel")
    sections = [name for name, value in shipped.items() if isinstance(value, dict)]
    assert "statistics" in sections
    for task in dict.fromkeys([shipped["task"], *sections]):
        Path("config.json").write_text(json.dumps({**shipped, "task": task}))
        if task in ELSEWHERE:
            with pytest.raises(BadUsage, match=ELSEWHERE[str(task)]):
                PrecisionDebugger(config_path="config.json", dump_path="refused")
            continue
        debugger = PrecisionDebugger(config_path="config.json", dump_path=f"dump_{task}")
        try:
            debugger.start()
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
            debugger.stop()
            debugger.step()
        finally:
            PrecisionDebugger.close()
        if task in ("statistics", "tensor"):
            (dump,) = Path(f"dump_{task}").rglob("dump.json")
            assert "Functional.linear.0.forward" in json.loads(dump.read_text())["data"]
