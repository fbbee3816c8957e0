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
    "recording": ["check_recording"],
    "guard": ["check_guard"],
}
TESTS = FOLDER.parents[1]
# Of the tests of recording, those that run on the device at every change: each program once, and
# the entries of the FAQs that are about tensors and gradients.
QUICK = """(test_same_bits and mix-tensors and not threads and not anomaly)
or (copies_of_the_model and mix) or U2 or E7 or E13 or E14
or 2_4 or 2_5 or 3_1_1 or 3_3_7 or 3_3_8 or 3_3_11"""


@pytest.mark.parametrize("group", GROUPS)
def test_on_sim_npu(group: str) -> None:
    run_isolated([FOLDER / f"{name}.py" for name in GROUPS[group]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check_models", "check_device_layer", "check_distributed"])
def test_on_sim_npu_in_full(name: str) -> None:
    run_isolated([FOLDER / f"{name}.py"], marks="slow")


def test_recording_on_sim_npu() -> None:
    run_recording("test_transparency", "test_faq", only=" ".join(QUICK.split()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_transparency", "test_faq"])
def test_recording_on_sim_npu_in_full(name: str) -> None:
    run_recording(name)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
def test_every_program_on_sim_npu(level: str) -> None:
    run_recording("test_transparency", marks="slow", only=f"{level}-")


def run_recording(*names: str, marks: str = "not slow", only: str = "") -> None:
    paths = [path for name in names for path in TESTS.rglob(f"{name}.py")]
    run_isolated(paths, marks, only=only, device="npu")


def test_no_check_is_forgotten() -> None:
    named = {name for names in GROUPS.values() for name in names} | {"check_distributed"}
    assert named == {path.stem for path in FOLDER.glob("check_*.py")}
