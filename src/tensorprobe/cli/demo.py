"""`tensorprobe demo`: the whole story on built-in data, by the commands that a user types."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import tensorprobe
from tensorprobe.errors import BadUsage, MissingDependency, TensorprobeError
from tensorprobe.records import Call, Capture

SCRIPT = Path(tensorprobe.__file__).parent / "demo" / "train.py"
# A step in a few calls: data in, a block, the loss, back to the first layer, new weights.
SHOWN = (
    "Functional.embedding.0.forward",
    "Module.blocks.0.Block.forward.0",
    "Functional.scaled_dot_product_attention.0.forward",
    "Functional.cross_entropy.0.forward",
    "Functional.cross_entropy.0.backward",
    "Functional.linear.0.backward",
    "Optimizer.AdamW.step.0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", default="demo", metavar="DIR", help="where to record to (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise BadUsage(f"the output '{output}' is a file; give a folder")
    _need_torch()
    recording = output / "cpu"
    _tell("1. Train a small transformer for three steps, and record the first two:\n")
    _type(["run", "--keep", "tensors", "--steps", "0-1", "-o", str(recording), str(SCRIPT)])
    capture = tensorprobe.load(recording)
    _tell("\n2. What is in it, a few calls of step 0:\n")
    _tell_calls(capture)
    _tell(
        f"\n3. Where it is: {recording}. Go on with\n"
        f"   tensorprobe show {recording}\n"
        f"   tensorprobe show {recording} {SHOWN[3]}"
    )
    return 0


def _need_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", "the demo", "torch")


def _type(words: Sequence[str]) -> None:
    """Run a command of ours as a user would, with its output below it."""
    _tell(f"   $ tensorprobe {shlex.join(_short(word) for word in words)}")
    source = str(Path(tensorprobe.__file__).parents[1])  # works from a source tree, too
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        _tell(f"   {line.rstrip()}")
    if process.wait() != 0:
        raise TensorprobeError(f"the demo ended early: that command exited {process.returncode}")


def _short(word: str) -> str:
    return SCRIPT.name if word == str(SCRIPT) else word


def _tell_calls(capture: Capture) -> None:
    calls = [capture.call(name, step=0) for name in SHOWN]
    rows = [("call", "module", "result", "min", "max", "norm"), *map(_row, calls)]
    _tell_table(rows)
    n_calls, n_steps = len(capture.calls), len(capture.steps)
    _tell(f"   ... {n_calls} calls in {n_steps} steps, {len(capture.gaps)} gaps")


def _row(call: Call) -> tuple[str, ...]:
    record = next(t for t in call.tensors if t.role == "output")
    summary = record.summary
    numbers = (summary.min, summary.max, summary.norm) if summary else (None, None, None)
    shape = "x".join(map(str, record.shape)) or "scalar"
    shown = ["" if number is None else f"{float(number.real):.3g}" for number in numbers]
    return (call.name, call.module, f"{record.dtype} {shape}", *shown)


def _tell_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _tell("   " + "  ".join(_padded(row, widths)).rstrip())


def _padded(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    return (text.ljust(width) for text, width in zip(row, widths, strict=True))


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
