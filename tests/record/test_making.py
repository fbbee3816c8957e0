"""Notes on how a module was made follow every change of it, though they are kept between calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorprobe.record.making import MadeNotes, notes_on


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


class Other(Block):
    pass


class Layers(nn.Module):
    """Kept between calls: nothing in it can change unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.eps = 0.5
        self.sizes = (1, 2)
        self.activation = F.relu
        self.extra = object()
        self.table = torch.ones(3)


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
        "no grandchild": lambda module: module.stages.pop(0) and None,
        "no holder": lambda module: delattr(module, "stages"),
        "holder absent": lambda module: setattr(module, "stages", None),
        "class": lambda module: setattr(module, "__class__", Other),
        "new": lambda module: setattr(module, "more", 3),
        "gone": lambda module: delattr(module, "scale"),
    }


def layers_changes() -> dict[str, Callable[[nn.Module], None]]:
    return {
        "value": lambda module: setattr(module, "eps", 0.25),
        "equal value": lambda module: setattr(module, "eps", np.float64(0.5)),
        "tuple": lambda module: setattr(module, "sizes", (1, 3)),
        "tuple of tensors": lambda module: setattr(module, "sizes", (torch.ones(2), 2)),
        "function": lambda module: setattr(module, "activation", F.gelu),
        "tensor gone": lambda module: setattr(module, "table", 1),
        "child": lambda module: module.layers.append(nn.Tanh()),
        "child of another class": lambda module: setattr(module.layers, "1", nn.Tanh()),
        "no holder": lambda module: delattr(module, "layers"),
        "holder absent": lambda module: setattr(module, "layers", None),
        "new": lambda module: setattr(module, "more", 3),
        "another instead": lambda module: delattr(module, "eps") or setattr(module, "more", 3),
        "parameter": lambda module: module.register_parameter("scale", None),
        "mode": lambda module: module.eval() and None,
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


@pytest.mark.parametrize("change", layers_changes())
def test_a_changed_module_of_which_notes_are_kept(change: str) -> None:
    notes, module = MadeNotes(), Layers()
    before = notes.of(module)
    assert notes.of(module) is before
    layers_changes()[change](module)
    assert notes.of(module) == notes_on(module) != before
    assert notes.of(module) == notes_on(module)


def test_a_module_that_a_function_of_its_own_closes_over_is_not_kept_alive() -> None:
    def noted() -> weakref.ref[nn.Module]:
        module = Layers()
        module.activation = lambda x: module(x)
        notes.of(module)
        return weakref.ref(module)

    notes = MadeNotes()
    reference = noted()
    gc.collect()
    assert reference() is None


def test_a_plain_block_is_noted_once_and_not_kept_alive() -> None:
    notes, module = MadeNotes(), nn.Conv2d(1, 2, 3)
    first = notes.of(module)
    assert notes.of(module) is first
    other = nn.Conv2d(1, 2, 5)
    assert notes.of(other) == notes_on(other) != first
    reference = torch._C._WeakTensorRef(module.weight)
    del module
    assert reference.expired()
