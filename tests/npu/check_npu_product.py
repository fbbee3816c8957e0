"""tensorprobe on the real torch_npu: it disturbs nothing, and finds the operator that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import nn

import tensorprobe as tp
from npu.stand_in import planted

pytestmark = pytest.mark.filterwarnings("default")  # torch_npu warns of itself
LEVELS = ("L0", "L1", "L2", "mix")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.norm(self.up(x))))


def train(
    device: str,
    recorder: Any = None,
    dtype: torch.dtype | None = None,
    foreach: bool | None = True,
) -> list[torch.Tensor]:
    """Two steps with AdamW, foreach as by default on the NPU; losses, gradients and weights."""
    torch.manual_seed(0)
    net = Net()
    x, y = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    net, x, y = net.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=foreach)
    results = []
    for _ in range(2):
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
    return [t.cpu() for t in (*results, *(p.detach() for p in net.parameters()))]


def recorded(folder: Path, device: str, level: str = "mix", keep: str = "tensors") -> Path:
    with tp.Recorder(folder, level=level, keep=keep) as recorder:
        train(device, recorder)
    return folder


# ---- recording -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keep", ["stats", "digest", "tensors"])
def test_recording_changes_no_bit(level: str, keep: str, tmp_path: Path) -> None:
    bare = train("npu")
    state = torch_npu.npu.get_rng_state()
    with tp.Recorder(tmp_path / "run", level=level, keep=keep) as recorder:
        seen = train("npu", recorder)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert torch.equal(torch_npu.npu.get_rng_state(), state)
    capture = tp.load(tmp_path / "run")
    assert len(capture.calls) > 20
    assert not capture.gaps


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keep", ["stats", "tensors"])
def test_a_healthy_npu_matches_the_cpu(level: str, keep: str, tmp_path: Path) -> None:
    """The foreach operators of its AdamW write in place and raise no version."""
    actual = recorded(tmp_path / "npu", "npu", level, keep)
    expected = recorded(tmp_path / "cpu", "cpu", level, keep)
    comparison = tp.compare(actual, expected)
    assert comparison.verdict.verdict == "match", comparison.verdict


@pytest.mark.parametrize("level", LEVELS)
def test_each_device_may_have_its_own_default_adamw(level: str, tmp_path: Path) -> None:
    """Foreach on the NPU and a loop on the CPU; of LayerNorm's backward other detaches at L2."""
    for device in ("npu", "cpu"):
        with tp.Recorder(tmp_path / device, level=level, keep="tensors") as recorder:
            train(device, recorder, foreach=None)
    verdict = tp.compare(tmp_path / "npu", tmp_path / "cpu").verdict
    assert verdict.verdict == "match", verdict


def test_what_an_in_place_foreach_wrote_is_read_again(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "run", level="L1", keep="stats"):
        weights = [torch.ones(3, device="npu"), torch.ones(2, device="npu")]
        version = weights[0]._version
        torch._foreach_mul_(weights, 4.0)
        after = weights[0]._version
    call = tp.load(tmp_path / "run").call("Torch._foreach_mul_.0.forward")
    means = {t.name.rpartition("forward.")[2]: t.summary.mean for t in call.tensors}
    assert means["input.0.0"] == 1.0, means
    assert [mean for name, mean in means.items() if name.startswith("output")] == [4.0, 4.0], means
    assert after >= version  # torch_npu may or may not count it


# ---- planted faults ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "level", "culprit"),
    [
        ("Gelu@1=scale:1.01", "mix", "Functional.gelu.0.forward"),
        ("LayerNorm=permute", "L1", "Functional.layer_norm.0.forward"),
        ("LayerNormBackward=scale:1.02", "L2", "Aten.native_layer_norm_backward.0.backward"),
        ("GeluBackward=scale:1.02", "mix", "Functional.gelu.0"),
        ("ForeachAddcmulScalarV2=scale:1.01", "mix", "Torch._foreach_addcmul_.0"),
        ("Gelu=nan", "mix", "Functional.gelu.0.forward"),
    ],
)
def test_a_wrong_operator_is_the_first_culprit(
    fault: str, level: str, culprit: str, tmp_path: Path
) -> None:
    expected = recorded(tmp_path / "cpu", "cpu", level)
    with planted(fault):
        actual = recorded(tmp_path / "npu", "npu", level)
    verdict = tp.compare(actual, expected).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].name.startswith(culprit), verdict


def fused(x: torch.Tensor) -> torch.Tensor:
    y = torch_npu.npu_rms_norm(x, torch.ones(128, device="npu"))[0]
    cos = torch.linspace(0, 1, 128, device="npu").view(1, 1, 1, 128)
    y = torch_npu.npu_rotary_mul(y, cos, 1 - cos)
    y = torch_npu.npu_fusion_attention(y, y, y, 2, "BNSD", scale=0.1)[0]
    return torch_npu.npu_swiglu(y)


def record_fused(folder: Path) -> Path:
    x = torch.linspace(-1, 1, 2 * 2 * 4 * 128).sin().view(2, 2, 4, 128).npu().requires_grad_()
    with tp.Recorder(folder, level="mix", keep="tensors"):
        fused(x).square().mean().backward()
    return folder


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        ("SwiGlu=scale:1.05", "NPU.npu_swiglu.0.forward"),
        ("RmsNorm=scale:1.05", "NPU.npu_rms_norm.0.forward"),
        ("FlashAttentionScore=scale:1.05", "NPU.npu_fusion_attention.0.forward"),
    ],
)
def test_a_fused_operator_of_the_vendor_is_found(fault: str, culprit: str, tmp_path: Path) -> None:
    expected = record_fused(tmp_path / "right")
    with planted(fault):
        actual = record_fused(tmp_path / "wrong")
    verdict = tp.compare(actual, expected).verdict
    assert verdict.culprits[0].name == culprit, verdict


# ---- the other verbs -----------------------------------------------------------------------------


def test_check_passes_a_healthy_npu_and_fails_a_wrong_kernel(tmp_path: Path) -> None:
    capture = recorded(tmp_path / "npu", "npu")
    checked = tp.check(capture, tmp_path / "healthy", device="npu")
    assert checked.counts["fail"] == 0, checked.counts
    assert checked.counts["crashed"] == 0, checked.counts
    assert checked.counts["pass"] > 30, checked.counts


def test_a_guard_names_the_call_that_makes_nan(tmp_path: Path) -> None:
    with planted("Gelu@1=nan"), tp.Guard(tmp_path / "guard", overflow_nums=-1, log=print) as guard:
        train("npu")
    first = guard.findings[0]
    assert (first.name, first.step) == ("Functional.gelu.0.forward", 1)


def test_a_call_goes_to_the_cpu_by_reroute() -> None:
    right = train("npu")
    with planted("Gelu=scale:1.5"):
        wrong = train("npu")
        with tp.reroute({"gelu": "cpu"}):
            cured = train("npu")
    assert not torch.equal(wrong[0], right[0])
    torch.testing.assert_close(cured[0], right[0])


def test_names_of_what_torch_npu_adds(tmp_path: Path) -> None:
    with tp.Recorder(tmp_path / "run", level="mix", keep="stats"):
        x = torch.ones(3).npu()
        repr(x)
        torch_npu.npu_dtype_cast(x, torch.float16)
    names = [call.name for call in tp.load(tmp_path / "run").calls]
    assert "Tensor.npu.0.forward" in names, names
    assert "NPU.npu_dtype_cast.0.forward" in names or "NPU._npu_dtype_cast.0.forward" in names, (
        names
    )
    assert not [name for name in names if "backend_registration" in name or "repr" in name], names


@pytest.mark.parametrize("value", [1e25, 1e-30])
def test_norms_are_right_on_a_device_without_float64(value: float, tmp_path: Path) -> None:
    assert torch.ones(1, device="npu").double().dtype == torch.float32
    with tp.Recorder(tmp_path / "run", level="L1", keep="stats"):
        torch.full((1000,), value, device="npu").neg()
    summary = tp.load(tmp_path / "run").call("Tensor.neg.0.forward").tensor("output.0").summary
    assert summary.norm == pytest.approx(value * 1000**0.5, rel=1e-6)
    assert summary.mean == pytest.approx(-value, rel=1e-6)
