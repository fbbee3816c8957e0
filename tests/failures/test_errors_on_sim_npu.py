"""The watch for errors on the simulated NPU, in a process of its own."""

from pathlib import Path

from isolated_pytest import run_isolated


def test_on_sim_npu() -> None:
    run_isolated([Path(__file__).parent / "on_sim_npu" / "check_errors.py"])
