"""What `tensorprobe demo` records: a small transformer that learns to reverse digits.

A script like any other: it knows nothing of tensorprobe.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

DIGITS, LENGTH = 10, 8


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm_2(x))
        return x


class Reverser(nn.Module):
    """Digits in, the same digits in reverse order out."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        x = self.digits(digits) + self.places(torch.arange(LENGTH, device=digits.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Reverser().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        digits = torch.randint(0, DIGITS, (16, LENGTH)).to(args.device)
        loss = F.cross_entropy(model(digits).flatten(0, 1), digits.flip(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")  # noqa: T201 scripts print


if __name__ == "__main__":
    main()
