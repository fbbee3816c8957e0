"""What sketches cost on the host, and the smallest errors that statistics find with them.

    git show OLD:src/tensorprobe/tensors/tally.c > before.c
    python benchmarks/sketches.py cost before.c
    python benchmarks/sketches.py smallest

`cost` reads the same memory with the library built of an earlier tally.c and with today's, in
turns. `smallest` plants a factor in a product at several depths of a network, smaller and smaller,
and prints the last one for which `compare` still names that product.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import tensorprobe as tp
from tensorprobe.tensors import build_tally, tally
from trust.kernels import Alter, gain, one_row, other_kernels, wrong_kernel

SIZES = (1000, 16_384, 262_144, 4_194_304)
LEVELS = {2: "AVX-512", 1: "AVX2", 0: "any x86-64"}
BLOCKS = 4


def library(source: str, folder: Path, name: str) -> Any:
    """A tally.c of any version, built and loaded."""
    target = folder / name
    subprocess.run(["cc", *build_tally.OPTIONS, source, "-o", str(target)], check=True)
    loaded = ctypes.PyDLL(str(target))
    loaded.tally_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return loaded


def cost(before: str) -> None:
    """How long both take for the same memory, the best of many times in turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        libraries = [
            library(before, path, "before.so"), library(str(build_tally.SOURCE), path, "now.so"),
        ]  # fmt: skip
        for level, title in LEVELS.items():
            for each in libraries:
                each.tally_use(level)
            for dtype in ("float32", "bfloat16", "float64", "int64", "bool"):
                for n in SIZES:
                    one, two = _times(libraries, dtype, n)
                    print(f"{title:11} {dtype:8} {n:8} {one:8.2f} us {two:8.2f} us {two / one:.2f}")


def _times(libraries: list[Any], dtype: str, n: int) -> list[float]:
    itemsize = {"float32": 4, "bfloat16": 2, "bool": 1}.get(dtype, 8)
    numbers = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    memory = numbers.tobytes() if dtype == "float32" else _as(numbers, dtype)
    question = struct.pack("<5q", 1, tally.KINDS[dtype], n * itemsize, 1, 1) + bytes(512)
    request = ctypes.create_string_buffer(question)
    held = ctypes.create_string_buffer(memory, len(memory))
    best = [float("inf")] * 2
    for _ in range(40):
        for which, each in enumerate(libraries):
            repeats = max(1, 100_000 // n)
            begun = time.perf_counter()
            for _ in range(repeats):
                each.tally_memory(ctypes.addressof(request), ctypes.addressof(held))
            best[which] = min(best[which], (time.perf_counter() - begun) / repeats * 1e6)
    return best


def _as(numbers: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return (numbers * 100).astype(dtype).tobytes()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(128, 256) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(256, 128) for _ in range(BLOCKS))
        self.norm = nn.ModuleList(nn.LayerNorm(128) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, norm in zip(self.up, self.down, self.norm, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


PAIRS = {
    "fp32, the same kernels": (torch.float32, False),
    "fp32, other kernels": (torch.float32, True),
    "bf16 against fp32": (torch.bfloat16, False),
}
FAULTS = {"all of it": lambda by: gain(by), "one row of 256": lambda by: one_row(gain(by))}


def record(folder: Path, dtype: torch.dtype, *, others: bool, fault: tuple[Alter, int] | None):
    torch.manual_seed(0)
    net = Net().to(dtype)
    x = torch.randn(256, 128).to(dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # what a recorder says
        if others:
            stack.enter_context(other_kernels())
        if fault is not None:
            stack.enter_context(wrong_kernel("addmm", fault[0], nth=fault[1]))
        stack.enter_context(tp.Recorder(folder, level="L1", keep="stats"))
        net(x)


def is_found(folder: Path, pair: tuple[torch.dtype, bool], alter: Alter, nth: int) -> bool:
    dtype, others = pair
    record(folder / "actual", dtype, others=others, fault=(alter, nth))
    comparison = tp.compare(folder / "actual", folder / "expected")
    named = [culprit.name for culprit in comparison.verdict.culprits[:1]]
    return named == [f"Functional.linear.{nth}.forward"]


def smallest() -> None:
    """For each pair, fault and depth the smallest factor that is found, in powers of two."""
    print("pair, fault, product: smallest factor found")
    for title, pair in PAIRS.items():
        for fault, make in FAULTS.items():
            for nth in (0, 3, 7):
                with tempfile.TemporaryDirectory() as folder:
                    record(Path(folder) / "expected", torch.float32, others=False, fault=None)
                    least = None
                    for power in range(1, 25):
                        by = 1 + 2.0**-power
                        if not is_found(Path(folder), pair, make(by), nth):
                            break
                        least = power
                text = "none" if least is None else f"1 + 2**-{least} = 1 + {2.0**-least:.2g}"
                print(f"{title}, {fault}, product {nth + 1} of 8: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "smallest"))
    parser.add_argument("before", nargs="?", help="an earlier tally.c, for `cost`")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.what == "smallest":
        smallest()
    elif arguments.before is None:
        parser.error("cost takes an earlier tally.c")
    else:
        cost(arguments.before)


if __name__ == "__main__":
    main()
