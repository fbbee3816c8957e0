"""Training loops run on the simulated NPU, bit for bit as on the host where kernels agree."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 5),
    )  # fmt: skip


def train(model: nn.Module, device: str, optimizer: Callable[..., Any]) -> list[float]:
    model.to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 12, 12, generator=generator).to(device)
    y = torch.randint(0, 5, (4,), generator=generator).to(device)
    stepper = optimizer(model.parameters())
    losses = []
    torch.manual_seed(7)
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
        lambda p: torch.optim.Adam(p, 0.01, fused=True),
    ],
    ids=["SGD", "AdamW", "AdamW-foreach", "AdamW-loop", "Adam-fused"],
)
def test_cnn_is_bit_equal(optimizer: Callable[..., Any]) -> None:
    on_host = cnn()
    on_npu = copy.deepcopy(on_host)
    assert train(on_host, "cpu", optimizer) == train(on_npu, "npu", optimizer)
    for (name, host), npu in zip(
        on_host.state_dict().items(), on_npu.state_dict().values(), strict=True
    ):
        assert torch.equal(host, npu.cpu()), name


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(kind: Any) -> None:
    host = kind(4, 5, 2, batch_first=True)
    npu = copy.deepcopy(host).npu()
    x = torch.randn(3, 6, 4)
    expected, actual = host(x)[0], npu(x.npu())[0]
    torch.testing.assert_close(actual.cpu(), expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for one, other in zip(npu.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)


def test_packed_sequences() -> None:
    host = nn.LSTM(2, 3, batch_first=True)
    npu = copy.deepcopy(host).npu()
    x, lengths = torch.randn(2, 4, 2), torch.tensor([4, 2])
    results = []
    for model, batch in ((host, x), (npu, x.npu())):
        packed = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        padded.sum().backward()
        results.append(padded.cpu())
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(npu.weight_ih_l0.grad.cpu(), host.weight_ih_l0.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).npu()
    x = torch.randn(4, 8, device="npu")
    with torch.autocast("npu", dtype=dtype):
        hidden = model[0](x)
        assert hidden.dtype == dtype
        assert model[1](hidden).dtype == torch.float32
        assert hidden.softmax(-1).dtype == torch.float32
        assert torch.cat([hidden, x]).dtype == torch.float32
        assert (hidden + hidden).dtype == dtype
        assert F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]).npu()).dtype == torch.float32
        with torch.autocast("npu", enabled=False):
            assert model[0](x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.rand(3).npu(), torch.ones(3).npu())
    assert model[0](x).dtype == torch.float32


def test_autocast_computes_what_explicit_casts_do() -> None:
    layer, x = nn.Linear(16, 16).npu(), torch.randn(4, 16, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        actual = layer(x)
    weight, bias = layer.weight.cpu().bfloat16(), layer.bias.cpu().bfloat16()
    assert torch.equal(actual.cpu(), F.linear(x.cpu().bfloat16(), weight, bias))


@pytest.mark.parametrize("scaler_type", [lambda: torch.amp.GradScaler("npu"), None])
def test_grad_scaler(scaler_type: Any) -> None:
    scaler = scaler_type() if scaler_type else torch.npu.amp.GradScaler()
    p = nn.Parameter(torch.ones(2).npu())
    optimizer = torch.optim.SGD([p], 0.5)
    for factor, expected in ((float("inf"), [1.0, 1.0]), (1.0, [0.5, 0.5])):
        with torch.npu.amp.autocast():
            loss = (p * factor).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert p.tolist() == expected  # a step whose gradients overflow is skipped
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_draws_the_same_dropout_again(use_reentrant: bool) -> None:
    def layer(w: torch.Tensor) -> torch.Tensor:
        return F.dropout(w @ w, 0.5).sum()

    grads = []
    for run in (layer, lambda w: checkpoint(layer, w, use_reentrant=use_reentrant)):
        w = torch.ones(20, 20, device="npu", requires_grad=True)
        torch.manual_seed(4)
        run(w).backward()
        assert w.grad is not None
        grads.append(w.grad.cpu())
    assert torch.equal(*grads)


def test_data_loader_with_pinned_memory() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    assert [batch[0].npu(non_blocking=True).tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_anomaly_mode_names_the_node() -> None:
    x = torch.zeros(2, device="npu", requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0"):
            x.sqrt().mul(0).sum().backward()
    assert any("Error detected in SqrtBackward0" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("place", ["function", "tensor hook", "leaf hook", "mode"])
def test_an_exception_in_backward_reaches_the_caller(place: str) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if place == "function":
                raise ZeroDivisionError
            return grad

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if place == "mode" and "expand" in str(func):
                raise ZeroDivisionError
            return func(*args, **(kwargs or {}))

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    x = torch.ones(3, device="npu", requires_grad=True)
    y = Function.apply(x) * x
    if place == "tensor hook":
        y.register_hook(fail)
    if place == "leaf hook":
        x.register_hook(fail)
    with pytest.raises(ZeroDivisionError), Mode():
        y.sum().backward()
    torch.ones(3, device="npu", requires_grad=True).sum().backward()  # the engine lives on


def test_scaled_dot_product_attention_is_close() -> None:
    q = torch.randn(2, 4, 6, 8)
    host = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    npu = F.scaled_dot_product_attention(q.npu(), q.npu(), q.npu(), is_causal=True)
    torch.testing.assert_close(npu.cpu(), host)  # other kernels are chosen: equal up to rounding
