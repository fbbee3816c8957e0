"""The birth of NaN and infinities on one side, and those that both sides have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trust.arguments import numbers
from trust.harness import ALL_KEEPS, Case
from trust.kernels import one_value, other_kernels, wrong_kernel
from trust.programs import Attention, calling, token_loss, tokens, training

FAMILY = "NaN and infinity"
LEVELS = (*ALL_KEEPS, "tensors L2")
NAN, INF = float("nan"), float("inf")


def _born(
    name: str,
    call: Callable[[Tensor, bool], object],
    at: str,
    cause: str = "argument|data|result",
    quick: bool = False,
    grad: bool = False,
) -> Case:
    def program(is_actual: bool) -> None:
        x = numbers(4, 6)
        if grad:
            x.requires_grad_()
        y = call(x, is_actual)
        if grad:
            assert isinstance(y, Tensor)
            y.sum().backward()

    return Case(f"nonfinite-{name}", FAMILY, calling(program), at=at, cause=cause, quick=quick)


def _kernel(
    name: str, op: str, value: float, at: str, nth: int = 0, quick: bool = False, **both: Any
) -> Case:
    return Case(
        f"nonfinite-{name}",
        FAMILY,
        training(both, inside=lambda: wrong_kernel(op, one_value(value), nth=nth)),
        at=at,
        cause="result",
        kind="nonfinite",
        step=0,
        quick=quick,
    )


def _masked_row(fill: float) -> Callable[[bool], object]:
    """A row of softmax in which everything is masked: NaN on both sides."""

    def program(is_actual: bool) -> None:
        scores = numbers(4, 6)
        scores[1] = fill
        (scores.softmax(-1) + numbers(4, 6, seed=3)).sum(0)

    return program


def _half(is_actual: bool) -> None:
    """A square that overflows in float16 on one side, and is scaled before on the other."""
    x = numbers(4, 6).mul(300).half()
    (x / (1 if is_actual else 64)).square().float().sum()


TEXT = {"net": Attention, "data": tokens, "loss": token_loss}

CASES = [
    _kernel("nan-in-gelu", "gelu", NAN, "Functional.gelu.0.forward", quick=True),
    _kernel("inf-in-linear", "addmm", INF, "Functional.linear.1.forward", nth=1),
    _kernel("nan-in-norm", "native_layer_norm", NAN, "Functional.layer_norm.0.forward"),
    _kernel("nan-in-gradient", "gelu_backward", NAN, "Functional.gelu.0.backward", quick=True),
    _kernel(
        "inf-in-gradient", "native_layer_norm_backward", INF, "Functional.layer_norm.0.backward"
    ),
    _kernel(
        "nan-in-attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        NAN,
        "Functional.scaled_dot_product_attention.0.forward",
        **TEXT,
    ),
    _born(
        "log-of-zero",
        lambda x, wrong: torch.log(x.abs() * (0 if wrong else 1) + 0.0).exp(),
        "Tensor.mul.0.forward|Torch.log.0.forward",
        quick=True,
    ),
    _born(
        "root-of-negative",
        lambda x, wrong: torch.sqrt(x.abs() - (0.5 if wrong else -0.5)).tanh(),
        "Tensor.sub.0.forward|Torch.sqrt.0.forward",
    ),
    _born(
        "division-by-zero",
        lambda x, wrong: (x / (0.0 if wrong else 2.0)).sum(),
        "Tensor.div.0.forward",
    ),
    _born(
        "overflow-of-exp",
        lambda x, wrong: (x * (200.0 if wrong else 2.0)).exp().sum(),
        "Tensor.mul.0.forward|Tensor.exp.0.forward",
    ),
    _born(
        "gradient-of-root-at-zero",
        lambda x, wrong: torch.sqrt(F.relu(x) + (0.0 if wrong else 1e-6)),
        grad=True,
        at="Tensor.add.0.forward|Torch.sqrt.0.backward",
    ),
    Case(
        "nonfinite-overflow-of-half",
        FAMILY,
        calling(_half),
        cause="argument|result",
        at="Tensor.div.0.forward|Tensor.square.0.forward",
    ),
    _born(
        "infinite-mask-of-all",
        lambda x, wrong: (
            x.masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(0 if wrong else 9), -INF)
            .softmax(-1)
            .sum()
        ),
        "Tensor.triu.0.forward",
    ),
    # healthy
    Case(
        "nonfinite-masked-row-on-both-sides",
        FAMILY,
        calling(_masked_row(-INF)),
        runs=LEVELS,
        quick=True,
    ),
    Case(
        "nonfinite-infinite-mask-on-both-sides",
        FAMILY,
        training(
            {"net": lambda: Attention(True), "data": tokens, "loss": token_loss, "steps": 2},
            inside=other_kernels,
        ),
        runs=LEVELS,
    ),
    Case(
        "nonfinite-nan-loss-on-both-sides",
        FAMILY,
        training({"edit_loss": lambda loss: loss * NAN, "steps": 2}, inside=other_kernels),
        runs=LEVELS,
    ),
    Case(
        "nonfinite-nan-kernel-on-both-sides",
        FAMILY,
        training({"inside": lambda: wrong_kernel("gelu", one_value(NAN))}),
        runs=LEVELS,
    ),
    Case(
        "nonfinite-infinite-initial-value",
        FAMILY,
        calling(lambda is_actual: torch.full((3,), math.inf).minimum(numbers(3)).sum()),
        runs=LEVELS,
    ),
]
