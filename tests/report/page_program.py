"""A program to make reports of: trains a tiny Llama, Mixtral or UNet, one kernel wrong on demand.

    tensorprobe run --keep tensors -o runs/actual page_program.py llama --wrong silu

Each product and norm of a run with a wrong kernel has rounding noise, as on another device.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "comparing")]
import planting

import tiny_models


class Down(nn.Module):
    """Two convolutions, each behind a norm."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(4, width)
        self.conv_1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm_2 = nn.GroupNorm(4, out)
        self.conv_2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(y)))


class UNet(nn.Module):
    """Down, through the middle, and up again, with the way down beside it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Down(width, 2 * width), Down(2 * width, 4 * width)])
        self.middle = Down(4 * width, 4 * width)
        self.up = nn.ModuleList([Down(8 * width, 2 * width), Down(4 * width, width)])
        self.outside = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, beside = self.inside(x), []
        for block in self.down:
            x = block(x)
            beside.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, beside.pop()], dim=1))
        return self.outside(x)


def unet() -> tiny_models.Built:
    return UNet(), lambda model: model(torch.randn(2, 3, 16, 16)).square().mean()


FAULTS = {
    "silu": planting.Fault("silu", 1, planting.one_row(planting.gain(1.01))),
    "nan": planting.Fault("mm", 4, planting.one_value(float("nan"))),
    "conv": planting.Fault("convolution", 4, planting.gain(1.001)),
    "gradient": planting.Fault("mm", 6, planting.gain(1.002), phase="backward"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("llama", "mixtral", "unet"))
    parser.add_argument("--wrong", choices=tuple(FAULTS))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    make = {"llama": tiny_models.llama, "mixtral": tiny_models.mixtral, "unet": unet}[args.model]
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = planting.Device(noise=True, fault=FAULTS[args.wrong]) if args.wrong else None
    with device or contextlib.nullcontext():
        for _ in range(args.steps):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
