"""Which calls are a vendor's own ops, told from where the function lives: there is no list."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tensorprobe.devices.table import FusedOps, rows


@dataclass(frozen=True)
class VendorOp:
    """A vendor's op: the prefix of its call names, its bare name, and how a user writes it."""

    prefix: str
    name: str
    path: str


def vendor_op(func: Any) -> VendorOp | None:
    """The vendor op `func` is, or None for any other function.

    `torch_npu.npu_linear` is `torch.ops.npu.npu_linear`: an op, or one overload of it. What a
    vendor wrote as a plain function lives in a module of its package.
    """
    name = getattr(func, "__name__", None)
    module = getattr(func, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return None
    return _find(module, name.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _find(module: str, name: str) -> VendorOp | None:
    for row in rows():
        fused = row.fused_ops
        if fused is not None and _belongs(module, fused):
            return VendorOp(fused.prefix, name, f"{fused.module}.{name}")
    return None


def _belongs(module: str, fused: FusedOps) -> bool:
    package = module.partition(".")[0]
    return package == fused.module or module == f"torch._ops.{fused.namespace}"
