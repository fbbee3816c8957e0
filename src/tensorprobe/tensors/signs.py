"""The signs of a sketch, and sketches with numpy. No torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tensorprobe.tensors.sketch import FACTORS, QUARTER, ROUND, SECOND, STEP, TILE

Array = np.ndarray[Any, Any]


def sign_bits(tile: Array) -> Array:
    """Eight bits for each number of a tile, mixed in 32 bits."""
    mask, one, two = (np.uint64(factor) for factor in (0xFFFFFFFF, *FACTORS))
    x = (tile.astype(np.uint64) & mask) * one & mask
    bits: Array = ((x ^ (x >> np.uint64(15))) * two & mask) >> np.uint64(24)
    return bits


@functools.cache
def tile_signs() -> Array:
    """The signs of a tile as float64, for each of the 256 ways its bits can be."""
    i = np.arange(TILE)
    bit = (i // QUARTER % 4) + 4 * (SECOND >> (i // STEP) & 1)
    signs: Array = 1.0 - 2.0 * (np.arange(256)[:, None] >> bit & 1)
    signs.flags.writeable = False
    return signs


def add_signed(buckets: Array, wide: Array, start: int) -> None:
    """Add float64 numbers, the first at the position `start`, to the sums of a sketch."""
    lead = start % ROUND
    tail = -(lead + wide.size) % ROUND
    if lead or tail:
        wide = np.concatenate([np.zeros(lead), wide, np.zeros(tail)])
    tiles = wide.reshape(-1, TILE)
    first = (start - lead) // TILE
    signs = tile_signs()[sign_bits(np.arange(first, first + len(tiles)))]
    rounds = (tiles * signs).reshape(-1, ROUND).sum(axis=0)
    buckets += rounds.reshape(ROUND // TILE, -1, QUARTER).sum(axis=1).reshape(-1)
