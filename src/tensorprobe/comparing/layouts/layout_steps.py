"""Compares one step of several ranks with the same step of one process, place by place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tensorprobe.collectives.links import given as given_to
from tensorprobe.collectives.links import kind_of, listed
from tensorprobe.comparing.align import content
from tensorprobe.comparing.layouts.data_rows import DataRows
from tensorprobe.comparing.layouts.rank_weights import Held, RankWeights
from tensorprobe.comparing.layouts.recorded_ranks import Place, RankStep, given, results
from tensorprobe.comparing.layouts.shard_places import grid_of
from tensorprobe.comparing.places.place_limits import UNSURE, own_limit
from tensorprobe.comparing.rounding import (
    autocast_unit,
    number_text,
    product_unit,
    roundoff,
)
from tensorprobe.comparing.verdict import Cause, percent
from tensorprobe.errors import UnreadableCapture
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

Array = np.ndarray[Any, Any]
Status = Literal["fine", "undecided", "wrong", "unknown"]
_GROWTH = 2.0
_ROW_SHARE = 4.0
_OWN, _GATHERED = _ALL_FEATURES = ("its rows", "rows of all ranks")
_FEW = 0.01  # of all numbers: steps of Adam may differ where a gradient is about zero
_REDUCES = ("all_reduce", "reduce_scatter", "reduce")


class PlaceFound(NamedTuple):
    """How a tensor of one rank fits what the one process has."""

    kind: Literal["parameter", "output", "gradient", "input", "given", "update"]
    status: Status
    name: str  # of the module or parameter, as the one process has it
    rank: int
    ours: Place
    theirs: Place
    error: float = 0.0  # in roundings
    relative: float = 0.0
    limit: float = 0.0
    cause: Cause = "result"
    reason: str = ""
    ranks: tuple[int, ...] = ()  # of which the same is true
    is_effect: bool = False
    how: str = ""


class StepResult(NamedTuple):
    """All places of a step, in the order of the one process, and what could not be compared."""

    found: list[PlaceFound]
    unknown: list[str]  # each keeps the runs from being a match


class StepComparison:
    """One step; `before` are the largest error that it inherits, and gradients it stepped by."""

    def __init__(
        self,
        one: RankStep,
        ranks: Mapping[int, RankStep],
        weights: RankWeights,
        *,
        facts: tuple[Mapping[str, Any], Mapping[str, Any]],
        is_first: bool,
        inherited: float = 0.0,
        updates: Mapping[str, tuple[Array, Array]] | None = None,
    ) -> None:
        self.one, self.ranks, self.weights = one, ranks, weights
        self.is_first, self.inherited = is_first, inherited
        self._updates = updates or {}
        self.unit = max((_unit(has, fact) for has, fact in zip(
            (one, *ranks.values()), (facts[0], *(facts[1] for _ in ranks)), strict=True
        )), default=2.0**-24)  # fmt: skip
        self.found: list[PlaceFound] = []
        self.unknown: list[str] = []
        self.rows = DataRows(one, ranks)

    def result(self) -> StepResult:
        """Compare everything."""
        self._parameters()
        self._data()
        for path in self.one.tree.modules:
            self._ids(path)
            self._inputs(path)
            self._module(path)
        self._gradients()
        self._made()
        return StepResult(self.found, self.unknown)

    # parameters

    def _parameters(self) -> None:
        for (rank, name), held in self.weights.held.items():
            ours = self.ranks[rank].parameters.get(name)
            theirs = self.one.parameters.get(held.whole)
            if ours is None or theirs is None:
                continue
            if self.is_first and held.found:
                self._add("parameter", "fine", held.whole, rank, ours, theirs, how=str(held.part))
                continue
            mine, wanted = ours.array(), held.part.of(theirs.array())
            if mine.shape != wanted.shape:
                continue  # FSDP has gathered it in one step and not in another
            error, relative = self._apart(mine, wanted)
            limit = own_limit(self.unit, 2 * len(self.one.tree.modules))
            status = self._status(error, limit)
            cause: Cause = "weights"
            reason = f"parameter {name} is not {held.part} of what the one process has"
            if not self.is_first and status != "fine":
                status = self._stepped(held, mine, wanted, self._updates.get(held.whole))
                reason = f"the optimizer has made another {name} than that of the one process"
                cause = "result"
            self._add(
                "parameter", status, held.whole, rank, ours, theirs, error, relative, limit,
                cause, f"{reason}: it differs by {percent(relative)} of its size", is_effect=True,
            )  # fmt: skip

    def _stepped(
        self, held: Held, mine: Array, wanted: Array, before: tuple[Array, ...] | None
    ) -> Status:
        """Whether steps from gradients that agree explain a parameter: of Adam, those of gradients
        that are about zero are arbitrary, up to the size of a step."""
        if before is None:
            return "undecided"
        gradient, old = (held.part.of(array) for array in before)
        peak = float(np.max(np.abs(wanted - old), initial=0.0))
        size = math.sqrt(float(np.mean(gradient**2))) if gradient.size else 0.0
        limit = own_limit(self.unit, 2 * len(self.one.tree.modules))
        with np.errstate(all="ignore"):
            share = np.minimum(1.0, 4 * limit * self.unit * size / np.abs(gradient))
        share = np.where(np.isfinite(share), share, 1.0)
        allowed = 2 * peak * share + 4 * limit * self.unit * np.abs(wanted)
        off = np.abs(mine - wanted) > allowed
        if not off.any():
            return "fine"
        return "wrong" if float(off.mean()) > _FEW else "undecided"

    def _made(self) -> None:
        """The parameters after the step."""
        limit = own_limit(self.unit, 2 * len(self.one.tree.modules))
        for (rank, name), held in self.weights.stepped.items():
            ours, theirs = self.ranks[rank].made.get(name), self.one.made.get(held.whole)
            if ours is None or theirs is None or not ours.record.numel:
                continue
            mine, wanted = ours.array(), held.part.of(theirs.array())
            if mine.shape != wanted.shape:
                continue
            error, relative = self._apart(mine, wanted)
            status = self._status(error, limit)
            if status != "fine" and held.whole in self.one.gradients:
                before = tuple(
                    p.array()
                    for p in (self.one.gradients[held.whole], self.one.stepped[held.whole])
                )
                status = self._stepped(held, mine, wanted, before)
            self._add(
                "update", status, held.whole, rank, ours, theirs, error, relative, limit, "result",
                f"the optimizer makes another {name} than in the one process, off by "
                f"{percent(relative)} of its size", is_effect=True,
            )  # fmt: skip

        for (rank, name), held in self.weights.held.items():
            stepped = self.ranks[rank].stepped
            if held.whole in self.one.made and stepped and name not in stepped:
                self.unknown.append(f"no optimizer of rank {rank} is given {name}")

    # data that models, and whole numbers that modules, are given

    def _data(self) -> None:
        """What no rank, or not the one process, was given."""
        texts = {
            rank: (
                f"rank {rank} gives the model data that is nowhere in what the one process gives it"
            )
            for rank in self.rows.other_data
        }
        if (rows := self.rows.nowhere()) is not None:
            first = min(rank for rank, _ in self.rows.parts)
            texts[first] = f"no rank gives the model rows {rows} of what the one process gives it"
        for rank, text in texts.items():
            self.unknown.append(text)
            ours, theirs = given(self.ranks[rank].roots[0])[0], given(self.one.roots[0])[0]
            self._add("input", "wrong", "", rank, ours, theirs, math.inf, 0.0, 0.0, "data", text)

    def _ids(self, path: str) -> None:
        """Tokens and positions: those of another piece of the data are named."""
        for root, theirs in self._whole_inputs(path):
            for rank, has in self.ranks.items():
                mine = self._path(rank, path)
                for call in has.module_calls(mine) if mine is not None else ():
                    number = has.root_number(call)
                    places = [p for p in given(call) if p.record.dtype not in FRACTION_BITS]
                    if number is None or len(places) != 1:
                        continue
                    wanted = self._rows_or_all(rank, number, root, places[0].record.shape)
                    array = places[0].array()
                    if wanted is None or wanted.shape != array.shape:
                        continue
                    if np.array_equal(wanted, array):
                        continue
                    flat = array.reshape(-1)
                    counts = flat.size > 1 and bool((np.diff(flat) == 1).all())
                    what = "position ids are not offset" if counts else "it is given other ids"
                    reason = (
                        f"{what}: {path} is given {_ends(array)} on rank {rank}, where the one "
                        f"process has {_ends(wanted)} for the same part of the data"
                    )
                    self._add(
                        "input", "wrong", path, rank, places[0], theirs, math.inf, 0.0, 0.0, "data",
                        reason,
                    )  # fmt: skip

    def _whole_inputs(self, path: str) -> Iterator[tuple[Array, Place]]:
        calls = self.one.module_calls(path)
        places = [[p for p in given(c) if p.record.dtype not in FRACTION_BITS] for c in calls]
        if (
            places
            and all(len(each) == 1 for each in places)
            and self.one.tree.modules[path].parent is not None
        ):
            arrays = [each[0].array() for each in places]
            if len({array.shape[1:] for array in arrays}) == 1 and len(calls) == len(
                self.one.roots
            ):
                yield np.concatenate(arrays), places[0][0]

    def _inputs(self, path: str) -> None:
        """What a module is given, where that is a known part of what it is given in one process:
        what is between modules has no results of its own."""
        if self.one.tree.modules[path].parent is None:
            return
        calls = self.one.module_calls(path)
        firsts = [[p for p in given(c) if p.record.dtype in FRACTION_BITS][:1] for c in calls]
        if len(calls) != len(self.one.roots) or not all(firsts):
            return
        arrays = [places[0].array() for places in firsts]
        if len({array.shape[1:] for array in arrays}) != 1:
            return
        whole, theirs = np.concatenate(arrays), firsts[0][0]
        limit = own_limit(self.unit, self.one.tree.modules[path].n_before)
        limit += _GROWTH * self.inherited
        for rank, has in self.ranks.items():
            mine = self._path(rank, path)
            for call in has.module_calls(mine) if mine is not None else ():
                number = has.root_number(call)
                places = [p for p in given(call) if p.record.dtype in FRACTION_BITS][:1]
                if number is None or not places or not self.rows.is_by_row(whole):
                    continue
                array = places[0].array()
                wanted, how = self._wanted(rank, number, path, array, whole, of_input=True)
                if wanted is None:
                    continue
                error, relative = self._apart(array, wanted)
                reason = (
                    f"what {path} is given on rank {rank} ({how}) is off by {percent(relative)} of "
                    "its size"
                )
                self._add(
                    "given", self._status(error, limit), path, rank, places[0], theirs, error,
                    relative, limit, "result", reason,
                )  # fmt: skip

    # results of modules

    def _module(self, path: str) -> None:
        calls = self.one.module_calls(path)
        for nth in range(max((len(results(call)) for call in calls), default=0)):
            whole = self._whole(path, nth)
            if whole is not None:
                self._result(path, nth, *whole)

    def _result(self, path: str, nth: int, array: Array, theirs: Place) -> None:
        by_number: dict[int, dict[int, tuple[Place, Array]]] = {}
        for rank, has in self.ranks.items():
            mine = self._path(rank, path)
            for call in has.module_calls(mine) if mine is not None else ():
                number, places = has.root_number(call), results(call)
                if number is None or nth >= len(places) or rank in by_number.get(number, {}):
                    continue
                try:
                    by_number.setdefault(number, {})[rank] = places[nth], places[nth].array()
                except UnreadableCapture:
                    return
        for number, made in sorted(by_number.items()):
            self._results(path, number, made, array, theirs)

    def _whole(self, path: str, nth: int) -> tuple[Array, Place] | None:
        calls = self.one.module_calls(path)
        places = [results(call)[nth] for call in calls if nth < len(results(call))]
        if not places or len(places) != len(self.one.roots):
            return None  # called several times in a call of the model
        arrays = [place.array() for place in places]
        if len({array.shape[1:] for array in arrays}) != 1 or not arrays[0].shape:
            return None
        return np.concatenate(arrays), places[0]

    def _results(
        self,
        path: str,
        number: int,
        made: Mapping[int, tuple[Place, Array]],
        array: Array,
        theirs: Place,
    ) -> None:
        n_before = self.one.tree.modules[path].n_before
        limit = own_limit(self.unit, n_before) + _GROWTH * self.inherited
        is_effect = self.one.tree.modules[path].parent is None or self._is_result(theirs)
        is_by_row = self.rows.is_by_row(array)
        left: dict[str, dict[int, tuple[Place, Array, Array]]] = {}
        for rank, (ours, mine) in made.items():
            wanted, how = self._wanted(rank, number, path, mine, array)
            if wanted is None:
                if is_effect:
                    self.unknown.append(
                        f"what {path or 'the model'} gives on rank {rank} ({list(mine.shape)}) is "
                        f"no known part of what it gives in one process ({list(array.shape)})"
                    )
                continue
            error, relative = self._apart(mine, wanted)
            status = self._status(error, limit)
            if status == "fine":
                self._add(
                    "output", "fine", path, rank, ours, theirs, error, relative, limit,
                    is_effect=is_effect, how=how,
                )  # fmt: skip
            elif not is_by_row:
                continue  # as many rows as there are tokens for an expert: in what order?
            elif how in _ALL_FEATURES:
                left.setdefault(how, {})[rank] = ours, mine, wanted
            else:
                reason = (
                    f"{path or 'the model'} gives {how}, off by {percent(relative)} of its size"
                )
                self._add(
                    "output", status, path, rank, ours, theirs, error, relative, limit, "result",
                    reason, is_effect=is_effect,
                )  # fmt: skip
        for how, members in left.items():
            self._sums(
                path, None if how == _GATHERED else number, members, theirs, limit, is_effect
            )

    def _wanted(
        self, rank: int, number: int, path: str, mine: Array, array: Array, of_input: bool = False
    ) -> tuple[Array | None, str]:
        """What a rank should have of a result, and how that is part of it."""
        rows = self.rows.of(rank, number, array)
        for whole, how in ((rows, _OWN), (array, _GATHERED)):
            if whole is not None and whole.shape == mine.shape:
                return whole, how
        for whole in (rows, array):
            if whole is None or whole.ndim != mine.ndim:
                continue
            features = self._features(rank, path, 1 if of_input else 0)
            if features is not None and whole.shape[-1] > mine.shape[-1] == len(features):
                part = whole.take(features, -1)
                if part.shape == mine.shape:
                    return part, "its features"
            grid = grid_of(mine.shape, whole.shape)
            if grid is not None and grid[0] == 1 and sum(n > 1 for n in grid) == 1:
                axis = next(i for i, n in enumerate(grid) if n > 1)
                at, size = self.weights.usual(rank, grid[axis]), mine.shape[axis]
                part = whole.take(np.arange(at * size, (at + 1) * size), axis)
                return part, f"piece {at} of {grid[axis]} along dimension {axis}"
        return None, ""

    def _features(self, rank: int, path: str, axis: int) -> Array | None:
        """Which output features a module has by its weight, or input features."""
        mine = self._path(rank, path)
        held = self.weights.held.get((rank, f"{mine}.weight" if mine else "weight"))
        if held is None or len(held.part.axes) != 2 or held.part.is_flat:
            return None
        return held.part.axes[axis]

    def _sums(
        self,
        path: str,
        number: int | None,
        left: Mapping[int, tuple[Place, Array, Array]],
        theirs: Place,
        limit: float,
        is_effect: bool,
    ) -> None:
        """Results that are right on no rank alone: parts of a sum, or wrong."""
        rest = dict(left)
        while rest:
            first = next(iter(rest))
            alike = tuple(rest) if number is None else self.rows.alike(first, number)
            group = [rank for rank in alike if rank in rest] or [first]
            members = {rank: rest.pop(rank) for rank in group}
            ours, mine, wanted = members[first]
            parts = self._distinct(members)
            error, relative = self._apart(np.sum(parts, axis=0), wanted)
            name = path or "the model"
            if len(parts) > 1 and self._status(error, limit) == "fine":
                where = listed(sorted(group))
                reader = None if is_effect else self._reads_part(first, ours)
                status: Status = "wrong" if is_effect or reader else "fine"
                reason = (
                    f"missing all-reduce: {name} gives a part of a sum on each of {where}; their "
                    "sum is what the one process has, and no collective reduces it"
                )
                self._add(
                    "output", status, path, first, ours, theirs, *self._apart(mine, wanted), limit,
                    "structure", reason, tuple(group), is_effect, "a part of a sum",
                )  # fmt: skip
                continue
            extra = self._double_bias(first, ours, parts, wanted, path, limit)
            for rank, (place, array, right) in members.items():
                own = self._apart(array, right)
                words = extra or self._bias_inside(array, right, path, limit)
                is_sum = len(parts) > 1 and error < own[0]
                reason = f"{name} is off by {percent(own[1])} of its size on rank {rank}"
                if is_sum:
                    own = error, relative
                    where, off = listed(sorted(group)), percent(relative)
                    reason = f"the sum of what {name} gives on {where} is off by {off} of its size"
                of_all = tuple(group) if words or is_sum else ()
                self._add(
                    "output", self._status(own[0], limit), path, rank, place, theirs, *own, limit,
                    "structure" if words else "result", words or reason, of_all, is_effect,
                )  # fmt: skip
                if of_all:
                    break

    def _distinct(self, members: Mapping[int, tuple[Place, Array, Array]]) -> list[Array]:
        """What ranks gave, once for those that have the same weights."""
        seen: dict[object, Array] = {}
        for rank, (_, mine, _) in members.items():
            key = tuple(
                sorted(
                    (h.name, str(h.part.key)) for h in self.weights.held.values() if h.rank == rank
                )
            )
            seen.setdefault(key, mine)
        return list(seen.values())

    def _reads_part(self, rank: int, ours: Place) -> bool:
        """Whether no collective is given a part of a sum that a rank has."""
        key = content(ours.record)
        return (
            not any(
                (kind := kind_of(call)) in _REDUCES
                and kind is not None
                and any(content(record) == key for record in given_to(call, kind))
                for call in self.ranks[rank].calls
            )
            and ours.record.sharding is None
        )

    def _double_bias(
        self, rank: int, ours: Place, parts: Sequence[Array], wanted: Array, path: str, limit: float
    ) -> str | None:
        """Parts of a sum that each have the bias."""
        bias = self.one.parameters.get(f"{path}.bias" if path else "bias")
        if len(parts) < 2 or bias is None or bias.record.shape != wanted.shape[-1:]:
            return None
        times = len(parts) - 1
        off = np.sum(parts, axis=0) - times * bias.array()
        if self._status(self._apart(off, wanted)[0], limit) != "fine":
            return None
        if self._reads_part(rank, ours):
            return (
                f"missing all-reduce: {path} gives a part of a sum on each of {len(parts)} ranks, "
                "with the bias on each, and no collective reduces it"
            )
        return _bias_words(f"{path}.bias", len(parts))

    def _bias_inside(self, mine: Array, wanted: Array, path: str, limit: float) -> str | None:
        """A result that is off by a bias of a module inside, taken more than once."""
        for name, place in self.one.parameters.items():
            inside = name.startswith(f"{path}.") or not path
            if not inside or not name.endswith("bias") or place.record.shape != wanted.shape[-1:]:
                continue
            for n in sorted({len(self.ranks), 2}):
                off = mine - (n - 1) * place.array()
                if self._status(self._apart(off, wanted)[0], limit) == "fine":
                    return _bias_words(name, n)
        return None

    # gradients

    def _gradients(self) -> None:
        for (rank, name), held in self.weights.held.items():
            stepped = self.ranks[rank].stepped.get(name)
            is_there = name in self.ranks[rank].gradients
            is_empty = stepped is not None and not stepped.record.numel
            if held.whole in self.one.gradients and not is_there and not is_empty:
                self.unknown.append(
                    f"rank {rank} has no gradient of {name}, which the one process has"
                )
        by_name: dict[str, dict[tuple[int, str], tuple[Held, Place, Array]]] = {}
        parts = {**self.weights.held, **self.weights.stepped}
        for (rank, name), held in parts.items():
            ours = self.ranks[rank].gradients.get(name)
            if ours is not None and ours.record.numel:
                canonical = self.weights.tied.get(held.whole, (held.whole,))[0]
                by_name.setdefault(canonical, {})[rank, name] = held, ours, ours.array()
        for name, theirs in self.one.gradients.items():
            if name not in (self.weights.tied.get(name, (name,))):
                continue
            canonical = self.weights.tied.get(name, (name,))[0]
            made = by_name.pop(canonical, None)
            if made is None:
                if canonical == name or canonical not in self.one.gradients:
                    self.unknown.append(f"no rank has a gradient of {name}")
                continue
            self._gradient(name, theirs, made)

    def _gradient(
        self,
        name: str,
        theirs: Place,
        made: Mapping[tuple[int, str], tuple[Held, Place, Array]],
    ) -> None:
        whole = theirs.array()
        size = self._gradient_size(name)
        limit = own_limit(self.unit, 2 * len(self.one.tree.modules)) + _GROWTH * self.inherited
        rest: dict[object, list[tuple[Held, Place, Array, Array]]] = {}
        for held, ours, mine in made.values():
            wanted = held.part.of(whole)
            if wanted.shape != mine.shape:
                self.unknown.append(
                    f"the gradient of {name} on rank {held.rank} has shape {list(mine.shape)}; "
                    f"{list(wanted.shape)} expected"
                )
                continue
            error, relative = self._apart(mine, wanted, size)
            if self._status(error, limit) == "fine":
                self._add("gradient", "fine", name, held.rank, ours, theirs, error, relative, limit,
                          is_effect=True)  # fmt: skip
            else:
                rest.setdefault(held.part.key, []).append((held, ours, mine, wanted))
        for group in rest.values():
            alike = [each for each in made.values() if each[0].part.key == group[0][0].part.key]
            words, cause = self._words(name, group, alike, limit, size)
            held, ours, mine, wanted = group[0]
            error, relative = self._apart(mine, wanted, size)
            self._add(
                "gradient", self._status(error, limit), name, held.rank, ours, theirs, error,
                relative, limit, cause, words, tuple(each[0].rank for each in group), True,
            )  # fmt: skip

    def _words(
        self,
        name: str,
        wrong: Sequence[tuple[Held, Place, Array, Array]],
        alike: Sequence[tuple[Held, Place, Array]],
        limit: float,
        size: float,
    ) -> tuple[str, Cause]:
        """What was done with a gradient that is not that of the one process."""
        _, _, mine, wanted = wrong[0]
        ranks = listed(sorted(each[0].rank for each in wrong))
        arrays = [array for _, _, array in alike]

        def fits(array: Array) -> bool:
            return self._status(self._apart(array, wanted, size)[0], limit) == "fine"

        differ = any(not self._are_equal(array, arrays[0], limit, size) for array in arrays)
        if differ and len(arrays) == len(wrong):
            total = np.sum(arrays, axis=0)
            names = sorted({each[0].name for each in wrong})
            if len(names) > 1 and fits(total):
                return (
                    f"tied weights are not synchronised: {' and '.join(names)} are one weight, and "
                    f"on {ranks} each has its own part of the gradient, whose sum is that of the "
                    "one process"
                ), "structure"
            for what, array in (("sum", total), ("mean", total / len(arrays))):
                if fits(array):
                    return (
                        f"the gradient of {name} is not reduced: it differs between {ranks}, and "
                        f"the {what} over them is that of the one process"
                    ), "structure"
        scale = float(np.sum(mine * wanted) / max(float(np.sum(wanted * wanted)), 1e-300))
        n = round(scale) if scale > 1 else round(1 / scale) if scale > 0 else 0
        if 1 < n <= len(self.ranks) ** 2 and fits(mine / n if scale > 1 else mine * n):
            if scale > 1:
                text = f"{n} times too large: summed over ranks or micro-batches, and not averaged"
            else:
                text = f"{n} times too small: averaged once too often"
            return f"the gradient of {name} is {text} (on {ranks})", "structure"
        off = percent(self._apart(mine, wanted, size)[1])
        return f"the gradient of {name} is off by {off} of its size on {ranks}", "result"

    def _are_equal(self, mine: Array, other: Array, limit: float, size: float) -> bool:
        return self._status(self._apart(mine, other, size)[0], limit) == "fine"

    def _gradient_size(self, name: str) -> float:
        """Of the gradients of a module the largest: a bias before a softmax has none of its own."""
        path = name.rpartition(".")[0]
        near = [p for n, p in self.one.gradients.items() if n.rpartition(".")[0] == path]
        return max((_rms(place.array()) for place in near), default=0.0)

    # common

    def _path(self, rank: int, path: str) -> str | None:
        """What a rank calls a module of the one process."""
        paths = self.weights.paths.get(rank, {})
        found = [ours for ours, theirs in paths.items() if theirs == path]
        return found[0] if found else None

    def _rows_or_all(
        self, rank: int, number: int, array: Array, shape: Sequence[int]
    ) -> Array | None:
        rows = self.rows.of(rank, number, array)
        if rows is not None and rows.shape == tuple(shape):
            return rows
        part = self.rows.parts.get((rank, number))
        if rows is None and part is not None and array.ndim == 1:  # positions, one a token
            cut = [
                places for places in part.axes if places is not None and places.max() < len(array)
            ]
            if len(cut) == 1:
                return array.take(cut[0], 0)
        return array if array.shape == tuple(shape) else None

    def _is_result(self, theirs: Place) -> bool:
        """Whether this is what the model as a whole gives."""
        keys = {content(place.record) for root in self.one.roots for place in results(root)}
        return content(theirs.record) in keys - {None}

    def _apart(self, mine: Array, wanted: Array, size: float = 0.0) -> tuple[float, float]:
        """The error in roundings, and as a share of the size."""
        if mine.shape != wanted.shape:
            return math.inf, math.inf
        with np.errstate(all="ignore"):
            off = np.where(mine == wanted, 0.0, mine - wanted)
        off = np.where(np.isnan(mine) & np.isnan(wanted), 0.0, off)
        if not np.isfinite(off).all():
            return math.inf, math.inf
        error = _rms(off)
        if off.ndim > 1 and off.size:
            rows = np.sqrt(np.mean(off.reshape(-1, off.shape[-1]) ** 2, -1))
            error = max(error, float(rows.max()) / _ROW_SHARE)
        scale = max(_rms(np.where(np.isfinite(wanted), wanted, 0.0)), size)
        relative = 0.0 if not error else error / scale if scale else math.inf
        return relative / self.unit, relative

    def _status(self, error: float, limit: float) -> Status:
        if error <= limit:
            return "fine"
        return "wrong" if error > UNSURE * limit else "undecided"

    def _add(
        self, kind: Any, status: Status, name: str, rank: int, ours: Place, theirs: Place,
        error: float = 0.0, relative: float = 0.0, limit: float = 0.0, cause: Cause = "result",
        reason: str = "", ranks: tuple[int, ...] = (), is_effect: bool = False, how: str = "",
    ) -> None:  # fmt: skip
        self.found.append(
            PlaceFound(kind, status, name, rank, ours, theirs, error, relative, limit, cause,
                       reason, ranks or (rank,), is_effect, how)
        )  # fmt: skip


def _rms(array: Array) -> float:
    return math.sqrt(float(np.mean(np.square(array)))) if array.size else 0.0


def _ends(array: Array) -> str:
    flat = list(itertools.islice(array.reshape(-1).tolist(), 4))
    more = ", ..." if array.size > len(flat) else ""
    return f"{', '.join(map(str, flat))}{more}"


def _bias_words(name: str, n: int) -> str:
    return (
        f"double bias: {name} is added on each of {n} ranks before their results are summed, "
        f"{number_text(n)} times in all"
    )


def _unit(has: RankStep, facts: Mapping[str, Any]) -> float:
    """The unit roundoff of the coarsest arithmetic in the modules of a step."""
    calls = [call for call in has.calls if call.name.startswith("Module.")]
    floats = (r.dtype for c in calls for r in c.tensors if r.role in ("output", "parameter"))
    products = (product_unit(facts, call) for call in calls)
    return max([2.0**-53, *map(roundoff, floats), *products, autocast_unit(calls)])
