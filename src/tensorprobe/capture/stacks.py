"""Python stacks, cheaply: walked to the innermost known frame, rendered once, then numbered."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = (
    *(os.path.join(_ROOT, room) + os.sep for room in ("capture", "guard", "cli")),
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
_MAX_FRAMES = 200

StackKey = tuple[int, tuple[tuple[CodeType, int], ...]]


class Stacks:
    """Numbers the distinct stacks of one step; `new` is called with each first-seen one."""

    def __init__(self, new: Callable[[int, list[str]], None]) -> None:
        self._new = new
        self._ids: dict[StackKey, int] = {}
        self._frames: dict[int, list[str]] = {}
        self._count = itertools.count(1)

    def reset(self) -> None:
        """Forget all numbers: a step of its own begins."""
        self._ids.clear()  # the count goes on: a number from before means nothing now
        self._frames.clear()

    def add(self, frames: list[str]) -> int:
        """The number of a stack that is already in words."""
        number = next(self._count)
        self._new(number, frames)
        return number

    def current(self, depth: int, base: FrameType | None, base_id: int) -> int:
        """The number of the stack `depth` frames above the caller.

        `base` is a frame known to be on it, with the number of its own stack: the walk stops there,
        so that a call inside a module costs the few frames since that module was entered.
        """
        if base_id not in self._frames:
            base, base_id = None, 0
        frame: FrameType | None = sys._getframe(depth + 1)
        key: list[tuple[CodeType, int]] = []
        first = frame
        while frame is not None and frame is not base and len(key) < _MAX_FRAMES:
            key.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        if frame is not base:
            base_id = 0
        whole = (base_id, tuple(key))
        number = self._ids.get(whole)
        if number is None:
            number = next(self._count)
            frames = _render(first, len(key)) + self._frames.get(base_id, [])
            self._ids[whole] = number
            self._frames[number] = frames
            self._new(number, frames)
        return number


def is_hidden(file: str) -> bool:
    """Whether frames of this file are left out of stacks: ours, and machinery of torch."""
    return file.startswith(_OWN) or file in _HIDDEN


def _function_name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # co_qualname: Python 3.11


def _render(frame: FrameType | None, count: int) -> list[str]:
    lines = []
    while frame is not None and count > 0:
        file = frame.f_code.co_filename
        if not is_hidden(file):
            lines.append(f"{file}:{frame.f_lineno} in {_function_name(frame.f_code)}")
        frame = frame.f_back
        count -= 1
    return lines
