"""What is known of how far two arrays are apart. No numpy: it is measured elsewhere."""

from __future__ import annotations

import math

import msgspec

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
    `rms_error` and `rms_expected` leave out numbers beyond 1e30, as masks have them. `max_rel` is
    infinite where zero was expected and is not there; `max_rel_nonzero` leaves those out, and
    `max_abs_at_zero` is the largest of them.
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
    max_rel_nonzero: float = 0.0
    max_abs_at_zero: float = 0.0

    def max_rel_with(self, epsilon: float) -> float:
        """The largest relative error where `epsilon` stands in for a zero that was expected."""
        return max(self.max_rel_nonzero, self.max_abs_at_zero / epsilon)

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
