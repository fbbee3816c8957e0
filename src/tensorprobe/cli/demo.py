"""`tensorprobe demo`: the whole story on built-in data, by the commands that a user types."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tensorprobe
from tensorprobe.cli.options import add_json, say_json
from tensorprobe.errors import MissingDependency, TensorprobeError
from tensorprobe.native import background
from tensorprobe.store.outputs import check_writable

SCRIPTS = Path(tensorprobe.__file__).parent / "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", default="demo", metavar="DIR", help="where to record to (%(default)s)"
    )
    add_json(parser, "where everything is")


def run(args: argparse.Namespace) -> int:
    if not args.json:
        _story(Path(args.output))
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        found = _story(Path(args.output))
    say_json({"format": 1, **found})
    return 0


def _story(output: Path) -> dict[str, str]:
    """Tell it; gives what it has found, and where that is."""
    check_writable(output)
    _need_torch()
    cpu, npu, cured = (output / name for name in ("cpu", "npu", "cured"))
    report, repro = output / "report", output / "repro"
    record = ["run", "--keep", "tensors", "--steps", "0-1", "-o"]
    _tell("1. Train a small transformer on the CPU, and record two steps of it:\n")
    _type([*record, str(cpu), str(SCRIPTS / "train.py")])
    _tell("\n2. The same on an NPU, simulated, with one broken kernel. The loss looks well:\n")
    _type([*record, str(npu), "--sim-npu", str(SCRIPTS / "train_npu.py")])
    _tell("\n3. Which call did it, and is the error its own?\n")
    _type(["compare", str(npu), str(cpu), "-o", str(report)], ends_in=3, lines=6)
    culprit = json.loads((report / "verdict.json").read_text())["culprits"][0]["name"]
    _tell("\n4. That call alone, in a script that needs nothing but torch:\n")
    _type(["repro", str(npu), culprit, "-o", str(repro)])
    _tell("\n5. To be sure, let the CPU run that operator, and all else stay on the NPU:\n")
    elsewhere = ["--sim-npu", "--reroute", "F.layer_norm=cpu", str(SCRIPTS / "train_npu.py")]
    _type([*record, str(cured), *elsewhere])
    _type(["compare", str(cured), str(cpu), "-o", str(output / "report-cured")], lines=1)
    _tell(f"\n   What is left is a bug report: attach {repro}.\n")
    _tell(f"All of it is in {output}. Look around with\n   tensorprobe show {npu} {culprit}")
    places = {"npu": npu, "cpu": cpu, "cured": cured, "report": report, "repro": repro}
    return {"culprit": culprit, **{name: str(place) for name, place in places.items()}}


def _need_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", "the demo", "torch")


def _type(words: Sequence[str], *, ends_in: int = 0, lines: int | None = None) -> None:
    """Run a command of ours as a user would, with its output, or the first lines of it, below."""
    _tell(f"   $ tensorprobe {shlex.join(_short(word) for word in words)}")
    source = str(Path(tensorprobe.__file__).parents[1])  # works from a source tree, too
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        background.SWITCH: "0",  # the programs of the demo are over before a build is
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorprobe", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    for number, line in enumerate(process.stdout):
        if lines is None or number < lines:
            _tell(f"   {line.rstrip()}".rstrip())
    if process.wait() != ends_in:
        raise TensorprobeError(f"the demo ended early: that command exited {process.returncode}")


def _short(word: str) -> str:
    return Path(word).name if word.startswith(str(SCRIPTS)) else word


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
