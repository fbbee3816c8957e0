"""The overflow watch on a GPU: no call waits for the device, and the same calls are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tensorprobe as tp
from tensorprobe.errors import GuardStopped
from tensorprobe.tensors.finiteness import LIMITS, KernelFlags, extent_now, flags_for, readable
from tiny_models import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def quiet(text: str) -> None:
    """Says nothing."""


def tensors() -> list[torch.Tensor]:
    found = []
    for dtype in LIMITS:
        for shape in ((), (3,), (5, 7), (1000, 1025)):
            wide = torch.randn(shape, device="cuda")
            x = torch.complex(wide, wide) if dtype.is_complex else wide
            for value in (0.5, float("nan"), float("inf"), -float("inf")):
                y = x.clone().reshape(-1)
                y[y.numel() // 2] = value
                found.append(y.reshape(shape).to(dtype))
    found.append(torch.randn(64, 64, device="cuda")[::3, 1:].t())
    found.append(torch.randn(64, 1, device="cuda").expand(64, 9))
    return found


def test_flags_are_those_of_the_host() -> None:
    flags = flags_for(torch.device("cuda", 0))
    assert isinstance(flags, KernelFlags)
    inputs = [content for each in tensors() if (content := readable(each)) is not None]
    assert [flags.submit(each) for each in inputs] == list(range(len(inputs)))
    for tensor, found in zip(inputs, flags.fetch(), strict=True):
        expected = extent_now(tensor.cpu())
        assert found.bits == expected.bits, tensor.dtype
        if not found.bits:
            largest = tensor.to(torch.float64).abs().max().item()
            assert found.top == pytest.approx(largest, rel=1e-6)
    assert len(flags.fetch()) == 0
    flags.submit(torch.ones(3, device="cuda"))
    assert flags.fetch()[0].bits == 0  # slots are clean again


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_that_overflows(tmp_path: Path, where: str) -> None:
    model, _ = MODELS["gpt2"]()
    model.cuda().half()
    scale = 3e7 if where == "backward" else 1.0
    if where == "forward":
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.mul_(3e5)  # still finite; what it makes is not
    ids = torch.arange(24, device="cuda").reshape(2, 12) % 50

    def program() -> None:
        model(ids, labels=ids)  # kernels are built
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # no call may wait for the device
        try:
            (model(ids, labels=ids).loss.float() * scale).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        guard.step()

    guard = tp.Guard(tmp_path, log=quiet)
    with pytest.raises(GuardStopped), guard:
        program()
    [finding] = guard.findings
    assert finding.direction == where
    if where == "forward":
        assert finding.module == "transformer.h.1.mlp.c_fc"
    assert finding.affected > 3
    assert "--keep tensors" in finding.next


def test_inputs_are_saved_when_every_call_is_looked_at(tmp_path: Path) -> None:
    guard = tp.Guard(tmp_path, look_every=1, overflow_nums=-1, log=quiet)
    with guard:
        x = torch.full((3,), 300.0, device="cuda").half()
        x.mul_(x)
    [finding] = guard.findings
    call = tp.load(finding.inputs).call("Tensor.mul_.0.forward")
    assert call.tensor("input.0").load().tolist() == [300.0] * 3


def test_scaler_and_bits(tmp_path: Path) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, _ = MODELS["gpt2"]()
        model.cuda().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
        ids = torch.arange(24, device="cuda").reshape(2, 12) % 50
        for _ in range(3):
            with torch.autocast("cuda", torch.float16):
                loss = model(ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    bare = train()
    with tp.Guard(tmp_path, log=quiet) as guard:
        guarded = train()
    assert guard.findings == ()
    assert json.loads((tmp_path / "findings.json").read_text())["skipped_steps"] == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(bare, guarded, strict=True))
