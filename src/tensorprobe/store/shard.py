"""Tensor shards: safetensors files that grow, and that the library can open at every moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tensorprobe.store.lines import speakable
from tensorprobe.store.step_files import shard_name

# torch's dtype names to those of safetensors, and their bytes; others are stored as plain bytes.
SAFETENSORS_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
FREE = "__free__"  # the key of what is not used yet
HEADER_NBYTES = 256 << 10  # room for some 2,300 tensors
SHARD_NBYTES = 1 << 30
_SAMPLE_NBYTES = 4096
_DEDUP_NBYTES = 512  # below this, writing again costs no more than looking
_COMPARE_NBYTES = 1 << 20
_BLOCK_NBYTES = 4096  # what file systems give out
_MAX_KEY = 1000

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Place = tuple[int, int, int]  # the number of a shard, an offset in its file, a count of bytes


class Shard:
    """One safetensors file being filled.

    The file has its full size from the start (sparse: it takes no space) and the last entry of the
    header claims all that is still free, so data and header agree at any moment. `append` fills
    free space; `flush` lets the header name it, in one write of the header's changed end.
    """

    def __init__(self, path: str, dir_fd: int, capacity: int = SHARD_NBYTES) -> None:
        self.capacity = capacity
        self.used = 0
        self._start = 8 + HEADER_NBYTES
        self._keys: set[str] = set()
        self._new: list[bytes] = []
        self._new_nbytes = 0
        if path in os.listdir(dir_fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        unborn = f"{path}.new"  # until the library could open it
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unborn, dir_fd=dir_fd)  # of a run that was killed; a link is not followed
        self._fd = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=dir_fd)
        opening = b'{"__metadata__":{"format":"pt","written_by":"tensorprobe"}'
        head = HEADER_NBYTES.to_bytes(8, "little") + opening + self._end()
        try:
            os.ftruncate(self._fd, self._start + capacity)
            _write_all(self._fd, head.ljust(self._start), 0)
            os.rename(unborn, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError:
            os.close(self._fd)
            os.unlink(unborn, dir_fd=dir_fd)
            raise
        self._tail = 8 + len(opening)  # where the header's last entry, the free one, begins
        self._tail_nbytes = len(self._end())

    def has_room(self, key: str, nbytes: int) -> bool:
        entry = 6 * min(len(key), _MAX_KEY) + 2000  # escaped key, 64 dimensions, free entry
        header = self._tail + self._new_nbytes + entry
        return self.used + nbytes <= self.capacity and header <= self._start

    def append(self, key: str, dtype: str, shape: Sequence[int], data: Bytes) -> int:
        """Write the bytes and return where they are in the file."""
        begin, end = self.used, self.used + data.nbytes
        name, itemsize = SAFETENSORS_DTYPES.get(dtype, ("", 0))
        if math.prod(shape) * itemsize != data.nbytes:  # the library would refuse all of the file
            name, shape = "U8", [data.nbytes]
        entry = {"dtype": name or "U8", "shape": list(shape), "data_offsets": [begin, end]}
        text = b"," + msgspec.json.encode(self._unused(key)) + b":" + msgspec.json.encode(entry)
        _write_but_zeros(self._fd, data, self._start + begin)
        self.used = end
        self._new.append(text)
        self._new_nbytes += len(text)
        return self._start + begin

    def flush(self) -> None:
        """Let the header name all that was appended."""
        if self._new:
            self._write_tail()

    def equals(self, offset: int, data: Bytes) -> bool:
        """Whether the file has these bytes at that offset."""
        buffer = np.empty(min(data.nbytes, _COMPARE_NBYTES), np.uint8)
        for begin in range(0, data.nbytes, _COMPARE_NBYTES):
            part = data[begin : begin + _COMPARE_NBYTES]
            view = buffer[: part.nbytes]
            if os.preadv(self._fd, [view.data], offset + begin) != part.nbytes:
                return False
            if not np.array_equal(view, part):
                return False
        return True

    def finish(self) -> None:
        """Give back what was not used; nothing is appended after this."""
        # Killed between these two calls, the library finds the file too long. Our reader
        # does not mind: the offsets are in the log of calls as well.
        self.capacity = self.used
        self._write_tail()
        os.ftruncate(self._fd, self._start + self.used)

    def close(self) -> None:
        os.close(self._fd)

    def _write_tail(self) -> None:
        entries, end = b"".join(self._new), self._end()
        _write_all(self._fd, (entries + end).ljust(self._tail_nbytes), self._tail)
        self._tail += len(entries)
        self._tail_nbytes = len(end)
        self._new, self._new_nbytes = [], 0

    def _end(self) -> bytes:
        free = self.capacity - self.used
        entry = {"dtype": "U8", "shape": [free], "data_offsets": [self.used, self.capacity]}
        return f',"{FREE}":'.encode() + msgspec.json.encode(entry) + b"}" if free else b"}"

    def _unused(self, key: str) -> str:
        """The key, or one like it when it is taken: a step that was resumed repeats its names."""
        key = str(speakable(key[:_MAX_KEY]))
        unused = key
        n = 2
        while unused in self._keys:
            unused, n = f"{key}#{n}", n + 1
        self._keys.add(unused)
        return unused


class Shards:
    """The shards of one step, the next begun when one is full; equal bytes are stored once."""

    def __init__(self, dir_fd: int, first: int = 0, shard_nbytes: int = SHARD_NBYTES) -> None:
        self._dir_fd = dir_fd
        self._first = first
        self._shard_nbytes = shard_nbytes
        self._shards: list[Shard] = []  # the last one is being filled
        self._known: dict[tuple[int, int], list[Place]] = {}  # by what their bytes look like

    def find(self, data: Bytes) -> Place | None:
        """Where these bytes already are."""
        if data.nbytes < _DEDUP_NBYTES:
            return None
        for place in self._known.get(_look(data), ()):
            if self._shards[place[0] - self._first].equals(place[1], data):
                return place
        return None

    def holds(self, place: Place, data: Bytes) -> bool:
        """Whether the bytes at a place are these."""
        if place[2] != data.nbytes:
            return False
        return self._shards[place[0] - self._first].equals(place[1], data)

    def append(self, key: str, dtype: str, shape: Sequence[int], data: Bytes) -> Place:
        """Write the bytes and return where they are."""
        if not self._shards or not self._shards[-1].has_room(key, data.nbytes):
            self._begin_next(data.nbytes)
        offset = self._shards[-1].append(key, dtype, shape, data)
        place = (self._first + len(self._shards) - 1, offset, data.nbytes)
        if data.nbytes >= _DEDUP_NBYTES:
            alike = self._known.setdefault(_look(data), [])
            alike.append(place)
            del alike[:-4]  # many that look alike and differ are not compared for ever
        return place

    def flush(self) -> None:
        if self._shards:
            self._shards[-1].flush()

    def close(self) -> None:
        shards, self._shards = self._shards, []
        self._known.clear()
        try:
            if shards:
                shards[-1].finish()
        finally:
            for shard in shards:
                shard.close()

    def _begin_next(self, nbytes: int) -> None:
        if self._shards:
            self._shards[-1].finish()
        name = shard_name(self._first + len(self._shards))
        self._shards.append(Shard(name, self._dir_fd, max(nbytes, self._shard_nbytes)))


def _look(data: Bytes) -> tuple[int, int]:
    """What equal bytes share and other bytes seldom do, without reading all of them."""
    nbytes = data.nbytes
    check = zlib.crc32(data[:_SAMPLE_NBYTES].data)
    if nbytes > _SAMPLE_NBYTES:
        middle = nbytes // 2
        check = zlib.crc32(data[middle : middle + _SAMPLE_NBYTES].data, check)
        check = zlib.crc32(data[-_SAMPLE_NBYTES:].data, check)
    return nbytes, check


def _write_but_zeros(fd: int, data: Bytes, offset: int) -> None:
    """Write where the file is new and has zeros: blocks of zeros stay holes and take no space.

    The gradient of an embedding has a row for every word there is, nearly all of them zeros.
    """
    nbytes = data.nbytes - data.nbytes % _BLOCK_NBYTES
    words = data[:nbytes].view(np.uint64).reshape(-1, _BLOCK_NBYTES // 8)
    # Of most contents no more is read than a word of each block.
    if nbytes < 16 * _BLOCK_NBYTES or not words.flags.aligned or words[:, 0].all():
        _write_all(fd, data.data, offset)
        return
    used = np.logical_or.reduce(words, axis=1)
    changes = (np.flatnonzero(used[1:] != used[:-1]) + 1).tolist()
    edges = [0, *changes, len(used)]
    for begin, end in itertools.pairwise(edge * _BLOCK_NBYTES for edge in edges):
        if used[begin // _BLOCK_NBYTES]:
            _write_all(fd, data[begin:end].data, offset + begin)
    _write_all(fd, data[nbytes:].data, offset + nbytes)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
