"""Gradients that a node passes on as they are: looked at once, and never taken for another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorprobe as tp
from guard_notes import noted, stand_in_for_kernels
from tensorprobe import native
from tensorprobe.overflow.call_kinds import PASSING, Passing

INFINITY, NAN = float("inf"), float("nan")
Program = Callable[[], object]


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and native.MODULE is None:
        pytest.skip("not built: python -m tensorprobe.native.build")
    if request.param == "python":
        monkeypatch.setattr(native, "MODULE", None)
    return str(request.param)


@pytest.fixture(params=["operations", "kernels"])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        stand_in_for_kernels(monkeypatch)
    return str(request.param)


# A call for every node that passes gradients on; and dtypes that are not those of its input.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "AddBackward0": lambda x: x + torch.ones(()),
    "SubBackward0": lambda x: x - torch.ones(4),
    "CatBackward0": lambda x: torch.cat([x, x.detach(), x[:2]]),
    "StackBackward0": lambda x: torch.stack([x, x.detach(), x]),
    "CloneBackward0": lambda x: x.clone(),
    "MeanBackward0": lambda x: x.mean(),
    "MeanBackward1": lambda x: x.mean(1, dtype=torch.float64),
    "SelectBackward0": lambda x: x.select(1, 2),
    "SliceBackward0": lambda x: x[1:, 1:3][:, ::2],
    "ToCopyBackward0": lambda x: x.to(torch.bfloat16),
}


def kinds_of(tensor: Tensor) -> set[str]:
    held = {"nan"} if tensor.isnan().any() else set()
    held |= {"inf"} if (tensor == INFINITY).any() else set()
    return held | ({"-inf"} if (tensor == -INFINITY).any() else set())


@pytest.mark.parametrize("value", [1.0, NAN, INFINITY, -INFINITY, "max"])
@pytest.mark.parametrize("name", PASSING)
def test_such_a_node_makes_nothing_that_is_not_finite(name: str, value: float | str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    result = CALLS[name](x)
    node = result.grad_fn
    while node.name() != name:  # of slices of slices
        node = node.next_functions[0][0]
    seen: list[tuple[Tensor, Tensor]] = []

    def compare(sent: Any, came: Any) -> None:
        assert len(came) == 1
        seen.extend((came[0], each) for each in sent if each is not None)

    node.register_hook(compare)
    gradient = torch.ones_like(result)
    number = torch.finfo(result.dtype).max if value == "max" else float(value)
    gradient.view(-1)[::3] = number
    result.backward(gradient)
    assert seen
    for came, sent in seen:
        shares = sent.untyped_storage()._cdata == came.untyped_storage()._cdata
        if PASSING[name] is Passing.SHARED:
            assert kinds_of(sent) <= kinds_of(came) or not shares
        elif torch.finfo(sent.dtype).max >= torch.finfo(came.dtype).max:
            assert kinds_of(sent) <= kinds_of(came)
            assert sent.abs().max() <= came.abs().max() or value != "max"


def looked_at(folder: Path, program: Program) -> list[tuple[str, int]]:
    """Calls in backward, and how many of the gradients they sent on were flagged."""
    counts = []
    for name, _, _, outputs, *_ in noted(folder, program, in_backward=False)[0].events:
        if name.endswith("backward"):
            counts.append(
                (name.rsplit(".", 2)[0], sum(found is not None for _, _, found, *_ in outputs))
            )
    return counts


@pytest.mark.usefixtures("way", "flags")
def test_they_are_looked_at_once(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.randn(4, 6, requires_grad=True)
        y = x * 2
        y = torch.cat([y[:, :3], y[:, 3:] + x.detach()[:, 3:]], 1)
        y = (y.double().float() + 1).mean(1)
        (y * 3).backward(torch.randn(4))

    assert looked_at(tmp_path, program) == [
        ("Tensor.mul", 1),
        ("Tensor.mean", 0),
        ("Tensor.add", 0),
        ("Tensor.float", 0),  # to float64
        ("Tensor.double", 1),  # to float32, which may overflow
        ("Torch.cat", 0),
        ("Tensor.add", 0),
        ("Tensor.__getitem__", 0),
        ("Tensor.__getitem__", 0),
        ("Tensor.mul", 1),  # of their sum
    ]  # fmt: skip


@pytest.mark.usefixtures("way", "flags")
def test_what_was_written_to_is_looked_at_again(tmp_path: Path) -> None:
    def double(gradient: Tensor) -> None:
        gradient.mul_(2)

    def program() -> None:
        x = torch.randn(4, 6, requires_grad=True)
        y = x * 2
        y.register_hook(double)
        z = y + torch.ones(4, 6)
        z.register_hook(double)
        ((z + torch.ones(4, 6)) * 3).backward(torch.randn(4, 6))

    found = looked_at(tmp_path, program)
    assert found == [("Tensor.mul", 1), ("Tensor.add", 0), ("Tensor.add", 1), ("Tensor.mul", 1)]


@pytest.mark.usefixtures("way", "flags")
def test_parts_of_one_memory_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """As an attention may have the gradients of its three inputs side by side."""

    class Three(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
            return x * 1, x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] + grads[1] + grads[2]

    held = torch.ones(3, 2, 4)
    held[2, 1, 1] = INFINITY

    class Side(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            return sum(given)  # type: ignore[return-value]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            return held[0], held[1], held[2]

    def program() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        parts = Three.apply(x)
        one = torch.ones(2, 4)
        Side.apply(*[part + one for part in parts]).sum().backward()

    found = looked_at(tmp_path, program)
    assert [each for each in found if each[0] == "Tensor.add"] == [("Tensor.add", 1)] * 3


@pytest.mark.usefixtures("way", "flags")
@pytest.mark.parametrize("place", range(4))
def test_the_call_that_made_it_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Wherever among calls that pass it on the gradient became infinite."""

    def program() -> None:
        x = torch.full((4, 6), 2.0, requires_grad=True)
        steps: list[Callable[[Tensor], Tensor]] = [
            lambda y: torch.cat([y[:, :3], y[:, 3:]], 1),
            lambda y: y.double().float() + torch.ones(6),
            lambda y: y[1:].clone(),
            lambda y: y.mean(1, keepdim=True),
        ]
        y = x * 1
        for number, step in enumerate(steps):
            if number == place:
                y = y + (y - y.detach()).sqrt()  # which adds 0, and has a gradient of 1 / 0
            y = step(y)
        (y * 1e5).sum().backward()

    short = found(tmp_path / "short", program)
    assert [name for name, *_ in short] == ["Tensor.sqrt.0.backward"]
    for name in CALLS:
        monkeypatch.delitem(PASSING, name)
    assert found(tmp_path / "long", program) == short


@pytest.mark.usefixtures("way", "flags")
def test_what_lies_beside_a_gradient_is_not_its_own(tmp_path: Path) -> None:
    held = torch.ones(2, 4)
    held[1] = INFINITY

    def program() -> None:
        held * 1  # so that it is known to hold infinity
        x = torch.ones(4, requires_grad=True)
        (x * 1 + 1 + 1 + 1).backward(held[0])

    assert found(tmp_path, program) == []


@pytest.mark.usefixtures("way", "flags")
def test_what_a_call_leaves_out_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        x = torch.ones(3, 3, requires_grad=True)
        y = torch.nn.functional.pad((x * 1).tril(), [1, 1])
        z = torch.zeros(3, 5)
        z[0, 3] = 1.0
        (y - y.detach() * z + 1 - z).sqrt().sum().backward()  # sqrt(0) where y is the tril's 0

    short = found(tmp_path / "short", program)
    [(name, _, affected, travelled)] = short
    assert (name, affected) == ("Tensor.sqrt.0.backward", len(travelled))
    assert "Tensor.tril.0.backward" not in travelled
    for name in CALLS:
        monkeypatch.delitem(PASSING, name)
    assert found(tmp_path / "long", program) == short


def begun_with_it() -> None:
    y = torch.ones(4, requires_grad=True) * 1 + 1
    y.backward(torch.full((4,), 1e30) * 1e30)


def made_by_a_hook() -> None:
    y = torch.ones(4, requires_grad=True) * 1 + 1
    y.register_hook(lambda gradient: gradient * 1e30)
    (y + 1).backward(torch.full((4,), 1e30))


@pytest.mark.usefixtures("way", "flags")
@pytest.mark.parametrize("program", [begun_with_it, made_by_a_hook])
def test_who_sends_it_on_is_not_blamed_as_well(tmp_path: Path, program: Program) -> None:
    [(name, _, affected, _)] = found(tmp_path, program)
    assert (name.rsplit(".", 2)[0], name[-7:]) == ("Tensor.mul", "forward")
    assert affected == 2  # the backward of add and mul


def found(folder: Path, program: Program) -> list[tuple[Any, ...]]:
    guard = tp.Guard(folder, look_every=10**6, overflow_nums=-1, log=lambda text: None)
    with guard:
        torch.ones(2) * 1
        program()
    return [(each.name, each.reason, each.affected, each.travelled) for each in guard.findings]
