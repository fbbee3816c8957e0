"""Putting a mode of ours on torch's mode stacks, and taking it off, wherever the program is.

Torch puts a stack back as it was in two places: after each node of backward, and after a function
of its own that is written in Python, such as `Tensor.backward`, for which it had taken the mode
off. What is asked for inside of one is asked for once more when that is left.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    handle_torch_function,
)
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tensorprobe.torch_versions import ENGINE_FRAMES

_HANDLER = handle_torch_function.__code__
# by the names that every dispatch mode has, which another tool's may have more of
_FLAGS = [name for name in vars(TorchDispatchMode()) if name.startswith("old_")]


def add_mode(mode: Any) -> bool:
    """Put `mode` on this thread's stack. False if it will not stay there: this is the thread of a
    device, which goes backward."""
    mode._is_wanted = True
    frame = _restoring(mode)
    if frame is not None and frame.f_code is _HANDLER:
        return True  # it comes back
    if mode not in _stack_of(mode):
        _put_on(mode)
    if frame is not None:
        _when_left(frame, functools.partial(_add_again, mode))
    return frame is not None or torch._C._current_graph_task_id() == -1


def remove_mode(mode: Any) -> bool:
    """Take `mode` off this thread's stack, leaving those above it; False if it is not there, nor
    will come back there."""
    mode._is_wanted = False
    found = _take_off(mode)
    frame = _restoring(mode)
    if frame is not None:
        _when_left(frame, functools.partial(_remove_again, mode))
    return found or frame is not None


def stand_aside(mode: Any, file: str) -> None:
    """Take `mode` off this thread's stack until the innermost frame of `file` is left."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    if frame is not None and _take_off(mode):
        _when_left(frame, functools.partial(_add_again, mode))


def is_wanted(mode: Any) -> bool:
    """Whether the last that was asked for, in whichever thread, was to have `mode` on a stack."""
    return bool(getattr(mode, "_is_wanted", False))


def enter_missing(modes: Iterable[Any]) -> list[Any]:
    """Put those of `modes` on this thread's stacks that are not there; gives them back."""
    missing = [mode for mode in modes if mode not in _stack_of(mode)]
    for mode in missing:
        mode.__enter__()
    return missing


def leave(modes: Iterable[Any]) -> None:
    """Take those off again that `enter_missing` has put on."""
    for mode in modes:
        _take_off(mode)


def _add_again(mode: Any) -> None:
    if is_wanted(mode):
        add_mode(mode)


def _remove_again(mode: Any) -> None:
    if not is_wanted(mode):
        remove_mode(mode)


def _stack_of(mode: Any) -> list[Any]:
    if isinstance(mode, TorchDispatchMode):
        return list(_get_current_dispatch_mode_stack())
    return list(_get_current_function_mode_stack())


def _put_on(mode: Any) -> None:
    if isinstance(mode, TorchDispatchMode) and _flags(mode):
        _python_dispatch._push_mode(mode)  # entered inside of backward, which has taken it off
    else:
        mode.__enter__()


def _take_off(mode: Any) -> bool:
    """Take `mode` off this thread's stack; says whether it was there."""
    stack = _stack_of(mode)  # held: see dispatch_modes_off
    if mode not in stack:
        return False
    above: list[Any] = []
    if not isinstance(mode, TorchDispatchMode):
        while (top := _pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            _push_mode(other)
        return True
    while _python_dispatch._get_current_dispatch_mode() is not mode:
        above.append(_python_dispatch._pop_mode())
    noted = _flags(mode)
    if not noted:  # it was left before, and backward has put it back
        _python_dispatch._pop_mode()
    else:
        # as if the next one had been entered first
        entered = (flags for other in reversed(above) if (flags := _flags(other)))
        for name, told in next(entered, {}).items():
            told[-1], noted[name][-1] = noted[name][-1], told[-1]
        TorchDispatchMode.__exit__(mode, None, None, None)
    for other in reversed(above):
        _python_dispatch._push_mode(other)
    return True


def _flags(mode: Any) -> dict[str, Any]:
    """What torch told everyone of modes being on before `mode` was, which leaving it tells again:
    torch.compile asks."""
    return {name: flags for name in _FLAGS if (flags := vars(mode).get(name))}


def _restoring(mode: Any) -> FrameType | None:
    """The innermost call of torch, in this thread, that will put the stack of `mode` back as it
    was: one that goes backward, or one that has `mode` off the stack meanwhile."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code in ENGINE_FRAMES or (code is _HANDLER and frame.f_locals.get("mode") is mode):
            return frame
        frame = frame.f_back
    return None


class _Leaving:
    """Lies among the locals of a frame and calls when they are dropped."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __del__(self) -> None:
        self._callback()


def _when_left(frame: FrameType, callback: Callable[[], None]) -> None:
    """Call back when `frame` has been left; when an exception that it is left by is gone, too."""
    leaving = _Leaving(callback)
    frame.f_locals[f"tensorprobe {id(leaving)}"] = leaving


def add_below(mode: Any) -> None:
    """Put `mode` below this thread's other function modes: it sees a call when they have.

    A default device (`torch.set_default_device`, `with torch.device(...)`) insists on being the
    lowest of all.
    """
    above = []
    while torch._C._len_torch_function_stack():
        above.append(_pop_mode())
    lowest = [above.pop()] if above and isinstance(above[-1], DeviceContext) else []
    for other in (*lowest, mode, *reversed(above)):
        _push_mode(other)


def add_dispatch_mode_below(mode: Any) -> None:
    """Put a dispatch mode below all other dispatch modes of this thread."""
    others = _get_current_dispatch_mode_stack()  # held: see dispatch_modes_off
    for _ in others:
        _python_dispatch._pop_mode()
    for other in (mode, *others):
        _python_dispatch._push_mode(other)


@contextmanager
def function_modes_off() -> Iterator[None]:
    """Inside, calls go past this thread's function modes; subclasses of Tensor still see them."""
    off = []
    while torch._C._len_torch_function_stack():
        off.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(off):
            _push_mode(mode)
