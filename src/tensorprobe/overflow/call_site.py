"""Where a call was made, noted in a few microseconds and put into words only when asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from tensorprobe.follow.stacks import is_hidden, runs_cells

_MOST_FRAMES = 200

# Code and place of each frame in turn, innermost first; at its end the trail from there on, where
# another has it, or None. One flat tuple of what the garbage collector does not follow, so that it
# drops the tuple too: of these there is one for every call.
Trail = tuple[Any, ...]
NOWHERE: Trail = (None,)


def trail_from(
    frame: FrameType | None, base: FrameType | None = None, rest: Trail | None = None
) -> Trail:
    """The frames from `frame` outwards; holds no frame and no local.

    `base` is a frame that may be among them, and `rest` the trail from it on.
    """
    if frame is not None and frame.f_back is base:  # most are as short as that
        return frame.f_code, frame.f_lasti, rest
    found: list[Any] = []
    while frame is not base and frame is not None and len(found) < 2 * _MOST_FRAMES:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    found.append(rest if frame is base else None)
    return tuple(found)


def frames_in(trail: Trail, limit: int = _MOST_FRAMES) -> Iterator[tuple[CodeType, int]]:
    """The frames of a trail, innermost first."""
    return itertools.islice(_frames(trail), limit)


def _frames(trail: Trail | None) -> Iterator[tuple[CodeType, int]]:
    while trail is not None:
        yield from zip(trail[:-1:2], trail[1::2], strict=True)
        trail = trail[-1]


def render(trail: Trail) -> tuple[str, ...]:
    """The lines of a stack, innermost first, as a capture has them."""
    lines = []
    for code, at in frames_in(trail):
        if runs_cells(code):
            break
        if not is_hidden(code):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            lines.append(f"{code.co_filename}:{_line(code, at)} in {name}")
    return tuple(lines)


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno
