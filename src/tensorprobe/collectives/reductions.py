"""The result of a communication against what its members gave, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorprobe.collectives.links import Key, Kind, given, got, reduction_of, root_of
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Call, TensorRecord
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

_REDUCES: tuple[Kind, ...] = ("all_reduce", "reduce", "reduce_scatter")
# Of a sum's size: how many roundings it may be off for each doubling of the members, at the worst.
_PER_MEMBER = 2.0
_Array = np.ndarray[Any, Any]


class ReductionError(NamedTuple):
    """How far what a rank got is from what the members gave, in roundings of its dtype."""

    error: float
    allowed: float
    tensor: TensorRecord
    relative: float  # to the size of the result

    @property
    def is_wrong(self) -> bool:
        return self.error > self.allowed


class Gave(NamedTuple):
    """What the members of a communication gave, and in which way it is reduced."""

    kind: Kind
    op: str  # "sum"; "" of what only moves numbers
    members: tuple[int, ...]
    arrays: Mapping[int, list[_Array]]
    total: list[_Array]  # of what is reduced: the result, and the sizes that it is made of
    sizes: list[_Array]


def gather(key: Key, calls: Mapping[int, Call], members: Sequence[int]) -> Gave | None:
    """What all members gave, read from the disk; None where some of it is not known."""
    if key.kind == "barrier" or len(members) < 2 or set(members) - calls.keys():
        return None
    op = ""
    if key.kind in _REDUCES:
        ops = {reduction_of(calls[rank]) for rank in members}
        op = ops.pop() or "" if len(ops) == 1 else ""
        if op not in ("sum", "avg", "max", "min", "product"):
            return None
    arrays: dict[int, list[_Array]] = {}
    for rank in members:
        try:
            arrays[rank] = [_read(record) for record in given(calls[rank], key.kind)]
        except (UnreadableCapture, OSError, ValueError):
            return None
    ordered = tuple(sorted(members))
    if not op:
        return Gave(key.kind, op, ordered, arrays, [], [])
    shapes = {tuple(a.shape for a in found) for found in arrays.values()}
    if len(shapes) != 1 or not next(iter(shapes)):
        return None
    total, sizes = _reduced(op, [arrays[rank] for rank in ordered])
    return Gave(key.kind, op, ordered, {}, total, sizes)


def judge(gave: Gave, call: Call) -> ReductionError | None:
    """How right the result of one member is; None where it cannot be said."""
    records = got(call, gave.kind)
    try:
        results = [_read(record) for record in records]
    except (UnreadableCapture, OSError, ValueError):
        return None
    if not results:
        return None
    wanted = _wanted(gave, call, results)
    if wanted is None:
        return None
    found = [
        _error(record, result, *each, len(gave.members) if gave.op else 1)
        for record, result, each in zip(records, results, wanted, strict=True)
    ]
    return max(found, key=lambda each: each.error / max(each.allowed, 1e-9))


def _reduced(op: str, parts: Sequence[list[_Array]]) -> tuple[list[_Array], list[_Array]]:
    total = [part.copy() for part in parts[0]]
    sizes = [np.abs(part) for part in parts[0]]
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            for i, array in enumerate(part):
                if op == "max":
                    total[i] = np.maximum(total[i], array)
                elif op == "min":
                    total[i] = np.minimum(total[i], array)
                elif op == "product":
                    total[i] = total[i] * array
                else:
                    total[i] = total[i] + array
                    sizes[i] += np.abs(array)
        if op == "avg":
            total = [array / len(parts) for array in total]
            sizes = [array / len(parts) for array in sizes]
    if op not in ("sum", "avg"):
        sizes = [np.abs(array) for array in total]
    return total, sizes


def _wanted(
    gave: Gave, call: Call, results: Sequence[_Array]
) -> list[tuple[_Array, _Array | None]] | None:
    """What each result should be, and the size of what it is made of; None: not known."""
    at = gave.members.index(call.rank)
    if gave.op:
        total, sizes = gave.total, gave.sizes
        if gave.kind == "reduce_scatter":
            total, sizes = (_piece(each, at, len(gave.members)) for each in (total, sizes))
        return _fitting(list(zip(total, sizes, strict=True)), results)
    parts: list[_Array] = []
    if gave.kind == "all_to_all":
        if any(len(found) not in (1, len(gave.members)) for found in gave.arrays.values()):
            return None
        for rank in gave.members:
            found = gave.arrays[rank]
            if len(found) == 1 and found[0].shape and found[0].shape[0] % len(gave.members):
                return None  # pieces of other sizes
            parts += _piece(found, at, len(gave.members))
    elif gave.kind == "scatter":
        root = root_of(call, gave.kind)
        source = gave.arrays.get(root if root is not None else -1, [])
        parts = source[at : at + 1]
    else:  # broadcast, all_gather, gather, message: what was given, in the order of ranks
        parts = [array for rank in gave.members for array in gave.arrays[rank]]
    return _fitting([(part, None) for part in parts], results)


def _piece(arrays: Sequence[_Array], at: int, members: int) -> list[_Array]:
    """What one member gets: the array at its place, or its piece of the only one."""
    if len(arrays) == members:
        return [arrays[at]]
    return [np.array_split(array, members)[at] for array in arrays if array.shape]


def _fitting(
    wanted: list[tuple[_Array, _Array | None]], results: Sequence[_Array]
) -> list[tuple[_Array, _Array | None]] | None:
    """The same, of the shapes of the results: a list of tensors, or all of them in one."""
    if [each.shape for each, _ in wanted] == [each.shape for each in results]:
        return wanted
    if len(results) != 1 or sum(each.size for each, _ in wanted) != results[0].size:
        return None
    flat = np.concatenate([each.reshape(-1) for each, _ in wanted]).reshape(results[0].shape)
    sizes = [size for _, size in wanted if size is not None]
    whole = np.concatenate([s.reshape(-1) for s in sizes]).reshape(flat.shape) if sizes else None
    return [(flat, whole)]


def _read(record: TensorRecord) -> _Array:
    array = record.array()
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _error(
    record: TensorRecord, result: _Array, wanted: _Array, sizes: _Array | None, members: int
) -> ReductionError:
    """In roundings of the size of the terms; infinite where the one is finite and the other not."""
    bits = FRACTION_BITS.get(record.dtype)
    unit = 0.0 if bits is None else 2.0 ** -(bits + 1)
    size = np.abs(wanted) if sizes is None else sizes
    with np.errstate(all="ignore"):
        off = np.abs(result - wanted)
        same = (result == wanted) | (np.isnan(result) & np.isnan(wanted))
        off = np.where(same, 0.0, off)
        odd = ~np.isfinite(off) & ~same
        if unit and sizes is not None:
            # a sum that overflows its dtype is infinite, and so is what it is compared with
            limit = _largest(record.dtype)
            odd &= ~(np.isinf(result) & (size >= limit))
        worst = float(np.max(np.where(np.isfinite(off), off, 0.0), initial=0.0))
        norm = float(np.sqrt(np.mean(size**2))) if size.size else 0.0
        if bool(odd.any()):
            return ReductionError(math.inf, 0.0, record, math.inf)
        if sizes is None or not unit:  # moved, or whole numbers: every bit counts
            return ReductionError(worst / (unit * norm) if unit and norm else worst, 0.0, record,
                          worst / norm if norm else worst)  # fmt: skip
        scale = unit * np.maximum(size, np.finfo(np.float64).tiny)
        tiny = _smallest(record.dtype)
        roundings = np.where(np.isfinite(off), np.maximum(off - tiny, 0.0) / scale, 0.0)
        error = float(np.max(roundings, initial=0.0))
    return ReductionError(error, _PER_MEMBER * members, record, worst / norm if norm else worst)


def _largest(dtype: str) -> float:
    limits = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
    return limits.get(dtype, 1.79e308) * 0.999


def _smallest(dtype: str) -> float:
    """Below the normal numbers every step has one size."""
    return {"float16": 2.0**-23, "bfloat16": 2.0**-132, "float32": 2.0**-148}.get(dtype, 5e-324)
