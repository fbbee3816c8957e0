"""The columns and cells of ptdbg_ascend's compare table, as its guide has them."""

from __future__ import annotations

from collections.abc import Iterator

from tensorprobe.compare.comparison import Comparison
from tensorprobe.compare.measure import CallPair, TensorPair
from tensorprobe.records import Call, TensorRecord
from tensorprobe.report.table import Row, Table, summary_differences

_COMMON = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape",
    "Bench Tensor Shape",
)  # fmt: skip
_TENSORS = (
    "Cosine", "MaxAbsErr", "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min",
    "Bench mean", "Accuracy Reached or Not", "Err_message",
)  # fmt: skip
# The guide's release compares tensors only; these are those of the releases after it.
_STATISTICS = (
    "Max diff", "Min diff", "Mean diff", "L2norm diff", "NPU max", "NPU min", "NPU mean",
    "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm",
)  # fmt: skip
_DIGESTS = ("NPU MD5", "BENCH MD5", "Result")
_ALMOST_ONE = 0.99999  # a cosine beyond this is written as 1.0
_NOTHING = "Nan"


def table(comparison: Comparison) -> Table:
    """The columns of what was kept: tensors, statistics or digests."""
    mode = comparison.verdict.mode
    columns = {"tensors": _TENSORS, "digest": _DIGESTS}.get(mode, _STATISTICS)
    return Table((*_COMMON, *columns), _rows(comparison, mode))


def _rows(comparison: Comparison, mode: str) -> Iterator[tuple[Row, str]]:
    for pair, row in comparison.rows:
        a, e = row.actual, row.expected
        if a is None or a.role in ("parameter", "parameter_grad", "buffer"):
            continue
        common: Row = (
            *_names(pair, a, e), f"torch.{a.dtype}", f"torch.{e.dtype}" if e else _NOTHING,
            str(list(a.shape)), str(list(e.shape)) if e else _NOTHING,
        )  # fmt: skip
        if mode == "tensors":
            cosine, error, accuracy, message = result(row)
            numbers = (*_numbers(a)[:3], *_numbers(e)[:3])
            yield (
                (*common, cosine, error, *numbers, accuracy, message),
                ("bad" if accuracy == "No" else ""),
            )
        elif mode == "digest":
            yield (*common, *_digests(a, e)), ""
        else:
            cells = summary_differences(a.summary, e.summary if e else None)[:4]
            differences = tuple(_NOTHING if cell is None else cell for cell in cells)
            yield (*common, *differences, *_numbers(a), *_numbers(e)), ""


def _names(pair: CallPair, a: TensorRecord, e: TensorRecord | None) -> tuple[str, str]:
    ours = _name(pair.pair.actual, a)
    return ours, _NOTHING if e is None else _name(pair.pair.expected, e)


def _name(call: Call | None, record: TensorRecord) -> str:
    assert call is not None
    suffix = record.name.removeprefix(call.name + ".")
    one_output = sum(r.role == "output" for r in call.tensors) == 1
    if suffix == "output.0" and call.direction == "forward" and one_output:
        suffix = "output"
    return f"{call.name.replace('.', '_')}_{suffix}"


def result(row: TensorPair) -> tuple[str, str, str, str]:
    """Cosine, MaxAbsErr, Accuracy Reached or Not, Err_message."""
    a, e, m = row.actual, row.expected, row.metrics
    assert a is not None
    if e is None:
        return _NOTHING, _NOTHING, _NOTHING, "no bench data to compare with"
    if a.shape != e.shape:
        return "shape unmatched", "shape unmatched", "Unmatched", "shapes differ; not compared"
    if m is None:
        return _NOTHING, _NOTHING, _NOTHING, row.problem or "no stored data"
    if a.numel == 0:
        return "1.0", "0.000000", "Yes", "empty data"
    error = "nan" if _has_nan(a, e) else f"{m.max_abs:.6f}"
    if a.numel == 1:
        return "1.0", error, "Yes", "one number: cosine says nothing"
    if _has_nan(a, e) or m.cosine is None:
        side = next((side for side, r in (("npu", a), ("bench", e)) if _all_zero(r)), None)
        reason = f"{side} data is all zero" if side else "the data has NaN or infinity"
        return _NOTHING, error, _NOTHING, f"no cosine: {reason}"
    cosine = "1.0" if m.cosine > _ALMOST_ONE else f"{m.cosine:.6f}"
    wrong = m.cosine < 0.99 and m.max_abs > 0.001
    return cosine, error, "No" if wrong else "Yes", ""


def _digests(a: TensorRecord, e: TensorRecord | None) -> Row:
    if e is None:
        return a.digest or _NOTHING, _NOTHING, _NOTHING
    same = a.digest == e.digest
    return a.digest or _NOTHING, e.digest or _NOTHING, "Pass" if same else "Different"


def _has_nan(*records: TensorRecord) -> bool:
    return any(r.summary is not None and not r.summary.is_finite for r in records)


def _all_zero(record: TensorRecord) -> bool:
    return record.summary is not None and record.summary.zero_count == record.numel


def _numbers(record: TensorRecord | None) -> Row:
    """Max, min, mean, l2norm, in their order."""
    s = record.summary if record else None
    if s is None:
        return (_NOTHING,) * 4
    return tuple(_NOTHING if v is None else v for v in (s.max, s.min, s.mean, s.norm))
