"""Sketches: equal on all paths, for all sizes; and what they see."""

import struct

import numpy as np
import pytest
import torch

from tensorprobe.records import TensorSummary
from tensorprobe.tensors import host, sketch, tally
from tensorprobe.tensors.backends import HostBackend, TorchBackend
from tensorprobe.tensors.summarizer import Summarizer, summarize
from tensors import cases

EDGES = (16, 256, 1024, 4096, 16384, 65536, 131072)
SIZES = [1, 2, 3, 5, *(edge + by for edge in EDGES for by in (-1, 0, 1)), 300_007]


def expected(numbers: np.ndarray) -> np.ndarray:
    """By the definition in the format's page, with numpy alone."""
    i = np.arange(numbers.size, dtype=object)
    bits = (i // 256 * 0x9E3779B1) % 2**32
    bits = ((bits ^ (bits // 2**15)) * 0x85EBCA77) % 2**32 // 2**24
    upper = np.isin((i // 16 % 16).astype(int), cases.SECOND_STEPS)
    bit = (i // 4 % 4).astype(int) + 4 * upper
    signs = 1.0 - 2.0 * (bits.astype(int) >> bit & 1)
    bucket = (i // 256 % 4 * 4 + i % 4).astype(int)
    return np.bincount(bucket, signs * numbers, minlength=16)


def sums(summary: TensorSummary | None) -> np.ndarray:
    assert summary is not None
    assert summary.sketch is not None
    return np.array(struct.unpack("<16d", summary.sketch))


def torch_operations(tensor: torch.Tensor) -> TensorSummary | None:
    def choose(device: torch.device, *, stats: bool, digest: bool) -> TorchBackend:
        return TorchBackend(device, stats=stats, digest=digest)

    summarizer = Summarizer(choose=choose)
    result = summarizer.submit(tensor)
    summarizer.wait()
    return result.summary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_of_every_size(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cases.ordinary(dtype, max(SIZES), seed=3)
    right = {n: expected(whole[:n].to(torch.float64).numpy()) for n in SIZES}
    for n in SIZES:
        np.testing.assert_allclose(sums(summarize(whole[:n])), right[n], atol=1e-9)
        np.testing.assert_allclose(sums(torch_operations(whole[:n])), right[n], atol=1e-9)
    monkeypatch.setattr(tally, "LIBRARY", None)
    for n in SIZES:
        np.testing.assert_allclose(sums(summarize(whole[:n])), right[n], atol=1e-9)


@pytest.mark.skipif(tally.LIBRARY is None, reason="the library is not built")
def test_of_every_processor_and_number_of_threads() -> None:
    assert tally.LIBRARY is not None
    numbers = np.random.default_rng(0).standard_normal(1_500_003).astype(np.float32)
    found = set()
    for level in (2, 1, 0):
        tally.LIBRARY.use(level)
        for threads in (1, 2, 3):
            reader = tally.Reader(
                tally.LIBRARY, "float32", numbers.nbytes, 1, stats=True, digest=False
            )
            outcome = reader.read(numbers.ctypes.data, threads)
            assert outcome is not None
            found.add(outcome[0].sketch)
    tally.LIBRARY.use(2)
    assert len(found) == 1
    exact = expected(numbers.astype(np.float64))
    np.testing.assert_allclose(np.frombuffer(found.pop()), exact, atol=1e-9)


def test_in_the_order_of_memory() -> None:
    """A transposed matrix has the sketch of the matrix; gaps between elements count for nothing."""
    x = torch.randn(70, 90)
    assert summarize(x.t()).sketch == summarize(x).sketch
    gaps = torch.randn(70, 300)[::2, 5:200]
    assert summarize(gaps).sketch == summarize(gaps.contiguous()).sketch
    assert summarize(gaps.t()).sketch == summarize(gaps.contiguous()).sketch
    wide = torch.randn(3, 70_000)[:, 3:69_000]  # more than a chunk, in pieces of odd lengths
    assert summarize(wide).sketch == summarize(wide.contiguous()).sketch
    assert summarize(x[0].expand(5, 90)).sketch == summarize(x[0].clone()).sketch


def test_what_is_not_finite_counts_as_zero() -> None:
    x = torch.randn(2000)
    x[7], x[900], x[1999] = float("nan"), float("inf"), float("-inf")
    hole = torch.where(torch.isfinite(x), x, 0.0)
    np.testing.assert_allclose(sums(summarize(x)), sums(summarize(hole)), atol=1e-12)
    assert summarize(torch.full((40,), 1e308, dtype=torch.float64)).sketch is None


def test_of_nothing() -> None:
    assert summarize(torch.empty(0, 3)).sketch == bytes(128)
    x = torch.tensor(2.5)
    assert sorted(map(abs, sums(summarize(x)))) == [0.0] * 15 + [2.5]


@pytest.mark.parametrize("width", [64, 256, 768, 1024, 4096])
def test_two_rows_that_are_swapped(width: int) -> None:
    """Of a hundred pairs of rows at least 98 are seen: neither min, max, mean nor norm see any."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(64, width, generator=generator)
    before, seen = summarize(x).sketch, 0
    for _ in range(100):
        one, two = torch.randperm(64, generator=generator)[:2].tolist()
        other = x.clone()
        other[[one, two]] = x[[two, one]]
        seen += sketch.difference(before, summarize(other).sketch) > 1e-6
    assert seen >= 98


@pytest.mark.parametrize("n", [2000, 5000, 100_000])
def test_how_near_the_estimate_is(n: int) -> None:
    """The difference of two tensors, from their sketches alone: half of it to twice of it."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    for scale in (1e-7, 1e-3, 1.0):
        for _ in range(30):
            error = torch.randn(n, generator=generator, dtype=torch.float64) * scale
            found = sketch.difference(summarize(x).sketch, summarize(x + error).sketch)
            assert 0.4 < found / error.norm().item() < 2.0


def test_what_is_no_sketch() -> None:
    assert sketch.check(bytes(128)) == bytes(128)
    for wrong in (b"", bytes(127), bytes(129), struct.pack("<16d", *[float("nan")] * 16)):
        with pytest.raises(ValueError, match="no sketch of a tensor"):
            sketch.check(wrong)


def test_host_backend_is_what_is_measured_here() -> None:
    assert isinstance(Summarizer()._host, HostBackend)
    assert host.CHUNK % sketch.ROUND == 0, "pieces begin with a round"
