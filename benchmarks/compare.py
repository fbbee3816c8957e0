"""How fast captures are compared: bytes a second, rows of statistics, calls aligned.

    python benchmarks/compare.py [metrics|rows|align|capture]...

Bars: 1.5 GB/s a core (bytes of both sides, float32, warm); 100,000 rows of statistics compared and
written in 3 s; 100,000 calls a side aligned in seconds. Where others use the machine, CPU time says
more than wall time; both are printed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from tensorprobe.compare.align import align
from tensorprobe.numerics.metrics import measure_pair
from tensorprobe.records import Call, Capture, TensorRecord, TensorSummary
from tensorprobe.report.saving import compare

N_ROWS = 100_000


class Clock:
    wall_s = cpu_s = 0.0


@contextmanager
def timed() -> Iterator[Clock]:
    clock = Clock()
    wall, cpu = time.perf_counter(), time.process_time()
    yield clock
    clock.wall_s, clock.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def metrics() -> None:
    """Array pairs in memory, one thread."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal(4 << 20).astype(np.float32)
    actual = expected * (1 + 1e-6 * rng.standard_normal(expected.size).astype(np.float32))
    for name, dtype in (
        ("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16),
        ("float64", np.float64),
    ):  # fmt: skip
        a, e = actual.astype(dtype), expected.astype(dtype)
        best = Clock()
        best.wall_s = best.cpu_s = 1e9
        for _ in range(7):
            with timed() as clock:
                measure_pair(a, e)
            best.wall_s, best.cpu_s = (
                min(best.wall_s, clock.wall_s), min(best.cpu_s, clock.cpu_s),
            )  # fmt: skip
        gb = (a.nbytes + e.nbytes) / 1e9
        print(
            f"metrics {name:9} {gb / best.wall_s:5.2f} GB/s wall  {gb / best.cpu_s:5.2f} GB/s CPU"
        )


def program(n_calls: int, shift: float, seed: int = 0) -> list[Call]:
    """Calls with two inputs and two outputs, statistics only, each feeding the next."""
    rng = random.Random(seed)
    calls = []
    before = 1.0
    for i in range(n_calls):
        name = f"Functional.linear.{i}.forward"
        after = rng.uniform(1, 2) * (1 + shift * rng.uniform(-1, 1))
        values = (("input.0", before), ("input.1", 1.0 + i), ("output.0", after), ("output.1", 2.0))
        tensors = tuple(
            TensorRecord(
                f"{name}.{suffix}", "input" if suffix < "j" else "output", "float32", (64, 64),
                summary=TensorSummary(-v, v, v / 9, v * 30, 0, 0, 0),
            )
            for suffix, v in values
        )  # fmt: skip
        before = after
        calls.append(
            Call(index=i, name=name, op="torch.nn.functional.linear", module=f"layers.{i // 20}",
                 args=tensors[:2], outputs=tensors[2:], tensors=tensors)
        )  # fmt: skip
    return calls


def rows() -> None:
    """Statistics compared, judged, and written as csv and json."""
    sides = [
        Capture(Path(name), "native", program(N_ROWS // 4, shift))
        for name, shift in (("a", 1e-8), ("e", 0.0))
    ]
    with tempfile.TemporaryDirectory() as folder, timed() as clock:
        compare(*sides).save(folder)
    print(f"rows {N_ROWS} {clock.wall_s:.2f} s wall  {clock.cpu_s:.2f} s CPU")


def aligning() -> None:
    calls = program(N_ROWS, 0.0)
    gone = set(random.Random(1).sample(range(N_ROWS), 2000))
    expected = [call for i, call in enumerate(calls) if i not in gone]
    with timed() as clock:
        pairs = align(calls, expected)
    wrong = sum(a is not e for a, e, _ in pairs if a and e)
    print(f"align {N_ROWS} calls, 2000 missing: {clock.wall_s:.2f} s wall, {wrong} mispaired")


def capture() -> None:
    """Two captures of half a gigabyte each, on all cores, as a user runs it."""
    import torch

    import tensorprobe as tp

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in "ae"]
        torch.manual_seed(0)
        tensors = [torch.randn(1 << 20) for _ in range(128)]
        for path, noise in zip(paths, (1e-7, 0.0), strict=True):
            values = [x * (1 + noise * torch.randn(1 << 20)) for x in tensors]
            with tp.Recorder(path, keep="tensors") as recorder:
                for i, value in enumerate(values):
                    recorder.save(f"tensor{i}", value)
        nbytes = sum(file.stat().st_size for path in paths for file in path.rglob("*.safetensors"))
        with timed() as clock:
            found = tp.compare(*paths)
        print(
            f"capture 2 x {nbytes / 2e9:.2f} GB: {clock.wall_s:.2f} s wall, "
            f"{nbytes / 1e9 / clock.wall_s:.2f} GB/s, {found.verdict.verdict}"
        )


PARTS = {"metrics": metrics, "rows": rows, "align": aligning, "capture": capture}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
