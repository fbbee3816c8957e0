"""Pictures of where two tensors differ: histograms, heat maps, the worst elements."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorprobe.errors import TensorprobeError
from tensorprobe.report.table import Number

if TYPE_CHECKING:
    from tensorprobe.comparing.measure import CallPair, TensorPair
    from tensorprobe.records import TensorRecord

    Array = np.ndarray[Any, Any]

SOME, MANY = 1 << 16, 1 << 22  # elements that are looked at
_BINS = 40
_CELLS = 32  # of a heat map, along each side
_DIMENSIONS = 5  # further ones are folded into the first
_DECADES = 8  # of a heat map's colours, at most
_WORST = 8
_LARGEST = float(np.finfo(np.float64).max)


def pictures_of(pair: CallPair, *, most: int = MANY, inputs: bool = True) -> list[dict[str, Any]]:
    """A picture of each result of a call, with `inputs` of all its tensors, where they are kept."""
    made = []
    for row in sorted(pair.tensors, key=lambda row: row.role != "output"):
        if row.role != "output" and not inputs:
            continue
        picture = picture_of(row, most)
        if picture is not None:
            made.append(picture)
    return made


def picture_of(row: TensorPair, most: int = MANY) -> dict[str, Any] | None:
    """One tensor of both sides; None where nothing was kept, or nothing is to be seen."""
    try:
        ours, theirs = _read(row.actual), _read(row.expected)
    except (TensorprobeError, OSError, ValueError, MemoryError) as problem:
        return {"tensor": row.name, "problem": str(problem)[:500]}
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None and ours.shape != theirs.shape:
        return None
    some = ours if ours is not None else theirs
    assert some is not None
    if not some.size:
        return None
    shape = list(some.shape)
    if not shape:
        some = some.reshape(1)
        ours, theirs = (side if side is None else side.reshape(1) for side in (ours, theirs))
    part = _part(some.shape, most)
    a = _numbers(ours[part]) if ours is not None else None
    e = _numbers(theirs[part]) if theirs is not None else None
    steps = [piece.step or 1 for piece in part]
    picture: dict[str, Any] = {
        "tensor": row.name,
        "shape": shape,
        "steps": steps if any(step > 1 for step in steps) else None,
        "histogram": _histogram(a, e),
    }
    if a is None or e is None or ours is None or theirs is None:
        return picture
    with np.errstate(all="ignore"):
        error = np.abs(a.astype(np.float64) - e)
        disagree = ~(np.isfinite(a) & np.isfinite(e)) & ~((a == e) | (np.isnan(a) & np.isnan(e)))
    error[~np.isfinite(error)] = 0.0
    picture["errors"] = _error_histogram(error)
    worst = _worst(error, disagree, part)
    index = row.metrics.index if row.metrics is not None else None
    if index is not None and 0 <= index < some.size:
        at = tuple(int(i) for i in np.unravel_index(index, some.shape))
        worst = [at, *(each for each in worst if each != at)]
    picture["worst"] = [[list(at), _value(ours[at]), _value(theirs[at])] for at in worst[:_WORST]]
    if disagree.any():
        top = float(error.max()) or 1.0
        error[disagree] = min(top * 10, _LARGEST)  # above all else
        picture["disagree"] = int(disagree.sum())
    picture["maps"] = _maps(error)
    return picture


def _read(record: TensorRecord | None) -> Array | None:
    return None if record is None or record.blob is None else record.array()


def _value(value: Any) -> Number | str:
    number = complex(value) if np.iscomplexobj(value) else value.item()
    if isinstance(number, complex):
        return str(number)
    if not isinstance(number, int | float):  # ml_dtypes gives floats; a bool is an int
        number = float(number)
    return number if math.isfinite(number) else str(number)


def _part(shape: tuple[int, ...], most: int) -> tuple[slice, ...]:
    """Every n-th along the first dimensions, so that at most so many elements are left."""
    left = math.prod(shape)
    part = []
    for length in shape:
        step = 1
        if left > most and length > 1:
            step = min(length, -(-left // most))
            left = left // length * len(range(0, length, step))
        part.append(slice(None, None, step))
    return tuple(part)


def _numbers(values: Array) -> Array:
    if values.dtype.kind == "c":
        values = np.abs(values)
    with np.errstate(all="ignore"):
        return values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)


def _histogram(a: Array | None, e: Array | None) -> dict[str, Any] | None:
    """How many numbers of each side are in each of some ranges of equal width."""
    sides = [None if side is None else side[np.isfinite(side)].ravel() for side in (a, e)]
    present = [side for side in sides if side is not None and side.size]
    if not present:
        return None
    low = min(float(side.min()) for side in present)
    high = max(float(side.max()) for side in present)
    counts = [None if side is None else _counts(side, low, high) for side in sides]
    return {"low": low, "high": high, "counts": counts}


def _counts(values: Array, low: float, high: float) -> list[int]:
    width = high - low
    if not values.size or not width > 0 or not math.isfinite(width):
        return [int(values.size)]
    with np.errstate(all="ignore"):
        places = ((values - low) * (_BINS / width)).astype(np.int32)
    np.clip(places, 0, _BINS - 1, out=places)
    return [int(n) for n in np.bincount(places, minlength=_BINS)]


def _error_histogram(error: Array) -> dict[str, Any]:
    """How many numbers are off by how much: powers of ten, and those that are equal."""
    flat = error.ravel()
    off = flat[flat > 0]
    found: dict[str, Any] = {"equal": int(flat.size - off.size)}
    if off.size:
        logs = np.log10(off)
        low, high = math.floor(float(logs.min())), math.ceil(float(logs.max()))
        if low == high:
            high += 1
        found |= {"low": low, "high": high, "counts": _counts(logs, low, high)}
    return found


def _worst(error: Array, disagree: Array, part: tuple[slice, ...]) -> list[tuple[int, ...]]:
    flat = np.where(disagree, np.inf, error).ravel()
    n = min(_WORST, flat.size)
    at = np.argpartition(flat, flat.size - n)[-n:]
    at = at[np.argsort(-flat[at], kind="stable")]
    steps = [piece.step or 1 for piece in part]
    return [
        tuple(
            int(i) * step for i, step in zip(np.unravel_index(k, error.shape), steps, strict=True)
        )
        for k in at
        if flat[k] > 0
    ]


def _maps(error: Array) -> dict[str, Any] | None:
    """For each two dimensions the largest error in each cell, over all others.

    A cell is a byte: 0 where all is equal, else from 1 to 255 over so many decades.
    """
    top = float(error.max())
    if not top > 0:
        return None
    if error.ndim < 2:
        error = error.reshape(1, -1)
    folded = max(0, error.ndim - _DIMENSIONS)
    if folded:
        error = error.reshape(-1, *error.shape[folded + 1 :])
    decades = min(_DECADES, max(1, math.ceil(math.log10(top / float(error[error > 0].min())))))
    shape = list(error.shape)
    for axis in sorted(range(error.ndim), key=lambda axis: -error.shape[axis]):
        length = error.shape[axis]
        if length > _CELLS:
            starts = np.arange(_CELLS) * length // _CELLS
            error = np.maximum.reduceat(error, starts, axis=axis)
    maps = {}
    for i in range(error.ndim):
        for j in range(i + 1, error.ndim):
            others = tuple(axis for axis in range(error.ndim) if axis not in (i, j))
            cells = error.max(axis=others) if others else error
            maps[f"{i},{j}"] = [*cells.shape, _bytes(cells, top, decades)]
    return {"top": top, "decades": decades, "shape": shape, "folded": folded, "of": maps}


def _bytes(cells: Array, top: float, decades: int) -> str:
    with np.errstate(divide="ignore"):
        levels = 255 + np.log10(cells / top) * (254 / decades)
    levels = np.where(cells > 0, np.clip(np.nan_to_num(levels, neginf=0.0), 1, 255), 0)
    return base64.b64encode(np.round(levels).astype(np.uint8).tobytes()).decode()
