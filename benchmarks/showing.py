"""What `tensorprobe show` takes of a large capture: seconds, and memory at its peak.

    python benchmarks/showing.py [--calls 2000000] [--calls-a-step 4000] [--folder DIR]

The capture is generated: in each step one module holds all other calls, each of two inputs and an
output, with statistics. 1,000,000 calls take about 0.6 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorprobe.store.claim import FORMAT, RANK_FILE, RUN_FILE
from tensorprobe.store.lines import (
    CallLine,
    ClosedLine,
    EndLine,
    Line,
    StackLine,
    TensorLine,
    ValueLine,
    encode_lines,
)
from tensorprobe.store.step_files import LOG_FILE

OPS = ("linear", "layer_norm", "gelu", "softmax", "dropout")
# The peak is asked of the process itself: one that waits for it may be told its own.
SHOW = """
import sys
from tensorprobe.cli.main import main
main(["show", *sys.argv[1:]])
print(*(line for line in open("/proc/self/status") if "VmHWM" in line), file=sys.stderr)
"""
SUMMARY = [-3.1234567, 2.7654321, 0.00123, 45.678, 0, 0, 17]


def generate(folder: Path, n_calls: int, calls_a_step: int) -> None:
    """A native capture of so many calls, all steps closed in good order."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    for file in (folder / RUN_FILE, rank / RANK_FILE):
        file.write_text(json.dumps({"format": FORMAT}))
    for step, first in enumerate(range(0, n_calls, calls_a_step)):
        write_step(rank / f"step{step}", min(calls_a_step, n_calls - first))


def write_step(folder: Path, n_calls: int) -> None:
    folder.mkdir()
    frames = [f"/home/someone/model/layers.py:{i} in forward" for i in range(12)]
    root = CallLine(id=0, name="Module.model.Net.forward.0", op="Net", module="model", stack=0)
    with (folder / LOG_FILE).open("wb") as log:
        log.write(encode_lines([StackLine(0, frames), root]))
        for first in range(1, n_calls, 1000):
            some = range(first, min(first + 1000, n_calls))
            log.write(encode_lines([line for id in some for line in call_lines(id)]))
        log.write(encode_lines([EndLine(id=0), ClosedLine(n_calls, 0, whole=True)]))


def call_lines(id: int) -> list[Line]:
    """Two inputs, of which one was made by the call before; one output."""
    op = OPS[id % len(OPS)]
    came, weight, made = (
        {"tensor": TensorLine("bfloat16", shape, device="cuda:0", grad=True, value=value)}
        for shape, value in [
            ((2, 4096, 2048), 2 * id - 2),
            ((2048, 2048), 2 * id + 1),
            ((2, 4096, 2048), 2 * id),
        ]
    )
    return [
        CallLine(
            id=id, name=f"Functional.{op}.{id // len(OPS)}.forward", op=f"torch.nn.functional.{op}",
            module=f"model.layers.{id % 32}.self_attn.q_proj", stack=0, args=[came, weight, None],
        ),
        ValueLine(id=2 * id + 1, summary=SUMMARY),
        ValueLine(id=2 * id, summary=SUMMARY),
        EndLine(id=id, outputs=made),
    ]  # fmt: skip


def measure(title: str, *words: str) -> None:
    """Run `show` on its own; tell its time, its peak, and how many lines it wrote."""
    began = time.perf_counter()
    usage = os.times()
    done = subprocess.run([sys.executable, "-c", SHOW, *words], capture_output=True, text=True)
    elapsed = time.perf_counter() - began
    after = os.times()
    cpu = after.children_user + after.children_system - usage.children_user - usage.children_system
    peak = int(done.stderr.split()[-2]) / 1e3  # in kB
    n_lines = len(done.stdout.splitlines())
    print(
        f"| {title} | {elapsed:.2f} s | {cpu:.2f} s | {peak:.0f} MB | {n_lines} lines |", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2_000_000)
    parser.add_argument("--calls-a-step", type=int, default=4_000)
    parser.add_argument("--folder", type=Path, help="where it is, or is to be made; it stays")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp()) / "capture"
    if not folder.exists():
        generate(folder, args.calls, args.calls_a_step)
    last = (args.calls - 1) % args.calls_a_step or args.calls_a_step - 1
    last_name = f"Functional.{OPS[last % len(OPS)]}.{last // len(OPS)}.forward"
    last_step = (args.calls - 1) // args.calls_a_step
    print("| show | time | of the CPU | peak memory | output |\n|---|---|---|---|---|")
    measure("no filter", str(folder))
    measure("no filter, rows from the middle", str(folder), "--offset", str(args.calls // 2))
    measure("a filter that only the end passes", str(folder), "--step", str(last_step))
    measure("a filter that everything passes", str(folder), "--direction", "forward")
    measure("one call, in every step", str(folder), last_name)
    measure("one call, in the last step", str(folder), last_name, "--step", str(last_step))
    measure("a call that is not there", str(folder), "Functional.linaer.3.forward")
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
