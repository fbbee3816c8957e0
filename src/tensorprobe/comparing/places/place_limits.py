"""How far chosen places may be apart: by rounding, by runs that are told to be noise, as stated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tensorprobe.comparing.places.boundaries import Tree
from tensorprobe.comparing.places.chosen import FoundPlace, PlaceResults
from tensorprobe.comparing.places.weights import is_quantised
from tensorprobe.comparing.rounding import (
    autocast_unit,
    distance,
    pair_roundoff,
    product_unit,
    roundoff,
)
from tensorprobe.comparing.verdict import Status

# Healthy pairs of Llama, GPT-2, Qwen2, BERT and T5 stay below 2.6 and 0.8 roundings times the root
# of the number of modules; with weights fifteen times as large as usual, below 11 and 4.
_FINE, _COARSE = 8.0, 2.0
_COARSE_UNIT = 2.0**-12
_LEAST_DEPTH = 4
_GROWTH = 2.0  # what a module may make of the error that it is given
UNSURE = 4.0  # beyond this much of the limit it is no rounding
NOISE = 3.0
_WEIGHTS = 1.0  # weights are copied, or rounded once

Floors = dict[tuple[str, str, str, int], float]  # place in expected, kind, tensor, n-th of it


def own_limit(unit: float, depth: int) -> float:
    """How many roundings a healthy result is off by at most, after so many modules."""
    factor = _COARSE if unit >= _COARSE_UNIT else _FINE
    return factor * math.sqrt(max(depth, _LEAST_DEPTH))


class Limits:
    """Judges what was found at the chosen places of one rank, in the order of time."""

    def __init__(
        self,
        results: PlaceResults,
        facts: tuple[Mapping[str, Any], Mapping[str, Any]],
        *,
        within: float | None = None,
        floors: Floors | None = None,
    ) -> None:
        self._results = results
        self.within = within
        self._floors = floors
        self._units = [_units(tree, fact) for tree, fact in zip(results.trees, facts, strict=True)]
        self.quantised = _quantised_from(results)
        self._given: dict[str, float] = {}  # the error of what each module was given
        self._inside: dict[str, float] = {}  # and of the results of those in it, the largest
        self._seen: dict[tuple[str, str, str], int] = {}
        self._sizes: dict[str, float] = {}  # of the gradients of each module, the largest
        for found in results.found:
            metrics = found.row.metrics
            if found.measured.kind == "gradient" and metrics is not None:
                key = found.measured.actual
                self._sizes[key] = max(self._sizes.get(key, 0.0), metrics.rms_expected)

    def judge(self) -> None:
        """Fill in error, limit and status of each."""
        for found in self._results.found:
            if found.measured.note is None:
                self._judge(found)

    def _judge(self, found: FoundPlace) -> None:
        measured, row = found.measured, found.row
        unit = row.coarse = self._unit(found)
        error = row.distance = self._error(found, unit)
        measured.error = error
        measured.inherited = self._inherited(found)
        limit = self._limit(found, unit)
        measured.limit = limit
        measured.status = self._status(found, error, limit, unit)
        is_fine = measured.status in ("equal", "within") or self.within is not None
        if is_fine or (found.is_own and measured.status == "undecided"):
            self._remember(found, error)

    def _unit(self, found: FoundPlace) -> float:
        own = pair_roundoff(found.row)
        if not own or found.measured.kind == "parameter":
            return own
        if found.twins is None or found.measured.kind == "gradient":
            return max(own, *(units[-1] if units else 0.0 for units in self._units))
        before = [
            max(tree.modules[path].n_before for path in paths)
            for tree, paths in zip(self._results.trees, found.twins[:2], strict=True)
        ]
        return max(own, *(units[n - 1] for units, n in zip(self._units, before, strict=True)))

    def _error(self, found: FoundPlace, unit: float) -> float:
        relative, metrics = found.measured.relative, found.row.metrics
        if relative is None or not unit or metrics is None:
            found.row.distance = None
            return distance(found.row)
        if found.measured.kind == "gradient":
            size = self._sizes.get(found.measured.actual, 0.0)
            if metrics.rms_expected < size and math.isfinite(relative):
                # a bias before a softmax has no gradient: what is left is of its neighbours' size
                relative = metrics.rms_error / size
                found.measured.relative = relative
        return relative / unit

    def _limit(self, found: FoundPlace, unit: float) -> float | None:
        measured = found.measured
        if self.within is not None:
            return self.within / unit if unit else 0.0
        floor = self._floor(found)
        if measured.kind == "parameter":
            return max(_WEIGHTS, floor)
        if self._floors is None and self.is_quantised_at(found):
            return None
        own = own_limit(unit, found.depth)
        return max(own + _GROWTH * measured.inherited, floor)

    def _floor(self, found: FoundPlace) -> float:
        measured = found.measured
        key = (measured.expected, measured.kind, measured.tensor)
        n = self._seen[key] = self._seen.get(key, -1) + 1
        return NOISE * (self._floors or {}).get((*key, n), 0.0)

    def is_quantised_at(self, found: FoundPlace) -> bool:
        """Whether something quantised has come before, whose error no rounding bounds."""
        return self.quantised is not None and found.depth >= self.quantised[0]

    def _status(self, found: FoundPlace, error: float, limit: float | None, unit: float) -> Status:
        if error == 0:
            return "equal"
        if not unit:
            return "undecided"  # whole numbers: rounding may have decided between two
        if limit is not None and error <= limit:
            return "within"
        if limit is None:
            return "undecided"
        if self.within is not None or found.measured.kind == "parameter":
            return "beyond"
        if self._floors is not None:
            return "beyond"
        return "beyond" if error > UNSURE * limit else "undecided"

    def _inherited(self, found: FoundPlace) -> float:
        if found.twins is None or found.measured.kind in ("parameter", "gradient"):
            return 0.0
        modules = self._results.trees[0].modules
        path = found.twins.actual[0]
        if found.measured.kind == "input":
            above = modules[path].parent
            if above is None:
                return 0.0
        else:
            above = path
        return max(self._given.get(above, 0.0), self._inside.get(above, 0.0))

    def _remember(self, found: FoundPlace, error: float) -> None:
        if found.twins is None or found.measured.kind not in ("input", "output"):
            return
        path = found.twins.actual[0]
        if math.isinf(error):
            return
        if found.measured.kind == "input":
            self._given[path] = error
            self._inside[path] = 0.0  # a call of it begins
            return
        above = self._results.trees[0].modules[path].parent
        if above is not None:
            self._inside[above] = max(self._inside.get(above, 0.0), error)


def noise_floors(runs: Sequence[PlaceResults]) -> Floors:
    """How far further runs of the expected side are from it, at each chosen place."""
    floors: Floors = {}
    for results in runs:
        judged = Limits(results, ({}, {}))
        judged.judge()
        seen: dict[tuple[str, str, str], int] = {}
        for found in results.found:
            measured = found.measured
            key = (measured.expected, measured.kind, measured.tensor)
            n = seen[key] = seen.get(key, -1) + 1
            if measured.error is not None and math.isfinite(measured.error):
                place = (*key, n)
                floors[place] = max(floors.get(place, 0.0), measured.error)
    return floors


def _units(tree: Tree, facts: Mapping[str, Any]) -> list[float]:
    """For each module, in order, the coarsest arithmetic that there was up to its end."""
    found: list[float] = []
    unit = 0.0
    for module in tree.modules.values():
        call = module.calls[0]
        if not is_quantised(module):
            floats = (r.dtype for r in call.tensors if r.role in ("output", "parameter"))
            unit = max([unit, *map(roundoff, floats)])
        found.append(max(unit, autocast_unit(module.calls[:1]), product_unit(facts, call)))
        unit = found[-1]
    return found


def _quantised_from(results: PlaceResults) -> tuple[int, str] | None:
    """The first module that is quantised on one side only: its place, and its name."""
    for twins in results.pairing.twins:
        sides = [
            any(is_quantised(tree.modules[path]) for path in paths)
            for tree, paths in zip(results.trees, twins[:2], strict=True)
        ]
        if sides[0] != sides[1]:
            depth = max(results.trees[1].modules[path].n_before for path in twins.expected)
            return depth, " + ".join(twins.actual if sides[0] else twins.expected)
    return None
