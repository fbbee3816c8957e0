"""Python stacks, cheaply: walked to the innermost known frame, rendered once, then numbered."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import CodeType, FrameType

import torch

from tensorprobe import native
from tensorprobe.follow.tracebacks import is_stand_in

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = (
    *(
        os.path.join(_ROOT, room) + os.sep
        for room in ("follow", "record", "overflow", "failures", "rerouting", "guarding", "cli")
    ),
    os.path.join(_ROOT, "__main__.py"),
)
# Machinery between the user's line and the call: present in every stack, of use in none.
_HIDDEN = (
    "<frozen runpy>",
    *(
        _TORCH + name
        for name in (
            os.path.join("nn", "modules", "module.py"),
            "overrides.py",
            "_compile.py",
            os.path.join("_dynamo", "eval_frame.py"),
            os.path.join("utils", "_contextlib.py"),
            os.path.join("autograd", "graph.py"),
            os.path.join("autograd", "__init__.py"),
            # functionals and methods written in Python are the call itself, not a caller
            os.path.join("nn", "functional.py"),
            "functional.py",
            "_tensor.py",
            "_ops.py",
        )
    ),
)
_SHELL = os.path.join("IPython", "core", "interactiveshell.py")
_MAX_FRAMES = 200
_MAX_PLACES = 100_000  # code made anew for every call would fill the tables without end
_MAX_STACKS = 100_000

# The number of the stack below, then of each frame its code and how far it has come. Of the code
# its identity: its hash is made of all its instructions, anew every time.
StackKey = tuple[int, ...]


class Stacks:
    """Numbers the distinct stacks; `new` is called with each one that is met first in a step."""

    def __init__(self, new: Callable[[int, list[str]], None]) -> None:
        self._new = new
        # Of all steps: the stacks of one step are those of the next.
        self._ids: dict[StackKey, int] = {}
        self._frames: dict[int, list[str]] = {}
        # Of each place met its line, None where it is hidden. With the code, which is held: an
        # identity is its own only while it lives.
        self._places: dict[tuple[int, int], tuple[CodeType, str | None]] = {}
        self._told: set[int] = set()  # in this step
        self._walk = _walk if native.MODULE is None else native.MODULE.walk_stack
        self._count = itertools.count(1)

    def tables(self) -> tuple[dict[StackKey, int], dict[int, list[str]], set[int]]:
        """The numbers of stacks, their frames, and those told in this step; they stay the same."""
        return self._ids, self._frames, self._told

    def reset(self) -> None:
        """A step of its own begins: it is told all its stacks."""
        self._told.clear()
        if len(self._places) > _MAX_PLACES or len(self._ids) > _MAX_STACKS:
            self._ids.clear()  # the count goes on: a number from before means nothing now
            self._frames.clear()
            self._places.clear()

    def add(self, frames: list[str]) -> int:
        """The number of a stack that is already in words."""
        number = next(self._count)
        self._new(number, frames)
        return number

    def current(self, frame: FrameType | None, base: FrameType | None, base_id: int) -> int:
        """The number of the stack from `frame` outwards.

        `base` is a frame known to be on it, with the number of its own stack: the walk stops there,
        so that a call inside a module costs the few frames since that module was entered.
        """
        if base_id not in self._frames:
            base, base_id = None, 0
        key = self._walk(frame, base, base_id, _MAX_FRAMES)
        number = self._ids.get(key)
        if number is None:
            number = next(self._count)
            below = self._frames.get(key[0], [])
            self._frames[number] = self._render(frame, len(key) // 2, below)
            self._ids[key] = number  # other threads may go by it from now on
        if number not in self._told:
            self._new(number, self._frames[number])
            self._told.add(number)
        return number

    def _render(self, frame: FrameType | None, count: int, below: list[str]) -> list[str]:
        lines: list[str] = []
        while frame is not None and count > 0:
            code = frame.f_code
            if runs_cells(code):
                return lines
            place = (id(code), frame.f_lasti)
            known = self._places.get(place)
            if known is None:
                known = self._places[place] = (code, _line(frame))
            if known[1] is not None:
                lines.append(known[1])
            frame = frame.f_back
            count -= 1
        return lines + below


def _walk(frame: FrameType | None, base: FrameType | None, base_id: int, most: int) -> StackKey:
    """The key of the stack from `frame` outwards, up to `base`; 0 stands for all."""
    key = [base_id]
    for _ in range(most):
        if frame is None or frame is base:
            break
        key.append(id(frame.f_code))
        key.append(frame.f_lasti)
        frame = frame.f_back
    if frame is not base:
        key[0] = 0
    return tuple(key)


def runs_cells(code: CodeType) -> bool:
    """Whether this is what calls the code of a notebook's cell: stacks end before it."""
    return code.co_name == "run_code" and code.co_filename.endswith(_SHELL)


def is_hidden(code: CodeType) -> bool:
    """Whether frames of this code are left out of stacks: ours, and machinery of torch."""
    file = code.co_filename
    return file.startswith(_OWN) or file in _HIDDEN or is_stand_in(code)


def _function_name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # co_qualname: Python 3.11


def _line(frame: FrameType) -> str | None:
    code = frame.f_code
    if is_hidden(code):
        return None
    return f"{code.co_filename}:{frame.f_lineno} in {_function_name(code)}"
