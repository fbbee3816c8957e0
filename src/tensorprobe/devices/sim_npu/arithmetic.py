"""Which ops calculate, and which of those every chip must round alike."""

from __future__ import annotations

import functools
from typing import Any

# They copy, select, fill or compare: no chip can give other bits, and none can overflow.
_MOVES = """
    _conj _copy_from _foreach_copy_ _foreach_zero_ _index_put_impl_ _local_scalar_dense
    _reshape_alias _resize_output_ _to_copy _unsafe_index _unsafe_view alias arange argmax argmin
    argsort as_strided_ bitwise_and bitwise_not bitwise_or bitwise_xor bucketize cat clamp
    clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone constant_pad_nd copy_ detach_ diag_embed
    embedding empty empty_like empty_permuted empty_strided eq equal eye fill fill_ flip full
    full_like gather ge gt im2col index index_copy index_copy_ index_put index_put_ index_select
    isfinite isinf isnan le linspace lift_fresh logical_and logical_not logical_or logical_xor lt
    masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select max
    max_pool2d_with_indices maximum min minimum ne new_empty new_empty_strided new_full new_ones
    new_zeros nonzero ones ones_like one_hot pad randint randperm relu relu_ repeat
    resize_ roll scalar_tensor scatter scatter_ searchsorted set_ sign slice_scatter
    select_scatter sort stack threshold_backward topk
    tril tril_ triu triu_ unfold_backward unique2 where zero_ zeros zeros_like
    npu_alloc_float_status npu_get_float_status npu_clear_float_status npu_format_cast npu_transpose
    npu_broadcast npu_slice npu_indexing npu_confusion_transpose one_ empty_with_format npu_one_hot
"""

# IEEE 754 fixes the result of these, so two healthy chips agree on every bit.
_EXACT = "abs add add_ ceil floor mul mul_ neg neg_ round rsub sub sub_ trunc"

_MOVING, _ROUNDED_ALIKE = frozenset(_MOVES.split()), frozenset(_EXACT.split())


@functools.cache
def calculates(func: Any) -> bool:
    """Whether an op makes new numbers, rather than moving or comparing old ones."""
    return _name(func) not in _MOVING


@functools.cache
def rounds_freely(func: Any) -> bool:
    """Whether two healthy chips may differ in the last bits of this op's result."""
    return calculates(func) and _name(func) not in _ROUNDED_ALIKE


def _name(func: Any) -> str:
    return str(func._schema.name).split("::")[1]
