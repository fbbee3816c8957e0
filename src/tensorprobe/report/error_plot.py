"""The errors at chosen places as a picture: errors.svg, one bar a module, in the order of time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from tensorprobe.comparing.verdict import MeasuredPlace, Verdict
from tensorprobe.terminal import printable

_BAR, _LEFT, _WIDE, _TOP = 16, 330, 560, 46
_MOST = 2000  # bars
_COLOURS = {"beyond": "#c0392b", "undecided": "#d68910"}
_LONGEST = 52


def error_plot(verdict: Verdict) -> str:
    """An SVG with the share of its size by which each module's result is off, on a log scale."""
    found = [each for each in verdict.boundaries if each.relative is not None]
    found = [each for each in found if each.kind in ("output", "gradient")][:_MOST]
    shares = [each.relative or 0.0 for each in found if each.relative]
    finite = [share for share in shares if math.isfinite(share)]
    low = math.floor(math.log10(min(finite))) if finite else -8
    high = max(math.ceil(math.log10(max(finite))) if finite else 0, low + 1)
    height = _TOP + _BAR * len(found) + 10
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        f'<text x="10" y="16">error as a share of the tensor: {_text(verdict.actual, 60)} against '
        f"{_text(verdict.expected, 60)}</text>",
        *_scale(low, high, height),
        *(_bar(n, each, low, high) for n, each in enumerate(found)),
        *_limit(verdict, low, high, height),
        "</svg>",
        "",
    ))  # fmt: skip


def _x(share: float, low: int, high: int) -> float:
    place = (math.log10(share) - low) / (high - low) if math.isfinite(share) else 1.0
    return _LEFT + _WIDE * min(max(place, 0.0), 1.0)


def _scale(low: int, high: int, height: int) -> Iterator[str]:
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 10}" text-anchor="middle">1e{power}</text>'


def _bar(n: int, found: MeasuredPlace, low: int, high: int) -> str:
    y = _TOP + _BAR * n
    end = _x(found.relative, low, high) if found.relative else _LEFT
    colour = _COLOURS.get(found.status, "#2e86c1")
    name = _text(found.actual or "the model", _LONGEST)
    return (
        f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{name}</text>'
        f'<rect x="{_LEFT}" y="{y + 2}" width="{max(end - _LEFT, 0.5):.1f}" height="{_BAR - 4}" '
        f'fill="{colour}"><title>{_text(found.tensor, 80)}: {found.relative:.3g}</title></rect>'
    )


def _limit(verdict: Verdict, low: int, high: int, height: int) -> Iterator[str]:
    if verdict.within:
        x = _x(verdict.within, low, high)
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}" stroke="#c0392b" '
            'stroke-dasharray="4 3"/>'
        )


def _text(name: str, length: int) -> str:
    """A name of a file as text of a picture; of a long one its end."""
    shown = printable(name)
    return escape(shown if len(shown) <= length else "..." + shown[-length:])
