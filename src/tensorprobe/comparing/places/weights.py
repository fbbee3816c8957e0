"""Which modules of two programs are the same: by name, by mapping, and by the weights they hold."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tensorprobe.comparing.mapping import Layers, Mapping, WeightParts, plain_path
from tensorprobe.comparing.places.boundaries import Module, Tree
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.records import TensorRecord, digests_tell

Array = np.ndarray[Any, Any]
How = Literal["mapping", "name", "weights", "content", "place"]
_MAX_NUMBERS = 1 << 28  # of weights that are searched row by row
_MOST = 0.6
_QUANTISED = ("int8", "uint8", "qint8", "quint8", "quint4x2", "int4", "uint4")


class Twins(NamedTuple):
    """Modules of both sides that are the same one; several where they are parts of it.

    `features` says where each output feature of actual is among those of expected, in a row;
    `columns` the same of input features. None: in the same place.
    """

    actual: tuple[str, ...]
    expected: tuple[str, ...]
    how: How
    features: Array | None = None
    columns: Array | None = None


class Pairing(NamedTuple):
    """All twins, and what has none."""

    twins: list[Twins]
    only_actual: list[str]
    only_expected: list[str]
    like: dict[str, str]  # without a twin: a module of expected that has the same shapes


def pair_modules(ours: Tree, theirs: Tree, mapping: Mapping) -> Pairing:
    """Pair the modules of two programs."""
    return _Pairing(ours, theirs, mapping).result()


class _Pairing:
    def __init__(self, ours: Tree, theirs: Tree, mapping: Mapping) -> None:
        self.ours, self.theirs, self.mapping = ours, theirs, mapping
        self.layers = Layers(ours.calls, mapping.layers)
        self.twins: list[Twins] = []
        ignored = [plain_path(pattern) for pattern in mapping.ignore]
        self.left = {p: m for p, m in ours.modules.items() if not _is_ignored(p, ignored)}
        self.right = {p: m for p, m in theirs.modules.items() if not _is_ignored(p, ignored)}

    def result(self) -> Pairing:
        for rule in self.mapping.parts:
            self._by_rule(rule)
        self._by_mapping()
        self._by_name()
        self._by_digests()
        self._by_rows()
        self._by_what_is_below()
        self._by_place()
        order = {path: n for n, path in enumerate(self.ours.modules)}
        self.twins.sort(key=lambda each: order[each.actual[-1]])
        return Pairing(self.twins, list(self.left), list(self.right), dict(self._by_shapes()))

    def _add(
        self,
        ours: Sequence[str],
        theirs: Sequence[str],
        how: How,
        rows: Arrangement | None = None,
    ) -> None:
        found = rows
        if found is None:
            mine = [self.left[path] for path in ours]
            others = [self.right[path] for path in theirs]
            found = arrangement(mine, others)
        self.twins.append(Twins(tuple(ours), tuple(theirs), how, found.features, found.columns))
        for path in ours:
            self.left.pop(path, None)
        for path in theirs:
            self.right.pop(path, None)

    # what the user says

    def _by_rule(self, rule: WeightParts) -> None:
        """Parts of one module, in every module that has them."""
        found = 0
        for path in list(self.left):
            if not _ends_in(path, rule.actual[0]):
                continue
            above = path[: -len(rule.actual[0])].rstrip(".")
            if rule.inside and not self._is_class(above, rule.inside):
                continue
            mine = [_joined(above, name) for name in rule.actual]
            others = [self._there(path, above, name) for name in rule.expected]
            if all(p in self.left for p in mine) and all(p is not None for p in others):
                self._add(mine, [p for p in others if p is not None], "mapping")
                found += 1
        if not found:
            ours, theirs = " + ".join(rule.actual), " + ".join(rule.expected)
            raise BadUsage(
                f"`mapping` says '{ours}' is '{theirs}', and no modules of both sides have these "
                f"names; actual has {_some(self.ours.modules)}, expected has "
                f"{_some(self.theirs.modules)}"
            )

    def _is_class(self, path: str, name: str) -> bool:
        if name == "TopLayer":
            return path == ""
        module = self.ours.modules.get(path)
        return module is not None and module.op.rpartition(".")[2] == name

    def _there(self, path: str, above: str, name: str) -> str | None:
        """The module of expected that a rule means: beside the twin of the one above, or the only
        one of this name with the same numbers in its path (of layers)."""
        beside = _joined(self._renamed(above), name)
        if beside in self.right:
            return beside
        numbers = _numbers(path)
        found = [p for p in self.right if _ends_in(p, name) and _numbers(p) == numbers]
        return found[0] if len(found) == 1 else None

    def _renamed(self, path: str) -> str:
        """A path of actual as expected has it: children by the class they are in, then prefixes."""
        path = self.layers.renamed(path)
        for ours in sorted(self.mapping.modules, key=len, reverse=True):
            head = plain_path(ours)
            if path == head or path.startswith(head + "."):
                return _joined(plain_path(self.mapping.modules[ours]), path[len(head) + 1 :])
        return path

    def _by_mapping(self) -> None:
        for path in list(self.left):
            for other in (self._renamed(path), self._by_end(path)):
                if other is not None and other != path and other in self.right:
                    self._add([path], [other], "mapping")
                    break

    def _by_end(self, path: str) -> str | None:
        """`wq: q_proj` names the ends of paths."""
        for ours, theirs in self.mapping.modules.items():
            if _ends_in(path, ours):
                return self._there(path, path[: -len(ours)].rstrip("."), theirs)
        return None

    # what the captures show

    def _by_name(self) -> None:
        for path in list(self.left):
            if path in self.right:
                self._add([path], [path], "name")

    def _by_digests(self) -> None:
        """Modules with the same weights, bit for bit; of several, in their order."""
        ours, theirs = _by_content(self.left.values()), _by_content(self.right.values())
        for content, mine in ours.items():
            others = theirs.get(content, [])
            if len(mine) == len(others):
                for a, e in zip(mine, others, strict=True):
                    self._add([a], [e], "weights")

    def _by_rows(self) -> None:
        """Modules whose weight has the rows of one or several others, in any order."""
        self._by_rows_of(self.right, self.left, one_is_actual=True)
        self._by_rows_of(self.left, self.right, one_is_actual=False)

    def _by_rows_of(
        self, parts: dict[str, Module], ones: dict[str, Module], *, one_is_actual: bool
    ) -> None:
        wanted = [m for m in parts.values() if _matrix(m) is not None]
        if not wanted or sum(_numel(m) for m in wanted) > _MAX_NUMBERS:
            return
        holders: dict[bytes, str] = {}
        sizes: dict[str, int] = {}
        for module in wanted:
            rows = _row_names(module)
            if rows is not None:
                sizes[module.path] = len(rows)
                holders.update((row, module.path) for row in rows)
        for module in [m for m in ones.values() if _matrix(m) is not None]:
            rows = _row_names(module)
            if rows is None or any(row not in holders for row in rows):
                continue
            found = list(dict.fromkeys(holders[row] for row in rows))
            if all(p in parts for p in found) and sum(sizes[p] for p in found) == len(rows):
                mine, others = ([module.path], found) if one_is_actual else (found, [module.path])
                self._add(mine, others, "weights")

    def _by_what_is_below(self) -> None:
        """Modules that hold twins and nothing else: the same twins, the same module."""
        number = {}
        for n, twins in enumerate(self.twins):
            number.update({("a", path): n for path in twins.actual})
            number.update({("e", path): n for path in twins.expected})
        ours = _held(self.ours, self.left, "a", number)
        theirs = _held(self.theirs, self.right, "e", number)
        for held, mine in ours.items():
            others = theirs.get(held, [])
            for a, e in zip(mine, others, strict=False):  # the innermost first
                self._add([a], [e], "content")
        for held, mine in ours.items():  # and most of them, where one side lacks some
            near = [h for h in theirs if len(h & held) > _MOST * len(h | held)]
            if len(near) == 1 and len(mine) == len(theirs[near[0]]) == 1:
                a, e = mine[0], theirs[near[0]][0]
                if a in self.left and e in self.right:
                    self._add([a], [e], "content")

    def _by_place(self) -> None:
        """The only one without a twin, on both sides, between the same twins in a module."""
        for twins in list(self.twins):
            if len(twins.actual) == len(twins.expected) == 1:
                ours = self._between(self.ours, twins.actual[0], "a")
                theirs = self._between(self.theirs, twins.expected[0], "e")
                for place in ours.keys() & theirs.keys():
                    mine, others = ours[place], theirs[place]
                    if len(mine) == len(others) == 1 and _same_results(
                        self.left[mine[0]], self.right[others[0]]
                    ):
                        self._add(mine, others, "place")

    def _between(self, tree: Tree, above: str, side: str) -> dict[tuple[int, int], list[str]]:
        """The children without a twin, by the twins before and after them."""
        number = {
            path: n
            for n, twins in enumerate(self.twins)
            for path in (twins.actual if side == "a" else twins.expected)
        }
        free = self.left if side == "a" else self.right
        children = [m for m in tree.modules.values() if m.parent == above]
        children.sort(key=lambda m: m.calls[0].index)
        found: dict[tuple[int, int], list[str]] = {}
        known = [number.get(m.path, -1) for m in children]
        for i, module in enumerate(children):
            if module.path in free:
                before = next((n for n in reversed(known[:i]) if n >= 0), -1)
                after = next((n for n in known[i + 1 :] if n >= 0), -1)
                found.setdefault((before, after), []).append(module.path)
        return found

    def _by_shapes(self) -> Iterator[tuple[str, str]]:
        """What may be the same, for the user to say."""
        free = dict(self.right)
        for path, module in self.left.items():
            shapes = _shapes(module)
            like = [p for p, m in free.items() if shapes and _shapes(m) == shapes]
            near = [p for p in like if _numbers(p) == _numbers(path)] or like
            if near:
                free.pop(near[0])
                yield path, near[0]


class Arrangement(NamedTuple):
    """Where output and input features of actual are in expected; None: in the same place."""

    features: Array | None = None
    columns: Array | None = None


def arrangement(ours: Sequence[Module], theirs: Sequence[Module]) -> Arrangement:
    """How the weights of a module are laid out in its twin, found by their contents.

    Where weights differ in their numbers too, nothing is found, and they stay in their order.
    """
    mine, others = [_matrix(m) for m in ours], [_matrix(m) for m in theirs]
    if not mine or not others or any(m is None for m in (*mine, *others)):
        return Arrangement()
    if len(ours) == len(theirs) == 1 and _same_digest(mine[0], others[0]):
        return Arrangement()
    if sum(_numel(m) for m in (*ours, *theirs)) > _MAX_NUMBERS:
        return Arrangement()
    rows = [_all_rows(group) for group in (ours, theirs)]
    found = _places(*rows)
    if found is not None:
        return Arrangement(features=_unless_same(found))
    if len(ours) == len(theirs) == 1:
        columns = [_all_rows(group, turned=True) for group in (ours, theirs)]
        found = _places(*columns)
        if found is not None:
            return Arrangement(columns=_unless_same(found))
    return Arrangement()


def _all_rows(modules: Sequence[Module], *, turned: bool = False) -> list[bytes] | None:
    found: list[bytes] = []
    for module in modules:
        rows = _row_names(module, turned=turned)
        if rows is None:
            return None
        found += rows
    return found


def _places(ours: list[bytes] | None, theirs: list[bytes] | None) -> Array | None:
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    free: dict[bytes, list[int]] = {}
    for j, row in reversed(list(enumerate(theirs))):
        free.setdefault(row, []).append(j)
    if sorted(ours) != sorted(theirs):
        return None
    return np.array([free[row].pop() for row in ours], np.int64)


def _unless_same(places: Array) -> Array | None:
    return None if bool((places == np.arange(places.size)).all()) else places


def weight_of(module: Module) -> Array | None:
    """The weight of a module, a row for each output feature; None where it has none."""
    record = _matrix(module)
    if record is None or record.blob is None:
        return None
    try:
        array = record.array()
    except UnreadableCapture:
        return None
    return array.T if is_turned(module) else array


def is_turned(module: Module) -> bool:
    """Whether its weight has a column for each output feature: transformers' Conv1D."""
    return module.op.rpartition(".")[2] == "Conv1D"


def _matrix(module: Module | None) -> TensorRecord | None:
    record = module.parameters.get("weight") if module is not None else None
    return record if record is not None and len(record.shape) == 2 else None


def _row_names(module: Module, *, turned: bool = False) -> list[bytes] | None:
    """A short name for each row of its weight, by the numbers in it."""
    weight = weight_of(module)
    if weight is None:
        return None
    rows = np.ascontiguousarray((weight.T if turned else weight).astype(np.float32))
    return [hashlib.blake2b(row.tobytes(), digest_size=12).digest() for row in rows]


def _numel(module: Module) -> int:
    record = _matrix(module)
    return record.numel if record is not None else 0


def _same_digest(a: TensorRecord | None, e: TensorRecord | None) -> bool:
    return a is not None and e is not None and digests_tell(a, e) and a.digest == e.digest


def _by_content(modules: Iterable[Module]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for module in modules:
        records = list(module.parameters.values())
        if records and all(record.digest for record in records):
            content = tuple(sorted((r.digest, r.shape) for r in records if r.digest))
            found.setdefault(content, []).append(module.path)
    return found


def _held(
    tree: Tree, left: dict[str, Module], side: str, number: dict[tuple[str, str], int]
) -> dict[frozenset[int], list[str]]:
    """The modules without a twin, by the twins below them; the innermost first."""
    below: dict[str, set[int]] = {path: set() for path in left}
    for path in tree.modules:
        n = number.get((side, path))
        if n is not None:
            for above in tree.above(path):
                if above in below:
                    below[above].add(n)
    found: dict[frozenset[int], list[str]] = {}
    for path in sorted(below, key=lambda p: left[p].n_before):
        if below[path]:
            found.setdefault(frozenset(below[path]), []).append(path)
    return found


def _same_results(a: Module, e: Module) -> bool:
    ours, theirs = (
        [r.shape[-1:] for r in m.calls[0].tensors if r.role == "output"] for m in (a, e)
    )
    return bool(ours) and ours == theirs


def _shapes(module: Module) -> list[tuple[int, ...]]:
    return sorted(record.shape for record in module.parameters.values())


def is_quantised(module: Module) -> bool:
    """Whether its weights are whole numbers of few bits, as far as its records show."""
    parts = module.op.lower().split(".")
    return any("quant" in part for part in parts) or any(
        r.dtype in _QUANTISED or r.dtype.startswith("float8")
        for call in module.calls[:1]
        for r in call.tensors
        if r.role in ("parameter", "buffer")
    )


def _is_ignored(path: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(path, pattern) or path.startswith(pattern + ".") for pattern in patterns
    )


def _ends_in(path: str, name: str) -> bool:
    return path == name or path.endswith("." + name)


def _joined(above: str, name: str) -> str:
    return f"{above}.{name}" if above and name else above or name


def _numbers(path: str) -> list[str]:
    return re.findall(r"\d+", path)


def _some(modules: Iterable[str]) -> str:
    names = [path for path in modules if path]
    return ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")
