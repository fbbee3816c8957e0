"""Healthy pairs in which a rounding decides something, or grows; faults beside them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.arguments import numbers
from trust.harness import ALL_KEEPS, Case, Program, Start
from trust.kernels import gain, one_row, other_kernels, wrong_kernel
from trust.programs import built

FAMILY = "rounding that decides"
RUNS = (*ALL_KEEPS, "tensors L2")
# Without tensors a number that fell on the other side cannot be told from a wrong argmax.
TENSORS = ("tensors mix", "tensors L2")


class Deciding(nn.Module):
    """A product, a decision that hangs on its last bits, and something that goes on from there."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(32, 48, seed=5) / 32**0.5)
        self.decide = decide
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decide(x @ self.weight))


def tied(scores: Tensor) -> Tensor:
    """The larger of two numbers that are equal but for rounding, as an index into a table."""
    both = torch.stack([scores.sum(-1), scores.flip(-1).cumsum(-1)[:, -1]], -1)
    return numbers(2, 48, seed=6)[both.argmax(-1)]


def quantised(scores: Tensor) -> Tensor:
    """To a grid whose borders lie on the numbers themselves."""
    grid = scores.detach().abs().amax() / 64
    halves = (scores / grid).round() + 0.5
    near = torch.where(numbers(*scores.shape) > 0, halves * grid, scores)
    return (near / grid).round() * grid


def compared(scores: Tensor) -> Tensor:
    """Which of two sums of the same numbers is larger."""
    larger = scores.cumsum(-1).roll(-1, 1) - scores.roll(-1, 1) > scores.cumsum(-1)
    return torch.where(larger, scores, -scores)


def routed(scores: Tensor) -> Tensor:
    """Top two of four experts, of which two are nearly alike."""
    logits = scores[:, :4].clone()
    logits[:, 1] = logits[:, 0] * 3 / 3
    weights, chosen = logits.softmax(-1).topk(2)
    experts = numbers(4, 48, seed=6)
    return (weights[..., None] * experts[chosen]).sum(1)


def sorted_by_size(scores: Tensor) -> Tensor:
    doubled = torch.cat([scores[:, :24], scores[:, :24] * 7 / 7], 1)
    return numbers(48, 48, seed=6)[doubled.argsort(-1)[:, 0]] + doubled


def cancelled(scores: Tensor) -> Tensor:
    """The variance as a difference of two large numbers."""
    shifted = scores + 300
    return scores * (shifted.square().mean(-1, keepdim=True) - shifted.mean(-1, keepdim=True) ** 2)


def steep(scores: Tensor) -> Tensor:
    return (scores * 2000).softmax(-1) * 10


def inverted(scores: Tensor) -> Tensor:
    """A system of equations that is nearly singular."""
    square = scores[:32, :32]
    return scores + torch.linalg.solve(square @ square.T + 1e-5 * torch.eye(32), scores)


def divided(scores: Tensor) -> Tensor:
    """By a number that is zero but for rounding."""
    rest = (scores + 1000) - 1000 - scores
    return scores / (rest.abs().mean(-1, keepdim=True) + 1e-5) * 1e-3


def plain(scores: Tensor) -> Tensor:
    return scores.tanh()


def _run(
    decide: Callable[[Tensor], Tensor],
    wrong: Callable[[], Any] = contextlib.nullcontext,
    grad: bool = True,
) -> Program:
    def program(start: Start, is_actual: bool) -> None:
        net = built(functools.partial(Deciding, decide))
        x = numbers(32, 32, seed=9)
        with contextlib.ExitStack() as stack:
            if is_actual:
                stack.enter_context(other_kernels())
                stack.enter_context(wrong())
            recorder = stack.enter_context(start())
            for _ in range(2):
                y = net(x)
                if grad:
                    F.mse_loss(y, torch.zeros_like(y)).backward()
                recorder.step()

    return program


def _wrong_head() -> Any:
    return wrong_kernel("addmm", one_row(gain(1.1)))


DECISIONS = {
    "tie": tied,
    "grid": quantised,
    "comparison": compared,
    "routing": routed,
    "sort": sorted_by_size,
    "cancellation": cancelled,
    "steep-softmax": steep,
    "singular-system": inverted,
    "division": divided,
}
QUICK = ("tie", "grid")
DISCRETE = ("tie", "grid", "comparison", "routing", "sort")

CASES = [
    *(
        Case(
            f"decided-by-{name}",
            FAMILY,
            _run(decide),
            runs=TENSORS if name in DISCRETE else RUNS,
            quick=name in QUICK,
        )
        for name, decide in DECISIONS.items()
    ),
    *(
        Case(
            f"decided-by-{name}-and-head-wrong",
            FAMILY,
            _run(decide, _wrong_head),
            at={"*": "Functional.linear.0.forward", "L2": "Aten.addmm.0.*"},
            cause="result",
            step=0,
            runs=TENSORS if name in DISCRETE else ALL_KEEPS,
            quick=name == "tie",
        )
        for name, decide in DECISIONS.items()
    ),
    Case(
        "decided-by-nothing-and-head-wrong",
        FAMILY,
        _run(plain, _wrong_head),
        at={"*": "Functional.linear.0.forward", "L2": "Aten.addmm.0.*"},
        cause="result",
        step=0,
    ),
]
