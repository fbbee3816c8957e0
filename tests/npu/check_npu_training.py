"""Models train on the real torch_npu as on the CPU: the stand-in for CANN is fit to test on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny_models

pytestmark = pytest.mark.filterwarnings("default")


class ConvNet(nn.Module):
    """BatchNorm, GroupNorm, a residual, pooling: what a ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.pool(torch.relu(x + self.block(x)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _of_images(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8).to(device)
    return nn.functional.cross_entropy(model(x), torch.tensor([1, 3], device=device))


def _of_sequences(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 2 * 5 * 6).sin().view(2, 5, 6).to(device)
    return model(x).square().mean()


def _on_its_device(
    function: Callable[[nn.Module], torch.Tensor],
) -> Callable[[nn.Module], torch.Tensor]:
    def run(model: nn.Module) -> torch.Tensor:
        with next(model.parameters()).device:
            return function(model)

    return run


def built(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    if name == "resnet":
        return ConvNet(), _of_images
    if name == "lstm":
        return Recurrent(), _of_sequences
    model, function = getattr(tiny_models, name)()
    return model, _on_its_device(function)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


def train(
    name: str, device: str, optimizer: str = "adamw", steps: int = 2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, function = built(name)
    # dropout: the two devices draw other numbers
    model = model.to(device).train(name in ("resnet", "lstm"))
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for _ in range(steps):
        loss = function(model)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5", "resnet", "lstm"])
def test_a_model_trains_as_on_the_cpu(name: str) -> None:
    if name not in ("resnet", "lstm"):
        pytest.importorskip("transformers")
    here, there = train(name, "cpu"), train(name, "npu")
    assert here[0] == pytest.approx(there[0], rel=1e-5)
    for key, value in here[1].items():
        torch.testing.assert_close(there[1][key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    here, there = train("resnet", "cpu", optimizer, 3), train("resnet", "npu", optimizer, 3)
    assert here[0] == pytest.approx(there[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_and_a_scaler(dtype: torch.dtype) -> None:
    model, function = built("resnet")
    model = model.npu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**10)
    losses = []
    for step in range(3):
        with torch.autocast("npu", dtype=dtype):
            loss = function(model)
        scaler.scale(loss).backward()
        if step == 1:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**9  # the step with inf was left out
    assert losses[1] != losses[0]
    assert losses[2] == pytest.approx(losses[1], rel=0.05)


def test_a_checkpoint_draws_the_same_dropout_again() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).npu()
    x = torch.ones(4, 8, device="npu", requires_grad=True)
    gradients = []
    for again in (False, True):
        torch_npu.npu.manual_seed(1)
        y = checkpoint(net, x, use_reentrant=False) if again else net(x)
        y.sum().backward()
        gradients.append(x.grad.cpu().clone())
        x.grad = None
    assert torch.equal(*gradients)


# ---- torch_npu's own -----------------------------------------------------------------------------


def _both(
    fused: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *shapes: tuple[int, ...]
) -> None:
    """Values and gradients of a fused operator are those of the plain formula."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    answers = []
    for function, device in ((fused, "npu"), (plain, "cpu")):
        leaves = [copy.copy(x).to(device).requires_grad_() for x in inputs]
        y = function(*leaves)
        y.backward(torch.linspace(0, 1, y.numel()).view(y.shape).to(device))
        answers.append([y, *(x.grad for x in leaves)])
    for actual, expected in zip(*answers, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


def _rms(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma


def _rotated(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v


def test_npu_rms_norm() -> None:
    _both(lambda x, g: torch_npu.npu_rms_norm(x, g)[0], _rms, (3, 8), (8,))


def test_npu_swiglu() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return nn.functional.silu(a) * b

    _both(torch_npu.npu_swiglu, plain, (3, 8))


def test_npu_rotary_mul() -> None:
    shape = (1, 2, 4, 128)
    _both(
        torch_npu.npu_rotary_mul,
        lambda x, c, s: x * c + _rotated(x) * s,
        shape, (1, 1, 4, 128), (1, 1, 4, 128),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_npu_fusion_attention(layout: str) -> None:
    def arranged(x: torch.Tensor) -> torch.Tensor:
        if layout == "BNSD":
            return x
        y = x.transpose(1, 2)
        if layout == "BSND":
            return y
        return y.flatten(2) if layout == "BSH" else y.flatten(2).transpose(0, 1)

    def fused(*qkv: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_fusion_attention(*map(arranged, qkv), 2, layout, scale=0.5)[0]

    _both(fused, lambda *qkv: arranged(_attention(*qkv)), *[(2, 2, 4, 8)] * 3)


def test_npu_fusion_attention_may_be_causal() -> None:
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    actual = torch_npu.npu_fusion_attention(
        *[q.npu()] * 3, 2, "BNSD", scale=8**-0.5, sparse_mode=2, atten_mask=mask.npu()
    )[0]
    expected = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_other_fused_operators() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch_npu.npu_dtype_cast(x.npu(), torch.float16).cpu(), x.half())
    assert torch.equal(torch_npu.npu_format_cast(x.npu(), 2).cpu(), x)
    geglu, gelu = torch_npu.npu_geglu(x.npu(), activate_left=True)
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(gelu.cpu(), nn.functional.gelu(a, approximate="tanh"))
    torch.testing.assert_close(geglu.cpu(), nn.functional.gelu(a, approximate="tanh") * b)
    out, _, added = torch_npu.npu_add_rms_norm(x.npu(), x.npu(), x[0].npu())
    assert torch.equal(added.cpu(), x + x)
    torch.testing.assert_close(out.cpu(), _rms(x + x, x[0]), rtol=1e-4, atol=1e-5)
