"""Most calls that are looked at later are noted the short way: the notes are those of the long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guard_notes import noted, stand_in_for_kernels
from tensorprobe import native
from tensorprobe.overflow.device_calls import DeviceCalls
from tiny_models import MODELS

INFINITY = float("inf")


def linear_layers() -> None:
    """Of every shape that makes another graph, and with whatever needs a gradient."""
    tied = nn.Parameter(torch.randn(4, 4))
    for _ in range(2):
        for shape in ((4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)):
            for needs in range(1, 8):
                x = torch.randn(shape, requires_grad=bool(needs & 1))
                weight = torch.randn(5, 4, requires_grad=bool(needs & 2))
                bias = torch.randn(5, requires_grad=bool(needs & 4))
                given = x * 1 if needs & 1 else x
                F.linear(given, weight, bias).sum().backward(retain_graph=True)
                if needs & 3:
                    F.linear(given, weight).sum().backward()
        F.linear(tied, tied).sum().backward()
        F.linear(tied * 2, tied, tied[0]).sum().backward()
        F.linear(torch.randn(3, 4).t()[:4].t(), tied).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wide, narrow = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4).bfloat16()
            first = F.linear(wide, tied)
            again = F.linear(first, tied) + F.linear(wide, narrow.requires_grad_())[..., :4]
        again.float().sum().backward()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def arguments() -> None:
    """Lists, keywords, numbers that are not finite, tensors that are not plain."""
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(3, 4)
    y = torch.cat([x, x * 2, w], dim=0) + torch.stack((w, w), 1).sum()
    y = torch.where(y > 0, y, -INFINITY).clamp(min=-5.0, max=INFINITY) * 1.5
    y = F.softmax(y.masked_fill(y < -1, -INFINITY), dim=-1, dtype=torch.float64).float()
    y = F.silu(y) + F.dropout(y, 0.5) + F.relu(y * 2, inplace=True)
    y = torch.add(input=y, other=y) + Double.apply(y) + Double.apply(y * 1)
    y = y[..., 1:3].mean((0, 1), keepdim=True) + torch.einsum("ij,kj->ik", x, w).sum()
    loss = torch.addcmul(y, x[:1], w[:1], value=0.5).sum(dtype=torch.float64)
    loss.backward()
    x.grad.mul_(2)
    torch.zeros(0, 3) * 2
    torch.ones(3).to(torch.int64).to(torch.float16) + 1
    torch.randn(3, dtype=torch.complex64).conj().imag * 2
    torch.topk(torch.randn(6), 2)[0] + torch.eye(2).to_sparse().sum()
    with torch.inference_mode():
        z = torch.ones(3) * 2
        z.exp() + z
    with torch.no_grad():
        (x * 2).exp()
    torch.func.grad(lambda t: (t * t).sum())(torch.randn(3))
    torch.vmap(lambda t: t * x.detach()[0] + x[0].sum())(torch.randn(2, 4))


def joins() -> None:
    """Lists of several lengths, with whatever needs a gradient, and with a tensor in it twice."""
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    w = torch.randn(3, 4)
    for _ in range(3):
        for join in (torch.cat, torch.stack):
            for given in ([x, y], [y, x], [x, x], [x, w, y], [w, x], [x, y * 2], (y, x[:3])):
                join(given).sum().backward()
            join([x, y, w], dim=1).sum().backward()
        torch.einsum("ij,ij->ij", [x, y]).sum().backward()
        torch.einsum("ij,ij->ij", [y, x]).sum().backward()


def keywords() -> None:
    """Tensors that are given by name, in whatever order."""
    x, y = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    w = torch.randn(4, 4, requires_grad=True)
    norm = nn.LayerNorm(4)
    for _ in range(3):
        norm(x * 2).sum().backward()
        F.layer_norm(y, [4], bias=w[0]).sum().backward()
        torch.mul(x, other=y).sum().backward()
        torch.mul(other=y, input=x).sum().backward()
        torch.sub(input=x, other=y).sum().backward()
        torch.mul(input=x, other=x).sum().backward()
        torch.mul(input=x.detach(), other=y).sum().backward()
        torch.cat(tensors=[x, y]).sum().backward()
        torch.addcmul(x, x, tensor2=y, value=0.5).sum().backward()
        F.linear(x, weight=w).sum().backward()
        F.linear(x, weight=w.detach()).sum().backward()
        F.linear(x, w, bias=w[0].detach()).sum().backward()
        F.linear(x, w, bias=w[0] * 1).sum().backward()
        F.scaled_dot_product_attention(x, y, x * 1, attn_mask=torch.ones(3, 3) > 0).sum().backward()
        F.scaled_dot_product_attention(x, y, y * 2, attn_mask=w[:3, :3] * 1).sum().backward()
        F.rms_norm(Double.apply(x), (4,), weight=Double.apply(w[0])).sum().backward()
        F.embedding(torch.tensor([1, 2]), weight=w).sum().backward()


LAYERS = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def recomputed() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(LAYERS, x * 1, use_reentrant=reentrant).square().sum().backward()


def _training(name: str) -> Callable[[], None]:
    model, loss = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        for _ in range(2):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


WAYS = ["native", "short", "long"] if native.MODULE is not None else ["short", "long"]


@pytest.mark.parametrize(
    "name", ["linear_layers", "arguments", "keywords", "joins", "recomputed", "gpt2", "llama"]
)
@pytest.mark.parametrize("kernels", [False, True])
def test_the_same_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernels: bool
) -> None:
    if kernels:
        stand_in_for_kernels(monkeypatch)
    found = {}
    for way in WAYS:
        torch.manual_seed(0)
        program = globals()[name] if name in globals() else _training(name)
        with monkeypatch.context() as patch:
            if way != "native":
                patch.setattr(native, "MODULE", None)
            if way == "long":
                patch.setattr(DeviceCalls, "note_later", lambda self, *args: False)
            torch.manual_seed(0)
            # Where a hook makes no object of Python of it, the engine may add to a gradient in
            # place: it does so in a program without a guard.
            found[way] = noted(tmp_path / way, program, in_backward=not kernels)
    long, n_long = found.pop("long")
    assert not n_long
    for way, (noted_so, n_short) in found.items():
        n_events = len(noted_so.events)
        # those in C++ do not come by `note_later`
        assert n_short > n_events / 4 if way == "short" else n_short < found["short"][1] * 0.6
        assert n_events == len(long.events)
        for ours, theirs in zip(noted_so.events, long.events, strict=True):
            assert ours == theirs
