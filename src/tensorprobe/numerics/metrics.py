"""How far two arrays are apart: an array pair to metrics, chunk by chunk in the cache. No torch."""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

# Elements at a time: the dozen buffers of a chunk stay in the second-level cache.
CHUNK = 16384
DOT = 8192  # numpy's BLAS starts threads for a dot product of more than 10000
# A mask is written as finfo.min: such numbers are compared, but kept out of norms.
HUGE = 1e30
# Bits of the fraction. The spacing of a number is at most |x| * 2**-bits.
FRACTION_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
    "float8_e8m0fnu": 0,
    "complex128": 52,
    "complex64": 23,
    "complex32": 10,
}


class PairMetrics(msgspec.Struct, frozen=True, gc=False):
    """How far `actual` is from `expected`, over all elements where both are finite.

    `ulp_*` count steps between neighbouring numbers of the coarser of the two dtypes; they are
    None for integers and bools. `index` is where the largest error is, in row-major order.
    `rms_error` and `rms_expected` leave out numbers beyond 1e30, as masks have them.
    """

    numel: int
    mismatched: int = 0
    cosine: float | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    rel_l2: float = 0.0
    euclidean: float = 0.0
    within_1_1000: float = 1.0
    within_5_1000: float = 1.0
    ulp_max: int | None = None
    ulp_over_1: float | None = None
    ulp_over_4: float | None = None
    ulp_over_16: float | None = None
    index: int | None = None
    nonfinite_disagree: int = 0
    rms_error: float = 0.0
    rms_expected: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.mismatched == 0


def equal_metrics(numel: int, norm: float | None = None, floating: bool = True) -> PairMetrics:
    """The metrics of two arrays known to hold the same bits."""
    rms = (norm or 0.0) / math.sqrt(numel) if numel else 0.0
    zero = 0.0 if floating else None
    return PairMetrics(
        numel, cosine=1.0, rms_expected=rms, ulp_max=0 if floating else None,
        ulp_over_1=zero, ulp_over_4=zero, ulp_over_16=zero,
    )  # fmt: skip


def measure_pair(actual: Array, expected: Array) -> PairMetrics:
    """Compare two arrays of one shape, of any dtypes, memory-mapped or not."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    a, e = _flat(actual), _flat(expected)
    tally = _Tally(_ulp_dtype(a.dtype, e.dtype), a.dtype == e.dtype)
    for start in range(0, a.size, CHUNK):
        tally.add(start, a[start : start + CHUNK], e[start : start + CHUNK])
    numel = a.size // 2 if actual.dtype.kind == "c" else a.size
    return tally.result(numel, a.size)


def _flat(array: Array) -> Array:
    """One dimension; complex numbers as pairs."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.names:  # complex32 is a pair of halves
        return flat.view(np.float16)
    if flat.dtype.kind == "c":
        return flat.view(flat.real.dtype)
    return flat


def _ulp_dtype(a: np.dtype[Any], e: np.dtype[Any]) -> np.dtype[Any] | None:
    """The coarser of two floating dtypes; None where there is none."""
    if a.name not in FRACTION_BITS or e.name not in FRACTION_BITS:
        return None
    return min((a, e), key=lambda dtype: FRACTION_BITS[dtype.name])


def widen(x: Array) -> Array:
    """A chunk as float32 or float64, exactly where that can be."""
    if x.dtype.name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if x.dtype in (np.float32, np.float64):
        return x
    if x.dtype == np.float16:
        return _halves().take(x.view(np.uint16))
    if x.dtype.name.startswith("float8"):
        return x.astype(np.float32)
    return x.astype(np.float64)


@functools.cache
def _halves() -> Array:
    """All float16 numbers by their bits: looking them up is faster than numpy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class _Tally:
    """The running totals of one pair."""

    def __init__(self, ulp: np.dtype[Any] | None, same_dtype: bool) -> None:
        self.ulp = ulp
        self.same_dtype = same_dtype
        self.as_integers = np.dtype(f"i{ulp.itemsize}") if ulp is not None else None
        self.dd = self.aa = self.ee = self.ae = 0.0
        self.n_finite = self.n_small = 0
        self.max_abs = self.max_rel = -1.0
        self.index: int | None = None
        self.mismatched = self.within_1 = self.within_5 = self.disagree = 0
        self.ulp_max = 0
        self.over = [0, 0, 0]

    def add(self, start: int, a: Array, e: Array) -> None:
        x, y = widen(a), widen(e)
        if x.dtype != y.dtype:
            x, y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(all="ignore"):
            d = x - y
            # x = y + d: two of the four sums follow from the others, and more exactly so
            dd, ee, dy = _dot(d, d), _dot(y, y), _dot(d, y)
            # float32 squares leave its range early on either side; NaN and infinity show here too
            if not 1e-30 < dd + ee < 1e36 or (0 < dd < 1e-30):
                self._add_carefully(start, a, e, x, y)
                return
            self.n_small += d.size
            aa, ae = ee + 2 * dy + dd, ee + dy
            if aa < 0.01 * ee:  # what is left of larger numbers: not exact
                aa, ae = _dot(x, x), _dot(x, y)
            self._add_sums(dd, aa, ee, ae)
            np.abs(d, out=d)
            unlike = int(np.count_nonzero(d.view(np.int64 if d.itemsize == 8 else np.int32)))
            if not unlike:
                self._add_equal(d.size)
                return
            self._add_differences(start, d, y, unlike)
            if self.ulp is not None:
                self._add_ulps(a, e)

    def _add_equal(self, n: int) -> None:
        self.n_finite += n
        self.within_1 += n
        self.within_5 += n
        self.max_abs = max(self.max_abs, 0.0)
        self.max_rel = max(self.max_rel, 0.0)

    def _add_carefully(self, start: int, a: Array, e: Array, x: Array, y: Array) -> None:
        """With NaN, infinities, or numbers whose squares need float64."""
        finite = np.isfinite(x) & np.isfinite(y)
        alike = finite | (x == y) | (np.isnan(x) & np.isnan(y))
        n_bad = x.size - int(np.count_nonzero(alike))
        self.disagree += n_bad
        self.mismatched += n_bad
        if n_bad and self.max_abs < math.inf:
            self.max_abs = math.inf
            self.index = start + int(np.argmin(alike))
        if not finite.all():
            (places,) = np.nonzero(finite)
            a, e, x, y = a[places], e[places], x[places], y[places]
        if not x.size:
            return
        x, y = x.astype(np.float64), y.astype(np.float64)
        d = x - y
        unlike = (a != e) if a.dtype == e.dtype else d != 0
        within_range = (np.abs(x) < HUGE) & (np.abs(y) < HUGE) | (unlike & (np.abs(d) >= HUGE))
        self.n_small += int(np.count_nonzero(within_range))
        xs, ys, ds = x[within_range], y[within_range], d[within_range]
        self._add_sums(*(float(np.dot(p, q)) for p, q in ((ds, ds), (xs, xs), (ys, ys), (xs, ys))))
        before = self.index, self.max_abs
        np.abs(d, out=d)
        self._add_differences(start, d, y, int(np.count_nonzero(unlike)))
        if before != (self.index, self.max_abs) and self.index is not None and not finite.all():
            self.index = start + int(places[self.index - start])
        if self.ulp is not None:
            self._add_ulps(a, e)

    def _add_sums(self, dd: float, aa: float, ee: float, ae: float) -> None:
        self.dd += dd
        self.aa += aa
        self.ee += ee
        self.ae += ae

    def _add_differences(self, start: int, d: Array, y: Array, unlike: int) -> None:
        """`d`, the size of the differences, is spent: it becomes the relative error."""
        self.n_finite += d.size
        self.mismatched += unlike
        at = int(d.argmax())
        if d[at] > self.max_abs:
            self.max_abs = float(d[at])
            self.index = start + at if d[at] else self.index
        np.divide(d, np.abs(y), out=d)
        most = float(d.max())
        if most != most:
            np.copyto(d, 0, where=np.isnan(d))  # 0 / 0: both are zero
            most = float(d.max())
        self.max_rel = max(self.max_rel, most)
        n = d.size
        self.within_1 += n if most < 0.001 else int(np.count_nonzero(d < 0.001))
        self.within_5 += n if most < 0.005 else int(np.count_nonzero(d < 0.005))

    def _add_ulps(self, a: Array, e: Array) -> None:
        steps = self._steps_of_one_sign(a, e) if self.same_dtype else None
        most = int(steps.max()) if steps is not None else 0
        if steps is None or most >= 1 << (8 * steps.itemsize - 5):
            steps = self._steps(a, e)
            most = int(steps.max())
        self.ulp_max = max(self.ulp_max, most)
        for k, limit in enumerate((1, 4, 16)):
            if most <= limit:
                break
            self.over[k] += int(np.count_nonzero(steps > limit))

    def _steps_of_one_sign(self, a: Array, e: Array) -> Array | None:
        """Right where both numbers have one sign; where not, or too large, a huge number."""
        integers = self.as_integers
        assert integers is not None
        if integers.itemsize == 1:
            return None
        steps: Array = a.view(integers) - e.view(integers)
        np.abs(steps, out=steps)
        unsigned: Array = steps.view(f"u{integers.itemsize}")
        return unsigned

    def _steps(self, a: Array, e: Array) -> Array:
        ulp = self.ulp
        assert ulp is not None
        i, j = _ordered(a, ulp), _ordered(e, ulp)
        steps: Array
        if ulp.itemsize == 8:
            steps = np.maximum(i, j).view(np.uint64) - np.minimum(i, j).view(np.uint64)
        else:
            steps = np.abs(np.subtract(i, j, dtype=np.int32 if ulp.itemsize < 4 else np.int64))
        return steps

    def result(self, numel: int, n: int) -> PairMetrics:
        norms = math.sqrt(self.aa) * math.sqrt(self.ee)
        cosine = None
        if norms > 0:
            cosine = max(-1.0, min(1.0, self.ae / norms)) if math.isfinite(norms) else None
        elif n and self.aa == self.ee:
            cosine = 1.0
        euclidean = math.sqrt(self.dd)
        share = 1.0 / n if n else 0.0
        small = max(self.n_small, 1)
        has_ulp = self.ulp is not None
        rel_l2 = euclidean / math.sqrt(self.ee) if self.ee else (math.inf if self.dd else 0.0)
        return PairMetrics(
            numel=numel,
            mismatched=self.mismatched,
            cosine=cosine,
            max_abs=max(self.max_abs, 0.0),
            max_rel=max(self.max_rel, 0.0),
            rel_l2=rel_l2,
            euclidean=euclidean,
            within_1_1000=self.within_1 * share if n else 1.0,
            within_5_1000=self.within_5 * share if n else 1.0,
            ulp_max=self.ulp_max if has_ulp else None,
            ulp_over_1=self.over[0] * share if has_ulp else None,
            ulp_over_4=self.over[1] * share if has_ulp else None,
            ulp_over_16=self.over[2] * share if has_ulp else None,
            index=self.index if self.mismatched else None,
            nonfinite_disagree=self.disagree,
            rms_error=math.sqrt(self.dd / small),
            rms_expected=math.sqrt(self.ee / small),
        )


def _dot(x: Array, y: Array) -> float:
    if x.size <= DOT:
        return float(np.dot(x, y))
    return sum(float(np.dot(x[i : i + DOT], y[i : i + DOT])) for i in range(0, x.size, DOT))


def _ordered(x: Array, ulp: np.dtype[Any]) -> Array:
    """Numbers as integers in the same order, neighbours one apart."""
    if x.dtype != ulp:
        with np.errstate(all="ignore"):
            x = x.astype(ulp)
    bits = x.view(f"i{ulp.itemsize}")
    shift = 8 * ulp.itemsize - 1
    negative = bits >> shift  # all ones where negative
    mask = bits.dtype.type((1 << shift) - 1)
    ordered: Array = (bits ^ (negative & mask)) - negative
    return ordered
