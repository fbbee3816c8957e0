"""Sketches: right in every dtype and layout, alike everywhere, and what they see."""

import math
import struct

import numpy as np
import pytest
import torch

from tensorprobe.tensors import backends, host, memory, sketch, tally
from tensorprobe.tensors.backends import HostBackend, TorchBackend
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.summarizer import Summarizer, summarize
from tensorprobe.tensors.summary import TensorSummary
from tensors import cases

SIZES = (1, 3, 8, 16, 255, 256, 257, 1023, 1025, 4096, 5000, 66_000)
FIRST_WEIGHTS = [
    -1.4658117294311523,
    1.3475522994995117,
    1.8819150924682617,
    1.3250236511230469,
    1.1616458892822266,
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def weight(number: int) -> float:
    """From the definition in the format's page."""
    bits = (number * 0x9E3779B1 + 0x7F4A7C15) % 2**32
    bits = ((bits ^ (bits >> 15)) * 0x85EBCA77) % 2**32
    return (-1) ** (bits >> 31) * (1 + bits % 2**20 / 2**20)


def expected(numbers: np.ndarray) -> np.ndarray:
    """The sketch of float64 numbers; not by the code that is tested."""
    i = np.arange(len(numbers))
    tiles = np.array([weight(t) for t in range(len(numbers) // 256 + 1)])
    cells = np.array([weight(0x7DB06470 + cell) for cell in range(32)])
    weights = tiles[i // 256] * cells[i % 256 // 8] * np.where(i % 8 < 4, 1, -1)
    buckets = i // 256 % 4 * 4 + i % 4
    return np.array([math.fsum((numbers * weights)[buckets == b]) for b in range(16)])


def sums(summary: TensorSummary) -> np.ndarray:
    assert summary.sketch is not None
    return np.frombuffer(summary.sketch)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    one, two = summarize(a).sketch, summarize(b).sketch
    assert one is not None
    assert two is not None
    return sketch.difference(one, two)


def by_torch(tensor: torch.Tensor) -> TensorSummary:
    result, backend = Result(), TorchBackend(torch.device("cpu"), stats=True, digest=False)
    backend.submit(result, tensor, memory.NAMES[tensor.dtype])
    backend.flush()
    backend.land()
    assert result.summary is not None, result.error
    return result.summary


def test_weights() -> None:
    """A few as they are in every version: captures are compared with those of others."""
    first = [weight(number) for number in (0, 1, 2, 0x7DB06470, 0x7DB06471)]
    assert first == FIRST_WEIGHTS
    several = [abs(weight(number)) for number in range(1000)]
    assert len(set(several)) > 990
    assert 400 < sum(weight(number) < 0 for number in range(1000)) < 600


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_library_numpy_and_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cases.ordinary(dtype, max(SIZES), seed=3)
    right = {n: expected(whole[:n].to(torch.float64).numpy()) for n in SIZES}
    room = 1e-13 * whole.to(torch.float64).abs().sum().item() + 1e-12
    for n in SIZES:
        np.testing.assert_allclose(sums(summarize(whole[:n])), right[n], rtol=0, atol=room)
        np.testing.assert_allclose(sums(by_torch(whole[:n])), right[n], rtol=0, atol=room)
    monkeypatch.setattr(tally, "LIBRARY", None)
    for n in SIZES:
        np.testing.assert_allclose(sums(summarize(whole[:n])), right[n], rtol=0, atol=room)


@pytest.mark.skipif(tally.LIBRARY is None, reason="the library is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bool], ids=str)
def test_of_every_processor_and_number_of_threads(dtype: torch.dtype) -> None:
    assert tally.LIBRARY is not None
    numbers = cases.ordinary(dtype, 1_500_003, seed=1)
    found = set()
    for level in (2, 1, 0):
        tally.LIBRARY.use(level)
        for threads in (1, 2, 3):
            nbytes = numbers.numel() * numbers.element_size()
            name = memory.NAMES[dtype]
            reader = tally.Reader(tally.LIBRARY, name, nbytes, 1, stats=True, digest=False)
            outcome = reader.read(numbers.data_ptr(), threads)
            assert outcome is not None
            found.add(outcome[0].sketch)
    tally.LIBRARY.use(2)
    assert len(found) == 1


LAYOUTS = {
    "some of all heads": lambda x: x.view(2, 60, 12, 32).transpose(1, 2)[:, 2:9],
    "a slice": lambda x: x.view(360, 128)[5:300:2, 3:90],
    "every second": lambda x: x.view(360, 128)[:, ::2],
    "more than a chunk, in rows of odd lengths": lambda x: x.repeat(3, 4)[:, 3:46_000],
    "five dimensions": lambda x: x.view(4, 9, 10, 8, 16)[1:, ::2].permute(2, 0, 3, 1, 4),
}


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_of_elements_that_lie_otherwise(
    how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sketch is that of a contiguous tensor, with digests and without."""
    view = LAYOUTS[how](cases.ordinary(dtype, 46_080, seed=2))
    right = sums(summarize(view.contiguous()))
    room = 1e-12 * view.to(torch.float64).abs().sum().item()
    both = Summarizer(digest=True).submit(view)
    assert both.summary is not None
    assert both.digest == Summarizer(digest=True).submit(view.contiguous()).digest
    found = [summarize(view), both.summary, by_torch(view)]
    monkeypatch.setattr(tally, "LIBRARY", None)
    for summary in (*found, summarize(view)):
        np.testing.assert_allclose(sums(summary), right, rtol=0, atol=room)


def test_of_elements_that_fill_their_memory_in_another_order() -> None:
    """They have the sketch of what they are a view of: both are one content."""
    x = torch.randn(30, 40)
    assert summarize(x.t()) == summarize(x)
    images = torch.randn(2, 5, 8, 9).contiguous(memory_format=torch.channels_last)
    assert summarize(images) == summarize(images.permute(0, 2, 3, 1))
    assert by_torch(images) == by_torch(images.permute(0, 2, 3, 1))
    heads = torch.randn(2, 6, 4, 16).transpose(1, 2)
    digested = Summarizer(digest=True).submit(heads).summary
    assert digested == summarize(heads) == summarize(heads.transpose(1, 2))


def test_of_elements_that_are_read_once_for_many() -> None:
    assert summarize(torch.randn(40).expand(5, 40)).sketch is None


def test_what_is_not_finite_counts_as_zero() -> None:
    x = torch.randn(2000)
    x[7], x[900], x[1999] = float("nan"), float("inf"), float("-inf")
    hole = torch.where(torch.isfinite(x), x, 0.0)
    np.testing.assert_allclose(sums(summarize(x)), sums(summarize(hole)), atol=1e-12)
    assert summarize(torch.full((40,), 1e308, dtype=torch.float64)).sketch is None
    large = torch.full((999,), torch.finfo(torch.float32).max)
    assert np.isfinite(sums(summarize(large))).all()


def test_of_nothing_and_of_one() -> None:
    assert summarize(torch.empty(0, 3)).sketch == bytes(128)
    (only,) = sums(summarize(torch.tensor(2.5)))[:1]
    assert only == 2.5 * weight(0) * weight(0x7DB06470)


def test_of_complex_numbers() -> None:
    x = torch.randn(700, dtype=torch.complex64)
    parts = torch.view_as_real(x).reshape(-1)
    np.testing.assert_allclose(sums(summarize(x)), sums(summarize(parts)), atol=1e-10)
    assert apart(x, x.conj().resolve_conj()) > 1


def reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def shifted_by_an_element(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).roll(1).view(x.shape)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().view(x.shape)


def pairs_swapped(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2).flip(1).view(x.shape)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(len(x), 2, -1).transpose(1, 2).reshape(x.shape)


MOVES = (reversed_rows, shifted, shifted_by_an_element, transposed, pairs_swapped, interleaved)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("rows", [2, 4, 8, 64])
@pytest.mark.parametrize("width", [2, 4, 16, 32, 64, 256, 1024])
def test_numbers_that_are_moved(move, rows: int, width: int) -> None:
    """Neither min, max, mean nor norm see any of it; small tensors as well as large ones."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width))
    other = move(x)
    moved = (x - other).norm().item()
    assert apart(x, other) >= 0.05 * moved


@pytest.mark.parametrize("width", [1, 4, 16, 64, 256, 768, 1024, 4096])
def test_two_rows_that_are_swapped(width: int) -> None:
    """Each of a thousand pairs of rows is seen."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(64, width, generator=generator)
    least = math.inf
    for _ in range(1000 if width < 256 else 100):
        one, two = torch.randperm(64, generator=generator)[:2].tolist()
        other = x.clone()
        other[[one, two]] = x[[two, one]]
        least = min(least, apart(x, other) / (x - other).norm().item())
    assert least > 1e-4


@pytest.mark.parametrize("n", [300, 2000, 5000, 100_000])
def test_how_near_the_estimate_is(n: int) -> None:
    """The difference of two tensors, from their sketches alone: a third of it to twice of it; of
    few numbers, which some of the sums have none of, to a fifth."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    for scale in (1e-7, 1e-3, 1.0):
        for _ in range(30):
            error = torch.randn(n, generator=generator, dtype=torch.float64) * scale
            assert (0.33 if n > 1000 else 0.2) < apart(x, x + error) / error.norm().item() < 2.0


def test_a_device_whose_sketches_would_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.torch_ops, "_weights", lambda tile: tile.to(torch.float64))
    assert by_torch(torch.randn(600)).sketch is None


def test_what_is_no_sketch() -> None:
    assert sketch.check(bytes(128)) == bytes(128)
    for wrong in (b"", bytes(127), bytes(129), struct.pack("<16d", *[float("nan")] * 16)):
        with pytest.raises(ValueError, match="no sketch of a tensor"):
            sketch.check(wrong)


def test_host_backend_is_what_is_measured_here() -> None:
    assert isinstance(Summarizer()._host, HostBackend)
    assert host.CHUNK % sketch.ROUND == 0, "pieces begin with a round"
