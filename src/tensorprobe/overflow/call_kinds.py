"""What kind of work a call does, as far as it bears on values that are not finite. Pure."""

from __future__ import annotations

import enum
from typing import NamedTuple

from tensorprobe.follow.naming import ApiName, writes_in_place


class Kind(enum.Enum):
    """How a call's output comes by its values."""

    COMPUTES = "computes"  # anything may come out
    CASTS = "casts"  # other dtype: may overflow where the new one is narrower
    MOVES = "moves"  # takes values from its inputs; its backward adds some up
    PASSES = "passes"  # the same both ways: views, copies
    MAKES = "makes"  # out of nothing, or as it is told; also uninitialised memory
    COMMUNICATES = "communicates"  # from other ranks
    SCALES = "scales"  # GradScaler's own, which looks for infinity itself


class Plan(NamedTuple):
    """What to do about the calls of one API."""

    api: ApiName
    kind: Kind
    writes: bool  # to its first argument, whose values before must be copied to be known
    uninitialised: bool = False
    looks_now: bool = False  # what it gives is no result of its own, to be looked at later
    # asked for every call, so they are worked out once
    is_special: bool = False  # its kind is none of those that make a result out of inputs
    has_backward: bool = True  # which computes, too
    # none of its inputs is written to, whatever it is told: their graph is the same after the call
    leaves_inputs: bool = False
    is_short: bool = False  # where it is looked at later, it may be noted the short way
    may_write: bool = False  # it is short unless told to write to its input
    is_operator: bool = False  # of ATen
    stem: str = ""  # of its name


_CASTS = "to type float half double bfloat16 type_as cfloat cdouble chalf _to_copy"
_PASSES = """
    view view_as reshape reshape_as transpose t T mT H mH permute movedim moveaxis swapaxes
    swapdims squeeze unsqueeze flatten unflatten ravel detach alias contiguous clone chunk split
    split_with_sizes tensor_split hsplit vsplit dsplit unbind narrow select diagonal real imag
    view_as_real view_as_complex squeeze_ unsqueeze_ transpose_ t_ detach_ cpu cuda npu pin_memory
    numpy item tolist data.__get__ grad.__get__ __deepcopy__ requires_grad_ swapaxes_ swapdims_
    unsafe_chunk unsafe_split __iter__ resolve_conj resolve_neg conj atleast_1d atleast_2d
    atleast_3d
"""
_MOVES = """
    __getitem__ index_select gather take take_along_dim embedding cat concat concatenate stack
    hstack vstack dstack column_stack row_stack repeat repeat_interleave tile expand expand_as
    broadcast_to broadcast_tensors masked_select where masked_fill masked_fill_ masked_scatter
    masked_scatter_ tril triu tril_ triu_ flip fliplr flipud roll rot90 pad copy_ copy __setitem__
    index_copy index_copy_ index_fill index_fill_ scatter scatter_ select_scatter slice_scatter
    diagonal_scatter sort msort topk kthvalue max min amax amin aminmax maximum minimum fmax fmin
    clamp clamp_ clip clip_ clamp_min clamp_max clamp_min_ clamp_max_ meshgrid block_diag unfold
    as_strided diag diag_embed nan_to_num nan_to_num_ neg neg_ abs abs_ absolute relu relu_ relu6
    hardtanh pixel_shuffle pixel_unshuffle channel_shuffle unique unique_consecutive max_pool1d
    max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cummax cummin
    narrow_copy rot90 one_hot threshold threshold_ dequantize to_dense sigmoid tanh
"""
_MAKES = """
    full full_like new_full zeros zeros_like new_zeros ones ones_like new_ones tensor as_tensor
    from_numpy asarray frombuffer scalar_tensor arange linspace eye new_tensor fill_ fill zero_
    constant_ zeros_ ones_ load from_file _foreach_zero_ data.__set__ grad.__set__
"""
_UNINITIALISED = """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_
    set_ _empty_affine_quantized
"""
_KINDS = {
    name: kind
    for kind, names in (
        (Kind.CASTS, _CASTS),
        (Kind.PASSES, _PASSES),
        (Kind.MOVES, _MOVES),
        (Kind.MAKES, _MAKES),
        (Kind.MAKES, _UNINITIALISED),
    )
    for name in names.split()
}
_UNINITIALISED_NAMES = frozenset(_UNINITIALISED.split())
# Masks are added to scores: the lowest finite number and a negative one give -inf in float16.
ADDS = frozenset(["add", "add_", "sub", "sub_", "rsub", "addmm", "baddbmm", "addcmul"])
DIVIDES = frozenset(["div", "div_", "true_divide", "__rtruediv__", "reciprocal", "rsqrt"])

LOGARITHMS = frozenset(["log", "log2", "log10", "log_", "log2_", "log10_", "xlogy"])
# Where a name says whether the call writes in place; functionals may be told to.
_NAMED_BY_RULE = frozenset(["Tensor", "Torch", "Functional"])
_INPLACE_NAMES = """
    alpha_dropout celu dropout dropout1d dropout2d dropout3d elu feature_alpha_dropout hardsigmoid
    hardswish hardtanh leaky_relu mish relu relu6 rrelu selu silu threshold
"""
_INPLACE = frozenset(_INPLACE_NAMES.split())


class Passing(enum.IntEnum):
    """How the gradients that a node of the graph sends on come by their values."""

    COMPUTED = 0
    SHARED = 1  # where they lie in the memory of what it is given, they are as they are there
    COPIED = 2  # of the one it is given, among zeros or divided by a count, or cast


# torch's own nodes, by their names: none that writes to what it is given, or leaves some of it out
# (tril, pad), which often is what is not finite, and would seem to go on.
PASSING = {
    "AddBackward0": Passing.SHARED,
    "SubBackward0": Passing.SHARED,
    "CatBackward0": Passing.SHARED,
    "StackBackward0": Passing.SHARED,
    "CloneBackward0": Passing.COPIED,
    "MeanBackward0": Passing.COPIED,
    "MeanBackward1": Passing.COPIED,
    "SelectBackward0": Passing.COPIED,
    "SliceBackward0": Passing.COPIED,
    "ToCopyBackward0": Passing.COPIED,
}


def register_kind(name: str, kind: Kind) -> None:
    """Say how the calls of this name, the last part of an API, come by their values."""
    _KINDS[name] = kind


def plan_for(api: ApiName) -> Plan:
    """What to do about the calls of this API."""
    name = api.api if api.api.endswith("_.__set__") else _last_part(api.api)
    if api.prefix == "Distributed":
        return Plan(api, Kind.COMMUNICATES, False, looks_now=True)
    if name.startswith("_amp_"):
        return Plan(api, Kind.SCALES, False, is_special=True)
    kind = _KINDS.get(name, Kind.COMPUTES)
    writes = kind in (Kind.COMPUTES, Kind.CASTS) and writes_in_place(api)
    uninitialised = name in _UNINITIALISED_NAMES
    passes = kind in (Kind.PASSES, Kind.MAKES)
    leaves = api.prefix in _NAMED_BY_RULE and not writes_in_place(api)
    leaves = leaves and not (api.prefix == "Functional" and name in _INPLACE)
    told = api.prefix == "Functional" and name in _INPLACE and not passes and not writes
    return Plan(
        api, kind, writes, uninitialised, uninitialised, passes, not passes, leaves,
        is_short=leaves and not passes and not writes, may_write=told,
        is_operator=api.prefix == "Aten", stem=api.stem,
    )  # fmt: skip


def _last_part(api: str) -> str:
    head, dot, last = api.rpartition(".")
    if last in ("__get__", "__set__", "__delete__"):  # an accessor: data.__get__
        return f"{head.rpartition('.')[2]}.{last}"
    return last if dot else api
