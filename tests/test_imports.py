"""Rooms look down only, and what must not import torch does not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "tensorprobe"
# A room may import those on earlier lines; rooms on one line do not know each other.
FLOORS = [
    {"errors", "garbage", "native", "_version", "terminal"},
    {"tensors", "keywords"},
    {"records", "operators"},
    {"config"},
    {"store"},
    {"devices"},
    {"capture", "replay", "ascend"},
    {"guarding"},
    {"overflow", "failures", "rerouting", "checking", "comparing"},
    {"report"},
    {"ptdbg_ascend", "msprobe", "cli", "demo"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            base = node.module or ""
            names |= {f"{base}.{a.name}" for a in node.names} if base == "tensorprobe" else {base}
    return {name.split(".")[1] for name in names if name.startswith("tensorprobe.")}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_look_down_only(path: Path) -> None:
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for other in imports_of(path) - {room}:
        assert other in FLOOR, f"{path}: '{other}' has no floor in this test"
        assert FLOOR[other] < FLOOR[room], f"{path}: {room} must not import {other}"


def test_torch_is_not_imported_by_reading_or_help() -> None:
    code = (
        "import sys, tensorprobe, tensorprobe.records, tensorprobe.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_numpy_is_not_imported_by_what_others_measure_for() -> None:
    code = (
        "import sys, tensorprobe.report.console, tensorprobe.report.native_columns\n"
        "import tensorprobe.report.saving, tensorprobe.store.native\n"
        "sys.exit('numpy was imported' if {'numpy', 'torch'} & {*sys.modules} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
