"""The tensors of a checkpoint: where their parts are, and their numbers piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.dtypes import numpy_dtype, part_of
from tensorprobe.tensors.layouts import MAX_DIMENSIONS, itemsize_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.packing import read_into
from tensorprobe.tensors.pickle_opcodes import outline
from tensorprobe.tensors.tensor_files import Stored

Array = np.ndarray[Any, Any]
_BLOCK = 1 << 19  # numbers that are put together at a time
_MAX_NUMBERS = 1 << 48
_MAX_REPEATED = 1 << 28
_MAX_PARTS = 4096  # of a tensor that is cut in several dimensions
Box = tuple[tuple[int, int], ...]  # from where to where, in each dimension


class WeightPart(NamedTuple):
    """A part of a tensor: what is stored of it, and where it begins in the whole.

    torch keeps a conjugate or a negative as a note; `is_conjugate` and `is_negative` are it.
    """

    stored: Stored
    begins: tuple[int, ...]
    is_conjugate: bool = False
    is_negative: bool = False


class StoredWeight(NamedTuple):
    """A tensor of a checkpoint: its name there, its dtype and shape, and its parts."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize_of(self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def path(self) -> Path:
        """The file that its first part is in."""
        return self.parts[0].stored.path

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two names of one memory, as tied weights are."""
        return self.dtype, self.shape, self.parts


def whole(
    key: str, stored: Stored, is_conjugate: bool = False, is_negative: bool = False
) -> StoredWeight:
    """A tensor that is in one part; BadArtefact where its file does not have that much."""
    check(key, stored)
    begins = (0,) * len(stored.shape)
    part = WeightPart(stored, begins, is_conjugate, is_negative)
    return StoredWeight(key, stored.dtype, stored.shape, (part,))


def check(key: str, stored: Stored) -> None:
    """BadArtefact for a shape that cannot be, or that the file has no room for."""
    where = f"'{stored.path}': {_short(key)}"
    if len(stored.shape) > MAX_DIMENSIONS or len(stored.shape) != len(stored.strides):
        raise BadArtefact(f"{where}: {len(stored.shape)} lengths and {len(stored.strides)} strides")
    for number in (stored.offset, *stored.shape, *stored.strides):
        if type(number) is not int or not 0 <= number <= _MAX_NUMBERS:
            raise BadArtefact(f"{where}: {outline(number)} is no length, stride or offset")
    count = math.prod(stored.shape)
    if not count:
        return
    last = stored.offset + sum(
        (n - 1) * step for n, step in zip(stored.shape, stored.strides, strict=True)
    )
    itemsize = itemsize_of(stored.dtype)
    if (last + 1) * itemsize > stored.nbytes:
        raise BadArtefact(
            f"{where}: shape {list(stored.shape)} of {stored.dtype} takes {(last + 1) * itemsize} "
            f"bytes; {stored.nbytes} are there"
        )
    # Expanded tensors repeat their numbers, so they may be more than the file has; but not endless.
    if count * itemsize > stored.nbytes and count > _MAX_REPEATED:
        raise BadArtefact(
            f"{where}: {list(stored.shape)} out of {stored.nbytes} bytes: expected at most "
            f"{_MAX_REPEATED} numbers where they are repeated"
        )


def join(key: str, parts: list[WeightPart], shape: tuple[int, ...]) -> StoredWeight:
    """A tensor of several parts; BadArtefact where they leave a hole, or stick out."""
    first = parts[0].stored
    if len(shape) > MAX_DIMENSIONS or not all(0 <= length <= _MAX_NUMBERS for length in shape):
        raise BadArtefact(f"'{first.path}': {_short(key)}: {len(shape)} lengths that cannot be")
    for part in parts:
        check(key, part.stored)
        fits = len(part.begins) == len(shape) == len(part.stored.shape) and all(
            begin >= 0 and begin + length <= total
            for begin, length, total in zip(part.begins, part.stored.shape, shape, strict=True)
        )
        if not fits or part.stored.dtype != first.dtype:
            raise BadArtefact(
                f"'{part.stored.path}': {_short(key)}: a part of {part.stored.dtype} "
                f"{list(part.stored.shape)} at {list(part.begins)} is in no {first.dtype} "
                f"{list(shape)}"
            )
    distinct = {(part.begins, part.stored.shape): part for part in parts}  # replicas are alike
    covered = sum(math.prod(part.stored.shape) for part in distinct.values())
    if covered != math.prod(shape) or _any_overlap([(begins, n) for begins, n in distinct]):
        raise BadArtefact(
            f"'{first.path}': {_short(key)}: its {len(distinct)} parts have {covered} of the "
            f"{math.prod(shape)} numbers of {list(shape)}. Is a file of the checkpoint missing?"
        )
    ordered = [distinct[place] for place in sorted(distinct)]
    return StoredWeight(key, first.dtype, shape, tuple(ordered))


def _any_overlap(places: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    if len(places) < 2 or not places[0][0]:
        return len(places) > 1
    begins = np.array([begin for begin, _ in places], np.int64)
    ends = begins + np.array([shape for _, shape in places], np.int64)
    cut = [d for d in range(begins.shape[1]) if (begins[:, d] != begins[0, d]).any()]
    if len(cut) == 1:
        order = np.argsort(begins[:, cut[0]])
        return bool((ends[order[:-1], cut[0]] > begins[order[1:], cut[0]]).any())
    if len(places) > _MAX_PARTS:
        raise BadArtefact(f"a tensor in {len(places)} parts; expected {_MAX_PARTS} at most")
    return any(
        np.count_nonzero(((begins < ends[n]) & (begins[n] < ends)).all(axis=1)) > 1
        for n in range(len(places))
    )


def _short(key: str) -> str:
    return key if len(key) <= 120 else f"{key[:117]}..."


class WeightPieces:
    """The numbers of a tensor of a checkpoint in row-major order, complex ones as two each.

    A block of it is in memory at a time, whatever the size of the tensor and however it is cut.
    """

    def __init__(self, weight: StoredWeight) -> None:
        self.shape = weight.shape
        self.stored = numpy_dtype(weight.dtype)
        self.dtype = part_of(self.stored)
        self._fold = self.stored.itemsize // self.dtype.itemsize  # 2 for complex numbers
        self.size = weight.numel * self._fold
        self._parts = [_PartReader(part, self.stored) for part in weight.parts]
        self._block = np.empty(0, self.dtype)
        self._begin = 0

    def piece(self, start: int, stop: int) -> Array:
        end = self._begin + self._block.size
        if not (self._begin <= start and stop <= end):
            self._fill(start - start % self._fold, stop)
        return self._block[start - self._begin : stop - self._begin]

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _fill(self, start: int, stop: int) -> None:
        stop = min(max(stop, start + _BLOCK), self.size)
        begin, end = start // self._fold, -(-stop // self._fold)
        block = np.empty(end - begin, self.stored)
        at = 0
        for box in boxes(begin, end, self.shape):
            lengths = tuple(b - a for a, b in box)
            count = math.prod(lengths)
            target = block[at : at + count].reshape(lengths)
            for part in self._parts:
                part.copy(box, target)
            at += count
        self._block, self._begin = block.view(self.dtype), begin * self._fold


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The numbers from `start` to before `stop`, in row-major order, as boxes of the tensor."""
    if not shape:
        if start < stop:
            yield ()
        return
    row = math.prod(shape[1:])
    if not row or start >= stop:
        return
    first, last = start // row, (stop - 1) // row
    whole_first = first if start == first * row else first + 1
    whole_last = last + 1 if stop == (last + 1) * row else last
    if whole_first > whole_last:  # both ends are within one row
        whole_last = whole_first
        yield from _within(first, start, stop, row, shape)
        return
    if start < whole_first * row:
        yield from _within(first, start, whole_first * row, row, shape)
    if whole_first < whole_last:
        yield ((whole_first, whole_last), *((0, length) for length in shape[1:]))
    if whole_last * row < stop:
        yield from _within(last, whole_last * row, stop, row, shape)


def _within(index: int, start: int, stop: int, row: int, shape: tuple[int, ...]) -> Iterator[Box]:
    for box in boxes(start - index * row, stop - index * row, shape[1:]):
        yield ((index, index + 1), *box)


class _PartReader:
    """Reads boxes out of one part."""

    def __init__(self, part: WeightPart, dtype: np.dtype[Any]) -> None:
        self._part = part
        self._dtype = dtype
        self._file = open_file(part.stored.path)
        self._map: Array | None = None
        strides = []
        step = 1
        for length in reversed(part.stored.shape):
            strides.append(step)
            step *= length
        steps = zip(part.stored.strides, reversed(strides), part.stored.shape, strict=True)
        self._is_plain = all(has == wants or length <= 1 for has, wants, length in steps)
        self._strides = tuple(reversed(strides))

    def close(self) -> None:
        self._map = None
        self._file.close()

    def copy(self, box: Box, target: Array) -> None:
        """Put what it has of a box into an array of the box's shape."""
        part = self._part
        shared = [
            (max(a, begin), min(b, begin + length))
            for (a, b), begin, length in zip(box, part.begins, part.stored.shape, strict=True)
        ]
        if any(a >= b for a, b in shared):
            return
        place = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, box, strict=True))
        own = tuple((a - at, b - at) for (a, b), at in zip(shared, part.begins, strict=True))
        numbers = self._plain(own) if self._is_plain else self._strided(own)
        if part.is_conjugate and self._dtype.kind == "c":
            numbers = np.conjugate(numbers)
        if part.is_negative:
            numbers = np.negative(numbers)
        target[place] = numbers

    def _plain(self, box: Box) -> Array:
        """A box of whole rows, which lie one after the other."""
        stored = self._part.stored
        lengths = tuple(b - a for a, b in box)
        numbers = np.empty(lengths, self._dtype)
        begin = stored.offset + sum(a * s for (a, _), s in zip(box, self._strides, strict=True))
        first = stored.start + begin * self._dtype.itemsize
        raw = numbers.reshape(-1).view(np.uint8)
        read_into(raw, self._file.fileno(), first, stored.path)
        return numbers

    def _strided(self, box: Box) -> Array:
        if self._map is None:
            with suppress(BadArtefact):
                self._map = self._part.stored.array()
        if self._map is None:  # expanded: fewer numbers are there than the shape has
            self._map = self._expanded()
        return self._map[tuple(slice(a, b) for a, b in box)]

    def _expanded(self) -> Array:
        stored = self._part.stored
        raw: Array = np.memmap(self._file, np.uint8, "r", stored.start, (stored.nbytes,))
        if stored.start % self._dtype.alignment:
            raw = np.array(raw)
        steps = [s * self._dtype.itemsize for s in stored.strides]
        begin = stored.offset * self._dtype.itemsize
        return np.ndarray(stored.shape, self._dtype, raw, begin, steps)
