"""Errors in units of what rounding explains, so that one threshold holds from float64 to fp8."""

from __future__ import annotations

import functools
import math
from typing import Literal

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.records import TensorRecord, TensorSummary
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

Mode = Literal["tensors", "digest", "stats", "structure"]

# A healthy kernel stays below 3 units of own error, whatever its dtype; see docs/compare.md.
ROUNDING = 16.0


@functools.cache
def roundoff(dtype: str) -> float:
    """Unit roundoff, half the distance from 1 to the next number; 0 for integers and bools."""
    bits = FRACTION_BITS.get(dtype)
    return 0.0 if bits is None else 2.0 ** -(bits + 1)


def pair_roundoff(pair: TensorPair) -> float:
    """Of the coarser of the two dtypes."""
    a, e = pair.actual, pair.expected
    if a is None or e is None or a.dtype == e.dtype:
        record = a or e
        return roundoff(record.dtype) if record else 0.0
    return max(roundoff(a.dtype), roundoff(e.dtype))


def content_mode(pair: TensorPair) -> Mode:
    """By what the two tensors can be compared."""
    a, e = pair.actual, pair.expected
    if a is None or e is None:
        return "structure"
    if pair.metrics is not None:
        return "tensors"
    if a.digest is not None and e.digest is not None:
        return "digest"
    return "stats" if a.summary is not None and e.summary is not None else "structure"


def same_bits(pair: TensorPair) -> bool | None:
    """Whether both hold the same bits; None when nobody can tell."""
    a, e = pair.actual, pair.expected
    if a is None or e is None:
        return None
    if a.digest is not None and e.digest is not None and a.dtype == e.dtype:
        return a.digest == e.digest and a.shape == e.shape
    if pair.metrics is not None:
        return pair.metrics.is_equal and a.dtype == e.dtype
    if a.summary is not None and e.summary is not None and a.summary != e.summary:
        # another tool's mean and norm of the same bits are others
        return False if a.dtype == e.dtype and a.summary.counted else None
    return None


def distance(pair: TensorPair, floor: float = 0.0) -> float:
    """How far a tensor is from its partner, in roundings of its own size; 0 is equal.

    Infinite for integers that differ, for NaN or infinity on one side only, for shapes that differ.
    `floor` is the size below which numbers are what is left of larger ones that cancelled.
    """
    if floor:
        return _distance(pair, floor)
    if pair.distance is None:
        pair.distance = _distance(pair, 0.0)
    return pair.distance


def _distance(pair: TensorPair, floor: float) -> float:
    a, e = pair.actual, pair.expected
    if a is None or e is None or same_bits(pair):
        return 0.0
    if a.shape != e.shape:
        return math.inf
    u = pair_roundoff(pair)
    if pair.metrics is not None:
        m = pair.metrics
        if m.nonfinite_disagree:
            return math.inf
        if not u:
            return math.inf if m.mismatched else 0.0
        return _ratio(m.rms_error, u * max(m.rms_expected, floor))
    if a.summary is None or e.summary is None or a.summary == e.summary:
        return 0.0
    relative = summary_distance(a, e, floor)
    return _ratio(relative, u) if u else (math.inf if relative else 0.0)


def summary_distance(a: TensorRecord, e: TensorRecord, floor: float = 0.0) -> float:
    """The relative error that two summaries show: of extremes, norm and mean, the largest."""
    s, t = a.summary, e.summary
    assert s is not None
    assert t is not None
    if (s.nan_count, s.inf_count) != (t.nan_count, t.inf_count):
        return math.inf
    if not s.counted and roundoff(e.dtype) and (s.norm is None or t.norm is None):
        largest = max(_size(t.min), _size(t.max), floor)
        return _ratio(max(_shift(s.max, t.max), _shift(s.min, t.min)), largest)
    if s.mean is None or t.mean is None or s.norm is None or t.norm is None:
        return 0.0 if (s.min, s.max, s.zero_count) == (t.min, t.max, t.zero_count) else 1.0
    n = max(e.numel, 1)
    rms = max(t.norm / math.sqrt(n), floor)
    peak = max(_size(t.min), _size(t.max), floor)
    if peak > 1e30:  # a mask: only the other end says something of the rest
        ends = [(a, e) for a, e in ((s.min, t.min), (s.max, t.max)) if _size(e) < 1e30]
        return max((_ratio(_shift(a, e), max(_size(e), 1.0)) for a, e in ends), default=0.0)
    return max(
        _ratio(max(abs(s.norm - t.norm) / math.sqrt(n), abs(s.mean - t.mean)), rms),
        _ratio(max(_shift(s.max, t.max), _shift(s.min, t.min)), peak),
    )


def moved_values(a: TensorSummary, e: TensorSummary) -> bool:
    """Whether two summaries are those of the same numbers: with other bits, they are in other
    places. Rounding changes the norm in its last digits; a permutation does not."""
    if a.norm is None or e.norm is None or not a.norm:
        return False
    same = (a.min, a.max, a.zero_count) == (e.min, e.max, e.zero_count)
    return same and math.isclose(a.norm, e.norm, rel_tol=1e-13)


def reduction(n_in: int, n_out: int) -> float:
    """How much more error a long sum may have than one rounding."""
    return math.sqrt(max(1.0, n_in / max(n_out, 1)))


def rms_size(record: TensorRecord) -> float:
    """The size of a tensor's numbers, as its summary has it."""
    s = record.summary
    if s is None or s.norm is None or not record.numel:
        return 0.0
    return s.norm / math.sqrt(record.numel)


def _size(value: float | int | bool | None) -> float:
    return abs(float(value)) if value is not None and math.isfinite(value) else 0.0


def _shift(a: float | int | bool | None, e: float | int | bool | None) -> float:
    if a is None or e is None or not (math.isfinite(a) and math.isfinite(e)):
        return 0.0 if a == e else math.inf
    return abs(float(a) - float(e))


def _ratio(a: float, b: float) -> float:
    if a == 0:
        return 0.0
    return a / b if b else math.inf


def number_text(value: float) -> str:
    """A size for a person to read: 4.07, 8,388, 1.68e+07."""
    if math.isinf(value):
        return "infinite"
    if 100 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"
