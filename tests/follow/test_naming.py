"""Same call, same name: every function of torch gets one, in every spelling."""

import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, get_overridable_functions, resolve_name

from tensorprobe.follow.naming import (
    ApiName,
    Counter,
    Namer,
    aliases,
    api_name,
    call_name,
    is_noise,
    module_name,
    native_call_name,
    operator_name,
    optimizer_name,
    own_names,
    qualified_name,
    split_direction,
    with_direction,
)
from tensorprobe.records import Direction


def overridable() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own table touches deprecated names
        return [func for funcs in get_overridable_functions().values() for func in funcs]


class Seen(TorchFunctionMode):
    """The names of all calls, noise left out."""

    def __init__(self) -> None:
        super().__init__()
        self.namer = Namer(resolve_name)
        self.apis: list[ApiName] = []

    @property
    def stems(self) -> list[str]:
        return [api.stem for api in self.apis if not is_noise(api)]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        with torch._C.DisableTorchFunction():
            self.apis.append(self.namer(func))
        return func(*args, **(kwargs or {}))


def test_every_overridable_function_has_a_name_that_leads_back_to_it() -> None:
    namer = Namer(resolve_name)
    stems: dict[str, set[str]] = {}
    for func in overridable():
        api = namer(func)
        assert api.prefix in ("Tensor", "Torch", "Functional", "VF"), api
        stems.setdefault(api.stem, set()).add(resolve_name(func) or "")
        found: Any = torch
        for part in api.op.split(".")[1:]:
            found = getattr(found, part)
        assert callable(found)
    # One name is one op: those with several spellings are Python's operators and nothing else.
    for stem, spellings in stems.items():
        assert len(spellings) == 1 or any("__" in spelling for spelling in spellings), stem
    assert len(stems) > 1300


@pytest.mark.parametrize(
    ("qualified", "stem"),
    [
        ("torch.Tensor.add", "Tensor.add"),
        ("torch.Tensor.__add__", "Tensor.add"),
        ("torch.Tensor.__radd__", "Tensor.add"),
        ("torch.Tensor.__iadd__", "Tensor.add_"),
        ("torch.Tensor.__rsub__", "Tensor.rsub"),
        ("torch.Tensor.__rdiv__", "Tensor.__rtruediv__"),
        ("torch.Tensor.__rpow__", "Tensor.__rpow__"),
        ("torch.Tensor.__getitem__", "Tensor.__getitem__"),
        ("torch.Tensor.T.__get__", "Tensor.T"),
        ("torch.Tensor.data.__set__", "Tensor.data.__set__"),
        ("torch.nn.functional.linear", "Functional.linear"),
        ("torch._C._nn.gelu", "Functional.gelu"),
        ("torch.functional.einsum", "Torch.einsum"),
        ("torch.linalg.norm", "Torch.linalg.norm"),
        ("torch._C._linalg.linalg_norm", "Torch.linalg.norm"),
        ("torch.nn.init.uniform_", "Torch.nn.init.uniform_"),
        ("torch._VF.lstm", "VF.lstm"),
        ("torch.lstm", "VF.lstm"),
        ("torch.spmm", "Torch.mm"),
        ("torch.distributed.distributed_c10d.all_reduce", "Distributed.all_reduce"),
        ("torch_npu.npu_fusion_attention", "NPU.npu_fusion_attention"),
        ("torch.ops.npu.npu_rms_norm.default", "NPU.npu_rms_norm"),
        ("aten.addmm.default", "Aten.addmm"),
        ("aten::add.Tensor", "Aten.add"),
        ("c10d.allreduce_.default", "Distributed.all_reduce"),
        ("torch.ops._c10d_functional.all_reduce", "Distributed.all_reduce"),
        ("mylib::fused", "Ops.mylib.fused"),
        ("torch.ops.mylib.fused.default", "Ops.mylib.fused"),
        ("mylib.layers.fused", "Ops.mylib.layers.fused"),
    ],
)
def test_names(qualified: str, stem: str) -> None:
    assert api_name(qualified).stem == stem


def test_operators_keep_their_overload_in_op() -> None:
    namer = Namer(resolve_name)
    assert namer(torch.ops.aten.add.Tensor) == ApiName("Aten", "add", "torch.ops.aten.add.Tensor")
    assert namer(torch.ops.aten.addmm) == ApiName("Aten", "addmm", "torch.ops.aten.addmm")
    assert operator_name("npu", "npu_swiglu").stem == "NPU.npu_swiglu"


def test_a_custom_op_needs_no_list() -> None:
    with torch.library._scoped_library("tensorprobe_naming", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        with Seen() as seen:
            torch.ops.tensorprobe_naming.twice(torch.ones(2))
            torch.ops.tensorprobe_naming.twice.default(torch.ones(2))
    ours = [stem for stem in seen.stems if stem.startswith("Ops.")]
    assert ours == ["Ops.tensorprobe_naming.twice"] * 2


x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
i = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("run", "stem"),
    [
        (lambda: x + 1, "Tensor.add"),
        (lambda: 1 + x, "Tensor.add"),
        (lambda: operator.iadd(x.clone(), 1), "Tensor.add_"),
        (lambda: x - 1, "Tensor.sub"),
        (lambda: 1 - x, "Tensor.rsub"),
        (lambda: x * 2, "Tensor.mul"),
        (lambda: x / 2, "Tensor.div"),
        (lambda: 2 / x, "Tensor.__rtruediv__"),
        (lambda: x // 2, "Tensor.floor_divide"),
        (lambda: 2 // x, "Tensor.__rfloordiv__"),
        (lambda: x % 2, "Tensor.remainder"),
        (lambda: x**2, "Tensor.pow"),
        (lambda: 2**x, "Tensor.__rpow__"),
        (lambda: operator.ipow(x.clone(), 2), "Tensor.pow_"),
        (lambda: x @ x, "Tensor.matmul"),
        (lambda: -x, "Tensor.neg"),
        (lambda: abs(x), "Tensor.abs"),
        (lambda: ~i, "Tensor.bitwise_not"),
        (lambda: i & i, "Tensor.bitwise_and"),
        (lambda: i << 1, "Tensor.bitwise_left_shift"),
        (lambda: x == 1, "Tensor.eq"),
        (lambda: x < 1, "Tensor.lt"),
        (lambda: x[0], "Tensor.__getitem__"),
        (lambda: 1 in x, "Tensor.__contains__"),
        (lambda: float(x.sum()), "Tensor.__float__"),
        (lambda: x.sum().item(), "Tensor.item"),
        (lambda: x.tolist(), "Tensor.tolist"),
        (lambda: x.numpy(), "Tensor.numpy"),
        (lambda: x.to(torch.float64), "Tensor.to"),
        (lambda: x.detach(), "Tensor.detach"),
        (lambda: x.view(4), "Tensor.view"),
        (lambda: x.contiguous(), "Tensor.contiguous"),
        (lambda: x.T, "Tensor.T"),
        (lambda: torch.relu(x), "Torch.relu"),
        (lambda: F.relu(x), "Functional.relu"),
        (lambda: F.gelu(x), "Functional.gelu"),
        (lambda: F.max_pool2d(x[None], 2), "Functional.max_pool2d"),
        (lambda: torch.mm(x, x), "Torch.mm"),
        (lambda: torch.conv1d(x[None], x[None]), "Functional.conv1d"),
        (lambda: torch.einsum("ij->ji", x), "Torch.einsum"),
        (lambda: torch.linalg.norm(x), "Torch.linalg.norm"),
        (lambda: torch.fft.fft(x), "Torch.fft.fft"),
        (lambda: torch.special.expm1(x), "Torch.special.expm1"),
        (lambda: torch._foreach_add([x], 1), "Torch._foreach_add"),
        (lambda: torch.ops.aten.addmm(x, x, x), "Aten.addmm"),
        (lambda: torch.nn.LSTM(2, 2)(x), "VF.lstm"),
        (lambda: torch.nn.init.uniform_(x.clone()), "Torch.nn.init.uniform_"),
    ],
)
def test_what_a_function_mode_sees(run: Callable[[], object], stem: str) -> None:
    with Seen() as seen:
        run()
    assert stem in seen.stems


def test_what_makes_no_content_is_noise() -> None:
    w = torch.ones(2, requires_grad=True)
    y = (w * 2).sum()
    with Seen() as seen:
        _ = (x.shape, x.dtype, x.device, x.grad, x.data, x.is_leaf, x.requires_grad, w.grad_fn)
        _ = (x.size(), x.dim(), x.numel(), x.stride(), x.is_contiguous(), x.is_floating_point())
        _ = (len(x), repr(x), f"{x}", x.data_ptr(), x.untyped_storage(), x.element_size())
        _ = torch.is_complex(x)
        with torch.no_grad(), torch.profiler.record_function("mark"):
            pass
        w.register_hook(lambda grad: grad).remove()
        w.requires_grad_()
        w.grad = None
        y.backward()
    assert seen.stems == []
    assert len(seen.apis) > 20


def test_setting_data_is_a_call() -> None:
    y = x.clone()
    with Seen() as seen:
        y.data = x
    assert seen.stems == ["Tensor.data.__set__"]


@pytest.mark.parametrize(
    ("api", "number", "direction", "name"),
    [
        (api_name("torch.relu"), 3, "backward", "Torch.relu.3.backward"),
        (api_name("torch.linalg.norm"), 0, "forward", "Torch.linalg.norm.0.forward"),
        (api_name("ns::op"), 1, "forward", "Ops.ns.op.1.forward"),
        (module_name("h.1.ln", "LayerNorm"), 2, "forward", "Module.h.1.ln.LayerNorm.forward.2"),
        (module_name("", "Net"), 0, "backward", "Module.Net.backward.0"),
        (optimizer_name("AdamW"), 0, "forward", "Optimizer.AdamW.step.0"),
    ],
)
def test_call_names(api: ApiName, number: int, direction: Direction, name: str) -> None:
    assert call_name(api, number, direction) == name
    stem, found = split_direction(name)
    if api.prefix == "Optimizer":
        assert (stem, found) == (name, None)
    else:
        assert found == direction
        assert with_direction(stem, direction) == name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Tensor_permute_1_forward", "Tensor.permute.1.forward"),
        ("Functional_layer_norm_3_backward", "Functional.layer_norm.3.backward"),
        ("Tensor_add__1_forward", "Tensor.add_.1.forward"),
        ("Tensor___getitem___0_forward", "Tensor.__getitem__.0.forward"),
        ("Tensor___add___0_forward", "Tensor.add.0.forward"),
        ("Torch_relu_2", "Torch.relu.2"),
        ("Tensor.__add__.0.forward", "Tensor.add.0.forward"),
        ("Tensor.__iadd__", "Tensor.add_"),
        ("Module.a.B.forward.0", "Module.a.B.forward.0"),
        ("my_value", "my_value"),
    ],
)
def test_names_as_the_peers_write_them(theirs: str, ours: str) -> None:
    assert native_call_name(theirs) == ours


def test_aliases() -> None:
    relu = aliases(api_name("torch.nn.functional.relu"))
    assert {
        "relu",
        "torch.relu",
        "F.relu",
        "Functional.relu",
        "Tensor.relu",
        "torch.Tensor.relu",
        "torch.nn.functional.relu",
        "aten.relu",
        "aten::relu",
        "Aten.relu",
    } <= relu
    assert not {"relu_", "leaky_relu"} & relu
    assert {"__add__", "Tensor.__add__", "Tensor.__radd__", "torch.add"} <= aliases(
        api_name("torch.Tensor.add")
    )
    assert {"aten.linalg_norm", "linalg.norm"} <= aliases(api_name("torch.linalg.norm"))
    assert "norm" not in aliases(api_name("torch.linalg.norm"))
    assert {"ns::op", "torch.ops.ns.op", "op"} <= aliases(api_name("ns::op"))
    assert {"torch_npu.npu_x", "npu_x", "NPU.npu_x"} <= aliases(api_name("npu::npu_x"))
    assert {"dist.all_reduce", "all_reduce"} <= aliases(api_name("torch.distributed.all_reduce"))
    assert {"h.0.ln", "LayerNorm", "Module.h.0.ln.LayerNorm"} <= aliases(
        module_name("h.0.ln", "LayerNorm")
    )


def test_patterns_see_only_names_of_its_own() -> None:
    assert own_names(api_name("torch.nn.functional.relu")) == {
        "relu",
        "F.relu",
        "Functional.relu",
        "torch.nn.functional.relu",
    }


def test_a_counter_counts_per_api_and_restarts() -> None:
    counter = Counter()
    relu, add = api_name("torch.relu"), api_name("torch.Tensor.add")
    assert [counter.next(relu), counter.next(add), counter.next(relu)] == [0, 0, 1]
    assert counter.next(operator_name("aten", "add", "Tensor")) == 0
    assert counter.next(operator_name("aten", "add", "Scalar")) == 1
    counter.reset()
    assert counter.next(relu) == 0


def test_a_counter_names_calls_as_it_numbers_them() -> None:
    counter = Counter()
    for api in (
        api_name("torch.relu"),
        module_name("layers.0", "Linear"),
        optimizer_name("SGD"),
    ):
        assert [counter.next_name(api), counter.next(api), counter.next_name(api)] == [
            call_name(api, 0),
            1,
            call_name(api, 2),
        ]


def test_a_counter_gives_each_thread_its_own_number() -> None:
    counter, api = Counter(), api_name("torch.relu")
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.extend(counter.next(api) for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))


def test_anything_callable_has_a_name() -> None:
    def local() -> None: ...

    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    namer = Namer(lambda func: None)
    assert namer(local).api.endswith("local")
    assert namer(Odd()).api.endswith("Odd")
    assert namer(torch.relu).stem == "Torch.relu"
    assert namer(torch.Tensor.add).stem == "Tensor.add"
    assert namer(torch.Tensor.split).stem == "Tensor.split"
    assert namer(torch._C._set_grad_enabled).stem == "Torch._set_grad_enabled"
    assert qualified_name(torch.Tensor.grad.__get__) == "torch.Tensor.grad.__get__"


def test_what_a_vendors_package_adds_to_tensors() -> None:
    """Names of functions as torch makes them for a device, and as torch_npu has them."""

    def wrap_tensor_to(self: torch.Tensor) -> torch.Tensor:
        return self

    wrap_tensor_to.__name__ = "npu"
    wrap_tensor_to.__module__ = "torch.utils.backend_registration"
    assert Namer(resolve_name)(wrap_tensor_to).stem == "Tensor.npu"
    assert is_noise(api_name("torch.utils.backend_registration.is_npu"))
    assert is_noise(api_name("torch_npu.utils._npu_private_format_repr"))
    assert is_noise(api_name("torch._C._nn._parse_to"))
