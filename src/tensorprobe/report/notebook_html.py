"""Objects as a notebook shows them: the parts of the page, small, and without a script."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tensorprobe.checking.run import Checked
from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.rounding import number_text
from tensorprobe.comparing.verdict import Culprit, Verdict, describe
from tensorprobe.guarding.findings import Finding
from tensorprobe.guarding.findings import describe as describe_finding
from tensorprobe.records import Call, Capture, TensorRecord, count
from tensorprobe.report.along import along
from tensorprobe.report.page_data import shown

_ROWS = 10
_WIDE, _HIGH = 640, 90
_COLOURS = {"match": "#116149", "diverged": "#b03404", "incomparable": "#7a5200"}
_PRE = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere"


def html_of(thing: Any) -> str:
    """What `_repr_html_` of any of our objects gives."""
    for kind, render in _RENDER:
        if isinstance(thing, kind):
            return f'<div class="tensorprobe">{render(thing)}</div>'
    if hasattr(thing, "findings"):  # a guard, whose room imports torch
        return f'<div class="tensorprobe">{_findings(thing.findings)}</div>'
    raise TypeError(f"{type(thing).__name__} has no form for notebooks")


def _text(value: object) -> str:
    return html.escape(shown(str(value)))


def _lines(lines: Iterable[str], colour: str) -> str:
    first, *rest = [_text(line) for line in lines] or [""]
    more = f'<pre style="{_PRE}">{chr(10).join(rest)}</pre>' if rest else ""
    return f'<pre style="{_PRE};font-weight:bold;color:{colour}">{first}</pre>{more}'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f"<th>{_text(title)}</th>" for title in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _more(total: int) -> str:
    return f"<p>and {total - _ROWS} more</p>" if total > _ROWS else ""


def _verdict(verdict: Verdict) -> str:
    return _lines(describe(verdict), _COLOURS[verdict.verdict]) + _culprits(verdict.culprits)


def _culprits(culprits: Sequence[Culprit]) -> str:
    if len(culprits) < 2:
        return ""
    head = ("culprit", "cause", "step", "rank", "own error", "affected")
    rows = [
        (c.name, c.cause, c.step, c.rank, number_text(c.own_error), c.affected)
        for c in culprits[:_ROWS]
    ]
    return _table(head, rows) + _more(len(culprits))


def _comparison(comparison: Compared) -> str:
    return _verdict(comparison.verdict) + _picture(comparison)


def _picture(comparison: Compared) -> str:
    """The error along the run, as a drawing of a few hundred points."""
    points = along(comparison, _WIDE // 2)
    if not points:
        return ""
    top = max((math.log10(p.error) for p in points if 0 < p.error < math.inf), default=1.0) + 1
    marks = []
    for number, point in enumerate(points):
        x = (number + 0.5) * _WIDE / len(points)
        log = top if math.isinf(point.error) else math.log10(max(point.error, 0.1))
        y = _HIGH - 4 - (log + 1) / (top + 1) * (_HIGH - 12)
        colour = "#d1430b" if point.culprit else "#8a7448" if point.error > 16 else "#2a7ab0"
        size = 4 if point.culprit else 1.5
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"/>')
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img" '
        f'aria-label="error along the run"><rect width="{_WIDE}" height="{_HIGH}" fill="#f6f7f9"/>'
        f"{''.join(marks)}</svg>"
    )


def _capture(capture: Capture) -> str:
    calls = capture.calls
    rows = [(c.index, c.name, c.module, c.op, c.step, c.rank, c.status) for c in calls[:_ROWS]]
    head = ("index", "name", "module", "op", "step", "rank", "status")
    gaps = f"<p><b>{count(len(capture.gaps), 'gap')}</b></p>" if capture.gaps else ""
    return f"<p>{_text(repr(capture))}</p>{gaps}{_table(head, rows)}{_more(len(calls))}"


def _call(call: Call) -> str:
    head = ("tensor", "dtype", "shape", "min", "max", "mean", "norm", "NaN", "Inf")
    rows = [(r.name.removeprefix(call.name + "."), *_numbers(r)) for r in call.tensors]
    stack = f"<pre>{_text(call.stack[0])}</pre>" if call.stack else ""
    return f"<p>{_text(repr(call))}</p>{stack}{_table(head, rows)}"


def _numbers(record: TensorRecord) -> tuple[object, ...]:
    s = record.summary
    kind = (record.dtype, list(record.shape))
    if s is None:
        return (*kind, *("",) * 6)
    numbers = ("" if n is None else f"{n:.6g}" for n in (s.min, s.max, s.mean, s.norm))
    return (*kind, *numbers, s.nan_count, s.inf_count)


def _checked(checked: Checked) -> str:
    colour = _COLOURS["match" if checked.passed else "diverged"]
    head = ("verdict", "name", "op", "of limit", "reason")
    rows = [
        (r.verdict, r.name, r.op, "" if r.error is None else number_text(r.error), r.reason)
        for r in checked.rows[:_ROWS]
    ]
    return _lines([repr(checked)], colour) + _table(head, rows) + _more(len(checked.rows))


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return _lines(["the guard found nothing"], _COLOURS["match"])
    return "".join(_finding(each) for each in findings[:_ROWS]) + _more(len(findings))


def _finding(finding: Finding) -> str:
    return _lines(describe_finding(finding).split("\n"), _COLOURS["diverged"])


_RENDER: list[tuple[type, Callable[[Any], str]]] = [
    (Compared, _comparison),
    (Verdict, _verdict),
    (Culprit, lambda culprit: _lines([repr(culprit)], _COLOURS["diverged"])),
    (Capture, _capture),
    (Call, _call),
    (Checked, _checked),
    (Finding, _finding),
]
