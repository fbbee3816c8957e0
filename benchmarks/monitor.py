"""What a monitor adds to a step of a training, beside msprobe's monitor in the same run.

    python benchmarks/monitor.py [--peer-python ENV/bin/python] [--steps 40] [--tokens 512]

A Llama of 8 layers on the CPU with AdamW: gradients and moments in every step, activations in every
10th. `--peer-python` is that of an environment with mindstudio-probe and the same torch. Each tool
has processes of its own, in turns with bare ones. A step is the median of processor time, which
other programs on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PEER = {
    "targets": {}, "wg_distribution": True, "mv_distribution": True, "param_distribution": False,
    "xy_distribution": False, "format": "csv",
    "ops": ["min", "max", "mean", "norm", "zeros", "nans"],
}  # fmt: skip


def train(tool: str, steps: int, tokens: int) -> list[float]:
    """Processor seconds of each step."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
            self.down = nn.Linear(3 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            y = self.norm2(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    model = nn.Sequential(
        nn.Embedding(256, 256), *(Block(256) for _ in range(8)), nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor: Any = None
    with tempfile.TemporaryDirectory() as folder:
        if tool == "tensorprobe":
            import tensorprobe as tp

            monitor = tp.Monitor(folder, log=lambda text: None).start()
        elif tool == "msprobe":
            import os

            os.environ["MONITOR_OUTPUT_DIR"] = folder
            from msprobe.pytorch import TrainerMon

            config = Path(folder) / "monitor.json"
            config.write_text(json.dumps(PEER))
            peer = TrainerMon(str(config), params_have_main_grad=False)
            peer.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
        taken = []
        for _ in range(steps + 3):
            start = time.process_time()
            ids = torch.randint(256, (tokens // 128, 129))
            optimizer.zero_grad()
            logits = model(ids[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            taken.append(time.process_time() - start)
        if monitor is not None:
            monitor.close()
    return taken[3:]


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tool:
        print("\n" + json.dumps(train(args.tool, args.steps, args.tokens)))
        return
    tools = ["bare", "tensorprobe", *(["msprobe"] if args.peer_python else [])]
    taken: dict[str, list[float]] = {tool: [] for tool in tools}
    for _ in range(args.rounds):
        for tool in tools:
            python = args.peer_python if tool == "msprobe" else sys.executable
            words = ["--tool", tool, "--steps", str(args.steps), "--tokens", str(args.tokens)]
            done = subprocess.run(
                [python, __file__, *words], check=True, capture_output=True, text=True
            )
            taken[tool] += json.loads(done.stdout.splitlines()[-1])
    bare = statistics.median(taken["bare"])
    print(f"{'':12} {'ms':>8} {'median':>8} {'mean':>8}")
    mean_bare = statistics.fmean(taken["bare"])
    for tool, each in taken.items():
        median, mean = statistics.median(each), statistics.fmean(each)
        shares = f"{median / bare - 1:8.1%} {mean / mean_bare - 1:8.1%}"
        print(f"{tool:12} {median * 1e3:8.1f} {shares}")


if __name__ == "__main__":
    main()
