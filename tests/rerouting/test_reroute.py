"""Calls that run elsewhere: what comes back, what autograd does, and what stays untouched.

On the host they go to float64; on the simulated NPU (test_reroute_sim_npu.py) to the CPU, where
every bit must be what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from default_device import ON_SIM_NPU, host_only
from recorded import record
from tensorprobe.errors import BadUsage, DeviceUnusable
from tensorprobe.rerouting.reroute import Reroute

TARGET = "cpu" if ON_SIM_NPU else "float64"


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numel = int(torch.Size(shape).numel())
    return torch.linspace(-2, 2.3, numel).reshape(shape).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ramp(*shape, dtype=dtype).requires_grad_()


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in flat(item)] if isinstance(value, (list, tuple)) else []


def compare(actual: Any, expected: Any, *, exact: bool = ON_SIM_NPU, atol: float = 1e-5) -> None:
    """Equal in kind; equal in bits where only the device differs, else close."""
    assert type(actual) is type(expected)
    a, b = flat(actual), flat(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
        assert (x.requires_grad, x.is_leaf) == (y.requires_grad, y.is_leaf)
        x, y = x.detach(), y.detach()
        if exact:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y, atol=atol, rtol=1e-4)


# Programs: each returns what it made, and the tensors of which the gradients are wanted.
Made = tuple[Any, list[Tensor]]


def a_functional() -> Made:
    x, w, b = leaf(2, 8), leaf(8), leaf(8)
    return F.layer_norm(x, (8,), w, b), [x, w, b]


def one_input_twice() -> Made:
    x = leaf(3, 3)
    return torch.mul(x, x), [x]


def an_in_place_op() -> Made:
    x = leaf(4)
    y = x * 2
    assert y.relu_() is y
    return y, [x]


def in_place_with_a_parameter() -> Made:
    w = leaf(4)
    y = torch.zeros(4)
    y.add_(w, alpha=3)
    return y, [w]


def in_place_on_a_view() -> Made:
    x = leaf(3, 4)
    y = x * 1
    y[1].mul_(x[0])
    return y, [x]


def in_place_by_an_argument() -> Made:
    x = leaf(4)
    y = x * 1
    assert F.relu(y, inplace=True) is y
    return y, [x]


def an_assignment() -> Made:
    x, v = leaf(3, 4), leaf(4)
    y = x * 1
    y[2] = v
    return y, [x, v]


def an_augmented_assignment() -> Made:
    x = leaf(4)
    y = z = x * 2
    y += x
    assert y is z
    return y, [x]


def a_view() -> Made:
    x = leaf(3, 4)
    y = (x * 1).clone()
    v = y.transpose(0, 1)
    v.mul_(2)  # seen through y
    assert v._base is y
    return y, [x]


def an_unchanged_input() -> Made:
    x = leaf(3, 4)
    y = x.contiguous()
    assert y is x
    return y * 1, [x]


def several_outputs() -> Made:
    x = leaf(3, 4)
    return torch.max(x, 1), [x]


def a_list() -> Made:
    x, y = leaf(3), leaf(3)
    return torch.cat([x, y, x]), [x, y]


def a_list_of_outputs() -> Made:
    x = leaf(6)
    return list(torch._foreach_add([x * 1, x * 2], [x, x])), [x]


def foreach_in_place() -> Made:
    xs = [ramp(3), ramp(4)]
    torch._foreach_mul_(xs, 3.0)
    return xs, []


def out_argument() -> Made:
    out = torch.empty(2, 3)
    assert torch.add(ramp(2, 3), 1, out=out) is out
    return out, []


def out_argument_that_grows() -> Made:
    out = torch.empty(0)
    torch.mul(ramp(2, 3), 2, out=out)
    return out, []


def out_tuple() -> Made:
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.max(ramp(3, 4), 1, out=(values, indices))
    return [values, indices], []


def integers() -> Made:
    return torch.add(torch.arange(4), torch.arange(4)), []


def an_embedding() -> Made:
    w = leaf(5, 3)
    return F.embedding(torch.tensor([0, 2, 2]), w), [w]


def a_mask() -> Made:
    x = leaf(3, 4)
    return torch.where(x > 0, x, torch.zeros(())), [x]


def a_comparison() -> Made:
    return torch.gt(ramp(4), 0), []


def half_precision() -> Made:
    x = leaf(2, 8, dtype=torch.float16)
    return F.softmax(x, -1), [x]


def a_dtype_argument() -> Made:
    x = leaf(2, 8)
    return F.softmax(x, -1, dtype=torch.float16), [x]


def mixed_dtypes() -> Made:
    x, y = leaf(4, dtype=torch.bfloat16), leaf(4)
    return torch.add(x, y), [x, y]


def complex_numbers() -> Made:
    x = leaf(8)
    return torch.fft.fft(x), [x]


def a_factory() -> Made:
    return torch.linspace(0, 1, 5), []


def a_factory_with_a_dtype() -> Made:
    return torch.full((3,), 0.1, dtype=torch.float16), []


def a_factory_of_integers() -> Made:
    return torch.arange(5), []


def a_factory_of_leaves() -> Made:
    w = torch.ones(3, requires_grad=True)
    assert w.is_leaf
    return w * 2, [w]


def zeros_like() -> Made:
    return torch.zeros_like(ramp(3, dtype=torch.float16)), []


def running_statistics() -> Made:
    bn = nn.BatchNorm1d(4)
    x = leaf(6, 4)
    y = bn(x)
    return [y, bn.running_mean.clone(), bn.running_var.clone()], [x, bn.weight, bn.bias]


def a_recurrent_net() -> Made:
    lstm = nn.LSTM(3, 4)
    with torch.no_grad():
        for p in lstm.parameters():
            p.copy_(ramp(*p.shape))
    x = leaf(5, 2, 3)
    return lstm(x), [x, *lstm.parameters()]


def no_grad() -> Made:
    with torch.no_grad():
        return F.linear(leaf(2, 3), leaf(4, 3)), []


def inference() -> Made:
    with torch.inference_mode():
        x = ramp(4)
        x.relu_()
        return F.gelu(x) * 1, []


def frozen() -> Made:
    x, w = leaf(2, 3), ramp(4, 3)
    return F.linear(x, w), [x]


def double_backward() -> Made:
    x = leaf(4)
    (g,) = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
    return g, [x]


def detached() -> Made:
    x = leaf(4)
    return torch.tanh(x.detach()), []


def an_optimizer() -> Made:
    w = nn.Parameter(ramp(4))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    for _ in range(2):
        (w * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w], []


def attention() -> Made:
    q, k, v = leaf(1, 2, 3, 4), leaf(1, 2, 3, 4), leaf(1, 2, 3, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]


PROGRAMS = [
    (a_functional, "F.layer_norm"), (one_input_twice, "mul"), (an_in_place_op, "Tensor.relu_"),
    (in_place_with_a_parameter, "add_"), (in_place_on_a_view, "Tensor.mul_"),
    (in_place_by_an_argument, "F.relu"), (an_assignment, "Tensor.__setitem__"),
    (an_augmented_assignment, "Tensor.__iadd__"), (several_outputs, "torch.max"),
    (a_list, "torch.cat"), (a_list_of_outputs, "torch._foreach_add"),
    (foreach_in_place, "torch._foreach_mul_"), (out_argument, "torch.add"),
    (out_argument_that_grows, "torch.mul"), (out_tuple, "torch.max"), (integers, "torch.add"),
    (an_embedding, "F.embedding"), (a_mask, "torch.where"), (a_comparison, "torch.gt"),
    (half_precision, "F.softmax"), (a_dtype_argument, "F.softmax"), (mixed_dtypes, "add"),
    (complex_numbers, "torch.fft.fft"), (a_factory, "torch.linspace"),
    (a_factory_with_a_dtype, "torch.full"), (a_factory_of_integers, "torch.arange"),
    (a_factory_of_leaves, "torch.ones"), (zeros_like, "torch.zeros_like"),
    (running_statistics, "F.batch_norm"), (a_recurrent_net, "torch.lstm"), (no_grad, "F.linear"),
    (inference, "Tensor.relu_"), (inference, "F.gelu"), (frozen, "F.linear"),
    (double_backward, "torch.tanh"), (detached, "torch.tanh"),
    (attention, "F.scaled_dot_product_attention"),
]  # fmt: skip

# An NPU composes these of others; the host has kernels of their own, which round otherwise.
OTHER_KERNELS = (a_recurrent_net, attention)


def run(program: Callable[[], Made]) -> tuple[Any, list[Tensor | None]]:
    made, wanted = program()
    outputs = [t for t in flat(made) if t.requires_grad]
    if not outputs or not wanted:
        return made, []
    weights = [ramp(*t.shape).to(t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
    return made, [g for g in grads if g is not None]


@pytest.mark.parametrize(
    ("program", "name"), PROGRAMS, ids=[f"{p.__name__}-{n}" for p, n in PROGRAMS]
)
def test_what_comes_back_is_what_came_back(program: Callable[[], Made], name: str) -> None:
    made, grads = run(program)
    with tp.reroute({name: TARGET}) as rerouted:
        made_elsewhere, grads_elsewhere = run(program)
    exact = ON_SIM_NPU and program not in OTHER_KERNELS
    atol = 1e-3 if program in (half_precision, a_dtype_argument) else 1e-5
    compare(made_elsewhere, made, exact=exact, atol=atol)
    compare(grads_elsewhere, grads, exact=exact, atol=atol)
    assert rerouted.counts[name] > 0


@pytest.mark.parametrize(
    "program",
    [*dict.fromkeys(p for p, _ in PROGRAMS), a_view, an_unchanged_input, an_optimizer],
    ids=lambda p: p.__name__,
)
def test_everything_may_run_elsewhere(program: Callable[[], Made]) -> None:
    made, grads = run(program)
    with tp.reroute({"*": TARGET}):
        made_elsewhere, grads_elsewhere = run(program)
    exact = ON_SIM_NPU and program not in OTHER_KERNELS
    atol = 1e-3 if program in (half_precision, a_dtype_argument) else 1e-5
    compare(made_elsewhere, made, exact=exact, atol=atol)
    compare(grads_elsewhere, grads, exact=exact, atol=atol)


@host_only("in float64 nothing is rounded on the way")
def test_higher_precision_is_that_of_the_whole_call_and_its_backward() -> None:
    x = leaf(4, 64, dtype=torch.float16)
    w = leaf(64, dtype=torch.float16)
    with tp.reroute({"torch.nn.functional.layer_norm": "float64"}):
        y = F.layer_norm(x, (64,), w)
    y.backward(ramp(4, 64, dtype=torch.float16))
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y64 = F.layer_norm(x64, (64,), w64)
    y64.backward(ramp(4, 64, dtype=torch.float16).double())
    assert torch.equal(y, y64.half())
    assert torch.equal(x.grad, x64.grad.half())
    assert torch.equal(w.grad, w64.grad.half())


if hasattr(torch.library, "custom_op"):  # from torch 2.4 on
    # 2.4 does not read annotations that are text
    @torch.library.custom_op(
        "reroute_test::softmax", mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    def naive_softmax(x: Tensor) -> Tensor:
        e = x.exp()  # overflows where a careful kernel would not
        return e / e.sum(-1, keepdim=True)

    naive_softmax.register_autograd(
        lambda ctx, grad: ctx.y * (grad - (grad * ctx.y).sum(-1, keepdim=True)),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "y", output),
    )


@host_only("kernels of the host")
@pytest.mark.parametrize(
    ("dtype", "height", "target"),
    [(torch.float16, 12.0, "float32"), (torch.bfloat16, 89.0, "cpu:float64")],
)
def test_an_overflow_inside_a_call_is_cured_by_precision(
    dtype: torch.dtype, height: float, target: str
) -> None:
    x = torch.full((2, 4), height, dtype=dtype, requires_grad=True)
    assert naive_softmax(x).isnan().all()
    with tp.reroute({"reroute_test::softmax": target}) as rerouted:
        y = naive_softmax(x)
    assert rerouted.counts == {"reroute_test::softmax": 1}
    assert torch.equal(y, F.softmax(x, -1))
    y[:, 0].sum().backward()
    (expected,) = torch.autograd.grad(F.softmax(x.double(), -1)[:, 0].sum(), x)
    assert torch.equal(x.grad, expected)


@host_only("kernels of the host")
def test_a_loss_that_overflows_in_half_precision_is_cured() -> None:
    x = torch.zeros(100, dtype=torch.float16)
    x[3] = 300
    assert F.mse_loss(x, torch.zeros_like(x)).isinf()
    with tp.reroute({"Functional.mse_loss": "float32"}):
        assert F.mse_loss(x, torch.zeros_like(x)) == 900


@host_only("autocast of the host")
def test_autocast_does_not_undo_the_precision() -> None:
    x, w = leaf(2, 64), leaf(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = F.linear(x, w)
        with tp.reroute({"F.linear": "float32"}):
            fine = F.linear(x, w)
        after = F.linear(x, w)
    assert fine.dtype == coarse.dtype == torch.bfloat16
    assert torch.equal(fine, F.linear(x, w).bfloat16())
    assert not torch.equal(fine, coarse)
    assert torch.equal(after, coarse)
    fine.sum().backward()
    assert x.grad.dtype == torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, use_reentrant=self.again == "reentrant")
            else:
                x = block(x)
        return x


def net(again: str = "") -> Net:
    torch.manual_seed(0)
    return Net(again)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("torch.layer_norm", 3), ("Functional.layer_norm", 3), ("F.layer_norm", 3),
        ("layer_norm", 3), ("nn.functional.layer_norm", 3), ("aten.layer_norm", 3),
        ("torch.ops.aten.layer_norm", 3), ("*.layer_norm", 3), ("aten.native_layer_norm", 8),
        ("Functional.layer_norm.1", 1), ("Functional.layer_norm.1.forward", 1),
        ("Functional_layer_norm_1_forward", 1), ("Aten.native_layer_norm.1", 3),
        ("blocks.1.norm", 1), ("Module.blocks.1.norm.LayerNorm", 1), ("*.norm", 3),
        ("blocks.1", 4), ("blocks.?.linear", 3), ("Tensor.__add__", 3), ("aten.add", 5),
    ],
)  # fmt: skip
# Below autograd, ops that a node's backward runs count too, and so does a sum of gradients.
def test_a_call_matches_by_any_name_it_goes_by(name: str, calls: int) -> None:
    model, x = net(), ramp(2, 8)
    expected = model(x)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    with tp.reroute({name: TARGET}) as rerouted:
        actual = model(x)
        actual.sum().backward()
    compare(actual, expected)
    compare([p.grad for p in model.parameters()], grads)
    assert rerouted.counts == {name: calls}


@pytest.mark.parametrize("again", ["", "not reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["F.layer_norm", "Functional.layer_norm.1", "blocks.2"])
def test_recomputation_goes_where_its_original_went(again: str, name: str) -> None:
    plain, model, x = net(), net(again), ramp(2, 8).requires_grad_()
    plain(x).sum().backward()
    x = x.detach().requires_grad_()
    with tp.reroute({name: TARGET}) as rerouted:
        model(x).sum().backward()
    compare([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    once = {"F.layer_norm": 3, "Functional.layer_norm.1": 1, "blocks.2": 4}[name]
    if not again:
        assert rerouted.counts[name] == once
    elif again == "reentrant":
        assert rerouted.counts[name] == 2 * once
    else:  # the recomputation stops when all that backward needs is there
        assert once < rerouted.counts[name] <= 2 * once


def test_numbers_begin_anew_with_each_step() -> None:
    model, x = net(), ramp(2, 8)
    with tp.reroute({"Functional.linear.2": TARGET}) as rerouted:
        for _ in range(3):
            model(x)
            rerouted.step()
    assert rerouted.counts == {"Functional.linear.2": 3}


@pytest.mark.parametrize(
    ("kind", "name", "calls"),
    [
        ("training", "Functional.linear.1", 4),
        ("training", "Functional.gelu.3", 0),
        ("accumulating", "Functional.linear.1", 2),
        ("accumulating", "Functional.gelu.5", 2),
        ("inference", "Tensor.add.2", 4),
        ("checkpointed", "Functional.layer_norm.1", 4),
    ],
)
def test_numbers_are_those_of_a_recording(tmp_path: Any, kind: str, name: str, calls: int) -> None:
    """Whatever ends a step: each call of that name in the recording ran elsewhere, no other."""
    model, x = net("not reentrant" if kind == "checkpointed" else ""), ramp(2, 8)
    optimizer = None if kind == "inference" else torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for number in range(4):
            with torch.set_grad_enabled(optimizer is not None):
                y = model(x)
            if optimizer is not None:
                y.sum().backward()
                if kind != "accumulating" or number % 2:
                    optimizer.step()
                    optimizer.zero_grad()

    rerouted = Reroute({name: TARGET}, step_on="auto").start()
    capture = record(tmp_path / "a", program, level="L1", keep="structure", step_on="auto")
    rerouted.stop()
    recorded = [c for c in capture.calls(direction="forward") if c.name == f"{name}.forward"]
    assert len(recorded) == calls
    again = 2 if kind == "checkpointed" else 1  # and where it is computed again
    assert rerouted.counts[name] == again * calls


def test_the_most_specific_name_decides() -> None:
    model, x = net(), ramp(2, 8)
    with tp.reroute({"linear": TARGET, "blocks.0": TARGET, "Functional.linear.0": TARGET}) as r:
        model(x)
    assert r.counts == {"linear": 2, "blocks.0": 3, "Functional.linear.0": 1}


def test_a_call_that_does_not_match_keeps_its_bits() -> None:
    model, x = net(), ramp(2, 8)
    expected = model(x)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    with tp.reroute({"torch.relu": TARGET}):
        actual = model(x)
        actual.sum().backward()
        torch.relu(x)
    assert torch.equal(actual, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("outer", ["recorder", "reroute"])
def test_a_recorder_sees_the_users_call(tmp_path: Any, outer: str) -> None:
    model, x = net(), ramp(2, 8)

    def program() -> None:
        model(x).sum().backward()

    def inside() -> None:
        with tp.reroute({"F.layer_norm": TARGET}):
            program()

    plain = record(tmp_path / "plain", program)
    model.zero_grad()
    if outer == "recorder":
        actual = record(tmp_path / "rerouted", inside)
    else:
        with tp.reroute({"F.layer_norm": TARGET}):
            actual = record(tmp_path / "rerouted", program)
    assert [c.name for c in actual.calls] == [c.name for c in plain.calls]
    assert actual.gaps == plain.gaps == ()
    for a, b in zip(actual.calls, plain.calls, strict=True):
        assert [(t.name, t.dtype, t.shape, t.device) for t in a.tensors] == [
            (t.name, t.dtype, t.shape, t.device) for t in b.tensors
        ]
        for t, u in zip(a.tensors, b.tensors, strict=True):
            torch.testing.assert_close(t.load(), u.load())


def test_a_recorder_of_ops_sees_the_op(tmp_path: Any) -> None:
    model, x = net(), ramp(2, 8)
    plain = record(tmp_path / "plain", lambda: model(x), level="L2")
    with tp.reroute({"aten.native_layer_norm": TARGET}):
        actual = record(tmp_path / "rerouted", lambda: model(x), level="L2")
    assert [c.name for c in actual.calls] == [c.name for c in plain.calls]


@host_only("an overflow in half precision")
@pytest.mark.parametrize("outer", ["guard", "reroute"])
@pytest.mark.parametrize("name", ["F.mse_loss", "F.gelu"])
def test_a_guard_judges_what_came_back(tmp_path: Any, outer: str, name: str) -> None:
    x = torch.zeros(100, dtype=torch.float16)
    x[3] = 300
    guard = tp.Guard(tmp_path / "guard", overflow_nums=-1)
    rerouted = tp.reroute({name: "float32"})
    first, second = (guard, rerouted) if outer == "guard" else (rerouted, guard)
    with first, second:
        F.mse_loss(x, torch.zeros_like(x))
        F.gelu(x)
    found = [finding.name for finding in guard.findings]
    assert found == ([] if name == "F.mse_loss" else ["Functional.mse_loss.0.forward"])
    assert rerouted.counts == {name: 1}


def test_two_at_once() -> None:
    model, x = net(), ramp(2, 8)
    expected = model(x)
    with tp.reroute({"F.linear": TARGET}) as a, tp.reroute({"F.linear": TARGET, "gelu": TARGET}):
        actual = model(x)
    compare(actual, expected)
    assert a.counts == {"F.linear": 3}


def test_start_and_stop() -> None:
    x = ramp(4)
    rerouted = tp.reroute({"relu": TARGET}).start()
    torch.relu(x)
    rerouted.stop()
    torch.relu(x)
    rerouted.start()
    torch.relu(x)
    rerouted.close()
    assert rerouted.counts == {"relu": 2}


def test_another_thread() -> None:
    model, x = net(), ramp(2, 8)
    with tp.reroute({"F.linear": TARGET}) as rerouted:
        thread = threading.Thread(target=lambda: model(x).sum().backward())
        thread.start()
        thread.join()
    assert rerouted.counts == {"F.linear": 3}


def test_a_default_device_stays_the_lowest() -> None:
    with torch.device("meta"), tp.reroute({"relu": TARGET}):
        assert torch.zeros(2).is_meta
        torch.relu(ramp(3))
    with tp.reroute({"relu": TARGET}), torch.device("meta"):
        assert torch.zeros(2).is_meta
        torch.relu(ramp(3))


@host_only("a tensor of the device is a subclass already")
def test_subclasses_of_tensor_stay() -> None:
    class Named(Tensor):
        pass

    x = ramp(4).as_subclass(Named)
    with tp.reroute({"torch.relu": TARGET}):
        y = torch.relu(x)
    assert type(y) is Named


@host_only("kinds of tensors that the simulated device does not have")
def test_other_kinds_of_tensors_come_back_as_they_are() -> None:
    weight, sparse = ramp(4, 3), torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([ramp(2, 3), ramp(1, 3)], layout=torch.jagged)

    def program() -> list[Tensor]:
        return [
            torch.func.vmap(lambda x: F.layer_norm(F.linear(x, weight), (4,)))(ramp(5, 3)),
            torch.func.grad(lambda x: torch.tanh(x).sum())(ramp(5)),
            torch.sparse.mm(sparse, ramp(3, 3)),
            torch.nested.to_padded_tensor(nested * 2, 0.0),
            torch.stft(ramp(100), 20, window=torch.ones(20), return_complex=True),
            torch.linalg.svd(ramp(3, 3) + torch.eye(3)).S,
        ]

    expected = program()
    with tp.reroute({"*": "float64"}):
        actual = program()
    compare(actual, expected)


def test_the_programs_own_exception_comes_through() -> None:
    with tp.reroute({"F.linear": TARGET}) as rerouted:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(ramp(2, 3), ramp(4, 4))
        F.linear(ramp(2, 4), ramp(4, 4))
    assert "shapes cannot be multiplied" in rerouted.failed["Functional.linear"]
    with pytest.raises(ValueError, match="mine"), tp.reroute({"nothing": TARGET}):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"torch.grup_norm": "cpu"},
            "'torch.grup_norm' matched no call. Near names: Functional.gr",
        ),
        ({"Functional.group_norm.7": "cpu"}, "there was no call of that number"),
        (
            {"Tensor.view": TARGET},
            "'Tensor.view' matched 1 call, which cannot run elsewhere: it is",
        ),
        ({"block.5": "cpu", "F.group_norm": "cpu"}, "'block.5' matched no call"),
    ],
)
def test_a_name_that_reroutes_nothing_is_an_error_at_the_end(
    rules: dict[str, str], message: str
) -> None:
    with pytest.raises(BadUsage) as caught, tp.reroute(rules):
        F.group_norm(ramp(2, 4), 2).view(-1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("flaot32", "Did you mean float32?"),
        ("float16", "'float16' is no higher precision; say float32 or float64"),
        ("cpu:cpu", "one device and one dtype at most"),
        ("", "rerouting needs a target"),
        ("gpu", "'gpu' is neither a device"),
    ],
)
def test_a_wrong_target_is_an_error_before_anything_runs(target: str, message: str) -> None:
    with pytest.raises(BadUsage) as caught:
        tp.reroute({"relu": target})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceUnusable, match="cannot reroute to 'xpu': it is not there"):
        tp.reroute({"relu": "xpu"})
    with pytest.raises(BadUsage, match="nothing to reroute"):
        tp.reroute({})


def test_a_module_called_by_number_is_refused() -> None:
    with pytest.raises(BadUsage, match=r"Name the module: blocks\.1"):
        tp.reroute({"Module.blocks.1.Block.forward.0": "cpu"})


@host_only("compiles")
def test_a_compiled_part_is_not_looked_into() -> None:
    said: list[str] = []
    f = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    with Reroute({"relu": TARGET}, log=said.append):
        assert torch.equal(f(ramp(3)), torch.relu(ramp(3)) + 1)
        torch.relu(ramp(3))
    assert "a compiled part ran" in said[-1]
