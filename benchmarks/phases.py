"""Where the time of a recorded step goes on a GPU: in forward or later, on the host or the device.

    python benchmarks/phases.py --dtype bfloat16 --size large --rows L0:stats L1:stats guard

Of steps each of which the device is waited for, medians in milliseconds: how long the program took
to start all of forward, how long the device took for it, the same of backward with the optimizer,
and the whole step. Where starting forward takes longer than the device would for it, the device
waits, and that is what recording costs; in backward the program is ahead by then.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from recording import SIZES, halves

import tensorprobe as tp
from tensorprobe.errors import BadUsage

STEPS, WARM = 8, 4


def timed(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    end: Callable[[], object],
) -> list[float]:
    """Milliseconds of forward on host and device, of the rest on both, and of all."""
    rounds = []
    for _ in range(STEPS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        clock = [time.perf_counter()]
        events[0].record()
        loss = forward()
        events[1].record()
        clock.append(time.perf_counter())
        backward(loss)
        events[2].record()
        end()
        clock.append(time.perf_counter())
        torch.cuda.synchronize()
        clock.append(time.perf_counter())
        host = [1e3 * (after - before) for before, after in itertools.pairwise(clock)]
        device = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        rounds.append([host[0], device[0], host[1], device[1], sum(host)])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rows", nargs="+", default=["L1:stats"], metavar="LEVEL:KEEP, or guard")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this is measured on a GPU, and torch sees none")
    _, forward, backward = halves(SIZES[args.size], "cuda", args.dtype)
    for _ in range(WARM):
        backward(forward())
    print("| | forward, host | device | the rest, host | device | step | ratio |")
    print("|---|---|---|---|---|---|---|")
    bare = timed(forward, backward, lambda: None)

    def show(row: str, times: list[float]) -> None:
        cells = " | ".join(f"{value:.1f}" for value in times)
        print(f"| {row} | {cells} | {times[-1] / bare[-1]:.2f}x |", flush=True)

    show("no tool", bare)
    for row in args.rows:
        level, _, keep = row.partition(":")
        folder = tempfile.mkdtemp()
        try:
            tool = (
                tp.Guard(f"{folder}/guard", step_on="explicit", log=lambda _: None)
                if row == "guard"
                else tp.Recorder(f"{folder}/run", level=level, keep=keep)
            )
            with tool:
                for _ in range(WARM):
                    backward(forward())
                    tool.step()
                show(row, timed(forward, backward, tool.step))
        finally:
            shutil.rmtree(folder)
    show("no tool", timed(forward, backward, lambda: None))


if __name__ == "__main__":
    try:
        main()
    except BadUsage as error:  # of a row
        sys.exit(str(error))
