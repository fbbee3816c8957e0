"""peft and diffusers, recorded as they are: the same bits as without, and planted faults found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorprobe as tp
import tiny_models
from comparing.planting import Device, Fault

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs


def lora() -> list[Tensor]:
    """A step of LoRA: the results, and the gradients of its matrices."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, run = tiny_models.llama()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    loss = run(adapted)
    loss.backward()
    found = [p.grad for p in adapted.parameters() if p.grad is not None]
    assert len(found) == 8
    return [loss.detach(), *found]


def _unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip


def unet_step() -> list[Tensor]:
    """A training step of a UNet."""
    unet = _unet()
    loss = unet(torch.randn(2, 1, 8, 8), torch.tensor([3, 7])).sample.square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in unet.parameters() if p.grad is not None)]


def pipeline() -> list[Tensor]:
    """A whole pipeline, of two steps."""
    unet = _unet()
    diffusers = pytest.importorskip("diffusers")
    made = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10))
    made.set_progress_bar_config(disable=True)
    drawn = torch.Generator().manual_seed(1)
    images = made(num_inference_steps=2, generator=drawn, output_type="np").images
    return [torch.from_numpy(images)]


@pytest.mark.parametrize(
    ("program", "op", "named"),
    [
        (lora, "silu", "Functional.silu.1.forward"),
        (unet_step, "native_group_norm", "Functional.group_norm.1.forward"),
        (pipeline, "native_group_norm", "Functional.group_norm.1.forward"),
    ],
)
def test_a_library(
    tmp_path: Path, program: Callable[[], list[Tensor]], op: str, named: str
) -> None:
    bare = program()
    for name, fault in (("good", None), ("bad", Fault(op, 1, lambda x: x * 1.01))):
        with Device(noise=False, fault=fault) as device:
            with tp.Recorder(tmp_path / name, keep="tensors", log=lambda text: None):
                recorded = program()
        assert device.struck == (fault is not None)
        same = [torch.equal(a, b) for a, b in zip(bare, recorded, strict=True)]
        assert all(same) == (fault is None)
    verdict = tp.compare(tmp_path / "bad", tmp_path / "good", jobs=1).verdict
    assert verdict.verdict == "diverged"
    assert verdict.culprits[0].name == named
