"""The weights of a sketch, and sketches with numpy. No torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tensorprobe.tensors.sketch import (
    CELL,
    CELLS,
    FACTORS,
    FIRST,
    ONE,
    QUARTER,
    ROUND,
    SIGN_AND_FRACTION,
    TILE,
)

Array = np.ndarray[Any, Any]


def weights(numbers: Array) -> Array:
    """The weights of tiles or cells with these numbers."""
    mask, one, two = (np.uint64(factor) for factor in (0xFFFFFFFF, *FACTORS))
    x = ((numbers.astype(np.uint64) & mask) * one + np.uint64(FIRST)) & mask
    x = ((x ^ (x >> np.uint64(15))) * two) & mask
    upper = (x & np.uint64(SIGN_AND_FRACTION)) | np.uint64(ONE)
    found: Array = (upper << np.uint64(32)).view(np.float64)
    return found


@functools.cache
def weights_within() -> Array:
    """What the numbers of a tile are multiplied by, but for the weight of the tile."""
    cells = weights(np.arange(CELLS, CELLS + TILE // CELL))
    found: Array = np.repeat(cells, CELL)
    found[np.arange(TILE) % CELL >= QUARTER] *= -1
    found.flags.writeable = False
    return found


def add_weighed(buckets: Array, wide: Array, start: int) -> None:
    """Add float64 numbers, the first at the position `start`, to the sums of a sketch."""
    lead = start % ROUND
    tail = -(lead + wide.size) % ROUND
    if lead or tail:
        wide = np.concatenate([np.zeros(lead), wide, np.zeros(tail)])
    tiles = wide.reshape(-1, TILE)
    first = (start - lead) // TILE
    by_tile = weights(np.arange(first, first + len(tiles)))
    rounds = (tiles * by_tile[:, None]).reshape(-1, ROUND).sum(axis=0)
    parts = rounds.reshape(ROUND // TILE, TILE) * weights_within()
    buckets += parts.reshape(ROUND // TILE, -1, QUARTER).sum(axis=1).reshape(-1)
