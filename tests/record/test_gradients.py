"""Recorded gradients against an independent computation of the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from tensorprobe.records import Call, Capture


def record(path: Path, program: Callable[[], Any], **options: Any) -> Capture:
    """What a recorder keeps of a program."""
    settings = {"level": "L1", "keep": "tensors", **options}
    with tp.Recorder(path, log=lambda text: None, **settings):
        program()
    return tp.load(path)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def backward_of(capture: Capture, api: str) -> Call:
    """The backward of the first call of an API, whether of torch, F or a method."""
    return capture.calls(name=f"*.{api}.0.backward")[0]


def gradients(call: Call, side: str) -> dict[str, Tensor]:
    prefix = f"{call.name}.{side}."
    return {
        t.name.removeprefix(prefix): t.load() for t in call.tensors if t.name.startswith(prefix)
    }


class Case(NamedTuple):
    """One call: its inputs that require a gradient, by the path they have in the call."""

    call: str
    function: Callable[..., Any]
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...] = ("0",)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for item in result for t in flat(item)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def lstm(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:
    return torch._VF.lstm(x, (h, c), list(weights), True, 1, 0.0, True, False, False)


INDEX = torch.tensor([2, 0, 2, 1])
MASK = torch.tensor([[True, False, True], [False, True, False]])
LABELS = torch.tensor([0, 2, 1, 2])
CASES = {
    "linear": Case(
        "linear",
        lambda x, w, b: F.linear(x, w, b),
        {"0": randn(4, 3), "1": randn(5, 3), "2": randn(5)},
    ),
    "linear without bias": Case("linear", F.linear, {"0": randn(4, 3), "1": randn(5, 3)}),
    "linear 3-D": Case("linear", F.linear, {"0": randn(2, 4, 3), "1": randn(5, 3), "2": randn(5)}),
    "linear 3-D without bias": Case("linear", F.linear, {"0": randn(2, 4, 3), "1": randn(5, 3)}),
    "matmul": Case("matmul", torch.matmul, {"0": randn(2, 4, 3), "1": randn(3, 5)}),
    "operator @": Case("matmul", lambda a, b: a @ b, {"0": randn(4, 3), "1": randn(3, 5)}),
    "conv2d": Case(
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        {"0": randn(2, 3, 5, 5), "1": randn(4, 3, 3, 3), "2": randn(4)},
    ),
    "batch_norm": Case(
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        {"0": randn(4, 3), "weight": randn(3), "bias": randn(3)},
    ),
    "layer_norm": Case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (3,), weight=w, bias=b),
        {"0": randn(4, 3), "weight": randn(3), "bias": randn(3)},
    ),
    "group_norm": Case(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        {"0": randn(2, 4, 3), "weight": randn(4), "bias": randn(4)},
    ),
    "cross_entropy": Case(
        "cross_entropy", lambda x: F.cross_entropy(x, LABELS), {"0": randn(4, 3)}
    ),
    "embedding": Case("embedding", lambda w: F.embedding(INDEX, w), {"1": randn(3, 5)}),
    "softmax": Case("softmax", lambda x: F.softmax(x, dim=-1), {"0": randn(4, 3)}),
    "attention": Case(
        "scaled_dot_product_attention",
        attention,
        {"0": randn(2, 2, 4, 3), "1": randn(2, 2, 4, 3), "2": randn(2, 2, 4, 3)},
    ),
    "lstm": Case(
        "lstm",
        lstm,
        {
            "0": randn(4, 2, 3),
            "1.0": randn(1, 2, 5),
            "1.1": randn(1, 2, 5),
            "2.0": randn(20, 3),
            "2.1": randn(20, 5),
            "2.2": randn(20),
            "2.3": randn(20),
        },
        ("0", "1", "2"),
    ),
    "split": Case("split", lambda x: x.split(2), {"0": randn(6, 3)}, ("0", "1", "2")),
    "unbind": Case("unbind", lambda x: x.unbind(1), {"0": randn(4, 2)}, ("0", "1")),
    "chunk": Case("chunk", lambda x: torch.chunk(x, 2), {"0": randn(4, 2)}, ("0", "1")),
    "max": Case("max", lambda x: torch.max(x, 1)[0], {"0": randn(4, 3)}),
    "cat": Case("cat", lambda a, b: torch.cat([a, b]), {"0.0": randn(2, 3), "0.1": randn(4, 3)}),
    "stack": Case(
        "stack", lambda a, b: torch.stack((a, b), 1), {"0.0": randn(2, 3), "0.1": randn(2, 3)}
    ),
    "where": Case(
        "where", lambda a, b: torch.where(MASK, a, b), {"1": randn(2, 3), "2": randn(2, 3)}
    ),
    "index": Case("__getitem__", lambda x: x[INDEX], {"0": randn(3, 2)}),
    "slice": Case("__getitem__", lambda x: x[1:, ::2], {"0": randn(3, 4)}),
    "add in place": Case("add_", lambda x, y: x.add_(y), {"0": randn(3, 2), "1": randn(2)}),
    "relu in place": Case("relu_", torch.relu_, {"0": randn(3, 2)}),
    "functional relu in place": Case("relu", lambda x: F.relu(x, inplace=True), {"0": randn(3, 2)}),
    "view": Case("view", lambda x: x.view(-1), {"0": randn(3, 2)}),
    "transpose": Case("transpose", lambda x: x.transpose(0, 1), {"0": randn(3, 2)}),
    "expand": Case("expand", lambda x: x.expand(4, 3), {"0": randn(1, 3)}),
    "broadcast": Case("add", lambda x, y: x + y, {"0": randn(4, 3), "1": randn(3)}),
    "keywords": Case(
        "addmm",
        lambda b, x, y: torch.addmm(input=b, mat1=x, mat2=y, beta=2),
        {"input": randn(5), "mat1": randn(4, 3), "mat2": randn(3, 5)},
    ),
    "einsum": Case(
        "einsum",
        lambda a, b: torch.einsum("ij,jk->ki", a, b),
        {"1": randn(4, 3), "2": randn(3, 5)},
    ),
    "einsum of a list": Case(
        "einsum",
        lambda a, b: torch.einsum("ij,jk->ki", [a, b]),
        {"1.0": randn(4, 3), "1.1": randn(3, 5)},
    ),
    "prelu": Case("prelu", F.prelu, {"0": randn(4, 3), "1": randn(3)}),
    "masked_fill": Case("masked_fill", lambda x: x.masked_fill(MASK, 0.0), {"0": randn(2, 3)}),
    "to another dtype": Case("to", lambda x: x.to(torch.float32), {"0": randn(2, 3)}),
    "norm": Case("norm", lambda x: torch.norm(x), {"0": randn(4, 3)}),
    "complex": Case("mul", lambda x: x * 2j, {"0": torch.randn(3, dtype=torch.complex128)}),
}


WRITES = [case for name, case in CASES.items() if "in place" in name]


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "inner"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_call_gets_and_sends_its_own_gradients(case: Case, leaf: bool, tmp_path: Path) -> None:
    leaf = leaf and case not in WRITES  # a leaf cannot be written to
    expected, weights = independent_gradients(case)

    def program() -> None:
        leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
        given = leaves if leaf else [torch.clone(t) for t in leaves]
        torch.autograd.backward(flat(case.function(*given)), weights)

    backward = backward_of(record(tmp_path / "run", program), case.call)
    incoming, outgoing = gradients(backward, "input"), gradients(backward, "output")
    assert outgoing.keys() == case.inputs.keys()
    for path, gradient in zip(case.inputs, expected, strict=True):
        torch.testing.assert_close(outgoing[path], gradient, rtol=1e-12, atol=1e-14)
    for path, weight in zip(case.outputs, weights, strict=True):
        assert torch.equal(incoming[path], weight)


def independent_gradients(case: Case) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Gradients of the inputs for random gradients of the outputs, without a recorder."""
    leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
    outputs = flat(case.function(*(torch.clone(t) for t in leaves)))
    weights = [torch.randn_like(output) for output in outputs]
    return torch.autograd.grad(outputs, leaves, weights), weights


def test_an_output_nobody_uses_gets_no_gradient(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.arange(6.0, requires_grad=True)
        first, _, last = x.split(2)
        (first.sum() + 3 * last.sum()).backward()

    backward = backward_of(record(tmp_path / "run", program), "split")
    assert [tuple(g.shape) for g in gradients(backward, "input").values()] == [(2,), (2,)]
    assert backward.args[1] is None
    assert gradients(backward, "output")["0"].tolist() == [1, 1, 0, 0, 3, 3]


def test_outputs_far_apart_in_the_graph_are_one_backward(tmp_path: Path) -> None:
    class TwoHeads(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, (x * 3).exp()

    def program() -> None:
        x = torch.zeros(3, requires_grad=True)
        a, b = TwoHeads()(x * 1)
        (a.sum() + b.sum()).backward()

    capture = record(tmp_path / "run", program, level="L0")
    (backward,) = capture.calls(direction="backward")
    incoming = gradients(backward, "input")
    assert [incoming[i].tolist() for i in ("0", "1")] == [[1, 1, 1], [1, 1, 1]]
    assert gradients(backward, "output")["0"].tolist() == [5, 5, 5]


def test_each_use_of_a_tensor_sends_its_own_share(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(3, requires_grad=True) * 1
        (x.exp() + x.sin() + torch.mul(x, 5)).sum().backward()

    capture = record(tmp_path / "run", program)
    share = {
        name: gradients(backward_of(capture, name), "output")["0"][0].item()
        for name in ("exp", "sin")
    }
    ones = torch.ones(1)
    assert share == {"exp": ones.exp().item(), "sin": ones.cos().item()}
    assert gradients(capture.call("Torch.mul.0.backward"), "output")["0"].tolist() == [5, 5, 5]


@pytest.mark.parametrize("times", [2, 3])
def test_one_tensor_given_several_times_has_one_gradient(times: int, tmp_path: Path) -> None:
    def program() -> None:
        x = torch.full((2,), 3.0, requires_grad=True) * 1
        torch.stack([x] * times).prod(0).sum().backward()

    backward = backward_of(record(tmp_path / "run", program), "stack")
    outgoing = gradients(backward, "output")
    assert list(outgoing) == ["0.0"]
    assert outgoing["0.0"].tolist() == [times * 3.0 ** (times - 1)] * 2
    assert [note for note in backward.notes if "one tensor" in note] == [
        f"output.0.{i} is in output.0.0: one tensor" for i in range(1, times)
    ]


def test_inputs_without_gradient_have_none(tmp_path: Path) -> None:
    def program() -> None:
        weight = torch.ones(2, 3, requires_grad=True)
        F.linear(torch.ones(4, 3), weight, torch.zeros(2)).sum().backward()

    backward = backward_of(record(tmp_path / "run", program), "linear")
    assert list(gradients(backward, "output")) == ["1"]


# Writing to views: torch carries these gradients in those of the base

BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x.clone(),
    "transposed": lambda x: x.t().clone().t(),
    "transposed twice over": lambda x: torch.empty_strided((4, 6), (1, 4)).to(x).copy_(x),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda base: base[1],
    "block": lambda base: base[1:3, ::2],
    "column": lambda base: base.t()[2],
    "view of a view": lambda base: base[1:].t()[1:3],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_writing_to_a_view(
    base: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    x, weight = randn(4, 6), randn(4, 6)
    factor = randn(*view(base(x)).shape)

    def program() -> None:
        leaf = x.clone().requires_grad_()
        other = factor.clone().requires_grad_()
        whole = base(leaf)
        part = view(whole)
        part.mul_(other)
        (whole * weight).sum().backward()

    backward = record(tmp_path / "run", program).call("Tensor.mul_.0.backward")
    outgoing = gradients(backward, "output")
    came_in = view(base(weight))
    assert torch.equal(gradients(backward, "input")["0"], came_in)
    assert torch.equal(outgoing["0"], came_in * factor)
    assert torch.equal(outgoing["1"], came_in * view(base(x)))


def test_writing_to_a_view_and_going_on_with_both(tmp_path: Path) -> None:
    def program() -> None:
        base = torch.ones(2, 3, requires_grad=True) * 1
        row = base[0]
        row.mul_(torch.tensor(4.0, requires_grad=True))
        (base.sum() + 10 * row.sum()).backward()

    backward = record(tmp_path / "run", program).call("Tensor.mul_.0.backward")
    assert gradients(backward, "input")["0"].tolist() == [11, 11, 11]
    assert gradients(backward, "output")["0"].tolist() == [44, 44, 44]
    assert gradients(backward, "output")["1"].item() == 33


def test_writing_to_a_view_of_a_tensor_without_gradient(tmp_path: Path) -> None:
    def program() -> None:
        base = torch.zeros(2, 3)
        base[1].copy_(torch.ones(3, requires_grad=True))
        (base * 7).sum().backward()

    backward = record(tmp_path / "run", program).call("Tensor.copy_.0.backward")
    assert gradients(backward, "input")["0"].tolist() == [7, 7, 7]
    assert gradients(backward, "output")["1"].tolist() == [7, 7, 7]


def test_setting_items(tmp_path: Path) -> None:
    def program() -> None:
        base = torch.ones(2, 3, requires_grad=True) * 1
        value = torch.ones(3, requires_grad=True) * 1
        base[1] = value
        (base * 5).sum().backward()

    backward = record(tmp_path / "run", program).call("Tensor.__setitem__.0.backward")
    assert gradients(backward, "output")["0"].tolist() == [[5, 5, 5], [0, 0, 0]]
    assert gradients(backward, "output")["2"].tolist() == [5, 5, 5]


def test_writing_to_several_views_of_one_base(tmp_path: Path) -> None:
    def program() -> None:
        base = torch.ones(2, 3, requires_grad=True) * 1
        torch._foreach_mul_([base[0], base[1]], 3.0)
        (base * torch.tensor([[1.0], [2.0]])).sum().backward()

    backward = record(tmp_path / "run", program).call("Torch._foreach_mul_.0.backward")
    incoming, outgoing = gradients(backward, "input"), gradients(backward, "output")
    assert [incoming[f"{i}"].tolist() for i in (0, 1)] == [[1, 1, 1], [2, 2, 2]]
    assert [outgoing[f"0.{i}"].tolist() for i in (0, 1)] == [[3, 3, 3], [6, 6, 6]]


# Backward more than once


def test_backward_twice_through_one_graph(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.sum().backward(retain_graph=True)
        (y * 2).sum().backward()

    capture = record(tmp_path / "run", program)
    first, second = (c for c in capture.calls if c.name == "Tensor.exp.0.backward")
    assert gradients(first, "input")["0"].tolist() == [1, 1]
    assert gradients(second, "input")["0"].tolist() == [2, 2]
    assert second.notes == ("backward pass 2 through the same graph",)


def test_double_backward(tmp_path: Path) -> None:
    seen = []

    def program() -> None:
        x = torch.full((2,), 2.0, requires_grad=True)
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        gradient.sum().backward()
        seen.append(x.grad)

    capture = record(tmp_path / "run", program)
    assert seen[0].tolist() == [12, 12]
    first = next(c for c in capture.calls if c.name == "Tensor.pow.0.backward")
    assert gradients(first, "output")["0"].tolist() == [12, 12]


def test_gradients_of_some_inputs_only(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(2, requires_grad=True) * 1
        y = torch.ones(2, requires_grad=True) * 1
        torch.autograd.grad(torch.mul(x, y).sum(), [y])

    backward = record(tmp_path / "run", program).call("Torch.mul.0.backward")
    assert gradients(backward, "output")["1"].tolist() == [1, 1]


# Memory


@pytest.mark.parametrize("level", ["L0", "L1", "L2", "mix"])
def test_the_graph_and_its_tensors_are_freed_at_once(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    gc.disable()  # by reference counts alone: no cycle may hold the graph
    try:
        with tp.Recorder(tmp_path / "run", level=level, keep="tensors", log=lambda text: None):
            hidden = model[0](torch.ones(2, 3))
            in_graph = weakref.ref(hidden.sigmoid_())  # saved for backward by its own node
            loss = model[2](hidden).sum()
            alive = weakref.ref(loss)
            del hidden
            loss.backward()
            del loss
            assert alive() is None
            assert in_graph() is None
            never_run = weakref.ref(model(torch.ones(2, 3)))
            assert never_run() is None
    finally:
        gc.enable()


def test_no_hook_is_left_on_a_leaf(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)
    kept = torch.autograd.graph.get_gradient_edge(x).node  # as DDP does
    before = gc.get_referrers(kept)
    with tp.Recorder(
        tmp_path / "run", level="mix", keep="stats", log=lambda text: None
    ) as recorder:
        for _ in range(3):
            recorder.save("leaf", x)
            (x * 2).sum().backward()
            recorder.step()
    calls = [c.name for c in tp.load(tmp_path / "run").calls(name="Saved")]
    assert calls == ["Saved.leaf.0.forward", "Saved.leaf.0.backward"] * 3
    fired = []
    kept.register_prehook(lambda grads: fired.append(len(grads)))
    (x * 2).sum().backward()
    assert fired == [1]
    assert len(gc.get_referrers(kept)) == len(before)


# ---- backward that fails -----------------------------------------------------------------------


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient of this")


def test_the_call_whose_backward_raised_is_marked(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with tp.Recorder(tmp_path / "r", level="L1"):
        with pytest.raises(ValueError, match="no gradient of this"):
            Refusing.apply(x.sin()).exp().sum().backward()
    calls = [c for c in tp.load(tmp_path / "r").calls if c.direction == "backward"]
    assert [(call.name, call.status, call.error) for call in calls] == [
        ("Tensor.sum.0.backward", "complete", None),
        ("Tensor.exp.0.backward", "complete", None),
        ("Function.Refusing.0.backward", "raised", "ValueError: no gradient of this"),
    ]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_kernel_that_refuses_in_backward(tmp_path: Path, level: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    made: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, args, result: made.append(result))
    with tp.Recorder(tmp_path / "r", level=level):
        loss = model(torch.ones(2, 3, requires_grad=True)).sum()
        with torch.no_grad():
            made[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    calls = [c for c in tp.load(tmp_path / "r").calls if c.direction == "backward"]
    raised = {call.name for call in calls if call.status == "raised"}
    modules = {"Module.Sequential.backward.0", "Module.2.Linear.backward.0"}
    linear = {"Functional.linear.1.backward"}  # it keeps what tanh made for its own gradient
    assert raised == {"L0": modules, "L1": linear, "mix": modules | linear}[level]


def test_what_a_hook_of_the_program_raises_is_no_calls(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)

    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("stop here")

    with tp.Recorder(tmp_path / "r", level="L1"):
        y = x.sin()
        y.register_hook(refuse)
        with pytest.raises(ValueError, match="stop here"):
            y.exp().sum().backward()
    calls = [c for c in tp.load(tmp_path / "r").calls if c.direction == "backward"]
    assert [(call.name, call.status) for call in calls] == [
        ("Tensor.sum.0.backward", "complete"),
        ("Tensor.exp.0.backward", "complete"),
    ]


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_what_is_computed_again_after_a_pause(tmp_path: Path, level: str) -> None:
    x = randn(3, 3).requires_grad_()
    options: dict[str, Any] = {"level": level, "keep": "structure"}
    with tp.Recorder(tmp_path, log=lambda text: None, **options) as recorder:
        y = checkpoint(lambda v: v.sin().cos(), x, use_reentrant=False).sum()
        recorder.pause()
        y.backward()
        recorder.start()
        x.sin()
    names = [call.name for call in tp.load(tmp_path).calls if ".sin." in call.name]
    forward = [f"Tensor.sin.{number}.forward" for number in range(3)]
    assert sorted(names) == sorted([*forward, "Tensor.sin.0.backward"])
