"""What sketches cost, whether a GPU makes those of the host, and the smallest errors they show.

    python benchmarks/sketches.py gpu
    git show OLD:src/tensorprobe/tensors/tally.c > before.c
    python benchmarks/sketches.py host before.c
    python benchmarks/sketches.py smallest

`gpu` holds the numbers of the Triton kernels and of torch's operations against those of the host,
and reads the same memory with sketches and without, in turns. `host` reads it with the library made
of an earlier tally.c and with today's. `smallest` plants a factor in a product at several depths of
a network, smaller and smaller, and prints the last one for which `compare` still names it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import tensorprobe as tp
from tensorprobe.tensors import build_tally, memory, sketch, tally, torch_ops
from tensorprobe.tensors.backends import TorchBackend
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.summarizer import Summarizer, summarize

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


def host(before: str) -> None:
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
    question = struct.pack("<5q", 1, tally.KINDS[dtype], n * itemsize, 1, 1)
    request = ctypes.create_string_buffer(question + bytes(512))  # no layout, room for an answer
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


# On a GPU


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of several layouts over the same memory."""
    found = {"whole": x, "odd": x[1:-2], "small": x[:5], "one": x[7], "none": x[:0]}
    matrix = x[: 512 * 1024].view(512, 1024)
    found |= {"rows apart": matrix[::2, :256], "heads": matrix.view(64, 8, 16, 64).transpose(1, 2)}
    found |= {"columns": matrix[:, 3:77], "transposed": matrix.t()}
    found["channels last"] = matrix.view(8, 64, 32, 32).to(memory_format=torch.channels_last)
    return found


TURNED = ("heads", "transposed", "channels last")  # their sketch is that of the memory, or none
EQUAL_DTYPES = (
    "float32 bfloat16 float16 float64 float8_e4m3fn int64 int32 int8 uint8 bool complex64"
)


def check_equality() -> None:
    """Hold all numbers of the device against those of the host; the most they differ by."""
    for name in EQUAL_DTYPES.split():
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(1)
        x = (torch.randn(700_001, generator=generator) * 3).to(dtype)
        special = x.clone()
        if dtype.is_floating_point and dtype.itemsize > 1:
            special[5], special[70_000], special[3] = float("nan"), float("inf"), float("-inf")
        for title, whole in (("", x), (" with NaN and Inf", special)):
            most, missing = _apart(whole)
            text = ", ".join(missing) or "none"
            print(f"  {name + title:30} {most:.1e} of the norm at most; without sketch: {text}")


def _apart(x: torch.Tensor) -> tuple[float, list[str]]:
    summarizers = {
        "Triton": Summarizer(), "Triton and digest": Summarizer(digest=True),
    }  # fmt: skip
    most, missing = 0.0, []
    for layout, view in layouts(x.cuda()).items():
        expected = summarize(view.cpu() if layout in TURNED else view.cpu().contiguous())
        found = {how: each.submit(view) for how, each in summarizers.items()}
        found |= {f"{how}, again": each.submit(view) for how, each in summarizers.items()}
        found["torch"] = _by_torch(view)
        for each in summarizers.values():
            each.wait()
        for how, result in found.items():
            summary = result.summary
            assert summary is not None, (layout, how, result.error)
            for field in ("min", "max", "nan_count", "inf_count", "zero_count"):
                assert getattr(summary, field) == getattr(expected, field), (layout, how, field)
            if summary.sketch is None:
                if layout not in TURNED:
                    missing.append(f"{layout} by {how}")
                continue
            assert expected.sketch is not None
            size = expected.norm or max(view.numel(), 1) ** 0.5
            apart = sketch.difference(summary.sketch, expected.sketch) / size
            assert apart < 1e-12, (layout, how, apart)
            most = max(most, apart)
    return most, missing


def _by_torch(view: torch.Tensor) -> Result:
    result, backend = Result(), TorchBackend(view.device, stats=True, digest=False)
    backend.submit(result, view, memory.NAMES[view.dtype])
    backend.flush()
    torch.cuda.synchronize()
    backend.land()
    return result


def switched(on: bool) -> None:
    """Let what is made from here on make sketches, or none."""
    from tensorprobe.tensors import launch

    launch.SKETCHES = torch_ops.SKETCHES = on


def ratios(one: Callable[[], None], two: Callable[[], None], rounds: int) -> str:
    """What two ways take on the device, in turns: the best and the median of both, and ratios."""
    times: list[list[float]] = [[], []]
    for number in range(rounds + 2):
        for which, work in enumerate((one, two)):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begun.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            if number > 1:
                times[which].append(begun.elapsed_time(ended) * 1e3)
    best, middle = [[f(each) for each in times] for f in (min, statistics.median)]
    return (
        f"{best[0]:9.1f} us {best[1]:9.1f} us {best[1] / best[0]:6.3f}  "
        f"median {middle[1] / middle[0]:6.3f}"
    )


def measure_kernels(*, digest: bool) -> None:
    """The pass over a tensor, twenty times: without sketches, with them, and how much more."""
    made = []
    for on in (False, True):
        switched(on)
        made.append(Summarizer(digest=digest))
        made[-1].submit(torch.ones(9, device="cuda"))
        made[-1].wait()
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int64", "bool"):
        dtype = getattr(torch, name)
        for nbytes in (1 << 14, 1 << 20, 1 << 24, 1 << 28):
            x = (torch.randn(nbytes // dtype.itemsize, device="cuda") * 3).to(dtype)
            ways = [_twenty_times(each, x) for each in made]
            print(f"  {name:14} {nbytes:11,} B {ratios(*ways, rounds=15)}", flush=True)
        if name in ("float32", "bfloat16"):
            heads = (torch.randn(4, 4096, 32, 128, device="cuda")).to(dtype).transpose(1, 2)
            ways = [_twenty_times(each, heads) for each in made]
            print(f"  {name:14} transposed heads {ratios(*ways, rounds=15)}", flush=True)


def _twenty_times(summarizer: Summarizer, x: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        for _ in range(20):
            summarizer.submit(x, 1 if x.is_contiguous() else 2)
        summarizer.poll()

    summarizer.submit(x)
    summarizer.submit(x)
    summarizer.wait()
    return work


def measure_torch() -> None:
    """The same by torch's operations."""
    made = []
    for on in (False, True):
        switched(on)
        made.append(TorchBackend(torch.device("cuda"), stats=True, digest=False))
        made[-1].submit(Result(), torch.ones(9, device="cuda"), "float32")
    for name in ("float32", "bfloat16"):
        for nbytes in (1 << 20, 1 << 26):
            dtype = getattr(torch, name)
            x = torch.randn(nbytes // dtype.itemsize, device="cuda").to(dtype)

            def work(backend: TorchBackend, x: torch.Tensor = x, name: str = name) -> None:
                for _ in range(5):
                    backend.submit(Result(), x, name)

            one, two = (lambda backend=backend: work(backend) for backend in made)
            print(f"  {name:14} {nbytes:11,} B {ratios(one, two, rounds=10)}", flush=True)


class Block(nn.Module):
    """A transformer's layer, as operators go."""

    def __init__(self, hidden: int = 2048) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.gate = (nn.Linear(hidden, 5504) for _ in range(2))
        self.down = nn.Linear(5504, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 48, 128).chunk(3, 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def measure_step(level: str) -> None:
    """A recorded training step of eight layers: bare, with statistics, with sketches in those."""
    model = nn.Sequential(*(Block() for _ in range(8))).to("cuda", torch.bfloat16)
    x = torch.randn(2, 4096, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    times: dict[str, list[float]] = {"bare": [], "statistics": [], "sketches": []}
    for number in range(8):
        for how, found in times.items():
            switched(how == "sketches")
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                if how != "bare":
                    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                    recorder = tp.Recorder(Path(folder) / "run", level=level, keep="stats")
                    stack.enter_context(recorder)
                for again in range(3):  # the last: forms are known, kernels compiled
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    step()
                    torch.cuda.synchronize()
                    took = time.perf_counter() - begun
                    if how != "bare" and again < 2:
                        recorder.step()
            if number > 1:
                found.append(took * 1e3)
    bare, without, with_ = (statistics.median(found) for found in times.values())
    added = (with_ - without) / (without - bare) if without > bare else float("nan")
    print(
        f"  {level}: bare {bare:.1f} ms, statistics {without:.1f} ms, sketched {with_:.1f} ms: "
        f"{with_ / without:.3f} of the step, {added:+.1%} of what statistics add"
    )


def gpu() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("equal to the host:")
    check_equality()
    for digest in (False, True):
        print(f"Triton, {'statistics and digest' if digest else 'statistics'}:")
        measure_kernels(digest=digest)
    print("torch's operations:")
    measure_torch()
    print("a recorded step:")
    for level in ("L1", "mix"):
        measure_step(level)


# The smallest errors


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
FAULTS = ("all of it", "one row of 256")


def record(folder: Path, dtype: torch.dtype, *, others: bool, fault: Any) -> None:
    from trust.kernels import other_kernels, wrong_kernel

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


def is_found(folder: Path, pair: tuple[torch.dtype, bool], alter: Any, nth: int) -> bool:
    dtype, others = pair
    record(folder / "actual", dtype, others=others, fault=(alter, nth))
    comparison = tp.compare(folder / "actual", folder / "expected")
    named = [culprit.name for culprit in comparison.verdict.culprits[:1]]
    return named == [f"Functional.linear.{nth}.forward"]


def smallest() -> None:
    """For each pair, fault and depth the smallest factor that is found, in powers of two."""
    from trust.kernels import gain, one_row

    print("pair, fault, product: smallest factor found")
    for title, pair in PAIRS.items():
        for fault in FAULTS:
            for nth in (0, 3, 7):
                with tempfile.TemporaryDirectory() as folder:
                    record(Path(folder) / "expected", torch.float32, others=False, fault=None)
                    least = None
                    for power in range(1, 25):
                        by = 1 + 2.0**-power
                        alter = gain(by) if fault == FAULTS[0] else one_row(gain(by))
                        if not is_found(Path(folder), pair, alter, nth):
                            break
                        least = power
                text = "none" if least is None else f"1 + 2**-{least} = 1 + {2.0**-least:.2g}"
                print(f"{title}, {fault}, product {nth + 1} of 8: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("gpu", "host", "smallest"))
    parser.add_argument("before", nargs="?", help="an earlier tally.c, for `host`")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.what == "gpu":
        gpu()
        return
    torch.set_num_threads(1)
    if arguments.what == "smallest":
        smallest()
    elif arguments.before is None:
        parser.error("host takes an earlier tally.c")
    else:
        host(arguments.before)


if __name__ == "__main__":
    main()
