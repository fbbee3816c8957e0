"""How near to the disk's own speed tensors are recorded: both are measured in turn, in one run.

    python benchmarks/disk.py
    python benchmarks/disk.py --device cuda --dtype bfloat16 --size large --scratch FOLDER
    python benchmarks/disk.py --stages

`raw` writes as many bytes as the recording has, to files of the same size opened the same way, in
large pieces from memory: the least that any recording costs. Times end when the files are closed
(most bytes are then in the page cache, as far as the kernel lets them) and when fsync has returned
(they are on the disk). Bar: 80 % of raw. `--stages` tells how fast each thing is that is done to
the bytes of a CPU tensor, by the processor time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
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

from tensorprobe.store.shard import HEADER_NBYTES, SHARD_NBYTES

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
    options["compress"] = args.compress
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


def stages(scratch: str | None) -> None:
    """What is done to a tensor of 32 MiB, first in the program's thread, then in the writer's."""
    import torch

    from tensorprobe.record.transfer import Transfer
    from tensorprobe.store.shard import Shards
    from tensorprobe.tensors.digest import digest_bytes
    from tensorprobe.tensors.packing import pack
    from tensorprobe.tensors.summarizer import Summarizer

    torch.set_num_threads(1)
    tensor = torch.randn(8 << 20)
    data = tensor.view(torch.uint8).numpy()
    narrow = torch.randn(16 << 20).bfloat16().view(torch.uint8).numpy()
    summarizer, fresh, used = Summarizer(), Transfer(), Transfer(spare_nbytes=64 << 20)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    fd = os.open(folder, os.O_RDONLY)
    shards, keys = Shards(fd), iter(range(10**6))
    copy = data.copy()

    def write() -> None:
        copy[:8] = np.frombuffer(np.int64(next(keys)).tobytes(), np.uint8)
        shards.append("key", "uint8", copy.shape, copy)

    def write_small() -> None:
        shards.append("key", "uint8", (64,), copy[:64])
        shards.flush()

    write()
    raw_fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
    os.ftruncate(raw_fd, SHARD_NBYTES)
    offsets = iter(range(HEADER_NBYTES, SHARD_NBYTES, data.nbytes))
    other = data[::-1].copy()
    for title, stage in (
        ("statistics", lambda: summarizer.submit(tensor)),
        ("copy into new memory", lambda: fresh.snapshot(tensor)),
        ("copy into memory that is used again", lambda: used.snapshot(tensor)),
        ("digest", lambda: digest_bytes(data)),
        ("looking for equal content, none", lambda: shards.find(other)),
        ("looking for equal content, found", lambda: shards.find(copy)),
        ("packing (compress)", lambda: pack(data, 4)),
        ("packing of bfloat16", lambda: pack(narrow, 2)),
        ("writing", write),
        ("64 bytes and the header's new end", write_small),
        ("raw pwrite", lambda: os.pwrite(raw_fd, copy.data, next(offsets))),
    ):
        best = 1e9
        for _ in range(9):
            began = time.thread_time()
            stage()
            best = min(best, time.thread_time() - began)
        speed = f"{data.nbytes / best / 1e9:.2f} GB/s" if best > 1e-4 else f"{best * 1e6:.0f} us"
        print(f"{title:40} {speed}")
    shards.close()
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--layers", type=int, default=None, help="fewer than the size has")
    parser.add_argument("--level", default="L0")
    parser.add_argument("--queue", default=None, help="as the recorder's: 256MiB")
    parser.add_argument("--compress", action="store_true", help="as the recorder's")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scratch", default=None, help="a folder on the disk in question")
    parser.add_argument("--stages", action="store_true", help="of a CPU tensor, one by one")
    args = parser.parse_args()
    if args.stages:
        stages(args.scratch)
        return
    import torch

    size = SIZES[args.size] | ({"layers": args.layers} if args.layers else {})
    _, step = build(size, args.device, args.dtype)
    bare = timed(step, 3, args.device)[-1]
    with fresh_folder(args.scratch) as folder:  # kernels are compiled, memory is pinned
        nbytes = record(folder, step, args).nbytes
    memory = np.random.default_rng(0).integers(0, 256, 8 * PIECE, np.uint8)
    raw: list[Times] = []
    recorded: list[Times] = []
    # Each goes first in turn: memory that was just given back is sooner had again.
    for turn in itertools.islice(itertools.cycle("rwwr"), 2 * args.rounds):
        with fresh_folder(args.scratch) as folder:
            times = write_raw(folder, nbytes, memory) if turn == "w" else record(folder, step, args)
        (raw if turn == "w" else recorded).append(times)
        sys.stderr.write(f"{turn} {times.closed_s:.2f} s, with fsync {times.synced_s:.2f} s\n")
    what = f"{args.size} Llama of {size['layers']} layers, {args.dtype} on {args.device}"
    print(f"{what}, {args.level} tensors; torch ", end="")
    print(f"{torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        f"{nbytes / 1e9:.2f} GB a step in files, of {recorded[0].content_nbytes / 1e9:.2f} GB of "
        f"content; step without the tool {bare:.3f} s"
    )
    print("| | raw | recorded | of raw, medians | the best of each |\n|" + " --- |" * 5)
    for title, synced in (("files closed", False), ("on the disk (fsync)", True)):
        a, b = ([t.speed(synced) for t in each] for each in (raw, recorded))
        middle, best = statistics.median(b) / statistics.median(a), max(b) / max(a)
        print(
            f"| {title} | {statistics.median(a):.2f} GB/s | {statistics.median(b):.2f} GB/s | "
            f"{middle:.0%} | {best:.0%} |"
        )
    for times in recorded:
        print(
            f"recorded step {times.closed_s:.2f} s, fsync {times.synced_s - times.closed_s:.2f} s; "
            f"the program waited {times.waited_s:.2f} s for room in the queue"
        )


if __name__ == "__main__":
    main()
