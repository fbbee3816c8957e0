"""The columns of comparison.csv: a row for each tensor of each call, actual beside expected."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.rounding import ROUNDING, distance, same_bits
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.records import TensorRecord
from tensorprobe.report.table import Row, Table, summary_differences
from tensorprobe.tensors.pair_metrics import PairMetrics

HEADER = (
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
_FREE = tuple(
    HEADER.index(name)
    for name in ("actual", "expected", "actual_dtype", "expected_dtype", "module", "note")
)
_NO_METRICS: Row = (None,) * 14
_NO_SUMMARY: Row = (None,) * 4
_BITS = {None: "", True: "equal", False: "differ"}


def table(comparison: Compared) -> Table:
    """The native columns."""
    culprits = {(c.rank, c.step, c.name): c for c in comparison.verdict.culprits}
    return table_of(comparison.pairs, culprits)


def table_of(pairs: Iterable[CallPair], culprits: Mapping[tuple[int, int, str], Culprit]) -> Table:
    """The same of some pairs, with what is to be said of those that are to blame."""
    return Table(HEADER, _rows(pairs, culprits), _FREE)


def _rows(
    pairs: Iterable[CallPair], culprits: Mapping[tuple[int, int, str], Culprit]
) -> Iterator[tuple[Row, str]]:
    for pair in pairs:
        call = pair.call
        culprit = culprits.get((call.rank, call.step, call.name)) if culprits else None
        if not pair.tensors:
            yield _bare_row(pair, culprit)
        for row in pair.tensors:
            is_it = culprit is not None and culprit.tensor in (None, row.name)
            yield _row(pair, row, culprit if is_it else None)


def _bare_row(pair: CallPair, culprit: Culprit | None) -> tuple[Row, str]:
    """A call without tensors."""
    actual, expected, how = pair.pair
    status, colour = _one_sided(pair) or ("no tensors", "")
    blank: Row = ("",) * 6
    return (
        pair.call.step, pair.call.rank, actual.name if actual else "",
        expected.name if expected else "", how if pair.is_paired else "", status, None,
        *blank, *_NO_METRICS, *_NO_SUMMARY, *_NO_SUMMARY, *summary_differences(None, None),
        "", pair.call.module, f"culprit: {culprit.reason}" if culprit else "",
    ), "bad" if culprit else colour  # fmt: skip


def _row(pair: CallPair, row: TensorPair, culprit: Culprit | None) -> tuple[Row, str]:
    actual, expected, how = pair.pair
    a, e, m = row.actual, row.expected, row.metrics
    call = pair.call
    bits = same_bits(row)
    status, colour = _one_sided(pair) or _status(row, bits)
    s = a.summary if a is not None else None
    t = e.summary if e is not None else None
    note = f"culprit: {culprit.reason}" if culprit else row.problem or _gap(a, e)
    return (
        call.step, call.rank,
        a.name if a is not None else (actual.name if actual else ""),
        e.name if e is not None else (expected.name if expected else ""),
        how if actual is not None and expected is not None else "", status,
        distance(row) if status == "rounding" or status == "differs" else None,
        a.dtype if a is not None else "", e.dtype if e is not None else "",
        _shape(a.shape) if a is not None else "", _shape(e.shape) if e is not None else "",
        a.requires_grad if a is not None else "", e.requires_grad if e is not None else "",
        *(_metric_cells(m) if m is not None else _NO_METRICS),
        *((s.min, s.max, s.mean, s.norm) if s is not None else _NO_SUMMARY),
        *((t.min, t.max, t.mean, t.norm) if t is not None else _NO_SUMMARY),
        *summary_differences(s, t), _BITS[bits], call.module, note,
    ), "bad" if culprit else colour  # fmt: skip


def _one_sided(pair: CallPair) -> tuple[str, str] | None:
    if pair.pair.expected is None:
        return "only in actual", "warn"
    if pair.pair.actual is None:
        return "only in expected", "warn"
    return None


def _status(row: TensorPair, bits: bool | None) -> tuple[str, str]:
    a, e = row.actual, row.expected
    if a is None or e is None:
        return f"only in {'expected' if a is None else 'actual'}", "warn"
    if a.shape != e.shape:
        return "shapes differ", "bad"
    if a.gap or e.gap:
        return "missing", "warn"
    if bits:
        return "equal", ""
    found = distance(row)
    if found == 0:
        return ("equal" if row.metrics is not None else "not compared"), ""
    return ("rounding", "good") if found <= ROUNDING else ("differs", "warn")


@functools.lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _gap(a: TensorRecord | None, e: TensorRecord | None) -> str:
    if (a is None or a.gap is None) and (e is None or e.gap is None):
        return ""
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
