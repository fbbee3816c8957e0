"""Statistics of every dtype, content and layout against exact arithmetic, on both CPU paths."""

import math
import os
import threading
import warnings

import numpy as np
import pytest
import torch

from numerics import cases
from tensorprobe.numerics import host, host_threads
from tensorprobe.numerics.backends import HostBackend, TorchBackend
from tensorprobe.numerics.summary import Summarizer
from tensorprobe.records import TensorSummary

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
PATHS = {"host": HostBackend, "torch": TorchBackend}


def summarizer_for(path: str, *, stats: bool = True, digest: bool = False) -> Summarizer:
    def choose(device: torch.device, *, stats: bool, digest: bool) -> HostBackend | TorchBackend:
        if path == "host":
            return HostBackend(stats=stats, digest=digest)
        return TorchBackend(device, stats=stats, digest=digest)

    return Summarizer(stats=stats, digest=digest, choose=choose)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_equal_exact_arithmetic(path: str, dtype: torch.dtype) -> None:
    summarizer = summarizer_for(path)
    submitted = [(n, t, summarizer.submit(t)) for n, t in cases.all_cases(dtype)]
    summarizer.wait()
    for name, tensor, result in submitted:
        assert result.ready, name
        assert result.error is None, name
        cases.assert_summary(result.summary, tensor)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_signaling_nan_hides_no_bound(path: str, dtype: torch.dtype) -> None:
    """One as it lies in memory that nobody has written to: its first mantissa bit is not set."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = cases.ordinary(dtype, 403)
    infinity = torch.tensor(math.inf, dtype=dtype).view(whole)
    tensor.view(whole)[[7, 150, 200, 401]] = infinity + 1
    summarizer = summarizer_for(path)
    result = summarizer.submit(tensor)
    summarizer.wait()
    cases.assert_summary(result.summary, tensor)


def large(dtype: torch.dtype) -> torch.Tensor:
    """Several blocks, rows that are not whole, zeros; a few values far larger than the others."""
    numbers = cases.ordinary(torch.float32, 3 * host_threads.EACH + 1234)
    numbers[::97] = 0
    numbers[5::10007] *= 1e4
    return numbers.to(dtype)


def assert_large_summary(actual: TensorSummary | None, tensor: torch.Tensor) -> None:
    """As for the small ones, by correctly rounded sums: fractions would take minutes."""
    assert actual is not None
    numbers = tensor.double().flatten()
    finite = numbers[numbers.isfinite()]
    values = finite.tolist()
    norm = math.sqrt(math.fsum((finite * finite).tolist()))
    assert actual.min == numbers[~numbers.isnan()].min()
    assert actual.max == numbers[~numbers.isnan()].max()
    assert actual.nan_count == numbers.isnan().sum()
    assert actual.inf_count == numbers.isinf().sum()
    assert actual.zero_count == (numbers == 0).sum()
    cases.assert_close(actual.norm, norm, 1e-13)
    mean = math.fsum(values) / len(values)
    cases.assert_close(actual.mean, mean, 1e-13, norm / math.sqrt(len(values)))


LARGE_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", LARGE_DTYPES, ids=cases.title)
def test_large_tensors_equal_exact_arithmetic(dtype: torch.dtype) -> None:
    numbers = large(dtype)
    spoilt = numbers.clone()
    spoilt[[7, 70_000, -1]] = torch.tensor([torch.inf, torch.nan, -torch.inf], dtype=dtype)
    wide = numbers[: numbers.numel() // 64 * 64].view(64, -1)
    tensors = (numbers, spoilt, numbers.abs() + 1, wide.t(), wide.unsqueeze(1).expand(64, 3, -1))
    for tensor in tensors:
        assert_large_summary(Summarizer().submit(tensor).summary, tensor)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    count = 3 * host_threads.EACH + 1234
    before = torch.get_num_threads()
    try:
        for tensor in (cases.ordinary(dtype, count), cases.random_bits(dtype, count)):
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                alone = Summarizer().submit(tensor).summary
                both = Summarizer(digest=True).submit(tensor)
                assert both.summary == alone
                found.append((alone, both.digest))
            assert found == found[:1] * 4
    finally:
        torch.set_num_threads(before)


def test_several_threads_divide_a_large_array_among_them() -> None:
    seen: set[int] = set()

    class Watched(np.ndarray):
        def item(self, *place: int) -> object:
            seen.add(threading.get_ident())
            return super().item(*place)

    numbers = np.arange(4 * host_threads.EACH, dtype=np.float32).view(Watched)
    assert host_threads.summarize_array(numbers, "float32", threads=4) == host.summarize_array(
        np.asarray(numbers), "float32"
    )
    assert len(seen) > 1


def test_a_forked_process_starts_threads_of_its_own() -> None:
    numbers = large(torch.float32).numpy()
    host_threads.summarize_array(numbers, "float32", threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads while forking: the point
        child = os.fork()
    if child == 0:
        done = host_threads.summarize_array(numbers, "float32", threads=2).zero_count
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
