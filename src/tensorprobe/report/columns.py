"""The tables of a comparison, native and in the peers' columns: a header and rows of cells."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

from tensorprobe.compare.blame import Culprit
from tensorprobe.compare.comparison import Comparison
from tensorprobe.compare.judge import ROUNDING, distance, same_bits
from tensorprobe.compare.measure import CallPair, TensorPair
from tensorprobe.errors import BadUsage
from tensorprobe.numerics.metrics import PairMetrics
from tensorprobe.records import Call, TensorRecord
from tensorprobe.report.ptdbg_table import ptdbg_table
from tensorprobe.report.rows import Cell, Row, Table

# Of a number's text: beyond this, cosine is written as 1.0 by the peers.
_ALMOST_ONE = 0.99999


def table(comparison: Comparison, columns: str = "native") -> Table:
    """The rows of a comparison, in the columns of `native`, `ptdbg` or `msprobe`."""
    kinds: dict[str, Callable[[Comparison], Table]] = {
        "native": _native,
        "ptdbg": ptdbg_table,
        "msprobe": _msprobe,
    }
    if columns not in kinds:
        raise BadUsage(f"--columns {columns}: expected one of {', '.join(kinds)}")
    return kinds[columns](comparison)


# Native

_NATIVE = (
    "step", "rank", "actual", "expected", "paired", "status", "error_in_roundings",
    "actual_dtype", "expected_dtype", "actual_shape", "expected_shape",
    "actual_requires_grad", "expected_requires_grad",
    "cosine", "max_abs", "max_rel", "rel_l2", "euclidean", "within_1_1000", "within_5_1000",
    "ulp_max", "ulp_over_1", "ulp_over_4", "ulp_over_16", "mismatched", "index",
    "nonfinite_disagree",
    "actual_min", "actual_max", "actual_mean", "actual_norm",
    "expected_min", "expected_max", "expected_mean", "expected_norm",
    "max_diff", "min_diff", "mean_diff", "norm_diff",
    "max_rel_diff", "min_rel_diff", "mean_rel_diff", "norm_rel_diff",
    "bits", "module", "note",
)  # fmt: skip
_NO_METRICS: Row = (None,) * 14


def _native(comparison: Comparison) -> Table:
    culprits = {(c.rank, c.step, c.name): c for c in comparison.verdict.culprits}
    return Table(_NATIVE, _native_rows(comparison, culprits))


def _native_rows(
    comparison: Comparison, culprits: dict[tuple[int, int, str], Culprit]
) -> Iterator[tuple[Row, str]]:
    for pair in comparison.pairs:
        call = pair.call
        culprit = culprits.get((call.rank, call.step, call.name))
        if not pair.tensors:
            status, colour = _status(pair, None)
            yield _native_row(pair, call, None, status, culprit), colour
        for row in pair.tensors:
            status, colour = _status(pair, row)
            is_it = culprit is not None and culprit.tensor in (None, row.name)
            yield (
                _native_row(pair, call, row, status, culprit if is_it else None),
                "bad" if is_it else colour,
            )


def _status(pair: CallPair, row: TensorPair | None) -> tuple[str, str]:
    if pair.pair.expected is None:
        return "only in actual", "warn"
    if pair.pair.actual is None:
        return "only in expected", "warn"
    if row is None:
        return "no tensors", ""
    if row.actual is None or row.expected is None:
        return f"only in {'expected' if row.actual is None else 'actual'}", "warn"
    if row.actual.shape != row.expected.shape:
        return "shapes differ", "bad"
    if row.actual.gap or row.expected.gap:
        return "missing", "warn"
    bits = same_bits(row)
    if bits:
        return "equal", ""
    found = distance(row)
    if found == 0:
        return ("equal" if row.metrics is not None else "not compared"), ""
    return ("rounding", "good") if found <= ROUNDING else ("differs", "warn")


def _native_row(
    pair: CallPair, call: Call, row: TensorPair | None, status: str, culprit: Culprit | None
) -> Row:
    a = row.actual if row else None
    e = row.expected if row else None
    m = row.metrics if row else None
    names = [
        (record.name if record else (side.name if side else ""))
        for record, side in ((a, pair.pair.actual), (e, pair.pair.expected))
    ]
    note = f"culprit: {culprit.reason}" if culprit else (row.problem or _gap(a, e) if row else "")
    error = distance(row) if row is not None and status in ("rounding", "differs") else None
    bits = same_bits(row) if row is not None else None
    return (
        call.step, call.rank, *names, pair.pair.how if pair.is_paired else "", status, error,
        *(record.dtype if record else "" for record in (a, e)),
        *(str(list(record.shape)) if record else "" for record in (a, e)),
        *(record.requires_grad if record else "" for record in (a, e)),
        *(_metric_cells(m) if m is not None else _NO_METRICS),
        *_summary_cells(a), *_summary_cells(e), *_summary_differences(a, e),
        "" if bits is None else ("equal" if bits else "differ"),
        call.module, note,
    )  # fmt: skip


def _gap(a: TensorRecord | None, e: TensorRecord | None) -> str:
    return "; ".join(
        f"{side}: {record.gap}"
        for side, record in (("actual", a), ("expected", e))
        if record is not None and record.gap
    )


def _metric_cells(m: PairMetrics) -> Row:
    return (
        m.cosine, m.max_abs, m.max_rel, m.rel_l2, m.euclidean, m.within_1_1000, m.within_5_1000,
        m.ulp_max, m.ulp_over_1, m.ulp_over_4, m.ulp_over_16, m.mismatched, m.index,
        m.nonfinite_disagree,
    )  # fmt: skip


def _summary_cells(record: TensorRecord | None) -> Row:
    s = record.summary if record else None
    return (None,) * 4 if s is None else (s.min, s.max, s.mean, s.norm)


def _summary_differences(a: TensorRecord | None, e: TensorRecord | None) -> Row:
    s = a.summary if a else None
    t = e.summary if e else None
    if s is None or t is None:
        return (None,) * 8
    differences = [_minus(getattr(s, k), getattr(t, k)) for k in ("max", "min", "mean", "norm")]
    relative = [
        _over(d, getattr(t, k))
        for d, k in zip(differences, ("max", "min", "mean", "norm"), strict=True)
    ]
    return (*differences, *relative)


def _minus(a: float | None, e: float | None) -> float | None:
    return None if a is None or e is None else float(a) - float(e)


def _over(difference: float | None, e: float | None) -> float | None:
    if difference is None or e is None:
        return None
    if difference == 0:
        return 0.0
    return abs(difference / e) if e else math.inf


def _classic_numbers(record: TensorRecord | None) -> Row:
    """Max, min, mean, l2norm as the peers order them."""
    s = record.summary if record else None
    if s is None:
        return ("Nan",) * 4
    return tuple("Nan" if v is None else v for v in (s.max, s.min, s.mean, s.norm))


# msprobe

_MSPROBE = (
    "NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "NPU Requires_grad", "Bench Requires_grad",
)  # fmt: skip
_MSPROBE_NUMBERS = (
    "NPU max", "NPU min", "NPU mean", "NPU l2norm",
    "Bench max", "Bench min", "Bench mean", "Bench l2norm",
)  # fmt: skip
_MSPROBE_END = ("Requires_grad Consistent", "Result", "Err_message", "NPU_Stack_Info")
_MSPROBE_MODES = {
    "tensors": (
        "Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio",
        "Five Thousandths Err Ratio", *_MSPROBE_NUMBERS,
    ),
    "stats": (
        "Max diff", "Min diff", "Mean diff", "L2norm diff", "MaxRelativeErr", "MinRelativeErr",
        "MeanRelativeErr", "NormRelativeErr", *_MSPROBE_NUMBERS,
    ),
    "digest": ("NPU MD5", "BENCH MD5"),
}  # fmt: skip


def _msprobe(comparison: Comparison) -> Table:
    mode = comparison.verdict.mode
    mode = "stats" if mode == "structure" else mode
    end = (*_MSPROBE_END, "Data_name") if mode == "tensors" else _MSPROBE_END
    return Table((*_MSPROBE, *_MSPROBE_MODES[mode], *end), _msprobe_rows(comparison, mode))


def _msprobe_rows(comparison: Comparison, mode: str) -> Iterator[tuple[Row, str]]:
    culprits = {(c.rank, c.step, c.name) for c in comparison.verdict.culprits}
    for pair in comparison.pairs:
        if pair.pair.actual is None:
            continue
        call = pair.pair.actual
        is_culprit = (call.rank, call.step, call.name) in culprits
        first = True
        for row in pair.tensors:
            if row.actual is None:
                continue
            yield _msprobe_row(pair, row, mode, first, is_culprit)
            first = False


def _msprobe_row(
    pair: CallPair, row: TensorPair, mode: str, first: bool, is_culprit: bool
) -> tuple[Row, str]:
    a, e = row.actual, row.expected
    assert a is not None
    call = pair.pair.actual
    assert call is not None
    common: Row = (
        a.name, e.name if e else "N/A", f"torch.{a.dtype}", f"torch.{e.dtype}" if e else "N/A",
        str(list(a.shape)), str(list(e.shape)) if e else "N/A", a.requires_grad,
        e.requires_grad if e else "N/A",
    )  # fmt: skip
    if mode == "tensors":
        middle = _msprobe_metrics(row)
    elif mode == "digest":
        middle = (a.digest or "N/A", (e.digest if e else None) or "N/A")
    else:
        middle = _msprobe_statistics(a, e)
    if mode != "digest":
        middle = (*middle, *_msprobe_numbers(a), *_msprobe_numbers(e))
    wrong = is_culprit or (mode == "digest" and e is not None and a.digest != e.digest)
    messages = ["no bench data matched"] if e is None else []
    if e is not None and a.shape != e.shape:
        messages.append("shapes differ")
    stack = str(list(call.stack)) if first and call.stack else "N/A"
    end: Row = (
        a.requires_grad == e.requires_grad if e else "N/A",
        "error" if wrong else ("pass" if e is not None else "N/A"), json.dumps(messages), stack,
    )  # fmt: skip
    if mode == "tensors":
        end = (*end, str([a.name, e.name if e else "N/A"]) if a.blob else "['-1', '-1']")
    return (*common, *middle, *end), "bad" if wrong else ""


def _msprobe_metrics(row: TensorPair) -> Row:
    a, e, m = row.actual, row.expected, row.metrics
    assert a is not None
    if e is None:
        return ("N/A",) * 6
    if a.shape != e.shape:
        return ("shape unmatched",) * 6
    if m is None:
        return ("unsupported",) * 6
    if not a.shape or a.numel == 1:
        rest = "unsupported"
        return (rest, rest, _rounded(m.max_abs), _rounded(m.max_rel), rest, rest)
    if m.nonfinite_disagree:
        return ("N/A",) * 6
    cosine = "Nan" if m.cosine is None else (1.0 if m.cosine > _ALMOST_ONE else _rounded(m.cosine))
    return (
        cosine, m.euclidean, _rounded(m.max_abs), _rounded(m.max_rel),
        _rounded(m.within_1_1000), _rounded(m.within_5_1000),
    )  # fmt: skip


def _msprobe_statistics(a: TensorRecord, e: TensorRecord | None) -> Row:
    if e is None:
        return ("N/A",) * 8
    cells = _summary_differences(a, e)
    differences = tuple("Nan" if d is None else (0 if d == 0 else d) for d in cells[:4])
    relative = tuple(
        "Nan" if r is None else ("0" if r == 0 else ("inf" if r == math.inf else f"{100 * r}%"))
        for r in (cell if not isinstance(cell, str | bool) else None for cell in cells[4:])
    )
    return (*differences, *relative)


def _msprobe_numbers(record: TensorRecord | None) -> Row:
    if record is None:
        return ("N/A",) * 4
    return _classic_numbers(record)


def _rounded(value: float) -> Cell:
    return round(value, 12) if math.isfinite(value) else ("Nan" if value != value else value)
