"""torch.autocast("npu"): which ops run in the low dtype, which in float32, which in the widest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorprobe.devices.autocast_lists import FLOAT32, FLOAT32_BY_DTYPE, LOW, WIDEST
from tensorprobe.nests import change_leaves, leaves_of

_DISPATCH_KEYS: Any = torch._C.DispatchKey
_KEY = torch._C.DispatchKeySet(_DISPATCH_KEYS.AutocastPrivateUse1)

# The lists are those of the other accelerators' autocast; the vendor's follow them.
_BANNED = "binary_cross_entropy"

Cast = Callable[[Any], Any]


def register(library: Any) -> None:
    """Give every op of the lists its autocast kernel; the rest pass through untouched."""
    for name in LOW.split():
        _register(library, name, lambda op: _cast_all(op, _low_dtype))
    for name in FLOAT32.split():
        _register(library, name, lambda op: _cast_all(op, lambda tensors: torch.float32))
    for name in FLOAT32_BY_DTYPE.split():
        _register(library, name, _ask_for_float32)
    for name in WIDEST.split():
        _register(library, name, lambda op: _cast_all(op, _widest_dtype))
    for name in _BANNED.split():
        _register(library, name, _refuse)


def _register(library: Any, name: str, kernel: Callable[[Any], Any]) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    library.impl(f"aten::{name}", kernel(op), "AutocastPrivateUse1")


def _cast_all(op: Any, choose: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY), torch._C.DisableTorchFunction():
            dtype = choose([t for t in leaves_of((args, kwargs)) if _may_be_cast(t)])
            args, kwargs = change_leaves(
                (args, kwargs), lambda leaf: leaf.to(dtype) if _may_be_cast(leaf) else leaf
            )
            return op(*args, **kwargs)

    return kernel


def _ask_for_float32(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY), torch._C.DisableTorchFunction():
            asked = args[position] if position < len(args) else kwargs.get("dtype")
            if asked is None and _may_be_cast(args[0]):
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _refuse(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
            "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss instead."
        )

    return kernel


def _low_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def _widest_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    low = _low_dtype(tensors)
    return torch.float32 if any(t.dtype == torch.float32 for t in tensors) else low


def _may_be_cast(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "npu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )
