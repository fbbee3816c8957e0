"""What kind of operation a call is: it decides what a reference for it can be. Pure data."""

from __future__ import annotations

import functools
from typing import Literal

from tensorprobe.records import Call, Special, TensorRecord

Kind = Literal[
    "exact",  # moves, chooses or compares numbers: every result has one right bit pattern
    "selection",  # exact values, but which of equal ones is chosen is free: topk, argmax
    "conversion",  # from one dtype to another
    "random",
    "dropout",
    "uninitialised",
    "elementwise",  # each number from a few numbers, rounded once
    "compound",  # the same in several steps, which a kernel may round one by one: a + alpha * b
    "reduction",  # sums over a dimension, norms, softmax, losses
    "product",  # matrix products, convolutions, attention, recurrent cells
    "scatter",  # sums that meet at one address, in whatever order they arrive
    "general",  # nothing is known about it
]

_NAMES: dict[Kind, str] = {
    "exact": """
        view reshape reshape_as view_as transpose permute t T mT H mH real imag flatten ravel
        unflatten squeeze unsqueeze expand expand_as broadcast_to broadcast_tensors narrow select
        slice split split_with_sizes chunk tensor_split unbind hsplit vsplit dsplit unfold diagonal
        as_strided swapaxes swapdims movedim moveaxis contiguous clone detach alias copy lift_fresh
        cat concat concatenate stack hstack vstack dstack column_stack tile repeat
        repeat_interleave roll flip fliplr flipud rot90 pad constant_pad_nd index_select gather
        take take_along_dim __getitem__ __setitem__ index masked_fill masked_select masked_scatter
        where index_fill index_copy select_scatter slice_scatter diagonal_scatter fill fill_diagonal
        zero zeros ones full eye tril triu zeros_like ones_like full_like new_zeros new_ones
        new_full new_tensor scalar_tensor tensor as_tensor asarray tril_indices triu_indices
        tril_ triu_ diag diag_embed meshgrid cartesian_prod pixel_shuffle pixel_unshuffle
        eq ne lt le gt ge isnan isinf isposinf isneginf isfinite isin equal logical_and logical_or
        logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
        bitwise_right_shift __lshift__ __rshift__ __and__ __or__ __xor__ any all nonzero argwhere
        count_nonzero searchsorted bucketize one_hot unique unique_consecutive bincount histc
        relu relu6 threshold abs absolute neg negative positive sign sgn signbit copysign floor ceil
        trunc fix round clamp clip clamp_min clamp_max maximum minimum fmax fmin amax amin aminmax
        hardtanh nan_to_num heaviside embedding set cpu cuda npu xpu item __bool__ __int__ __float__
        __contains__ __len__ __index__ tolist is_nonzero resize resolve_conj resolve_neg conj
        conj_physical view_as_real view_as_complex atleast_1d atleast_2d atleast_3d block_diag
        channel_shuffle nextafter frexp ldexp gcd lcm floor_divide remainder fmod __rmod__
        __rfloordiv__ split_with_sizes_copy all_gather_copy_in chunk_cat
    """,
    "selection": """
        argmax argmin max min topk sort argsort msort kthvalue median nanmedian mode cummax cummin
        max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d max_pool2d_with_indices multinomial_from
    """,
    "conversion": """
        to type type_as float double half bfloat16 int long short byte char bool cfloat cdouble
        _to_copy _cast_Float _cast_Half
    """,
    "random": """
        rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform
        uniform_ bernoulli bernoulli_ random random_ exponential exponential_ geometric geometric_
        cauchy cauchy_ log_normal log_normal_ poisson multinomial gumbel_softmax rrelu
        trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_
        fractional_max_pool2d fractional_max_pool3d
    """,
    "dropout": """
        dropout native_dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d
        dropout2d dropout3d
    """,
    "uninitialised": """
        empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_quantized
    """,
    "elementwise": """
        add sub subtract rsub mul multiply div divide true_divide __rdiv__ __rtruediv__ pow square
        __rpow__ float_power sqrt rsqrt exp exp2 expm1 log log1p log2 log10 sin cos tan tanh
        sigmoid erf silu softplus leaky_relu reciprocal arange linspace deg2rad rad2deg
    """,
    "compound": "addcmul addcdiv lerp",
    "reduction": """
        sum mean nansum nanmean prod var std var_mean std_mean norm vector_norm matrix_norm
        logsumexp logcumsumexp cumsum cumprod softmax log_softmax softmin _softmax _log_softmax
        layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize
        native_layer_norm native_group_norm native_batch_norm cross_entropy nll_loss mse_loss
        l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits cosine_similarity cosine_embedding_loss avg_pool1d
        avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        lp_pool1d lp_pool2d trace interpolate upsample grid_sample dist cdist pairwise_distance
        clip_grad_norm_ npu_rms_norm npu_scaled_masked_softmax npu_layer_norm_eval
    """,
    "product": """
        linear bilinear matmul mm bmm mv dot vdot inner outer ger addmm addmv addr baddbmm addbmm
        chain_matmul multi_dot tensordot einsum kron conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d convolution _convolution conv_tbc
        scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell fft ifft rfft irfft fft2 fftn
        __matmul__ __rmatmul__ npu_linear npu_bmm_v2 npu_fusion_attention
    """,
    "scatter": """
        index_add index_put index_reduce scatter scatter_add scatter_reduce put embedding_bag
        embedding_dense_backward grouped_mm segment_reduce
    """,
}  # fmt: skip
_KIND: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}

# Modules of torch.nn go by their class; those not named here are judged as unknown.
_MODULES: dict[Kind, str] = {
    "product": "Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d LSTM GRU RNN",
    "reduction": "LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d Softmax",
    "dropout": "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout",
    "exact": "ReLU Identity Flatten Unflatten Embedding",
    "elementwise": "GELU SiLU Sigmoid Tanh Softplus Mish Hardswish LeakyReLU ELU",
}
_MODULE_KIND: dict[str, Kind] = {
    name: kind for kind, names in _MODULES.items() for name in names.split()
}
# The gradient of a copy that one number takes to many places is a sum over those places.
_SUMS_IN_BACKWARD = {
    *("embedding", "Embedding", "gather", "take", "take_along_dim"),
    *("index_select", "__getitem__", "index"),
}


_ROUNDING = ("elementwise", "compound", "reduction", "scatter", "product")


# Calls that write to their first argument without reading what was there.
_OVERWRITES = {
    *("fill_", "zero_", "copy_", "set_", "random_", "uniform_", "normal_", "bernoulli_"),
    *("exponential_", "geometric_", "cauchy_", "log_normal_", "_foreach_zero_", "_foreach_copy_"),
    *("constant_", "ones_", "zeros_", "eye_", "dirac_", "trunc_normal_", "orthogonal_", "sparse_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
    *("recv", "irecv", "recv_"),
}


def first_read(call: Call) -> TensorRecord | None:
    """The first input of a call that it does not only write to."""
    over = {f"{call.name}.{name}" for name in overwrites(call)}
    return next((r for r in call.tensors if r.role == "input" and r.name not in over), None)


def overwrites(call: Call) -> tuple[str, ...]:
    """The names of the inputs that a call only writes to: what they held is no input."""
    parts = call.op.split(".")
    name = parts[3] if call.op.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    records = [record.name.removeprefix(f"{call.name}.") for record in call.tensors]
    found = [name for name in records if name == "input.out" or name.startswith("input.out.")]
    if name in _OVERWRITES:
        found += [n for n in records if n in _FIRST or n.startswith("input.0.")]
    return tuple(found)


def is_running_statistic(call: Call, name: str) -> bool:
    """Whether an input of an operator, "input.3" say, is the running mean or variance of a norm."""
    api = api_of(call.op)
    if not api.endswith(("batch_norm", "batch_norm_legit", "legit_no_training", "instance_norm")):
        return False
    first = 1 if call.op.startswith("torch.nn.functional.") else 3
    places = {"input.running_mean", "input.running_var", f"input.{first}", f"input.{first + 1}"}
    return name in places


# As which the first argument may be given: torch's own initialisers have it as `tensor`.
_FIRST = ("input.0", "input.tensor", "input.self", "input.input")


@functools.lru_cache(maxsize=4096)
def api_of(op: str) -> str:
    """The bare name of an op: "torch.Tensor.add_" and "torch.ops.aten.add.Tensor" are both add."""
    parts = op.split(".")
    if op.startswith("torch.ops.") and len(parts) >= 4:
        name = parts[3]
    elif parts[-1] in ("__get__", "__set__") and len(parts) > 1:
        name = parts[-2]
    else:
        name = parts[-1]
    if name.startswith("_foreach_"):
        name = name.removeprefix("_foreach_")
    if name in _KIND or name.endswith("__"):
        return name
    return name.removesuffix("_")


def kind_of(call: Call) -> Kind:
    """What kind of operation a forward call is."""
    kind = _named(call)
    if kind == "dropout" and _is_off(call):
        return "exact"
    if kind == "product" and _argument(call, "dropout_p") not in (None, 0, 0.0):
        return "random"
    if kind == "exact" and _changes_dtype(call):
        return "conversion"
    if kind in _ROUNDING and _is_integer(call):
        return "exact"
    scaled = api_of(call.op) in ("add", "sub", "subtract", "rsub")
    if scaled and kind == "elementwise" and _argument(call, "alpha", 2) not in (None, 1):
        return "compound"
    return kind


def _named(call: Call) -> Kind:
    if call.name.startswith("Module."):
        return _MODULE_KIND.get(call.op.rpartition(".")[2], "general")
    name = api_of(call.op)
    short = name.removeprefix("fft_").removeprefix("linalg_")
    return _KIND.get(name) or _KIND.get(short) or "general"


def backward_kind(call: Call) -> Kind:
    """How the gradients of a forward call come about."""
    kind = kind_of(call)
    if kind in ("exact", "conversion"):
        name = call.op.rpartition(".")[2] if call.name.startswith("Module.") else api_of(call.op)
        return "scatter" if name in _SUMS_IN_BACKWARD else "reduction"
    if kind == "selection":
        return "scatter"
    return kind


def _argument(call: Call, name: str, position: int | None = None) -> object:
    if name in call.kwargs:
        value: object = call.kwargs[name]
        return value
    if position is not None and len(call.args) > position:
        value = call.args[position]
        return value
    return None


def _is_off(call: Call) -> bool:
    """Dropout in evaluation, or with p = 0, is the identity."""
    return (
        _argument(call, "training", 2) is False
        or _argument(call, "train", 2) is False
        or _argument(call, "p", 1) == 0
        or any(note == "eval" for note in call.notes)
    )


def _is_integer(call: Call) -> bool:
    """Whether no floating-point number comes in or goes out."""
    return bool(call.tensors) and not any(
        record.dtype.startswith(("float", "bfloat", "complex")) for record in call.tensors
    )


def _changes_dtype(call: Call) -> bool:
    if not any(
        isinstance(value, Special) and value.kind == "dtype" for value in call.kwargs.values()
    ):
        return False
    inputs = {record.dtype for record in call.tensors if record.role == "input"}
    return not inputs >= {record.dtype for record in call.tensors if record.role == "output"}


def is_product(op: str) -> bool:
    """Whether an operation, by its name, is a matrix product, or is made of such."""
    return _KIND.get(api_of(op)) == "product"
