"""State that a call reads or writes beside its arguments' versions: random numbers, statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from tensorprobe.devices import device_layer
from tensorprobe.follow.naming import ApiName, writes_in_place
from tensorprobe.torch_versions import default_device

# By the last part of their name. Of these only the calls that move the generator are random: an
# attention without dropout, an LSTM of one layer are not.
_MAY_DRAW_NAMES = """
    rand randn randint randperm normal uniform rand_like randn_like randint_like
    normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli bernoulli_
    multinomial poisson binomial _standard_gamma _sample_dirichlet gumbel_softmax
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ native_dropout
    feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_
    scaled_dot_product_attention multi_head_attention_forward
    fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices
    lstm gru rnn_tanh rnn_relu svd_lowrank pca_lowrank
    trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_
    sparse_
"""
_MAY_DRAW = frozenset(_MAY_DRAW_NAMES.split())
# These update running statistics without moving their version and no schema says so. Where the
# sixth argument is `training` they do it only then.
_BY_NAME = ("running_mean", "running_var")
WRITES_STATISTICS = {
    "torch.nn.functional.batch_norm": frozenset(["1", "2", *_BY_NAME]),
    "torch.nn.functional.instance_norm": frozenset(["1", "2", *_BY_NAME]),
    "torch.batch_norm": frozenset(["3", "4", *_BY_NAME]),
    "torch.instance_norm": frozenset(["3", "4", *_BY_NAME]),
    "torch.native_batch_norm": frozenset(["3", "4", *_BY_NAME]),
    "torch.batch_norm_update_stats": frozenset(["1", "2", *_BY_NAME]),
    # what SyncBatchNorm calls
    "torch.batch_norm_gather_stats": frozenset(["3", "4", *_BY_NAME]),
    "torch.batch_norm_gather_stats_with_counts": frozenset(["3", "4", *_BY_NAME]),
}
_ALWAYS_TRAIN = ("update_stats", "gather_stats", "gather_stats_with_counts")
_NOTHING: frozenset[str] = frozenset()
OUT = frozenset(["out"])
# Of calls that are named after what they write to, the argument that is it.
_FIRST = frozenset(["0", "self", "input", "tensor"])
_CALLED_BY_SCHEMA = ("Tensor", "Torch", "Functional", "VF", "Aten", "NPU", "Ops")
# Methods by which a tensor gives its memory to something that is not torch, and may write to it.
_LENDS = ("numpy", "__array__", "__dlpack__")
# Their schemas say that they write; what they change is no number.
_WRITES_NO_CONTENT = ("record_stream", "requires_grad_", "retain_grad", "set_data")

Draws: TypeAlias = tuple[Callable[[], torch.Tensor], torch.Tensor]


def may_draw(api: ApiName) -> bool:
    """Whether calls of this API can take random numbers from a generator."""
    return api.api.rpartition(".")[2] in _MAY_DRAW


def random_state(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Draws | None:
    """The state of the generator a random call draws from, now and when read again.

    None where its device does not show it.
    """
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.Generator):
            return value.get_state, value.get_state()
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    device = torch.device(kwargs.get("device") or device or default_device())
    row = device_layer(device)
    if not row.is_available():  # meta
        return None
    read = partial(row.rng_state, device.index)
    try:
        return read, read()
    except (AttributeError, RuntimeError, TypeError):  # a device without generators, or with one
        return None


def silently_written(api: ApiName, args: Any, kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that a call is about to write to without moving their version."""
    names = WRITES_STATISTICS.get(api.op)
    if names is None:
        return _NOTHING
    if api.op.endswith(_ALWAYS_TRAIN):
        return names
    training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    return names if training else _NOTHING


def lends(api: ApiName) -> bool:
    """Whether calls of this API give the memory of a tensor away, to numpy for one."""
    return api.prefix == "Tensor" and api.api in _LENDS


def may_write(api: ApiName) -> bool:
    """Whether calls of this API may write to what they are given, `out` apart, or let others."""
    if api.op in WRITES_STATISTICS or lends(api) or writes_in_place(api):
        return True
    return any(map(str.isdigit, declared_writes(api)))  # `out` has no position


@functools.lru_cache(maxsize=4096)
def declared_writes(api: ApiName) -> frozenset[str]:
    """The arguments that calls of this API write to, by position and by name, as schemas say; but
    for `out`, which most functions have and few calls are given.

    They are read again after each call. A version says less: under a dispatch mode of the program
    `_foreach_add_` moves none, `_fused_adamw_` and GradScaler's `unscale_` never do.
    """
    if api.prefix not in _CALLED_BY_SCHEMA:
        return _NOTHING
    namespace, name, overload = _operator_of(api)
    if name in _WRITES_NO_CONTENT:
        return _NOTHING
    names: set[str] = set()
    for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
        of_python_lists = not torch._C._dispatch_has_kernel(_full_name(schema))  # aten::sort
        if overload in (None, schema.overload_name or "default") and not of_python_lists:
            names |= written_arguments(schema) or writes_unsaid(schema)
    if writes_in_place(api) and not name.endswith(".__set__"):
        names |= _FIRST
    return frozenset(names - OUT)


def _full_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def _operator_of(api: ApiName) -> tuple[str, str, str | None]:
    """The namespace, the name and, where it is known, the overload of what an API calls."""
    if api.op.startswith("torch.ops."):
        namespace, name, *overload = api.op.removeprefix("torch.ops.").split(".", 2)
        return namespace, name, overload[0] if overload else None
    return ("npu" if api.prefix == "NPU" else "aten"), api.op.rpartition(".")[2], None


def written_arguments(schema: Any) -> frozenset[str]:
    """The arguments that an operator writes to: below autograd no version has moved yet."""
    names = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names += [argument.name] if argument.kwarg_only else [str(i), argument.name]
    names += _STATISTICS_OPERATORS.get(schema.name, ())
    return frozenset(names)


def writes_unsaid(schema: Any) -> frozenset[str]:
    """The arguments of an operator that writes in place, or to `out`, and does not say to which.

    Torch's own do say it (aten::__lshift__ writes to none).
    """
    names = [argument.name for argument in schema.arguments]
    writes = schema.name.endswith("_") or "out" in names
    if not writes or schema.name.startswith("aten::"):
        return _NOTHING
    return frozenset([*names, *(str(i) for i in range(len(names)))])


# The schema does not say that these update their running statistics.
_STATISTICS_OPERATORS = {
    "aten::native_batch_norm": ("3", "4"),
    "aten::cudnn_batch_norm": ("3", "4"),
    "aten::miopen_batch_norm": ("3", "4"),
    "aten::batch_norm_update_stats": ("1", "2"),
    "aten::batch_norm_gather_stats": ("3", "4"),
    "aten::batch_norm_gather_stats_with_counts": ("3", "4"),
}
