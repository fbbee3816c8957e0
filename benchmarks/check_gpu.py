"""The calls of a bf16 Llama step, recorded on a GPU, checked on that GPU against the CPU.

    PYTHONPATH=src python benchmarks/check_gpu.py [--device cuda] [--jobs 4] [-o check-gpu]

Prints the table of docs/check.md: how many calls of each kind, how far the worst is from its limit.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tensorprobe as tp


def record(folder: Path, device: str, dtype: torch.dtype, hidden: int, layers: int) -> None:
    """One training step: forward, backward, AdamW."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
    )
    model = LlamaForCausalLM(config).to(device, dtype)
    ids = torch.randint(0, 4096, (2, 256), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.Recorder(folder, level="L1", keep="tensors"):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def table(rows: list[object]) -> list[str]:
    """By kind of operation: verdicts, and the worst error as a share of its limit."""
    kinds: dict[str, list[object]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    lines = [
        "| kind | calls | pass | fail | crashed | skipped | worst share of limit | which |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, group in sorted(kinds.items()):
        counts = {
            verdict: sum(row.verdict == verdict for row in group)
            for verdict in ("pass", "fail", "crashed", "skipped")
        }
        judged = [row for row in group if row.error is not None]
        worst = max(judged, key=lambda row: row.error, default=None)
        share = f"{worst.error:.3f}" if worst else ""
        name = worst.name if worst and worst.error else ""
        cells = [kind, len(group), *counts.values(), share, name]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("-o", "--output", type=Path, default=Path("check-gpu"))
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    capture = args.output / "capture"
    record(capture, args.device, getattr(torch, args.dtype), args.hidden, args.layers)
    begin = time.perf_counter()
    done = tp.check(capture, args.output / "check", device=args.device, jobs=args.jobs)
    elapsed = time.perf_counter() - begin
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(f"{name}, torch {torch.__version__}, {args.dtype}, {args.jobs} jobs, {elapsed:.1f} s")
    print(f"{done.counts}")
    print("\n".join(table(done.rows)))
    for row in done.rows:
        if row.verdict != "pass":
            print(f"{row.verdict:8} {row.name}: {row.reason}")


if __name__ == "__main__":
    main()
