"""What every table of a comparison is made of, and the differences of statistics that all show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from tensorprobe.records import TensorSummary

Cell = str | int | float | bool | None
Row = tuple[Cell, ...]
Number = float | int | bool | None


class Table(NamedTuple):
    """A header, and for every row its cells and a colour word: "", "good", "warn" or "bad".

    `free` are the columns with text from outside, which a spreadsheet might take for a formula;
    None: any of them.
    """

    header: tuple[str, ...]
    rows: Iterator[tuple[Row, str]]
    free: tuple[int, ...] | None = None


def minus(a: Number, e: Number) -> float | None:
    """The difference of two statistics."""
    return None if a is None or e is None else float(a) - float(e)


def over(difference: float | None, e: Number) -> float | None:
    """A difference relative to what it differs from."""
    if difference is None or e is None:
        return None
    if difference == 0:
        return 0.0
    return abs(difference / e) if e else math.inf


def summary_differences(s: TensorSummary | None, t: TensorSummary | None) -> Row:
    """Of max, min, mean and norm: the differences, then their relative sizes."""
    if s is None or t is None:
        return _NOTHING
    if s == t and s.norm is not None and math.isfinite(s.norm) and not s.inf_count:
        return _ZEROS
    d_max, d_min = minus(s.max, t.max), minus(s.min, t.min)
    d_mean, d_norm = minus(s.mean, t.mean), minus(s.norm, t.norm)
    return (
        d_max, d_min, d_mean, d_norm,
        over(d_max, t.max), over(d_min, t.min), over(d_mean, t.mean), over(d_norm, t.norm),
    )  # fmt: skip


_NOTHING: Row = (None,) * 8
_ZEROS: Row = (0.0,) * 8
