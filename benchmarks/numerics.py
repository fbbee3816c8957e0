"""How fast tensors are summarised: GB/s of a large one and microseconds of one of 4 KB.

python benchmarks/numerics.py [--device cuda] [--large-mb 64]
python benchmarks/numerics.py --ways    the ways to read a CPU tensor: numpy, C, C on more threads
"""

import argparse
import time
from collections.abc import Callable

import torch

from tensorprobe.tensors import tally
from tensorprobe.tensors.summarizer import Summarizer

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
    torch.complex64,
]
WANTED = {"stats": (True, False), "digest": (False, True), "both": (True, True)}


def best_s(work: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(dtype: torch.dtype, device: str, large_nbytes: int) -> list[float]:
    """GB/s and microseconds for each of WANTED."""
    row = []
    size = torch.empty(0, dtype=dtype).element_size()
    large = (torch.randn(large_nbytes // size, device=device) * 3).to(dtype)
    small = large[: 4096 // size].clone()
    for stats, digest in WANTED.values():
        summarizer = Summarizer(stats=stats, digest=digest)

        def whole(summarizer: Summarizer = summarizer) -> None:
            for _ in range(1 if device == "cpu" else 20):
                summarizer.submit(large)
            summarizer.wait()

        def many(summarizer: Summarizer = summarizer) -> None:
            for _ in range(500):
                summarizer.submit(small)

        whole()
        rounds = 1 if device == "cpu" else 20
        row.append(rounds * large.nbytes / best_s(whole, 3) / 1e9)
        row.append(best_s(many, 7) / 500 * 1e6)
        summarizer.wait()
    return row


def compare_ways(large_mb: int) -> None:
    """Statistics of CPU tensors: GB/s of a large one and of 1 MB, microseconds of 2048 elements."""
    threads, library = torch.get_num_threads(), tally.LIBRARY
    if library is None:
        raise SystemExit("there is no library: python -m tensorprobe.tensors.build_tally")
    ways = [("numpy", None, 1), ("C", library, 1), (f"C, {threads} threads", library, threads)]
    sizes = f"{large_mb} MB"
    print(f"torch {torch.__version__}, GB/s and us")
    print(f"{'':10}" + "".join(f"{way:>16}: {sizes:>8}{'1 MB':>8}{'us':>7}" for way, *_ in ways))
    for dtype in DTYPES:
        if str(dtype).removeprefix("torch.") not in tally.KINDS:
            continue
        size = torch.empty(0, dtype=dtype).element_size()
        large = (torch.randn((large_mb << 20) // size) * 3).to(dtype)
        middle, small = large[: (1 << 20) // size].clone(), large[:2048].clone()
        cells = []
        for _, tally.LIBRARY, count in ways:
            torch.set_num_threads(count)
            summarizer = Summarizer()

            def seconds(tensor: torch.Tensor, times: int, form: int) -> float:
                def work() -> None:
                    for _ in range(times):
                        summarizer.submit(tensor, form)  # noqa: B023

                return best_s(work, 25) / times

            speeds = [t.nbytes / seconds(t, n, n) / 1e9 for t, n in ((large, 1), (middle, 20))]
            us = seconds(small, 500, 500) * 1e6
            cells.append(f"{speeds[0]:26.1f}{speeds[1]:8.1f}{us:7.1f}")
        print(f"{str(dtype).removeprefix('torch.'):10}" + "".join(cells), flush=True)
    torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large-mb", type=int, default=64)
    parser.add_argument("--ways", action="store_true")
    arguments = parser.parse_args()
    if arguments.ways:
        compare_ways(arguments.large_mb)
        return
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.large_mb} MB and 4 KB")
    print(f"{'':16}" + "".join(f"{wanted:>10} GB/s{'us':>8}" for wanted in WANTED))
    for dtype in DTYPES:
        numbers = measure(dtype, arguments.device, arguments.large_mb << 20)
        cells = [f"{gb:15.2f}{us:8.1f}" for gb, us in zip(numbers[::2], numbers[1::2], strict=True)]
        print(f"{str(dtype).removeprefix('torch.'):16}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
