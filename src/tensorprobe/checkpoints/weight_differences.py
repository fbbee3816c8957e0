"""How far two tensors of checkpoints are apart, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from tensorprobe.checkpoints.same_bytes import have_same_bytes
from tensorprobe.checkpoints.stored_weights import StoredWeight, WeightPieces
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.metrics import measure_pieces
from tensorprobe.tensors.pair_metrics import PairMetrics, equal_metrics

Array = np.ndarray[Any, Any]
Kind = Literal["equal", "same values", "rounding", "differ", "shape"]

_BLOCK = 1 << 19
# Coarser numbers that a float32 or float64 may have been rounded to and widened again.
_GRIDS: dict[str, tuple[np.dtype[Any], ...]] = {
    "float32": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)),
    "float64": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)),
}
_COARSEST = 2.0**-7  # of bfloat16: what is further apart is no rounding to any of these


class WeightDifference(NamedTuple):
    """What a pair of tensors differs by.

    `same values`: NaN of other bits, zeros of another sign, or another dtype that holds the same.
    `rounding`: no number is further from the other than one step of the coarser dtype.
    """

    kind: Kind
    metrics: PairMetrics | None
    reason: str  # in words; empty where the bits are equal


def compare_weights(
    actual: StoredWeight, expected: StoredWeight, read: Callable[[int], None]
) -> WeightDifference:
    """Compare two tensors; `read` is told of the bytes of `actual` as they have been read."""
    if actual.shape != expected.shape:
        read(actual.nbytes)
        reason = f"shape {list(actual.shape)} here, {list(expected.shape)} there"
        return WeightDifference("shape", None, reason)
    told = 0

    def tell(nbytes: int) -> None:
        nonlocal told
        told += nbytes
        read(nbytes)

    if have_same_bytes(actual, expected, tell):
        read(actual.nbytes - told)
        return WeightDifference("equal", equal_metrics(actual.numel), "")
    metrics = _measured(actual, expected)
    read(actual.nbytes - told)
    return _judged(actual, expected, metrics)


def _measured(actual: StoredWeight, expected: StoredWeight) -> PairMetrics:
    try:
        a = WeightPieces(actual)
        try:
            e = WeightPieces(expected)
            try:
                return measure_pieces(a, e)
            finally:
                e.close()
        finally:
            a.close()
    except (ValueError, TypeError, OSError) as error:
        raise BadArtefact(f"'{actual.path}': {actual.key[:120]}: {error}") from error


def _judged(actual: StoredWeight, expected: StoredWeight, metrics: PairMetrics) -> WeightDifference:
    dtypes = actual.dtype, expected.dtype
    other_dtype = f"{dtypes[0]} here, {dtypes[1]} there" if dtypes[0] != dtypes[1] else ""
    if metrics.is_equal:
        reason = other_dtype or "signs of zeros, or bits of NaN"
        return WeightDifference("same values", metrics, f"the same values: {reason}")
    if metrics.nonfinite_disagree:
        count = metrics.nonfinite_disagree
        reason = f"{count} NaN or infinite on one side only"
        return WeightDifference("differ", metrics, _joined(other_dtype, reason))
    if metrics.ulp_max is not None and metrics.ulp_max <= 1:
        coarse = _coarser(*dtypes)
        return WeightDifference("rounding", metrics, _joined(other_dtype, _steps(coarse)))
    if not other_dtype and (grid := _common_grid(actual, expected, metrics)):
        return WeightDifference("rounding", metrics, f"one side was rounded to {grid}")
    return WeightDifference("differ", metrics, other_dtype)


def _joined(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)


def _steps(dtype: str) -> str:
    return f"at most one step of {dtype}"


def _coarser(a: str, e: str) -> str:
    from tensorprobe.tensors.pair_metrics import FRACTION_BITS

    return min(a, e, key=lambda dtype: FRACTION_BITS.get(dtype, math.inf))


def _common_grid(actual: StoredWeight, expected: StoredWeight, metrics: PairMetrics) -> str | None:
    """A coarser dtype that one side holds numbers of only, and to which the other rounds."""
    grids = _GRIDS.get(actual.dtype, ())
    if not grids or metrics.max_rel_nonzero > 2 * _COARSEST:
        return None
    for coarse, fine in ((actual, expected), (expected, actual)):
        for grid in grids:
            if _is_rounded(coarse, fine, grid):
                return str(grid)
    return None


def _is_rounded(coarse: StoredWeight, fine: StoredWeight, grid: np.dtype[Any]) -> bool:
    x, y = WeightPieces(coarse), WeightPieces(fine)
    bits = np.dtype(f"i{grid.itemsize}")
    try:
        for start in range(0, x.size, _BLOCK):
            stop = min(start + _BLOCK, x.size)
            with np.errstate(all="ignore"):
                rounded = x.piece(start, stop).astype(grid)
                if not np.array_equal(
                    rounded.astype(x.dtype), x.piece(start, stop), equal_nan=True
                ):
                    return False
                other = y.piece(start, stop).astype(grid)
            steps = other.view(bits).astype(np.int64) - rounded.view(bits)
            unlike = (steps != 0) & ~(np.isnan(other) & np.isnan(rounded)) & (other != rounded)
            if (np.abs(steps[unlike]) > 1).any():
                return False
    finally:
        x.close()
        y.close()
    return True
