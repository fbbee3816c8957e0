"""Healthy pairs of two dtypes, faults that are a dtype, and faults planted in such pairs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import ALL_KEEPS, Case
from trust.kernels import gain, one_row, other_kernels, swapped_rows, wrong_kernel, zeros
from trust.programs import (
    Attention,
    Batch,
    Mlp,
    adamw,
    inferring,
    sgd,
    tokens,
    training,
    vectors,
)
from trust.units import scaling

FAMILY = "dtypes"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")
EVERY = (*WITH_L0, "tensors L2")
BF16, F16 = torch.bfloat16, torch.float16


def _autocast(loss: Any, dtype: torch.dtype = BF16) -> Any:
    def under(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss(net, x, y)

    return under


def _square(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x).float(), y)


def _tokens(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float().flatten(0, 1), y.flatten())


def _cast(make: Any, dtype: torch.dtype) -> Any:
    return lambda: make().to(dtype)


def _vectors(dtype: torch.dtype) -> Any:
    def data(step: int) -> Batch:
        x, y = vectors(step)
        return x.to(dtype), y

    return data


class OneLayer(Mlp):
    """Its second linear computes in another dtype."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(x)))
        w, b = self.second.weight.to(self.dtype), self.second.bias.to(self.dtype)
        return F.linear(x.to(self.dtype), w, b).float()


class Region(Mlp):
    """Autocast around its second linear, on or off."""

    def __init__(self, enabled: bool = False) -> None:
        super().__init__()
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(x)))
        with torch.autocast("cpu", dtype=BF16, enabled=self.enabled):
            return self.second(x).float()


@contextlib.contextmanager
def _others_and(*inner: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(other_kernels())
        for each in inner:
            stack.enter_context(each)
        yield


def _faulty(op: str, alter: Any, nth: int = 0, others: bool = False) -> Any:
    if others:
        return lambda: _others_and(wrong_kernel(op, alter, nth=nth))
    return lambda: wrong_kernel(op, alter, nth=nth)


STEPS = {"steps": 3}
TEXT = {"net": Attention, "data": tokens, "loss": _tokens, "steps": 3}
BOTH_AUTOCAST = {"steps": 3, "loss": _autocast(_square)}
BOTH_BF16 = {"steps": 3, "net": _cast(Mlp, BF16), "data": _vectors(BF16), "loss": _square}

CASES = [
    Case(
        "autocast-or-not",
        FAMILY,
        training({**STEPS, "loss": _square}, loss=_autocast(_square)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=EVERY,
        quick=True,
    ),
    Case(
        "autocast-or-not-attention",
        FAMILY,
        training(TEXT, loss=_autocast(_tokens)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=EVERY,
    ),
    Case(
        "autocast-or-not-sgd",
        FAMILY,
        training({**STEPS, "loss": _square, "optimizer": sgd}, loss=_autocast(_square)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=WITH_L0,
    ),
    Case(
        "autocast-or-not-fused-adam",
        FAMILY,
        training(
            {**STEPS, "loss": _square, "optimizer": functools.partial(adamw, fused=True)},
            loss=_autocast(_square),
        ),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=WITH_L0,
    ),
    Case(
        "autocast-f16-and-scaler",
        FAMILY,
        scaling({"enabled": False}, enabled=True, dtype=F16),
        allowed="dtype|flag",
        says="float16|fp16|autocast",
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "autocast-f16-and-scaler-adam",
        FAMILY,
        scaling({"enabled": False, "optimizer": adamw}, enabled=True, dtype=F16),
        allowed="dtype|flag",
        says="float16|fp16|autocast",
        runs=WITH_L0,
    ),
    Case(
        "bf16-or-f32",
        FAMILY,
        training({**STEPS, "loss": _square}, net=_cast(Mlp, BF16), data=_vectors(BF16)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=EVERY,
        quick=True,
    ),
    Case(
        "bf16-or-f32-attention",
        FAMILY,
        training(TEXT, net=_cast(Attention, BF16)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=EVERY,
    ),
    Case(
        "bf16-or-f32-in-eval",
        FAMILY,
        inferring(net=_cast(Mlp, BF16), data=_vectors(BF16)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        runs=EVERY,
    ),
    Case(
        "f16-or-f32-in-eval",
        FAMILY,
        inferring(net=_cast(Mlp, F16), data=_vectors(F16)),
        allowed="dtype|flag",
        says="float16|fp16|autocast",
        runs=EVERY,
    ),
    Case(
        "f64-or-f32",
        FAMILY,
        training(
            {**STEPS, "loss": _square}, net=_cast(Mlp, torch.float64), data=_vectors(torch.float64)
        ),
        allowed="dtype|flag",
        says="float64|fp64|double",
        runs=WITH_L0,
    ),
    Case(
        "autocast-both-other-kernels",
        FAMILY,
        training(BOTH_AUTOCAST, inside=other_kernels),
        runs=EVERY,
        quick=True,
    ),
    Case("bf16-both-other-kernels", FAMILY, training(BOTH_BF16, inside=other_kernels), runs=EVERY),
    Case(
        "autocast-both-attention-other-kernels",
        FAMILY,
        training({**TEXT, "loss": _autocast(_tokens)}, inside=other_kernels),
        runs=EVERY,
    ),
    Case(
        "one-layer-in-bf16",
        FAMILY,
        training({"net": functools.partial(OneLayer, torch.float32)}, net=OneLayer),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
        quick=True,
    ),
    Case(
        "one-layer-in-f16",
        FAMILY,
        training(
            {"net": functools.partial(OneLayer, torch.float32)},
            net=functools.partial(OneLayer, F16),
        ),
        allowed="dtype|flag",
        says="float16|fp16|autocast",
    ),
    Case(
        "one-layer-under-autocast",
        FAMILY,
        training({"net": Region}, net=functools.partial(Region, True)),
        allowed="dtype|flag",
        says="bfloat16|bf16|autocast",
    ),
    # faults
    Case(
        "autocast-both-gelu-wrong",
        FAMILY,
        training(BOTH_AUTOCAST, inside=_faulty("gelu", gain(1.1), others=True)),
        at="Functional.gelu.0.forward",
        cause="result",
        step=0,
        quick=True,
    ),
    Case(
        "autocast-both-linear-wrong",
        FAMILY,
        training(BOTH_AUTOCAST, inside=_faulty("addmm", gain(1.1), 1)),
        at={"*": "Functional.linear.1.forward", "L0": "Module.second.*", "L2": "Aten.addmm.1.*"},
        cause="result",
        step=0,
        runs=EVERY,
    ),
    Case(
        "bf16-both-row-of-linear-wrong",
        FAMILY,
        training(BOTH_BF16, inside=_faulty("addmm", one_row(gain(1.2)), 1)),
        at={"*": "Functional.linear.1.forward", "L0": "Module.second.*", "L2": "Aten.addmm.1.*"},
        cause="result",
        step=0,
        runs=EVERY,
    ),
    Case(
        "bf16-or-f32-and-gelu-wrong",
        FAMILY,
        training(
            {**STEPS, "loss": _square},
            net=_cast(Mlp, BF16),
            data=_vectors(BF16),
            inside=_faulty("gelu", gain(1.2)),
        ),
        at="Functional.gelu.0.forward",
        cause="result",
        step=0,
        quick=True,
    ),
    Case(
        "bf16-or-f32-and-rows-swapped",
        FAMILY,
        training(
            {**STEPS, "loss": _square},
            net=_cast(Mlp, BF16),
            data=_vectors(BF16),
            inside=_faulty("native_layer_norm", swapped_rows),
        ),
        at="Functional.layer_norm.0.forward",
        cause="result",
        step=0,
    ),
    Case(
        "autocast-or-not-and-linear-wrong",
        FAMILY,
        training(
            {**STEPS, "loss": _square},
            loss=_autocast(_square),
            inside=_faulty("addmm", gain(1.2), 1),
        ),
        at={"*": "Functional.linear.1.forward", "L0": "Module.second.*", "L2": "Aten.addmm.1.*"},
        cause="result",
        step=0,
        runs=EVERY,
    ),
    Case(
        "autocast-or-not-and-gradient-lost",
        FAMILY,
        training(
            {**STEPS, "loss": _square},
            loss=_autocast(_square),
            inside=_faulty("gelu_backward", zeros),
        ),
        at="Functional.gelu.0.backward",
        cause="result",
        step=0,
    ),
    Case(
        "autocast-f16-and-scaler-loss-halved",
        FAMILY,
        scaling({"enabled": False}, enabled=True, dtype=F16, loss_factor=0.5),
        at="Tensor.mul.0.forward",
        cause="argument",
        step=0,
    ),
    Case(
        "bf16-both-loss-negated",
        FAMILY,
        training(BOTH_BF16, edit_loss=lambda loss: -loss, inside=other_kernels),
        at="Tensor.neg.0.*",
        cause="structure|boundary",
        step=0,
    ),
]
