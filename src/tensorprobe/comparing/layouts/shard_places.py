"""Where the part of a tensor that a rank has lies in the whole."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.records import Sharding

Array = np.ndarray[Any, Any]
_MOST_BLOCKS = 4096
_SHARD = re.compile(r"_?(?:Strided)?Shard\(dim=(\d+)")
_MOST_AXES = 8
_LEAD = 8  # numbers that are looked for before the rest is compared


class ShardPlace(NamedTuple):
    """By axis which places of the whole a part has, in order; None: all of them.

    `block` and `grid` say the same where it is one of equal blocks: its place and their number.
    `is_flat` says that the places are those of all numbers in a row, as FSDP1 cuts them.
    """

    axes: tuple[Array | None, ...]
    block: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    is_flat: bool = False

    def of(self, whole: Array) -> Array:
        """This part of another tensor with these axes: of a gradient, say."""
        if self.is_flat:
            whole = whole.reshape(-1)
        for axis, places in enumerate(self.axes):
            if places is not None:
                whole = whole.take(places, axis)
        return whole

    @property
    def is_whole(self) -> bool:
        return all(places is None for places in self.axes)

    @property
    def key(self) -> Hashable:
        places = (None if each is None else each.tobytes() for each in self.axes)
        return (self.is_flat, *places)

    @property
    def piece(self) -> tuple[int, int] | None:
        """Which piece of how many, along the only axis that is cut; None: none, or several."""
        cut = [(i, n) for i, n in zip(self.block, self.grid, strict=True) if n > 1]
        return cut[0] if len(cut) == 1 else None

    def __str__(self) -> str:
        if self.is_whole:
            return "all"
        if self.piece is not None:
            axis = next(i for i, n in enumerate(self.grid) if n > 1)
            return f"piece {self.piece[0]} of {self.piece[1]} along dimension {axis}"
        axes = [str(axis) for axis, places in enumerate(self.axes) if places is not None]
        return f"some places of dimension {', '.join(axes)}"


def block_of(shape: Sequence[int], block: Sequence[int], grid: Sequence[int]) -> ShardPlace:
    """One of equal blocks of a tensor of this shape."""
    axes: list[Array | None] = []
    for length, at, n in zip(shape, block, grid, strict=True):
        size = length // n
        axes.append(None if n == 1 else np.arange(at * size, (at + 1) * size))
    return ShardPlace(tuple(axes), tuple(block), tuple(grid))


def grid_of(part: Sequence[int], whole: Sequence[int]) -> tuple[int, ...] | None:
    """In how many equal blocks each axis of the whole is cut; None: in none of this shape."""
    if len(part) != len(whole) or len(whole) > _MOST_AXES:
        return None
    if any(a == 0 or b % a for a, b in zip(part, whole, strict=True)):
        return None
    return tuple(b // a for a, b in zip(part, whole, strict=True))


def places_of(part: Array, whole: Array) -> list[ShardPlace]:
    """Where the numbers of a part are found in the whole, bit for bit; all places, if there are
    several, of equal blocks."""
    if part.shape == whole.shape and _same(part, whole):
        return [ShardPlace((None,) * whole.ndim, (0,) * whole.ndim, (1,) * whole.ndim)]
    grid = grid_of(part.shape, whole.shape)
    if grid is not None and 1 < math.prod(grid) <= _MOST_BLOCKS:
        found = []
        for block in itertools.product(*(range(n) for n in grid)):
            place = block_of(whole.shape, block, grid)
            if _same(part, place.of(whole)):
                found.append(place)
        if found:
            return found
    if part.ndim == 1 and whole.ndim > 1:
        first = _run_of_numbers(part, whole.reshape(-1))
        places = np.arange(first or 0, (first or 0) + part.size)
        return [] if first is None else [ShardPlace((places,), is_flat=True)]
    return list(_by_rows(part, whole))


def sharded(sharding: Sharding, rank: int, shape: Sequence[int]) -> ShardPlace | None:
    """Where a DTensor's part lies, as its placements say; None where that is not known."""
    if tuple(sharding.shape) != tuple(shape) or rank not in sharding.ranks:
        return None
    sizes = sharding.mesh_shape or (len(sharding.ranks),)
    at = np.unravel_index(sharding.ranks.index(rank), sizes)
    axes: list[Array | None] = [None] * len(shape)
    # FSDP over tensor parallel writes its own placement first, and cuts last
    order = sorted(
        range(len(sharding.placements)), key=lambda n: "Strided" in sharding.placements[n]
    )
    for n in order:
        found = _SHARD.match(sharding.placements[n])
        if found is None:
            continue
        axis = int(found[1])
        if axis >= len(shape):
            return None
        before = axes[axis]
        places = np.arange(shape[axis]) if before is None else before
        size = -(-len(places) // sizes[n])
        axes[axis] = places[at[n] * size : (at[n] + 1) * size]
    return ShardPlace(tuple(axes))


def _by_rows(part: Array, whole: Array) -> Iterator[ShardPlace]:
    """Places of whole rows, in any order; of columns where there are no such rows."""
    if part.ndim != whole.ndim or not part.ndim:
        return
    for axis in range(min(part.ndim, 2)):
        if (
            part.shape[:axis] + part.shape[axis + 1 :]
            != whole.shape[:axis] + whole.shape[axis + 1 :]
        ):
            continue
        theirs = _names(whole, axis)
        where = {name: n for n, name in reversed(list(enumerate(theirs)))}
        if len(where) < len(theirs):
            if (first := _run_in(_names(part, axis), theirs)) is not None:
                places = np.arange(first, first + part.shape[axis])
                yield ShardPlace(tuple(places if n == axis else None for n in range(whole.ndim)))
            return  # rows that are the same cannot be told apart
        ours = [where.get(name) for name in _names(part, axis)]
        if ours and all(each is not None for each in ours):
            places = np.array(ours, np.int64)
            yield ShardPlace(tuple(places if n == axis else None for n in range(whole.ndim)))
            return


def _run_in(ours: list[bytes], theirs: list[bytes]) -> int | None:
    """Where a run of rows is found, if it is in one place only."""
    found = [
        n for n in range(len(theirs) - len(ours) + 1)
        if theirs[n] == ours[0] and theirs[n : n + len(ours)] == ours
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _run_of_numbers(ours: Array, theirs: Array) -> int | None:
    """The same of single numbers, of which there may be many."""
    if not ours.size or ours.size > theirs.size:
        return None
    lead = min(ours.size, _LEAD)
    found = np.arange(theirs.size - ours.size + 1)
    for n in range(lead):
        found = found[theirs[found + n] == ours[n]]
    right = [int(n) for n in found[:_MOST_BLOCKS] if _same(ours, theirs[n : n + ours.size])]
    return right[0] if len(right) == 1 and len(found) <= _MOST_BLOCKS else None


def _names(array: Array, axis: int) -> list[bytes]:
    rows = np.ascontiguousarray(np.moveaxis(array, axis, 0))
    return [row.tobytes() for row in rows]


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
