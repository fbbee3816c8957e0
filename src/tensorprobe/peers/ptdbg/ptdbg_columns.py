"""The columns and cells of ptdbg_ascend's compare table, judged by the rule of its guide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.peers.peer_names import leaves
from tensorprobe.peers.ptdbg.ptdbg_layout import spelt_name
from tensorprobe.peers.ptdbg.ptdbg_names import tensor_suffix
from tensorprobe.records import Call, TensorRecord, TensorSummary
from tensorprobe.replay.kinds import kind_of
from tensorprobe.report.table import Cell, Row, Table
from tensorprobe.tensors.pair_metrics import PairMetrics

_NAMES = (
    "NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape",
    "Bench Tensor Shape",
)  # fmt: skip
_STATISTICS = ("max", "min", "mean", "l2norm")
_STACK = "NPU_Stack_Info"
ACCURACY = "Accuracy Reached or Not"
RESULT = "Result"
MESSAGE = "Err_message"
_COSINE, _ABSOLUTE = 0.99, 0.001  # the guide's limits
_ALMOST_ONE = 0.99999  # beyond it they write 1.0
# In-place calls that do not read what they write to.
_FILLS = (
    "zero_", "fill_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_",
    "cauchy_", "log_normal_", "geometric_", "trunc_normal_", "kaiming_uniform_",
    "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "zeros_", "ones_", "constant_", "eye_",
    "dirac_", "orthogonal_", "sparse_",
)  # fmt: skip
_STATISTICS_LIMIT = 0.5  # a statistic this far off is a warning
_FRAME = re.compile(r"(.*):(\d+) in (.*)", re.DOTALL)
NAN = "Nan"  # spelt so that pandas does not take it for a missing cell


class _Item(NamedTuple):
    """A row: a tensor or a number of one call, on one side or both."""

    actual: Any
    expected: Any
    names: tuple[str, str]
    row: TensorPair | None = None
    is_undefined: bool = False  # memory that nobody has written to yet


def table(comparison: Compared) -> Table:
    """The rows, in the columns for what was dumped: tensors, statistics or checksums.

    Stacks have a column where the calls have any. Rows that the original leaves out or lets pass
    are here: what only the bench has, a loss that is wrong, a tensor that is zero on one side.
    """
    mode = comparison.verdict.mode
    has_stacks = any(pair.pair.actual is not None and pair.call.stack for pair in comparison.pairs)
    if mode == "digest":
        middle: tuple[str, ...] = ("NPU MD5", "BENCH MD5", RESULT, MESSAGE)
    elif mode == "tensors":
        sides = tuple(f"{side} {s}" for side in ("NPU", "Bench") for s in _STATISTICS[:3])
        middle = ("Cosine", "MaxAbsErr", *sides, ACCURACY, MESSAGE)
    else:
        sides = tuple(f"{side} {s}" for side in ("NPU", "Bench") for s in _STATISTICS)
        differences = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
        middle = (*differences, *sides, RESULT, MESSAGE)
    header = (*_NAMES, *middle, *([_STACK] if has_stacks else []))
    return Table(header, _rows(comparison, mode, has_stacks))


def _rows(comparison: Compared, mode: str, has_stacks: bool) -> Iterator[tuple[Row, str]]:
    for pair in comparison.pairs:
        stack: Cell = _stack_cell(pair.pair.actual)
        for item in _items(pair):
            cells, is_bad = _cells(item, mode)
            yield (*cells, *([stack] if has_stacks else [])), "bad" if is_bad else ""
            stack = ""  # on the first row of a call, as they have it


def _cells(item: _Item, mode: str) -> tuple[Row, bool]:
    a, e = item.actual, item.expected
    start: Row = (*item.names, _dtype(a), _dtype(e), _shape(a), _shape(e))
    if mode == "digest":
        result, message = _digest_result(a, e)
        if item.is_undefined:
            result, message = NAN, "memory that nothing was written to yet"
        return (*start, _digest(a), _digest(e), result, message), result == "Different"
    if mode == "tensors":
        cosine, error, accuracy, message = _result(item)
        numbers = (*_numbers(a)[:3], *_numbers(e)[:3])
        return (*start, cosine, error, *numbers, accuracy, message), accuracy == "No"
    differences, result, message = _statistics_result(a, e)
    if item.is_undefined:
        result, message = NAN, "memory that nothing was written to yet"
    return (*start, *differences, *_numbers(a), *_numbers(e), result, message), result == "Warning"


# What is compared


def _items(pair: CallPair) -> Iterator[_Item]:
    """The tensors and numbers of a call in their order, then what only the bench has."""
    rows = {row.actual.name: row for row in pair.tensors if row.actual is not None}
    ours, theirs = _leaves(pair.pair.actual), _leaves(pair.pair.expected)
    seen: set[str] = set()
    for suffix, value in ours.items():
        row = rows.get(value.name) if isinstance(value, TensorRecord) else None
        other = row.expected if row is not None else theirs.get(suffix)
        if isinstance(other, TensorRecord) != isinstance(value, TensorRecord):
            other = None
        their = _suffix_of(theirs, other) or suffix
        seen.add(their)
        names = (_name(pair.pair.actual, suffix), NAN)
        if other is not None:
            names = (names[0], _name(pair.pair.expected, their))
        yield _Item(value, other, names, row, _is_undefined(pair.call, suffix))
    for suffix, value in theirs.items():
        if suffix not in seen:
            yield _Item(None, value, (NAN, _name(pair.pair.expected, suffix)))


def _is_undefined(call: Call, suffix: str) -> bool:
    """torch.empty gives whatever was in memory, and a call that fills it is given that."""
    if call.direction == "backward" or call.name.startswith("Module."):
        return False
    if suffix.startswith("output"):
        return kind_of(call) == "uninitialised"
    return suffix == "input.0" and call.op.rpartition(".")[2] in _FILLS


def _leaves(call: Call | None) -> dict[str, Any]:
    """The tensors and numbers of a call by what follows its name in theirs."""
    if call is None:
        return {}
    found: dict[str, Any] = {}
    for place, value in (*leaves(call.args, "input"), *leaves(call.kwargs, "input")):
        if isinstance(value, TensorRecord):
            found[tensor_suffix(call, value)] = value
        elif type(value) in (bool, int, float):
            found[place] = value
    for record in call.tensors:
        if record.role not in ("parameter", "parameter_grad", "buffer", "state"):
            found.setdefault(tensor_suffix(call, record), record)
    return found


def _suffix_of(leaves: dict[str, Any], value: Any) -> str | None:
    if not isinstance(value, TensorRecord):
        return None
    return next((suffix for suffix, leaf in leaves.items() if leaf is value), None)


def _name(call: Call | None, suffix: str) -> str:
    assert call is not None
    spelt = spelt_name(call)
    return f"{spelt}{'.' if spelt.endswith(f'.{call.direction}') else '_'}{suffix}"


def _dtype(value: Any) -> str:
    if value is None:
        return NAN
    return f"torch.{value.dtype}" if isinstance(value, TensorRecord) else str(type(value))


def _shape(value: Any) -> str:
    if value is None:
        return NAN
    return str(list(value.shape)) if isinstance(value, TensorRecord) else "[]"


def _numbers(value: Any) -> Row:
    """max, min, mean, l2norm."""
    if value is None:
        return (NAN,) * 4
    if not isinstance(value, TensorRecord):
        return (value,) * 4
    s = value.summary
    if s is None:
        return (NAN,) * 4
    if s.nan_count:
        return ("nan",) * 4
    return tuple(NAN if v is None else v for v in (s.max, s.min, s.mean, s.norm))


def _stack_cell(call: Call | None) -> str:
    if call is None or not call.stack:
        return ""
    found = (_FRAME.fullmatch(frame) for frame in call.stack)
    return str([list(frame.groups()) for frame in found if frame is not None])


# The rule of the guide, and where it has no answer


def _result(item: _Item) -> tuple[str, str, str, str]:
    """Cosine, MaxAbsErr, whether the accuracy is reached, and a message."""
    a, e = item.actual, item.expected
    if a is None or e is None:
        return NAN, NAN, NAN, _one_sided(a)
    if not isinstance(a, TensorRecord):
        return _number_result(a, e)
    if item.is_undefined:
        return NAN, NAN, NAN, "memory that nothing was written to yet"
    if a.shape != e.shape:
        return "shape unmatched", "shape unmatched", "Unmatched", "shapes differ; not compared"
    metrics = item.row.metrics if item.row is not None else None
    if metrics is None:
        problem = item.row.problem if item.row is not None else None
        return NAN, NAN, NAN, problem or a.gap or e.gap or "no stored data to compare"
    return _tensor_result(a, e, metrics)


def _tensor_result(a: TensorRecord, e: TensorRecord, m: PairMetrics) -> tuple[str, str, str, str]:
    messages = [f"dtypes differ: {a.dtype} and {e.dtype}"] if a.dtype != e.dtype else []
    error = f"{m.max_abs:.6f}"
    cosine = NAN if m.cosine is None else _number(m.cosine)
    is_far = m.max_abs > _ABSOLUTE
    if a.numel == 0:
        cosine, is_wrong = "1.0", False
        messages.append("empty data")
    elif m.nonfinite_disagree:
        cosine, error, is_wrong = NAN, NAN, True
        messages.append(f"NaN or infinity in {m.nonfinite_disagree} places on one side only")
    elif m.is_equal:
        cosine, is_wrong = "1.0", False
    elif a.numel == 1:
        # Of single numbers the cosine is 1 or -1: their ratio takes its place.
        cosine, is_wrong = "1.0", is_far and m.max_rel > 1 - _COSINE
        messages.append("one value: judged by its relative error")
    elif m.cosine is None:
        zero = [side for side, r in (("npu", a), ("bench", e)) if _is_zero(r.summary)]
        is_wrong = is_far
        messages.append(f"{zero[0]} data is all zero" if zero else "no cosine: too few values")
    else:
        is_wrong = m.cosine < _COSINE and is_far
    return cosine, error, "No" if is_wrong else "Yes", "; ".join(messages)


def _number_result(a: Any, e: Any) -> tuple[str, str, str, str]:
    error = abs(float(a) - float(e))
    same = a == e or (type(a) is float and error <= 1e-6 * max(abs(a), abs(e)))
    return "1.0", f"{error:.6f}", "Yes" if same else "No", "" if same else "arguments differ"


def _number(value: float) -> str:
    return "1.0" if value > _ALMOST_ONE else f"{value:.6f}"


def _is_zero(summary: TensorSummary | None) -> bool:
    return summary is not None and summary.max == 0 and summary.min == 0


def _one_sided(actual: Any) -> str:
    return "only the bench has it" if actual is None else "no bench data to compare with"


def _statistics_result(a: Any, e: Any) -> tuple[Row, str, str]:
    if a is None or e is None:
        return (NAN,) * 4, NAN, _one_sided(a)
    if isinstance(a, TensorRecord) and a.shape != e.shape:
        return (NAN,) * 4, "Warning", "shapes differ"
    ours, theirs = _numbers(a), _numbers(e)
    cells: list[Cell] = []
    result = ""
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, str) or isinstance(y, str) or x is None or y is None:
            cells.append(NAN)
            result = "Warning" if x != y else result
            continue
        cells.append(0.0 if x == y else float(x) - float(y))
        size = max(abs(x), abs(y)) + 1e-10
        if not abs(float(x) - float(y)) <= _STATISTICS_LIMIT * size and x != y:
            result = "Warning"
    messages = []
    if isinstance(a, TensorRecord) and a.dtype != e.dtype:
        messages.append(f"dtypes differ: {a.dtype} and {e.dtype}")
    return tuple(cells), result, "; ".join(messages)


def _digest(value: Any) -> str:
    text = value.digest if isinstance(value, TensorRecord) else None
    return NAN if text is None else text.removeprefix("crc32:")


def _digest_result(a: Any, e: Any) -> tuple[str, str]:
    if a is None or e is None:
        return NAN, _one_sided(a)
    if not isinstance(a, TensorRecord):
        return ("Pass", "") if a == e else ("Different", "arguments differ")
    if a.digest is None or e.digest is None:
        return NAN, "no checksum"
    if a.digest.startswith("crc32:") != e.digest.startswith("crc32:"):
        return NAN, "a CRC-32 and a digest of another kind cannot be compared"
    return ("Pass", "") if a.digest == e.digest else ("Different", "")
