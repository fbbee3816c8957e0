"""The numbers of a tensor piece by piece: from an array, or from a file without mapping it."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tensorprobe.contents.arrays import read_array
from tensorprobe.contents.blob import Blob
from tensorprobe.contents.dtypes import numpy_dtype
from tensorprobe.contents.tensor_files import locate
from tensorprobe.errors import BadArtefact

Array = np.ndarray[Any, Any]


class Pieces(Protocol):
    """Numbers in row-major order, complex ones as two each."""

    shape: tuple[int, ...]
    stored: np.dtype[Any]  # what the tensor holds
    dtype: np.dtype[Any]  # what the pieces hold
    size: int  # how many there are

    def piece(self, start: int, stop: int) -> Array:
        """Those from `start` to before `stop`; good until the next is asked for."""
        ...

    def close(self) -> None: ...


class ArrayPieces:
    """The numbers of an array."""

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self.stored = array.dtype
        self.dtype = _parts(array.dtype)
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
        self.dtype = _parts(dtype)
        self.size = math.prod(shape) * dtype.itemsize // self.dtype.itemsize
        self._path = path
        self._offset = offset
        self._buffer = np.empty(0, self.dtype)
        self._fd = os.open(path, os.O_RDONLY)

    def piece(self, start: int, stop: int) -> Array:
        if self._buffer.size < stop - start:
            self._buffer = np.empty(stop - start, self.dtype)
        piece = self._buffer[: stop - start]
        view = piece.view(np.uint8).data
        offset = self._offset + start * self.dtype.itemsize
        while view:
            nbytes = os.preadv(self._fd, [view], offset)
            if not nbytes:
                raise ValueError(f"{self._path} ends at byte {offset}, before its content")
            view, offset = view[nbytes:], offset + nbytes
        return piece

    def close(self) -> None:
        os.close(self._fd)


def open_pieces(name: str, dtype: str, shape: tuple[int, ...], blob: Blob) -> Pieces:
    """The stored content of the tensor of that name."""
    kind = numpy_dtype(dtype)
    if blob.container == "raw":
        if blob.nbytes and blob.nbytes == math.prod(shape) * kind.itemsize:
            return FilePieces(blob.path, blob.offset, kind, shape)
    else:
        with suppress(BadArtefact):  # reading it says what is wrong
            stored = locate(blob.path)
            if stored.dtype == dtype and stored.shape == shape and stored.is_whole:
                begin = stored.start + stored.offset * kind.itemsize
                return FilePieces(blob.path, begin, kind, shape)
    return ArrayPieces(read_array(name, dtype, shape, blob))


def _parts(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What complex numbers are pairs of; other numbers are themselves."""
    if dtype.names:  # complex32 is a pair of halves
        return np.dtype(np.float16)
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
