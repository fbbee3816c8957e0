"""Rerouting on the simulated NPU, in processes of its own."""

from pathlib import Path

import pytest

from isolated_pytest import run_isolated

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["test_reroute", "check_reroute_faults"])
def test_on_the_simulated_npu(name: str) -> None:
    run_isolated([HERE / f"{name}.py"], device="npu")
