"""What one pass over a tensor leaves behind. No torch, no numpy."""

from __future__ import annotations

import msgspec


class TensorSummary(msgspec.Struct, frozen=True, gc=False):
    """What one pass over a tensor leaves behind.

    `min` and `max` are over all values that are not NaN (infinities included) and keep the kind of
    the tensor: int for integers, bool for bools, the magnitude for complex; None when there is no
    such value. `mean` and `norm` (L2) are over the finite values, accumulated in float64; None for
    bools and where there is no finite value. Counts are of elements, a complex one counting once.
    Summaries of the peers' dumps are not `counted`: whether there is a NaN or an infinity is known
    (1 or 0), not how many; of zeros nothing is. `sketch` sees where the numbers are (sketch.py);
    None where there is none: of another tool, an earlier version, or sums beyond float64.
    """

    min: float | int | bool | None
    max: float | int | bool | None
    mean: float | None
    norm: float | None
    nan_count: int
    inf_count: int
    zero_count: int
    counted: bool = True
    sketch: bytes | None = None

    @property
    def is_finite(self) -> bool:
        return self.nan_count == 0 and self.inf_count == 0
