"""The simulated NPU, each file of checks in a process of its own."""

from pathlib import Path

import pytest

from isolated_pytest import run_isolated

FOLDER = Path(__file__).parent / "on_sim_npu"


NAMES = sorted(path.stem for path in FOLDER.glob("check_*.py"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "check_distributed"])
def test_on_sim_npu(name: str) -> None:
    run_isolated(FOLDER / f"{name}.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check_models", "check_distributed"])
def test_on_sim_npu_in_full(name: str) -> None:
    run_isolated(FOLDER / f"{name}.py", marks="slow")
