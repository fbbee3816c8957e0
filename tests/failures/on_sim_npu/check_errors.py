"""Errors on the simulated NPU, whose kernels can be made to raise, and which can be lost whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp
from tensorprobe.devices import sim_npu
from tensorprobe.guarding.findings import Finding


def guarded(folder: Path, program: Any, **options: Any) -> tuple[Finding, ...]:
    options = {"timeout": 0, **options}
    guard = tp.Guard(folder, watch="errors", log=lambda text: None, **options)
    with pytest.raises(RuntimeError), guard:
        program()
    return guard.findings


class Norms(nn.Module):
    """Three group norms, one after the other; the input of each is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4) for _ in range(3)])
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x.sin()
            self.seen.append(x.detach().cpu())
            x = norm(x)
        return x


def trained(model: nn.Module) -> None:
    model(torch.randn(2, 4, 5, 5).npu()).square().mean().backward()


@pytest.mark.parametrize("execution", [0, 1, 2])
def test_the_group_norm_whose_backward_raises(execution: int, tmp_path: Path) -> None:
    model = Norms().npu()
    sim_npu.plant("native_group_norm_backward", effect="raise", calls=[execution])
    (finding,) = guarded(tmp_path, lambda: trained(model))
    number = 2 - execution  # backward comes to the last one first
    assert finding.name == f"Functional.group_norm.{number}.backward"
    assert (finding.module, finding.metrics["node"]) == (
        f"norms.{number}",
        "NativeGroupNormBackward0",
    )
    forward, backward = tp.load(finding.inputs).calls
    assert forward.tensor("input.0").load().equal(model.seen[number])
    assert forward.tensor("input.0").device == "npu:0"
    assert backward.tensor("input.0").shape == (2, 4, 5, 5)


def test_in_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", "log")
    model = Norms().npu()
    sim_npu.plant("native_group_norm", effect="raise:EZ9999: Inner Error", calls=[1])
    (finding,) = guarded(tmp_path, lambda: trained(model))
    assert (finding.name, finding.direction) == ("Functional.group_norm.1.forward", "forward")
    assert tp.load(finding.inputs).calls[0].tensor("input.0").load().equal(model.seen[1])
    assert any("tensorprobe ascend incident" in note for note in finding.metrics["notes"])


def test_a_lost_device_cannot_be_read_and_need_not_be(tmp_path: Path) -> None:
    """From the failure on, every kernel raises, the copies to the host too."""
    model = Norms().npu()

    def lose(output: torch.Tensor) -> torch.Tensor:
        sim_npu.plant("*", effect="raise:NPU error: the device is lost")
        raise RuntimeError("NPU error: the device is lost")

    sim_npu.plant("native_group_norm_backward", effect=lose, calls=[1])
    (finding,) = guarded(tmp_path, lambda: trained(model))
    with pytest.raises(RuntimeError, match="the device is lost"):
        torch.ones(1).npu()
    assert finding.name == "Functional.group_norm.1.backward"
    assert "missing" not in finding.metrics
    forward, backward = tp.load(finding.inputs).calls
    assert forward.tensor("input.0").load().equal(model.seen[1])
    assert forward.tensor("input.weight").load().equal(torch.ones(4))
    assert backward.tensor("input.0").summary.is_finite


def test_a_fused_op_of_the_vendor(tmp_path: Path) -> None:
    import torch_npu

    x = torch.randn(2, 8).npu().requires_grad_()
    weight = torch.ones(8).npu().requires_grad_()
    sim_npu.plant("npu_rms_norm_backward", effect="raise")
    (finding,) = guarded(tmp_path, lambda: torch_npu.npu_rms_norm(x, weight)[0].sum().backward())
    assert finding.name == "NPU.npu_rms_norm.0.backward"
    assert tp.load(finding.inputs).calls[0].tensor("input.0").load().equal(x.detach().cpu())


def test_what_an_optimizer_calls_is_copied_in_a_second_run(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 4).npu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model(torch.ones(2, 4).npu()).sum().backward()
        with sim_npu.plant("add_*", effect="raise"):
            optimizer.step()

    (finding,) = guarded(tmp_path / "first", program)
    assert finding.name == "Tensor.add_.0.forward"
    assert finding.metrics["missing"][0].endswith("only where it is asked for")
    assert finding.next == 'tp.Guard(watch="errors", calls=["Tensor.add_.0"], steps=[0])'
    (finding,) = guarded(tmp_path / "second", program, calls=["Tensor.add_.0"], steps=[0])
    assert "missing" not in finding.metrics


def test_nothing_is_changed_or_kept(tmp_path: Path) -> None:
    def run(step: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.LayerNorm(6), nn.ReLU(inplace=True))
        model = model.npu()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(torch.randn(4, 6).npu()), torch.zeros(4, 6).npu())
            loss.backward()
            optimizer.step()
            step()
            losses.append(loss.detach().cpu())
        return [*losses, *(p.detach().cpu() for p in model.parameters()), torch.npu.get_rng_state()]

    expected = run(lambda: None)
    allocated = torch.npu.memory_allocated()
    with tp.Guard(tmp_path, watch="errors", log=lambda text: None) as guard:
        actual = run(guard.step)
        guard.step()
        assert torch.npu.memory_allocated() == allocated
    assert guard.findings == ()
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
