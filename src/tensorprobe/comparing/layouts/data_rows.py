"""Which rows of all data each call of a rank's model works on, by what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorprobe.comparing.layouts.recorded_ranks import RankStep, given
from tensorprobe.comparing.layouts.shard_places import ShardPlace, places_of

Array = np.ndarray[Any, Any]


class DataRows:
    """For each rank and call of its model, which part of what the one process is given it has."""

    def __init__(self, one: RankStep, ranks: Mapping[int, RankStep]) -> None:
        self.parts: dict[tuple[int, int], ShardPlace] = {}
        self._whole = np.zeros(0)
        self.other_data: list[int] = []  # ranks that were given what the one process was not
        firsts = [given(root)[0].array() for root in one.roots]
        if not firsts or len({array.shape[1:] for array in firsts}) != 1:
            return
        self._whole = np.concatenate(firsts)
        unknown = []
        for rank, has in ranks.items():
            found = [self._part(given(root)[0].array()) for root in has.roots]
            if found and all(part is not None for part in found):
                self.parts.update({(rank, n): p for n, p in enumerate(found) if p is not None})
            elif found:
                unknown.append(rank)
        for rank in unknown:
            if not self._borrow(rank, ranks, one):
                self.other_data.append(rank)

    def _part(self, piece: Array) -> ShardPlace | None:
        found = places_of(piece, self._whole)
        if not found:
            return None
        used = {part.key for part in self.parts.values()}
        return next((part for part in found if part.key not in used), found[0])

    def _borrow(self, rank: int, ranks: Mapping[int, RankStep], one: RankStep) -> bool:
        """A later stage of a pipeline works on the rows of the first, one call after the other."""
        mine = ranks[rank]
        if len(mine.tree.modules) >= len(one.tree.modules):
            return False
        rows: dict[object, list[ShardPlace]] = {}
        for other in {each for each, _ in self.parts}:
            every = [self.parts[key] for key in sorted(self.parts) if key[0] == other]
            parts = [p for n, p in enumerate(every) if not n or p.key != every[n - 1].key]
            if len(parts) == len(mine.roots) and other not in self.other_data:
                rows[tuple(part.key for part in parts)] = parts
        if len(rows) != 1:
            return False
        (parts,) = rows.values()
        self.parts.update({(rank, n): part for n, part in enumerate(parts)})
        return True

    def nowhere(self) -> str | None:
        """Which of the rows no rank works on."""
        if not self.parts or not self._whole.size or self.other_data:
            return None
        seen = np.zeros(self._whole.shape, bool)
        for part in self.parts.values():
            if part.is_flat:
                return None
            seen[np.ix_(*(
                np.arange(length) if places is None else places
                for length, places in zip(seen.shape, part.axes, strict=True)
            ))] = True  # fmt: skip
        if seen.all():
            return None
        axis = next(n for n in range(seen.ndim) if not seen.all(
            tuple(m for m in range(seen.ndim) if m != n)).all())  # fmt: skip
        lost = np.flatnonzero(~seen.any(tuple(m for m in range(seen.ndim) if m != axis)))
        shown = ", ".join(map(str, lost[:4].tolist())) + (", ..." if lost.size > 4 else "")
        return f"{shown} of dimension {axis}" if lost.size else "some"

    def is_by_row(self, whole: Array) -> bool:
        """Whether a result has a row for each row of the data, or for each token."""
        there = self._whole.shape
        return bool(whole.ndim) and whole.shape[0] in (there[0], int(np.prod(there[:2])))

    def of(self, rank: int, number: int, whole: Array) -> Array | None:
        """The rows of a result that a call works on; None where they are not known."""
        part = self.parts.get((rank, number))
        if part is None:
            return None
        if part.is_whole:
            return whole
        there = self._whole.shape
        cut = [axis for axis, places in enumerate(part.axes) if places is not None]
        if all(axis < whole.ndim and whole.shape[axis] == there[axis] for axis in cut):
            axes = (*part.axes, *(None,) * whole.ndim)[: whole.ndim]
            return ShardPlace(axes).of(whole)
        tokens = int(np.prod(there[: max(cut) + 1]))
        if whole.ndim and whole.shape[0] == tokens:  # [batch * tokens, features]
            numbers = np.arange(tokens).reshape(there[: max(cut) + 1])
            places = ShardPlace(part.axes[: max(cut) + 1]).of(numbers).reshape(-1)
            return whole.take(places, 0)
        return None

    def alike(self, rank: int, number: int) -> tuple[int, ...]:
        """The ranks whose call of this number works on the same rows."""
        mine = self.parts.get((rank, number))
        if mine is None:
            return (rank,)
        return tuple(
            sorted(r for (r, n), part in self.parts.items() if n == number and part.key == mine.key)
        )
