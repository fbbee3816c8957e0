"""Arguments for the operators of torch that write to some of them, made from their schemas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Given = dict[str, Any]
# Tensors that fit many operators; the first that an operator takes are its arguments.
FLAVOURS: dict[str, Callable[[], torch.Tensor]] = {
    "signed": lambda: torch.tensor([[-1.5, 0.25, 0.75], [0.5, -2.5, 1.25], [3.5, 0.125, -0.5]]),
    "square": lambda: torch.full((3, 3), 0.5) + torch.eye(3),
    "row": lambda: torch.tensor([0.25, 0.5, 0.75]),
    "whole": lambda: torch.tensor([[1, 2, 0], [0, 1, 2], [2, 0, 1]]),
    "truth": lambda: torch.eye(3) > 0,
    "complex": lambda: torch.eye(3) + 0.5j,
    "double": lambda: torch.full((3, 3), 0.5, dtype=torch.float64),
    "batch": lambda: torch.full((3, 3, 3), 0.5),
    "image": lambda: torch.linspace(0, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6),
    "number": lambda: torch.tensor(0.5),
    "volume": lambda: torch.linspace(0, 1, 3 * 6 * 6 * 6).reshape(1, 3, 6, 6, 6),
    "line": lambda: torch.linspace(0, 1, 2 * 3 * 6).reshape(2, 3, 6),
}
# What arguments of these names must be, whatever the others are.
_NAMED: dict[str, Callable[[], Any]] = {
    "index": lambda: torch.tensor([0, 1, 2]),
    "indices": lambda: torch.tensor([0, 1, 2]),
    "mask": lambda: torch.eye(3) > 0,
    "condition": lambda: torch.eye(3) > 0,
    "batch1": FLAVOURS["batch"],
    "batch2": FLAVOURS["batch"],
    "mat1": FLAVOURS["square"],
    "mat2": FLAVOURS["square"],
    "mat": FLAVOURS["square"],
    "vec": FLAVOURS["row"],
    "vec1": FLAVOURS["row"],
    "vec2": FLAVOURS["row"],
    "found_inf": lambda: torch.zeros(1),
    "inv_scale": lambda: torch.full((1,), 0.5),
    "growth_tracker": lambda: torch.zeros(1, dtype=torch.int32),
    "state_steps": lambda: [torch.tensor(1.0)],
    "dim": lambda: 0,
    "dim0": lambda: 0,
    "dim1": lambda: 1,
    "upper": lambda: True,
}
# And those of single operators.
_IN: dict[str, dict[str, Callable[[], Any]]] = {
    "aten::scatter_.reduce": {"reduce": lambda: "add"},
    "aten::scatter_.value_reduce": {"reduce": lambda: "multiply"},
    "aten::index_reduce_": {"reduce": lambda: "prod"},
    "aten::clamp_": {"min": lambda: 0.0},
    "aten::clip_": {"max": lambda: 0.0},
    "aten::clamp_.Tensor": {"min": FLAVOURS["square"]},
    "aten::clip_.Tensor": {"max": FLAVOURS["square"]},
    "aten::random_.to": {"to": lambda: 9},
    "aten::masked_fill_.Tensor": {"value": lambda: torch.tensor(4.0)},
    "aten::index_fill_.int_Tensor": {"value": lambda: torch.tensor(4.0)},
    "aten::bernoulli_.Tensor": {"p": FLAVOURS["double"]},
    "aten::squeeze_.dims": {"dim": lambda: [0]},
    "aten::_foreach_addcdiv_.Tensor": {"scalars": lambda: torch.ones(1)},
    "aten::_foreach_addcmul_.Tensor": {"scalars": lambda: torch.ones(1)},
    "aten::mvlgamma_": {"self": lambda: torch.full((3,), 5.0)},
    "aten::_amp_update_scale_": {"self": lambda: torch.ones(1)},
    "aten::_fused_adam_": {"max_exp_avg_sqs": list},
    "aten::_fused_adamw_": {"max_exp_avg_sqs": list},
    "aten::_fused_adam_.tensor_lr": {
        "lr": lambda: torch.tensor(0.1),
        "max_exp_avg_sqs": list,
    },
    "aten::_fused_adamw_.tensor_lr": {
        "lr": lambda: torch.tensor(0.1),
        "max_exp_avg_sqs": list,
    },
}


class Written(NamedTuple):
    """A call of an operator, and the tensors that it is going to write to."""

    call: Callable[[], object]
    tensors: list[torch.Tensor]


def schemas() -> Iterator[Any]:
    """Those of the operators of torch that write to some argument."""
    for schema in torch._C._jit_get_all_schemas():
        writes = schema.name.startswith("aten::") and any(map(is_written, schema.arguments))
        if writes and torch._C._dispatch_has_kernel(full_name(schema)):
            yield schema


def full_name(schema: Any) -> str:
    """As `aten::add_.Tensor`."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def is_written(argument: Any) -> bool:
    """Whether calls write to it."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_by(schema: Any) -> Written | None:
    """A call that works, on tensors of its own; None where none was found."""
    operator = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
    overload = getattr(operator, schema.overload_name or "default")
    written = [argument for argument in schema.arguments if is_written(argument)]
    for flavour, scalar in itertools.product(FLAVOURS.values(), (2, 0.5)):
        given = _arguments(schema, flavour, scalar)
        outs = [argument for argument in written if argument.kwarg_only]
        try:
            if outs:
                _fit(overload, given, outs)
            tried = {name: _copied(value) for name, value in given.items()}
            overload(**tried)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        tensors = [each for argument in written for each in _tensors(given[argument.name])]
        aliases = {argument.name: _aliases(given[argument.name]) for argument in written}
        return Written(functools.partial(overload, **{**given, **aliases}), tensors)
    return None


def _arguments(schema: Any, flavour: Callable[[], torch.Tensor], scalar: float) -> Given:
    given = {argument.name: _made(argument, flavour, scalar) for argument in schema.arguments}
    return given | {name: make() for name, make in _IN.get(full_name(schema), {}).items()}


def _fit(overload: Any, given: Given, outs: list[Any]) -> None:
    """Give `out` the shape that a call makes of it: another is resized, and leaves its alias."""
    last: Exception | None = None
    dtypes = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64)
    for dtype, length in itertools.product(dtypes, (1, 3)):
        for argument in outs:
            made = [torch.empty(0, dtype=dtype) for _ in range(length)]
            given[argument.name] = made if "List" in str(argument.type) else made[0]
        try:
            overload(**given)
        except (RuntimeError, TypeError, IndexError) as error:
            last = error
        else:
            for argument in outs:
                for tensor in _tensors(given[argument.name]):
                    tensor.fill_(7)
            return
    assert last is not None
    raise last


def _made(argument: Any, flavour: Callable[[], torch.Tensor], scalar: float) -> Any:
    kind = str(argument.type)
    if argument.name in _NAMED and "Optional" not in kind and "List[int]" not in kind:
        return _NAMED[argument.name]()
    if argument.has_default_value():
        return argument.default_value
    plain: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: _other(flavour()) if is_written(argument) else flavour(),
        "List[Tensor]": lambda: [_other(flavour()) if is_written(argument) else flavour()],
        "List[Optional[Tensor]]": lambda: [torch.tensor([0, 1])],
        "number": lambda: scalar,
        "List[number]": lambda: [scalar],
        "float": lambda: 0.5,
        "int": lambda: 1,
        "bool": lambda: False,
        "List[int]": lambda: [3, 3],
        "List[float]": lambda: [0.5],
        "List[bool]": lambda: [True, True, True],
        "str": lambda: "sum",
    }
    return plain[kind]() if kind in plain else None


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """What is written to differs from what is read: `copy_` must change it."""
    return tensor * 1.5 if tensor.is_floating_point() or tensor.is_complex() else ~tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list) else [value]


def _aliases(value: Any) -> Any:
    """The same memory by a tensor whose version is its own."""
    return [each.data for each in value] if isinstance(value, list) else value.data


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
