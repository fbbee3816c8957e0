"""Faults of the size of a rounding, and healthy kernels that round otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.arguments import numbers
from trust.harness import Case, Start
from trust.kernels import (
    Alter,
    gain,
    off_by_roundings,
    one_row,
    other_kernels,
    swapped_rows,
    through,
    truncating_casts,
    wrong_kernel,
)

FAMILY = "below rounding"
TENSORS = ("tensors mix",)
BOTH = ("tensors mix", "stats mix")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Wide(nn.Module):
    """Large enough that a mean error of a part of a rounding shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.second = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x)))).softmax(-1)


def _run(
    dtype: torch.dtype,
    wrong: Callable[[], Any] | None = None,
    *,
    others: bool = False,
    grad: bool = True,
) -> Any:
    def program(start: Start, is_actual: bool) -> None:
        torch.manual_seed(0)
        net = Wide().to(dtype)
        x = numbers(128, 64).to(dtype)
        with contextlib.ExitStack() as stack:
            if is_actual and others:
                stack.enter_context(other_kernels())
            if is_actual and wrong is not None:
                stack.enter_context(wrong())
            stack.enter_context(start())
            y = net(x)
            if grad:
                y.float().square().mean().backward()

    return program


def _fault(
    name: str,
    dtype: torch.dtype,
    op: str,
    alter: Alter,
    at: str,
    nth: int = 0,
    runs: tuple[str, ...] = TENSORS,
    quick: bool = False,
) -> Case:
    def wrong() -> contextlib.AbstractContextManager[None]:
        return wrong_kernel(op, alter, nth=nth)

    return Case(
        f"rounding-{name}",
        FAMILY,
        _run(dtype, wrong),
        at=at,
        cause="result",
        runs=runs,
        quick=quick,
    )


def truncated(x: Tensor) -> Tensor:
    """Every second number one neighbour closer to zero, as a kernel that truncates gives."""
    kinds = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}
    bits = x.contiguous().view(kinds[x.dtype])
    lower = torch.arange(x.numel()).reshape(x.shape) % 2 == 0
    return torch.where(lower & (x != 0), bits - 1, bits).view(x.dtype)


class Few(nn.Module):
    """Of 128 numbers, whose rows change places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Heads(nn.Module):
    """Attention, whose result fills its memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 16, 12, 8).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(4, 16, 32))


def _places(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], op: str, alter: Alter, at: str
) -> Case:
    def program(start: Start, is_actual: bool) -> None:
        torch.manual_seed(0)
        net, x = make(), numbers(*shape)
        with wrong_kernel(op, alter) if is_actual else contextlib.nullcontext(), start():
            net(x).square().mean().backward()

    return Case(f"places-{name}", FAMILY, program, at=at, cause="result", runs=BOTH, quick=True)


def one_head(factor: float) -> Alter:
    def alter(x: Tensor) -> Tensor:
        x[:, 1] *= factor
        return x

    return alter


def _reordered(name: str, alter: Alter) -> list[Case]:
    """Rows in other places, of few numbers and of many."""
    return [
        _places(f"{name}-of-few", Few, (8, 16), "addmm", alter, LINEAR0),
        _places(f"{name}-of-many", Wide, (128, 64), "addmm", alter, LINEAR0),
    ]


def _cast(dtype: torch.dtype) -> Any:
    def program(start: Start, is_actual: bool) -> None:
        x = numbers(64, 64)
        with truncating_casts() if is_actual else contextlib.nullcontext(), start():
            (x.to(dtype).float() * 2).sum()

    return program


def _cast_healthy(dtype: torch.dtype) -> Any:
    def program(start: Start, is_actual: bool) -> None:
        x = numbers(64, 64)
        with start():
            y = x.to(dtype) if is_actual else torch.empty(64, 64, dtype=dtype).copy_(x)
            (y.float() * 2).sum()

    return program


LINEAR0, LINEAR1 = "Functional.linear.0.forward", "Functional.linear.1.forward"

CASES = [
    _fault("linear-off-by-three", F32, "addmm", off_by_roundings(3), LINEAR1, 1, BOTH, quick=True),
    _fault("linear-off-by-three-first", F32, "addmm", off_by_roundings(3), LINEAR0, 0, BOTH),
    _fault(
        "norm-off-by-four",
        F32,
        "native_layer_norm",
        off_by_roundings(4),
        "Functional.layer_norm.0.forward",
        runs=BOTH,
    ),
    _fault(
        "gelu-off-by-three",
        F32,
        "gelu",
        off_by_roundings(3),
        "Functional.gelu.0.forward",
        runs=BOTH,
    ),
    _fault("row-of-linear-off-by-fifty", F32, "addmm", one_row(off_by_roundings(50)), LINEAR1, 1),
    _fault(
        "bf16-linear-off-by-one", BF16, "addmm", off_by_roundings(2), LINEAR1, 1, BOTH, quick=True
    ),
    _fault("bf16-linear-one-percent", BF16, "addmm", gain(1.01), LINEAR1, 1, BOTH),
    _fault("bf16-linear-truncated", BF16, "addmm", truncated, LINEAR1, 1),
    _fault("bf16-gelu-truncated", BF16, "gelu", truncated, "Functional.gelu.0.forward"),
    _fault(
        "bf16-norm-one-percent",
        BF16,
        "native_layer_norm",
        gain(1.01),
        "Functional.layer_norm.0.forward",
        runs=BOTH,
    ),
    _fault("bf16-row-of-linear-one-percent", BF16, "addmm", one_row(gain(1.02)), LINEAR1, 1),
    _fault("f16-linear-off-by-two", F16, "addmm", off_by_roundings(4), LINEAR1, 1, BOTH),
    _fault("f16-linear-truncated", F16, "addmm", truncated, LINEAR1, 1),
    _fault(
        "gradient-off-by-four",
        F32,
        "gelu_backward",
        off_by_roundings(4),
        "Functional.gelu.0.backward",
        runs=BOTH,
    ),
    _fault("linear-through-tf32", F32, "addmm", through(F16), LINEAR1, 1, BOTH),
    Case(
        "rounding-cast-to-bf16-truncates",
        FAMILY,
        _cast(BF16),
        at="Tensor.to.0.forward",
        cause="result",
        runs=BOTH,
        quick=True,
    ),
    Case(
        "rounding-cast-to-f16-truncates",
        FAMILY,
        _cast(F16),
        at="Tensor.to.0.forward",
        cause="result",
        runs=BOTH,
    ),
    Case(
        "rounding-cast-to-f8-truncates",
        FAMILY,
        _cast(torch.float8_e4m3fn),
        at="Tensor.to.0.forward",
        cause="result",
        runs=BOTH,
        quick=True,
    ),
    Case(
        "rounding-cast-to-f8-e5-truncates",
        FAMILY,
        _cast(torch.float8_e5m2),
        at="Tensor.to.0.forward",
        cause="result",
        runs=BOTH,
    ),
    *_reordered("rows-reversed", lambda x: x.flip(0)),
    *_reordered("rows-shifted", lambda x: x.roll(1, 0)),
    *_reordered("rows-swapped", swapped_rows),
    *_reordered("columns-shifted", lambda x: x.roll(1, 1)),
    _places("times-1.0001", Wide, (128, 64), "addmm", gain(1.0001), LINEAR0),
    _places("one-row-times-1.01", Wide, (128, 64), "addmm", one_row(gain(1.01)), LINEAR0),
    _places(
        "one-head-times-1.01",
        Heads,
        (4, 16, 32),
        "_scaled_dot_product_flash_attention_for_cpu",
        one_head(1.01),
        "Functional.scaled_dot_product_attention.0.forward",
    ),
    # healthy
    *(
        Case(
            f"rounding-healthy-{name}",
            FAMILY,
            _run(dtype, others=True),
            runs=("tensors mix", "stats mix", "digest mix", "tensors L2", "tensors L0"),
            quick=name == "bf16",
        )
        for name, dtype in (("f32", F32), ("bf16", BF16), ("f16", F16))
    ),
    *(
        Case(f"rounding-healthy-cast-{name}", FAMILY, _cast_healthy(dtype), runs=BOTH)
        for name, dtype in (("bf16", BF16), ("f8", torch.float8_e4m3fn))
    ),
]
