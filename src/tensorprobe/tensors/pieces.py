"""The numbers of a tensor piece by piece: from an array, or from a file without mapping it."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.arrays import read_array
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.dtypes import numpy_dtype, part_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.packing import BLOCK, PackedFile, read_into
from tensorprobe.tensors.tensor_files import locate

Array = np.ndarray[Any, Any]


class Pieces(Protocol):
    """Numbers in row-major order, complex ones as two each."""

    shape: tuple[int, ...]
    stored: np.dtype[Any]  # what the tensor holds
    dtype: np.dtype[Any]  # what the pieces hold
    size: int  # how many there are

    def piece(self, start: int, stop: int) -> Array:
        """The elements from `start` to before `stop`; valid until the next are asked for."""
        ...

    def close(self) -> None: ...


class ArrayPieces:
    """The numbers of an array."""

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self.stored = array.dtype
        self.dtype = part_of(array.dtype)
        self._flat = np.ascontiguousarray(array).reshape(-1).view(self.dtype)
        self.size = self._flat.size

    def piece(self, start: int, stop: int) -> Array:
        return self._flat[start:stop]

    def close(self) -> None:
        """Nothing is open."""


class FilePieces:
    """Numbers that lie in one piece in a file, read into memory that is used again.

    That takes a third of the time of a map, whose every page costs a fault.
    """

    def __init__(self, path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]):
        self.shape = shape
        self.stored = dtype
        self.dtype = part_of(dtype)
        self.size = math.prod(shape) * dtype.itemsize // self.dtype.itemsize
        self._path = path
        self._offset = offset
        self._buffer = np.empty(0, self.dtype)
        self._file = open_file(path)

    def piece(self, start: int, stop: int) -> Array:
        if self._buffer.size < stop - start:
            self._buffer = np.empty(stop - start, self.dtype)
        piece = self._buffer[: stop - start]
        offset = self._offset + start * self.dtype.itemsize
        read_into(piece.view(np.uint8), self._file.fileno(), offset, self._path)
        return piece

    def close(self) -> None:
        self._file.close()


class PackedPieces:
    """Numbers of a packed content; a block is unpacked once where pieces come in order."""

    def __init__(self, blob: Blob, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.stored = dtype
        self.dtype = part_of(dtype)
        self.size = math.prod(shape) * dtype.itemsize // self.dtype.itemsize
        self._file = PackedFile(
            blob.path, blob.offset, blob.packed_nbytes, blob.nbytes, self.dtype.itemsize
        )
        self._block = np.empty(0, self.dtype)
        self._number = -1

    def piece(self, start: int, stop: int) -> Array:
        first, last = start // BLOCK, (stop - 1) // BLOCK
        blocks = [self._unpacked(number) for number in range(first, last + 1)]
        numbers = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return numbers[start - first * BLOCK : stop - first * BLOCK]

    def close(self) -> None:
        self._file.close()

    def _unpacked(self, number: int) -> Array:
        if number != self._number:
            self._block = self._file.block(number).view(self.dtype)
            self._number = number
        return self._block


def open_pieces(name: str, dtype: str, shape: tuple[int, ...], blob: Blob) -> Pieces:
    """The stored content of the tensor of that name."""
    kind = numpy_dtype(dtype)
    if blob.container in ("raw", "packed"):
        if blob.nbytes and blob.nbytes == math.prod(shape) * kind.itemsize:
            if blob.container == "packed":
                return PackedPieces(blob, kind, shape)
            return FilePieces(blob.path, blob.offset, kind, shape)
    else:
        with suppress(BadArtefact):  # reading it says what is wrong
            stored = locate(blob.path)
            if stored.dtype == dtype and stored.shape == shape and stored.is_whole:
                begin = stored.start + stored.offset * kind.itemsize
                return FilePieces(blob.path, begin, kind, shape)
    return ArrayPieces(read_array(name, dtype, shape, blob))
