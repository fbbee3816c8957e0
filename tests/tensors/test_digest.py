"""The digest: equal for equal bits wherever and however they lie, different for any other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.tensors.digest import (
    CHUNK_WORDS,
    Digester,
    digest_array,
    digest_bytes,
    digest_tensor,
)
from tensors import cases
from tensors.test_statistics import PATHS, summarizer_for

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def by_definition(data: bytes) -> str:
    """The formula of the module's docstring in Python integers."""
    mask, gold = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def splitmix(i: int) -> int:
        z = ((i + 1) * gold) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def fmix(z: int) -> int:
        z &= mask
        z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & mask
        z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & mask
        return z ^ (z >> 33)

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = 0
    for chunk, start in enumerate(range(0, len(words), 8192)):
        part = words[start : start + 8192]
        p = sum((q ^ (q >> 29)) * (splitmix(i) | 1) for i, q in enumerate(part))
        total += fmix(p + (chunk + 1) * gold)
    return f"{fmix(total + len(data) * gold):016x}"


def test_known_values() -> None:
    # Captures are compared across versions: these must never change.
    assert digest_bytes(b"") == "0000000000000000"
    assert digest_bytes(b"tensorprobe") == by_definition(b"tensorprobe")
    assert digest_tensor(torch.arange(5.0)) == "9eefc6a4b275fb2b"


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 8 * CHUNK_WORDS - 1, 8 * CHUNK_WORDS, 150_003])
def test_is_its_definition(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    assert digest_array(data) == by_definition(data.tobytes())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stats", [True, False], ids=["with statistics", "alone"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.title)
def test_equal_bits_in_any_layout(path: str, stats: bool, dtype: torch.dtype) -> None:
    summarizer = summarizer_for(path, stats=stats, digest=True)
    submitted = [(n, t, summarizer.submit(t)) for n, t in cases.all_cases(dtype)]
    summarizer.wait()
    for name, tensor, result in submitted:
        raw = tensor.contiguous().reshape(-1).clone().view(torch.uint8).numpy()
        assert result.digest == digest_array(raw), name


@pytest.mark.parametrize("path", PATHS)
def test_large_tensors_of_many_chunks(path: str) -> None:
    summarizer = summarizer_for(path, digest=True)
    tensor = torch.randn(300_001)
    results = [summarizer.submit(t) for t in (tensor, tensor[1:], tensor.bfloat16())]
    summarizer.wait()
    assert results[0].digest == digest_array(tensor.numpy())
    assert results[1].digest == digest_array(tensor.numpy()[1:])
    assert results[2].digest == digest_array(tensor.bfloat16().view(torch.int16).numpy())


def test_expanded_tensor_is_digested_piece_by_piece() -> None:
    tensor = torch.arange(12.0).view(3, 1, 4).expand(3, 9000, 4)
    assert digest_tensor(tensor) == digest_array(tensor.contiguous().numpy())


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.int32, torch.complex64], ids=cases.title)
def test_sees_what_sums_and_norms_do_not(dtype: torch.dtype) -> None:
    numbers = torch.arange(1.0, 65.0, dtype=torch.float64).view(8, 8)
    square = (numbers * (1 + 1j) if dtype.is_complex else numbers).to(dtype)
    flipped = square.clone()
    flipped.view(-1).view(torch.uint8)[37] ^= 4
    swapped = square.clone()
    swapped[2, 3], swapped[5, 1] = square[5, 1].clone(), square[2, 3].clone()
    pairs = square.clone()
    pairs[0, :2] *= -1
    others = [
        -square,
        square.t(),
        flipped,
        swapped,
        pairs,
        square.flip(0),
        square.roll(1),
        square[[1, 0, 2, 3, 4, 5, 6, 7]],
        torch.cat([square, torch.zeros(1, 8, dtype=dtype)]),
    ]
    digests = {digest_tensor(other) for other in [square, *others]}
    assert len(digests) == len(others) + 1


def test_negative_zero_and_nan_payloads_are_other_bits() -> None:
    zeros = torch.zeros(3)
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest_tensor(zeros) != digest_tensor(-zeros)
    assert digest_tensor(nan[:1]) != digest_tensor(nan[1:])


def test_conjugate_and_negative_views_count_as_what_they_show() -> None:
    tensor = torch.randn(4, 5, dtype=torch.complex64)
    assert digest_tensor(tensor.conj()) == digest_tensor(tensor.conj().resolve_conj())
    assert digest_tensor(tensor.conj()) != digest_tensor(tensor)
    imag = tensor.conj().imag
    assert imag.is_neg()
    assert digest_tensor(imag) == digest_tensor(imag.clone())


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_flipped_bit_shows(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    other = bytearray(content)
    other[bit // 8] ^= 1 << bit % 8
    assert digest_bytes(content) == by_definition(content)
    assert digest_bytes(content) != digest_bytes(other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=60), st.data())
def test_position_counts(numbers: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(numbers) - 2))
    second = data.draw(st.integers(first + 1, len(numbers) - 1))
    swapped = list(numbers)
    swapped[first], swapped[second] = numbers[second], numbers[first]
    same = digest_array(np.array(numbers, "<i4")) == digest_array(np.array(swapped, "<i4"))
    assert same == (numbers == swapped)


@settings(max_examples=60, deadline=None)
@given(st.permutations([0, 1, 2]), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_layout_does_not_count(order: list[int], step: int, start: int, expand: bool) -> None:
    tensor = torch.arange(5 * 6 * 7, dtype=torch.float32).view(5, 6, 7)[start::step].permute(order)
    if expand:
        tensor = tensor.unsqueeze(1).expand(-1, 3, -1, -1)
    assert digest_tensor(tensor) == digest_array(tensor.contiguous().numpy())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 100_000), max_size=6))
def test_pieces_do_not_count(sizes: list[int]) -> None:
    data = np.arange(sum(sizes), dtype=np.uint32).view(np.uint8)[: sum(sizes)]
    digester = Digester()
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        digester.update(data[end - size : end])
    assert digester.hexdigest() == digest_bytes(data)
