"""Ops of real models in float64: they run, and their gradients are those of float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import tensorprobe as tp
from tiny_models import MODELS


class InFloat64(TorchFunctionMode):
    """The reference: the same functional on tensors cast by hand."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not self.function:
            return func(*args, **kwargs)
        args = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                for a in args]  # fmt: skip
        kwargs = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in kwargs.items()
        }
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs).float()


def built(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, run = MODELS[kind]()
    model.config._attn_implementation = "eager"  # softmax as a call of its own
    return model.eval(), run


def step(model: nn.Module, run: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = run(model)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


OPS = [("gpt2", F.layer_norm), ("gpt2", F.softmax), ("llama", F.linear), ("llama", F.softmax)]


@pytest.mark.parametrize(("kind", "function"), OPS, ids=lambda v: getattr(v, "__name__", v))
def test_gradients_are_those_of_a_float64_reference(kind: str, function: Any) -> None:
    model, run = built(kind)
    plain = step(model, run)
    with InFloat64(function):
        expected = step(model, run)
    with tp.reroute({f"F.{function.__name__}": "float64"}) as rerouted:
        actual = step(model, run)
    assert sum(rerouted.counts.values()) >= 2
    assert torch.equal(actual[0], expected[0])
    assert all(map(torch.equal, actual[1], expected[1]))
    assert not all(map(torch.equal, actual[1], plain[1]))
    again = step(model, run)  # and nothing of it stays
    assert all(map(torch.equal, again[1], plain[1]))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_all_of_a_model_in_float64(kind: str) -> None:
    model, run = built(kind)
    plain = step(model, run)
    with tp.reroute({"*": "float64"}):
        actual = step(model, run)
    torch.testing.assert_close(actual, plain, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_layer_by_its_path(kind: str) -> None:
    model, run = built(kind)
    plain = step(model, run)
    path = "transformer.h.1" if kind == "gpt2" else "model.layers.1"
    with tp.reroute({path: "cpu:float64"}) as rerouted:
        actual = step(model, run)
    assert rerouted.counts[path] > 10
    torch.testing.assert_close(actual, plain, rtol=1e-3, atol=1e-6)
