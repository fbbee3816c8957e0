"""How fast tensors are summarised: GB/s of a large one and microseconds of one of 4 KB.

python benchmarks/numerics.py [--device cuda] [--large-mb 64]
"""

import argparse
import time
from collections.abc import Callable

import torch

from tensorprobe.numerics.summary import Summarizer

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large-mb", type=int, default=64)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.large_mb} MB and 4 KB")
    print(f"{'':16}" + "".join(f"{wanted:>10} GB/s{'us':>8}" for wanted in WANTED))
    for dtype in DTYPES:
        numbers = measure(dtype, arguments.device, arguments.large_mb << 20)
        cells = [f"{gb:15.2f}{us:8.1f}" for gb, us in zip(numbers[::2], numbers[1::2], strict=True)]
        print(f"{str(dtype).removeprefix('torch.'):16}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
