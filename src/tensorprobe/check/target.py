"""The device a check runs on: is it there, and ready to calculate?"""

from __future__ import annotations

import importlib.util

import torch

from tensorprobe.devices import rows
from tensorprobe.errors import BadUsage, DeviceUnusable


def find_device(name: str) -> torch.device:
    """The device of this name, tried out; a vendor's package is imported where it is needed."""
    for row in rows():
        vendor = row.fused_ops.module if row.fused_ops else None
        if vendor and name.partition(":")[0] == row.type and importlib.util.find_spec(vendor):
            importlib.import_module(vendor)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadUsage(f"--device '{name}' is no device that PyTorch knows") from error
    try:
        torch.ones(1, device=device).add(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        text = str(error).strip().partition("\n")[0]
        raise DeviceUnusable(f"device '{name}' is not usable here: {text}") from error
    return device
