"""Rooms look down only, and what must not import torch does not."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "tensorprobe"
# A room may import those on earlier lines; rooms on one line do not know each other.
FLOORS = [
    {"_version", "errors", "garbage", "native", "nests", "terminal", "trouble"},
    {"torch_versions"},
    {"ascend"},
    {"tensors", "keywords"},
    {"parts"},
    {"notebooks", "pages"},
    {"records", "operators"},
    {"config", "parallel_layout"},
    {"store"},
    {"devices", "collectives"},
    {"follow", "replay"},
    {"compiling"},
    {"record"},
    {"guarding"},
    {"overflow", "failures", "rerouting", "checking", "comparing", "environment"},
    {"monitoring"},
    {"training"},
    {"report", "checkpoints"},
    {"peers", "devices.sim_npu", "testing"},
    {"ptdbg_ascend", "msprobe", "cli", "demo"},
    {"cell_magic"},
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
            inside = base in ("tensorprobe", "tensorprobe.devices")
            names |= {f"{base}.{a.name}" for a in node.names} if inside else {base}
    return {room_of(name.split(".")[1:]) for name in names if name.startswith("tensorprobe.")}


def room_of(parts: Sequence[str]) -> str:
    """The simulated NPU is a room of its own, in the folder of the device table."""
    return "devices.sim_npu" if tuple(parts[:2]) == ("devices", "sim_npu") else parts[0]


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_look_down_only(path: Path) -> None:
    room = room_of(path.relative_to(SRC).with_suffix("").parts)
    if room in ("__init__", "__main__"):
        return
    for other in imports_of(path) - {room}:
        assert other in FLOOR, f"{path}: '{other}' has no floor in this test"
        assert FLOOR[other] < FLOOR[room], f"{path}: {room} must not import {other}"


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("peers", {"msprobe", "ptdbg_ascend"}),  # else found by name; see test_without_peers
        ("ascend", {"cli"}),
        ("devices.sim_npu", {"cli", "demo"}),  # else by the device table
    ],
)
def test_a_room_that_can_be_taken_out_has_few_users(room: str, allowed: set[str]) -> None:
    users = {
        room_of(path.relative_to(SRC).with_suffix("").parts)
        for path in SRC.rglob("*.py")
        if room in imports_of(path)
    }
    assert users - {room} == allowed


@pytest.mark.parametrize("table", ["LAYOUTS", "COLUMNS", "CONFIG_FILES"])
def test_a_part_that_is_found_by_name_imports_no_torch(table: str) -> None:
    """Reading a dump, or writing its table, takes no torch."""
    home = {"LAYOUTS": "store.loading", "COLUMNS": "report.columns", "CONFIG_FILES": "config"}
    code = (
        f"import sys; from tensorprobe.{home[table]} import {table} as parts\n"
        "assert not any(name.startswith('tensorprobe.peers') for name in sys.modules)\n"
        "assert all(parts.module(name) for name in parts)\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["checking.worker", "devices.children", "failures.watch", "replay.decompositions"]
)
def test_the_simulated_npu_is_imported_when_it_is_asked_for(module: str) -> None:
    """It needs a newer torch than the rest, which must not fall with it."""
    code = (
        f"import sys, tensorprobe.{module}\n"
        "sys.exit('it was imported' if 'tensorprobe.devices.sim_npu' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_following_knows_nothing_of_files_and_of_who_observes() -> None:
    known = {"follow", "native", "operators", "records", "devices", "torch_versions"}
    for path in (SRC / "follow").glob("*.py"):
        assert imports_of(path) <= known, path


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
