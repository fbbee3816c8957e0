"""Calls of one graph node are followed by less than others: what is written down is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from recorded import record
from tensorprobe.capture import tape
from tensorprobe.records import Capture
from tiny_models import MODELS


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
