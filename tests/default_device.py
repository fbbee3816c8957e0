"""The device on which those tests run that name none: the host, or the simulated NPU.

The simulated NPU changes a whole process, so only tests/isolated_pytest.py asks for it, by an
environment variable. Programs of the tests need not know: PyTorch's default device is theirs.
"""

from __future__ import annotations

import os

import pytest
import torch

VARIABLE = "TENSORPROBE_TEST_DEVICE"
ON_SIM_NPU = os.environ.get(VARIABLE) == "npu"


def choose() -> None:
    """Make the device and have tensors land on it; on the host there is nothing to do."""
    if ON_SIM_NPU:
        from tensorprobe.devices import sim_npu

        sim_npu.install()
        torch.set_default_device("npu")


def host_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that would say nothing on the simulated NPU."""
    return pytest.mark.skipif(ON_SIM_NPU, reason=reason)
