"""What training scripts do beside the model: clipping, schedules, averages, hooks, ties, noise."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import Case, Program, Start
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import (
    Attention,
    Mlp,
    adamw,
    built,
    sgd,
    square_loss,
    token_loss,
    tokens,
    vectors,
)

FAMILY = "training scripts"
BOTH = ("tensors mix", "stats mix")
Options = dict[str, Any]


def _script(start: Start, options: Options) -> None:
    """A training loop as people write it; each option is a place to differ at."""
    text = options.get("text", False)
    make = options.get("net", Attention if text else Mlp)
    net = built(make)
    loss_of = token_loss if text else square_loss
    batches = [(tokens if text else vectors)(step) for step in range(options.get("steps", 2))]
    optim = options.get("optimizer", adamw)(
        options.get("groups", lambda net: net.parameters())(net)
    )
    schedule = options.get("schedule", lambda optim: None)(optim)
    options.get("prepare", lambda net: None)(net)
    average = copy.deepcopy(net)
    torch.manual_seed(7)
    noise = np.random.default_rng(options.get("noise", 3))
    with options.get("inside", contextlib.nullcontext)(), start() as recorder:
        for step, (x, y) in enumerate(batches):
            if "augment" in options:
                x = torch.from_numpy(options["augment"](x.numpy(), noise))
            loss = options.get("loss", lambda loss: loss)(loss_of(net, x, y))
            loss.backward()
            options.get("gradients", lambda net, step: None)(net, step)
            if schedule is not None and options.get("schedule_first"):
                schedule.step()
            optim.step()
            if schedule is not None and not options.get("schedule_first"):
                schedule.step()
            options.get("zero", lambda net, optim: optim.zero_grad())(net, optim)
            options.get("after", lambda net, average, step: None)(net, average, step)
            recorder.step()


def _pair(both: Options | None = None, **changes: Any) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        _script(start, {**(both or {}), **(changes if is_actual else {})})

    return program


def clip(norm: float, **options: Any) -> Callable[[nn.Module, int], object]:
    return lambda net, step: nn.utils.clip_grad_norm_(net.parameters(), norm, **options)


def clip_values(net: nn.Module, step: int) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def scale_one(net: nn.Module, step: int) -> None:
    """In place, where no call of torch's is seen: through numpy."""
    net.first.weight.grad.numpy()[...] *= 1.5  # type: ignore[union-attr]


def averaging(decay: float) -> Callable[[nn.Module, nn.Module, int], None]:
    def after(net: nn.Module, average: nn.Module, step: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
                mine.mul_(decay).add_(theirs, alpha=1 - decay)
            average(vectors(9)[0])

    return after


def averaging_by_lerp(net: nn.Module, average: nn.Module, step: int) -> None:
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        average(vectors(9)[0])


def warm_up(first: float) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optim: torch.optim.lr_scheduler.LinearLR(optim, first, total_iters=3)


def cosine(last: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optim: torch.optim.lr_scheduler.CosineAnnealingLR(optim, last)


def grouped(decay: float) -> Callable[[nn.Module], Any]:
    def groups(net: nn.Module) -> list[dict[str, Any]]:
        named = dict(net.named_parameters())
        return [
            {"params": [p for n, p in named.items() if "bias" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": decay},
        ]

    return groups


class Tied(Attention):
    """The head has the weight of the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        weight = self.embed.weight
        self.head.weight = weight if tied else nn.Parameter(weight.detach().clone())


class Residual(Mlp):
    """A sum with what went in: in place or not, of what is there or of what was."""

    def __init__(self, way: str = "sum") -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        h = self.norm(first)
        if self.way == "in place":
            h = h.add_(first)
        elif self.way == "to a view":
            h = h + first
            h[:, :4].mul_(1.25)
        elif self.way == "of itself":
            h = h + h
        else:
            h = h + first
        return self.second(F.gelu(h))


class Noisy(Mlp):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(F.gelu(self.norm(self.first(x)))))


class Counting(Mlp):
    """A hook writes what it has seen to a buffer, which scales the next results."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(24))

        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            self.seen.mul_(1 - share).add_(made.detach().abs().mean(0), alpha=share)

        self.norm.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)) / self.seen)


def hooked(factor: float) -> Callable[[nn.Module], object]:
    return lambda net: net.second.weight.register_hook(lambda grad: grad * factor)


def frozen(net: nn.Module) -> None:
    net.norm.weight.requires_grad_(False)  # type: ignore[union-attr]


def evaluating(net: nn.Module) -> None:
    net.drop.eval()  # type: ignore[union-attr]


def shrunk(net: nn.Module, average: nn.Module, step: int) -> None:
    net.second.weight.data.mul_(0.99)  # type: ignore[union-attr]


def shrunk_by_numpy(net: nn.Module, average: nn.Module, step: int) -> None:
    net.second.weight.detach().numpy()[...] *= 0.99  # type: ignore[union-attr]


def jitter(x: Any, noise: np.random.Generator) -> Any:
    return (x + 0.1 * noise.standard_normal(x.shape)).astype(np.float32)


def jitter_more(x: Any, noise: np.random.Generator) -> Any:
    return (x + 0.2 * noise.standard_normal(x.shape)).astype(np.float32)


def some_zeroed(net: nn.Module, optim: torch.optim.Optimizer) -> None:
    for name, p in net.named_parameters():
        if "bias" not in name:
            p.grad = None


FAULTS: dict[str, tuple[Program, str, str, int | None]] = {
    "clipped-less": (
        _pair({"gradients": clip(0.1)}, gradients=clip(0.2)),
        "*clamp*|*mul*|*div*|Torch.nn.utils*|*clip_grad*",
        "argument",
        0,
    ),
    "clipped-not": (
        _pair({"gradients": clip(0.1)}, gradients=lambda net, step: None),
        "*mul*|*norm*|*clip*|*stack*|*clamp*|Optimizer.*",
        "structure|boundary",
        0,
    ),
    "clipped-by-value": (
        _pair({}, gradients=clip_values),
        "*clamp*|Optimizer.*",
        "structure|boundary",
        0,
    ),
    "gradient-scaled-by-numpy": (
        _pair({}, gradients=scale_one), "Optimizer.AdamW.step.0|*mul*|*lerp*", "boundary", 0,
    ),
    "average-decays-faster": (
        _pair({"after": averaging(0.9)}, after=averaging(0.8)),
        "*mul_*",
        "argument",
        0,
    ),
    "warm-up-from-less": (
        _pair({"schedule": warm_up(0.5)}, schedule=warm_up(0.25)), "Optimizer.AdamW.step.0",
        "argument", 0,
    ),
    "schedule-longer": (
        _pair({"schedule": cosine(4), "steps": 3}, schedule=cosine(8)), "Optimizer.AdamW.step.0",
        "argument", 1,
    ),
    "schedule-steps-first": (
        _pair({"schedule": cosine(4)}, schedule_first=True), "Optimizer.AdamW.step.0",
        "argument", 0,
    ),
    "biases-decay": (
        _pair({"groups": grouped(0.0)}, groups=grouped(0.1)), "Optimizer.AdamW.step.0|*mul_*",
        "argument", 0,
    ),
    "nesterov": (
        _pair({"optimizer": sgd}, optimizer=lambda p: sgd(p, nesterov=True)),
        "Optimizer.SGD.step.0", "argument", 0,
    ),
    "untied": (
        _pair({"text": True, "net": Tied}, net=lambda: Tied(False)),
        "Module.embed*parameters_grad*|Module.head*parameters_grad*|Optimizer.*",
        "structure|boundary", 0,
    ),
    "residual-of-itself": (
        _pair({"net": Residual}, net=lambda: Residual("of itself")), "Tensor.add.0.forward",
        "structure", 0,
    ),
    "residual-view-scaled": (
        _pair({"net": Residual}, net=lambda: Residual("to a view")),
        "Tensor.mul_.0.forward|Tensor.__getitem__.0.forward", "structure", 0,
    ),
    "dropout-more": (
        _pair({"net": Noisy}, net=lambda: Noisy(0.3)), "Functional.dropout.0.forward|Module.drop*",
        "argument|seed", 0,
    ),
    "dropout-off": (
        _pair({"net": Noisy}, prepare=evaluating), "Functional.dropout.0.forward|Module.drop*",
        "argument", 0,
    ),
    "hook-writes-other-share": (
        _pair({"net": Counting}, net=lambda: Counting(0.25)), "Tensor.mul_.0.forward",
        "argument", 0,
    ),
    "gradient-hook": (
        _pair({}, prepare=hooked(1.01)),
        "Module.second*parameters_grad*|Optimizer.*|Tensor.mul.0.forward", "boundary|structure", 0,
    ),
    "frozen": (
        _pair({}, prepare=frozen), "Module.norm*|Optimizer.AdamW.step.0|Functional.layer_norm*",
        "structure|boundary", 0,
    ),
    "weight-shrunk": (
        _pair({}, after=shrunk), "Tensor.mul_.*|Functional.linear.1.forward|Module.second*",
        "structure|boundary|weights", None,
    ),
    "weight-shrunk-by-numpy": (
        _pair({}, after=shrunk_by_numpy), "Functional.linear.1.forward|Module.second*",
        "boundary|weights", 1,
    ),
    "noise-of-another-seed": (
        _pair({"augment": jitter}, noise=4),
        "Module.Mlp.forward.0|Functional.linear.0.forward|*from_numpy*", "data", 0,
    ),
    "noise-is-stronger": (
        _pair({"augment": jitter}, augment=jitter_more),
        "Module.Mlp.forward.0|Functional.linear.0.forward|*from_numpy*", "data", 0,
    ),
    "biases-not-zeroed": (
        _pair({}, zero=some_zeroed),
        "Module.*parameters_grad*|Optimizer.AdamW.step.0|Functional.*.backward",
        "boundary|structure", 1,
    ),
    "loss-scaled": (
        _pair({}, loss=lambda loss: loss * 128), "Tensor.mul.0.*|Functional.mse_loss.0.backward",
        "structure|boundary", 0,
    ),
    "clipped-and-gelu-wrong": (
        _pair(
            {"gradients": clip(0.1), "schedule": cosine(4)},
            inside=lambda: wrong_kernel("gelu", gain(1.01)),
        ),
        "Functional.gelu.0.forward", "result", 0,
    ),
}  # fmt: skip
HEALTHY: dict[str, Program] = {
    "clipped-one-by-one": _pair({"gradients": clip(0.1)}, gradients=clip(0.1, foreach=False)),
    "average-by-lerp": _pair({"after": averaging(0.9)}, after=averaging_by_lerp),
    "residual-in-place": _pair({"net": Residual}, net=lambda: Residual("in place")),
    "noise-other-kernels": _pair({"augment": jitter}, inside=other_kernels),
    "all-of-it-other-kernels": _pair(
        {"gradients": clip(0.1), "schedule": cosine(4), "after": averaging(0.9), "net": Counting},
        inside=other_kernels,
    ),
    "tied-other-kernels": _pair({"text": True, "net": Tied}, inside=other_kernels),
    "dropout-other-kernels": _pair({"net": Noisy}, inside=other_kernels),
}

CASES = [
    *(
        Case(
            f"script-{name}", FAMILY, program, at=at, cause=cause, step=step, runs=BOTH,
            quick=name == "clipped-less",
        )
        for name, (program, at, cause, step) in FAULTS.items()
    ),
    *(
        Case(f"script-{name}", FAMILY, program, runs=BOTH, quick=name == "average-by-lerp")
        for name, program in HEALTHY.items()
    ),
]  # fmt: skip
