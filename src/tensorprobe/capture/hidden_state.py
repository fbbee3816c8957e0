"""State that a call reads or writes beside its arguments' versions: random numbers, statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tensorprobe.capture.naming import ApiName

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
_RUNNING_STATISTICS = {"batch_norm": frozenset(["1", "2", "running_mean", "running_var"])}
_NOTHING: frozenset[str] = frozenset()


def may_draw(api: ApiName) -> bool:
    """Whether calls of this API can take random numbers from a generator."""
    return api.api.rpartition(".")[2] in _MAY_DRAW


def generator_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator a random call draws from; None where its device does not show it."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.Generator):
            return value
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    device = torch.device(kwargs.get("device") or device or torch.get_default_device())
    if device.type == "cpu":
        return torch.default_generator
    try:
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator: torch.Generator = module.default_generators[index]
    except (AttributeError, IndexError, RuntimeError):  # meta, or a device without generators
        return None
    return generator


def silently_written(api: ApiName, args: Any, kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that a call is about to write to without moving their version."""
    names = _RUNNING_STATISTICS.get(api.api)
    if names is None:
        return _NOTHING
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    return names if training else _NOTHING


def written_arguments(schema: Any) -> frozenset[str]:
    """The arguments that an operator writes to: below autograd no version has moved yet."""
    names = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names += [str(i), argument.name]
    if schema.name in _WRITES_STATISTICS:
        names += ["3", "4"]
    return frozenset(names)


# The schema does not say that these update their running statistics.
_WRITES_STATISTICS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
)
