"""Habits of real programs: set-up, evaluation between steps, optimizers of one's own, spellings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.arguments import numbers
from trust.harness import ALL_KEEPS, Case, Start
from trust.kernels import gain, other_kernels, wrong_kernel
from trust.programs import (
    Mlp,
    built,
    sgd,
    training,
    vectors,
)

SETUP = "set-up and habits"
SPELLINGS = "other spellings"
WITH_L0 = (*ALL_KEEPS, "tensors L0", "stats L0")
EVERY = (*WITH_L0, "tensors L2")


class Lion(torch.optim.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, parameters: Any, lr: float = 1e-2, beta: float = 0.9, decay: float = 0.1):
        super().__init__(parameters, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                update = state["average"].mul(group["beta"]).add(p.grad, alpha=1 - group["beta"])
                p.mul_(1 - group["lr"] * group["decay"]).add_(update.tanh(), alpha=-group["lr"])
                state["average"].lerp_(p.grad, 1 - group["beta"])


class Initialised(Mlp):
    """Weights drawn by hand while it is recorded."""

    def __init__(self, std: float = 0.2, extra: bool = False) -> None:
        super().__init__()
        if extra:
            kept = torch.get_rng_state()
            Mlp()
            torch.set_rng_state(kept)
        nn.init.normal_(self.first.weight, std=std)
        nn.init.xavier_uniform_(self.second.weight)


def _evaluated(times: int) -> Any:
    """Looks at the loss of other data after each step, without gradients."""

    def after(net: nn.Module, optimizer: Any, step: int) -> None:
        net.eval()
        with torch.no_grad():
            for i in range(times):
                x, y = vectors(50 + i)
                F.mse_loss(net(x), y).item()
        net.train()

    return after


def _frozen(net: nn.Module, optimizer: Any) -> None:
    net.first.weight.requires_grad_(False)


def _all_but_one(parameters: Any) -> torch.optim.Optimizer:
    return sgd(list(parameters)[:-1])


def _scaled_data(net: nn.Module, step: int) -> None:
    for parameter in net.parameters():
        parameter.grad.data.mul_(0.5)


def _clamped(limit: float) -> Any:
    def after(net: nn.Module, optimizer: Any, step: int) -> None:
        for parameter in net.parameters():
            parameter.data.clamp_(-limit, limit)

    return after


def _followed(tau: float) -> Any:
    """A second net that follows the first, as in reinforcement learning."""
    other = Mlp()

    def after(net: nn.Module, optimizer: Any, step: int) -> None:
        if step == 0:
            other.load_state_dict(net.state_dict())
        for a, b in zip(other.parameters(), net.parameters(), strict=True):
            a.data.mul_(1 - tau).add_(b.data, alpha=tau)

    return after


class Normed(Mlp):
    """A linear under spectral norm, whose power iteration has buffers of its own."""

    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(self.first, n_power_iterations=turns)


class Own(torch.autograd.Function):
    """A gelu with a backward by hand; `factor` is a mistake in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        inner = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
        return grad * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * inner) * ctx.factor, None


class WithOwn(Mlp):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Own.apply(self.norm(self.first(x)), self.factor))


def _step_lr(gamma: float) -> Any:
    def after(net: nn.Module, optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)
        optimizer.plan.step()

    return after


RECORDED = {"net": Initialised, "build_recorded": True}
LION = {"optimizer": Lion, "steps": 3}

SETUP_CASES = [
    Case(
        "setup-other-standard-deviation",
        SETUP,
        training(RECORDED, net=functools.partial(Initialised, 0.1)),
        at="*normal_*",
        cause="argument|seed",
        step=0,
        quick=True,
    ),
    Case(
        "setup-one-layer-frozen",
        SETUP,
        training({"optimizer": sgd}, prepare=_frozen),
        at="Functional.linear.0.*|Module.first.*|Module.*parameters_grad*|Optimizer.*|Tensor.requires*",
        cause="structure|argument|boundary|weights",
        runs=WITH_L0,
    ),
    Case(
        "setup-parameter-forgotten",
        SETUP,
        training({"optimizer": sgd}, optimizer=_all_but_one),
        at="Optimizer.SGD.step.0|Tensor.clone.*|Tensor.add_.*|Functional.linear.1.forward|Module.second*",
        cause="structure|argument|boundary|weights",
        runs=WITH_L0,
        quick=True,
    ),
    Case(
        "setup-gradients-halved-through-data",
        SETUP,
        training({"optimizer": sgd}, before_step=_scaled_data),
        at="Tensor.mul_.0.forward",
        culprits=6,  # one a parameter
        cause="structure",
        step=0,
    ),
    Case(
        "setup-weights-clamped-harder",
        SETUP,
        training({"steps": 3, "after_step": _clamped(0.2)}, after_step=_clamped(0.1)),
        at="Tensor.clamp_.0.forward",
        culprits=6,  # one a parameter
        cause="argument",
        step=0,
        quick=True,
    ),
    Case(
        "setup-follower-of-other-speed",
        SETUP,
        training({"steps": 3, "after_step": _followed(0.1)}, after_step=_followed(0.2)),
        at="Tensor.mul_.*|Tensor.add_.*",
        culprits=6,  # one a parameter
        cause="argument",
    ),
    Case(
        "setup-own-optimizer-other-beta",
        SETUP,
        training(LION, optimizer=functools.partial(Lion, beta=0.8)),
        at="Optimizer.Lion.step.0|Tensor.mul.0.forward|Tensor.add.0.forward",
        cause="argument",
        step=0,
        runs=WITH_L0,
    ),
    Case(
        "setup-own-optimizer-and-gelu-wrong",
        SETUP,
        training(LION, inside=functools.partial(wrong_kernel, "gelu", gain(1.01))),
        at="Functional.gelu.0.forward",
        cause="result",
        step=0,
        quick=True,
    ),
    Case(
        "setup-power-iteration-turns",
        SETUP,
        training({"net": Normed, "steps": 2}, net=functools.partial(Normed, 3)),
        at="*",
        cause="structure|argument|weights",
        step=0,
    ),
    Case(
        "setup-own-function-wrong-backward",
        SETUP,
        training({"net": WithOwn}, net=functools.partial(WithOwn, 1.01)),
        at="Function.Own*backward*|Tensor.mul.*",
        cause="result|argument|structure",
        step=0,
    ),
    Case(
        "setup-evaluated-and-gelu-wrong",
        SETUP,
        training(
            {"steps": 2},
            after_step=_evaluated(5),
            inside=functools.partial(wrong_kernel, "gelu", gain(1.01)),
        ),
        at="Functional.gelu.0.forward",
        cause="result",
        step=0,
    ),
    Case(
        "setup-plan-of-other-gamma",
        SETUP,
        training({"steps": 3, "after_step": _step_lr(0.9)}, after_step=_step_lr(0.8)),
        at="Optimizer.AdamW.step.0",
        cause="argument",
        step=1,
        runs=WITH_L0,
    ),
    # healthy
    Case(
        "setup-extra-net",
        SETUP,
        training(RECORDED, net=functools.partial(Initialised, extra=True)),
        quick=True,
    ),
    Case(
        "setup-evaluated-between-steps",
        SETUP,
        training({"steps": 3}, after_step=_evaluated(1)),
        runs=EVERY,
    ),
    Case(
        "setup-evaluated-much-between-steps",
        SETUP,
        training({"steps": 3}, after_step=_evaluated(12)),
        runs=WITH_L0,
    ),
    Case(
        "setup-own-optimizer-other-kernels",
        SETUP,
        training(LION, inside=other_kernels),
        runs=EVERY,
        quick=True,
    ),
    Case(
        "setup-spectral-norm-other-kernels",
        SETUP,
        training({"net": Normed, "steps": 3}, inside=other_kernels),
        runs=EVERY,
    ),
    Case("setup-own-function-or-torch's", SETUP, training({"steps": 3}, net=WithOwn), runs=WITH_L0),
    Case(
        "setup-own-function-other-kernels",
        SETUP,
        training({"net": WithOwn, "steps": 3}, inside=other_kernels),
        runs=EVERY,
    ),
    Case(
        "setup-plan-other-kernels",
        SETUP,
        training({"steps": 3, "after_step": _step_lr(0.9)}, inside=other_kernels),
        runs=WITH_L0,
    ),
    Case(
        "setup-clamped-other-kernels",
        SETUP,
        training({"steps": 3, "after_step": _clamped(0.2)}, inside=other_kernels),
        runs=EVERY,
    ),
    Case(
        "setup-follower-other-kernels",
        SETUP,
        training({"steps": 3, "after_step": _followed(0.1)}, inside=other_kernels),
        runs=WITH_L0,
    ),
]


def _spelled(*ways: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Something computed by the second way and by the first, between two linears."""

    def program(start: Start, is_actual: bool) -> None:
        torch.manual_seed(0)
        net, head = nn.Linear(12, 12), nn.Linear(12, 4)
        x, y = numbers(8, 12), numbers(12, 12, seed=4).requires_grad_()
        with start():
            hidden = F.gelu(net(x))
            found = ways[0 if is_actual else 1](hidden, y)
            F.gelu(head(found.reshape(-1, 12))).square().mean().backward()

    return program


def _same(
    name: str,
    *ways: Callable[[Tensor, Tensor], Tensor],
    quick: bool = False,
    runs: tuple[str, ...] = (*ALL_KEEPS, "tensors L2"),
) -> Case:
    return Case(f"spelled-{name}", SPELLINGS, _spelled(*ways), runs=runs, quick=quick)


def _not_same(
    name: str,
    at: str,
    *ways: Callable[[Tensor, Tensor], Tensor],
    quick: bool = False,
    cause: str = "structure|argument|result",
) -> Case:
    return Case(f"spelled-{name}", SPELLINGS, _spelled(*ways), at=at, cause=cause, quick=quick)


def _cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(8), reduction="none")[:, None] * x


def _by_nll(x: Tensor, wrong: float = 1.0) -> Tensor:
    picked = (x * wrong if wrong != 1 else x).log_softmax(-1)
    return F.nll_loss(picked, torch.arange(8), reduction="none")[:, None] * x


SPELLING_CASES = [
    _same("einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), lambda x, y: x @ y, quick=True),
    _same("linear-or-matmul", lambda x, y: F.linear(x, y), lambda x, y: x @ y.T),
    _same(
        "softmax-by-exp",
        lambda x, y: (x.exp() / x.exp().sum(-1, keepdim=True)) @ y,
        lambda x, y: x.softmax(-1) @ y,
    ),
    _same("cross-entropy-in-two", lambda x, y: _by_nll(x), lambda x, y: _cross_entropy(x)),
    _same(
        "sigmoid-by-tanh",
        lambda x, y: (0.5 * (x * 0.5).tanh() + 0.5) @ y,
        lambda x, y: x.sigmoid() @ y,
    ),
    _same(
        "silu-in-two", lambda x, y: (x * x.sigmoid()) @ y, lambda x, y: F.silu(x) @ y, quick=True
    ),
    _same(
        "norm-by-division",
        lambda x, y: x / x.pow(2).sum(-1, keepdim=True).sqrt() @ y,
        lambda x, y: F.normalize(x, dim=-1) @ y,
    ),
    _same(
        "sum-in-another-order", lambda x, y: x + (y[:8] + x * 2), lambda x, y: (x + y[:8]) + x * 2
    ),
    _same(
        "stacked-or-added",
        lambda x, y: torch.stack([x, y[:8], x * y[:8]]).sum(0),
        lambda x, y: x + y[:8] + x * y[:8],
    ),
    _same("in-place", lambda x, y: F.relu_(x * 2) @ y, lambda x, y: F.relu(x * 2) @ y),
    _same(
        "split-matmul", lambda x, y: torch.cat([x @ y[:, :6], x @ y[:, 6:]], 1), lambda x, y: x @ y
    ),
    _same("addmm-or-two", lambda x, y: torch.addmm(x, x, y), lambda x, y: x @ y + x),
    # faults
    _not_same(
        "einsum-transposed",
        "Torch.einsum.0.*|Tensor.matmul.0.*",
        lambda x, y: torch.einsum("ij,kj->ik", x, y),
        lambda x, y: x @ y,
        quick=True,
    ),
    _not_same(
        "linear-not-transposed",
        "Functional.linear.1.*|Tensor.matmul.0.*|Tensor.T.0.*",
        lambda x, y: F.linear(x, y),
        lambda x, y: x @ y,
    ),
    _not_same(
        "silu-in-two-wrong",
        "Tensor.sigmoid.0.*|Tensor.mul.*|Functional.silu.0.*",
        lambda x, y: (x * (1.702 * x).sigmoid()) @ y,
        lambda x, y: F.silu(x) @ y,
        quick=True,
    ),
    _not_same(
        "norm-by-division-wrong",
        "Tensor.pow.0.*|Tensor.sum.0.*|Tensor.*div*|*normalize*|Tensor.sqrt*",
        lambda x, y: x / x.pow(2).mean(-1, keepdim=True).sqrt() @ y,
        lambda x, y: F.normalize(x, dim=-1) @ y,
    ),
    _not_same(
        "cross-entropy-in-two-wrong",
        "Tensor.mul.0.*|Tensor.log_softmax.0.*|Functional.*",
        lambda x, y: _by_nll(x, 1.1),
        lambda x, y: _cross_entropy(x),
    ),
    _not_same(
        "split-matmul-swapped",
        "Torch.cat.0.*|Tensor.matmul.*|Tensor.__getitem__.*",
        lambda x, y: torch.cat([x @ y[:, 6:], x @ y[:, :6]], 1),
        lambda x, y: x @ y,
    ),
    _not_same(
        "addmm-other-beta",
        "Torch.addmm.0.*|Tensor.matmul.0.*|Tensor.add.0.*",
        lambda x, y: torch.addmm(x, x, y, beta=0.9),
        lambda x, y: x @ y + x,
    ),
    _not_same(
        "other-slice",
        "Tensor.__getitem__.0.*",
        lambda x, y: x * y[1:9],
        lambda x, y: x * y[:8],
        quick=True,
    ),
    _not_same(
        "other-positions",
        "Torch.arange.0.*",
        lambda x, y: x * torch.arange(1, 13),
        lambda x, y: x * torch.arange(0, 12),
    ),
    _not_same(
        "other-index-assigned",
        "Tensor.__setitem__.0.*",
        lambda x, y: _zeroed(x, 1) @ y,
        lambda x, y: _zeroed(x, 2) @ y,
    ),
]


def _zeroed(x: Tensor, column: int) -> Tensor:
    x = x.clone()
    x[:, column] = 0
    return x


class Twice(nn.Module):
    """Torch's own encoder layer, whose evaluation has a fast path."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            12, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[None])[0])


@contextlib.contextmanager
def _no_fast_path() -> Any:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def _encoder(start: Start, is_actual: bool, grad: bool = False, norm_first: bool = False) -> None:
    net = built(functools.partial(Twice, norm_first and is_actual))
    net.train(grad)
    with contextlib.ExitStack() as stack:
        if is_actual and not norm_first:
            stack.enter_context(_no_fast_path() if not grad else other_kernels())
        stack.enter_context(start())
        stack.enter_context(torch.set_grad_enabled(grad))
        y = net(vectors(0)[0])
        if grad:
            y.square().mean().backward()


SPELLING_CASES += [
    Case("spelled-encoder-fast-path", SPELLINGS, _encoder, runs=EVERY),
    Case(
        "spelled-encoder-other-kernels",
        SPELLINGS,
        functools.partial(_encoder, grad=True),
        runs=EVERY,
    ),
    Case(
        "spelled-encoder-norm-first",
        SPELLINGS,
        functools.partial(_encoder, grad=True, norm_first=True),
        at="*",
        cause="structure",
    ),
    Case(
        "spelled-zero-grad-in-place",
        SPELLINGS,
        training(
            {"steps": 3},
            zero_grad=False,
            after_step=lambda net, optimizer, step: optimizer.zero_grad(set_to_none=False),
        ),
        runs=EVERY,
    ),
    Case(
        "spelled-clipping-in-a-loop",
        SPELLINGS,
        training(
            {
                "steps": 3,
                "before_step": lambda net, step: nn.utils.clip_grad_norm_(
                    net.parameters(), 0.1, foreach=True
                ),
            },
            before_step=lambda net, step: nn.utils.clip_grad_norm_(
                net.parameters(), 0.1, foreach=False
            ),
        ),
        runs=EVERY,
    ),
]

CASES = [*SETUP_CASES, *SPELLING_CASES]
