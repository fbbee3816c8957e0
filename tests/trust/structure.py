"""Calls that one side has and the other has not: faults, and calls that change nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import ALL_KEEPS, Case
from trust.kernels import other_kernels
from trust.programs import Attention, Mlp, inferring, token_loss, tokens, training

FAMILY = "structure"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")
WITH_L1 = (*ALL_KEEPS, "tensors L1", "tensors L2")


class Deep(nn.Module):
    """Three blocks with a residual; `missing` names what is left out, `extra` what is put in."""

    def __init__(self, missing: str = "", extra: str = "") -> None:
        super().__init__()
        self.missing, self.extra = missing, extra
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            if self.missing == f"block{i}":
                continue
            y = x if self.missing == f"norm{i}" else norm(x)
            y = block(y)
            if self.missing != f"gelu{i}":
                y = F.gelu(y)
            y = self.added(y, i)
            x = y if self.missing == f"residual{i}" else x + y
        return self.head(x)

    def added(self, y: Tensor, i: int) -> Tensor:
        if i != 1:
            return y
        changes = {
            "scale": lambda: y * 1.01,
            "relu": lambda: F.relu(y),
            "round": lambda: y.round(decimals=2),
            "twice": lambda: self.blocks[1](y),
            "detach": lambda: y.detach(),
            "view": lambda: y.view(-1).view(y.shape),
            "contiguous": lambda: y.contiguous().clone(),
            "times one": lambda: y * 1,
            "measured": lambda: (y.abs().max().item(), y)[1],
            "cast": lambda: y.double().float(),
            "transposed": lambda: y.T.T,
            "checked": lambda: (torch.isfinite(y).all().item(), y)[1],
        }
        return changes[self.extra]() if self.extra else y


class Reordered(Mlp):
    """The activation before the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(F.gelu(self.first(x))))


class Tied(Attention):
    """The head has the weight of the embedding; `tied` on one side only."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight.copy_(self.embed.weight)
        if tied:
            self.head.weight = self.embed.weight


def _fault(name: str, at: str | dict[str, str], cause: str = "structure", **deep: Any) -> Case:
    quick = deep.pop("quick", False)
    runs = deep.pop("runs", ALL_KEEPS)
    inside = {"inside": other_kernels} if deep.pop("others", False) else {}
    return Case(
        f"structure-{name}",
        FAMILY,
        training({"net": Deep}, net=lambda: Deep(**deep), **inside),
        at=at,
        cause=cause,
        step=0,
        quick=quick,
        runs=runs,
    )


def _healthy(name: str, extra: str, quick: bool = False, runs: Any = WITH_L1) -> Case:
    return Case(
        f"structure-{name}",
        FAMILY,
        training({"net": Deep, "steps": 3}, net=lambda: Deep(extra=extra)),
        runs=runs,
        quick=quick,
    )


def _measured(net: nn.Module, step: int) -> None:
    """A norm of all gradients for a log, which changes nothing."""
    torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()


def _looked_at(net: nn.Module, step: int) -> None:
    with torch.no_grad():
        net(torch.ones(2, 12)).argmax(-1).tolist()


CASES = [
    _fault(
        "block-missing",
        "*norm*1*|Module.norms.1.*|Module.blocks.1.*|Tensor.add.*|*linear.1.*|Module.norms.2.*",
        missing="block1",
        quick=True,
    ),
    _fault(
        "norm-missing",
        "*layer_norm.1.*|Module.norms.1.*|Functional.linear.1.*|Module.blocks.1.*",
        missing="norm1",
        runs=WITH_L0,
    ),
    _fault("gelu-missing", "Functional.gelu.1.*|Tensor.add.1.*", missing="gelu1", quick=True),
    _fault(
        "residual-missing", "Tensor.add.1.*|*layer_norm.2.*|Module.norms.2.*", missing="residual1"
    ),
    _fault(
        "last-residual-missing", "Tensor.add.2.*|*linear.3.*|Module.head.*", missing="residual2"
    ),
    _fault(
        "extra-scale",
        {"*": "Tensor.mul.0.*", "L2": "Aten.mul.0.*"},
        extra="scale",
        quick=True,
        runs=WITH_L1,
    ),
    _fault("extra-scale-other-kernels", "Tensor.mul.0.*", extra="scale", others=True),
    _fault("extra-relu", "Functional.relu.0.*", extra="relu"),
    _fault("extra-rounding", "Tensor.round.0.*", extra="round"),
    _fault("layer-twice", "Functional.linear.2.*|Module.blocks.1.*", extra="twice"),
    _fault(
        "detached",
        "Tensor.detach.0.*|Functional.gelu.1.backward|Tensor.add.1.backward",
        cause="structure|boundary",
        extra="detach",
        runs=ALL_KEEPS,
    ),
    Case(
        "structure-reordered",
        FAMILY,
        training(net=Reordered),
        at="Functional.gelu.0.*|Functional.layer_norm.0.*|Module.norm.*",
        cause="structure",
        step=0,
    ),
    Case(
        "structure-reordered-in-eval",
        FAMILY,
        inferring(net=Reordered),
        at="Functional.gelu.0.*|Functional.layer_norm.0.*|Module.norm.*",
        cause="structure",
    ),
    Case(
        "structure-weights-not-tied",
        FAMILY,
        training({"net": Tied, "data": tokens, "loss": token_loss}, net=lambda: Tied(False)),
        at="Functional.linear.2.*|Module.head.*|Module.embed.*|Functional.embedding.0.*|Optimizer*",
        culprits=2,  # two weights in place of one
        cause="structure|weights|boundary",
    ),
    # healthy
    _healthy("extra-views", "view", quick=True),
    _healthy("extra-clone", "contiguous"),
    _healthy("extra-factor-of-one", "times one"),
    _healthy("extra-cast-there-and-back", "cast"),
    _healthy("extra-transposes", "transposed"),
    _healthy("extra-look", "measured"),
    _healthy("extra-check", "checked", quick=True),
    Case(
        "structure-norm-for-a-log",
        FAMILY,
        training({"steps": 3}, before_step=_measured),
        runs=WITH_L0,
    ),
    Case(
        "structure-extra-forward-without-gradients",
        FAMILY,
        training({"steps": 3}, before_step=_looked_at),
        runs=WITH_L0,
    ),
    Case(
        "structure-in-sequential",
        FAMILY,
        training({"steps": 2}, net=lambda: nn.Sequential(Mlp())),
        runs=WITH_L0,
    ),
]
