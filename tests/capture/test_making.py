"""Notes on how a module was made follow every change of it, though they are kept between calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorprobe.capture.making import MadeNotes, notes_on


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.stages = nn.ModuleList([nn.ReLU()])
        self.scale = 1
        self.sizes = [1, 2]
        self.pair = (1, [2])
        self.activation = F.relu
        self.extra = object()


def leaf_changes() -> dict[str, Callable[[nn.Module], None]]:
    return {
        "value": lambda module: setattr(module, "in_features", 7),
        "type": lambda module: setattr(module, "in_features", True),
        "absence": lambda module: setattr(module, "bias", None),
        "mode": lambda module: module.eval() and None,
        "text": lambda module: setattr(module, "extra_repr", lambda: "4, 4"),
    }


def block_changes() -> dict[str, Callable[[nn.Module], None]]:
    return {
        "value": lambda module: setattr(module, "scale", 2),
        "type": lambda module: setattr(module, "scale", 1.0),
        "list": lambda module: module.sizes.append(3),
        "list inside": lambda module: module.pair[1].append(3),
        "function": lambda module: setattr(module, "activation", F.gelu),
        "kind": lambda module: setattr(module, "extra", 5),
        "child": lambda module: setattr(module, "layer", nn.Identity()),
        "grandchild": lambda module: module.stages.append(nn.Tanh()),
        "new": lambda module: setattr(module, "more", 3),
        "gone": lambda module: delattr(module, "scale"),
    }


@pytest.mark.parametrize("change", leaf_changes())
def test_a_changed_leaf(change: str) -> None:
    notes, module = MadeNotes(), nn.Linear(1, 2)
    assert notes.of(module) == notes.of(module) == notes_on(module)
    before = notes_on(module)
    leaf_changes()[change](module)
    assert notes.of(module) == notes_on(module) != before


@pytest.mark.parametrize("change", block_changes())
def test_a_changed_block(change: str) -> None:
    notes, module = MadeNotes(), Block()
    assert notes.of(module) == notes.of(module) == notes_on(module)
    before = notes_on(module)
    block_changes()[change](module)
    assert notes.of(module) == notes_on(module) != before


def test_a_plain_block_is_noted_once_and_not_kept_alive() -> None:
    notes, module = MadeNotes(), nn.Conv2d(1, 2, 3)
    first = notes.of(module)
    assert notes.of(module) is first
    other = nn.Conv2d(1, 2, 5)
    assert notes.of(other) == notes_on(other) != first
    reference = torch._C._WeakTensorRef(module.weight)
    del module
    assert reference.expired()
