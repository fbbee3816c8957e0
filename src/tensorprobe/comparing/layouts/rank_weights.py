"""Which part of the weights each rank has, and under which names. Found by their contents."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.comparing.align import is_constant
from tensorprobe.comparing.layouts.recorded_ranks import Place, RankStep
from tensorprobe.comparing.layouts.shard_places import (
    ShardPlace,
    block_of,
    grid_of,
    places_of,
    sharded,
)
from tensorprobe.parallel_layout import ParallelLayout

Array = np.ndarray[Any, Any]


class Held(NamedTuple):
    """A parameter of a rank: what it is called in the one process, and which part it is.

    `found` says that its numbers are there; else `part` is where they should be. `choices` are all
    places at which they are.
    """

    rank: int
    name: str
    whole: str
    part: ShardPlace
    found: bool
    choices: tuple[ShardPlace, ...]
    place: Place


class RankWeights:
    """The parameters of all ranks, in the first step."""

    def __init__(
        self, one: RankStep, ranks: Mapping[int, RankStep], layout: ParallelLayout | None
    ) -> None:
        self._one = one
        self._arrays: dict[str, Array] = {n: p.array() for n, p in one.parameters.items()}
        self._layout = layout
        self._order = {rank: n for n, rank in enumerate(sorted(ranks))}
        self.paths: dict[int, dict[str, str]] = {}  # by rank: paths of its modules, as the one's
        self.unknown: list[tuple[int, str]] = []  # parameters of which nobody knows where they are
        self.held: dict[tuple[int, str], Held] = {}
        self.stepped: dict[tuple[int, str], Held] = {}  # as optimizers have them
        self.tied = _tied(one)
        for rank, has in ranks.items():
            self._pair(rank, has)
            for name, place in has.stepped.items():
                self._hold_stepped(rank, name, place)
        self._usual = self._usual_pieces()
        for parts in (self.held, self.stepped):
            for key, held in list(parts.items()):
                if len(held.choices) > 1:
                    parts[key] = held._replace(part=self._choose(held))

    def _pair(self, rank: int, has: RankStep) -> None:
        paths = self.paths.setdefault(rank, {})
        groups: dict[str, dict[str, Place]] = {}
        for name, place in has.parameters.items():
            path, _, last = name.rpartition(".")
            groups.setdefault(path, {})[last] = place
        for path, parameters in groups.items():
            there = self._module(path, parameters)
            if there is not None:
                paths[path] = there
            for last, place in parameters.items():
                name = f"{path}.{last}" if path else last
                whole = f"{there}.{last}" if there else last
                self._hold(rank, name, whole if there is not None else None, place)
        if all(ours == theirs for ours, theirs in paths.items()):
            for path in has.tree.modules:
                if path in self._one.tree.modules and self._has_ends(path, paths.values()):
                    paths.setdefault(path, path)

    def _has_ends(self, path: str, held: Iterable[str]) -> bool:
        """Whether a rank has the first and the last weights in a module: a stage of a pipeline has
        not, and gives something else than the model."""
        holders = {name.rpartition(".")[0] for name in self._arrays}
        below = [
            other for other in self._one.tree.modules
            if other in holders and (not path or other == path or other.startswith(f"{path}."))
        ]  # fmt: skip
        return not below or {below[0], below[-1]} <= {*held}

    def _module(self, path: str, parameters: Mapping[str, Place]) -> str | None:
        """The module of the one process that has these weights: of this name, if it may be."""
        arrays = {name: place.array() for name, place in parameters.items()}
        if self._fits(path, arrays):
            return path
        names = {name.rpartition(".")[0] for name in self._arrays}
        found = [other for other in sorted(names) if self._fits(other, arrays)]
        telling = any(np.unique(array).size > 1 for array in arrays.values())
        if len(found) == 1 and telling:
            return found[0]
        wanted = [f"{path}.{name}" if path else name for name in arrays]
        return path if all(name in self._arrays for name in wanted) else None

    def _fits(self, path: str, arrays: Mapping[str, Array]) -> bool:
        for name, array in arrays.items():
            whole = self._arrays.get(f"{path}.{name}" if path else name)
            if whole is None or not places_of(array, whole):
                return False
        return True

    def _hold(self, rank: int, name: str, whole: str | None, place: Place) -> None:
        there = self._arrays.get(whole) if whole is not None else None
        if whole is None or there is None:
            self.unknown.append((rank, name))
            return
        array = place.array()
        choices = places_of(array, there)
        if choices:
            self.held[rank, name] = Held(rank, name, whole, choices[0], True, tuple(choices), place)
            return
        grid = grid_of(array.shape, there.shape)
        if grid is None or sum(n > 1 for n in grid) > 1:
            self.unknown.append((rank, name))
            return
        blocks = [
            block_of(there.shape, tuple(at if n > 1 else 0 for n in grid), grid)
            for at in range(max(grid, default=1))
        ]
        self.held[rank, name] = Held(rank, name, whole, blocks[0], False, tuple(blocks), place)

    def _hold_stepped(self, rank: int, name: str, place: Place) -> None:
        held = self.held.get((rank, name))
        if held is None or not place.record.numel:
            return
        if place.record.shape == held.place.record.shape:
            self.stepped[rank, name] = held
            return
        choices = places_of(place.array(), self._arrays[held.whole])
        if choices:
            self.stepped[rank, name] = Held(
                rank, name, held.whole, choices[0], True, tuple(choices), place
            )

    def _usual_pieces(self) -> dict[tuple[int, int], int]:
        """By rank and number of pieces: which of them the rank mostly has."""
        counts: dict[tuple[int, int], Counter[int]] = {}
        for held in self.held.values():
            if held.found and len(held.choices) == 1 and held.part.piece is not None:
                at, n = held.part.piece
                counts.setdefault((held.rank, n), Counter())[at] += 1
        return {key: counter.most_common(1)[0][0] for key, counter in counts.items()}

    def usual(self, rank: int, n: int) -> int:
        """Which of so many pieces a rank has: by the layout, by its weights, else by its number."""
        if self._layout is not None and self._layout.size("tp") == n:
            return self._layout.coordinates(rank)["tp"]
        found = self._usual.get((rank, n))
        return found if found is not None else self._order[rank] % n

    def _choose(self, held: Held) -> ShardPlace:
        sharding = held.place.record.sharding
        if sharding is not None:
            there = sharded(sharding, held.rank, self._arrays[held.whole].shape)
            for part in held.choices if there is not None else ():
                if there is not None and _covers(part, there, self._arrays[held.whole].shape):
                    return part
        for part in held.choices:
            if part.piece is not None and part.piece[0] == self.usual(held.rank, part.piece[1]):
                return part
        return held.part

    def out_of_order(self) -> list[Held]:
        """Parts that are another piece than the rank has of its other weights, where no mesh was
        recorded that says so."""
        found = []
        for held in self.held.values():
            piece = held.part.piece
            if piece is None or not held.found or len(held.choices) > 1:
                continue
            if held.place.record.sharding is None and piece[0] != self.usual(held.rank, piece[1]):
                found.append(held)
        return found

    def swapped(self) -> list[tuple[Held, Held]]:
        """Two modules of a list, such as experts, that have each other's weights on a rank."""
        found = []
        for rank, paths in self.paths.items():
            for ours, theirs in paths.items():
                if ours < theirs and paths.get(theirs) == ours:
                    pair = [self._any(rank, path) for path in (ours, theirs)]
                    if pair[0] is not None and pair[1] is not None:
                        found.append((pair[0], pair[1]))
            lists: dict[str, list[tuple[int, int, str]]] = {}
            for ours, theirs in paths.items():
                (above, _, mine), (_, _, other) = ours.rpartition("."), theirs.rpartition(".")
                if mine.isdigit() and other.isdigit():
                    lists.setdefault(above, []).append((int(mine), int(other), ours))
            for members in lists.values():
                members.sort()
                for (_, before, one), (_, after, other) in itertools.pairwise(members):
                    if before > after:
                        pair = [self._any(rank, path) for path in (one, other)]
                        if pair[0] is not None and pair[1] is not None:
                            found.append((pair[0], pair[1]))
        return found

    def _any(self, rank: int, path: str) -> Held | None:
        names = (held for (r, name), held in self.held.items()
                 if r == rank and name.rpartition(".")[0] == path)  # fmt: skip
        return next(names, None)

    def missing(self) -> list[str]:
        """Parameters of the one process of which no rank has all parts."""
        lost = []
        for name, array in self._arrays.items():
            names = self.tied.get(name, (name,))
            mine = [held for held in self.held.values() if held.whole in names]
            seen = np.zeros(array.shape, bool)
            for held in mine:
                if held.part.is_flat:
                    seen.reshape(-1)[held.part.axes[0]] = True
                    continue
                seen[np.ix_(*(
                    np.arange(length) if places is None else places
                    for length, places in zip(array.shape, held.part.axes, strict=True)
                ))] = True  # fmt: skip
            if not seen.all():
                lost.append(name)
        return lost


def _covers(part: ShardPlace, other: ShardPlace, shape: Sequence[int]) -> bool:
    """Whether two parts have the same places."""
    for length, mine, theirs in zip(shape, part.axes, other.axes, strict=True):
        every = np.arange(length)
        if not np.array_equal(every if mine is None else mine, every if theirs is None else theirs):
            return False
    return True


def _tied(one: RankStep) -> dict[str, tuple[str, ...]]:
    """Parameters that are one and the same in the one process, by each of their names."""
    groups: dict[object, list[str]] = {}
    for name, place in one.parameters.items():
        record = place.record
        if record.digest is not None and len(record.shape) > 1 and not is_constant(record):
            groups.setdefault((record.digest, record.shape), []).append(name)
    # a parameter that is used twice has one gradient; copies have one each
    return {
        name: tuple(names)
        for names in groups.values()
        if len(names) > 1 and len(_gradients_of(one, names)) <= 1
        for name in names
    }


def _gradients_of(one: RankStep, names: Sequence[str]) -> set[object]:
    return {one.gradients[name].record.digest for name in names if name in one.gradients}
