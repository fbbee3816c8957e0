"""Pages of a monitor: alarms and curves of one training, and where two trainings part."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.monitor_report import chosen_trends
from tensorprobe.monitoring.series import Array
from tensorprobe.monitoring.series_reading import Trend, TrendKey, Trends, read_trends
from tensorprobe.monitoring.trend_comparison import Parting, TrendComparison, common, record_command
from tensorprobe.records import count
from tensorprobe.report.sheets import Sheet, SheetPart, sentence, table

_MOST_CURVES = 40
_MOST_POINTS = 4000  # of a curve; of more the smallest and largest of each stretch
_MOST_MARKS = 8
_WIDE = 100.0  # of largest to smallest: the axis is logarithmic beyond it


def monitor_sheet(path: Path, pattern: str | None = None) -> Sheet:
    """The alarms of a training, and curves: the usual ones, those with alarms, or `pattern`'s."""
    ranks = read_trends(path)
    alarms = [alarm for rank in ranks for alarm in rank.alarms]
    n_steps = max((len(rank.steps) for rank in ranks), default=0)
    steps = [rank.steps for rank in ranks if rank.steps.size]
    span = (
        f"steps {min(int(s[0]) for s in steps)} to {max(int(s[-1]) for s in steps)}"
        if steps
        else "no steps"
    )
    sheet = Sheet("match", "No alarms", "no step did what healthy trainings do not")
    if alarms:
        first = min(alarms, key=lambda alarm: (alarm.since, alarm.step))
        sheet.outcome, sheet.badge = "diverged", count(len(alarms), "alarm")
        sheet.answer = f"{first.rule}: {_place(first)}: {first.reason}"
        good = (
            "no step before it" if first.last_good_step is None else f"step {first.last_good_step}"
        )
        sheet.about = [f"step {first.since}, rank {first.rank}; last good: {good}"]
        sheet.commands = [record_command(ranks[0], first.since)]
    elif not n_steps:
        sheet.outcome, sheet.badge, sheet.answer = (
            "incomparable",
            "No steps",
            "nothing was measured yet",
        )
    sheet.facts = [f"'{path}': {span}, {count(len(ranks), 'rank')}"]
    sheet.parts = [
        part
        for part in (
            table(
                "Alarms",
                ["rule", "step", "since step", "last good step", "rank", "place", "reason",
                 "recorded"],
                [
                    (alarm.rule, str(alarm.step), str(alarm.since),
                     "" if alarm.last_good_step is None else str(alarm.last_good_step),
                     str(alarm.rank), _place(alarm), sentence(alarm.reason), alarm.recording or "")
                    for alarm in alarms
                ],
                [1, 2, 3, 4],
            ),
            *itertools.chain.from_iterable(
                _curves_of(rank, pattern, len(ranks) > 1) for rank in ranks
            ),
        )
        if part.rows or part.curves
    ]  # fmt: skip
    sheet.notes = [gap for rank in ranks for gap in rank.gaps]
    if pattern is not None and not any(part.curves for part in sheet.parts):
        sheet.notes.append(f"no trend has a name like {pattern}")
    return sheet


def _place(alarm: Alarm) -> str:
    return " ".join(filter(None, (alarm.kind, alarm.name)))


def _curves_of(rank: Trends, pattern: str | None, several: bool) -> list[SheetPart]:
    keys = list(chosen_trends(rank, pattern))
    if pattern is None:
        keys += [TrendKey(alarm.kind, alarm.name) for alarm in rank.alarms]
    marks: dict[TrendKey, list[tuple[int, str]]] = {}
    for alarm in rank.alarms:
        mine = marks.setdefault(TrendKey(alarm.kind, alarm.name), [])
        mine.append((alarm.since, f"{alarm.rule}: {alarm.reason}"))
    known = [key for key in dict.fromkeys(keys) if key in rank.trends]
    curves = [
        curve(str(key), [rank.trends[key]], marks.get(key, [])) for key in known[:_MOST_CURVES]
    ]
    title = f"Curves of rank {rank.rank}" if several else "Curves"
    return [SheetPart(title, curves=curves, more=max(0, len(known) - _MOST_CURVES))]


def trends_sheet(found: TrendComparison) -> Sheet:
    """Where two trainings part, with the curves of both."""
    head = f"{count(found.n_compared, 'trend')} over {count(found.n_steps, 'step')}"
    sheet = Sheet("match", "Match", f"{head} part nowhere beyond their own noise")
    if found.partings:
        first = found.partings[0]
        sheet.outcome, sheet.badge = "diverged", f"Parted at step {first.step}"
        sheet.answer = (
            f"{_name(first)}: {_number(first.actual)} here, {_number(first.expected)} there"
        )
        sheet.about = [f"{len(found.partings)} of {head} part; the first first"]
        sheet.commands = [found.next] if found.next else []
    sheet.facts = [f"actual: {found.actual}", f"expected: {found.expected}"]
    sheet.parts = [
        table(
            "Trends that part",
            ["trend", "step", "certain at", "actual", "expected", "noise of a step"],
            [
                (_name(each), str(each.step), str(each.certain_at), _number(each.actual),
                 _number(each.expected), f"{100 * each.noise:.2g} %" if each.noise else "")
                for each in found.partings
            ],
            [1, 2, 3, 4, 5],
        ),
        SheetPart("Curves", curves=_both(found), sides=["actual", "expected"]),
    ]  # fmt: skip
    sheet.parts = [part for part in sheet.parts if part.rows or part.curves]
    sheet.notes = [f"not compared: {each}" for each in found.not_compared]
    return sheet


def _both(found: TrendComparison) -> list[dict[str, Any]]:
    """Trends that part first, then what every training has: its loss and gradient."""
    ours, theirs = (
        {each.rank: each for each in read_trends(p)} for p in (found.actual, found.expected)
    )
    wanted: dict[tuple[int, TrendKey], list[tuple[int, str]]] = {}
    for each in found.partings:
        parted = (each.rank, TrendKey(each.kind, each.name))
        wanted.setdefault(parted, []).append((each.step, "they part"))
    for rank in sorted(ours.keys() & theirs.keys()):
        for key in chosen_trends(ours[rank], None):
            wanted.setdefault((rank, key), [])
    made = []
    for (rank, key), marks in wanted.items():
        if rank not in theirs or key not in ours[rank].trends or key not in theirs[rank].trends:
            continue
        steps, *sides = common(ours[rank].trends[key], theirs[rank].trends[key])
        if len(steps):
            name = f"{key} (rank {rank})" if rank else str(key)
            made.append(curve(name, [Trend(steps, side) for side in sides], marks))
    return made[:_MOST_CURVES]


def _name(each: Parting) -> str:
    rank = f" (rank {each.rank})" if each.rank else ""
    return f"{TrendKey(each.kind, each.name)}{rank}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def curve(name: str, sides: Sequence[Trend], marks: Iterable[tuple[int, str]]) -> dict[str, Any]:
    """A curve of one side, or of two over the same steps, as the page draws it."""
    steps, values = sides[0].steps, [side.values for side in sides]
    if len(steps) > _MOST_POINTS:
        keep = _extremes(values)
        steps, values = steps[keep], [each[keep] for each in values]
    every = np.concatenate(values)
    fine = every[np.isfinite(every)]
    is_wide = bool(fine.size and fine.min() > 0 and fine.max() > _WIDE * fine.min())
    return {
        "name": name,
        "steps": _packed(steps),
        "values": [_packed(each) for each in values],
        "marks": [list(mark) for mark in itertools.islice(marks, _MOST_MARKS)],
        "log": is_wide,
    }


def _packed(column: Array) -> str:
    return base64.b64encode(column.astype("<f8").tobytes()).decode()


def _extremes(values: Sequence[Array]) -> Array:
    """Of each stretch where each side is smallest and largest; what is not finite stays."""
    n = len(values[0])
    edges = np.linspace(0, n, _MOST_POINTS // (2 * len(values)) + 1).astype(int)
    keep = {0, n - 1}
    for first, last in itertools.pairwise(edges):
        for each in values:
            part, bad = each[first:last], np.isnan(each[first:last])
            lowest, highest = np.where(bad, np.inf, part), np.where(bad, -np.inf, part)
            found = (lowest.argmin(), highest.argmax(), bad.argmax())  # a NaN is a hole to be seen
            keep.update(first + int(at) for at in found)
    return np.array(sorted(keep))
