"""Step time while recording by the two ways of the recorder, in Python and with its parts in C++.

    python -m tensorprobe.native.build
    python benchmarks/ways.py --device cuda --dtype bfloat16 --size large --rows L0:stats L1:stats

Bare steps and those of both ways come in turn, three rounds of them in one process, because a
machine that others use too is not the same an hour later. Told are the medians of the rounds over
the bare steps' beside them, and the least: of steps each of which the device is waited for (alone),
and of steps in a row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from recording import SIZES, build

import tensorprobe as tp
from tensorprobe import native
from tensorprobe.errors import BadUsage

ROUNDS, STEPS, WARM = 3, 6, 3
WAYS = {"Python": None, "C++": native.MODULE}


def timed(step: Callable[[], None], sync: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step alone, and of one in a row."""
    alone = []
    for _ in range(STEPS):
        sync()
        began = time.perf_counter()
        step()
        sync()
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    sync()
    return statistics.median(alone), (time.perf_counter() - began) / STEPS


def recorded(
    way: str, level: str, keep: str, step: Callable[[], None], sync: Callable[[], None]
) -> tuple[float, float]:
    """The same of recorded steps."""
    native.MODULE = WAYS[way]
    folder = tempfile.mkdtemp()
    try:
        with tp.Recorder(f"{folder}/run", level=level, keep=keep) as rec:

            def whole() -> None:
                step()
                rec.step()

            for _ in range(WARM):
                whole()
            return timed(whole, sync)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", nargs="+", default=["L1:stats"], metavar="LEVEL:KEEP")
    args = parser.parse_args()
    if native.MODULE is None:
        sys.exit("the parts in C++ are not built: python -m tensorprobe.native.build")
    _, step = build(SIZES[args.size], args.device, args.dtype)
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    for _ in range(WARM):
        step()
    print("| level | keep | no tool, ms | way | alone | least | in a row | least |")
    print("|---|---|---|---|---|---|---|---|")
    for row in args.rows:
        level, _, keep = row.partition(":")
        bare: list[tuple[float, float]] = []
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            bare.append(timed(step, sync))
            for way, times in found.items():
                times.append(recorded(way, level, keep, step, sync))
        usual = [statistics.median(times) for times in zip(*bare, strict=True)]
        for way, times in found.items():
            cells = []
            for kind, without in zip(zip(*times, strict=True), usual, strict=True):
                cells += [
                    f"{statistics.median(kind) / without:.2f}x",
                    f"{min(kind) / without:.2f}x",
                ]
            print(f"| {level} | {keep} | {usual[0] * 1e3:.1f} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        main()
    except BadUsage as error:  # of a row
        sys.exit(str(error))
