"""Formulas for operators that the CPU has no kernel for, or none in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay import npu_detection_ops, npu_fused_ops, npu_shape_ops
from tensorprobe.replay.allowed import function_named
from tensorprobe.replay.npu_op_table import NpuOp

Formula = Callable[..., Any]

_NPU_OPS = (npu_fused_ops, npu_shape_ops, npu_detection_ops)
VENDOR_OPS = {op.name: op for module in _NPU_OPS for op in module.OPS.ops}


def vendor_formula(call: Call) -> Formula | None:
    """What a vendor's own op computes, as its documentation has it: torch_npu's fused ops."""
    return vendor_op_formula(call.op, call.kwargs)


def vendor_op_formula(op: str, kwargs: Mapping[str, Any]) -> Formula | None:
    """The same for an op that is called with these keyword arguments."""
    known = _vendor_op(op)
    if known is None:
        return None
    kept = kwargs.get("keep_prob", 1 if "keep_prob=1" in known.schema else 0)
    draws = known.is_random and kept != 1  # other numbers than the device drew
    if draws:
        return None
    return _with_its_old_name(known.body) if "self" in kwargs else known.body


def _with_its_old_name(body: Formula) -> Formula:
    """torch_npu 2.1 calls the first argument of most ops `self`, and 2.7 `input`."""

    def called(*, self: Any, **others: Any) -> Any:
        return body(self, **others)

    return called


def is_vendor_op(op: str) -> bool:
    """Whether this is the name of one of torch_npu's own ops, installed here or not."""
    return _vendor_op(op) is not None


def _vendor_op(op: str) -> NpuOp | None:
    home = next((home for home in ("torch_npu.", "torch.ops.npu.") if op.startswith(home)), None)
    return None if home is None else VENDOR_OPS.get(op.removeprefix(home).removesuffix(".default"))


def formula(op: str, problem: BaseException | None) -> Formula | None:
    """Another way to compute an op, tried where its own kernel does not run because of `problem`.

    None where the problem is arguments that the op does not take: torch's formulas take no others,
    and the first one that is called may import torch._dynamo, which takes seconds.
    """
    own = _OWN.get(op.removeprefix("torch.ops.aten.").removesuffix(".default"))
    if own is not None or not op.startswith("torch.ops.aten."):
        return own
    from torch._decomp import decomposition_table

    try:
        overload: Any = function_named(op)
    except NotReplayable:
        return None
    if str(overload._schema) in str(problem):  # torch quotes it where arguments do not fit it
        return None
    found: Formula | None = decomposition_table.get(overload)
    return found


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One product for each group; `offs` are the rows at which the groups end."""
    if offs is None:
        return torch.bmm(mat_a, mat_b)
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    spans = list(zip(starts, ends, strict=True))
    if mat_a.dim() == 2 and mat_b.dim() == 3:
        parts = [mat_a[a:b] @ mat_b[i] for i, (a, b) in enumerate(spans)]
        rest = mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])
        return torch.cat([*parts, rest])
    if mat_a.dim() == 3:
        return torch.cat([mat_a[i] @ mat_b[:, a:b] for i, (a, b) in enumerate(spans)], dim=1)
    return torch.stack([mat_a[:, a:b] @ mat_b[a:b] for a, b in spans])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """The first result of the fused attentions: the others are for their own backward."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


_OWN: dict[str, Formula] = {
    "torch._grouped_mm": _grouped_mm,
    "torch.nn.functional.grouped_mm": _grouped_mm,
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_flash_attention": _attention,
}
