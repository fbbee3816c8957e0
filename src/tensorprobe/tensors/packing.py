"""Contents in fewer bytes, without loss: the bytes of its numbers apart, coded where that gains.

Sign and most of the exponent of floating-point numbers are in their highest bytes, where few values
are frequent. The lower bytes are as good as noise, which nothing makes smaller, unless many numbers
are zeros. Huffman's code alone does it: zlib is told not to look for repeats, which are rare and
cost the time, but for runs where one value prevails.

A packed content is cut into blocks of so many numbers, and a block into planes: the lowest byte of
each number, then the next one. First come the lengths of all planes (uint32), block by block, then
the planes: coded, or as they are where the length is that of the plane. Complex numbers are two.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.tensors.opening import open_file

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Coded = list[bytes | Bytes]  # the planes of a block; those left as they are still lie apart in it
# A function's results for each of these, in order: map, or something that has threads for it.
EachOf = Callable[
    [Callable[[Sequence[Bytes]], list[Coded]], Iterable[Sequence[Bytes]]], Iterable[list[Coded]]
]

BLOCK = 1 << 15  # numbers: as many as a comparison reads at a time
LEAST_NBYTES = 1 << 16  # below this it is not worth it
_PORTION = 16  # blocks that are coded in one go
_SAMPLE = 1024  # bytes of a plane that are looked at before
_FEW = 2 / 256  # two of those are alike so often where a code gains; of noise half as often
_RUNS = 0.75  # and with one value in so many, there are runs
_GAIN = 0.95


def pack(data: Bytes, itemsize: int, each_of: EachOf = map) -> Bytes | None:
    """The content packed, or None where that gains nothing; `itemsize` is that of its numbers."""
    if data.nbytes < LEAST_NBYTES or data.nbytes % itemsize:
        return None
    step = BLOCK * itemsize
    blocks = [data[begin : begin + step] for begin in range(0, data.nbytes, step)]
    portions = [blocks[begin : begin + _PORTION] for begin in range(0, len(blocks), _PORTION)]
    found = each_of(lambda portion: [_planes(block, itemsize) for block in portion], portions)
    planes = [plane for portion in found for coded in portion for plane in coded]
    lengths = np.array([len(plane) for plane in planes], "<u4").view(np.uint8)
    places = list(itertools.accumulate(map(len, planes), initial=lengths.nbytes))
    if places[-1] > _GAIN * data.nbytes:
        return None
    packed = np.empty(places[-1], np.uint8)
    packed[: lengths.nbytes] = lengths
    for place, plane in zip(places, planes, strict=False):
        numbers = np.frombuffer(plane, np.uint8) if isinstance(plane, bytes) else plane
        packed[place : place + len(plane)] = numbers
    return packed


class PackedFile:
    """A packed content in a file, block by block.

    ValueError says what is wrong where the bytes are not those of one.
    """

    def __init__(
        self, path: Path, offset: int, nbytes: int, content_nbytes: int, itemsize: int
    ) -> None:
        self._path = path
        self._itemsize = itemsize
        numbers = content_nbytes // itemsize
        if 4 * itemsize * -(-numbers // BLOCK) > nbytes:
            raise self._damaged(f"of {content_nbytes} bytes takes more than {nbytes}")
        self._sizes = [min(BLOCK, numbers - first) for first in range(0, numbers, BLOCK)]
        self._file = open_file(path)
        self._fd = self._file.fileno()
        try:
            lengths = self._read(offset, 4 * itemsize * len(self._sizes))
            self._lengths = lengths.view("<u4").reshape(-1, itemsize)
            blocks = self._lengths.sum(axis=1, dtype=np.int64).tolist()
            self._places = list(itertools.accumulate(blocks, initial=offset + lengths.nbytes))
            if self._places[-1] != offset + nbytes:
                raise self._damaged("has blocks that do not fill its place")
            if (self._lengths > np.array(self._sizes, np.int64)[:, None]).any():
                raise self._damaged("has a block that is larger than what it stands for")
        except BaseException:
            self.close()
            raise

    def blocks(self) -> Iterator[Bytes]:
        """All of them, in order."""
        return map(self.block, range(len(self._sizes)))

    def block(self, i: int) -> Bytes:
        """The bytes of the numbers from `i * BLOCK` on, up to BLOCK of them."""
        stored = self._read(self._places[i], self._places[i + 1] - self._places[i])
        block = np.empty((self._sizes[i], self._itemsize), np.uint8)
        at = 0
        for number, length in enumerate(self._lengths[i].tolist()):
            plane = stored[at : at + length]
            block[:, number] = plane if length == len(block) else self._decoded(plane, len(block))
            at += length
        return block.reshape(-1)

    def close(self) -> None:
        self._file.close()

    def _decoded(self, plane: Bytes, size: int) -> Bytes:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            found = decoder.decompress(plane.data, size + 1)  # more would be wrong as well
        except zlib.error as error:
            raise self._damaged(f"cannot be decoded: {error}") from error
        if len(found) != size:
            raise self._damaged(f"has {len(found)} numbers or more where {size} should be")
        return np.frombuffer(found, np.uint8)

    def _read(self, offset: int, nbytes: int) -> Bytes:
        found = np.empty(nbytes, np.uint8)
        read_into(found, self._fd, offset, self._path)
        return found

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"{self._path}: a packed content {how}")


def read_into(out: Bytes, fd: int, offset: int, path: Path) -> None:
    """Fill `out` with what a file has from there on; ValueError where it ends before."""
    view = out.data
    while view:
        nbytes = os.preadv(fd, [view], offset)
        if not nbytes:
            raise ValueError(f"{path} ends at byte {offset}, before its content")
        view, offset = view[nbytes:], offset + nbytes


def _planes(block: Bytes, itemsize: int) -> Coded:
    return [_coded(block[i::itemsize]) for i in range(itemsize)]


def _coded(plane: Bytes) -> bytes | Bytes:
    sample = plane[:: plane.size // _SAMPLE | 1]  # odd, so that no row's length agrees with it
    counts = np.bincount(sample, minlength=256) / sample.size
    if counts @ counts < _FEW:
        return plane
    strategy = zlib.Z_RLE if counts.max() > _RUNS else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    code = coder.compress(np.ascontiguousarray(plane).data) + coder.flush()
    return code if len(code) < _GAIN * plane.size else plane
