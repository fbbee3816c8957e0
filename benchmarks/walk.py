"""The walk of one `F.linear` through the files of tensorprobe: how many, and jumps between them.

    python benchmarks/walk.py            (TENSORPROBE_NATIVE=0 for the recorder in Python)
    python benchmarks/walk.py --files    names them, with how often each was entered

A jump is a call from a function of one file to a function of another; calls through torch or the
standard library count as calls from the file that called these. Recording is that of the second
call of a program, at L1 with statistics: the first fills the caches. Comparing is `tp.compare` of
two captures of that program.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

import tensorprobe as tp

HOME = os.path.dirname(os.path.abspath(tp.__file__)) + os.sep


class Walk:
    """Counts what the thread that made it enters."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self.jumps = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(HOME):
            return
        self.entered[file.removeprefix(HOME)] += 1
        outer = frame.f_back
        while outer is not None and not outer.f_code.co_filename.startswith(HOME):
            outer = outer.f_back
        self.jumps += outer is None or outer.f_code.co_filename != file

    def say(self, what: str, names: bool) -> None:
        print(f"{what}: {len(self.entered)} files, {self.jumps} jumps")
        if names:
            for file, count in self.entered.most_common():
                print(f"  {count:6} {file}")


def record(folder: Path, weight: torch.Tensor) -> tuple[Walk, Walk]:
    """The walks of the call, and of its backward."""
    forward, backward = Walk(), Walk()
    weight = weight.clone().requires_grad_()
    with tp.Recorder(folder, level="L1", keep="stats"):
        F.linear(torch.ones(2, 3), weight).sum().backward()
        given = torch.ones(2, 3)
        with forward.watch():
            made = F.linear(given, weight)
        with backward.watch():
            made.backward(torch.ones(2, 4))
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="name the files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weight = torch.arange(12.0).reshape(4, 3)
        forward, backward = record(Path(scratch, "a"), weight)
        record(Path(scratch, "b"), weight + 1e-2)
        forward.say("recording the call", args.files)
        backward.say("recording its backward", args.files)
        walk = Walk()
        with walk.watch():
            tp.compare(Path(scratch, "a"), Path(scratch, "b"))
        walk.say("comparing", args.files)


if __name__ == "__main__":
    main()
