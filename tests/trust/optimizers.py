"""Faults in what an optimizer remembers or is told, and healthy pairs of its implementations."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from trust.harness import Case
from trust.kernels import other_kernels
from trust.programs import (
    Attention,
    adamw,
    sgd,
    square_loss,
    token_loss,
    tokens,
    training,
    vectors,
)

FAMILY = "optimizer"
STEP = "Optimizer.*.step.0"
# A step may also be blamed by the one call inside of it that has the other argument.
INSIDE = f"{STEP}|Torch._foreach_*|Tensor.*|Torch._fused_*"
# A lost state is made anew.
LOST = f"{INSIDE}|Torch.zeros_like.*|Torch.zeros.*|Torch.tensor.*"
WITH_L0 = ("tensors mix", "stats mix", "digest mix", "tensors L0", "stats L0")


def _adam(**options: Any) -> Any:
    return functools.partial(adamw, **options)


def _resumed(keep_state: bool, change: Any = None, **options: Any) -> Any:
    """Two steps before recording; the weights go on, the optimizer's state only if kept."""

    def prepare(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first = adamw(net.parameters(), **options)
        for step in (10, 11):
            square_loss(net, *vectors(step)).backward()
            first.step()
            first.zero_grad()
        state = copy.deepcopy(first.state_dict())
        if keep_state:
            if change is not None:
                change(state)
            optimizer.load_state_dict(state)

    return prepare


def _forget_steps(state: dict[str, Any]) -> None:
    for each in state["state"].values():
        each["step"] = torch.zeros_like(each["step"])


def _forget_second_moments(state: dict[str, Any]) -> None:
    for each in state["state"].values():
        each["exp_avg_sq"].zero_()


def _swap_moments(state: dict[str, Any]) -> None:
    each = state["state"][0]
    each["exp_avg"], each["exp_avg_sq"] = each["exp_avg_sq"], each["exp_avg"].abs()


def _fault(name: str, program: Any, cause: str, at: str = INSIDE, **more: Any) -> Case:
    return Case(f"optimizer-{name}", FAMILY, program, at=at, cause=cause, **{"step": 0, **more})


def _other(name: str, quick: bool = False, **options: Any) -> Case:
    return _fault(
        name, training(optimizer=_adam(**options)), "argument", step=None, runs=WITH_L0, quick=quick
    )


def _forget_all(net: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.state.clear()


def _all_but_the_norm(parameters: Any) -> torch.optim.Optimizer:
    return _adam()([p for p in parameters if p.shape != (24,)])


def _groups(decay: float, norms: float) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in every if p.ndim > 1], "weight_decay": decay},
                {"params": [p for p in every if p.ndim < 2], "weight_decay": norms},
            ],
            lr=1e-2,
        )

    return make


RESUMED = {"prepare": _resumed(True), "steps": 2}

CASES = [
    _fault(
        "state-lost",
        training(RESUMED, prepare=_resumed(False)),
        "weights|boundary|structure",
        at=LOST,
        runs=WITH_L0,
        quick=True,
    ),
    _fault(
        "state-lost-foreach",
        training({**RESUMED, "optimizer": _adam(foreach=True)}, prepare=_resumed(False)),
        "weights|boundary|structure",
        at=LOST,
    ),
    _fault(
        "state-lost-fused",
        training({**RESUMED, "optimizer": _adam(fused=True)}, prepare=_resumed(False)),
        "weights|boundary|structure",
        at=LOST,
        runs=WITH_L0,
    ),
    _fault(
        "step-count-lost",
        training(RESUMED, prepare=_resumed(True, _forget_steps)),
        "weights|boundary",
    ),
    _fault(
        "second-moments-lost",
        training(RESUMED, prepare=_resumed(True, _forget_second_moments)),
        "weights|boundary",
        quick=True,
    ),
    _fault(
        "moments-swapped",
        training(RESUMED, prepare=_resumed(True, _swap_moments)),
        "weights|boundary",
    ),
    _fault(
        "momentum-lost-among-other-kernels",
        training(RESUMED, prepare=_resumed(False), inside=other_kernels),
        "weights|boundary|structure",
        at=LOST,
    ),
    _fault(
        "state-lost-in-between",
        training({"steps": 4}, after_step=_forget_all),
        "weights|boundary|structure|argument",
        step=2,
        quick=True,
    ),
    _fault(
        "state-lost-in-between-foreach",
        training({"steps": 4, "optimizer": _adam(foreach=True)}, after_step=_forget_all),
        "weights|boundary|structure|argument",
        step=2,
    ),
    _fault(
        "state-lost-in-between-fused",
        training({"steps": 4, "optimizer": _adam(fused=True)}, after_step=_forget_all),
        "weights|boundary|structure|argument|result",
        step=2,
        runs=WITH_L0,
    ),
    _fault(
        "not-given-all-weights",
        training(optimizer=_all_but_the_norm),
        "structure",
        at=STEP,
        runs=WITH_L0,
    ),
    _fault(
        "decay-in-the-wrong-group",
        training({"optimizer": _groups(0.1, 0.0)}, optimizer=_groups(0.0, 0.1)),
        "argument",
        runs=WITH_L0,
    ),
    _other("learning-rate", lr=1.1e-2, quick=True),
    _other("betas", betas=(0.9, 0.99)),
    _other("first-beta", betas=(0.8, 0.999)),
    _other("eps", eps=1e-3),
    _other("weight-decay", weight_decay=0.1),
    _other("amsgrad", amsgrad=True),
    _fault(
        "betas-fused",
        training(
            {"optimizer": _adam(fused=True), "steps": 3},
            optimizer=_adam(fused=True, betas=(0.8, 0.999)),
        ),
        "argument",
        at=STEP + "|Torch._fused*",
        step=None,
        runs=WITH_L0,
    ),
    _fault(
        "betas-foreach",
        training(
            {"optimizer": _adam(foreach=True)}, optimizer=_adam(foreach=True, betas=(0.8, 0.999))
        ),
        "argument",
    ),
    _fault(
        "momentum",
        training({"optimizer": sgd}, optimizer=functools.partial(sgd, momentum=0.8)),
        "argument",
        step=None,
        runs=WITH_L0,
    ),
    _fault(
        "nesterov",
        training({"optimizer": sgd}, optimizer=functools.partial(sgd, nesterov=True)),
        "argument",
        runs=WITH_L0,
    ),
    _fault(
        "other-class",
        training(optimizer=lambda p: torch.optim.NAdam(p, lr=1e-2)),
        "structure|argument",
        at=INSIDE,
    ),
    # healthy
    Case(
        "adam-fused-loop",
        FAMILY,
        training({"steps": 3, "optimizer": _adam(foreach=False)}, optimizer=_adam(fused=True)),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "adam-fused-foreach",
        FAMILY,
        training({"steps": 3, "optimizer": _adam(foreach=True)}, optimizer=_adam(fused=True)),
        runs=WITH_L0,
    ),
    Case(
        "adam-foreach-loop",
        FAMILY,
        training({"steps": 3, "optimizer": _adam(foreach=False)}, optimizer=_adam(foreach=True)),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "adam-fused-both-other-kernels",
        FAMILY,
        training({"steps": 3, "optimizer": _adam(fused=True)}, inside=other_kernels),
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "sgd-fused-loop",
        FAMILY,
        training(
            {"steps": 3, "optimizer": functools.partial(sgd, foreach=False)},
            optimizer=functools.partial(sgd, fused=True),
        ),
    ),
    Case(
        "nadam-foreach-loop",
        FAMILY,
        training(
            {
                "steps": 3,
                "net": Attention,
                "data": tokens,
                "loss": token_loss,
                "optimizer": functools.partial(torch.optim.NAdam, lr=1e-3, foreach=False),
            },
            optimizer=functools.partial(torch.optim.NAdam, lr=1e-3, foreach=True),
        ),
        runs=WITH_L0,
    ),
    Case("resumed-and-other-kernels", FAMILY, training(RESUMED, inside=other_kernels)),
    Case(
        "resumed-fused",
        FAMILY,
        training({**RESUMED, "optimizer": _adam(fused=True)}, inside=other_kernels),
    ),
]
