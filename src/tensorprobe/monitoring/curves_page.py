"""Trends as curves on a page that opens by itself: plain HTML and SVG, no script."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensorprobe.errors import BadUsage
from tensorprobe.monitoring.alarms import line_of
from tensorprobe.monitoring.monitor_report import chosen_trends
from tensorprobe.monitoring.monitor_report import lines as lines_of_show
from tensorprobe.monitoring.series import Array
from tensorprobe.monitoring.series_reading import (
    SCALAR,
    TOTAL,
    Trend,
    TrendKey,
    Trends,
    read_trends,
)
from tensorprobe.monitoring.trend_comparison import Parting, TrendComparison
from tensorprobe.monitoring.trend_comparison import lines as lines_of_comparison
from tensorprobe.terminal import printable

MOST_CURVES = 60
_WIDTH, _HEIGHT = 720, 120
_POINTS = 360  # pairs of a least and a greatest value
_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; max-width: 62rem; }
pre { overflow-x: auto; background: #8881; padding: .7rem; }
figure { margin: 1.4rem 0; } figcaption { font-weight: 600; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; background: #8881; }
path { fill: none; stroke-width: 1.4; vector-effect: non-scaling-stroke; }
.actual { stroke: #1f6feb; } .expected { stroke: #d4720a; }
.alarm, .gone { stroke: #d1242f; } .alarm { stroke-dasharray: 4 3; }
small { color: #888; } .key-actual { color: #1f6feb; } .key-expected { color: #d4720a; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""


class Mark(NamedTuple):
    """A step that a curve shows with a line, and why."""

    step: int
    text: str


def write_page(path: Path, title: str, lines: Iterable[str], figures: Iterable[str]) -> None:
    """The file is whole at every moment."""
    style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'"
    text = "\n".join(html.escape(printable(line)) for line in lines)
    content = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{_text(title)}</h1>\n<pre>{text}</pre>\n"
        + "\n".join(figures)
        + "\n</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(content, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


def check_page(path: Path) -> None:
    if path.is_dir():
        raise BadUsage(f"'{path}' is a folder; expected the name of a file: 'curves.html'")


def write_trends(path: Path, ranks: Sequence[Trends], pattern: str | None) -> None:
    """The curves of a training, with its alarms."""
    figures = []
    for rank in ranks:
        keys = chosen_trends(rank, pattern)
        if pattern is None:  # those that an alarm names, as well
            named = {TrendKey(alarm.kind, _first_name(alarm.name)) for alarm in rank.alarms}
            keys += [key for key in rank.trends if key in named and key not in keys]
        for key in keys[:MOST_CURVES]:
            marks = [
                Mark(alarm.step, line_of(alarm))
                for alarm in rank.alarms
                if key == TrendKey(SCALAR, "loss")
                or (alarm.kind == key.kind and key.name in (TOTAL, _first_name(alarm.name)))
            ]
            place = f"{key}, rank {rank.rank}" if len(ranks) > 1 else str(key)
            figures.append(_figure(place, [("", rank.trends[key])], marks))
    write_page(path, "A training", lines_of_show(list(ranks), pattern, 20), figures)


def write_comparison(path: Path, found: TrendComparison) -> None:
    """The curves of both trainings: of the loss and all gradients, and of what parts."""
    ours = {each.rank: each for each in read_trends(found.actual)}
    theirs = {each.rank: each for each in read_trends(found.expected)}
    wanted: dict[tuple[int, TrendKey], Parting | None] = {
        (each.rank, TrendKey(each.kind, each.name)): each for each in found.partings
    }
    for rank in ours:
        for key in (TrendKey(SCALAR, "loss"), TrendKey("gradient", TOTAL)):
            wanted.setdefault((rank, key), None)
    figures = []
    for (rank, key), parting in [*wanted.items()][:MOST_CURVES]:
        sides = [("actual", ours), ("expected", theirs)]
        curves = [
            (word, side[rank].trends[key])
            for word, side in sides
            if rank in side and key in side[rank].trends
        ]
        marks = [] if parting is None else [Mark(parting.step, f"parts at step {parting.step}")]
        place = f"{key}, rank {rank}" if len(ours) > 1 else str(key)
        if curves:
            figures.append(_figure(place, curves, marks))
    write_page(path, "Two trainings", lines_of_comparison(found), figures)


def _first_name(name: str) -> str:
    return name.partition(" and ")[0]


def _text(text: str) -> str:
    return html.escape(printable(text))


def _figure(title: str, curves: Sequence[tuple[str, Trend]], marks: Sequence[Mark]) -> str:
    """A title, the curves of one number, and lines at steps."""
    steps = np.concatenate([trend.steps for _, trend in curves])
    values = np.concatenate([trend.values for _, trend in curves])
    fine = values[np.isfinite(values)]
    if not fine.size:
        return f"<figure><figcaption>{_text(title)}</figcaption>never finite</figure>"
    low, high = float(fine.min()), float(fine.max())
    is_log = low > 0 and high / low > 100
    begin, end = int(steps.min()), int(steps.max())
    made = []
    for word, trend in curves:
        x = (trend.steps - begin) * (_WIDTH / max(1, end - begin))
        kind = word or "actual"
        made.append(
            f'<path class="{kind}" d="{_path(x, _heights(trend.values, low, high, is_log))}"/>'
        )
        gone = x[~np.isfinite(trend.values)][:_POINTS]
        if gone.size:
            made.append(
                f'<path class="gone" d="{" ".join(f"M{at:.1f} 0v8" for at in gone)}">'
                "<title>not finite</title></path>"
            )
    for mark in marks[:MOST_CURVES]:
        at = (mark.step - begin) * (_WIDTH / max(1, end - begin))
        made.append(
            f'<path class="alarm" d="M{at:.1f} 0V{_HEIGHT}"><title>{_text(mark.text)}</title>'
            "</path>"
        )
    sides = "".join(f' <span class="key-{word}">{word}</span>' for word, _ in curves if word)
    scale = ", logarithmic" if is_log else ""
    return (
        f"<figure><figcaption>{_text(title)}{sides}</figcaption>"
        f'<svg viewBox="0 -4 {_WIDTH} {_HEIGHT + 8}" role="img" aria-label="{_text(title)}">'
        + "".join(made)
        + f"</svg><small>{low:.4g} to {high:.4g}{scale}; steps {begin} to {end}</small></figure>"
    )


def _heights(values: Array, low: float, high: float, is_log: bool) -> Array:
    """Where each value stands, from the top; NaN for what is not finite."""
    with np.errstate(all="ignore"):
        made = np.log(values) if is_log else values / 1.0
    bottom, top = (math.log(low), math.log(high)) if is_log else (low, high)
    made = np.where(np.isfinite(values), made, np.nan)
    if top == bottom:
        return made * 0 + _HEIGHT / 2
    with np.errstate(all="ignore"):
        heights: Array = _HEIGHT * (1 - (made / 2 - bottom / 2) / (top / 2 - bottom / 2))
    return heights


def _path(x: Array, y: Array) -> str:
    """A line through the points; of many the least and the greatest of each part stay."""
    if len(y) > 2 * _POINTS:
        at: list[int] = []
        for part in np.array_split(np.arange(len(y)), _POINTS):
            is_hole = np.isnan(y[part])
            fine, holes = part[~is_hole], part[is_hole]
            ends = (
                {int(fine[y[fine].argmin()]), int(fine[y[fine].argmax()])} if fine.size else set()
            )
            at += sorted(ends | {int(each) for each in holes[:1]})
        x, y = x[at], y[at]
    words = []
    is_down = False
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if math.isnan(down):
            is_down = False
            continue
        words.append(f"{'L' if is_down else 'M'}{across:.1f} {down:.1f}")
        is_down = True
    return " ".join(words)
