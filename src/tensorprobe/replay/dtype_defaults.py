"""Defaults that depend on the dtype: a replay in float64 takes those of the recorded dtype."""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.allowed import dtype_named

_EPS_AT = 3  # rms_norm(input, normalized_shape, weight, eps)
_RMS_NORMS = {
    "torch.nn.functional.rms_norm",
    "torch.rms_norm",
    "torch.ops.aten.rms_norm.default",
    "torch.ops.aten._fused_rms_norm.default",
}


def keep_eps(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the eps that an rms_norm without one has taken."""
    if call.op not in _RMS_NORMS or kwargs.get("eps") is not None:
        return args, kwargs
    if len(args) <= _EPS_AT:
        return args, {**kwargs, "eps": _eps_of(call)}
    if args[_EPS_AT] is None:
        return (*args[:_EPS_AT], _eps_of(call), *args[_EPS_AT + 1 :]), kwargs
    return args, kwargs


def keep_eps_of_module(call: Call, module: torch.nn.Module) -> None:
    """The same for a module, and all in it."""
    for part in module.modules():
        if type(part).__name__ == "RMSNorm" and getattr(part, "eps", 0.0) is None:
            part.eps = _eps_of(call)  # type: ignore[assignment]


def _eps_of(call: Call) -> float:
    """16-bit numbers are normalised in float32, with its eps."""
    dtypes = (dtype_named(r.dtype) for r in call.tensors if isinstance(r, TensorRecord))
    given = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    return torch.finfo(torch.float64 if given is torch.float64 else torch.float32).eps
