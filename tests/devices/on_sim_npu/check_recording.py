"""What a recording on the simulated NPU holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils.checkpoint import checkpoint

from recorded import record
from tensorprobe.devices import sim_npu
from tensorprobe.records import Capture
from tiny_models import MODELS


class Net(torch.nn.Module):
    """Writes in place, and to views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x))
        hidden[:, :2].mul_(3)
        hidden = torch.relu_(hidden)
        return hidden.t() @ hidden


def train(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def program() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(x).square().mean().backward()
        optimizer.step()

    return program


def values(capture: Capture) -> list[Any]:
    return [
        (call.name, [(t.name, t.dtype, t.shape, t.summary, t.digest) for t in call.tensors])
        for call in capture.calls
    ]


def test_backward_inside_of_backward(tmp_path: Path) -> None:
    """It has a thread of its own on the device, and is not the end of the one around it."""
    names = {}
    for device in ("cpu", "npu"):
        layers = [torch.nn.Linear(4, 4).to(device) for _ in range(3)]

        def program(device: str = device, layers: Any = layers) -> None:
            x = torch.ones(2, 4, device=device, requires_grad=True)
            for layer in layers[:2]:
                x = checkpoint(layer, x, use_reentrant=True)
            layers[2](x).sum().backward()

        capture = record(tmp_path / device, program, level="L0")
        names[device] = [call.name for call in capture.calls]
    assert names["npu"] == names["cpu"]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_records_are_those_of_the_host(tmp_path: Path, level: str) -> None:
    """The same calls by the same names with the same numbers, gradients included."""
    captures = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model, x = Net(), torch.randn(4, 6)
        captures[device] = record(
            tmp_path / device, train(model.to(device), x.to(device)), level=level
        )
    assert captures["npu"].gaps == ()
    assert values(captures["npu"]) == values(captures["cpu"])
    tensors = [t for call in captures["npu"].calls for t in call.tensors]
    assert {t.device for t in tensors if t.numel > 1} == {"npu:0"}
    assert any(call.direction == "backward" for call in captures["npu"].calls)


def test_gradients_and_statistics_are_those_of_the_tensors(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(6, 3).npu(), torch.randn(4, 6).npu().requires_grad_()
    capture = record(tmp_path, lambda: model(x).square().sum().backward())
    backward = capture.call("Functional.linear.0.backward")
    for name, tensor in {"output.0": x.grad, "output.1": model.weight.grad}.items():
        kept = backward.tensor(name)
        raw = tensor.cpu()
        assert kept.load().equal(raw)
        assert (kept.summary.min, kept.summary.max) == (raw.min().item(), raw.max().item())
        assert kept.summary.norm == pytest.approx(raw.double().norm().item(), rel=1e-12)


def test_kernels_of_the_device_do_not_run_for_the_recorder(tmp_path: Path) -> None:
    """Else it would use up the executions that a fault is planted for, and be spoilt by it."""
    x = torch.randn(4, 6, device="npu")
    with sim_npu.plant(op="*", calls=[2], effect="nan"):
        capture = record(tmp_path, lambda: x.t().exp().sin(), level="L1")
    finite = {
        call.name: call.tensor("output.0").load().isfinite().all().item() for call in capture.calls
    }
    assert finite == {
        "Tensor.t.0.forward": True,
        "Tensor.exp.0.forward": True,
        "Tensor.sin.0.forward": False,
    }


def test_a_planted_fault_shows_at_its_own_call(tmp_path: Path) -> None:
    model, loss_of = MODELS["gpt2"]()
    model.eval().npu()
    captures = []
    for number in range(2):
        with torch.no_grad(), torch.device("npu"):
            captures.append(record(tmp_path / str(number), lambda: loss_of(model), level="L1"))
        sim_npu.plant(op="native_layer_norm", calls=[2], effect="scale:1.01")
    healthy, broken = captures
    assert [call.name for call in healthy.calls] == [call.name for call in broken.calls]
    different = [
        call.name
        for call, other in zip(healthy.calls, broken.calls, strict=True)
        if [t.digest for t in call.tensors] != [t.digest for t in other.tensors]
    ]
    assert different[0] == "Functional.layer_norm.2.forward"


def test_ops_of_the_vendor_have_its_prefix(tmp_path: Path) -> None:
    x = torch.randn(2, 4, device="npu", requires_grad=True)
    weight = torch.ones(4, device="npu")
    capture = record(tmp_path, lambda: torch_npu.npu_rms_norm(x, weight)[0].sum().backward())
    call = capture.call("NPU.npu_rms_norm.0.forward")
    assert call.tensor("input.0").load().equal(x.detach().cpu())
    backward = capture.call("NPU.npu_rms_norm.0.backward")
    assert backward.tensor("output.0").load().equal(x.grad.cpu())
    kernels = record(tmp_path / "L2", lambda: torch_npu.fast_gelu(x), level="L2")
    assert kernels.calls[0].name == "NPU.fast_gelu.0.forward"


def test_operators_of_backward_in_the_device_s_own_thread(tmp_path: Path) -> None:
    """Nothing of Python is below them there: no frame that a stack could begin at."""
    x = torch.ones(3, device="npu", requires_grad=True)
    capture = record(tmp_path, lambda: (x * 2).exp().sum().backward(), level="L2")
    assert capture.gaps == ()
    backward = [call for call in capture.calls if call.direction == "backward"]
    assert {call.name.split(".")[1] for call in backward} >= {"expand", "mul"}
    assert all(call.thread != "MainThread" and call.stack == () for call in backward)
