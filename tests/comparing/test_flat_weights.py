"""Weights that an optimizer steps in one piece, and a model has in many, or the other way round."""

from pathlib import Path

import planting
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorprobe as tp


def record(folder: Path, flat_is_stepped: bool, seed: int, spoil: float = 1.0) -> Path:
    """Two steps of AdamW; the gradient of the keys' bias is noise, so its weights part."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 48), nn.Linear(16, 16)]
    parameters = [p for layer in layers for p in layer.parameters()]
    flat = torch.cat([p.data.flatten() for p in parameters])
    gradient = torch.zeros_like(flat)
    at = 0
    for p in parameters:
        part = slice(at, at + p.numel())
        p.data, p.grad = flat[part].view_as(p), gradient[part].view_as(p)
        at += p.numel()
    master = nn.Parameter(flat)
    master.grad = gradient
    optimizer = torch.optim.AdamW([master] if flat_is_stepped else parameters, lr=1e-3)
    data = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(1))
    with planting.Device(True, seed=seed), tp.Recorder(folder, log=lambda text: None) as recorder:
        for step in range(2):
            if step and spoil != 1.0:
                with torch.no_grad():
                    flat.mul_(spoil)
            if not flat_is_stepped:
                flat.detach() * 2
            q, k, v = layers[0](data[step]).chunk(3, -1)
            layers[1](F.scaled_dot_product_attention(q, k, v)).square().mean().backward()
            optimizer.step()
            gradient.zero_()
            recorder.step()
    return folder


@pytest.mark.parametrize("flat_is_stepped", [True, False])
def test_the_weights_of_an_optimizer_in_another_form_are_explained_by_it(
    tmp_path: Path, flat_is_stepped: bool
) -> None:
    a, b = (record(tmp_path / str(seed), flat_is_stepped, seed) for seed in (7, 8))
    verdict = tp.compare(b, a, timeout=0).verdict
    assert verdict.verdict == "match", str(verdict)


@pytest.mark.parametrize("flat_is_stepped", [True, False])
def test_other_weights_in_a_later_step_are_still_found(
    tmp_path: Path, flat_is_stepped: bool
) -> None:
    good = record(tmp_path / "good", flat_is_stepped, 7, spoil=1 + 1e-12)
    bad = record(tmp_path / "bad", flat_is_stepped, 8, spoil=1.05)
    verdict = tp.compare(bad, good, timeout=0).verdict
    assert verdict.verdict == "diverged", str(verdict)
    assert verdict.culprits[0].step == 1, str(verdict)
