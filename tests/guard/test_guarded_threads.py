"""Programs of several threads: what one does hides nothing of another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
