"""By which rules msprobe's table says pass, warning or error: of a call's inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import ROUNDING, distance, number_text
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.records import Call
from tensorprobe.report.table import Cell, Row

# The places of the cells that the rules look at, in what follows the common columns.
_COSINE, _ONE_THOUSANDTH, _NORM_RELATIVE = 0, 4, 7
# APIs of which they judge nothing, or only what comes out.
_NEVER = {
    "empty", "empty_like", "numpy", "to", "__setitem__", "empty_with_format", "new_empty_strided",
    "new_empty", "empty_strided",
}  # fmt: skip
_OUTPUTS_ONLY = {
    "_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv",
}  # fmt: skip


class Line(msgspec.Struct):
    """A row while it is judged."""

    common: Row
    is_output: bool
    statistics: Row
    expected: Row
    middle: Row = ()
    data_name: str = ""
    result: str = "pass"
    messages: list[str] = []

    @property
    def consistent(self) -> bool:
        """Whether requires_grad is the same on both sides."""
        return self.common[6] == self.common[7]

    @property
    def has_partner(self) -> bool:
        return self.common[1] != "N/A"

    def say(self, result: str, text: str) -> None:
        """Note a finding; the worst stands as the result."""
        self.messages.append(f"{result}: {text}")
        if self.result != "error":
            self.result = result


def judge(call: Call, lines: Sequence[Line], mode: str) -> None:
    """Fill in the results of the rows of one call."""
    api = call.name.split(".")[1] if "." in call.name else call.name
    if api in _NEVER:
        return
    inputs = [line for line in lines if not line.is_output]
    outputs = [line for line in lines if line.is_output]
    judged = outputs if api in _OUTPUTS_ONLY else [*inputs, *outputs]
    if mode == "digest":
        _digests(judged)
        return
    _nonfinite(judged)
    if api not in _OUTPUTS_ONLY:
        if mode == "tensors":
            _thousandths(inputs, outputs)
        else:
            _norms(inputs, outputs)
    _requires_grad(judged)
    if api not in _OUTPUTS_ONLY:
        _scalars(inputs)
    _layouts(judged)
    if api not in _OUTPUTS_ONLY and outputs:
        if mode == "tensors":
            _cosines(inputs, outputs)
        else:
            _growth(inputs, outputs)


def correct(line: Line, row: TensorPair | None, is_paired: bool, culprit: Culprit | None) -> None:
    """Where msprobe's rules say pass and that is wrong: a row without a partner, a tensor that
    differs by more than rounding explains, the call that our verdict names."""
    if culprit is not None and row is not None and culprit.tensor in (None, row.name):
        line.say("error", culprit.reason)
    if not line.has_partner and (row is not None or not is_paired):
        line.say("warning", "no bench data matched.")
    elif row is not None and line.result == "pass" and (found := distance(row)) > ROUNDING:
        times = "altogether" if math.isinf(found) else f"{number_text(found)} times what rounding"
        line.say("warning", f"it differs {times}" + ("." if math.isinf(found) else " explains."))


def _digests(lines: Sequence[Line]) -> None:
    for line in lines:
        mine, other = line.middle
        if mine == other:
            continue
        if "N/A" in (mine, other):
            line.say("warning", "one side has no digest to compare with.")
        else:
            line.say("error", "The CRC-32 value of NPU differs from that of the bench.")


def _nonfinite(lines: Sequence[Line]) -> None:
    for line in lines:
        if any(map(_is_nonfinite, line.statistics[:2])) and not any(
            map(_is_nonfinite, line.expected[:2])
        ):
            line.say("error", "NaN or infinity in the largest or smallest value of the NPU side.")


def _thousandths(inputs: Sequence[Line], outputs: Sequence[Line]) -> None:
    before, after = _least(inputs, _ONE_THOUSANDTH), _least(outputs, _ONE_THOUSANDTH)
    if outputs and before > 0.9 and after < 0.1:  # they print 0.6 and test for 0.1
        text = "The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6."
        outputs[0].say("error", text)


def _norms(inputs: Sequence[Line], outputs: Sequence[Line]) -> None:
    if _most(inputs, _NORM_RELATIVE) >= 0.1:
        return
    for line in outputs:
        if (_share(line.middle[_NORM_RELATIVE]) or 0.0) > 0.5:
            line.say("error", "the norm of the output is off by more than half.")


def _requires_grad(lines: Sequence[Line]) -> None:
    for line in lines:
        if line.has_partner and not line.consistent:
            line.say("error", "requires_grad is not the same on both sides.")


def _scalars(inputs: Sequence[Line]) -> None:
    for line in inputs:
        dtypes = str(line.common[2]), str(line.common[3])
        if not (line.has_partner and all("class" in dtype for dtype in dtypes)):
            continue
        if line.common[4] == "[]" and line.statistics[0] != line.expected[0]:
            line.say("error", "an argument that is no tensor is not the same on both sides.")


def _layouts(lines: Sequence[Line]) -> None:
    for what, column in (("dtype", 2), ("shape", 4)):
        for line in lines:
            if line.has_partner and line.common[column] != line.common[column + 1]:
                line.say("error", f"the {what} is not the same on both sides.")


def _cosines(inputs: Sequence[Line], outputs: Sequence[Line]) -> None:
    before, after = _least(inputs, _COSINE), _least(outputs, _COSINE)
    if before > 0.9 and before - after > 0.1:
        outputs[0].say("warning", "the cosine falls by more than 0.1 from input to output.")


def _growth(inputs: Sequence[Line], outputs: Sequence[Line]) -> None:
    before, after = _most(inputs, _NORM_RELATIVE), _most(outputs, _NORM_RELATIVE)
    if after > 0.1 if before == 0 else after / before > 10:
        outputs[0].say("warning", "The norm relative error of output is 10 times that of input.")


def _least(lines: Sequence[Line], column: int) -> float:
    numbers = [line.middle[column] for line in lines]
    return min([1.0, *(float(n) for n in numbers if isinstance(n, int | float))])


def _most(lines: Sequence[Line], column: int) -> float:
    shares = [_share(line.middle[column]) for line in lines]
    return max([0.0, *(share for share in shares if share is not None)])


def _share(cell: Cell) -> float | None:
    """ "1.5%" as 0.015; None for what is no percentage."""
    if isinstance(cell, str) and cell.endswith("%"):
        return float(cell[:-1]) / 100
    return None


def _is_nonfinite(cell: Cell) -> bool:
    return cell == "Nan" or (isinstance(cell, float) and not math.isfinite(cell))
