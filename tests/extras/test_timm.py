"""timm, recorded as it is: the same bits as without, and a planted fault is found.

In an environment of its own (make test-timm): timm needs torchvision.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorprobe as tp

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed: make test-timm has an environment", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs

# Where torchvision was built for another torch its operators are missing, and its import fails.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402  after its operators
import timm.loss  # noqa: E402
import timm.optim  # noqa: E402


def train(factor: float = 1.0) -> list[Any]:
    """A step of a ResNet, as timm's own loop does it; `factor` is the fault."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    loss_of = timm.loss.LabelSmoothingCrossEntropy()

    def wrong(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * factor

    if factor != 1.0:
        model.layer2[0].bn1.register_forward_hook(wrong)
    loss = loss_of(model(torch.randn(2, 3, 64, 64)), torch.tensor([1, 3]))
    loss.backward()
    optimizer.step()
    return [loss.detach(), *(p.detach() for p in model.parameters())]


def test_timm(tmp_path: Path) -> None:
    bare = train()
    for name, factor in (("good", 1.0), ("bad", 1.01)):
        with tp.Recorder(tmp_path / name, keep="tensors", step_on="auto", log=lambda text: None):
            recorded = train(factor)
        same = [torch.equal(a, b) for a, b in zip(bare, recorded, strict=True)]
        assert all(same) == (factor == 1.0)
    assert tp.load(tmp_path / "good").gaps == ()
    verdict = tp.compare(tmp_path / "bad", tmp_path / "good", jobs=1).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].module.startswith("layer2.0")
