"""Who is blamed, in small programs that can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planting import Device, Fault, gain, one_value
from torch.utils.checkpoint import checkpoint

import tensorprobe as tp
from recorded import record
from tensorprobe.comparing.verdict import Verdict


def verdict(
    folder: Path, actual: Callable[[], Any], expected: Callable[[], Any] | None = None,
    *faults: Fault, noise: bool = False, **options: Any,
) -> Verdict:  # fmt: skip
    def on_device() -> None:
        torch.manual_seed(0)
        with ExitStack() as devices:
            devices.enter_context(Device(noise))
            for fault in faults:
                devices.enter_context(Device(False, fault))
            actual()

    def plainly() -> None:
        torch.manual_seed(0)
        (expected or actual)()

    captures = [record(folder / n, f, **options) for n, f in (("a", on_device), ("e", plainly))]
    return tp.compare(*captures).verdict


def names(found: Verdict) -> list[tuple[str, str]]:
    return [(culprit.name, culprit.kind) for culprit in found.culprits]


def test_a_subtraction_that_cancels_is_acquitted(tmp_path: Path) -> None:
    def program() -> None:
        x, w = torch.randn(32, 64), torch.randn(64, 64)
        y = torch.mm(x, w)
        (y - y.double().float().add(1e-6)).mul(1e6)
        torch.sub(torch.mm(x, w), torch.matmul(x, w))

    found = verdict(tmp_path, program, noise=True)
    assert found.culprits == [], str(found)


def test_a_softmax_of_huge_logits_is_acquitted(tmp_path: Path) -> None:
    def program() -> None:
        x, w = torch.randn(32, 64), torch.randn(64, 64)
        F.softmax(torch.mm(x, w) * 3000, -1).mul(2)

    found = verdict(tmp_path, program, noise=True)
    assert found.culprits == [], str(found)


def test_two_faults_are_two_culprits_in_order(tmp_path: Path) -> None:
    def program() -> None:
        x, y, w = torch.randn(32, 64), torch.randn(32, 64), torch.randn(64, 64)
        left, right = torch.mm(x, w), torch.tanh(y)
        (left + right).sum()

    faults = (Fault("mm", 0, gain(1.001)), Fault("tanh", 0, gain(1.001)))
    found = verdict(tmp_path, program, None, *faults)
    assert names(found) == [("Torch.mm.0.forward", "output"), ("Torch.tanh.0.forward", "output")]
    assert [culprit.affected for culprit in found.culprits] == [2, 2]


def test_an_infinity_of_a_mask_is_no_fault(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.randn(4, 8).masked_fill(torch.arange(8) > 5, -torch.inf)
        F.softmax(x, -1)

    assert verdict(tmp_path, program, noise=True).culprits == []


def test_nan_is_traced_to_where_it_is_born(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.exp(torch.randn(8, 8))
        torch.relu(x * 2).sum()

    found = verdict(tmp_path, program, None, Fault("exp", 0, one_value(float("nan"))))
    assert names(found) == [("Torch.exp.0.forward", "nonfinite")]
    assert found.culprits[0].side == "actual"


def test_an_overflow_is_blamed_on_what_made_its_input_large(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.mul(torch.ones(8, 8) + torch.rand(8, 8), 3.0).half()
        torch.exp(x).sum()

    found = verdict(tmp_path, program, None, Fault("mul", 0, gain(5.0)))
    assert names(found)[0] == ("Torch.mul.0.forward", "output")


def mixed_precision() -> None:
    linear, norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
    net = torch.nn.Sequential(linear, norm, torch.nn.Linear(64, 8))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(16, 64)).float().square().mean()
    loss.backward()


def test_autocast_is_rounding(tmp_path: Path) -> None:
    def program() -> None:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(16, 64)).float().square().mean()
        loss.backward()

    assert verdict(tmp_path, program, noise=True).culprits == []


def test_a_fault_under_autocast_is_found(tmp_path: Path) -> None:
    def program() -> None:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(16, 64)).float().square().mean()
        loss.backward()

    found = verdict(tmp_path, program, None, Fault("addmm", 1, gain(1.1)), noise=True)
    assert names(found) == [("Functional.linear.1.forward", "output")], str(found)


def test_bfloat16_against_float32_is_rounding(tmp_path: Path) -> None:
    def program(dtype: torch.dtype) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        net = net.to(dtype)
        net(torch.randn(16, 64).to(dtype)).float().square().mean().backward()

    found = verdict(tmp_path, lambda: program(torch.bfloat16), lambda: program(torch.float32))
    assert found.culprits == [], str(found)


def test_other_wiring_is_a_structural_difference(tmp_path: Path) -> None:
    def program(first: bool) -> None:
        x = torch.randn(8, 8)
        a, b = torch.tanh(x), torch.sigmoid(x)
        torch.relu(a if first else b).sum()

    found = verdict(tmp_path, lambda: program(True), lambda: program(False))
    assert names(found) == [("Torch.relu.0.forward", "structure")]
    assert "comes from Torch.tanh.0.forward in actual" in found.culprits[0].reason


def test_a_call_that_one_side_lacks_is_blamed_for_constants_too(tmp_path: Path) -> None:
    def program(negate: bool) -> None:
        x = torch.ones(2)
        torch.relu(-x if negate else x)

    found = verdict(tmp_path, lambda: program(True), lambda: program(False))
    assert names(found) == [("Tensor.neg.0.forward", "structure")], str(found)


def test_differences_without_a_culprit_are_said(tmp_path: Path) -> None:
    def program() -> None:
        x, w = torch.randn(32, 64), torch.randn(64, 64)
        torch.sub(torch.mm(x, w), torch.matmul(x, w)).mul(2)

    found = verdict(tmp_path, program, noise=True)
    assert found.culprits == [], str(found)
    assert "results are more than 10 % apart from" in str(found)


def training(optimizer: str = "AdamW", recompute: bool = False) -> Callable[[], None]:
    def program() -> None:
        net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
        )
        steps = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-2)
        x = torch.randn(16, 32)
        out = checkpoint(net, x, use_reentrant=False) if recompute else net(x)
        out.square().mean().backward()
        steps.step()

    return program


@pytest.mark.parametrize(
    ("optimizer", "fault", "culprit"),
    [
        ("AdamW", Fault("addcdiv_", 1, gain(1.01)), ("Tensor.addcdiv_.1.forward", "output")),
        ("SGD", Fault("add_", 2, gain(1.01)), ("Tensor.add_.2.forward", "output")),
        ("AdamW", Fault("lerp_", 1, one_value(float("nan"))),
         ("Tensor.lerp_.1.forward", "nonfinite")),
    ],
)  # fmt: skip
def test_an_operator_of_an_optimizer_is_blamed(
    optimizer: str, fault: Fault, culprit: tuple[str, str], tmp_path: Path
) -> None:
    found = verdict(tmp_path, training(optimizer), None, fault, noise=True)
    assert names(found) == [culprit], str(found)


@pytest.mark.parametrize(("phase", "number"), [("forward", 0), ("backward", 1)])
def test_recomputation_is_told_from_the_first_time(phase: str, number: int, tmp_path: Path) -> None:
    """Backward calls did right by what they were given: the wrong result, or the right one."""
    fault = Fault("gelu", 0, gain(1.01), 0, phase)
    found = verdict(tmp_path, training(recompute=True), None, fault, noise=True)
    assert names(found) == [(f"Functional.gelu.{number}.forward", "output")], str(found)


def test_gradients_of_two_branches_are_told_apart(tmp_path: Path) -> None:
    def program() -> None:
        x, w = torch.randn(16, 32), torch.randn(32, 32, requires_grad=True)
        h = torch.mm(x, w)
        (torch.tanh(h) * torch.sigmoid(h)).sum().backward()

    fault = Fault("sigmoid_backward", 0, gain(1.01), 0, "backward")
    found = verdict(tmp_path, program, None, fault, noise=True)
    assert names(found) == [("Torch.sigmoid.0.backward", "gradient")], str(found)


@pytest.mark.parametrize(
    ("faults", "culprits"),
    [
        ([], []),
        ([Fault("add_", 0, gain(1.01))], [("Tensor.add_.0.forward", "output")]),
        ([Fault("mul_", 0, gain(1.01))], [("Tensor.mul_.0.forward", "output")]),
    ],
)
def test_what_is_written_through_a_view_is_nobodys_data(
    faults: list[Fault], culprits: list[tuple[str, str]], tmp_path: Path
) -> None:
    def program() -> None:
        x, w = torch.randn(16, 32), torch.randn(32, 32)
        h = torch.mm(x, w)
        h.mul_(2)
        h[:4].add_(1)
        torch.mm(torch.relu_(h), w)

    assert names(verdict(tmp_path, program, None, *faults, noise=True)) == culprits


def test_a_tie_that_rounding_decides_has_no_culprit_and_is_said(tmp_path: Path) -> None:
    def program() -> None:
        w = torch.randn(64, 16)
        logits = torch.mm(torch.randn(8, 64), torch.cat([w, w + 1e-7], 1))
        F.embedding(logits.argmax(-1), torch.randn(32, 8)).sum()

    found = verdict(tmp_path, program, noise=True)
    assert found.culprits == [], str(found)
    assert "more than 10 % apart from Tensor.argmax.0.forward on" in str(found)


def activation(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    def program() -> None:
        x = torch.randn(16, 32, requires_grad=True)
        act(x @ torch.randn(32, 32)).sum().backward()

    return program


@pytest.mark.parametrize("tanh_is_actual", [True, False])
def test_an_argument_that_one_side_leaves_out(tanh_is_actual: bool, tmp_path: Path) -> None:
    sides = [activation(lambda h: F.gelu(h, approximate="tanh")), activation(F.gelu)]
    found = verdict(tmp_path, *(sides if tanh_is_actual else sides[::-1]), noise=True)
    assert names(found) == [("Functional.gelu.0.forward", "argument")], str(found)
    assert "absent" in found.culprits[0].reason


def test_a_default_that_one_side_spells_out_is_no_difference(tmp_path: Path) -> None:
    spelt = activation(lambda h: F.gelu(h, approximate="none"))
    assert verdict(tmp_path, spelt, activation(F.gelu), noise=True).culprits == []


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.exp(x)


def test_what_runs_inside_a_custom_backward_is_blamed_and_not_the_whole(tmp_path: Path) -> None:
    program = activation(lambda h: Exponential.apply(h * 0.1))
    fault = Fault("exp", 0, gain(1.01), 0, "backward")
    found = verdict(tmp_path, program, None, fault, noise=True)
    assert names(found) == [("Torch.exp.1.forward", "output")], str(found)


def test_a_gradient_that_cancels_is_acquitted(tmp_path: Path) -> None:
    def program() -> None:
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        net(torch.randn(32, 8)).sum().backward()  # the sum of what is normalised is always 0

    assert verdict(tmp_path, program, noise=True).culprits == []


def test_a_custom_operator_takes_a_reference(tmp_path: Path) -> None:
    library = torch.library.Library("tpblame", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")

    @tp.reference("tpblame::double")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def program() -> None:
        torch.ops.tpblame.double(torch.tanh(torch.randn(8, 32)))

    found = verdict(tmp_path, program, None, Fault("double", 0, gain(1.001)))
    assert names(found) == [("Ops.tpblame.double.0.forward", "output")]
    assert (found.culprits[0].proof, found.culprits[0].side) == ("replayed", "actual")
