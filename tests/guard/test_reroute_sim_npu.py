"""Rerouting on the simulated NPU, in processes of its own."""

from pathlib import Path

from isolated_pytest import run_isolated

HERE = Path(__file__).parent


def test_what_comes_back_has_the_same_bits() -> None:
    run_isolated([HERE / "test_reroute.py"], device="npu")
