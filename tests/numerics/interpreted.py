"""Run by test_kernels.py with TRITON_INTERPRET=1: the CUDA kernels and banks on CPU tensors."""

import sys
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from numerics import cases
from tensorprobe.numerics import launch, queue
from tensorprobe.numerics.backends import KernelBackend
from tensorprobe.numerics.digest import digest_array
from tensorprobe.numerics.finiteness import LIMITS, extent_now, readable
from tensorprobe.numerics.launch import Flagger, Launcher
from tensorprobe.numerics.queue import Arrival, Bank
from tensorprobe.numerics.summary import Summarizer

CPU = torch.device("cpu")


class Landing:
    """A copy that arrives when it is told to."""

    def __init__(self) -> None:
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.arrived = True


class HostPort:
    """Streams of a device that is the host: each thread has one."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.landings: list[Landing] = []
        self.adopted: list[int] = []

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def current_stream(self) -> int:
        return threading.get_ident()

    def adopt(self, bank: Bank, stream: int) -> None:
        bank.streams[stream] = stream
        self.adopted.append(stream)

    def read_back(self, bank: Bank) -> Arrival:
        self.launcher.reduce(bank, 0)
        bank.host.copy_(bank.out)
        self.landings.append(Landing())
        return self.landings[-1]


def interpreted(*, stats: bool, digest: bool) -> tuple[Summarizer, HostPort]:
    launcher = Launcher(CPU)
    port = HostPort(launcher)

    def choose(device: torch.device, *, stats: bool, digest: bool) -> KernelBackend:
        def new_bank() -> Bank:
            return Bank(CPU, pinned=False)

        return KernelBackend(launcher, port, new_bank, stats=stats, digest=digest)

    return Summarizer(stats=stats, digest=digest, choose=choose), port


def check_flagger() -> None:
    """Bits and magnitudes of the flag kernel are those that the host finds."""
    tensors = []
    for dtype in LIMITS:
        for value in (0.5, float("nan"), float("inf"), -float("inf")):
            x = torch.linspace(-3, 2, 5000)
            x[4321] = value
            x = (torch.complex(x, x) if dtype.is_complex else x).to(dtype)
            tensors += [x, x[1:]]
    contents = [content for x in tensors if (content := readable(x)) is not None]
    flagger = Flagger(CPU, len(contents), interpreted=True)
    for slot, content in enumerate(contents):
        flagger.start(content, content.numel(), slot, 0)
    for content, (bits, top) in zip(contents, flagger.decode(len(contents)), strict=True):
        expected = extent_now(content)
        assert bits == expected.bits, (content.dtype, bits, expected)
        largest = content.to(torch.float64).abs().max().item()
        assert bits or abs(top - largest) <= 1e-6 * largest, (content.dtype, top)


# Those that a kernel sees differently: at an odd address, repeated, copied first.
TELLING = ("offset", "expanded slice")


def check_dtypes(names: list[str], *, every_layout: bool = False) -> None:
    summarizer, _ = interpreted(stats=True, digest=True)
    for name in names:
        submitted = [
            (case, tensor, summarizer.submit(tensor))
            for case, tensor in cases.all_cases(getattr(torch, name))
            if every_layout or "," not in case or case in {f"bits, {how}" for how in TELLING}
        ]
        summarizer.wait()
        for case, tensor, result in submitted:
            assert result.ready, case
            assert result.error is None, (name, case, result.error)
            try:
                cases.assert_summary(result.summary, tensor)
                assert result.digest == expected_digest(tensor)
            except AssertionError as error:
                raise AssertionError(f"{name}, {case}: {result} {tensor}") from error


def expected_digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).clone()
    return digest_array(flat.view(torch.uint8).numpy())


def check_large() -> None:
    """Several programs, several steps each, several chunks of the digest, odd sizes."""
    # A tile costs the same, however large it is: few and large ones.
    launch.MAX_ROWS, launch.LANES = 2, 1024
    launch._TILES = {name: launch._tile(name) for name in launch.READS}
    summarizer, _ = interpreted(stats=True, digest=True)
    whole = torch.randn(9_001, dtype=torch.float64)
    tensors = [whole, whole.bfloat16()[1:], whole.float()[1:-2], whole.int()]
    # Digest and tallies at once: whole chunks of 64 KB, and a rest; with and without infinities.
    words = torch.randn(3 * 16384 + 46)
    words[::7] = 0
    tensors += [words, words.bfloat16().repeat(2), words.half()[:50]]
    tensors += [torch.where(words > 2.5, float("inf"), words).to(tensors[4].dtype)]
    results = [summarizer.submit(tensor) for tensor in tensors]
    summarizer.wait()
    for tensor, result in zip(tensors, results, strict=True):
        exact = Summarizer(digest=True).submit(tensor)
        assert exact.summary is not None
        assert result.summary is not None, result.error
        assert result.digest == exact.digest
        assert result.summary.min == exact.summary.min
        assert result.summary.max == exact.summary.max
        assert result.summary.zero_count == exact.summary.zero_count
        assert result.summary.inf_count == exact.summary.inf_count
        assert abs(result.summary.norm - exact.summary.norm) <= 1e-12 * exact.summary.norm


def check_banks() -> None:
    """Banks fill, leave, land in order and are used again; a poll completes only what landed."""
    queue.SLOTS, queue.ROWS, queue.MAX_AGE_S = 4, 16, 1e9
    summarizer, port = interpreted(stats=True, digest=True)
    results = [summarizer.submit(torch.full((3,), float(i))) for i in range(10)]
    assert len(port.landings) == 2, "two banks of four were full"
    summarizer.poll()
    assert not any(result.ready for result in results)
    port.landings[0].arrived = True
    summarizer.poll()
    assert [result.ready for result in results] == [True] * 4 + [False] * 6
    summarizer.wait()
    assert [result.summary.max for result in results] == [float(i) for i in range(10)]
    assert results[2].digest == expected_digest(torch.full((3,), 2.0))
    # The banks are used again: what they held before has left no trace.
    again = [summarizer.submit(torch.tensor([True, False])) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda: again.append(summarizer.submit(torch.tensor([1, 2**60]))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    summarizer.wait()
    assert [result.summary.max for result in again] == [True] * 3 + [2**60] * 3
    queue.MAX_AGE_S = 0.0
    late = summarizer.submit(torch.ones(2))
    sent = len(port.landings)
    summarizer.poll()
    assert len(port.landings) == sent + 1, "a poll sends a bank that is old"
    assert not late.ready


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="ComplexHalf")
    # numpy, which interprets the kernels, tells of integers that wrap and of masked-out numbers.
    warnings.filterwarnings("ignore", message="(overflow|invalid value) encountered")
    what, *names = sys.argv[1:]
    if what == "banks":
        check_dtypes(names)
        check_large()
        check_banks()
    elif what == "flags":
        check_flagger()
    else:
        check_dtypes(names, every_layout=True)
    print("passed")
