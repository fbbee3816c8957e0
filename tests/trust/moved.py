"""The same numbers in other places: their statistics are equal, and what they mean is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trust.arguments import numbers
from trust.harness import ALL_KEEPS, Case, Start
from trust.kernels import other_kernels, wrong_kernel
from trust.programs import Batch, Mlp, inferring, training, vectors

FAMILY = "numbers in other places"
BOTH = ("tensors mix", "stats mix")
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")

Move = Callable[[nn.Module, Tensor], Tensor]


class Moving(nn.Module):
    """Two linears, and between them something that moves numbers."""

    def __init__(self, move: Move = lambda net, x: x) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 4)
        self.register_buffer("table", torch.arange(24.0) / 24 + 0.1)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.move(self, self.first(x)).relu())


class Experts(nn.Module):
    """Two of four experts for each row, by a gate."""

    def __init__(self, off: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 4)
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        chosen = (chosen + self.off) % 4
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, row, expert(x[row]) * weights[row, column, None])
        return self.head(x + mixed)


def _moving(actual: Move, expected: Move, **both: Any) -> Any:
    nets = [functools.partial(Moving, move) for move in (actual, expected)]
    return training({**both, "net": nets[1]}, net=nets[0])


def _half_in_place(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :12].mul_(2)
    return x


def _half_in_place_through_view(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    x.view(8, 2, 12)[:, 0].mul_(2)
    return x


def _other_half_in_place(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 12:].mul_(2)
    return x


def _with_table_reversed(net: nn.Module, *_: Any) -> None:
    net.table.copy_(net.table.flip(0))


def _with_channels_swapped(step: int) -> Batch:
    x, y = vectors(step)
    return x.flip(1), y


def _many(step: int) -> Batch:
    return numbers(500, 12, seed=step), numbers(500, 4, seed=step + 50)


def _with_rows_in_another_order(step: int) -> Batch:
    x, y = _many(step)
    return x[torch.randperm(500, generator=torch.Generator().manual_seed(5))], y


def _hooked(net: nn.Module, *_: Any) -> None:
    net.second.weight.register_hook(lambda gradient: gradient.flip(0))


def _hooked_in_forward(net: nn.Module, *_: Any) -> None:
    net.norm.register_forward_hook(lambda module, given, made: made.flip(0))


def _gradient_turned(net: nn.Module, step: int) -> None:
    with torch.no_grad():
        net.second.weight.grad.copy_(net.second.weight.grad.flip(0))


def _weights_turned(net: nn.Module, *_: Any) -> None:
    held = net.second.weight.detach().numpy()
    held[:] = held[::-1].copy()


def _wrong_choice() -> Any:
    return wrong_kernel("topk", lambda chosen: (chosen + 1) % 4, output=1)


def _flipped_mean(start: Start, is_actual: bool) -> None:
    x = numbers(64, 32, seed=3)
    with start():
        x.flip(0 if is_actual else 1).mul(2).mean()


def _best_boxes(start: Start, is_actual: bool) -> None:
    """Thousands of scores, of which some are nearly equal, in order."""
    torch.manual_seed(0)
    net, boxes = nn.Linear(16, 1), numbers(3000, 16, seed=7)
    with other_kernels() if is_actual else contextlib.nullcontext(), start(), torch.no_grad():
        scores = net(boxes).sigmoid().squeeze(-1)
        order = scores.argsort(descending=True)
        (boxes[order][:100] * scores[order][:100, None]).sum(0)


def _fault(name: str, program: Any, at: Any, cause: str, runs: Any = BOTH, **more: Any) -> Case:
    return Case(f"moved-{name}", FAMILY, program, at=at, cause=cause, runs=runs, **more)


CASES = [
    _fault(
        "by-another-dimension",
        _moving(lambda net, x: x.flip(0), lambda net, x: x.flip(1)),
        "Tensor.flip.0.*",
        "argument",
        ALL_KEEPS,
        quick=True,
    ),
    _fault(
        "buffer-reversed",
        training(
            {"net": functools.partial(Moving, lambda net, x: x * net.table)},
            prepare=_with_table_reversed,
        ),
        "Tensor.mul.0.*|Module.Moving.*",
        "weights",
        ALL_KEEPS,
    ),
    _fault(
        "channels-of-the-data",
        training(data=_with_channels_swapped),
        {"*": "Module.Mlp.*|Functional.linear.0.*|Module.first.*", "L0": "Module.*"},
        "data",
        WITH_L0,
        quick=True,
    ),
    _fault(
        "channels-of-the-data-in-eval",
        inferring(data=_with_channels_swapped),
        {"*": "Module.Mlp.*|Functional.linear.0.*|Module.first.*", "L0": "Module.*"},
        "data",
        WITH_L0,
    ),
    _fault(
        "rows-of-the-data",
        training({"data": _many}, data=_with_rows_in_another_order),
        {
            "*": "Module.*.forward.0|Functional.linear.0.*|Functional.mse_loss.0.*",
            "L0": "Module.*",
        },
        "data|result|boundary",
        WITH_L0,
    ),
    _fault("gradient-by-a-hook", training(prepare=_hooked), "Tensor.flip.0.*", "structure"),
    _fault(
        "result-by-a-hook",
        training(prepare=_hooked_in_forward),
        "Tensor.flip.0.*",
        "structure",
        quick=True,
    ),
    _fault(
        "gradient-in-the-loop",
        training(before_step=_gradient_turned),
        "Tensor.flip.0.*",
        "structure",
    ),
    _fault(
        "weights-in-numpy",
        training(after_step=_weights_turned),
        "Module.second.*|Functional.linear.1.*",
        "boundary|structure|weights|result",
        WITH_L0,
    ),
    _fault(
        "other-half-in-place",
        _moving(_other_half_in_place, _half_in_place),
        "Tensor.__getitem__.*|Tensor.mul_.*",
        "argument",
    ),
    _fault(
        "expert-next-to-the-chosen-one",
        training({"net": Experts}, net=functools.partial(Experts, 1)),
        "Tensor.add.0.*",
        "argument",
    ),
    _fault(
        "choice-of-experts-wrong",
        training({"net": Experts}, inside=_wrong_choice),
        "Tensor.topk.0.*",
        "result",
        quick=True,
    ),
    # healthy
    Case(
        "moved-and-back",
        FAMILY,
        _moving(lambda net, x: x.roll(3, 1).roll(-3, 1), lambda net, x: x.roll(5, 1).roll(-5, 1)),
        runs=BOTH,
        quick=True,
    ),
    Case(
        "moved-and-back-in-large-tensors",
        FAMILY,
        _moving(
            lambda net, x: x.roll(3, 1).roll(-3, 1),
            lambda net, x: x.roll(5, 1).roll(-5, 1),
            data=_many,
            steps=4,
        ),
        runs=BOTH,
    ),
    Case(
        "moved-by-negative-dimensions",
        FAMILY,
        _moving(
            lambda net, x: x.view(8, 4, 6).permute(0, -1, -2).reshape(8, 24),
            lambda net, x: x.view(8, 4, 6).permute(0, 2, 1).reshape(8, 24),
            inside=other_kernels,
        ),
        runs=ALL_KEEPS,
    ),
    Case(
        "moved-half-in-place-through-a-view",
        FAMILY,
        _moving(_half_in_place_through_view, _half_in_place),
        runs=ALL_KEEPS,
    ),
    Case("moved-and-averaged", FAMILY, _flipped_mean, runs=ALL_KEEPS, quick=True),
    Case("moved-by-size", FAMILY, _best_boxes, runs=ALL_KEEPS, quick=True),
    Case(
        "moved-by-a-gate-other-kernels",
        FAMILY,
        training({"net": Experts}, inside=other_kernels),
        runs=ALL_KEEPS,
    ),
    Case("moved-nothing", FAMILY, training({"net": Mlp}), runs=WITH_L0),
]
