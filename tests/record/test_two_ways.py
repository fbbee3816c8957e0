"""Calls of one graph node, and modules with one result and one input, are followed by less than
others: what is written down is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recorded import record
from tensorprobe import native
from tensorprobe.follow import gradients
from tensorprobe.record import tape
from tensorprobe.records import Capture
from tiny_models import MODELS


@pytest.fixture(autouse=True)
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in C++ is in tests/native."""
    monkeypatch.setattr(native, "MODULE", None)


def told(capture: Capture) -> list[tuple[Any, ...]]:
    """All that a capture says of its calls, but for the stack, which has this file's lines."""
    return [
        (
            call.name,
            call.op,
            call.module,
            call.parent,
            call.status,
            call.notes,
            call.args,
            call.outputs,
            call.tensors,
        )
        for call in capture.calls
    ]


def calls() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    w = torch.randn(6, 6, requires_grad=True)
    y = x * w[:4] + x
    y = (y * y).sin().transpose(0, 1) @ y.relu()
    y = torch.cat([y, y.mul_(2)], dim=1).clone()
    y[:, 2] *= 3
    a, b = y.chunk(2, dim=1)
    z = torch.addmm(a, a, b) - F.layer_norm(b, (6,), w[0]).masked_fill(b > 0, 0.5)
    z.register_hook(lambda grad: grad * 2)
    loss = z.detach().sum() + z.square().mean() + torch.where(b > 0, a, b).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _training(name: str) -> Callable[[], None]:
    model, loss = MODELS[name]()

    def run() -> None:
        torch.manual_seed(0)
        model.zero_grad()
        loss(model).backward()

    return run


@pytest.mark.parametrize("program", ["calls", "gpt2", "llama"])
def test_the_same_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    run = calls if program == "calls" else _training(program)
    found: list[torch.Tensor] = []

    def followed(output: torch.Tensor, inputs: Any) -> Any:
        by_less = one_node(output, inputs)
        if by_less is not None:
            found.append(output.detach())
        return by_less

    one_node = tape.one_node
    monkeypatch.setattr(tape, "one_node", followed)
    by_less = record(tmp_path / "less", run, level="L1", keep="stats")
    monkeypatch.setattr(tape, "one_node", lambda output, inputs: None)
    by_more = record(tmp_path / "more", run, level="L1", keep="stats")
    assert len(found) > 10
    assert told(by_less) == told(by_more)
    assert by_less.gaps == by_more.gaps


class Leaky(nn.Module):
    """Keeps a tensor from inside, through which backward can come past the result."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.inside = x * scale
        return self.inside.sin()


class Wrapped(nn.Module):
    """A child whose result is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.leaky = Leaky()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.linear(self.leaky(x, scale=2.0))
        return x if y is None else x + y


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("broken")


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x.sin()).cos()  # type: ignore[no-any-return]


WRAPPED = Wrapped()
WITH_BREAK = nn.Sequential(nn.Linear(6, 6), Broken(), nn.ReLU())


def modules() -> None:
    torch.manual_seed(0)
    model = WRAPPED
    model.zero_grad()
    x = torch.randn(4, 6, requires_grad=True)
    result = model(x)
    result.register_hook(lambda grad: grad * 2)
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    model(x)
    model.leaky.inside.sum().backward()  # past the results of both
    hidden = x * 2
    model(hidden, y=hidden).sum().backward()
    model(x * 3).chunk(2)[1].sum().backward()
    model(x * 3, y=None).detach()
    nn.ReLU()(x * 3)[0].sum().backward(inputs=[x])
    with pytest.raises(ValueError, match="broken"):
        nn.Sequential(nn.ReLU(), model)(Breaks.apply(x.sin())).sum().backward()


def broken_inside() -> None:
    torch.manual_seed(0)
    WITH_BREAK.zero_grad()
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(ValueError, match="broken"):
        WITH_BREAK(x).sum().backward()


PROGRAMS: dict[str, Callable[[], None]] = {"modules": modules, "broken": broken_inside}


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("program", ["modules", "broken", "gpt2", "llama"])
def test_the_same_is_written_down_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, level: str
) -> None:
    run = PROGRAMS.get(program) or _training(program)
    n_found = 0

    def way(*found: Any) -> gradients.Way:
        nonlocal n_found
        n_found += 1
        return gradients_way(*found)

    gradients_way = gradients.Way
    monkeypatch.setattr(gradients, "Way", way)
    by_less = record(tmp_path / "less", run, level=level, keep="stats")
    monkeypatch.setattr(gradients, "only_node", lambda outputs, inputs: None)
    by_more = record(tmp_path / "more", run, level=level, keep="stats")
    assert n_found > 0
    assert told(by_less) == told(by_more)
    assert by_less.gaps == by_more.gaps
