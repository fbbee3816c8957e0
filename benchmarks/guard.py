"""Step time under the overflow guard, against no tool.

    python benchmarks/guard.py
    python benchmarks/guard.py --device cuda --dtype bfloat16 --size large

Every ratio is within one process: bare and guarded steps take turns, and medians are compared; of
steps in a row, and of steps each of which the device is waited for after (`alone`). The ratio of
processor time, of the quickest steps, is that of a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from recording import SIZES, build, in_a_row, timed

Times = list[tuple[float, float]]  # on the clock, and of the processor


def measured(step, count: int, device: str) -> Times:
    times = []
    for _ in range(count):
        began = time.process_time()
        [seconds] = timed(step, 1, device)
        times.append((seconds, time.process_time() - began))
    return times


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Rounds of bare and guarded steps."""
    import tensorprobe as tp

    _, step = build(SIZES[args.size], args.device, args.dtype)
    timed(step, args.warmup, args.device)
    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    bare: Times = []
    guarded: Times = []
    rows: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.rounds):
        bare += measured(step, args.steps, args.device)
        rows[False].append(in_a_row(step, args.steps, args.device))
        guard = tp.Guard(
            folder / str(number), step_on="explicit", look_every=args.look_every, log=lambda _: None
        )

        def guarded_step(guard=guard) -> None:
            step()
            guard.step()

        with guard:
            timed(guarded_step, 1, args.device)  # the first one compiles kernels, names modules
            guarded += measured(guarded_step, args.steps, args.device)
            rows[True].append(in_a_row(guarded_step, args.steps, args.device))
        if guard.findings:
            sys.exit(f"the model is not healthy: {guard.findings[0]}")
    base, middle = (statistics.median(time for time, _ in each) for each in (bare, guarded))
    least, more = (min(processor for _, processor in each) for each in (bare, guarded))
    bare_row, guarded_row = (statistics.median(rows[is_guarded]) for is_guarded in (False, True))
    return {
        "bare_s": bare_row,
        "guarded_s": guarded_row,
        "ratio": guarded_row / bare_row,
        "alone_ratio": middle / base,
        "processor_ratio": more / least,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--look-every", type=int, default=None)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--most", type=float, default=None, help="fail above this ratio")
    args = parser.parse_args()
    import torch

    row = measure(args)
    print(f"{args.size} Llama {SIZES[args.size]} {args.dtype} on {args.device}")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"| no tool | guarded | ratio | alone | of processor time |\n|{' --- |' * 5}")
    ratios = [f"{row[key]:.2f}x" for key in ("ratio", "alone_ratio", "processor_ratio")]
    cells = [f"{row['bare_s']:.4f} s", f"{row['guarded_s']:.4f} s", *ratios]
    print(f"| {' | '.join(cells)} |")
    print(json.dumps(row))
    if args.most is not None and row["ratio"] > args.most:
        sys.exit(f"above the bar of {args.most}x")


if __name__ == "__main__":
    main()
