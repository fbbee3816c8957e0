"""What the kernels take that read a tensor on a GPU: microseconds and TB/s, by size and dtype.

    python benchmarks/reading.py

Each is captured into a CUDA graph over tensors that together are larger than the cache, and the
quickest of five replays counts: no start of a kernel is in the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import triton

from tensorprobe.tensors import launch
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors import triton_kernels as kernels
from tensorprobe.tensors.digest import WEIGHTS

SIZES = [
    (torch.bfloat16, 1 << 20),
    (torch.bfloat16, 1 << 23),
    (torch.bfloat16, 1 << 24),
    (torch.bfloat16, 8192 * 5504),
    (torch.bfloat16, 8192 * 32000),
    (torch.float32, 1 << 24),
    (torch.float16, 1 << 24),
]
NBYTES = 800 << 20  # of the tensors of a size
OPTIONS = {"maxnreg": 64, "EARLY": False}  # as `launch` starts them, but one after the other


def best_us(work: Callable[[torch.Tensor], object], tensors: list[torch.Tensor]) -> float:
    work(tensors[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in tensors:
            work(tensor)
    times = []
    for _ in range(6):  # the first one warms up
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(tensors))
    return min(times[1:])


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if not torch.cuda.is_available():
        sys.exit("this is measured on a GPU, and torch sees none")
    device = torch.device("cuda")
    weights = torch.from_numpy(WEIGHTS.view("int64").copy()).to(device)
    found = torch.zeros(launch.MAX_ROWS * rows.FIELDS, dtype=torch.int64, device=device)
    meta, flags = (torch.zeros(16, dtype=torch.int32, device=device) for _ in range(2))
    digests = torch.zeros(16, dtype=torch.int64, device=device)
    lanes = {"LANES": launch.LANES, "num_warps": launch.LANES // 32, **OPTIONS}

    def parts(tensor: torch.Tensor) -> tuple[object, int, int]:
        name = str(tensor.dtype).removeprefix("torch.")
        read, kind = launch.READS[name]
        return triton.reinterpret(tensor, read), kind, 16 // tensor.element_size()

    def statistics(tensor: torch.Tensor) -> None:
        x, kind, vector = parts(tensor)
        programs = min(launch.MAX_ROWS, -(-tensor.numel() // (launch.LANES * vector)))
        kernels.tally_floats[(programs,)](
            x, weights, found, meta, tensor.numel(), 0, 0,
            KIND=kind, WIDE=False, VECTOR=vector, FIELDS=rows.FIELDS, **lanes,
        )  # fmt: skip

    def with_digest(tensor: torch.Tensor) -> None:
        x, kind, _ = parts(tensor)
        kernels.digest_and_tally_floats[(launch.rows_for_both(tensor.nbytes),)](
            triton.reinterpret(tensor, triton.language.int64), x, weights, found, meta, digests,
            tensor.nbytes // 8, 0, 0,
            KIND=kind, UNIT=tensor.element_size(), FIELDS=rows.FIELDS, **lanes,
        )  # fmt: skip

    def flag(tensor: torch.Tensor) -> None:
        x, kind, vector = parts(tensor)
        programs = min(launch.MAX_FLAGGERS, -(-tensor.numel() // (launch.LANES * vector)))
        kernels.flag_floats[(programs,)](
            x, weights, flags, tensor.numel(), 0, KIND=kind, WIDE=False, VECTOR=vector, **lanes,
        )  # fmt: skip

    works = {"statistics": statistics, "with digests": with_digest, "flags": flag}
    table: dict[str, list[str]] = {name: [] for name in works}
    heads = []
    for dtype, count in SIZES:
        sample = torch.randn(count, device=device).to(dtype)
        tensors = [sample.clone() for _ in range(max(2, NBYTES // sample.nbytes))]
        heads.append(f"{sample.nbytes / 1e6:.0f} MB {str(dtype).removeprefix('torch.')}")
        for name, work in works.items():
            us = best_us(work, tensors)
            table[name].append(f"{us:.1f} ({sample.nbytes / us / 1e6:.2f})")
    print(f"| us (TB/s) | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
