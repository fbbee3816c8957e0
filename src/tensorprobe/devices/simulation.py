"""Raises, when it is imported, where this torch cannot have a simulated device."""

from __future__ import annotations

import torch

from tensorprobe.errors import DeviceUnusable
from tensorprobe.torch_versions import SIMULATED_FROM, can_simulate

if not can_simulate():
    raise DeviceUnusable(
        f"torch {torch.__version__}: the simulated NPU needs torch {SIMULATED_FROM} or newer. "
        "Everything else works with this torch"
    )
