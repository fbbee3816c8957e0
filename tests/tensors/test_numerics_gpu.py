"""The same numbers on a real CUDA device, without one synchronisation."""

import math
from collections.abc import Iterator

import pytest
import torch

from tensorprobe.tensors.backends import KernelBackend, TorchBackend, choose
from tensorprobe.tensors.digest import digest_tensor
from tensorprobe.tensors.summarizer import Summarizer, summarize
from tensors import cases
from tensors.at_once import in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def with_torch_operations(device: torch.device, *, stats: bool, digest: bool) -> TorchBackend:
    return TorchBackend(device, stats=stats, digest=digest)


def test_kernels_are_used() -> None:
    backend = choose(torch.device("cuda", 0), stats=True, digest=True)
    assert isinstance(backend, KernelBackend)


@pytest.mark.parametrize("path", ["kernels", "torch operations"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_equal_exact_arithmetic(path: str, dtype: torch.dtype) -> None:
    chosen = choose if path == "kernels" else with_torch_operations
    summarizer = Summarizer(digest=True, choose=chosen)
    submitted = []
    for name, tensor in cases.all_cases(dtype):
        # A copy keeps strides only when it is of the storage.
        whole = torch.empty(0, dtype=dtype, device="cuda").set_(
            tensor.untyped_storage().cuda(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        submitted.append((name, tensor, summarizer.submit(whole)))
    summarizer.wait()
    for name, tensor, result in submitted:
        assert result.ready, name
        assert result.error is None, (name, result.error)
        if path == "kernels":
            assert result.note is None
        cases.assert_summary(result.summary, tensor)
        assert result.digest == digest_tensor(tensor), name


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_those_after_the_first_of_a_dtype(dtype: torch.dtype, digest: bool) -> None:
    """Started without a closer look where they are usual, by then compiled forms."""
    content = cases.random_bits(dtype, 6016)
    layouts = [content, content.clone(), content[:1024], content[1:], content[:0]]
    rows = content.view(94, 64)
    layouts += [rows.t(), rows[::2], content[:9].expand(7, 9), rows[:, 32:], rows[:, 1:9]]
    layouts += [content.view(47, 2, 64).mT[:, 16:32], rows[:, :8].expand(3, 94, 8)]
    summarizer = Summarizer(digest=digest)
    submitted = []
    for tensor in layouts * 2:
        whole = torch.empty(0, dtype=dtype, device="cuda").set_(
            tensor.untyped_storage().cuda(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        submitted.append((tensor, summarizer.submit(whole)))
    if dtype.is_complex:
        # Without NaN, whose sign a device may or may not turn.
        finite = torch.view_as_complex(torch.randn(64, 2, dtype=torch.float64)).to(dtype)
        submitted.append((finite.conj().imag, summarizer.submit(finite.cuda().conj().imag)))
    backend = summarizer._backend_of(torch.device("cuda", 0))
    assert isinstance(backend, KernelBackend)
    in_words = dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert (dtype in backend._usual) == (in_words if digest else not dtype.is_complex)
    summarizer.wait()
    for tensor, result in submitted:
        assert (result.ready, result.error, result.note) == (True, None, None)
        cases.assert_summary(result.summary, tensor)
        assert result.digest == (digest_tensor(tensor) if digest else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_large(dtype: torch.dtype) -> None:
    on_host = (torch.randn(5_000_003) * 100).to(dtype)
    summarizer = Summarizer(digest=True)
    result = summarizer.submit(on_host.cuda())
    summarizer.wait()
    expected = Summarizer(digest=True).submit(on_host)
    assert result.digest == expected.digest
    assert (result.summary.min, result.summary.max) == (expected.summary.min, expected.summary.max)
    assert result.summary.zero_count == expected.summary.zero_count
    assert math.isclose(result.summary.norm, expected.summary.norm, rel_tol=1e-12)


def test_more_than_two_to_the_31_elements() -> None:
    tensor = torch.zeros(2**31 + 5, dtype=torch.int8, device="cuda")
    tensor[-1] = 7
    tensor[0] = -3
    summarizer = Summarizer(digest=True)
    result = summarizer.submit(tensor)
    summarizer.wait()
    assert (result.summary.min, result.summary.max) == (-3, 7)
    assert result.summary.zero_count == 2**31 + 3
    assert result.summary.norm == math.sqrt(58)


def test_nothing_synchronises(no_syncs: None) -> None:
    summarizer = Summarizer(digest=True)
    tensors = [torch.full((1000, n), float(n), device="cuda") for n in range(1, 40)]
    results = [summarizer.submit(tensor) for tensor in tensors]
    results += [summarizer.submit(tensor.t()[::2]) for tensor in tensors]
    results += [summarizer.submit(tensor.to(torch.float8_e4m3fn)) for tensor in tensors]
    results += [summarizer.submit(tensor[:1].expand(9, -1)) for tensor in tensors]
    summarizer.flush()
    summarizer.poll()
    summarizer.wait()
    assert all(result.ready and result.error is None for result in results)
    assert [result.summary.max for result in results[:39]] == [float(n) for n in range(1, 40)]


def test_torch_operations_do_not_synchronise(no_syncs: None) -> None:
    summarizer = Summarizer(digest=True, choose=with_torch_operations)
    results = [
        summarizer.submit(torch.full((1000, n), float(n), device="cuda")) for n in range(1, 9)
    ]
    summarizer.flush()
    torch.cuda.set_sync_debug_mode("default")
    summarizer.wait()
    assert [result.summary.max for result in results] == [float(n) for n in range(1, 9)]


def test_results_come_while_the_program_goes_on() -> None:
    summarizer = Summarizer()
    result = summarizer.submit(torch.ones(1000, device="cuda"))
    torch.cuda._sleep(200_000_000)  # behind the kernel: the read-back must not wait for it
    summarizer.flush()
    summarizer.poll()
    assert not result.ready or result.summary is not None
    summarizer.wait()
    assert result.summary.max == 1.0


def test_side_streams_are_waited_for() -> None:
    summarizer = Summarizer(digest=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for round_ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                tensor = torch.full((5000,), float(round_ * 4 + index), device="cuda")
                results.append(summarizer.submit(tensor))
    summarizer.flush()
    summarizer.wait()
    assert [result.summary.min for result in results] == [float(n) for n in range(80)]
    assert [result.summary.max for result in results] == [float(n) for n in range(80)]


def test_reused_memory_does_not_mix_tensors() -> None:
    summarizer = Summarizer(digest=True)
    addresses, results = set(), []
    for n in range(6000):  # several banks
        tensor = torch.full((4096,), float(n), device="cuda")
        addresses.add(tensor.data_ptr())
        results.append(summarizer.submit(tensor.t() if n % 2 else tensor))
        del tensor
        if n % 500 == 0:
            summarizer.poll()
    summarizer.wait()
    assert len(addresses) < 100, "the allocator reuses addresses"
    assert [result.summary.max for result in results] == [float(n) for n in range(6000)]
    assert len({result.digest for result in results}) == 6000


def test_in_place_after_submit_is_not_seen() -> None:
    summarizer = Summarizer()
    tensor = torch.ones(1_000_000, device="cuda")
    before = summarizer.submit(tensor)
    tensor.mul_(5)
    after = summarizer.submit(tensor)
    summarizer.wait()
    assert (before.summary.max, after.summary.max) == (1.0, 5.0)


def test_threads_and_a_writer() -> None:
    summarizer = Summarizer(digest=True)
    results: dict[int, object] = {}

    def work(part: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(part, 3000, 3):
                tensor = torch.full((777,), float(n), device="cuda")
                results[n] = summarizer.submit(tensor)

    in_threads(summarizer, work)
    assert [results[n].summary.max for n in range(3000)] == [float(n) for n in range(3000)]


def test_graph_capture_is_left_alone() -> None:
    summarizer = Summarizer()
    tensor = torch.ones(10, device="cuda")
    summarizer.submit(tensor)
    summarizer.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = tensor * 2
        result = summarizer.submit(doubled)
    assert result.error == "cuda tensor during graph capture: no summary"


def test_memory_of_tensors_is_not_kept() -> None:
    summarizer = Summarizer(digest=True)
    summarizer.submit(torch.ones(10, device="cuda"))
    summarizer.wait()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        summarizer.submit(torch.ones(1 << 20, device="cuda"))
    assert torch.cuda.memory_allocated() - before < 1 << 20
    summarizer.wait()


def test_convenience() -> None:
    assert summarize(torch.arange(4, device="cuda")) == summarize(torch.arange(4))


def test_a_freed_storage_is_not_read() -> None:
    """An address of nothing would end every use of the device."""
    tensor = torch.ones(1000, device="cuda")
    half = tensor[1::2]
    summarizer = Summarizer(digest=True)
    results = [summarizer.submit(tensor, 7) for _ in range(2)]
    tensor.untyped_storage().resize_(0)
    results += [summarizer.submit(tensor, 7), summarizer.submit(tensor), summarizer.submit(half)]
    summarizer.wait()
    torch.cuda.synchronize()
    freed = "tensor whose storage was freed: no summary"
    assert [result.error for result in results] == [None, None, freed, freed, freed]
