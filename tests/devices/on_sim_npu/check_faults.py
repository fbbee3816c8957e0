"""Planted faults hit the kernel, the call and the output they name, and nothing else."""

from __future__ import annotations

import copy
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from tensorprobe.devices import sim_npu
from tensorprobe.devices.children import child
from tensorprobe.errors import BadUsage


def groups() -> nn.Module:
    return nn.Sequential(*(nn.GroupNorm(2, 4) for _ in range(4)))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 2, 2 * 4 * 3, device="npu").view(2, 4, 3)
    model(x).pow(2).sum().backward()
    return [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]


def test_the_example_of_the_issue() -> None:
    model = groups().npu()
    healthy = grads_of(model)
    fault = sim_npu.plant(op="native_group_norm_backward", calls=[2], effect="scale:1.01")
    broken = grads_of(model)
    assert (fault.seen, fault.hits) == (4, 1)
    # Backward runs from the last layer: call 2 is the second layer, and what lies before inherits.
    assert [torch.equal(a, b) for a, b in zip(healthy, broken, strict=True)] == [
        False, False, False, False, True, True, True, True,
    ]  # fmt: skip
    torch.testing.assert_close(broken[2], healthy[2] * 1.01)
    fault.remove()
    assert all(torch.equal(a, b) for a, b in zip(healthy, grads_of(model), strict=True))


def result(effect: object, value: torch.Tensor, **more: object) -> torch.Tensor:
    with sim_npu.plant(op="exp", effect=effect, **more):  # type: ignore[arg-type]
        return value.npu().exp().cpu()


def test_effects() -> None:
    x = torch.linspace(0.1, 1, 6).view(2, 3)
    healthy = x.exp()
    assert torch.equal(result("scale:0.5", x), healthy * 0.5)
    assert torch.equal(result("permute", x), healthy.flip(-1))
    assert torch.equal(result(lambda t: t + 1, x), healthy + 1)
    for word, test in (("nan", torch.isnan), ("inf", torch.isinf)):
        spoilt = result(word, x)
        assert test(spoilt).sum() == 1
        assert torch.equal(spoilt[~test(spoilt)], healthy[~test(spoilt)])
    low = result("low-precision", x)
    assert torch.equal(low, low.bfloat16().float())
    torch.testing.assert_close(low, healthy, rtol=2**-7, atol=0)
    assert torch.equal(result("stale", x), torch.zeros_like(x))  # nothing was written before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_low_precision_in_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 1, 50, dtype=dtype)
    low = result("low-precision", x)
    assert low.dtype == dtype
    torch.testing.assert_close(low, x.exp(), rtol=0.13, atol=0)
    assert not torch.equal(low, x.exp())


def test_stale_gives_the_result_of_the_call_before() -> None:
    x = torch.ones(3, device="npu")
    with sim_npu.plant(op="exp", calls=[1], effect="stale"):
        first, second, third = (x * 1).exp(), (x * 2).exp(), (x * 3).exp()
    assert torch.equal(first, second)
    assert torch.equal(third.cpu(), torch.full((3,), 3.0).exp())


def test_a_fault_that_raises() -> None:
    x = torch.ones(2, 4, 3, device="npu", requires_grad=True)
    with sim_npu.plant(op="native_group_norm_backward", effect="raise"):
        y = F.group_norm(x, 2).sum()
        with pytest.raises(RuntimeError, match=r"507015 .*native_group_norm_backward"):
            y.backward()
    with sim_npu.plant(op="exp", effect="raise:my words", calls=[0]):
        with pytest.raises(RuntimeError, match="my words"):
            x.exp()
        x.exp()


def test_one_output_of_several() -> None:
    x = torch.randn(2, 4, 3, device="npu", requires_grad=True)
    weight = torch.ones(4, device="npu", requires_grad=True)
    F.group_norm(x, 2, weight).pow(2).sum().backward()
    healthy = x.grad, weight.grad
    x.grad = weight.grad = None
    with sim_npu.plant(op="native_group_norm_backward", effect="scale:2", output=1):
        F.group_norm(x, 2, weight).pow(2).sum().backward()
    assert torch.equal(x.grad, healthy[0])
    assert torch.equal(weight.grad, healthy[1] * 2)


def test_in_place_kernels_can_be_broken() -> None:
    x = torch.ones(3, device="npu")
    view = x[:2]
    with sim_npu.plant(op="mul_", effect="scale:3"):
        view.mul_(2)
    assert x.tolist() == [6, 6, 1]


def test_names_overloads_and_patterns() -> None:
    x = torch.ones(2, device="npu")
    for op in ("add", "add.Tensor", "aten::add", "aten::add.Tensor", "*dd", "aten.add.Tensor"):
        with sim_npu.plant(op=op, effect="scale:2"):
            assert (x + x).tolist() == [4, 4], op
    with sim_npu.plant(op="add.Scalar", effect="scale:2"):
        assert (x + x).tolist() == [2, 2]
    with sim_npu.plant(op="npu_rms_norm_backward", effect="nan"):
        x.requires_grad_()
        torch_npu.npu_rms_norm(x, torch.ones(2, device="npu"))[0].sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().any()


@pytest.mark.parametrize(
    ("op", "effect", "message"),
    [
        ("native_grup_norm", "nan", "no op 'native_grup_norm' to plant a fault in"),
        ("add.Nothing", "nan", "no op 'add.Nothing'"),
        ("transpose.int", "nan", "is a view: it calculates nothing"),
        ("exp", "wrong", "effect 'wrong' is unknown. Known: 'scale:FACTOR'"),
        ("exp", "scale:much", "'much' is no number; say 'scale:1.01'"),
        ("exp", "nan:3", "effect 'nan:3' is unknown"),
    ],
)
def test_mistakes_in_planting_are_explained(op: str, effect: str, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        sim_npu.plant(op=op, effect=effect)


def test_faults_go_along_into_child_processes() -> None:
    """As the process that tries a failed call alone gets them; effects that are functions stay."""
    sim_npu.plant("native_layer_norm", effect="raise:broken", calls=[1])
    sim_npu.plant("exp", effect=torch.zeros_like)
    start = child("npu", ["-"])
    program = """
import torch, torch_npu
x = torch.ones(2, 4).npu()
print(torch.exp(x).sum().item() > 8, end=" ")
for _ in range(2):
    try:
        torch.nn.functional.layer_norm(x, (4,)); print("fine", end=" ")
    except RuntimeError as error:
        print(error)
"""
    script = Path(tempfile.mkdtemp()) / "script.py"
    script.write_text(program)
    command = [*start.command[:-1], str(script)]
    environment = {**os.environ, **start.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True fine broken\n", 0), done.stderr
    assert start.environment["ASCEND_LAUNCH_BLOCKING"] == "1"
    plain = child("cpu", ["script.py"])
    assert (plain.command[1:], plain.environment) == (["script.py"], {})


def test_clearing() -> None:
    sim_npu.plant(op="exp", effect="nan")
    sim_npu.noise(4)
    sim_npu.clear_faults()
    x = torch.rand(100)
    assert torch.equal(x.npu().exp().cpu(), x.exp())


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(integer).int() - b.view(integer).int()).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    healthy = (x @ x, x.exp(), x + x, x * x, x.t().contiguous())
    with sim_npu.noise(1, share=0.5):
        n = x.npu()
        noisy = (n @ n, n.exp(), n + n, n * n, n.t().contiguous())
    for moves, a, b in zip((True, True, False, False, False), noisy, healthy, strict=True):
        off = ulps(a.cpu(), b)
        assert off.max() == (1 if moves else 0)
        if moves:
            assert 0.2 < (off > 0).float().mean() < 0.5  # a third of the steps is zero


def test_noise_leaves_special_values_alone_and_repeats() -> None:
    x = torch.tensor([0.0, float("inf"), float("nan"), -float("inf"), 88.0, -200.0])
    with sim_npu.noise(3, share=1.0, seed=1):
        first = x.npu().exp().cpu()
    with sim_npu.noise(3, share=1.0, seed=1):
        second = x.npu().exp().cpu()
    assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))
    assert first[1].isinf()
    assert first[2].isnan()
    assert first[3] == first[5] == 0


def test_noise_is_a_healthy_chip() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    npu = copy.deepcopy(model).npu()
    x = torch.randn(8, 16)
    with sim_npu.noise(1):
        actual = npu(x.npu())
        actual.sum().backward()
    expected = model(x)
    expected.sum().backward()
    assert not torch.equal(actual.cpu(), expected)
    torch.testing.assert_close(actual.cpu(), expected)
    for one, other in zip(npu.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
