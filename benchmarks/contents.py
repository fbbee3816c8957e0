"""What Python costs a distinct content of a CUDA tensor, without a GPU: its kernel does nothing.

    python benchmarks/contents.py [--digest] [--contents 1000] [--repeats 50]

CPU tensors pose as those of a device, and a function in C that does nothing as Triton's. What is
left is what surrounds the start of a kernel: finding that the content is new and starting (`start`,
in the program's thread), completing the results of a bank that landed (`land`), writing the lines
(`write`, both in the thread that writes). Microseconds a content, the least of many repeats.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tensorprobe.record.values import Values
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors import launch
from tensorprobe.tensors.backends import KernelBackend
from tensorprobe.tensors.readback import Bank
from tensorprobe.tensors.summarizer import Summarizer

CPU = torch.device("cpu")


class Nothing:
    """A kernel as Triton gives it: compiled, and its start takes any arguments."""

    run = staticmethod("".format)
    function, packed_metadata = 1, (8, 1, 0)

    def __getitem__(self, grid: object) -> Callable[..., Nothing]:
        return lambda *arguments, **constants: self


class Landed:
    """A copy that has arrived."""

    def query(self) -> bool:
        return True


class HostPort:
    """A device that is the host."""

    current_stream = usual_stream = staticmethod(threading.get_ident)

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def adopt(self, bank: Bank, stream: int) -> None:
        bank.streams[stream] = stream

    def read_back(self, bank: Bank) -> Landed:
        bank.host.copy_(bank.out)
        return Landed()


def new_bank() -> Bank:
    """One whose rows hold ordinary statistics."""
    bank = Bank(CPU, pinned=False)
    bank.out.zero_()
    bank.out[:, :4] = torch.rand(len(bank.out), 4, dtype=torch.float64).view(torch.int64)
    return bank


def summarizer(digest: bool) -> Summarizer:
    """Kernels that do nothing, compiled from the second tensor of a dtype on."""
    launcher = launch.Launcher(CPU)
    for kernel in vars(launcher).values():
        if isinstance(kernel, launch.Kernel):
            kernel._function = Nothing()

    def choose(device: torch.device, **wanted: bool) -> KernelBackend:
        return KernelBackend(launcher, HostPort(), new_bank, **wanted)

    return Summarizer(digest=digest, choose=choose)


def measure(args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Seconds of each part for all contents."""
    source = summarizer(args.digest)
    writer = CaptureWriter(Path(folder) / "a", 0, "run", {}, {}, results=source)
    values = Values(writer, source)
    tensors = [torch.ones(1024, dtype=torch.bfloat16) for _ in range(args.contents)]
    name: Any = ("Torch.relu.0.forward", "input", "0")
    form = values.form(tensors[0], "stats", None)
    writer.begin_step(0)
    writer._pause = lambda: False  # type: ignore[method-assign]  # its part is done here
    writer.drain()
    least: dict[str, float] = {}

    def timed(part: str, work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        least[part] = min(time.thread_time() - began, least.get(part, float("inf")))

    for _ in range(args.repeats):
        values.begin_step()
        timed("start", lambda: [values.of(tensor, form, *name, "stats") for tensor in tensors])
        timed("land", source.wait)
        timed("write", writer._write_ready)
        assert not writer._waiting
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digest", action="store_true", help="digests beside the statistics")
    parser.add_argument("--contents", type=int, default=1000, help="how many in a repeat")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        least = measure(args, folder)
    for part, seconds in [*least.items(), ("all", sum(least.values()))]:
        print(f"{part:6} {seconds / args.contents * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
