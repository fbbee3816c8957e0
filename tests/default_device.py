"""The device on which those tests run that name none: the host, the simulated NPU, or torch_npu's.

Both change a whole process, so only tests/isolated_pytest.py and tests/npu/run_npu.py ask for one,
by an environment variable. Programs of the tests need not know: PyTorch's default device is theirs.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

VARIABLE = "TENSORPROBE_TEST_DEVICE"
ON_SIM_NPU = os.environ.get(VARIABLE) == "npu"
ON_REAL_NPU = os.environ.get(VARIABLE) == "real-npu"  # torch_npu, on a stand-in for CANN


def choose() -> None:
    """Make the device and have tensors land on it; on the host there is nothing to do."""
    if ON_SIM_NPU:
        from tensorprobe.devices import sim_npu

        sim_npu.install()
        torch.set_default_device("npu")
    elif ON_REAL_NPU:
        importlib.import_module("torch_npu")  # no dependency of ours
        torch.set_default_device("npu")


def host_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test that would say nothing on an NPU."""
    return pytest.mark.skipif(ON_SIM_NPU or ON_REAL_NPU, reason=reason)
