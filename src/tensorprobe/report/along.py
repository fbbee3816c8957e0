"""The error along a run, in as few points as there is room for: sparkline, notebook, plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.comparing.rounding import distance
from tensorprobe.errors import MissingDependency
from tensorprobe.replay.kinds import kind_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tensorprobe.comparing.comparison import Compared
    from tensorprobe.comparing.measure import CallPair

_BARS = " ▁▂▃▄▅▆▇█"
_ROUNDING = 16.0


class Point(NamedTuple):
    """The largest error of a stretch of calls, in roundings, and whether a culprit is in it."""

    error: float
    culprit: bool


def along(comparison: Compared, most: int) -> list[Point]:
    """At most so many points, in execution order."""
    if isinstance(comparison.pairs, PairsOfRanks):
        return []  # one run after the other: a line of text is not worth reading them all
    culprits = {(c.rank, c.step, c.name) for c in comparison.verdict.culprits}
    pairs = [pair for pair in comparison.pairs if pair.is_paired]
    if not pairs:
        return []
    stretch = -(-len(pairs) // most)
    points = []
    for start in range(0, len(pairs), stretch):
        part = pairs[start : start + stretch]
        names = {(p.call.rank, p.call.step, p.call.name) for p in part}
        points.append(Point(max(map(error_out, part)), not names.isdisjoint(culprits)))
    return points


def error_out(pair: CallPair) -> float:
    """How far the results of a call are apart; memory that nobody has written to says nothing."""
    if kind_of(pair.call) == "uninitialised":
        return 0.0
    return max((distance(row) for row in pair.tensors if row.role == "output"), default=0.0)


def sparkline(comparison: Compared, width: int = 60) -> str:
    """The error along the run in one line of text: each letter is the largest of a stretch."""
    points = along(comparison, width)
    logs = [math.log10(p.error) for p in points if 0 < p.error < math.inf]
    top = max(logs, default=0.0)
    letters = []
    for point in points:
        if point.error == 0:
            letters.append(_BARS[1])
        else:
            share = (
                1.0 if math.isinf(point.error) else (math.log10(point.error) + 1) / (top + 1 or 1)
            )
            letters.append(_BARS[min(8, max(2, math.ceil(share * 8)))])
    return "".join(letters)


def plot(comparison: Compared) -> Figure:
    """The timeline as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("matplotlib", "Comparison.plot()", "plot") from None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.add_subplot()
    pairs = [pair for pair in comparison.pairs if pair.is_paired]
    errors = [error_out(pair) for pair in pairs]
    finite = [error for error in errors if 0 < error < math.inf]
    top = 10 * max(finite, default=1.0)
    culprits = {(c.rank, c.step, c.name) for c in comparison.verdict.culprits}
    found = [i for i, p in enumerate(pairs) if (p.call.rank, p.call.step, p.call.name) in culprits]
    shown = [min(max(error, 0.05), top) for error in errors]
    for colour, label, wanted in (
        ("#2a7ab0", "within rounding", [i for i, e in enumerate(errors) if e <= _ROUNDING]),
        (
            "#8a7448",
            "more than rounding explains",
            [i for i, e in enumerate(errors) if e > _ROUNDING],
        ),
    ):
        axes.scatter(wanted, [shown[i] for i in wanted], s=6, color=colour, label=label)
    axes.scatter(
        found, [shown[i] for i in found], s=70, marker="^", color="#d1430b", label="culprit"
    )
    axes.set_yscale("log")
    axes.axhline(_ROUNDING, color="grey", linestyle="--", linewidth=0.8)
    axes.set_xlabel("calls, in execution order")
    axes.set_ylabel("error, in roundings")
    axes.set_title(f"{comparison.verdict.verdict}", parse_math=False)
    axes.legend(loc="upper right", fontsize="small")
    return figure
