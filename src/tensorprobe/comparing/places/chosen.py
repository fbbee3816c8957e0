"""Compares two runs at chosen places only: `compare --at`. What is between them may differ."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensorprobe.comparing.align import Pair
from tensorprobe.comparing.mapping import Mapping as CallMapping
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.places.boundaries import (
    GRADIENTS,
    MODULES,
    OUTPUTS,
    WORDS,
    Boundary,
    Chosen,
    Piece,
    Tree,
    choose,
    inputs,
    key_of,
    last_of_each_step,
    selects_nothing,
)
from tensorprobe.comparing.places.row_pairs import (
    AUTO,
    SAME,
    SAVED,
    SUM,
    Fork,
    Grids,
    Join,
    Joined,
    Labelled,
    Names,
    Rows,
    forks,
    grids_by_input,
    join,
    labelled,
    not_after,
    place_of,
    saved_grids,
)
from tensorprobe.comparing.places.weights import Pairing, Twins, is_turned, pair_modules
from tensorprobe.comparing.verdict import MeasuredPlace, RowCounts
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.records import Capture, TensorRecord, digests_tell
from tensorprobe.tensors.metrics import measure_pair
from tensorprobe.tensors.pair_metrics import FRACTION_BITS, equal_metrics

Array = np.ndarray[Any, Any]
Time = tuple[float, ...]
_ROW_SHARE = 4.0  # in a healthy pair the worst row is off by up to this much more than all of them
_CHUNK = 1 << 20


class FoundPlace(NamedTuple):
    """One tensor at a chosen place: what was measured, and where it belongs."""

    time: Time
    measured: MeasuredPlace
    pair: CallPair
    row: TensorPair
    twins: Twins | None
    depth: int  # how many modules had been called by then
    is_own: bool  # chosen for itself: the result of a module with weights, a gradient
    is_root: bool  # of the model as a whole

    @property
    def is_float(self) -> bool:
        record = self.row.actual or self.row.expected
        return record is not None and record.dtype in FRACTION_BITS


class PlaceResults(NamedTuple):
    """What was found at the chosen places of one rank."""

    found: list[FoundPlace]
    pairing: Pairing
    trees: tuple[Tree, Tree]
    forks: list[tuple[Fork, FoundPlace, str]]  # with what says that it is no tie, or ""
    notes: list[str]
    rows: RowCounts
    unpaired: tuple[int, int]  # rows without a partner, of each side, that no tie explains


def compare_rank(
    captures: tuple[Capture, Capture],
    trees: tuple[Tree, Tree],
    at: Sequence[str],
    rows: Rows,
    mapping: CallMapping,
) -> PlaceResults:
    """Measure all that is chosen in one rank; nothing is judged yet."""
    return _Rank(captures, trees, at, rows, mapping).results()


class _Rank:
    def __init__(
        self,
        captures: tuple[Capture, Capture],
        trees: tuple[Tree, Tree],
        at: Sequence[str],
        rows: Rows,
        mapping: CallMapping,
    ) -> None:
        self.ours, self.theirs = trees
        self.captures = dict(zip(("actual", "expected"), captures, strict=True))
        self.at, self.rows, self.mapping = at, rows, mapping
        self.patterns = [word for word in at if word not in WORDS]
        self.pairing = pair_modules(self.ours, self.theirs, mapping)
        self.names = Names()
        self._grids: tuple[Grids, Grids] | None = None
        self.found: list[FoundPlace] = []
        self.forks: list[tuple[Fork, FoundPlace, str]] = []
        self.rows_of = RowCounts()
        self.only: tuple[list[int], list[int]] = ([], [])  # labels that no tie explains
        self.by_label = False
        self.steps = _steps(trees)
        self.holders = [_holders(tree) for tree in trees]
        self.gradients = [_gradients(tree) if GRADIENTS in at else {} for tree in trees]

    def results(self) -> PlaceResults:
        self._check()
        for twins in self.pairing.twins:
            if self._is_chosen(twins):
                self._module(twins)
        if GRADIENTS in self.at:
            for twins in self.pairing.twins:
                self._gradients(twins)
        self._calls()
        self.found.sort(key=lambda each: each.time)
        return PlaceResults(
            self.found, self.pairing, (self.ours, self.theirs), self.forks, list(self._notes()),
            self.rows_of, (len(self.only[0]), len(self.only[1])),
        )  # fmt: skip

    # what is chosen

    def _check(self) -> None:
        """Whatever selects nothing is wrong usage."""
        for word in self.at:
            sides = (("actual", self.ours), ("expected", self.theirs))
            empty = [(side, tree) for side, tree in sides if not self._selects(word, tree)]
            missing = empty[0] if empty else None
            if missing is not None and (word in WORDS or len(empty) == 2):
                raise selects_nothing(word, missing[0], self.captures[missing[0]], missing[1])

    def _selects(self, word: str, tree: Tree) -> bool:
        if word == GRADIENTS:
            return bool(choose(tree, [word]))
        return bool(tree.modules) if word in WORDS else bool(choose(tree, [word]))

    def _is_chosen(self, twins: Twins) -> bool:
        if MODULES in self.at:
            return True
        if OUTPUTS in self.at and self._is_root(twins):
            return True
        return self._is_named(twins)

    def _is_named(self, twins: Twins) -> bool:
        return any(
            fnmatch.fnmatchcase(path, pattern)
            for pattern in self.patterns
            for path in (*twins.actual, *twins.expected)
        )

    def _is_root(self, twins: Twins) -> bool:
        return self.ours.modules[twins.actual[0]].parent is None

    # what is measured

    def _module(self, twins: Twins) -> None:
        ours, theirs = (_outputs(tree, p) for tree, p in self._sides(twins))
        pairs = list(_pair_tensors(ours, theirs))
        for a, e in pairs:
            self._tensor(twins, "output", a, e, twins.features)
        paired = {id(pieces) for a, _ in pairs for pieces in a[1]}
        for chosen in ours:
            for pieces in _floats(chosen).values():
                if id(pieces) not in paired:
                    self._miss(twins, "output", pieces[0], "expected has no such result")
        if MODULES not in self.at and not self._is_named(twins):
            return
        self._parameters(twins)
        given = [_floats(inputs(tree, paths[0])) for tree, paths in self._sides(twins)]
        if given[0] and given[1]:
            ours_in, theirs_in = (next(iter(each.items())) for each in given)
            groups = [([place], [pieces]) for place, pieces in (ours_in, theirs_in)]
            self._tensor(twins, "input", groups[0], groups[1], twins.columns)

    def _sides(self, twins: Twins) -> tuple[tuple[Tree, tuple[str, ...]], ...]:
        return (self.ours, twins.actual), (self.theirs, twins.expected)

    def _parameters(self, twins: Twins) -> None:
        sides = [[tree.modules[path] for path in paths] for tree, paths in self._sides(twins)]
        for name in sides[0][0].parameters:
            mine = [m.parameters.get(name) for m in sides[0]]
            others = [m.parameters.get(name) for m in sides[1]]
            if any(record is None for record in (*mine, *others)):
                continue
            turn = [is_turned(group[0]) and name == "weight" for group in sides]
            self._weights(twins, name, mine, others, turn, "parameter")  # type: ignore[arg-type]

    def _weights(
        self,
        twins: Twins,
        name: str,
        mine: Sequence[TensorRecord],
        others: Sequence[TensorRecord],
        turned: Sequence[bool],
        kind: str,
        pieces: tuple[Piece, Piece] | None = None,
    ) -> None:
        """A parameter, or its gradient: parts are joined by their output features."""
        tensor = f"{'parameters' if kind == 'parameter' else 'parameters_grad'}.{name}"
        a, e = mine[0], others[0]
        is_whole = len(mine) == len(others) == 1 and turned[0] == turned[1]
        is_moved = twins.features is not None or (twins.columns is not None and len(a.shape) == 2)

        def arrays() -> tuple[Array, Array]:
            ours, theirs = (
                np.concatenate([_turned(r.array(), turn) for r in group])
                for group, turn in zip((mine, others), turned, strict=True)
            )
            if twins.features is not None and len(theirs) == len(twins.features):
                theirs = theirs[twins.features]
            if twins.columns is not None and theirs.ndim == 2:
                theirs = theirs[:, twins.columns]
            return ours, theirs

        first = self.ours.modules[twins.actual[0]].calls[0]
        there = self.theirs.modules[twins.expected[0]].calls[0]
        ours = pieces[0] if pieces else Piece(first, a, None)
        theirs = pieces[1] if pieces else Piece(there, e, None)
        at: Time = (first.index, -1) if kind == "parameter" else (math.inf, ours.call.index)
        self._add(
            twins, kind, tensor, ours, theirs, None if is_whole and not is_moved else arrays, at
        )

    def _gradients(self, twins: Twins) -> None:
        sides = [
            [found.get(path, {}) for path in paths]
            for found, paths in zip(self.gradients, twins[:2], strict=True)
        ]
        take = (lambda pieces: pieces) if self.rows.how == SUM else last_of_each_step
        for name in sides[0][0] if sides[0] else ():
            groups = [[take(each.get(name, [])) for each in side] for side in sides]
            if not all(map(len, groups[0])) or not all(map(len, groups[1])):
                continue
            if self.rows.how == SUM:
                self._sums(twins, "gradient", groups[0], groups[1], twins.features)
                continue
            turn = [
                is_turned(tree.modules[paths[0]]) and name == "weight"
                for tree, paths in self._sides(twins)
            ]
            ours, theirs = (list(zip(*group, strict=False)) for group in groups)
            if len(ours) != len(theirs):
                why = f"of {len(ours)} steps in actual, {len(theirs)} in expected; `rows=sum` adds"
                self._miss(twins, "gradient", ours[0][0], f"{why} them up", theirs[0][0])
                continue
            for a, e in zip(ours, theirs, strict=False):
                records = [[piece.record for piece in group] for group in (a, e)]
                self._weights(twins, name, records[0], records[1], turn, "gradient", (a[0], e[0]))

    def _calls(self) -> None:
        """Calls that are no modules: those of a name go with those of the same."""
        if not self.patterns:
            return
        ours, theirs = (choose(tree, self.patterns) for tree in (self.ours, self.theirs))
        for place, pieces in ours.items():
            if not place.is_module and place in theirs:
                self._tensor(None, "output", ([place], [pieces]), ([place], [theirs[place]]), None)

    def _tensor(
        self,
        twins: Twins | None,
        kind: str,
        ours: tuple[list[Boundary], list[list[Piece]]],
        theirs: tuple[list[Boundary], list[list[Piece]]],
        places: Array | None,
    ) -> None:
        """The results of one name, of all calls, in the way that rows are to be paired."""
        a, e = ours[1], theirs[1]
        how = self.rows.how
        if how == SUM:
            self._sums(twins, kind, a, e, places)
            return
        if self.rows.actual or self.rows.expected:
            self._slices(twins, kind, a, e, places)
            return
        alike = how == AUTO and _have_same_shapes(a, e)
        same = _same_data(a[0], e[0]) if alike else False
        if how == SAME or same:
            self._in_order(twins, kind, a, e, places)
        elif not self._by_labels(twins, kind, ours, theirs, places):
            if same is None:  # nobody knows what the model was given
                self._in_order(twins, kind, a, e, places)
            else:
                self._scalars_or_none(twins, kind, ours, theirs)

    def _in_order(
        self,
        twins: Twins | None,
        kind: str,
        ours: list[list[Piece]],
        theirs: list[list[Piece]],
        places: Array | None,
    ) -> None:
        mine, others = list(zip(*ours, strict=False)), list(zip(*theirs, strict=False))
        for a, e in zip(mine, others, strict=False):
            whole = len(a) == len(e) == 1 and places is None
            make = None if whole else _joining(a, e, places)
            self._add(twins, kind, _name(a[0]), a[0], e[0], make, self._time(kind, a[0]))
        if len(mine) != len(others):
            why = f"{len(mine)} tensors in actual, {len(others)} in expected"
            self._miss(twins, kind, ours[0][0], why, theirs[0][0])

    def _slices(
        self,
        twins: Twins | None,
        kind: str,
        ours: list[list[Piece]],
        theirs: list[list[Piece]],
        places: Array | None,
    ) -> None:
        for a, e in zip(zip(*ours, strict=False), zip(*theirs, strict=False), strict=False):
            make = _joining(a, e, places)

            def cut(make: Callable[[], tuple[Array, Array]] = make) -> tuple[Array, Array]:
                mine, others = make()
                return mine[self.rows.actual], others[self.rows.expected]

            self._add(twins, kind, _name(a[0]), a[0], e[0], cut, self._time(kind, a[0]))

    def _sums(
        self,
        twins: Twins | None,
        kind: str,
        ours: list[list[Piece]],
        theirs: list[list[Piece]],
        places: Array | None,
    ) -> None:
        """All tensors of a side added up."""
        a, e = [list(zip(*side, strict=False)) for side in (ours, theirs)]

        def added() -> tuple[Array, Array]:
            sums = [_sum([_concatenated(group) for group in side]) for side in (a, e)]
            return sums[0], sums[1] if places is None else sums[1][..., places]

        last, other = a[-1][0], e[-1][0]
        self._add(twins, kind, _name(last), last, other, added, self._time(kind, last))

    def _by_labels(
        self,
        twins: Twins | None,
        kind: str,
        ours: tuple[list[Boundary], list[list[Piece]]],
        theirs: tuple[list[Boundary], list[list[Piece]]],
        places: Array | None,
    ) -> bool:
        """Rows with the same label; False where this tensor has no such rows."""
        grids = self.grids
        sides = []
        for (boundaries, groups), side in zip((ours, theirs), grids, strict=True):
            rows = []
            for pieces in zip(*groups, strict=False):
                try:
                    found = [
                        labelled(piece, side, boundary.path)
                        for piece, boundary in zip(pieces, boundaries, strict=True)
                    ]
                except (TensorprobeError, OSError, ValueError):
                    return False
                if any(each is None for each in found):
                    return False
                kept = [each for each in found if each is not None]
                rows.append((np.concatenate([each[0] for each in kept], -1), kept[0][1]))
            sides.append(rows)
        if places is not None:
            sides[1] = [(rows[..., places], labels) for rows, labels in sides[1]]
        both = self._join(sides, ours[1][0], theirs[1][0])
        self.by_label = True
        other = theirs[1][0][-1]
        for n, each in enumerate(both.joins):
            piece = ours[1][0][n]
            if each.labels:
                make = _given(each.actual, each.expected)
                time = self._time(kind, piece)
                self._add(twins, kind, _name(piece), piece, other, make, time, each.labels)
        if kind == "output" and twins is not None and self._is_root(twins):
            self.rows_of.compared += sum(len(each.labels) for each in both.joins)
            self.rows_of.only_actual += len(both.only_actual)
            self.rows_of.only_expected += len(both.only_expected)
            ties = self._find_forks(both)
            self.only[0].extend(not_after(both.only_actual, ties, self.names))
            self.only[1].extend(not_after(both.only_expected, ties, self.names))
        if not any(each.labels for each in both.joins):
            self._miss(
                twins,
                kind,
                ours[1][0][0],
                "the model was given other data: no row in common",
                other,
            )
        return True

    def _join(
        self, sides: Sequence[list[Labelled]], ours: list[Piece], theirs: list[Piece]
    ) -> Joined:
        """The rows of both sides; in a training, of each step by itself: weights change."""
        if not self.steps:
            return join(sides[0], sides[1])
        joins: dict[int, Join] = {}
        only: tuple[list[int], list[int]] = ([], [])
        for step in self.steps:
            mine = [i for i, piece in enumerate(ours) if piece.call.step == step]
            others = [i for i, piece in enumerate(theirs) if piece.call.step == step]
            found = join([sides[0][i] for i in mine], [sides[1][i] for i in others])
            joins.update(zip(mine, found.joins, strict=True))
            only[0].extend(found.only_actual)
            only[1].extend(found.only_expected)
        return Joined([joins[i] for i in range(len(ours))], *only)

    def _find_forks(self, both: Joined) -> list[Fork]:
        """Where other tokens are read on one side: a tie of the logits before, or not. The ties."""
        if self.rows.how == SAVED:
            return []
        joins = [each for each in both.joins if each.labels]  # only these were added to `found`
        last = self.found[len(self.found) - len(joins) :]
        ties: list[Fork] = []
        for fork in forks(both, self.names):
            for each, joined in zip(reversed(last), reversed(joins), strict=True):
                if fork.label in joined.labels:
                    i = joined.labels.index(fork.label)
                    why = _no_tie(joined.actual[i], joined.expected[i], fork)
                    self.forks.append((fork, each, why))
                    if not why:
                        ties.append(fork)
                    break
        return ties

    @property
    def grids(self) -> tuple[Grids, Grids]:
        """The labels of rows of both sides."""
        if self._grids is None:
            if self.rows.how == SAVED:
                self._grids = (
                    saved_grids(self.ours, self.names),
                    saved_grids(self.theirs, self.names),
                )
                for (side, capture), grids in zip(self.captures.items(), self._grids, strict=True):
                    if not grids:
                        raise BadUsage(
                            f"`rows=saved`: {side} '{capture.path}' has saved none; before each "
                            "call of the model: recorder.save('rows', a whole number for each row)"
                            ", or recorder.save_requests(...)"
                        )
            else:
                self._grids = self._read_grids()
        return self._grids

    def _read_grids(self) -> tuple[Grids, Grids]:
        """As whole sequences if every one of actual is in expected, else token after token."""
        trees = (self.ours, self.theirs)
        whole = [grids_by_input(tree, self.names, "sequence") for tree in trees]
        labels = [
            {int(n) for grid in grids.values() for n in grid.labels.reshape(-1)} - {-1}
            for grids in whole
        ]
        if labels[0] and labels[0] <= labels[1]:
            return whole[0], whole[1]
        prefix = [grids_by_input(tree, self.names, "prefix") for tree in trees]
        return prefix[0], prefix[1]

    def _scalars_or_none(
        self,
        twins: Twins | None,
        kind: str,
        ours: tuple[list[Boundary], list[list[Piece]]],
        theirs: tuple[list[Boundary], list[list[Piece]]],
    ) -> None:
        a, e = ours[1][0], theirs[1][0]
        if all(not piece.record.shape for piece in (*a, *e)):
            sizes = [
                self._sizes(side, grids) for side, grids in zip((a, e), self.grids, strict=True)
            ]
            if all(len(each) == 1 for each in sizes):

                def means() -> tuple[Array, Array]:
                    mine, others = (
                        np.mean([piece.record.array().astype(np.float64) for piece in side])
                        for side in (a, e)
                    )
                    return np.asarray(mine), np.asarray(others)

                last = a[-1]
                self._add(twins, kind, _name(last), last, e[-1], means, self._time(kind, last))
                return
            why = "the mean of micro-batches that are not of one size"
        elif any(piece.record.blob is None for piece in (*a, *e)):
            why = f"{_shapes(a)} here, {_shapes(e)} expected, and no tensors were kept"
        else:
            why = f"{_shapes(a)} here, {_shapes(e)} expected: no rows that have read the same"
        self._miss(twins, kind, a[0], why, e[0])

    def _sizes(self, pieces: Sequence[Piece], grids: Grids) -> set[int]:
        found = set()
        for piece in pieces:
            grid = grids.get(key_of(piece.root)) if piece.root is not None else None
            found.add(grid.real if grid is not None else -1)
        return found

    # what becomes of it

    def _time(self, kind: str, piece: Piece) -> Time:
        if kind == "input":
            return (piece.call.index, 0)
        return (self.ours.ends.get(key_of(piece.call), piece.call.index), 1, -piece.call.index)

    def _measured(self, twins: Twins | None, kind: str, piece: Piece, **more: Any) -> MeasuredPlace:
        ours, theirs = ("", "") if twins is None else map(" + ".join, twins[:2])
        if twins is None:
            ours = theirs = piece.call.name
        call = piece.call
        return MeasuredPlace(
            actual=ours, expected=theirs, kind=kind,  # type: ignore[arg-type]
            call=call.name, step=call.step, rank=call.rank, **more,
        )  # fmt: skip

    def _add(
        self,
        twins: Twins | None,
        kind: str,
        tensor: str,
        ours: Piece,
        theirs: Piece,
        make: Callable[[], tuple[Array, Array]] | None,
        time: Time,
        labels: Sequence[int] = (),
    ) -> None:
        row = TensorPair(tensor, ours.record, theirs.record)
        measured = self._measured(twins, kind, ours, tensor=tensor, status="not compared")
        worst: tuple[float, int] | None = None
        if make is not None:
            row.actual = msgspec.structs.replace(ours.record, digest=None, summary=None)
            row.expected = msgspec.structs.replace(theirs.record, digest=None, summary=None)
        if make is not None or not _is_known(row):
            worst = _measure(row, make)
        if row.problem is not None:
            measured.note = row.problem
        elif worst is not None and labels:
            measured.row = place_of(labels[worst[1]], self.names)
        if labels:
            measured.rows = len(labels)
        how = "exact" if ours.call.name == theirs.call.name else "mapped"
        pair = CallPair(Pair(ours.call, theirs.call, how), [row])  # type: ignore[arg-type]
        measured.relative = None if row.problem else _relative(row, worst)
        depth, is_own = self._depth(twins, kind, theirs)
        is_root = twins is not None and self._is_root(twins)
        self.found.append(FoundPlace(time, measured, pair, row, twins, depth, is_own, is_root))

    def _miss(
        self, twins: Twins | None, kind: str, piece: Piece, why: str, other: Piece | None = None
    ) -> None:
        """A chosen place that cannot be compared."""
        bare = {"digest": None, "summary": None, "blob": None}
        ours = msgspec.structs.replace(piece.record, **bare)
        theirs = msgspec.structs.replace(other.record, **bare) if other is not None else None
        row = TensorPair(_name(piece), ours, theirs, problem=why)
        measured = self._measured(
            twins, kind, piece, tensor=_name(piece), status="not compared", note=why
        )
        pair = CallPair(Pair(piece.call, other.call if other else None, "aligned"), [row])
        depth, is_own = self._depth(twins, kind, piece)
        is_root = twins is not None and self._is_root(twins)
        time = self._time(kind, piece)
        self.found.append(FoundPlace(time, measured, pair, row, twins, depth, is_own, is_root))

    def _depth(self, twins: Twins | None, kind: str, theirs: Piece) -> tuple[int, bool]:
        if twins is None:
            return theirs.call.index + 1, True
        if kind == "gradient":
            return 2 * len(self.theirs.modules), True
        depth = max(self.theirs.modules[path].n_before for path in twins.expected)
        has_weights = any(
            path in holders
            for holders, paths in zip(self.holders, twins[:2], strict=True)
            for path in paths
        )
        return depth, has_weights or self._is_named(twins) or self._is_root(twins)

    def _notes(self) -> Iterator[str]:
        if self.by_label and self.rows.how != SAVED:
            yield "rows were paired by what the model had read when it came to them"
        rows = self.rows_of
        for side, n in (("actual", rows.only_actual), ("expected", rows.only_expected)):
            if n:
                total = n + rows.compared
                yield f"{n} of {total} rows that the model gave in {side} have no partner"


def _holders(tree: Tree) -> set[str]:
    """The modules that hold weights, or call a module that does."""
    own = [module.path for module in tree.modules.values() if module.parameters]
    return {path for each in own for path in (each, *tree.above(each))}


def _outputs(tree: Tree, paths: Sequence[str]) -> list[Chosen]:
    found = []
    for path in paths:
        calls = tree.modules[path].calls
        chosen: Chosen = {}
        for call in calls:
            for record in call.tensors:
                if record.role == "output" and record.alias_of is None:
                    place = Boundary(path, record.name.removeprefix(call.name + "."))
                    chosen.setdefault(place, []).append(Piece(call, record, tree.root(call)))
        found.append(chosen)
    return found


def _gradients(tree: Tree) -> dict[str, dict[str, list[Piece]]]:
    """The gradients of each module, by the names of its parameters."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for place, pieces in choose(tree, [GRADIENTS]).items():
        name = place.tensor.removeprefix("parameters_grad.")
        found.setdefault(place.path, {})[name] = pieces
    return found


Group = tuple[list[Boundary], list[list[Piece]]]


def _pair_tensors(ours: list[Chosen], theirs: list[Chosen]) -> Iterator[tuple[Group, Group]]:
    """The results of twins: by name, else in order if they have as many features."""
    if len(ours) > 1 or len(theirs) > 1:  # parts: the first result of each
        firsts = [
            [next(iter(_floats(each).items()), None) for each in side] for side in (ours, theirs)
        ]
        if all(each is not None for side in firsts for each in side):
            a, e = (
                ([each[0] for each in side if each], [each[1] for each in side if each])
                for side in firsts
            )
            yield a, e
        return
    mine, others = ours[0], dict(theirs[0])
    for place, pieces in mine.items():
        same = next((p for p in others if p.tensor == place.tensor), None)
        like = same or next(
            (p for p, e in others.items() if _are_alike(pieces[0].record, e[0].record)), None
        )
        if like is not None:
            yield ([place], [pieces]), ([like], [others.pop(like)])


def _are_alike(a: TensorRecord, e: TensorRecord) -> bool:
    return a.shape[-1:] == e.shape[-1:] and bool(a.shape) == bool(e.shape)


def _floats(chosen: Chosen) -> Chosen:
    return {p: pieces for p, pieces in chosen.items() if pieces[0].record.dtype in FRACTION_BITS}


def _name(piece: Piece) -> str:
    name = piece.record.name.removeprefix(piece.call.name + ".")
    return f"parameters_grad.{name}" if piece.record.role == "parameter_grad" else name


def _steps(trees: tuple[Tree, Tree]) -> list[int]:
    """The steps of a training; empty for programs that have no optimizer."""
    if not any(call.name.startswith("Optimizer.") for tree in trees for call in tree.calls):
        return []
    return sorted({call.step for tree in trees for call in tree.calls})


def _shapes(pieces: Sequence[Piece]) -> str:
    shapes = list(dict.fromkeys(str(list(piece.record.shape)) for piece in pieces))
    return ", ".join(shapes[:3]) + (" ..." if len(shapes) > 3 else "")


def _joined_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    shape = pieces[0].record.shape
    if len(pieces) == 1 or not shape:
        return shape
    return (*shape[:-1], sum(piece.record.shape[-1] for piece in pieces if piece.record.shape))


def _have_same_shapes(ours: list[list[Piece]], theirs: list[list[Piece]]) -> bool:
    """Whether both sides have as many tensors, of the same shapes."""
    mine, others = (
        [_joined_shape(group) for group in zip(*side, strict=False)] for side in (ours, theirs)
    )
    return mine == others


def _same_data(ours: Sequence[Piece], theirs: Sequence[Piece]) -> bool | None:
    """Whether the model was given the same in each call; None where nobody knows."""
    known = [_same_inputs(a, e) for a, e in zip(ours, theirs, strict=True)]
    if False in known:
        return False
    return True if known and all(known) else None


def _same_inputs(a: Piece, e: Piece) -> bool | None:
    if a.root is None or e.root is None:
        return None
    ours, theirs = (
        [r for r in root.tensors if r.role == "input" and "mask" not in r.name]
        for root in (a.root, e.root)
    )
    if not ours or not theirs:
        return None
    first = ours[0]
    same = [t for t in theirs if t.shape == first.shape and t.dtype == first.dtype]
    if not same:
        return False
    if all(digests_tell(first, t) for t in same):
        return first.digest in {t.digest for t in same}
    return any(t.summary == first.summary for t in same) if first.summary is not None else None


def _concatenated(pieces: Sequence[Piece]) -> Array:
    arrays = [piece.record.array() for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)


def _joining(
    ours: Sequence[Piece], theirs: Sequence[Piece], places: Array | None
) -> Callable[[], tuple[Array, Array]]:
    def make() -> tuple[Array, Array]:
        a, e = _concatenated(ours), _concatenated(theirs)
        return a, e if places is None else e[..., places]

    return make


def _given(a: Array, e: Array) -> Callable[[], tuple[Array, Array]]:
    return lambda: (a, e)


def _sum(arrays: Sequence[Array]) -> Array:
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array.astype(np.float64)
    return total


def _turned(array: Array, turn: bool) -> Array:
    return array.T if turn else array


def _is_known(row: TensorPair) -> bool:
    """Whether digests or summaries alone tell all that can be told."""
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    if a.shape != e.shape:
        row.problem = f"shapes differ: {list(a.shape)} and {list(e.shape)}"
        return True
    if a.blob is None or e.blob is None:
        return True
    if not digests_tell(a, e) or a.digest != e.digest or a.dtype != e.dtype:
        return False
    row.metrics = equal_metrics(e.numel, e.summary.norm if e.summary else None)
    return True


def _measure(
    row: TensorPair, make: Callable[[], tuple[Array, Array]] | None
) -> tuple[float, int] | None:
    """Fill in the metrics of a row; the error of its worst row, and which that is."""
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    try:
        mine, others = make() if make is not None else (a.array(), e.array())
        if mine.shape != others.shape:
            row.problem = f"shapes differ: {list(mine.shape)} and {list(others.shape)}"
            return None
        row.metrics = measure_pair(mine, others)
    except (TensorprobeError, OSError, ValueError, TypeError, IndexError, MemoryError) as error:
        row.problem = f"{type(error).__name__}: {error}"
        return None
    row.actual = msgspec.structs.replace(a, shape=mine.shape)
    row.expected = msgspec.structs.replace(e, shape=others.shape)
    return _worst_row(mine, others)


def _relative(row: TensorPair, worst: tuple[float, int] | None) -> float | None:
    """The rms error as a share of the tensor's size; a row that is far off counts for more."""
    m = row.metrics
    if m is None:
        return None
    if m.nonfinite_disagree:
        return math.inf
    error = max(m.rms_error, worst[0] / _ROW_SHARE if worst is not None else 0.0)
    if not error:
        return 0.0
    return error / m.rms_expected if m.rms_expected else math.inf


def _worst_row(mine: Array, others: Array) -> tuple[float, int] | None:
    """The largest rms error of a row, and its number."""
    if mine.ndim < 2 or not mine.size or mine.dtype.kind in "biuc":
        return None
    a, e = (x.reshape(-1, x.shape[-1]) for x in (mine, others))
    step = max(1, _CHUNK // a.shape[1])
    worst = (0.0, 0)
    with np.errstate(all="ignore"):
        for i in range(0, len(a), step):
            d = a[i : i + step].astype(np.float64) - e[i : i + step].astype(np.float64)
            sizes = np.sqrt(np.mean(np.square(np.where(np.isfinite(d), d, 0.0)), -1))
            at = int(np.argmax(sizes))
            worst = max(worst, (float(sizes[at]), i + at))
    return worst


def _no_tie(ours: Array, theirs: Array, fork: Fork) -> str:
    """Empty if the logits of both tokens are nearer than the sides are to each other."""
    size = theirs.size
    if not (0 <= fork.actual < size and 0 <= fork.expected < size):
        return "the sides were given other tokens"
    ours, theirs = (x.reshape(-1).astype(np.float64) for x in (ours, theirs))
    apart = float(np.max(np.abs(ours - theirs)))
    margin = float(theirs[fork.expected] - theirs[fork.actual])
    if abs(margin) <= 2 * apart:
        return ""
    return f"their logits are {margin:.3g} apart, and the sides by at most {apart:.3g}"
