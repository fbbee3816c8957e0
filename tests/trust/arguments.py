"""Faults of one argument, and arguments that make no difference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import ALL_KEEPS, Case
from trust.kernels import other_kernels
from trust.programs import Attention, Mlp, calling, inferring, token_loss, tokens, training

FAMILY = "arguments"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")
LEVELS = (*ALL_KEEPS, "tensors L1", "tensors L2", "stats L2", "digest L2")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _call(
    name: str,
    call: Callable[[Tensor, Any], object],
    values: tuple[Any, Any],
    at: str,
    *,
    shape: tuple[int, ...] = (4, 6),
    make: Callable[..., Tensor] = numbers,
    grad: bool = False,
    runs: tuple[str, ...] = LEVELS,
    quick: bool = False,
) -> Case:
    """A call on a tensor with one of two values, the first of them on the actual side."""

    def program(is_actual: bool) -> None:
        x = make(*shape)
        if grad:
            x.requires_grad_()
        y = call(x, values[0] if is_actual else values[1])
        assert isinstance(y, Tensor)
        if grad:
            y.sum().backward()
        else:
            (y.abs() if y.is_complex() else y.float()).cumsum(-1).mean()

    # at L2 another mode can be another operator
    aten, cause = "Aten.*", "argument|structure"
    return Case(
        f"argument-{name}",
        FAMILY,
        calling(program),
        at={"*": at, "L2": aten},
        cause=cause,
        runs=runs,
        quick=quick,
    )


class Dropping(Mlp):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(F.gelu(self.norm(self.first(x)))))


class NotCausal(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.is_causal = False


class Padded(Attention):
    """An embedding whose row 0 gets no gradient."""

    def __init__(self, padding: int | None = 0) -> None:
        super().__init__()
        self.embed.padding_idx = padding


def complex_numbers(*shape: int) -> Tensor:
    return torch.complex(numbers(*shape), numbers(*shape, seed=1))


TEXT = {"net": Attention, "data": tokens, "loss": token_loss}

CASES = [
    Case(
        "argument-eps",
        FAMILY,
        training(net=functools.partial(Mlp, eps=1e-3)),
        cause="argument",
        at={
            "*": "Functional.layer_norm.0.forward",
            "L0": "Module.norm.*",
            "L2": "Aten.native_layer*",
        },
        runs=(*WITH_L0, "tensors L2", "stats L2"),
        step=0,
        quick=True,
    ),
    Case(
        "argument-eps-other-kernels",
        FAMILY,
        training(net=functools.partial(Mlp, eps=1e-3), inside=other_kernels),
        cause="argument",
        at={"*": "Functional.layer_norm.0.forward", "L0": "Module.norm.*"},
        runs=WITH_L0,
        step=0,
    ),
    Case(
        "argument-dropout-p",
        FAMILY,
        training({"net": Dropping}, net=functools.partial(Dropping, 0.2)),
        cause="argument",
        at={"*": "Functional.dropout.0.forward", "L0": "Module.drop.*"},
        runs=WITH_L0,
        step=0,
        quick=True,
    ),
    Case(
        "argument-is-causal",
        FAMILY,
        training(TEXT, net=NotCausal),
        cause="argument|boundary",
        step=0,
        at={
            "*": "Functional.scaled_dot_product_attention.0.forward",
            "L0": "Module.Attention.forward.0|Module.out.*",
            "L2": "Aten.*scaled_dot*",
        },
        runs=(*LEVELS, "tensors L0"),
        quick=True,
    ),
    Case(
        "argument-is-causal-in-eval",
        FAMILY,
        inferring({"net": Attention, "data": tokens}, net=NotCausal),
        cause="argument",
        step=0,
        at={"*": "Functional.scaled_dot_product_attention.0.forward", "L2": "Aten.*scaled_dot*"},
        runs=LEVELS,
    ),
    Case(
        "argument-padding-index",
        FAMILY,
        training({**TEXT, "steps": 1}, net=Padded),
        cause="argument|boundary",
        at={
            "*": "Functional.embedding.0.*",
            "L0": "Module.embed*|Module.*parameters_grad*",
            "L2": "Aten.embedding*",
        },
        runs=(*LEVELS, "tensors L0"),
        step=0,
    ),
    Case(
        "argument-label-smoothing",
        FAMILY,
        training(
            TEXT,
            loss=lambda net, x, y: F.cross_entropy(
                net(x).flatten(0, 1), y.flatten(), label_smoothing=0.1
            ),
        ),
        at="Functional.cross_entropy.0.forward",
        cause="argument",
        step=0,
    ),
    Case(
        "argument-ignored-index",
        FAMILY,
        training(
            TEXT,
            loss=lambda net, x, y: F.cross_entropy(
                net(x).flatten(0, 1), y.flatten(), ignore_index=3
            ),
        ),
        at="Functional.cross_entropy.0.forward",
        cause="argument",
        step=0,
    ),
    _call(
        "triu-of-bool", lambda x, d: (x > 0).triu(d), (2, 1), "Tensor.triu.0.forward", quick=True
    ),
    _call("triu", lambda x, d: x.triu(d), (2, 1), "Tensor.triu.0.forward"),
    _call("threshold-of-comparison", lambda x, t: x > t, (0.5, 0.4), "Tensor.gt.0.forward"),
    _call(
        "tolerance-of-isclose",
        lambda x, t: torch.isclose(x, x.round(), rtol=t),
        (0.5, 0.1),
        "Torch.isclose.0.forward",
    ),
    _call(
        "tril-of-mask",
        lambda x, d: torch.ones(6, 6, dtype=torch.bool).tril(d),
        (1, 0),
        "Tensor.tril.0.forward",
    ),
    _call(
        "fft-norm",
        lambda x, n: torch.fft.fft(x, norm=n),
        ("ortho", "backward"),
        "Torch.fft.fft.0.forward",
        quick=True,
    ),
    _call("fft-dim", lambda x, d: torch.fft.fft(x, dim=d), (0, 1), "Torch.fft.fft.0.forward"),
    _call(
        "complex-factor",
        lambda x, c: x * c,
        (1j, 1 + 1j),
        "Tensor.mul.0.forward",
        make=complex_numbers,
    ),
    _call("complex-power", lambda x, n: x**n, (2, 3), "Tensor.pow.0.forward", make=complex_numbers),
    _call(
        "complex-shift",
        lambda x, n: x.roll(n, 1),
        (1, 2),
        "Tensor.roll.0.forward",
        make=complex_numbers,
    ),
    _call("softmax-dim", lambda x, d: x.softmax(d), (0, 1), "Tensor.softmax.0.forward"),
    _call(
        "gelu-approximation",
        lambda x, a: F.gelu(x, approximate=a),
        ("tanh", "none"),
        "Functional.gelu.0.forward",
        grad=True,
    ),
    _call(
        "leaky-slope",
        lambda x, s: F.leaky_relu(x, s),
        (0.02, 0.01),
        "Functional.leaky_relu.0.forward",
        grad=True,
    ),
    _call("clamp-limit", lambda x, m: x.clamp(max=m), (0.9, 1.0), "Tensor.clamp.0.forward"),
    _call("temperature", lambda x, t: (x / t).softmax(-1), (0.8, 1.0), "Tensor.div.0.forward"),
    _call("sum-dim", lambda x, d: x.sum(d), (0, 1), "Tensor.sum.0.forward", shape=(5, 5)),
    _call("roll", lambda x, n: x.roll(n, 1), (1, 2), "Tensor.roll.0.forward"),
    _call(
        "interpolation",
        lambda x, m: F.interpolate(x, scale_factor=2, mode=m),
        ("bilinear", "bicubic"),
        "Functional.interpolate.0.forward",
        shape=(1, 2, 4, 4),
    ),
    _call(
        "variance-correction", lambda x, c: x.var(-1, correction=c), (0, 1), "Tensor.var.0.forward"
    ),
    _call("rounded-decimals", lambda x, n: x.round(decimals=n), (1, 2), "Tensor.round.0.forward"),
    _call(
        "largest-or-smallest",
        lambda x, largest: x.topk(2, largest=largest).values,
        (True, False),
        "Tensor.topk.0.forward",
    ),
    # healthy
    Case(
        "argument-without-effect",
        FAMILY,
        calling(lambda is_actual: numbers(4, 6).tanh().clamp(min=-5.0 - is_actual).sum()),
        runs=LEVELS,
    ),
    Case(
        "argument-of-dropout-in-eval",
        FAMILY,
        inferring({"net": Dropping}, net=functools.partial(Dropping, 0.2)),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "argument-of-momentum-in-eval",
        FAMILY,
        calling(
            lambda is_actual: F.batch_norm(
                numbers(4, 6), torch.zeros(6), torch.ones(6), momentum=0.2 if is_actual else 0.1
            )
        ),
    ),
    Case(
        "argument-negative-dim",
        FAMILY,
        calling(lambda is_actual: numbers(4, 6).softmax(1 if is_actual else -1).cumsum(0)),
        quick=True,
    ),
    Case(
        "argument-by-keyword",
        FAMILY,
        calling(
            lambda is_actual: (
                F.softmax(numbers(4, 6), dim=1) if is_actual else F.softmax(numbers(4, 6), 1)
            ).cumsum(0)
        ),
        runs=LEVELS,
    ),
    Case(
        "complex-both-sides",
        FAMILY,
        calling(lambda is_actual: (torch.fft.fft(complex_numbers(4, 8)) * 1j).abs().sum()),
        runs=LEVELS,
        quick=True,
    ),
    Case(
        "complex-matmul-in-parts",
        FAMILY,
        calling(lambda is_actual: _complex_product(is_actual).abs().sum()),
    ),
    Case(
        "scalar-integer-or-float",
        FAMILY,
        calling(lambda is_actual: (numbers(4, 6) * (2 if is_actual else 2.0)).sum()),
        runs=LEVELS,
    ),
]


def _complex_product(in_parts: bool) -> Tensor:
    a, b = complex_numbers(4, 6), complex_numbers(6, 4)
    if in_parts:
        real = a.real @ b.real - a.imag @ b.imag
        return torch.complex(real, a.real @ b.imag + a.imag @ b.real)
    return a @ b
