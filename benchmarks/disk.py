"""How near to the disk's own speed tensors are recorded: both are measured in turn, in one run.

    python benchmarks/disk.py
    python benchmarks/disk.py --device cuda --dtype bfloat16 --size large --scratch FOLDER

`raw` writes as many bytes as the recording has, to files of the same size opened the same way, in
large pieces from memory: the least that any recording costs. Times end when the files are closed
(most bytes are then in the page cache, as far as the kernel lets them) and when fsync has returned
(they are on the disk). Bar: 80 % of raw.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from recording import SIZES, build, timed

from tensorprobe.store.shard import SHARD_NBYTES

PIECE = 32 << 20


class Times:
    """Of one writing: until the files were closed, and until they were on the disk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.closed_s = 0.0
        self.synced_s = 0.0
        self.waited_s = 0.0
        self.content_nbytes = nbytes

    def speed(self, synced: bool) -> float:
        return self.nbytes / (self.synced_s if synced else self.closed_s) / 1e9


@contextmanager
def fresh_folder(scratch: str | None) -> Iterator[Path]:
    """A folder that is gone afterwards, with nothing left for the disk to do."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    os.sync()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.sync()


def fsync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def write_raw(folder: Path, nbytes: int, memory: np.ndarray) -> Times:
    """Plain pwrite, buffered, into files as large as a shard, which have their size at once."""
    times = Times(nbytes)
    began = time.perf_counter()
    for number, start in enumerate(range(0, nbytes, SHARD_NBYTES)):
        length = min(SHARD_NBYTES, nbytes - start)
        fd = os.open(folder / f"raw-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.ftruncate(fd, length)
        for offset in range(0, length, PIECE):
            source = (start + offset) % memory.nbytes
            piece = memory[source : source + min(PIECE, length - offset)]
            while piece.nbytes:
                written = os.pwrite(fd, piece.data, offset)
                piece, offset = piece[written:], offset + written
        os.close(fd)
    times.closed_s = time.perf_counter() - began
    fsync_all(folder)
    times.synced_s = time.perf_counter() - began
    return times


def record(folder: Path, step, args: argparse.Namespace) -> Times:
    """One step, from its beginning until `stop` returns."""
    import tensorprobe as tp

    options = {"queue": args.queue} if args.queue else {}
    recorder = tp.Recorder(
        folder / "run", level=args.level, keep="tensors", log=lambda text: None, **options
    )
    if args.device == "cuda":
        import torch

        torch.cuda.synchronize()
    began = time.perf_counter()
    recorder.start()
    step()
    content_nbytes = recorder._tape.nbytes
    recorder.stop()
    closed_s = time.perf_counter() - began
    fsync_all(folder)
    times = Times(recorder._writer.nbytes_written)
    times.synced_s = time.perf_counter() - began
    times.closed_s = closed_s
    times.waited_s = recorder._writer.waited_s
    times.content_nbytes = content_nbytes
    if recorder._writer.error or recorder._writer.n_gaps:
        sys.stderr.write(f"{recorder._writer.n_gaps} gaps, {recorder._writer.error}\n")
    recorder.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--level", default="L0")
    parser.add_argument("--queue", default=None, help="as the recorder's: 256MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", default=None, help="a folder on the disk in question")
    args = parser.parse_args()
    import torch

    _, step = build(SIZES[args.size], args.device, args.dtype)
    bare = timed(step, 3, args.device)[-1]
    with fresh_folder(args.scratch) as folder:  # kernels are compiled, memory is pinned
        nbytes = record(folder, step, args).nbytes
    memory = np.random.default_rng(0).integers(0, 256, 8 * PIECE, np.uint8)
    raw: list[Times] = []
    recorded: list[Times] = []
    for _ in range(args.rounds):
        with fresh_folder(args.scratch) as folder:
            raw.append(write_raw(folder, nbytes, memory))
        with fresh_folder(args.scratch) as folder:
            recorded.append(record(folder, step, args))
    print(f"{args.size} Llama, {args.dtype} on {args.device}, {args.level} tensors; torch ", end="")
    print(f"{torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        f"{nbytes / 1e9:.2f} GB a step in files, of {recorded[0].content_nbytes / 1e9:.2f} GB of "
        f"content; step without the tool {bare:.3f} s"
    )
    print("| | raw | recorded | of raw |\n| --- | --- | --- | --- |")
    for title, synced in (("files closed", False), ("on the disk (fsync)", True)):
        a = statistics.median(t.speed(synced) for t in raw)
        b = statistics.median(t.speed(synced) for t in recorded)
        print(f"| {title} | {a:.2f} GB/s | {b:.2f} GB/s | {b / a:.0%} |")
    for times in recorded:
        print(
            f"recorded step {times.closed_s:.2f} s, fsync {times.synced_s - times.closed_s:.2f} s; "
            f"the program waited {times.waited_s:.2f} s for room in the queue"
        )


if __name__ == "__main__":
    main()
