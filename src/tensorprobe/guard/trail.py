"""Where a call was made, noted in a few microseconds and put into words only when asked for."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from tensorprobe.capture.stacks import is_hidden

_MOST_FRAMES = 200

# Code and place of each frame in turn, innermost first; and the trail from there on, where another
# has it. A frame of its own for each would be as many objects as there are frames, for every call.
Trail = tuple[list[Any], Any]
NOWHERE: Trail = ([], None)


def trail_here(depth: int, base: FrameType | None = None, rest: Trail | None = None) -> Trail:
    """The frames from `depth` above the caller on; holds no frame and no local.

    `base` is a frame that may be among them, and `rest` the trail from it on.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    found: list[Any] = []
    note = found.append
    for _ in range(_MOST_FRAMES):
        if frame is base:
            return found, rest
        if frame is None:
            break
        note(frame.f_code)
        note(frame.f_lasti)
        frame = frame.f_back
    return found, None


def frames_in(trail: Trail, limit: int = _MOST_FRAMES) -> Iterator[tuple[CodeType, int]]:
    """The frames of a trail, innermost first."""
    return itertools.islice(_frames(trail), limit)


def _frames(trail: Trail | None) -> Iterator[tuple[CodeType, int]]:
    while trail is not None:
        found, trail = trail
        yield from zip(found[::2], found[1::2], strict=True)


def render(trail: Trail) -> tuple[str, ...]:
    """The lines of a stack, innermost first, as a capture has them."""
    lines = []
    for code, at in frames_in(trail):
        if not is_hidden(code.co_filename):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            lines.append(f"{code.co_filename}:{_line(code, at)} in {name}")
    return tuple(lines)


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno
