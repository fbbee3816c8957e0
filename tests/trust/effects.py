"""Faults in what happens to a loss or a gradient after the last call of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trust.harness import Case
from trust.kernels import other_kernels
from trust.programs import sgd, square_loss, training

FAMILY = "after the last call"
WITH_L0 = ("tensors mix", "stats mix", "digest mix", "tensors L0", "stats L0")
# Where no call is recorded between the model and its gradient: the gradient that comes in.
AT_L0 = "Module.Mlp.backward.0|Module.second.Linear.backward.0"


def _scale_in_numpy(net: nn.Module, step: int) -> None:
    for parameter in net.parameters():
        parameter.grad.numpy()[...] *= 2


def _clip(limit: float) -> Any:
    return lambda net, step: nn.utils.clip_grad_norm_(net.parameters(), limit)


def _clip_by_numbers(limit: float) -> Any:
    """The norm is read, and worked with as a number of Python's."""

    def clip(net: nn.Module, step: int) -> None:
        gradients = [p.grad for p in net.parameters()]
        total = sum(g.norm().item() ** 2 for g in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / (total + 1e-6)))

    return clip


def _in_bfloat16(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square_loss(net, x, y)


def _lr_by_norm(factor: float) -> Any:
    def after(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = factor * net.second.weight.norm().item()

    return after


def _clip_value(limit: float) -> Any:
    return lambda net, step: nn.utils.clip_grad_value_(net.parameters(), limit)


def _weights_in_numpy(net: nn.Module, optimizer: Any, step: int) -> None:
    net.second.weight.detach().numpy()[...] *= 1.001


def _at_the_end(net: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        with torch.no_grad():
            net.second.weight.mul_(1.01)


def _row_at_the_end(net: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        net.second.weight.data[1].add_(0.01)


def _followed_at_the_end(net: nn.Module, optimizer: Any, step: int) -> None:
    """A copy that nothing is made of."""
    if step == 1:
        copy = net.second.weight.detach().clone()
        copy[1].mul_(0.5)
        copy.add_(1)


def _schedule(gamma: float) -> Any:
    def after(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= gamma

    return after


def _hooked(net: nn.Module, optimizer: Any) -> None:
    net.first.weight.register_post_accumulate_grad_hook(_halve_in_numpy)


def _halve_in_numpy(parameter: Tensor) -> None:
    parameter.grad.numpy()[...] *= 0.5


def _hooked_by_torch(net: nn.Module, optimizer: Any) -> None:
    net.first.weight.register_hook(lambda grad: grad * 0.5)


def _ema(decay: float) -> Any:
    kept: dict[str, Tensor] = {}

    def after(net: nn.Module, optimizer: Any, step: int) -> None:
        for name, parameter in net.named_parameters():
            if step == 0:
                kept.clear() if name == "first.weight" else None
                kept[name] = parameter.detach().clone()
            else:
                kept[name].lerp_(parameter.detach(), 1 - decay)

    return after


CASES = [
    Case(
        "loss-negated",
        FAMILY,
        training(edit_loss=lambda loss: -loss),
        at={"*": "Tensor.neg.0.*", "L0": AT_L0},
        cause="structure|boundary",
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "loss-halved",
        FAMILY,
        training(edit_loss=lambda loss: loss / 2),
        at={"*": "Tensor.div.0.*", "L0": AT_L0},
        cause="structure|boundary",
        runs=WITH_L0,
    ),
    Case(
        "loss-scaled-a-little",
        FAMILY,
        training(edit_loss=lambda loss: loss * 1.01),
        at={"*": "Tensor.mul.0.*", "L0": AT_L0},
        cause="structure|boundary",
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "loss-divided-by-other-number",
        FAMILY,
        training({"edit_loss": lambda loss: loss / 4}, edit_loss=lambda loss: loss / 2),
        at={"*": "Tensor.div.0.forward", "L0": AT_L0},
        cause="argument|boundary",
        runs=WITH_L0,
    ),
    Case(
        "loss-summed-not-averaged",
        FAMILY,
        training(loss=lambda net, x, y: nn.functional.mse_loss(net(x), y, reduction="sum")),
        at="Functional.mse_loss.0.forward",
        cause="argument",
        quick=True,
    ),
    Case(
        "backward-from-minus-one",
        FAMILY,
        training(backward=lambda loss: loss.backward(torch.tensor(-1.0))),
        at="Functional.mse_loss.0.backward|Torch.tensor.0.forward",
        cause="boundary|structure",
        quick=True,
    ),
    Case(
        "loss-negated-among-other-kernels",
        FAMILY,
        training(edit_loss=lambda loss: -loss, inside=other_kernels),
        at={"*": "Tensor.neg.0.*", "L0": AT_L0},
        cause="structure|boundary",
        runs=WITH_L0,
    ),
    Case(
        "loss-negated-sgd",
        FAMILY,
        training({"optimizer": sgd, "steps": 1}, edit_loss=lambda loss: -loss),
        at={"*": "Tensor.neg.0.*", "L0": AT_L0},
        cause="structure|boundary",
        runs=WITH_L0,
    ),
    Case(
        "gradients-doubled-in-numpy",
        FAMILY,
        training(before_step=_scale_in_numpy),
        at="Optimizer.AdamW.step.0|Module.*|Torch._foreach*|Tensor.*",
        cause="boundary",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "gradient-halved-in-a-hook-by-numpy",
        FAMILY,
        training({"optimizer": sgd}, prepare=_hooked),
        at="Optimizer.SGD.step.0|Module.*parameters_grad.0|Functional.linear.0.backward|Tensor.clone.0.*",
        cause="boundary",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "gradient-halved-in-a-hook",
        FAMILY,
        training({"optimizer": sgd}, prepare=_hooked_by_torch),
        at="Tensor.mul.0.*",
        cause="structure",
        step=0,
    ),
    Case(
        "clipped-to-another-norm",
        FAMILY,
        training({"optimizer": sgd, "before_step": _clip(0.1)}, before_step=_clip(0.05)),
        at="Tensor.__rtruediv__.0.forward|Torch.clip_grad*|Tensor.mul*",
        cause="argument",
        quick=True,
    ),
    Case(
        "clipped-by-numbers-to-another-norm",
        FAMILY,
        training(
            {"before_step": _clip_by_numbers(0.1), "optimizer": sgd},
            before_step=_clip_by_numbers(0.101),
        ),
        at="Tensor.mul_.0.*",
        cause="argument",
        culprits=6,
    ),
    Case(
        "clipped-or-not",
        FAMILY,
        training({"optimizer": sgd}, before_step=_clip(0.1)),
        at="Torch._foreach_norm.0.forward|Tensor*mul*|Torch._foreach_mul*",
        cause="structure",
        step=0,
    ),
    Case(
        "clipped-by-another-value",
        FAMILY,
        training(
            {"optimizer": sgd, "before_step": _clip_value(0.05)}, before_step=_clip_value(0.02)
        ),
        at="Torch._foreach_clamp*|Tensor.clamp*",
        cause="argument",
    ),
    Case(
        "weights-changed-in-numpy-between-steps",
        FAMILY,
        training({"steps": 3}, after_step=_weights_in_numpy),
        at={"*": "Functional.linear.1.forward|Module.second*", "L0": "Module.*"},
        cause="boundary|weights",
        step=1,
        runs=WITH_L0,
    ),
    Case(
        "no-zero-grad",
        FAMILY,
        training({"steps": 3}, zero_grad=False),
        at="Module.*parameters_grad.0|Optimizer.AdamW.step.0|Functional.linear.*.backward",
        cause="boundary|structure",
        step=1,
        quick=True,
    ),
    Case(
        "learning-rate-decays-faster",
        FAMILY,
        training({"steps": 3, "after_step": _schedule(0.9)}, after_step=_schedule(0.5)),
        at="Optimizer.AdamW.step.0",
        cause="argument",
        step=1,
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "moving-average-of-other-decay",
        FAMILY,
        training({"steps": 3, "after_step": _ema(0.99)}, after_step=_ema(0.9)),
        at="Tensor.lerp_.6.forward",
        cause="argument",
        step=1,
    ),
    Case(
        "weights-scaled-after-the-last-step",
        FAMILY,
        training(after_step=_at_the_end),
        at="Tensor.mul_.*",
        cause="structure",
        step=1,
        quick=True,
    ),
    Case(
        "row-of-weights-moved-after-the-last-step",
        FAMILY,
        training({"optimizer": sgd}, after_step=_row_at_the_end),
        at="Tensor.add_.*",
        cause="structure",
        step=1,
    ),
    # healthy
    Case(
        "copy-changed-after-the-last-step",
        FAMILY,
        training({"optimizer": sgd}, after_step=_followed_at_the_end),
        runs=WITH_L0,
    ),
    Case("same-loop-twice", FAMILY, training(), runs=WITH_L0, quick=True),
    Case(
        "same-loop-other-kernels",
        FAMILY,
        training({"steps": 3}, inside=other_kernels),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "clipped-and-other-kernels",
        FAMILY,
        training({"before_step": _clip(0.1), "steps": 3}, inside=other_kernels),
    ),
    Case(
        "clipped-by-numbers-and-other-kernels",
        FAMILY,
        training(
            {"before_step": _clip_by_numbers(0.1), "optimizer": sgd, "steps": 3},
            inside=other_kernels,
        ),
        runs=WITH_L0,
    ),
    Case(
        "clipped-by-numbers-and-autocast",
        FAMILY,
        training(
            {"before_step": _clip_by_numbers(0.1), "optimizer": sgd, "steps": 2},
            loss=_in_bfloat16,
        ),
    ),
    Case(
        "learning-rate-by-a-norm-and-autocast",
        FAMILY,
        training(
            {"after_step": _lr_by_norm(0.1), "optimizer": sgd, "steps": 3},
            loss=_in_bfloat16,
        ),
    ),
    Case("clip-that-clips-nothing", FAMILY, training({"optimizer": sgd}, before_step=_clip(1e6))),
    Case("loss-times-one", FAMILY, training(edit_loss=lambda loss: loss * 1.0), runs=WITH_L0),
    Case(
        "loss-negated-twice",
        FAMILY,
        training(edit_loss=lambda loss: loss.neg().neg()),
        runs=WITH_L0,
    ),
    Case(
        "scheduler-and-other-kernels",
        FAMILY,
        training({"steps": 3, "after_step": _schedule(0.9)}, inside=other_kernels),
    ),
]
