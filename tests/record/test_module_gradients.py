"""Gradients of module calls against modules whose inputs and outputs pass an identity function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorprobe as tp
from recorded import record
from tensorprobe.record.encode import map_tensors
from tensorprobe.records import Capture
from tiny_models import MODELS


class _Spy(torch.autograd.Function):
    """The identity; backward shows the gradient that passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.seen = seen
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.seen(gradient.clone())
        return gradient, None


Reference = dict[tuple[str, int, str], dict[str, Tensor]]  # (path, n-th call, side) -> by label


def replace_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replace(value) if value.requires_grad else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(replace_tensors(item, replace) for item in value)
    if isinstance(value, list):
        return [replace_tensors(item, replace) for item in value]
    if isinstance(value, dict):
        for key in list(value):
            value[key] = replace_tensors(value[key], replace)
    return value


@contextmanager
def spied(model: nn.Module, reference: Reference) -> Iterator[None]:
    """Every input and output of every module goes through the identity function."""
    counts: dict[str, int] = {}
    open_calls: list[tuple[str, int]] = []
    handles = []
    paths = {module: path for path, module in model.named_modules()}

    def spy(value: Any, key: tuple[str, int, str]) -> Any:
        labels: dict[int, str] = {}
        map_tensors(value, lambda t, path: labels.setdefault(id(t), ".".join(path) or "0"))
        made: dict[int, Tensor] = {}

        def replace(tensor: Tensor) -> Tensor:
            label = labels[id(tensor)]

            def seen(gradient: Tensor) -> None:
                reference.setdefault(key, {})[label] = gradient

            if id(tensor) not in made:
                made[id(tensor)] = _Spy.apply(tensor, seen)
            return made[id(tensor)]

        return replace_tensors(value, replace)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = paths[module]
        number = counts[path] = counts.get(path, -1) + 1
        open_calls.append((path, number))
        numbered = {str(i): arg for i, arg in enumerate(args)} | kwargs
        numbered = spy(numbered, (path, number, "output"))
        return tuple(numbered[str(i)] for i in range(len(args))), {k: numbered[k] for k in kwargs}

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        return spy(result, (*open_calls.pop(), "input"))

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recorded(capture: Capture) -> tuple[Reference, set[tuple[str, int, str]]]:
    """The recorded gradients in the reference's form, and outputs whose gradient is the total."""
    found: Reference = {}
    total = set()
    for call in capture.calls(name="Module"):
        number = int(call.name.rpartition(".")[2])
        for note in call.notes:
            if "also used inside" in note or "handed through" in note:
                total.add((call.module, number, note.split()[0].removeprefix("output.")))
        if call.direction == "backward" and ".parameters_grad." not in call.name:
            for record in call.tensors:
                side, _, label = record.name.removeprefix(call.name + ".").partition(".")
                found.setdefault((call.module, number, side), {})[label] = record.load()
    return found, total


def compare(model: nn.Module, run: Callable[[nn.Module], Tensor], folder: Path) -> int:
    """Require equal gradients, bit for bit up to the order of sums; how many were compared."""
    reference: Reference = {}
    torch.manual_seed(1)
    with spied(model, reference):
        run(model).backward()
    model.zero_grad()
    torch.manual_seed(1)
    with tp.Recorder(folder, level="L0", keep="tensors", log=lambda text: None):
        run(model).backward()
    found, total = recorded(tp.load(folder))
    compared = 0
    for key, gradients in reference.items():
        path, number, side = key
        for label, gradient in gradients.items():
            if side == "input" and (path, number, label) in total:
                continue
            if side == "output" and any(entry[:2] == (path, number) for entry in total):
                continue
            assert label in found.get(key, {}), f"no gradient {key} {label}"
            torch.testing.assert_close(found[key][label], gradient, rtol=1e-4, atol=1e-6)
            compared += 1
    return compared


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5"])
def test_transformers(name: str, tmp_path: Path) -> None:
    model, run = MODELS[name]()
    assert compare(model, run, tmp_path / "run") > 40


class Plain(nn.Module):
    """Calls a function, so that odd programs can be written down in place."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def keyword_only() -> nn.Module:
    def inner(self: Any, *, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"sum": a + b, "product": a * b}

    def outer(self: Any, x: Tensor) -> Tensor:
        outputs = self.inner(a=self.first(x), b=x.exp())
        return outputs["sum"] * outputs["product"]

    return Plain(outer, inner=Plain(inner), first=nn.Linear(4, 4))


def three_calls() -> nn.Module:
    return Plain(lambda self, x: self.f(self.f(self.f(x)) + x), f=nn.Linear(4, 4))


def closure() -> nn.Module:
    def outer(self: Any, x: Tensor) -> Tensor:
        self.inner.side = x.sin()
        return self.inner(x.cos())

    return Plain(outer, inner=Plain(lambda self, y: y * self.side))


def nested() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(4, 4))))
    return nn.Sequential(block, nn.Sequential(block, nn.Linear(4, 2)))


def passthrough() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 2))


def lstm() -> nn.Module:
    return Plain(
        lambda self, x: self.cell(x)[0], cell=nn.LSTM(4, 3, num_layers=2, bidirectional=True)
    )


def shared_output() -> nn.Module:
    def inner(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp()
        return hidden.sum(-1), hidden

    def outer(self: Any, x: Tensor) -> Tensor:
        total, hidden = self.inner(x)
        return total.unsqueeze(-1) * hidden

    return Plain(outer, inner=Plain(inner))


def attention() -> nn.Module:
    return Plain(lambda self, x: self.mha(x, x, x)[0], mha=nn.MultiheadAttention(4, 2))


def given_a_parameter() -> nn.Module:
    """Leaves of the graph are inputs of a call inside, though not of the calls around it."""

    def outer(self: Any, x: Tensor) -> Tensor:
        return self.last(self.middle(x, self.last.weight) + self.first(x))

    def middle(self: Any, x: Tensor, weight: Tensor) -> Tensor:
        return self.inner(x * weight.sum(0), scale=weight[0]) + self.first(x) * weight.sum(1)

    inner = Plain(lambda self, x, scale: self.first(x) * scale, first=nn.Linear(4, 4))
    inside = Plain(middle, inner=inner, first=nn.Linear(4, 4))
    return Plain(outer, middle=inside, first=nn.Linear(4, 4), last=nn.Linear(4, 4))


ODD = [
    keyword_only,
    three_calls,
    closure,
    nested,
    passthrough,
    lstm,
    shared_output,
    attention,
    given_a_parameter,
]


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("build", ODD, ids=lambda build: build.__name__)
def test_odd_modules(build: Callable[[], nn.Module], leaf: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 2, 4)

    def run(model: nn.Module) -> Tensor:
        given = x.clone().requires_grad_()
        return model(given if leaf else given * 1).square().sum()

    assert compare(build(), run, tmp_path / "run") >= 2


def test_the_same_tensor_given_three_times_has_one_gradient(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(4, 2)
    with tp.Recorder(tmp_path / "run", level="L0", keep="tensors", log=lambda text: None):
        x = torch.randn(3, 2, 4, requires_grad=True)
        model(x, x, x)[0].sum().backward()
    (backward,) = tp.load(tmp_path / "run").calls(name="Module.MultiheadAttention.backward.0")
    assert torch.equal(backward.tensor("output.0").load(), x.grad)
    assert backward.notes == (
        "output.1 is in output.0: one tensor",
        "output.2 is in output.0: one tensor",
    )


class InPlace(nn.Module):
    """What register_full_backward_hook refuses: writing in place to what a module returned."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=inplace)
        self.again = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        y = self.again(x)
        if self.inplace:
            y += x
        else:
            y = y + x
        return self.act(y)


def test_in_place_modules_as_their_out_of_place_twins(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, twin = InPlace(True), InPlace(False)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 5, 5)
    found = {}
    for name, net in (("in place", model), ("twin", twin)):
        with tp.Recorder(tmp_path / name, level="L0", keep="tensors", log=lambda text: None):
            net(x).square().sum().backward()
        found[name] = {
            (call.name, record.name): record.load()
            for call in tp.load(tmp_path / name).calls(direction="backward")
            for record in call.tensors
        }
    assert found["in place"].keys() == found["twin"].keys()
    assert len(found["twin"]) >= 16
    for key, gradient in found["twin"].items():
        assert torch.equal(found["in place"][key], gradient), key


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_parameter_gradients_are_those_of_the_parameters(level: str, tmp_path: Path) -> None:
    model, run = MODELS["gpt2"]()
    with tp.Recorder(tmp_path / "run", level=level, keep="tensors", log=lambda text: None):
        run(model).backward()
    found = {
        f"{call.module}.{record.name.rpartition('.')[2]}": record.load()
        for call in tp.load(tmp_path / "run").calls
        for record in call.tensors
        if record.role == "parameter_grad"
    }
    tied = {"lm_head.weight"}  # one parameter, reported where it is met first
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() - tied == expected.keys() - tied
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_a_view_written_to_inside_a_module_is_a_gap(tmp_path: Path) -> None:
    def write(self: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.exp()

    with tp.Recorder(tmp_path / "run", level="L0", keep="stats", log=lambda text: None):
        base = torch.ones(2, 3, requires_grad=True) * 1
        Plain(write)(base[0]).sum().backward()
    (gap,) = tp.load(tmp_path / "run").gaps
    assert "input.0 is a view written in place inside" in gap.reason


def test_a_gradient_that_lies_where_the_last_one_lay(tmp_path: Path) -> None:
    """Of two passes in a step, with the gradients let go of in between, both are written down."""
    model = nn.Linear(3, 2)

    def program() -> None:
        for _ in range(20):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()

    capture = record(tmp_path / "a", program, level="L0", keep="stats")
    held = [call for call in capture.calls if ".parameters_grad" in call.name]
    assert [len(call.tensors) for call in held] == [2] * 20
