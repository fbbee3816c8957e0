"""Where a call was made, noted in a few microseconds and put into words only when asked for."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from tensorprobe.capture.stacks import is_hidden

BRIEF = 24  # frames: what is noted of every call, for the case that its backward is bad
_WHOLE = 200

Trail = tuple[tuple[CodeType, int], ...]


def trail_here(depth: int, limit: int = _WHOLE) -> Trail:
    """The frames from `depth` above the caller on; holds no frame and no local."""
    frame: FrameType | None = sys._getframe(depth + 1)
    found = []
    for _ in range(limit):
        if frame is None:
            break
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def render(trail: Trail) -> tuple[str, ...]:
    """The lines of a stack, innermost first, as a capture has them."""
    lines = []
    for code, at in trail:
        if not is_hidden(code.co_filename):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            lines.append(f"{code.co_filename}:{_line(code, at)} in {name}")
    return tuple(lines)


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end and line is not None:
            return line
    return code.co_firstlineno
