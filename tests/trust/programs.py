"""The small programs that cases are made of: nets, their data, and a training loop to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust.harness import Program, Start

Batch = tuple[Tensor, Tensor]


class Mlp(nn.Module):
    """Two linears with a norm between them."""

    def __init__(self, eps: float = 1e-5, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.second = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


class BatchNormed(nn.Module):
    """A convolution, a batch norm, a linear."""

    def __init__(self, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6, momentum=momentum, eps=eps)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Attention(nn.Module):
    """A block of a transformer, with sdpa or with attention written out."""

    def __init__(self, written_out: bool = False, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.written_out, self.heads = written_out, heads
        self.embed = nn.Embedding(20, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 20)
        self.is_causal = True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        mixed = self.attend(q, k, v).transpose(1, 2).reshape(n, length, width)
        return self.head(x + self.out(mixed))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.written_out:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def vectors(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 12, generator=generator)
    return x, torch.randn(8, 4, generator=generator)


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, 3, 8, 8, generator=generator) * 2 + 1
    return x, torch.randn(4, 4, generator=generator)


def tokens(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 20, (2, 10), generator=generator)
    return ids, ids.roll(-1, 1)


def square_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x), y)


def token_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = net(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, **options})


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 1e-1, "momentum": 0.9, **options})


def train(
    start: Start,
    *,
    net: Callable[[], nn.Module] = Mlp,
    seed: int = 0,
    steps: int = 2,
    data: Callable[[int], Batch] = vectors,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = square_loss,
    edit_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    backward: Callable[[Tensor], object] = lambda loss: loss.backward(),
    before_step: Callable[[nn.Module, int], object] = lambda net, step: None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer, int], object] = lambda *_: None,
    zero_grad: bool = True,
    prepare: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda *_: None,
    inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    build_recorded: bool = False,
) -> None:
    """Train a net for some steps under a recorder. Each argument is a place to differ at."""
    with contextlib.ExitStack() as stack:
        if not build_recorded:
            model = built(net, seed)
            optim = optimizer(model.parameters())
            prepare(model, optim)
        batches = [data(step) for step in range(steps)]
        torch.manual_seed(7)  # dropout
        stack.enter_context(inside())
        recorder = stack.enter_context(start())
        if build_recorded:
            model = built(net, seed)
            optim = optimizer(model.parameters())
            prepare(model, optim)
        for step in range(steps):
            backward(edit_loss(loss(model, *batches[step])))
            before_step(model, step)
            optim.step()
            after_step(model, optim, step)
            if zero_grad:
                optim.zero_grad()
            recorder.step()


def training(both: dict[str, Any] | None = None, **changes: Any) -> Program:
    """`train` with the arguments of both sides, and on the actual side with `changes` too."""

    def program(start: Start, is_actual: bool) -> None:
        train(start, **{**(both or {}), **(changes if is_actual else {})})

    return program


def infer(
    start: Start,
    *,
    net: Callable[[], nn.Module] = Mlp,
    data: Callable[[int], Batch] = vectors,
    prepare: Callable[[nn.Module], object] = lambda _: None,
    inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    steps: int = 1,
    seed: int = 0,
) -> None:
    """A net in eval mode, without gradients."""
    model = built(net, seed).eval()
    prepare(model)
    batches = [data(step)[0] for step in range(steps)]
    with inside(), start() as recorder, torch.no_grad():
        for batch in batches:
            model(batch)
            recorder.step()


def inferring(both: dict[str, Any] | None = None, **changes: Any) -> Program:
    """`infer` with the arguments of both sides, and on the actual side with `changes` too."""

    def program(start: Start, is_actual: bool) -> None:
        infer(start, **{**(both or {}), **(changes if is_actual else {})})

    return program


def calling(program: Callable[[bool], object]) -> Program:
    """A plain function that is recorded as a whole; it is told whether it is the actual side."""

    def run(start: Start, is_actual: bool) -> None:
        with start():
            program(is_actual)

    return run
