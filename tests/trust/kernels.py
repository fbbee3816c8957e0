"""Kernels that stand in for torch's own, below the recorder: wrong ones and healthy ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Alter = Callable[[Tensor], Tensor]

# What another device computes in another order: here in float64, rounded once.
OTHER_ORDER = ("mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "native_layer_norm")


@contextlib.contextmanager
def wrong_kernel(
    op: str,
    alter: Alter,
    *,
    nth: int = 0,
    output: int = 0,
    every: bool = False,
    device: str = "CPU",
) -> Iterator[None]:
    """The `nth` run of an ATen kernel of a device gives `alter` of its result; `every`: each."""
    original = torch.library.get_kernel(f"aten::{op}", device)
    runs = 0

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        with torch._C.DisableTorchFunction():
            result = original.call_boxed(keyset, *args, **kwargs)
            return _altered(result, alter, output) if every or runs == nth + 1 else result

    with _in_place_of(op, kernel, device):
        yield
    assert runs > nth, f"{op} ran {runs} times"


@contextlib.contextmanager
def dirty_memory(value: float) -> Iterator[None]:
    """What `torch.empty` gives holds this value, as memory that was in use before would."""
    op = "empty.memory_format"
    original = torch.library.get_kernel(f"aten::{op}", "CPU")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            made = original.call_boxed(keyset, *args, **kwargs)
            return made.fill_(value) if made.is_floating_point() else made

    with _in_place_of(op, kernel):
        yield


@contextlib.contextmanager
def truncating_casts() -> Iterator[None]:
    """Casts to a narrower dtype cut bits off where they should round to the nearest."""

    def kernel(keyset: Any, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            if not isinstance(x, Tensor):  # a plain number among the operands
                return torch.full((), x, dtype=dtype)
            made = torch.empty(x.shape, dtype=dtype or x.dtype).copy_(x)
            if made.element_size() >= x.element_size() or not made.is_floating_point():
                return made
            bits = made.view({1: torch.int8, 2: torch.int16}[made.element_size()]).numpy()
            bits[(made.double().abs() > x.double().abs()).numpy()] -= 1
            return made

    with _in_place_of("_to_copy", kernel):
        yield


@contextlib.contextmanager
def other_kernels() -> Iterator[None]:
    """Matmuls, softmaxes and norms as another device computes them: right, with other roundings."""
    with contextlib.ExitStack() as stack:
        for op in OTHER_ORDER:
            stack.enter_context(_in_place_of(op, _in_float64(op)))
        yield


def _in_float64(op: str) -> Callable[..., Any]:
    original = torch.library.get_kernel(f"aten::{op}", "CPU")

    def widen(value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.float64) if is_narrow else value

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            narrow = original.call_boxed(keyset, *args, **kwargs)
            wide = original.call_boxed(
                keyset, *map(widen, args), **{k: widen(v) for k, v in kwargs.items()}
            )
            if isinstance(wide, Tensor):
                return wide.to(narrow.dtype)
            return tuple(w.to(n.dtype) for w, n in zip(wide, narrow, strict=True))

    return kernel


@contextlib.contextmanager
def _in_place_of(op: str, kernel: Callable[..., Any], device: str = "CPU") -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(op, kernel, device, with_keyset=True)
        yield
    finally:
        library._destroy()


def _altered(result: Any, alter: Alter, output: int) -> Any:
    if isinstance(result, Tensor):
        return _like(alter(result.clone()), result)
    parts = list(result)
    parts[output] = _like(alter(parts[output].clone()), parts[output])
    return tuple(parts)


def _like(new: Tensor, old: Tensor) -> Tensor:
    return torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device).copy_(
        new
    )


# Ways to be wrong


def gain(factor: float) -> Alter:
    return lambda x: x * factor


def add(term: float) -> Alter:
    return lambda x: x + term


def one_row(change: Alter) -> Alter:
    def alter(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).clone()
        at = len(rows) // 3
        rows[at] = change(rows[at])
        return rows.reshape(x.shape)

    return alter


def swapped_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).clone()
    rows[[0, 1]] = rows[[1, 0]]
    return rows.reshape(x.shape)


def one_value(value: float) -> Alter:
    def alter(x: Tensor) -> Tensor:
        flat = x.reshape(-1).clone()
        flat[flat.numel() // 2] = value
        return flat.reshape(x.shape)

    return alter


def through(dtype: torch.dtype) -> Alter:
    return lambda x: x.to(dtype).to(x.dtype)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def off_by_roundings(n: float) -> Alter:
    """Each number too large by `n` roundings, all with the same sign."""

    def alter(x: Tensor) -> Tensor:
        unit = torch.finfo(x.dtype).eps / 2
        return (x.double() * (1 + n * unit)).to(x.dtype)

    return alter
