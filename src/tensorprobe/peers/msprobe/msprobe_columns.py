"""The columns, cells and rules of msprobe's compare table."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.peers.msprobe import msprobe_rules
from tensorprobe.peers.msprobe.msprobe_leaves import statistics_of
from tensorprobe.peers.msprobe.msprobe_rules import Line
from tensorprobe.peers.peer_names import leaves
from tensorprobe.records import Call, Fields, Special, TensorRecord
from tensorprobe.report.table import Cell, Row, Table

_COMMON = (
    "NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "NPU Requires_grad", "Bench Requires_grad",
)  # fmt: skip
_NUMBERS = (
    "NPU max", "NPU min", "NPU mean", "NPU l2norm",
    "Bench max", "Bench min", "Bench mean", "Bench l2norm",
)  # fmt: skip
_MIDDLE = {
    "tensors": (
        "Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio",
        "Five Thousandths Err Ratio", *_NUMBERS,
    ),
    "stats": (
        "Max diff", "Min diff", "Mean diff", "L2norm diff", "MaxRelativeErr", "MinRelativeErr",
        "MeanRelativeErr", "NormRelativeErr", *_NUMBERS,
    ),
    "digest": ("NPU MD5", "BENCH MD5"),
}  # fmt: skip
_END = ("Requires_grad Consistent", "Result", "Err_message")
_ALMOST_ONE = 0.99999  # a cosine beyond this is written with six digits
_ABSENT = "N/A"


class _Leaf(msgspec.Struct, frozen=True):
    """One value of a call: a tensor, a number, a text, or None."""

    name: str
    value: Any

    @property
    def record(self) -> TensorRecord | None:
        return self.value if isinstance(self.value, TensorRecord) else None

    @property
    def dtype(self) -> str:
        value = self.value
        if value is None:
            return _ABSENT
        if isinstance(value, TensorRecord):
            return f"torch.{value.dtype}"
        if isinstance(value, slice):
            return "slice"
        return str(str if isinstance(value, Special) else type(value))

    @property
    def shape(self) -> str:
        if self.value is None:
            return _ABSENT
        if isinstance(self.value, TensorRecord):
            return str(list(self.value.shape))
        return "(3,)" if isinstance(self.value, slice) else "[]"

    @property
    def requires_grad(self) -> Cell:
        return self.value.requires_grad if isinstance(self.value, TensorRecord) else _ABSENT

    @property
    def statistics(self) -> Row:
        """Max, min, mean and norm; of a number four times itself."""
        value = self.value
        if isinstance(value, TensorRecord):
            s = value.summary
            found = (None,) * 4 if s is None else statistics_of(s)
            return tuple(_statistic(part) for part in found)
        if value is None or isinstance(value, slice):
            return ("None",) * 4
        return (value.text if isinstance(value, Special) else _statistic(value),) * 4

    @property
    def digest(self) -> str:
        value = self.value
        if isinstance(value, TensorRecord):
            return (value.digest or _ABSENT).rpartition(":")[2]  # without the kind
        if value is None:
            return _ABSENT
        text = value.text if isinstance(value, Special) else str(value)
        return f"{zlib.crc32(text.encode()):08x}"


def table(comparison: Compared) -> Table:
    """The columns of what was kept: tensors, statistics or digests."""
    mode = comparison.verdict.mode
    mode = "stats" if mode == "structure" else mode
    has_stacks = any(pair.pair.actual and pair.pair.actual.stack for pair in comparison.pairs)
    header: tuple[str, ...] = (*_COMMON, *_MIDDLE[mode], *_END)
    if has_stacks:
        header = (*header, "NPU_Stack_Info")
    if mode == "tensors":
        header = (*header, "Data_name")
    return Table(header, _rows(comparison, mode, has_stacks))


def _rows(comparison: Compared, mode: str, has_stacks: bool) -> Iterator[tuple[Row, str]]:
    culprits = {(c.rank, c.step, c.name): c for c in comparison.verdict.culprits}
    for pair in comparison.pairs:
        call = pair.pair.actual
        if call is None:
            lines = list(_bench_only(pair, mode))
        else:
            found = list(_leaves(pair, mode))
            lines = [_line(ours, theirs, row, mode) for ours, theirs, row in found]
            msprobe_rules.judge(call, lines, mode)
            culprit = culprits.get((call.rank, call.step, call.name))
            for line, (_, _, row) in zip(lines, found, strict=True):
                msprobe_rules.correct(line, row, pair.is_paired, culprit)
            lines += _missing(pair, [theirs for _, theirs, _ in found], mode, culprit)
        stack = str(list(call.stack)) if call is not None and call.stack else _ABSENT
        for line in lines:
            end: Row = (line.consistent, line.result, json.dumps(line.messages))
            if has_stacks:
                end, stack = (*end, stack), _ABSENT
            if mode == "tensors":
                end = (*end, line.data_name)
            colour = {"error": "bad", "warning": "warn"}.get(line.result, "")
            yield (*line.common, *line.middle, *end), colour


def _bench_only(pair: CallPair, mode: str) -> Iterator[Line]:
    """The values of a call that the bench alone has; msprobe leaves such calls out."""
    assert pair.pair.expected is not None
    for _, leaf in _named(pair.pair.expected, mode):
        yield _bench_line(leaf, mode, "this call is in the bench only.")


def _missing(
    pair: CallPair, partners: Sequence[_Leaf | None], mode: str, culprit: Culprit | None
) -> Iterator[Line]:
    """Tensors of the bench that the call has no counterpart of, as a gradient that never came."""
    shown = {id(leaf.value) for leaf in partners if leaf is not None}
    rows = {id(row.expected): row for row in pair.tensors if row.actual is None}
    for _, leaf in () if pair.pair.expected is None else _named(pair.pair.expected, mode):
        row = rows.get(id(leaf.value))
        if row is None or id(leaf.value) in shown:
            continue
        line = _bench_line(leaf, mode, "this tensor is in the bench only.")
        msprobe_rules.correct(line, row, pair.is_paired, culprit)
        yield line


def _bench_line(leaf: _Leaf, mode: str, text: str) -> Line:
    common: Row = (
        _ABSENT, leaf.name, _ABSENT, leaf.dtype, _ABSENT, leaf.shape, _ABSENT, leaf.requires_grad,
    )  # fmt: skip
    line = Line(common, is_output=False, statistics=(_ABSENT,) * 4, expected=leaf.statistics)
    missing = len(_MIDDLE[mode]) - (1 if mode == "digest" else 4)
    known: Row = (leaf.digest,) if mode == "digest" else leaf.statistics
    line.middle = (*(_ABSENT,) * missing, *known)
    line.data_name = str([_ABSENT, _data_name(leaf)])
    line.say("warning", text)
    return line


# Which values a call has


def _leaves(pair: CallPair, mode: str) -> Iterator[tuple[_Leaf, _Leaf | None, TensorPair | None]]:
    """Each value of the actual call with its partner: inputs, parameters, outputs."""
    actual, expected = pair.pair.actual, pair.pair.expected
    assert actual is not None
    backward = expected is not None and actual.direction == "backward"
    rows = {row.name: row for row in pair.tensors if row.actual is not None}
    partners = {} if expected is None else dict(_named(expected, mode))
    for place, leaf in _named(actual, mode):
        row = rows.get(leaf.value.name.removeprefix(actual.name + ".")) if leaf.record else None
        partner = partners.get(place)
        if row is not None and row.expected is not None:
            found = next((p for p in partners.values() if p.value is row.expected), None)
            partner = found or _Leaf(row.expected.name, row.expected)
        elif leaf.record is not None:
            partner = None
        elif leaf.value is None and backward and not (partner and partner.value is None):
            continue  # a gradient that came on the other side: `_missing` has its row
        yield leaf, partner, row


def _named(call: Call, mode: str) -> Iterator[tuple[str, _Leaf]]:
    """With the place of each in the call, which both sides have in common."""
    keyword = "kwargs" if mode == "tensors" else "input"
    yield from _walk(call, "input", call.args)
    for key, value in call.kwargs.items():
        for place, leaf in _walk(call, f"input.{key}", value):
            # they name a row after the tensor's file, where there is one
            name = f"{call.name}.{keyword}{place.removeprefix('input')}" if leaf.record else ""
            yield place, _Leaf(name or leaf.name, leaf.value)
    for role in ("parameter", "output", "parameter_grad"):
        if role == "output":
            yield from _walk(call, "output", _as_outputs(call))
            continue
        for record in call.tensors:
            if record.role == role:
                yield record.name.removeprefix(call.name + "."), _Leaf(record.name, record)


def _as_outputs(call: Call) -> Any:
    """What a call returned, one value in a list; nothing where it did not return."""
    outputs = call.outputs
    if outputs is None and (call.status != "complete" or call.direction == "backward"):
        return ()
    return outputs if isinstance(outputs, list | tuple | Fields | Mapping) else [outputs]


def _walk(call: Call, place: str, value: Any) -> Iterator[tuple[str, _Leaf]]:
    for at, leaf in leaves(value, place):
        if isinstance(leaf, TensorRecord):
            yield leaf.name.removeprefix(call.name + "."), _Leaf(leaf.name, leaf)
        else:
            yield at, _Leaf(f"{call.name}.{at}", leaf)


# Cells


def _line(ours: _Leaf, theirs: _Leaf | None, row: TensorPair | None, mode: str) -> Line:
    common: Row = (
        ours.name, theirs.name if theirs else _ABSENT, ours.dtype,
        theirs.dtype if theirs else _ABSENT, ours.shape, theirs.shape if theirs else _ABSENT,
        ours.requires_grad, theirs.requires_grad if theirs else _ABSENT,
    )  # fmt: skip
    mine = ours.statistics
    other: Row = theirs.statistics if theirs else (_ABSENT,) * 4
    line = Line(common, is_output=".output." in ours.name, statistics=mine, expected=other)
    if mode == "digest":
        line.middle = (ours.digest, theirs.digest if theirs else _ABSENT)
    elif mode == "stats":
        line.middle = (*_differences(mine, other), *mine, *other)
    else:
        line.middle = (*_metrics(ours, theirs, row), *mine, *other)
        line.data_name = str([_data_name(ours), _data_name(theirs)])
    return line


def _data_name(leaf: _Leaf | None) -> str:
    if leaf is None:
        return _ABSENT
    record = leaf.record
    if record is None or record.blob is None:
        return "-1"
    path = record.blob.path
    return path.name if path.suffix in (".pt", ".npy") else record.name


def _metrics(ours: _Leaf, theirs: _Leaf | None, row: TensorPair | None) -> Row:
    if theirs is None:
        return (_ABSENT,) * 6
    a, m = ours.record, row.metrics if row is not None else None
    if a is not None and theirs.record is not None and a.shape != theirs.record.shape:
        return ("shape unmatched",) * 6
    if a is None or m is None or not a.numel:
        return ("unsupported",) * 6
    if m.nonfinite_disagree:
        return (_ABSENT,) * 6
    errors = (_rounded(m.max_abs), _rounded(m.max_rel_with(_epsilon(a, theirs.record))))
    if not a.shape:
        return ("unsupported", "unsupported", *errors, "unsupported", "unsupported")
    return (
        "unsupported" if a.numel == 1 else _cosine(m.cosine), m.euclidean, *errors,
        _rounded(m.within_1_1000), _rounded(m.within_5_1000),
    )  # fmt: skip


def _epsilon(a: TensorRecord, e: TensorRecord | None) -> float:
    """What they add to both where the expected number is zero."""
    small = ("float32", "float16", "bfloat16")
    is_small = a.dtype in small and (e is None or e.dtype in small)
    return 2.0**-23 if is_small else 2.0**-52


def _cosine(cosine: float | None) -> Cell:
    if cosine is None:
        return "Nan"
    return round(cosine, 6) if cosine > _ALMOST_ONE else round(cosine, 12)


def _rounded(value: float) -> Cell:
    return round(value, 12) if math.isfinite(value) else ("Nan" if value != value else value)


def _statistic(value: Any) -> Cell:
    if value is None:
        return "None"
    if isinstance(value, float) and value != value:
        return "Nan"
    return value if isinstance(value, bool | int | float | str) else str(value)


def _differences(mine: Row, other: Row) -> Row:
    """Of max, min, mean and norm: the differences, then the relative errors."""
    pairs = [_difference(a, e) for a, e in zip(mine, other, strict=True)]
    return (*(pair[0] for pair in pairs), *(pair[1] for pair in pairs))


def _difference(a: Cell, e: Cell) -> tuple[Cell, Cell]:
    if _ABSENT in (a, e):
        return _ABSENT, _ABSENT
    if str(a) == str(e):
        return "0", "0"
    if not (_is_number(a) and _is_number(e)):
        word = "Nan" if all(_is_number(part) or part == "Nan" for part in (a, e)) else "Diff"
        return word, word
    x, y = float(a), float(e)  # type: ignore[arg-type]
    if math.isinf(x) or math.isinf(y):
        infinite = x if math.isinf(x) else -y
        return infinite, infinite
    return x - y, f"{abs((x - y) / y * 100)}%" if y else "inf"


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)
