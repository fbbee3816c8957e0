"""Switches that change what a device calculates: do they stand as when calls were recorded?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The section of the facts, and how the names of its switches begin, for a kind of device.
_SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "npu": ("npu", ("jit_compile", "matmul_hf32", "conv_hf32", "inf_nan_mode")),
    "cuda": ("numerics", ("matmul_", "fp16_", "bf16_", "cudnn_", "sdpa_", "float32_matmul")),
    "cpu": ("numerics", ("float32_matmul", "mkldnn_")),
}


def differing(recorded: Mapping[str, Any], here: Mapping[str, Any], device: str) -> list[str]:
    """What to tell a user about switches of `device` that stand otherwise here."""
    section, beginnings = _SWITCHES.get(device.partition(":")[0], ("", ()))
    before, now = recorded.get(section, {}), here.get(section, {})
    if not isinstance(before, Mapping):  # facts are what a file says
        return []
    return [
        f"{name} was {before[name]} when it was recorded and is {now[name]} here"
        for name in before
        if name.startswith(beginnings) and name in now and now[name] != before[name]
    ]
