"""Tensors on the simulated NPU behave as tensors of a device do."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def test_device_names() -> None:
    x = torch.ones(2, 3)
    for moved in (x.npu(), x.to("npu"), x.to("npu:0"), x.to(torch.device("npu")), x.npu(0)):
        assert moved.device == torch.device("npu:0")
        assert moved.is_npu
    assert not x.is_npu
    assert torch.zeros(2, device="npu").device.type == "npu"
    with torch.device("npu"):
        assert torch.ones(1).is_npu
    assert torch.tensor([1.0, 2.0], device="npu").tolist() == [1.0, 2.0]
    assert torch.as_tensor(np.ones(2), device="npu").dtype == torch.float64
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_a_second_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a process has one simulated NPU, npu:0"):
        torch.zeros(1, device="npu:1")
    with pytest.raises(RuntimeError, match="Invalid NPU device ID 3"):
        torch.npu.set_device("npu:3")


def test_the_number_of_the_local_rank_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    torch.npu.set_device("npu:1")
    assert torch.ones(1).to("npu:1").sum().item() == 1


def test_printing() -> None:
    x = torch.arange(3.0, device="npu")
    assert repr(x) == "tensor([0., 1., 2.], device='npu:0')"
    assert repr(x.half()) == "tensor([0., 1., 2.], device='npu:0', dtype=torch.float16)"
    assert repr(torch.empty(0, 3, device="npu")) == "tensor([], device='npu:0', size=(0, 3))"
    assert repr(x.requires_grad_() * 2).endswith("device='npu:0', grad_fn=<MulBackward0>)")
    assert repr(nn.Parameter(torch.ones(2).npu())) == (
        "Parameter containing:\ntensor([1., 1.], device='npu:0', requires_grad=True)"
    )
    assert f"{torch.tensor(1.23456).npu():.2f}" == "1.23"


def test_leaving_the_device() -> None:
    x = torch.tensor([[1.5, 2.0]], device="npu")
    assert x.tolist() == [[1.5, 2.0]]
    assert x[0, 0].item() == 1.5
    assert x.cpu().device.type == "cpu"
    assert type(x.cpu()) is torch.Tensor
    assert float(x.sum()) == 3.5
    for convert in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            convert()


def test_views_alias_their_base() -> None:
    base = torch.zeros(4, 3, device="npu")
    row, column, flat = base[1], base[:, 2], base.view(-1)
    row.add_(1)
    assert base.sum().item() == 3
    assert column.tolist() == [0, 1, 0, 0]
    flat[0] = 7
    assert base[0, 0].item() == 7
    assert base._version == row._version == column._version == 2
    assert row._base is base
    assert row.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert row.data_ptr() == base.data_ptr() + 3 * 4


def test_in_place_changes_of_shape() -> None:
    x = torch.arange(6.0, device="npu").view(2, 3)
    x.t_()
    assert x.shape == (3, 2)
    assert x.stride() == (1, 3)
    x.unsqueeze_(0)
    assert x.shape == (1, 3, 2)
    y = torch.arange(2.0, device="npu")
    y.resize_(2, 2)
    assert y.shape == (2, 2)
    assert y.flatten()[:2].tolist() == [0, 1]
    out = torch.empty(0, device="npu")
    assert torch.add(y, 1, out=out) is out
    assert out.shape == (2, 2)


def test_in_place_ops_return_their_argument() -> None:
    x = torch.ones(3, device="npu")
    assert x.mul_(2).add_(1) is x
    assert x.tolist() == [3, 3, 3]


def test_data_can_be_replaced() -> None:
    p = nn.Parameter(torch.zeros(2).npu())
    p.data = torch.ones(3, device="npu")
    assert p.tolist() == [1, 1, 1]
    p.data.mul_(2)
    assert p.tolist() == [2, 2, 2]


def test_indexing() -> None:
    x = torch.arange(6.0, device="npu")
    assert x[x > 3].tolist() == [4, 5]
    assert x[torch.tensor([0, 2])].tolist() == [0, 2]  # indices may stay on the host
    x[1:3] = torch.tensor([8.0, 9.0], device="npu")
    assert x.tolist() == [0, 8, 9, 3, 4, 5]
    assert len(x) == 6


def test_complex_numbers() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device="npu")
    assert torch.view_as_real(x.conj()).tolist() == [[1, -2], [3, 1]]
    assert x.conj().imag.tolist() == [-2, 1]
    signal = torch.randn(8)
    assert torch.equal(torch.fft.hfft(signal.npu()).cpu(), torch.fft.hfft(signal))


def test_host_and_device_do_not_mix() -> None:
    x = torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match=r"at least two devices, npu:0 and cpu! .* of add\)"):
        x + torch.ones(2)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]  # a 0-d tensor counts as a number


def test_autograd_and_double_backward() -> None:
    x = torch.tensor([1.0, 2.0], device="npu", requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    grad.sum().backward()
    assert grad.tolist() == [3, 12]
    assert x.grad is not None
    assert x.grad.tolist() == [6, 12]
    assert x.grad.is_npu


def test_deepcopy() -> None:
    p = nn.Parameter(torch.ones(2).npu())
    (p * 3).sum().backward()
    twin = copy.deepcopy(p)
    assert isinstance(twin, nn.Parameter)
    twin.data.add_(1)
    assert p.tolist() == [1, 1]
    assert twin.grad is not None
    assert twin.grad.tolist() == [3, 3]


def test_save_and_load() -> None:
    model = nn.Linear(2, 2).npu()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for map_location, device in ((None, "npu"), ("cpu", "cpu"), ("npu:0", "npu")):
        file.seek(0)
        loaded = torch.load(file, map_location=map_location)
        assert loaded["weight"].device.type == device
        assert torch.equal(loaded["weight"].cpu(), model.weight.detach().cpu())
    file = io.BytesIO()
    base = torch.arange(6.0).view(2, 3)
    torch.save([base, base.t(), base.half()], file)  # on the host
    file.seek(0)
    on_npu = torch.load(file, map_location="npu")
    assert [t.device.type for t in on_npu] == ["npu"] * 3
    assert on_npu[1].tolist() == base.t().tolist()
    assert on_npu[2].dtype == torch.float16
    whole = pickle.loads(pickle.dumps(model))
    assert isinstance(whole.weight, nn.Parameter)
    assert whole.weight.is_npu


def test_modules_keep_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    model.to("npu")
    assert model[1].weight is model[0].weight
    assert model.half()[1].weight is model[0].weight
    assert model.cpu()[1].weight.device.type == "cpu"


def test_random_numbers_are_the_devices_own() -> None:
    host = torch.get_rng_state()
    first = torch.rand(4, device="npu"), F.dropout(torch.ones(8).npu(), 0.5)
    torch.randperm(5, device="npu")
    assert torch.equal(host, torch.get_rng_state())
    torch.npu.manual_seed_all(0)
    assert torch.equal(first[0], torch.rand(4, device="npu"))
    assert torch.equal(first[1], F.dropout(torch.ones(8).npu(), 0.5))
    state = torch.npu.get_rng_state()
    drawn = torch.randn(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(drawn, torch.randn(3, device="npu"))
    with torch.random.fork_rng(device_type="npu"):
        torch.rand(9, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(drawn, torch.randn(3, device="npu"))


def test_torch_manual_seed_gives_the_numbers_of_the_host() -> None:
    torch.manual_seed(3)
    host = torch.randn(5)
    assert torch.equal(host, torch.randn(5, device="npu").cpu())


def test_memory_is_counted() -> None:
    gc.collect()
    before = torch.npu.memory_allocated()
    x = torch.zeros(1024, device="npu")
    view = x[:10]
    assert torch.npu.memory_allocated() == before + 4096
    torch.npu.reset_peak_memory_stats()
    del x
    assert torch.npu.memory_allocated() == before + 4096  # the view keeps the block
    del view
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == before + 4096
    free, total = torch.npu.mem_get_info()
    assert free == total - before


def test_what_is_missing_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.npu\.nccl is not part of the simulated"):
        torch.npu.nccl  # noqa: B018
    assert not hasattr(torch.npu, "nccl")
    with pytest.raises(NotImplementedError, match="sparse_coo"):
        torch.ones(2, 2, device="npu").to_sparse()
    with pytest.raises(
        NotImplementedError, match=r"aten\.bincount\.default is not on the simulated"
    ):
        torch.bincount(torch.ones(2, device="npu", dtype=torch.float16).to(torch.complex64))
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator("npu")


def test_streams_and_events() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(torch.npu.Stream()):
        start.record()
        torch.ones(2, device="npu").sum()
        end.record()
    torch.npu.current_stream().wait_stream(torch.npu.default_stream())
    torch.npu.synchronize()
    assert start.elapsed_time(end) > 0


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(torch.overrides.resolve_name(func) or str(func))
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_users_calls_and_no_more() -> None:
    x = torch.randn(2, 4, device="npu", requires_grad=True)
    weight = torch.randn(3, 4, device="npu")
    with _Functions() as functions:
        y = F.linear(x, weight)
        y.relu_()
    assert functions.seen == ["torch.nn.functional.linear", "torch.Tensor.relu_"]
    with _Functions() as functions, _Kernels() as kernels:
        torch.ones(2).to("npu").to(torch.float16).cpu().to(torch.float32)
    to_half = ["torch.ones", "torch.Tensor.to", "torch.Tensor.to", "torch.Tensor.cpu"]
    assert functions.seen == [*to_half, "torch.Tensor.to"]
    assert kernels.seen == ["aten.ones.default", *["aten._to_copy.default"] * 4]
    with _Kernels() as kernels:
        F.linear(x, weight).sum().backward()
    assert kernels.seen == [
        "aten.t.default", "aten.mm.default", "aten.sum.default", "aten.ones_like.default",
        "aten.expand.default", "aten.t.default", "aten.mm.default", "aten.detach.default",
    ]  # fmt: skip


def test_inference_mode_and_functorch() -> None:
    with torch.inference_mode():
        assert nn.Linear(2, 2).npu()(torch.ones(1, 2).npu()).shape == (1, 2)
    grad = torch.func.grad(lambda x: (x**2).sum())(torch.ones(3, device="npu"))
    assert grad.tolist() == [2, 2, 2]
    assert torch.vmap(lambda x: x * 2)(torch.ones(3, 2, device="npu")).shape == (3, 2)
