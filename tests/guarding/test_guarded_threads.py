"""Programs of several threads: what one does hides nothing of another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorprobe as tp


class Overflows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(1e30).mul(1e30)


def findings(folder: Path, program: Callable[[], None]) -> list[str]:
    guard = tp.Guard(folder, overflow_nums=-1, log=lambda text: None)
    with guard:
        program()
    return [finding.name for finding in guard.findings]


def test_overflow_while_another_thread_is_in_its_optimizer(tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inside.set()
            assert done.wait(60)

    slow = Slow([nn.Parameter(torch.ones(2))])

    def program() -> None:
        thread = threading.Thread(target=slow.step)
        thread.start()
        assert inside.wait(60)
        Overflows()(torch.ones(2))
        done.set()
        thread.join()

    assert findings(tmp_path, program) == ["Tensor.mul.1.forward"]


def test_overflow_after_an_optimizer_has_raised(tmp_path: Path) -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no step")

    optimizer = Raises([nn.Parameter(torch.ones(2))])

    def program() -> None:
        try:
            optimizer.step()
        except ValueError:
            Overflows()(torch.ones(2))

    assert findings(tmp_path, program) == ["Tensor.mul.1.forward"]


def test_error_in_backward_while_another_goes_on(tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(60)
            return grad

    class Bad(Slow):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            thread.start()
            assert inside.wait(60)
            return torch.ones(7)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(x.cos()).tanh().sum()

    model, x = Model(), torch.ones(2, requires_grad=True)
    thread = threading.Thread(
        target=lambda: model(torch.ones_like(x, requires_grad=True)).backward()
    )
    guard = tp.Guard(tmp_path, "errors", timeout=0, log=lambda text: None)
    with guard:
        with pytest.raises(RuntimeError, match="invalid gradient"):
            Bad.apply(x.sin()).exp().sum().backward()
        done.set()
        thread.join()
    assert [finding.name for finding in guard.findings] == ["Function.Bad.0.backward"]


def test_backward_of_another_thread_is_not_rerouted(tmp_path: Path) -> None:
    """Nodes of the graph are numbered by each thread for itself."""
    together = threading.Barrier(2)
    layer = nn.Linear(3, 3)

    class Curve(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().tanh().sigmoid()

    def work(model: nn.Module) -> None:
        loss = model(torch.ones(1, 3, requires_grad=True)).sum()
        together.wait(60)
        loss.backward()

    with tp.reroute({"aten.addmm": "float64"}) as rerouted:
        threads = [threading.Thread(target=work, args=(m,)) for m in (layer, Curve())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = {name.rpartition(".")[0] for name in rerouted.calls}
    assert names == {"Aten.addmm", "Aten.mm", "Aten.sum"}
