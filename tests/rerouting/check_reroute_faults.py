"""Planted faults of the simulated NPU, cured by running that one op on the CPU.

Run by test_reroute_sim_npu.py, in a process where tensors land on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe as tp
from tensorprobe.devices import sim_npu


@pytest.fixture(autouse=True)
def healthy_chip() -> Iterator[None]:
    yield
    sim_npu.clear_faults()


class Net(nn.Module):
    """Convolution, group norm, attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.conv(x))).flatten(2)
        weights = F.softmax(hidden @ hidden.mT, -1)
        return self.head(weights @ hidden).mean(1)


def step(model: nn.Module, device: str) -> tuple[Tensor, list[Tensor]]:
    with torch.device("cpu"):
        x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
        y = torch.tensor([0, 1])
    model.zero_grad()
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    return loss.detach().cpu(), [p.grad.cpu() for p in model.parameters()]


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    with torch.device("cpu"):
        model = Net()
    return copy.deepcopy(model).to("npu"), model


def is_equal(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


FAULTS = {
    "backward raises": ("native_group_norm_backward", "raise", "torch.group_norm"),
    "backward is wrong": ("native_group_norm_backward", "scale:1.01", "aten.group_norm"),
    "forward is wrong": ("native_group_norm", "low-precision", "norm"),
    "softmax": ("_softmax", "scale:1.01", "Functional.softmax.0"),
    "softmax below autograd": ("_softmax", "scale:1.01", "aten._softmax"),
    "softmax, its backward below autograd": (
        "_softmax_backward_data",
        "raise",
        "aten._softmax",
    ),
    "convolution": ("convolution_backward", "nan", "conv2d"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_op_on_the_cpu_cures_it(fault: str, models: tuple[nn.Module, nn.Module]) -> None:
    actual, expected = models
    kernel, effect, name = FAULTS[fault]
    healthy = step(expected, "cpu")
    assert is_equal(step(actual, "npu"), healthy)
    sim_npu.plant(op=kernel, effect=effect)
    if effect == "raise":
        with pytest.raises(RuntimeError, match="507015"):
            step(actual, "npu")
    else:
        assert not is_equal(step(actual, "npu"), healthy)
    with tp.reroute({name: "cpu"}):
        assert is_equal(step(actual, "npu"), healthy)
    if effect != "raise":
        with tp.reroute({"F.linear": "cpu"}):  # another op is no cure
            assert not is_equal(step(actual, "npu"), healthy)


def test_two_faults_need_both(models: tuple[nn.Module, nn.Module]) -> None:
    actual, expected = models
    healthy = step(expected, "cpu")
    sim_npu.plant(op="native_group_norm_backward", effect="scale:1.01")
    sim_npu.plant(op="_softmax", effect="permute")
    for names in (["torch.group_norm"], ["softmax"]):
        with tp.reroute(dict.fromkeys(names, "cpu")):
            assert not is_equal(step(actual, "npu"), healthy)
    with tp.reroute({"torch.group_norm": "cpu", "softmax": "cpu"}):
        assert is_equal(step(actual, "npu"), healthy)


def test_autocast_of_the_device_goes_on_elsewhere(models: tuple[nn.Module, nn.Module]) -> None:
    model, _ = models
    with torch.device("cpu"):
        x = torch.linspace(-1, 1, 2 * 36).reshape(2, 36)
    with torch.autocast("npu", dtype=torch.float16):
        at_home = model.head(x.to("npu"))
        normed = F.layer_norm(at_home, (4,))
        with tp.reroute({"F.linear": "cpu", "F.layer_norm": "cpu"}):
            elsewhere = model.head(x.to("npu"))
            assert F.layer_norm(elsewhere, (4,)).dtype == normed.dtype == torch.float32
        with tp.reroute({"F.linear": "cpu:float64"}):
            exact = model.head(x.to("npu"))
    assert at_home.dtype == elsewhere.dtype == exact.dtype == torch.float16
    assert elsewhere.device == exact.device == at_home.device
    assert torch.equal(elsewhere, at_home)
    reference = F.linear(
        x.double(), model.head.weight.cpu().double(), model.head.bias.cpu().double()
    )
    assert torch.equal(exact.cpu(), reference.half())


def test_dropout_on_the_cpu_draws_there() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    with tp.reroute({"F.dropout": "cpu"}):
        actual = F.dropout(x, 0.5)
    torch.manual_seed(3)
    expected = F.dropout(torch.ones(1000, device="cpu"), 0.5)
    assert actual.device.type == "npu"
    assert torch.equal(actual.cpu(), expected)


def test_factories_make_their_tensors_there() -> None:
    torch.manual_seed(3)
    with tp.reroute({"torch.randn": "cpu"}):
        a, b = torch.randn(4), torch.randn(4, device="npu:0", dtype=torch.float16)
    torch.manual_seed(3)
    with torch.device("cpu"):
        c, d = torch.randn(4), torch.randn(4, dtype=torch.float16)
    assert a.device == b.device == torch.device("npu:0")
    assert torch.equal(a.cpu(), c)
    assert torch.equal(b.cpu(), d)


def test_moves_between_devices_stay_moves() -> None:
    x = torch.ones(3, device="cpu")
    with tp.reroute({"*": "cpu"}):
        y = x.npu()
        z = (y * 2).cpu()
        w = x.to("npu", torch.float16)
        v = (y * 2).to(torch.float16)
    assert (y.device.type, z.device.type, w.device.type, v.device.type) == (
        "npu",
        "cpu",
        "npu",
        "npu",
    )
    assert v.dtype == w.dtype == torch.float16


def test_a_fused_op_runs_by_its_formula() -> None:
    import torch_npu

    def step() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
        y = torch_npu.npu_rms_norm(x, torch.ones(8))[0]
        y.square().sum().backward()
        assert y.device.type == x.grad.device.type == "npu"
        return y.detach(), x.grad

    healthy = step()
    sim_npu.plant(op="npu_rms_norm", effect="inf")
    assert not step()[0].isfinite().all()
    with tp.reroute({"torch_npu.npu_rms_norm": "cpu"}) as rerouted:
        cured = step()
    assert rerouted.counts == {"torch_npu.npu_rms_norm": 1}
    torch.testing.assert_close(cured, healthy)


def test_a_custom_op_runs_by_its_reference() -> None:
    library = torch.library.Library("reroute_check", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 3, "CPU")  # the device computes by it, wrongly
    x = torch.ones(3)
    assert torch.equal(torch.ops.reroute_check.double(x), x * 3)
    tp.reference("reroute_check::double")(lambda x: x * 2)
    with tp.reroute({"reroute_check::double": "cpu"}):
        assert torch.equal(torch.ops.reroute_check.double(x), x * 2)
