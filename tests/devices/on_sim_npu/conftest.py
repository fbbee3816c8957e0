"""Installs the simulated NPU for the checks of this folder, and cures it after each."""

from collections.abc import Iterator

import pytest
import torch

from tensorprobe.devices import sim_npu

sim_npu.install()


@pytest.fixture(autouse=True)
def _healthy_chip() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    sim_npu.clear_faults()
    sim_npu.set_overflow_mode("inf-nan")
    torch.npu.finalize_dump()
