"""A packed content comes back bit for bit, whole and in pieces, and damage is told."""

from __future__ import annotations

import itertools
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.errors import UnreadableCapture
from tensorprobe.store.beside import Beside
from tensorprobe.tensors.arrays import read_array
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.dtypes import numpy_dtype, part_of
from tensorprobe.tensors.packing import BLOCK, LEAST_NBYTES, PackedFile, pack
from tensorprobe.tensors.pieces import open_pieces
from tensorprobe.tensors.stored_pairs import measure_stored

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128")
OTHERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2")
OFFSET = 13  # contents follow each other without holes, so they begin anywhere


def numbers(dtype: str, n: int, kind: str = "normal") -> Bytes:
    """The bytes of n numbers."""
    rng = np.random.default_rng(n)
    part = part_of(numpy_dtype(dtype))
    n = n * numpy_dtype(dtype).itemsize // part.itemsize
    if kind == "noise":
        return rng.integers(0, 256, n * part.itemsize, np.uint8)
    if dtype == "bool":
        return rng.integers(0, 2, n, np.uint8)
    if kind == "zeros":
        return np.zeros(n * part.itemsize, np.uint8)
    values = rng.standard_normal(n) * 10
    if kind == "odd":
        values[::7] = np.nan
        values[1::7] = np.inf
        values[2::7] = -0.0
    with np.errstate(all="ignore"):
        found: Bytes = values.astype(part).view(np.uint8)
    return found


def itemsize_of_part(dtype: str) -> int:
    return part_of(numpy_dtype(dtype)).itemsize


def stored(path: Path, packed: Bytes, nbytes: int) -> Blob:
    path.write_bytes(b"x" * OFFSET + packed.tobytes() + b"y" * 20)
    return Blob(path, OFFSET, nbytes, "packed", packed_nbytes=packed.nbytes)


def decoded(packed: bytes, nbytes: int, itemsize: int) -> bytes:
    """As docs/capture-format.md says it."""
    n = nbytes // itemsize
    blocks = -(-n // BLOCK)
    at = 4 * itemsize * blocks
    lengths = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, at, 4)]
    content = bytearray()
    for i in range(blocks):
        count = min(BLOCK, n - i * BLOCK)
        planes = []
        for length in lengths[i * itemsize : (i + 1) * itemsize]:
            plane = packed[at : at + length]
            planes.append(plane if length == count else zlib.decompressobj(-15).decompress(plane))
            at += length
        content += bytes(itertools.chain.from_iterable(zip(*planes, strict=True)))
    assert at == len(packed)
    return bytes(content)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*((dtype, "normal") for dtype in FLOATS + OTHERS), *((dtype, "odd") for dtype in FLOATS)],
)
def test_every_dtype_comes_back(tmp_path: Path, dtype: str, kind: str) -> None:
    n = 2 * BLOCK + 3
    data = numbers(dtype, n, kind)
    packed = pack(data, itemsize_of_part(dtype))
    if dtype in FLOATS or dtype == "bool":
        assert packed is not None
        assert packed.nbytes < 0.95 * data.nbytes
    if packed is None:
        return
    assert decoded(packed.tobytes(), data.nbytes, itemsize_of_part(dtype)) == data.tobytes()
    blob = stored(tmp_path / "t", packed, data.nbytes)
    array = read_array("a", dtype, (n,), blob)
    assert array.dtype == numpy_dtype(dtype)
    assert array.tobytes() == data.tobytes()
    assert not array.flags.writeable
    pieces = open_pieces("a", dtype, (n,), blob)
    expected = data.view(pieces.dtype)
    assert pieces.size == expected.size
    for start in range(0, pieces.size, BLOCK):
        stop = min(start + BLOCK, pieces.size)
        assert pieces.piece(start, stop).tobytes() == expected[start:stop].tobytes()
    pieces.close()


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1])
def test_lengths_around_a_block(n: int) -> None:
    data = numbers("float32", n)
    packed = pack(data, 4)
    assert packed is not None
    assert decoded(packed.tobytes(), data.nbytes, 4) == data.tobytes()


@settings(deadline=None, max_examples=30)
@given(
    dtype=st.sampled_from(["bfloat16", "float32", "complex64", "bool"]),
    n=st.integers(LEAST_NBYTES, 3 * BLOCK),
    ends=st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, n: int, ends: list[float]
) -> None:
    data = numbers(dtype, n)
    packed = pack(data, itemsize_of_part(dtype))
    assert packed is not None
    blob = stored(tmp_path_factory.mktemp("p") / "t", packed, data.nbytes)
    pieces = open_pieces("a", dtype, (n,), blob)
    expected = data.view(pieces.dtype)
    places = [int(end * pieces.size) for end in ends]
    for start, stop in itertools.pairwise(places):
        if start < stop:
            assert pieces.piece(start, stop).tobytes() == expected[start:stop].tobytes()
    pieces.close()


def test_what_gains_nothing_is_left_as_it_is() -> None:
    assert pack(numbers("float32", LEAST_NBYTES // 4 - 1), 4) is None  # too small
    for dtype in ("float32", "float16", "uint8"):
        assert pack(numbers(dtype, BLOCK * 5, "noise"), numpy_dtype(dtype).itemsize) is None
    assert pack(numbers("float32", BLOCK)[:-1], 4) is None  # no whole number of them


def test_each_plane_is_coded_or_left_by_itself() -> None:
    kinds = ("zeros", "normal", "noise", "normal")
    data = np.concatenate([numbers("float32", BLOCK, kind) for kind in kinds])
    packed = pack(np.concatenate([data, numbers("float32", 17)]), 4)
    assert packed is not None
    lengths = packed[: 4 * 4 * 5].view("<u4").reshape(5, 4)
    assert (lengths[0] < 500).all()  # runs
    assert (lengths[[1, 3], :3] == BLOCK).all()
    assert (lengths[[1, 3], 3] < BLOCK / 2).all()
    assert (lengths[2] == BLOCK).all()
    assert (lengths[4] <= 17).all()
    content = decoded(packed.tobytes(), data.nbytes + 17 * 4, 4)
    assert content[: data.nbytes] == data.tobytes()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.999])
def test_numbers_many_of_which_are_zeros_gain_in_every_byte(share: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4 * BLOCK).astype(np.float32)
    values[rng.random(values.size) < share] = 0
    data = values.view(np.uint8)
    packed = pack(data, 4)
    assert packed is not None
    assert packed.nbytes < (1.1 - share) * data.nbytes
    assert decoded(packed.tobytes(), data.nbytes, 4) == data.tobytes()


def test_threads_give_the_same_bytes() -> None:
    data = numbers("bfloat16", 70 * BLOCK + 5)
    beside: Beside[Any, list[bytes]] = Beside(3)
    here, there = pack(data, 2), pack(data, 2, beside.each_of)
    beside.stop()
    assert here is not None
    assert there is not None
    assert np.array_equal(here, there)


@pytest.mark.parametrize("what", ["cut", "length", "code", "short", "place"])
def test_damage_is_told(tmp_path: Path, what: str) -> None:
    n = 2 * BLOCK
    data = numbers("float32", n)
    packed = pack(data, 4)
    assert packed is not None
    path = tmp_path / "t"
    if what == "length":
        packed[12] ^= 1
    if what == "short":  # the first coded plane takes the first byte of the next
        packed[12:16].view("<u4")[0] += 1
        packed[16:20].view("<u4")[0] -= 1
    if what == "code":
        packed[32 + 3 * BLOCK :][:200] = 255
    blob = stored(path, packed, data.nbytes)
    if what == "cut":
        path.write_bytes(path.read_bytes()[: packed.nbytes // 2])
    if what == "place":
        blob = Blob(path, OFFSET + 4, data.nbytes, "packed", packed_nbytes=packed.nbytes)
    with pytest.raises(UnreadableCapture, match=r"^a: .*t"):
        read_array("a", "float32", (n,), blob)
    side = ("a", "float32", (n,), blob)
    told = measure_stored(side, side)
    assert str(told).startswith(f"ValueError: {path}")


@pytest.mark.parametrize("n", [10**10, 10**12, 10**15, 2**62, 2**70])
def test_a_size_that_cannot_be_is_told_at_once(tmp_path: Path, n: int) -> None:
    packed = pack(numbers("float32", BLOCK), 4)
    assert packed is not None
    blob = stored(tmp_path / "t", packed, 4 * n)
    with pytest.raises(UnreadableCapture, match="takes more than"):
        read_array("a", "float32", (n,), blob)
    side = ("a", "float32", (n,), blob)
    assert "takes more than" in str(measure_stored(side, side))


def test_a_file_is_closed_when_it_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="do not fill"):
        PackedFile(path, 0, 100, 4 * BLOCK, 4)
    opened = {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
    assert str(path.resolve()) not in opened
