"""Weights that the program has in one piece, and the model in many, or the other way round.

FSDP1 gathers a flat tensor whose pieces an optimizer has stepped; a distributed optimizer gathers
what it has stepped into one tensor, whose pieces are the parameters. They share memory, so no call
gives one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import rms_size
from tensorprobe.comparing.scene import AMPLIFIES, Node, Scene, relative
from tensorprobe.records import TensorRecord

_KINDS = ("all_gather", "broadcast", "scatter", "all_to_all")  # they move what they are given
_ROUNDS = 1 + 1e-5  # norms are of sums


class _Whole(NamedTuple):
    """What one call gave, as if it were one tensor."""

    node: Node
    sides: tuple[_Size, _Size]
    difference: float  # its norm
    of_one: float  # how far apart each number may be by noise that was divided by noise


class _Size(NamedTuple):
    numel: int
    norm: float
    least: float
    most: float
    dtypes: frozenset[str]


class FlatWeights:
    """What optimizers have stepped and ranks have gathered so far."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._wholes: list[_Whole] = []

    def leave(self, node: Node) -> None:
        """Go on from a call: later tensors may be parts of its results, or all of them in one."""
        is_gather = node.heard is not None and node.heard.key.kind in _KINDS
        if not node.is_paired or not (is_gather or node.call.name.startswith("Optimizer.")):
            return
        # of a communication both the list it writes to and what it gives are there
        sides = [_size_of(_side(node.outputs, side)) for side in (0, 1)]
        if sides[0] is None or sides[1] is None:
            return
        apart = math.hypot(*(self._difference(node, row) for row in node.outputs))
        of_one = 0.0 if is_gather or _has_content(node) else _noise_of_step(node)
        if apart > 0 or of_one > 0:
            self._wholes.append(_Whole(node, (sides[0], sides[1]), apart, of_one))

    def behind(self, node: Node, row: TensorPair) -> Node | None:
        """The call whose results in another form explain by how much an input differs, in the
        steps since the one before."""
        a, e = row.actual, row.expected
        if a is None or e is None:
            return None
        parts = [size for record in (a, e) if (size := _size_of([record])) is not None]
        if len(parts) < 2:
            return None
        apart = self._difference(node, row)
        for whole in reversed(self._wholes):
            if whole.node.call.step < node.call.step - 1:
                break
            by_noise = whole.of_one * math.sqrt(e.numel)
            if apart <= max(AMPLIFIES * whole.difference, by_noise) and all(
                _may_share(part, all_of_it)
                for part, all_of_it in zip(parts, whole.sides, strict=True)
            ):
                return whole.node
        return None

    def _difference(self, node: Node, row: TensorPair) -> float:
        """The norm of the difference of both sides, about."""
        if row.actual is None or row.expected is None or not row.expected.numel:
            return 0.0
        apart = relative(row, self._scene.distance(node, row))
        return apart * rms_size(row.expected) * math.sqrt(row.expected.numel)


def _has_content(node: Node) -> bool:
    return all(row.metrics is not None for row in node.outputs)


def _noise_of_step(node: Node) -> float:
    """Adam steps each number by about its rate, of noise too. The statistics of a whole do not show
    how far apart few of its numbers are."""
    rates = [
        group["lr"] for group in node.call.args if isinstance(group, dict) and "betas" in group
    ]
    return 2 * max((float(rate) for rate in rates if isinstance(rate, float | int)), default=0.0)


def _side(rows: Iterable[TensorPair], side: int) -> Iterator[TensorRecord | None]:
    return ((row.actual, row.expected)[side] for row in rows)


def _size_of(records: Iterable[TensorRecord | None]) -> _Size | None:
    """Of several tensors together; None if it is not known, or one has NaN."""
    found: list[TensorRecord] = []
    norms: list[float] = []
    ends: list[float] = []
    for record in records:
        if record is None or not record.numel:
            continue
        s = record.summary
        if s is None or s.norm is None or s.min is None or s.max is None or s.nan_count:
            return None
        found.append(record)
        norms.append(float(s.norm))
        ends += [float(s.min), float(s.max)]
    if not found:
        return None
    dtypes = frozenset(record.dtype for record in found)
    return _Size(_numel(found), math.hypot(*norms), min(ends), max(ends), dtypes)


def _numel(records: Sequence[TensorRecord]) -> int:
    return sum(record.numel for record in records)


def _may_share(part: _Size, whole: _Size) -> bool:
    """Whether one tensor can be made of numbers of the others, but for zeros at its end."""
    least, most = min(whole.least, 0.0), max(whole.most, 0.0)
    return (
        part.dtypes <= whole.dtypes
        and part.norm <= whole.norm * _ROUNDS
        and least <= part.least
        and part.most <= most
    )
