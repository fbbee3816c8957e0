"""auto_analyze: the first row that fails, and where to look. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensorprobe.comparing.comparison import Compared
from tensorprobe.peers.ptdbg.ptdbg_columns import ACCURACY, NAN, RESULT
from tensorprobe.report.table import Row

_FAILED = ("No", "Different", "Warning")
_ADVICE = {
    ("forward", "input"): "what comes into this call differs already: look at what made it - the "
    "data, a call that was not dumped, or something that wrote to it in place",
    ("forward", "output"): "this call gets the same and gives something else: its forward is the "
    "suspect. Dump it alone, or run it alone with tensorprobe repro",
    ("backward", "input"): "the gradient that comes into this call differs already: look at the "
    "calls that follow it in forward, whose backward ran before",
    ("backward", "output"): "this call gets the same gradient and sends another one on: its "
    "backward is the suspect",
}
_VARIES = ("conv2d", "conv3d", "matmul", "nll_loss", "layer_norm", "lstm")


class Advice(NamedTuple):
    """What the advisor's file says."""

    line: str  # of the table, its header being 1; NA where no row fails
    node: str
    advice: str

    def text(self) -> str:
        """The file: three entries by the names people's scripts look for."""
        entries = (
            ("Line", self.line),
            ("Suspect Nodes", self.node),
            ("Expert Advice", self.advice),
        )
        return "".join(f"{name}: {value}\n" for name, value in entries)


def advise(comparison: Compared, header: Sequence[str], rows: Sequence[Row]) -> Advice:
    """The first failing row in the order of execution, with what its place suggests."""
    column = header.index(ACCURACY if ACCURACY in header else RESULT)
    failed = [i for i, row in enumerate(rows) if row[column] in _FAILED]
    unmatched = sum(row[column] in (NAN, "Unmatched") for row in rows)
    left = f" {unmatched} rows could not be compared; see Err_message." if unmatched else ""
    if not rows:
        return Advice("NA", "NA", "nothing was compared: the dumps hold no tensors.")
    if not failed:
        compared = len(rows) - unmatched
        if not compared:
            return Advice("NA", "NA", f"nothing could be judged.{left}")
        # A factor of two has a cosine of one: the guide's rule lets it pass, rounding does not.
        text = f"all {compared} compared rows reach the accuracy.{left}{_culprit(comparison)}"
        return Advice("NA", "NA", text)
    first = failed[0]
    name = str(rows[first][0])
    return Advice(str(first + 2), name, _about(name) + "." + left + _culprit(comparison))


def _about(name: str) -> str:
    direction = "backward" if "backward" in name else "forward"
    side = "output" if "output" in name else "input"
    text = _ADVICE[direction, side]
    if side == "output" and any(api in name for api in _VARIES):
        text += ". It may vary from run to run: repeat with seed_all(mode=True)"
    return text


def _culprit(comparison: Compared) -> str:
    """What the comparison itself blames, by the error that rounding cannot explain."""
    culprits = comparison.verdict.culprits
    if not culprits:
        return ""
    return f" Judged by rounding, the first culprit is {culprits[0].name}: {culprits[0].reason}."
