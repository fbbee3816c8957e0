"""A small training that a session of the door dumps, and its files read back by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorprobe.peers.ptdbg.ptdbg_session import PtdbgSession
from tensorprobe.ptdbg_ascend import acc_cmp_dump


class Net(nn.Module):
    """conv, batch norm, an operator, a view, a linear, a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        h = torch.cat([h, h * 2], 1)
        return self.fc(h) + 1


def train(net: nn.Module, steps: int = 1) -> None:
    """Forward, backward and an update; the same numbers in every call."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        x = torch.arange(216, dtype=torch.float32).reshape(2, 3, 6, 6) / 100 + step
        loss = nn.functional.cross_entropy(net(x), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@contextmanager
def session(path: Path | None, **options: Any) -> Iterator[PtdbgSession]:
    """A session with its path and its hook, closed at the end."""
    made = PtdbgSession()
    if path is not None:
        made.set_dump_path(path, "ptdbg_dump")
    made.register_hook(None, acc_cmp_dump, **options)
    try:
        yield made
    finally:
        made.close()


def dump(path: Path, program: Callable[[], object] | None = None, **switch: Any) -> Path:
    """Dump a program (the training) and give the folder of rank 0."""
    model = net()
    with session(path) as made:
        made.set_dump_switch("ON", **switch)
        program() if program is not None else train(model)
        made.set_dump_switch("OFF")
    return path.parent / "ptdbg_dump_v2.3" / "rank0"


def lines(index: Path) -> list[list[Any]]:
    return [json.loads(line) for line in index.read_text().splitlines()]


def names(index: Path) -> list[str]:
    return [line[0] for line in lines(index)]


def call_names(index: Path) -> list[str]:
    """The calls of an index in order, each once."""
    stems = [name.rpartition("ward_")[0] + "ward" for name in names(index)]
    return list(dict.fromkeys(stems))
