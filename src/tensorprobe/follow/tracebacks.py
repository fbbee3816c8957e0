"""Tracebacks as Python would show them without us: no frames of ours, nor those that torch adds.

A mode makes torch call a function written in Python twice, and a hook makes it call modules in
another way. Reads the names of files only: `tensorprobe run` has no torch before its program does.
"""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

# The rooms that stand between a program and torch; a script of ours (the demo's) is a program.
_OURS = tuple(
    str(Path(__file__).parents[1] / room) + os.sep
    for room in ("follow", "record", "overflow", "failures", "rerouting", "guarding", "cli")
)
_OVERRIDES = os.path.join("torch", "overrides.py")
_OPS = os.path.join("torch", "_ops.py")
_MODULE = os.path.join("torch", "nn", "modules", "module.py")
_SKIPPING = (os.path.join("torch", "_compile.py"), os.path.join("_dynamo", "eval_frame.py"))
_NEAR = 4  # frames of torch between the program and the handler of a function written in Python


# The first argument of every stand-in (`follow.stand_ins`); no function of a program has it.
_STANDS_IN = "tensorprobe_func"


def is_stand_in(code: CodeType) -> bool:
    """Whether a frame of this code stands for one of the program's, which is on the stack too."""
    return code.co_varnames[:1] == (_STANDS_IN,)


class _Entry(NamedTuple):
    """One line of a traceback."""

    frame: FrameType
    at: int
    line: int
    own: TracebackType | None = None  # Python's, where it is as it was

    @property
    def code(self) -> CodeType:
        return self.frame.f_code

    @property
    def is_ours(self) -> bool:
        return self.code.co_filename.startswith(_OURS) or is_stand_in(self.code)

    def is_in(self, *files: str) -> bool:
        return self.code.co_filename.endswith(files)


def clean(error: BaseException) -> None:
    """Take what is not the program's out of the traceback of an exception, and of those that it was
    raised from or while handling.

    Where it is caught and raised on by a bare `raise` that frame has left no mark: Python from 3.11
    on takes the traceback from the exception then, and adds nothing to it.
    """
    for link in _chain(error):
        link.__traceback__ = _linked(_programs(_entries(link.__traceback__)))


def clean_below(error: BaseException | None) -> None:
    """Clean the traceback as `clean` does, but keep its first frame: the one that the exception has
    come to."""
    if error is None or error.__traceback__ is None:
        return
    for link in _chain(error):
        if link.__traceback__ is not None:
            link.__traceback__.tb_next = _linked(_programs(_entries(link.__traceback__.tb_next)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__]


def _entries(trace: TracebackType | None) -> list[_Entry]:
    found = []
    while trace is not None:
        found.append(_Entry(trace.tb_frame, trace.tb_lasti, trace.tb_lineno, trace))
        trace = trace.tb_next
    return found


def _linked(entries: list[_Entry]) -> TracebackType | None:
    """A traceback of these; who holds any part of the old one has the same of the new."""
    trace: TracebackType | None = None
    for frame, at, line, own in reversed(entries):
        if own is None:
            trace = TracebackType(trace, frame, at, line)
        elif own.tb_next is trace:
            trace = own
        else:
            own.tb_next = None  # first, so that Python need not look for a loop in the rest of it
            own.tb_next = trace
            trace = own
    return trace


def _programs(entries: list[_Entry]) -> list[_Entry]:
    """The entries that there would be without us."""
    kept: list[_Entry] = []
    is_dispatched = False  # by a mode of ours, which calls an operator as Python does
    for entry in entries:
        if entry.is_ours:
            if entry.code.co_name == "__torch_dispatch__":
                is_dispatched = True
                while kept and kept[-1].is_in(*_SKIPPING):
                    kept.pop()
        elif is_dispatched and entry.is_in(_OPS):
            is_dispatched = False
        elif _is_inside_of_hooked(entry, kept):
            kept[-1] = _unhooked(kept[-1])
        else:
            is_dispatched = False
            _drop_first_call(kept, entry)
            kept.append(entry)
    return kept


def _drop_first_call(kept: list[_Entry], entry: _Entry) -> None:
    """Where a mode of ours has made the call of `entry` once more, drop the frames of the first."""
    if not kept:
        return
    if kept[-1].is_in(_OVERRIDES):
        for back in range(2, 2 + min(len(kept) - 1, _NEAR)):
            if kept[-back].code is entry.code:
                del kept[-back:]
                return
    elif entry.is_in(_OPS) and kept[-1].code is entry.code:
        kept.pop()


def _is_inside_of_hooked(entry: _Entry, kept: list[_Entry]) -> bool:
    if not kept or entry.code.co_name != "inner" or not entry.is_in(_MODULE):
        return False
    return kept[-1].code.co_name == "_call_impl" and _has_our_hooks_only(kept[-1].frame)


def _has_our_hooks_only(frame: FrameType) -> bool:
    """Whether torch would call the module of this frame at once, if it were not for our hooks."""
    module: Any = frame.f_locals.get("self")
    names = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    if any(getattr(module, name, None) for name in names):
        return False
    for name in names:
        for hook in list(frame.f_globals.get(f"_global{name}", {}).values()):
            if not getattr(hook, "__module__", "").startswith("tensorprobe."):
                return False
    return True


def _unhooked(entry: _Entry) -> _Entry:
    found = _short_way(entry.code)
    return entry if found is None else _Entry(entry.frame, *found)


@functools.cache
def _short_way(code: CodeType) -> tuple[int, int] | None:
    """Where `_call_impl` calls a module that has no hooks: its first call with all arguments."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname == "CALL_FUNCTION_EX":
            return instruction.offset, line
    return None
