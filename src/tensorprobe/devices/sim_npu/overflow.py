"""The float status of the simulated NPU, in INF/NAN mode and in saturation mode."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

import torch

from tensorprobe.devices.sim_npu.arithmetic import calculates
from tensorprobe.errors import BadUsage

OverflowMode = Literal["inf-nan", "saturation"]


class FloatStatus:
    """Whether an overflow happened since the flag was last cleared.

    In INF/NAN mode results are IEEE 754's and nothing raises the flag: tools look at the values.
    In saturation mode infinity becomes the largest finite number, NaN becomes 0, and the flag goes
    up: the only trace an overflow leaves.
    """

    def __init__(self) -> None:
        self.mode: OverflowMode = "inf-nan"
        self.raised = False
        self.read_environment()

    def read_environment(self) -> None:
        """INF_NAN_MODE_ENABLE=0 asks for saturation, as it does on the hardware that has both."""
        self.set_mode("saturation" if os.environ.get("INF_NAN_MODE_ENABLE") == "0" else "inf-nan")

    def set_mode(self, mode: OverflowMode) -> None:
        if mode not in get_args(OverflowMode):
            raise BadUsage(f"overflow mode '{mode}' is unknown; it is 'inf-nan' or 'saturation'")
        self.mode = mode
        self.raised = False

    def settle(self, func: Any, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a kernel as the mode stores them."""
        if self.mode == "inf-nan" or not calculates(func):
            return outputs
        return [self._saturate(tensor) for tensor in outputs]

    def _saturate(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            return tensor
        self.raised = True
        return torch.nan_to_num(tensor, nan=0.0)
