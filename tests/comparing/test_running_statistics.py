"""Running statistics are an effect, also where what is made of a difference agrees again."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import tensorprobe as tp


def test_a_branch_of_no_weight_still_leaves_other_statistics(tmp_path: Path) -> None:
    """The last norm of a residual branch begins with weights of zero: its results agree."""
    for name, factor in (("good", 1.0), ("bad", 1.01)):
        torch.manual_seed(0)
        branch = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )
        nn.init.zeros_(branch[4].weight)
        if factor != 1.0:
            branch[1].register_forward_hook(lambda module, given, output: output * 1.01)
        x = torch.randn(16, 8)
        with tp.Recorder(tmp_path / name, keep="tensors", log=lambda text: None):
            (x + branch(x)).square().mean().backward()
    verdict = tp.compare(tmp_path / "bad", tmp_path / "good", jobs=1).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].name == "Tensor.mul.0.forward"
