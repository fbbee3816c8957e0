"""A shard opens in the safetensors library at every moment, and equal bytes are stored once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tensorprobe.store import shard as shards
from tensorprobe.store.shard import FREE, Shard, Shards
from tensorprobe.store.step_files import header_problem


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def opened(path: Path) -> dict[str, bytes]:
    with safe_open(path, "numpy") as file:
        return {key: file.get_tensor(key).tobytes() for key in file.keys() if key != FREE}  # noqa: SIM118 not a dict


def test_it_has_its_name_when_it_can_be_opened(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while a shard is made leaves none that the library refuses."""
    (tmp_path / "t.safetensors.new").write_bytes(b"of a run that was killed")
    seen: list[list[str]] = []
    for name in ("open", "ftruncate", "pwrite", "rename"):
        original = getattr(os, name)

        def watched(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            seen.append([file for file in os.listdir(tmp_path) if file.endswith(".safetensors")])
            return _original(*args, **kwargs)

        monkeypatch.setattr(os, name, watched)
    shard = Shard("t.safetensors", folder, capacity=1000)
    assert seen == [[]] * 4
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["t.safetensors"]
    assert opened(tmp_path / "t.safetensors") == {}
    shard.close()
    with pytest.raises(FileExistsError):
        Shard("t.safetensors", folder)


def test_it_is_not_made_through_a_link(tmp_path: Path, folder: int) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"of someone else")
    (tmp_path / "t.safetensors.new").symlink_to(other)
    Shard("t.safetensors", folder, capacity=1000).close()
    assert other.read_bytes() == b"of someone else"
    assert not (tmp_path / "t.safetensors").is_symlink()


def test_valid_at_every_moment(tmp_path: Path, folder: int) -> None:
    path = tmp_path / "t.safetensors"
    shard = Shard("t.safetensors", folder, capacity=1000)
    assert opened(path) == {}
    expected = {}
    for n, nbytes in enumerate([4, 0, 1, 300, 7, 688]):  # the last one fills it to the brim
        data = np.full(nbytes, n, np.uint8)
        assert shard.has_room(f"k{n}", nbytes)
        shard.append(f"k{n}", "uint8", (nbytes,), data)
        assert opened(path) == expected
        shard.flush()
        expected[f"k{n}"] = data.tobytes()
        assert opened(path) == expected
    assert not shard.has_room("more", 1)
    shard.finish()
    shard.finish()  # again, as when no next shard could be begun
    shard.flush()
    shard.close()
    assert opened(path) == expected
    assert header_problem(path) is None


def test_close_gives_back_what_is_free(tmp_path: Path, folder: int) -> None:
    shard = Shard("t.safetensors", folder)
    shard.append('été "+"\n', "uint8", (3,), np.arange(3, dtype=np.uint8))
    path = tmp_path / "t.safetensors"
    assert path.stat().st_size > 1 << 30
    assert path.stat().st_blocks * 512 < 1 << 20, "sparse: it takes no space"
    shard.finish()
    shard.close()
    assert path.stat().st_size == 8 + shards.HEADER_NBYTES + 3
    assert opened(path) == {'été "+"\n': b"\0\1\2"}


def test_a_full_header_begins_the_next_shard(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "HEADER_NBYTES", 4096)
    out = Shards(folder)
    blobs = [out.append(f"key{n}", "uint8", (1,), np.array([n], np.uint8)) for n in range(100)]
    out.close()
    assert blobs[-1][0] > 0
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        found |= opened(path)
    assert found == {f"key{n}": bytes([n]) for n in range(100)}


def test_a_full_shard_begins_the_next_and_a_large_tensor_has_its_own(
    tmp_path: Path, folder: int
) -> None:
    out = Shards(folder, shard_nbytes=1000)
    numbers = [
        out.append(f"k{n}", "uint8", (size,), np.full(size, n, np.uint8))[0]
        for n, size in enumerate([600, 400, 1, 5000, 10])
    ]
    out.close()
    assert numbers == [0, 0, 1, 2, 3]
    assert len(opened(tmp_path / "tensors-2.safetensors")["k3"]) == 5000


def test_equal_bytes_are_found_and_near_equal_ones_are_not(folder: int) -> None:
    out = Shards(folder)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 3 << 20, np.uint8)
    blob = out.append("a", "uint8", data.shape, data)
    assert out.find(data.copy()) == blob
    other = data.copy()
    other[1 << 20] ^= 1  # none of the places that are looked at first
    assert out.find(other) is None
    second = out.append("b", "uint8", other.shape, other)
    assert (out.find(data), out.find(other)) == (blob, second)
    out.close()


def test_equal_bytes_are_found_in_an_earlier_shard(folder: int) -> None:
    out = Shards(folder, first=5, shard_nbytes=1000)
    places = [out.append(f"k{n}", "uint8", (900,), np.full(900, n, np.uint8)) for n in range(3)]
    assert [place[0] for place in places] == [5, 6, 7]
    assert [out.find(np.full(900, n, np.uint8)) for n in range(4)] == [*places, None]
    out.close()


def test_blocks_of_zeros_take_no_space(tmp_path: Path, folder: int) -> None:
    rows = np.zeros((2000, 512), np.float32)
    rows[[3, 4, 1000, 1999]] = np.arange(512)
    contents = {
        "rows": rows,
        "zeros": np.zeros(100_003, np.float32),
        "ends": np.r_[np.float32(1), np.zeros(100_000, np.float32), np.float32(-0.0)],
        "unaligned": np.zeros(400_001, np.uint8)[1:],
        "dense": np.ones(100_001, np.float32),
    }
    shard = Shard("tensors-0.safetensors", folder, capacity=1 << 25)
    for name, numbers in contents.items():
        shard.append(name, str(numbers.dtype), numbers.shape, numbers.reshape(-1).view(np.uint8))
    shard.finish()
    shard.close()
    path = tmp_path / "tensors-0.safetensors"
    with safe_open(path, "np") as opened:
        for name, numbers in contents.items():
            assert opened.get_tensor(name).tobytes() == numbers.tobytes()
    kept = contents["unaligned"].nbytes + contents["dense"].nbytes
    assert path.stat().st_blocks * 512 < kept + shards.HEADER_NBYTES + 20 * 4096


def test_a_key_that_is_taken_gets_a_number(tmp_path: Path, folder: int) -> None:
    shard = Shard("t.safetensors", folder)
    for n in range(3):
        shard.append("k", "uint8", (1,), np.array([n], np.uint8))
    shard.finish()
    shard.close()
    assert opened(tmp_path / "t.safetensors") == {"k": b"\0", "k#2": b"\1", "k#3": b"\2"}


def test_odd_entries_leave_the_file_valid(tmp_path: Path, folder: int) -> None:
    out = Shards(folder)
    one = np.ones(1, np.uint8)
    out.append("caf\udce9", "uint8", (1,), one)  # not UTF-8
    out.append("k" * 100_000, "uint8", (1,), one)
    out.append("deep", "float32", (1,) * 64, np.zeros(4, np.uint8))
    out.append("wrong", "float32", (1000,), one)  # a shape that is not that of the bytes
    out.append("unknown", "float8_e4m3fnuz", (1,), one)
    out.append("empty", "complex128", (0, 2), np.empty(0, np.uint8))
    with pytest.raises(BufferError):
        out.append("strided", "uint8", (2,), np.ones(4, np.uint8)[::2])
    out.close()
    found = opened(tmp_path / "tensors-0.safetensors")
    assert sorted(map(len, found.values())) == [0, 1, 1, 1, 1, 4]
    assert "caf\\udce9" in found
