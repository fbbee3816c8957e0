"""Whose tokens a model reads, as a server says it: a number for each request, and the place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tensorprobe.errors import BadUsage
from tensorprobe.follow.quiet import Quiet

LAYOUTS = ("packed", "left", "right")
_PADDING = (-1, -1)


def requests_value(spans: Iterable[tuple[str | int, int, int]], layout: str) -> dict[str, Any]:
    """The names of requests, and for each token [number of its request, its place in that]."""
    if layout not in LAYOUTS:
        raise BadUsage(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    names: dict[str, int] = {}
    rows: list[list[tuple[int, int]]] = []
    for span in spans:
        name, start, stop = _checked(span)
        number = names.setdefault(name, len(names))
        rows.append([(number, place) for place in range(start, stop)])
    if not rows:
        raise BadUsage("save_requests: expected (request, first token, end) for each, found none")
    if layout == "packed":
        rows = [[cell for row in rows for cell in row]]
    length = max(map(len, rows))
    cells = []
    for row in rows:
        padding = [_PADDING] * (length - len(row))
        cells.append([*padding, *row] if layout == "left" else [*row, *padding])
    with Quiet():  # no call of the program
        return {"rows": torch.tensor(cells, device="cpu"), "names": list(names)}


def _checked(span: object) -> tuple[str, int, int]:
    if isinstance(span, tuple) and len(span) == 3:
        name, start, stop = span
        places = all(isinstance(place, int) for place in (start, stop))
        if isinstance(name, str | int) and places and 0 <= start < stop:
            return str(name), start, stop
    raise BadUsage(
        f"save_requests: found {span!r}; expected (request, first token, end), as in ('r0', 0, 5)"
    )
