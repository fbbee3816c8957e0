"""torch_npu.npu.utils: the calls training scripts ask about overflow with."""

from __future__ import annotations

import math
import warnings

import torch

from tensorprobe.devices.sim_npu.chip import CHIP


def require_context() -> None:
    """What a runtime call without a device gives, in the runtime's words."""
    if not CHIP.has_context:
        raise RuntimeError(
            "NPU error, error code is 107002: the context of the current thread is empty. "
            "Check whether a device is set (simulated)"
        )


def is_support_inf_nan() -> bool:
    """Whether overflows show as inf and NaN; if not, only the float status tells."""
    return CHIP.status.mode == "inf-nan"


def get_npu_overflow_flag() -> bool:
    if is_support_inf_nan():
        raise RuntimeError("get_npu_overflow_flag: in INF/NAN mode use npu_check_overflow instead")
    return check_flag()


def npu_check_overflow(grad: torch.Tensor | float) -> bool:
    """Whether a gradient, or in saturation mode anything since the last clearing, overflowed."""
    if not is_support_inf_nan():
        raised = check_flag()
        clear_flag()
        return raised
    if not isinstance(grad, (float, torch.Tensor)):
        raise RuntimeError(f"npu_check_overflow takes a tensor or a float, not {type(grad)}")
    return not math.isfinite(grad if isinstance(grad, float) else float(grad.float().sum()))


def clear_npu_overflow_flag() -> None:
    if is_support_inf_nan():
        warnings.warn(
            "clear_npu_overflow_flag does nothing in INF/NAN mode; remove it", stacklevel=2
        )
        return
    clear_flag()


def check_flag() -> bool:
    require_context()
    return CHIP.status.raised


def clear_flag() -> None:
    require_context()
    CHIP.status.raised = False
