"""Rerouting on a CUDA device: the CPU's bits come back, and autocast and threads go along."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_forward_and_backward_are_those_of_the_cpu() -> None:
    layer = nn.GroupNorm(4, 16)
    x, weight = torch.randn(2, 16, 8, requires_grad=True), torch.randn(2, 16, 8)
    expected = layer(x)
    expected.backward(weight)
    there = copy.deepcopy(layer).cuda()
    y = x.detach().cuda().requires_grad_()
    with tp.reroute({"torch.group_norm": "cpu"}) as rerouted:
        actual = there(y)
        actual.backward(weight.cuda())
    assert rerouted.counts == {"torch.group_norm": 1}
    assert actual.is_cuda
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(y.grad.cpu(), x.grad)
    assert torch.equal(there.weight.grad.cpu(), layer.weight.grad)


def test_below_autograd_in_the_engines_own_thread() -> None:
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    with tp.reroute({"aten._softmax": "cpu"}) as rerouted:
        F.softmax(x, -1).square().sum().backward()
    assert rerouted.counts["aten._softmax"] >= 2
    twin = x.detach().cpu().requires_grad_()
    F.softmax(twin, -1).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), twin.grad)


@pytest.mark.parametrize("target", ["cpu", "float32", "cpu:float64"])
def test_autocast_gives_the_same_dtypes(target: str) -> None:
    x, linear = torch.randn(4, 64, device="cuda"), nn.Linear(64, 64).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        expected = [h := linear(x), F.softmax(h, -1), F.layer_norm(h, (64,)), h + x]
        with tp.reroute(dict.fromkeys(["F.linear", "softmax", "layer_norm", "add"], target)):
            actual = [h := linear(x), F.softmax(h, -1), F.layer_norm(h, (64,)), h + x]
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    assert all(t.is_cuda for t in actual)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    linear.zero_grad()
    actual[-1].sum().backward()
    assert linear.weight.grad.is_cuda


def test_in_place_random_and_everything() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    with tp.reroute({"*": "cpu"}):
        for _ in range(2):
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.is_cuda and p.isfinite().all() for p in model.parameters())
