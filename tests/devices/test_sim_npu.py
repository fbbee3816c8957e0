"""The simulated NPU, checked in processes of its own."""

from pathlib import Path

import pytest

from isolated_pytest import run_isolated

FOLDER = Path(__file__).parent / "on_sim_npu"
# Files that share a process, for a start of PyTorch takes longer than most of them.
GROUPS = {
    "tensors": ["check_tensors", "check_training", "check_device_layer"],
    "ops": ["check_ops", "check_faults", "check_overflow_and_dump"],
    "models": ["check_models"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_on_sim_npu(group: str) -> None:
    run_isolated([FOLDER / f"{name}.py" for name in GROUPS[group]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check_models", "check_device_layer", "check_distributed"])
def test_on_sim_npu_in_full(name: str) -> None:
    run_isolated([FOLDER / f"{name}.py"], marks="slow")


def test_no_check_is_forgotten() -> None:
    named = {name for names in GROUPS.values() for name in names} | {"check_distributed"}
    assert named == {path.stem for path in FOLDER.glob("check_*.py")}
