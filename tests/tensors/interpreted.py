"""Run by test_kernels.py with TRITON_INTERPRET=1: the CUDA kernels and banks on CPU tensors."""

import ctypes
import sys
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from tensorprobe.tensors import launch, sketch
from tensorprobe.tensors import readback as queue
from tensorprobe.tensors import triton_kernels as kernels
from tensorprobe.tensors.backends import KernelBackend, TorchBackend
from tensorprobe.tensors.digest import digest_array
from tensorprobe.tensors.finiteness import LIMITS, extent_now, readable
from tensorprobe.tensors.launch import Flagger, Launcher
from tensorprobe.tensors.readback import Arrival, Bank
from tensorprobe.tensors.summarizer import Summarizer
from tensors import cases

CPU = torch.device("cpu")


class Landing:
    """A copy that arrives when it is told to, or is asked for often."""

    def __init__(self) -> None:
        self.arrived = False
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self.arrived or self._asked > 5


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

    def usual_stream(self) -> int:
        return threading.get_ident()

    def adopt(self, bank: Bank, stream: int) -> None:
        bank.streams[stream] = stream
        self.adopted.append(stream)

    def read_back(self, bank: Bank) -> Arrival:
        self.launcher.reduce(bank, 0)
        bank.host.copy_(bank.out)
        self.landings.append(Landing())
        return self.landings[-1]


class Compiled:
    """A form of a kernel that is given addresses, as those for a GPU are; it is interpreted."""

    function, packed_metadata = 1, (8, 1, 0)
    fault: Exception | None = None

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._dtypes = [getattr(argument, "dtype", None) for argument in arguments]
        self._constants = constants
        self.starts = 0

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any
    ) -> None:
        assert (function, metadata, rest[:3]) == (1, (8, 1, 0), (None, None, None))
        assert stream in (0, threading.get_ident())
        if self.fault is not None:
            raise self.fault
        self.starts += 1
        given = rest[3 : 3 + len(self._dtypes)]
        assert rest[3 + len(self._dtypes) :] == tuple(self._constants.values())
        arguments = [
            value if dtype is None else at_address(value, dtype)
            for value, dtype in zip(given, self._dtypes, strict=True)
        ]
        self._kernel[(x, y, z)](*arguments, **self._constants)


def at_address(address: int, dtype: Any) -> Any:
    """A tensor there, of which the interpreter asks no more than where it is."""
    memory = torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=torch.uint8)
    if isinstance(dtype, torch.dtype):
        return memory.view(dtype)
    return triton.reinterpret(memory, dtype)


class Compiling:
    """A kernel of which there is a compiled form once it has run."""

    def __init__(self, kernel: Any, forms: list[Compiled]) -> None:
        self._kernel = kernel
        self._forms = forms

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, num_warps: int, maxnreg: int, **constants: Any) -> Compiled:
            self._kernel[grid](*arguments, **constants)
            self._forms.append(Compiled(self._kernel, arguments, constants))
            return self._forms[-1]

        return start


def compiling(launcher: Launcher) -> list[Compiled]:
    """Let the launcher have compiled forms, which are given."""
    forms: list[Compiled] = []
    for kernel in vars(launcher).values():
        if isinstance(kernel, launch.Kernel):
            kernel._function = Compiling(kernel._function, forms)
    launch._starts_directly = lambda: True
    return forms


def interpreted(*, stats: bool, digest: bool) -> tuple[Summarizer, HostPort]:
    launcher = Launcher(CPU)
    port = HostPort(launcher)

    def choose(device: torch.device, *, stats: bool, digest: bool) -> KernelBackend:
        def new_bank() -> Bank:
            return Bank(CPU, pinned=False)

        spare = TorchBackend(CPU, stats=stats, digest=digest)
        return KernelBackend(launcher, port, new_bank, spare, stats=stats, digest=digest)

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
        flagger.start(content, content.numel(), slot)
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
        assert sketch.difference(result.summary.sketch, exact.summary.sketch) <= 1e-9


def check_usual(names: list[str], *, digest: bool) -> None:
    """What starts by a compiled form and without a closer look, and what must not."""
    summarizer, port = interpreted(stats=True, digest=digest)
    forms = compiling(port.launcher)
    for name in names:
        # The first of a dtype is looked at closely; of the others all that needs to be.
        content = cases.random_bits(getattr(torch, name), 96)
        tensors = [content, content.clone(), content.clone()[:0], content.clone()[:88]]
        tensors += [content.view(8, 12).t(), content[1:], content[:1].expand(24)]
        if content.is_complex():
            tensors += [content.conj(), content.conj().imag]
        results = [summarizer.submit(tensor) for tensor in tensors]
        summarizer.wait()
        for tensor, result in zip(tensors, results, strict=True):
            assert (result.ready, result.error, result.note) == (True, None, None), result
            cases.assert_summary(result.summary, tensor)
            assert result.digest == (expected_digest(tensor) if digest else None)
    assert sum(form.starts for form in forms) > len(names), "forms are used"
    check_refusal(summarizer, forms, digest)


def check_runs(names: list[str]) -> None:
    """Views with gaps between equal pieces are read where they lie, others by way of a copy."""
    launch.LANES = 256 if "float32" in names else 128  # few, so that these are several tiles
    launch._TILES = {name: launch._tile(name) for name in launch.READS}
    for name in names:
        summarizer, port = interpreted(stats=True, digest=False)
        forms = compiling(port.launcher)
        for special in (0.0, float("nan"), float("-inf")):
            x = torch.randn(48, 64).to(getattr(torch, name))
            x[3, 5] = x[20, 60] = special
            heads = x.view(4, 12, 64).transpose(0, 1)
            read = views_in_runs(x)
            copied = [x[:, 1:9], x[:, :4].t()[:3], x[1:21:3, ::2]]
            copied += [x.view(4, 6, 4, 4, 8)[:3, :2, :3, :3, :4]]  # too many dimensions
            submit_twice(summarizer, [x, heads, *read, *copied])
        starts = [form.starts for form in forms if form._kernel is kernels.tally_runs]
        assert starts == [3 * 2 * len(read) - 1], "each but the first"


def check_digested_runs(names: list[str]) -> None:
    """The same with digests, for which the order matters."""
    for name in names:
        summarizer, port = interpreted(stats=True, digest=True)
        forms = compiling(port.launcher)
        x = torch.randn(24, 64).to(getattr(torch, name))
        large = torch.randn(40, 3, 320).to(x.dtype).transpose(0, 1)  # a chunk and a rest
        read = [*views_in_runs(x), large]
        submit_twice(summarizer, [x, *read, x.t(), x[:, 1:9]])
        x[3, 5] = float("nan")
        submit_twice(summarizer, [x[:, :32]])
        starts = [form.starts for form in forms if form._kernel is kernels.digest_and_tally_runs]
        assert starts == [2 * len(read) + 2 - 1], "each but the first"


def views_in_runs(x: torch.Tensor) -> list[torch.Tensor]:
    heads = x.view(4, -1, 64).transpose(0, 1)
    return [
        x[:, :32],
        x[:, 32:],
        x[::2],
        heads[..., 16:48],
        heads[1:4, ::2, :32],
        x[:, 8:16].expand(3, len(x), 8),
        x.view(2, 3, -1, 64)[:, :2, 1:, 8:].transpose(0, 2),
        torch.as_strided(x, (3, 4, 32), (128, 8, 1)),  # which overlap
    ]


def submit_twice(summarizer: Summarizer, tensors: list[torch.Tensor]) -> None:
    """Each of these by a form of its own, the second time as one that is known."""
    known = len(FORMS)
    FORMS.extend(tensors)
    for _ in range(2):
        results = [summarizer.submit(tensor, known + i) for i, tensor in enumerate(tensors)]
        summarizer.wait()
        for tensor, result in zip(tensors, results, strict=True):
            assert (result.error, result.note) == (None, None), result
            cases.assert_summary(result.summary, tensor)
            assert result.digest in (None, expected_digest(tensor))
            assert (result.digest is not None) == summarizer.digests


FORMS: list[torch.Tensor] = []


def check_refusal(summarizer: Summarizer, forms: list[Compiled], digest: bool) -> None:
    """A kernel that cannot be started any more: torch's operations from there on."""
    content = torch.arange(8, dtype=torch.float32)
    fine = [summarizer.submit(content) for _ in range(2)]
    for form in forms:
        form.fault = RuntimeError("out of resource\nand more")
    refused = [summarizer.submit(content) for _ in range(2)]
    for form in forms:
        form.fault = None
    summarizer.wait()
    assert {result.summary for result in fine + refused} == {fine[0].summary}
    assert [result.note for result in fine] == [None, None]
    note = "torch operations instead of Triton kernels: out of resource"
    assert [result.note for result in refused] == [note, note]
    assert (refused[0].digest is not None) == digest


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
    elif what == "usual":
        check_usual(names, digest=False)
        check_usual(names, digest=True)
    elif what == "runs":
        check_runs(names)
    elif what == "digested":
        check_digested_runs(names)
    elif what == "flags":
        check_flagger()
    else:
        check_dtypes(names, every_layout=True)
    print("passed")
