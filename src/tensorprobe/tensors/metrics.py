"""How far two arrays are apart: an array pair to metrics, chunk by chunk in the cache. No torch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from tensorprobe.tensors.pair_metrics import FRACTION_BITS, PairMetrics
from tensorprobe.tensors.pieces import ArrayPieces, Pieces

Array = np.ndarray[Any, Any]

# Elements at a time: the dozen buffers of a chunk stay in the second-level cache.
CHUNK = 32768
DOT = 8192  # numpy's BLAS starts threads for a dot product of more than 10000
# A mask is written as finfo.min: such numbers are compared, but kept out of norms.
HUGE = 1e30


def measure_pair(actual: Array, expected: Array) -> PairMetrics:
    """Compare two arrays of one shape, of any dtypes, memory-mapped or not."""
    return measure_pieces(ArrayPieces(actual), ArrayPieces(expected))


def measure_pieces(actual: Pieces, expected: Pieces) -> PairMetrics:
    """Likewise of numbers that come piece by piece."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    size = min(actual.size, expected.size)
    tally = _Tally(actual.dtype, expected.dtype, size)
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        tally.add(start, actual.piece(start, stop), expected.piece(start, stop))
    numel = size // 2 if actual.stored.kind == "c" else size
    return tally.result(numel, size)


def _ulp_dtype(a: np.dtype[Any], e: np.dtype[Any]) -> np.dtype[Any] | None:
    """The coarser of two floating dtypes; None where there is none."""
    if a.name not in FRACTION_BITS or e.name not in FRACTION_BITS:
        return None
    return min((a, e), key=lambda dtype: FRACTION_BITS[dtype.name])


def widen(x: Array, out: Array | None = None) -> Array:
    """A chunk as float32 or float64, exactly where that can be; float32 into `out`, if given."""
    if x.dtype in (np.float32, np.float64):
        return x
    if x.dtype.name == "bfloat16":
        bits = np.empty(x.size, np.uint32) if out is None else out[: x.size].view(np.uint32)
        np.copyto(bits, x.view(np.uint16))
        # a shift by 16: numpy multiplies several numbers at a time, and shifts one
        return np.multiply(bits, 1 << 16, out=bits).view(np.float32)
    if x.dtype == np.float16:
        wide = np.empty(x.size, np.float32) if out is None else out[: x.size]
        # "wrap" checks nothing: every number of 16 bits is an index
        return np.take(_halves(), x.view(np.uint16), out=wide, mode="wrap")
    if x.dtype.name.startswith("float8"):
        return x.astype(np.float32)
    return x.astype(np.float64)


@functools.cache
def _halves() -> Array:
    """All float16 numbers by their bits: looking them up is faster than numpy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class _Buffers:
    """Room for what is worked out of a chunk: memory that is new each time costs as much again."""

    def __init__(self, n: int, wide: np.dtype[Any], integers: np.dtype[Any] | None) -> None:
        self.actual = np.empty(n, np.float32)
        self.expected = np.empty(n, np.float32)
        self.difference = np.empty(n, wide)
        self.ratio = np.empty(n, wide)
        self.steps = np.empty(n if integers is not None else 0, integers)
        self.flags = np.empty(n, np.bool_)


class _Tally:
    """The running totals of one pair."""

    def __init__(self, a: np.dtype[Any], e: np.dtype[Any], size: int) -> None:
        self.ulp = _ulp_dtype(a, e)
        self.same_dtype = a == e
        self.as_integers = np.dtype(f"i{self.ulp.itemsize}") if self.ulp is not None else None
        wide = np.result_type(*(widen(np.empty(0, side)).dtype for side in (a, e)))
        self.wide = wide
        self.buffers = _Buffers(min(size, CHUNK), wide, self.as_integers)
        self.dd = self.aa = self.ee = self.ae = 0.0
        self.n_small = 0
        self.max_abs = self.max_rel = -1.0
        self.max_rel_nonzero = self.max_abs_at_zero = 0.0
        self.index: int | None = None
        self.mismatched = self.within_1 = self.within_5 = self.disagree = 0
        self.ulp_max = 0
        self.over = [0, 0, 0]

    def add(self, start: int, a: Array, e: Array) -> None:
        n, buffers = a.size, self.buffers
        y = widen(e, buffers.expected)
        with np.errstate(all="ignore"):
            if self.same_dtype and _same_bits(a, e):
                self._add_same_bits(start, a, e, y)
                return
            x = widen(a, buffers.actual)
            if x.dtype != y.dtype:
                x, y = x.astype(np.float64), y.astype(np.float64)
            d = np.subtract(x, y, out=buffers.difference[:n])
            # x = y + d: two of the four sums follow from the others, and more exactly so
            dd, ee, dy = _dot(d, d), _dot(y, y), _dot(d, y)
            # float32 squares leave its range early on either side; NaN and infinity show here too
            if not 1e-30 < dd + ee < 1e36 or (0 < dd < 1e-30):
                self._add_carefully(start, a, e, x, y)
                return
            self.n_small += n
            aa, ae = ee + 2 * dy + dd, ee + dy
            if aa < 0.01 * ee:  # what is left of larger numbers: not exact
                aa, ae = _dot(x, x), _dot(x, y)
            self._add_sums(dd, aa, ee, ae)
            unlike = int(np.count_nonzero(np.not_equal(d, 0, out=buffers.flags[:n])))
            if not unlike:
                self._add_equal(n)
                return
            self._add_differences(start, d, y, unlike)
            if self.ulp is not None:
                self._add_ulps(a, e)

    def _add_same_bits(self, start: int, a: Array, e: Array, y: Array) -> None:
        ee = _dot(y, y)
        if not (1e-30 < ee < 1e36 or (ee == 0 and not y.any())):
            self._add_carefully(start, a, e, y, y)
            return
        self.n_small += y.size
        self._add_sums(0.0, ee, ee, ee)
        self._add_equal(y.size)

    def _add_equal(self, n: int) -> None:
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
        n_alike = int(np.count_nonzero(alike & ~finite))
        self.within_1 += n_alike
        self.within_5 += n_alike
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
        self._add_differences(start, d, y, int(np.count_nonzero(unlike)))
        if before != (self.index, self.max_abs) and self.index is not None and not finite.all():
            self.index = start + int(places[self.index - start])
        if self.ulp is not None:
            self._count_steps(self._steps(a, e))

    def _add_sums(self, dd: float, aa: float, ee: float, ae: float) -> None:
        self.dd += dd
        self.aa += aa
        self.ee += ee
        self.ae += ae

    def _add_differences(self, start: int, d: Array, y: Array, unlike: int) -> None:
        n = d.size
        self.mismatched += unlike
        at, most = _furthest(d)
        if most > self.max_abs:
            self.max_abs = most
            self.index = start + at if most else self.index
        ratio = self.buffers.ratio[:n] if d.dtype == self.wide else None
        ratio = np.divide(d, y, out=ratio)
        at, most = _furthest(ratio)
        if most != most:
            np.copyto(ratio, 0, where=np.isnan(ratio))  # 0 / 0: both are zero
            at, most = _furthest(ratio)
        self.max_rel = max(self.max_rel, most)
        if most >= 0.001:
            np.abs(ratio, out=ratio)
        self.within_1 += n if most < 0.001 else int(np.count_nonzero(ratio < 0.001))
        self.within_5 += n if most < 0.005 else int(np.count_nonzero(ratio < 0.005))
        if most == math.inf:
            zero = y == 0
            at_zero = float(np.abs(d[zero]).max(initial=0.0))
            self.max_abs_at_zero = max(self.max_abs_at_zero, at_zero)
            most = float(ratio[~zero].max(initial=0.0))
        self.max_rel_nonzero = max(self.max_rel_nonzero, most)

    def _add_ulps(self, a: Array, e: Array) -> None:
        """Bits as integers: right where both numbers have one sign; where not, a huge number."""
        integers = self.as_integers
        assert integers is not None
        if not self.same_dtype or integers.itemsize == 1:
            self._count_steps(self._steps(a, e))
            return
        steps = self.buffers.steps[: a.size]
        np.subtract(a.view(integers), e.view(integers), out=steps)
        _, most = _furthest(steps)
        if most >= 1 << (8 * integers.itemsize - 5):
            self._count_steps(self._steps(a, e))
        else:
            self._count_steps(np.abs(steps, out=steps) if most > 1 else steps, int(most))

    def _count_steps(self, steps: Array, most: int | None = None) -> None:
        most = int(steps.max()) if most is None else most
        self.ulp_max = max(self.ulp_max, most)
        for k, limit in enumerate((1, 4, 16)):
            if most <= limit:
                break
            flags = np.greater(steps, limit, out=self.buffers.flags[: steps.size])
            self.over[k] += int(np.count_nonzero(flags))

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
            max_rel_nonzero=self.max_rel_nonzero,
            max_abs_at_zero=self.max_abs_at_zero,
        )


def _same_bits(a: Array, e: Array) -> bool:
    """Whether two chunks have the same bits. Most that differ do so in the first few numbers."""
    return a[:32].tobytes() == e[:32].tobytes() and a.tobytes() == e.tobytes()


def _furthest(x: Array) -> tuple[int, float]:
    """Where the largest magnitude is, and what it is: NaN where there is one. argmax and argmin
    together cost less than one pass of abs or max."""
    high, low = int(x.argmax()), int(x.argmin())
    most, least = x[high].item(), x[low].item()
    return (low, -least) if -least > most else (high, most)


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
