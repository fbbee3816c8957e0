"""State that a call reads or writes beside its arguments' versions: random numbers, statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from tensorprobe.capture.naming import ApiName
from tensorprobe.devices import device_layer

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
# These update running statistics without moving their version, when the sixth argument says so.
_BY_NAME = ("running_mean", "running_var")
WRITES_STATISTICS = {
    "torch.nn.functional.batch_norm": frozenset(["1", "2", *_BY_NAME]),
    "torch.nn.functional.instance_norm": frozenset(["1", "2", *_BY_NAME]),
    "torch.batch_norm": frozenset(["3", "4", *_BY_NAME]),
    "torch.instance_norm": frozenset(["3", "4", *_BY_NAME]),
    "torch.native_batch_norm": frozenset(["3", "4", *_BY_NAME]),
}
_NOTHING: frozenset[str] = frozenset()

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
    device = torch.device(kwargs.get("device") or device or torch.get_default_device())
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
    training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    return names if training else _NOTHING


def writes_in_place(api: ApiName) -> bool:
    """Whether calls of this API write to a tensor they are given, as its name says."""
    name = api.api
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith(("_", ".__set__")) or name == "copy"


def written_arguments(schema: Any) -> frozenset[str]:
    """The arguments that an operator writes to: below autograd no version has moved yet."""
    names = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names += [str(i), argument.name]
    if schema.name in _STATISTICS_OPERATORS:
        names += ["3", "4"]
    return frozenset(names)


# The schema does not say that these update their running statistics.
_STATISTICS_OPERATORS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
)
