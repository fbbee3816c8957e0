"""Calls whose results are looked at later, as on a device: nothing is missed, and nothing lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe as tp
from tensorprobe.follow.naming import ApiName
from tensorprobe.guarding.findings import Finding
from tensorprobe.overflow.call_kinds import plan_for
from tensorprobe.tensors import finiteness
from tensorprobe.tensors.finiteness import Extent, KernelFlags, extent_now

LATER = 10**6


def found(folder: Path, program: Callable[[], object], look_every: int | None = LATER) -> Finding:
    guard = tp.Guard(folder, overflow_nums=-1, look_every=look_every, log=lambda text: None)
    with guard:
        torch.ones(2) * 1  # from here on the guard knows that it looks later
        program()
    [finding] = guard.findings
    return finding


def test_complex_numbers(tmp_path: Path) -> None:
    x = torch.full((3,), 1e38, dtype=torch.complex64)
    finding = found(tmp_path / "forward", lambda: x * 1e10)
    assert finding.name == "Tensor.mul.1.forward"

    def backward() -> None:
        weight = torch.full((3,), 1e-30, dtype=torch.complex64, requires_grad=True)
        (weight * 1e10).backward(torch.full((3,), 1e38, dtype=torch.complex64))

    assert found(tmp_path / "backward", backward).name == "Tensor.mul.1.backward"


def test_negative_views_are_looked_at_as_they_are(tmp_path: Path) -> None:
    x = torch.tensor([complex(1, 3e38), complex(0, 1)])
    negative = x.conj().imag
    assert negative.is_neg()
    finding = found(tmp_path, lambda: negative * 2)
    assert finding.metrics["output.0"]["holds"] == ["-inf"]


def test_views_and_casts_carry_the_value_on(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.full((2, 2), 300.0, dtype=torch.float16)
        (x * x).view(4).float().t() + 1

    finding = found(tmp_path, program)
    assert finding.name == "Tensor.mul.1.forward"
    assert finding.travelled == (
        "Tensor.view.0.forward",
        "Tensor.float.0.forward",
        "Tensor.t.0.forward",
        "Tensor.add.0.forward",
    )


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x.exp()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_stack_is_whole(tmp_path: Path, where: str) -> None:
    model = Outer()

    def program() -> None:
        if where == "forward":
            model(torch.full((3,), 1000.0))
        else:
            x = torch.full((3,), 40.0, requires_grad=True)
            model(x).backward(torch.full((3,), 1e30))

    at_once, later = (
        found(tmp_path / str(every), program, look_every=every) for every in (None, LATER)
    )
    assert later.name == at_once.name == f"Tensor.exp.0.{where}"
    assert later.module == at_once.module == "inner.0"
    assert later.stack == at_once.stack
    functions = [line.rpartition(" in ")[2] for line in later.stack]
    assert functions[:2] == ["Inner.helper", "Inner.forward"]
    assert "Outer.forward" in functions


def test_which_input_a_gradient_is_of(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.zeros(2, 3, 4, requires_grad=True)
        weight = torch.full((5, 4), 3e38, requires_grad=True)
        nn.functional.linear(x, weight).backward(torch.ones(2, 3, 5))

    # x's is 5 times 3e38, that of the weight is 0
    finding = found(tmp_path, program)
    assert finding.name == "Functional.linear.0.backward"
    assert finding.metrics["output.0"]["holds"] == ["inf"]
    assert finding.metrics["output.0"]["shape"][-1] == 4
    assert finding.reason.endswith("output.0 (float32) holds inf")


def test_inputs_that_change_places(tmp_path: Path) -> None:
    """The same call again, with other inputs that require a gradient."""
    names = []

    def program() -> None:
        for first, second in ((1e-30, 1e10), (1e10, 1e-30), (1e-30, 1e10)):
            a = torch.full((3,), first, requires_grad=True)
            b = torch.full((3,), second, requires_grad=True)
            names.append("output.0" if second > 1 else "output.1")
            torch.mul(a, b).backward(torch.full((3,), 1e38))
            guard.step()

    guard = tp.Guard(tmp_path, overflow_nums=-1, look_every=LATER, log=lambda text: None)
    with guard:
        program()
    bad = [
        [label for label, facts in finding.metrics.items() if facts["holds"]]
        for finding in guard.findings
    ]
    assert bad == [[name] for name in names]


def test_functionals_that_may_write_in_place_are_known() -> None:
    """Only of other calls may the graph of the inputs be read after the call."""
    takers = [
        name
        for name, function in vars(F).items()
        if inspect.isfunction(function)
        and "inplace" in inspect.signature(function).parameters
        and not name.startswith("_")
    ]
    assert {"dropout", "relu", "silu"} < set(takers)
    for name in takers:
        assert not plan_for(
            ApiName("Functional", name, f"torch.nn.functional.{name}")
        ).leaves_inputs
    assert plan_for(ApiName("Functional", "linear", "torch.nn.functional.linear")).leaves_inputs
    assert not plan_for(ApiName("Tensor", "mul_", "torch.Tensor.mul_")).leaves_inputs
    assert not plan_for(ApiName("Tensor", "__setitem__", "torch.Tensor.__setitem__")).leaves_inputs
    assert not plan_for(ApiName("Ops", "my.op", "torch.ops.my.op")).leaves_inputs


def test_memory_used_again_is_not_taken_for_what_was_there(tmp_path: Path) -> None:
    """Masks come and go; what no watched call made lies where they lay."""

    def unwatched(source: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return source.clone()

    guard = tp.Guard(tmp_path, overflow_nums=-1, look_every=LATER, log=lambda text: None)
    source = torch.ones(1000)
    with guard:
        for _ in range(50):
            mask = torch.full((1000,), -float("inf"))
            mask + 1
            del mask
            unwatched(source) * 1e30 * 1e30 if _ == 40 else unwatched(source) * 2
    [finding] = guard.findings
    assert "inputs are finite" in finding.reason


class HostTable:
    """Stands where the kernels are: each flag is worked out on the host, as it is asked for."""

    def __init__(self, slots: int) -> None:
        self.table = [(0, 0.0)] * slots

    def flag(self, tensor: Tensor, dtype: torch.dtype, count: int, address: int, slot: int) -> None:
        self.table[slot] = tuple(extent_now(tensor))

    def read(self, count: int) -> list[tuple[int, float]]:
        found, self.table[:count] = self.table[:count], [(0, 0.0)] * count
        return found


def test_more_tensors_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finiteness, "SLOTS", 4)
    flags = KernelFlags(HostTable(4))  # type: ignore[arg-type]
    values = [1.0] * 3 + [float("inf")] + [1.0] * 5 + [-float("inf"), 1.0]
    tickets = []
    for number, value in enumerate(values):
        assert flags.full == (number >= 4)
        tickets.append(flags.submit(torch.tensor([value])))
    assert tickets == list(range(11))
    extents = flags.fetch()
    assert [extents[ticket].bits for ticket in tickets] == [0] * 3 + [2] + [0] * 5 + [4, 0]
    assert not extents.is_calm
    assert not flags.full
    assert flags.submit(torch.ones(1)) == 0
    assert flags.fetch().is_calm


def test_calm_is_far_from_every_limit() -> None:
    for found, calm in (
        ([(0, 3.0), (0, 65504.0)], True),  # a mask: the largest number itself
        ([(0, 3.0), (0, 40000.0)], False),
        ([(1, 3.0), (0, 3.0)], False),
        ([(2, 3.0), (0, 3.0)], False),
    ):
        extents = finiteness.Extents(found, [3.4e38, 65504.0])
        assert extents.is_calm == calm
    assert extents[0] == Extent(2, 3.0)
    assert len(extents) == 2


@pytest.mark.parametrize("look_every", [None, LATER])
def test_a_look_at_a_part_says_nothing_of_the_rest(tmp_path: Path, look_every: int | None) -> None:
    both = torch.ones(8)
    both.numpy()[4:] = float("nan")  # which no call has made

    def program() -> None:
        both[:4] + 1
        both[4:] * 2

    finding = found(tmp_path, program, look_every)
    assert finding.name == "Tensor.mul.1.forward"
    assert "which no call that was watched has made" in finding.reason


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_modules_run_as_without_a_guard(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 4))
    x = torch.ones(3, 4)
    expected = model(x)
    torch._dynamo.reset()
    with tp.Guard(tmp_path, log=lambda text: None) as guard:
        for _ in range(2):
            result = model(x)
            result.sum().backward()
    torch._dynamo.reset()
    assert not guard.findings
    assert torch.equal(result, expected)
