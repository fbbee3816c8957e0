"""The device a check runs on: is it there, and ready to calculate?"""

from __future__ import annotations

import importlib.util

import torch

from tensorprobe.devices import how_to_get, rows
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
        kind = name.partition(":")[0]
        raise BadUsage(f"PyTorch knows no device '{name}'. {how_to_get(kind)}") from error
    try:
        torch.ones(1, device=device).add(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        text = str(error).strip().partition("\n")[0]
        raise DeviceUnusable(
            f"device '{name}' is not usable here: {text.rstrip('.')}. {how_to_get(device.type)}"
        ) from error
    return device
