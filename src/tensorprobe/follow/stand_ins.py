"""Calls of the program, made in a frame that stands for the line of the program that makes them.

Torch counts frames of Python outwards to say which line a warning is about, and `torch.jit.trace`
does so to name what is in its graph. Where a mode makes a call, its own frames would be counted.
"""

from __future__ import annotations

from inspect import currentframe
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import handle_torch_function

from tensorprobe.follow.tracebacks import is_stand_in

_tracing_state = torch._C._get_tracing_state
HANDLER = handle_torch_function.__code__
LEVEL = "_stacklevel"  # of softmax, log_softmax and softmin: how far out the line is
_OF_THE_CALLER = 3
_NEAR = 4  # frames of torch between the program and the handler of a function written in Python
_MOST = 20_000  # code made anew for every call would fill the table without end
# On one line: of its code only the number of the first is replaced.
_CALL = (
    lambda tensorprobe_func, a, k: tensorprobe_func(*a, **k) if k else tensorprobe_func(*a)
).__code__
_OWN = _CALL.co_varnames
assert is_stand_in(_CALL)


class StandIns:
    """Makes calls of the program for a mode."""

    def __init__(self) -> None:
        # With the code, which is held: an identity is its own only while it lives.
        self._known: dict[tuple[int, int], tuple[CodeType, FunctionType]] = {}

    def make(self, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType | None) -> Any:
        """Make the call that a mode was given; `frame` has called the mode."""
        if _tracing_state() is None:
            return self.make_untraced(func, args, kwargs, frame)
        frame = _caller(frame, func)
        if frame is None:
            return func(*args, **kwargs)
        return _make_traced(frame, func, args, kwargs)

    def make_untraced(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType | None
    ) -> Any:
        """Make it while torch.jit.trace is known not to be at work, which takes long to ask."""
        if frame is not None and frame.f_code is HANDLER:
            frame = _caller(frame, func)
        if frame is None:  # a thread of a device, which has no line of the program
            return func(*args, **kwargs)
        if kwargs and LEVEL in kwargs:
            kwargs = self.count_levels(kwargs, frame)
        # as `at`, which would be one frame more
        known = self._known.get((id(frame.f_code), frame.f_lasti))
        if known is not None and known[1].__globals__ is frame.f_globals:
            return known[1](func, args, kwargs)
        return self.at(frame)(func, args, kwargs)

    def at(self, frame: FrameType) -> FunctionType:
        """`(func, args, kwargs)` makes a call, in a frame that stands for this one."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._known.get(key)
        if known is not None and known[1].__globals__ is frame.f_globals:
            return known[1]
        if len(self._known) >= _MOST:
            self._known.clear()
        stand_in = FunctionType(_code_at(frame), frame.f_globals)
        self._known[key] = code, stand_in
        return stand_in

    def count_levels(self, kwargs: Any, frame: FrameType) -> Any:
        """The arguments of a call whose warning is about a line further out than its caller's.

        `nn.Softmax` says so of its own. Between a stand-in and those lines lie frames that the
        program does not have. This must be called from where the stand-in is.
        """
        level = kwargs[LEVEL]
        if not isinstance(level, int) or level <= _OF_THE_CALLER:
            return kwargs
        here = currentframe()
        while here is not None and here is not frame:
            here, level = here.f_back, level + 1
        return kwargs if here is None else {**kwargs, LEVEL: level}


def is_tracing() -> bool:
    """Whether torch.jit.trace is at work: a size is a tensor then, and asking for it is traced."""
    return _tracing_state() is not None


def _caller(frame: FrameType | None, func: Any) -> FrameType | None:
    """The program's frame, where `frame` has called a mode.

    A function of torch that is written in Python calls itself once more through the handler.
    """
    if frame is None or frame.f_code is not HANDLER:
        return frame  # which is the program's
    code = getattr(func, "__code__", None)
    outer = first = frame.f_back
    for _ in range(_NEAR):
        if outer is None or outer.f_code is code:
            break
        outer = outer.f_back
    if outer is None or outer.f_code is not code:
        outer = first
    return outer.f_back if outer is not None else None


def _make_traced(frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Make a call that torch.jit.trace follows: it looks for names among the locals of the frame
    around the one that calls an operator."""
    inner, values = _with_locals(frame)
    if frame.f_back is None:
        return inner(func, args, kwargs, *values)
    outer, around = _with_locals(frame.f_back)
    return outer(inner, (func, args, kwargs, *values), {}, *around)


def _with_locals(frame: FrameType) -> tuple[FunctionType, list[Any]]:
    """A stand-in that has the locals of its frame; it is given their values, too."""
    local = dict(frame.f_locals)
    return FunctionType(_code_at(frame, tuple(local)), frame.f_globals), list(local.values())


def _code_at(frame: FrameType, names: tuple[str, ...] = ()) -> CodeType:
    """The code of a stand-in for a frame where it is now, with further arguments."""
    code, count = frame.f_code, len(_OWN) + len(names)
    return _CALL.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_firstlineno=frame.f_lineno or code.co_firstlineno,
        co_varnames=_OWN + names,
        co_argcount=count,
        co_nlocals=count,
    )
