"""The overflow guard on the NPU: values in INF/NAN mode, the flag of the chip in saturation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import nn

import tensorprobe as tp
from tensorprobe.devices import sim_npu
from tensorprobe.errors import GuardStopped
from tensorprobe.guarding.findings import Finding


def quiet(text: str) -> None:
    """Says nothing."""


def found(folder: Path, program: Callable[[], object], **options: Any) -> list[Finding]:
    with tp.Guard(folder, **{"overflow_nums": -1, "log": quiet, **options}) as guard:
        program()
    return list(guard.findings)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch_npu.npu_rms_norm(self.inner(x), self.weight)[0]
        return torch_npu.fast_gelu(normed)


def model() -> nn.Module:
    return nn.Sequential(Block(), Block()).half().npu()


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        net(torch.ones(3, 4).half().npu()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["inf-nan", "saturation"])
def test_a_healthy_model(tmp_path: Path, mode: Any) -> None:
    sim_npu.set_overflow_mode(mode)
    net = model()
    assert found(tmp_path, lambda: train(net)) == []


@pytest.mark.parametrize("op", ["npu_rms_norm", "fast_gelu"])
def test_a_fused_op_that_overflows(tmp_path: Path, op: str) -> None:
    net = model()
    planted = sim_npu.plant(op=op, calls=[1], effect="inf", output=0)
    with planted, pytest.raises(GuardStopped), tp.Guard(tmp_path, log=quiet) as guard:
        train(net)
    [finding] = guard.findings
    assert finding.name == f"NPU.{op}.1.forward"
    assert finding.module == "1"
    assert finding.travelled
    assert tp.load(finding.inputs).call(finding.name).tensor("input.0").summary.is_finite


def test_a_fused_op_that_overflows_in_backward(tmp_path: Path) -> None:
    net = model()
    planted = sim_npu.plant(op="npu_rms_norm_backward", calls=[0], effect="nan", output=0)
    with planted, pytest.raises(GuardStopped), tp.Guard(tmp_path, log=quiet) as guard:
        train(net)
    [finding] = guard.findings
    assert finding.name == "NPU.npu_rms_norm.1.backward"
    assert finding.module == "1"


def overflow() -> torch.Tensor:
    x = torch.full((3,), 60000.0, device="npu", dtype=torch.float16)
    return (x * 2).float() / 2


def test_saturation_is_told_by_the_flag(tmp_path: Path) -> None:
    sim_npu.set_overflow_mode("saturation")
    overflow()  # before the guard: not its business
    [finding] = found(tmp_path, overflow)
    assert finding.name == "Tensor.mul.0.forward"
    assert "the chip clamps, and its overflow flag was raised: output.0 reaches 65504" in (
        finding.reason
    )
    assert not torch_npu._C._check_overflow_npu()


def test_saturation_found_later(tmp_path: Path) -> None:
    sim_npu.set_overflow_mode("saturation")
    [finding] = found(tmp_path, overflow, look_every=1000)
    assert finding.name == "Tensor.mul.0.forward"
    [finding] = found(
        tmp_path, lambda: torch.zeros(2, device="npu") / 0 + 1, look_every=1000
    )  # NaN becomes 0: nothing shows it
    assert finding.name == "Tensor.add.0.forward"
    assert "between Tensor.div.0.forward and this one" in finding.reason


def test_saturation_in_backward(tmp_path: Path) -> None:
    sim_npu.set_overflow_mode("saturation")

    def program() -> None:
        x = torch.ones(3, device="npu", dtype=torch.float16, requires_grad=True)
        (x * 300.0).backward(torch.full((3,), 300.0, device="npu", dtype=torch.float16))

    [finding] = found(tmp_path, program)
    assert finding.name == "Tensor.mul.0.backward"
    assert "flag was raised in its backward" in finding.reason


def test_inf_nan_mode_and_masks(tmp_path: Path) -> None:
    [finding] = found(tmp_path, overflow)
    assert finding.reason.endswith("3 of 3 in output.0 (float16) are infinite")

    def masked() -> torch.Tensor:
        mask = torch.full((4, 4), -float("inf"), device="npu").triu(1)
        return (torch.zeros(4, 4, device="npu") + mask).softmax(-1)

    assert found(tmp_path / "masked", masked) == []


def test_scaler_of_the_npu(tmp_path: Path) -> None:
    def program() -> None:
        weight = nn.Parameter(torch.ones(4, device="npu"))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        scaler = torch.npu.amp.GradScaler(init_scale=2.0**17)
        for _ in range(3):
            loss = (weight.half() * 1.0).sum().float()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    guard = tp.Guard(tmp_path, log=quiet)
    with guard:
        program()
    assert guard.findings == ()
    assert guard._notes["skipped_steps"] == [0, 1]
