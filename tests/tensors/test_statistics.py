"""Statistics of every dtype, content and layout against exact arithmetic, on both CPU paths."""

import math

import pytest
import torch

from tensorprobe.records import TensorSummary
from tensorprobe.tensors import host
from tensorprobe.tensors.backends import HostBackend, TorchBackend
from tensorprobe.tensors.summarizer import Summarizer
from tensors import cases

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
PATHS = {"host": HostBackend, "torch": TorchBackend}


def summarizer_for(
    path: str, *, stats: bool = True, digest: bool = False, digest_some: bool = False
) -> Summarizer:
    def choose(device: torch.device, *, stats: bool, digest: bool) -> HostBackend | TorchBackend:
        if path == "host":
            return HostBackend(stats=stats, digest=digest)
        return TorchBackend(device, stats=stats, digest=digest)

    return Summarizer(stats=stats, digest=digest, digest_some=digest_some, choose=choose)


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
    numbers = cases.ordinary(torch.float32, 6 * host.CHUNK + 1234)
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
def test_a_digest_beside_it_changes_no_bit(dtype: torch.dtype) -> None:
    count = 6 * host.CHUNK + 1234
    for tensor in (cases.ordinary(dtype, count), cases.random_bits(dtype, count)):
        both = Summarizer(digest=True).submit(tensor)
        assert both.summary == Summarizer().submit(tensor).summary
