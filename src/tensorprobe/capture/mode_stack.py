"""Putting a mode on torch's mode stack, and taking it off when it is not the top one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext


def add_function_mode(mode: Any) -> None:
    """Put `mode` on top of this thread's stack."""
    mode.__enter__()


def enter_missing(modes: Iterable[Any]) -> list[Any]:
    """Put those of `modes` on this thread's stacks that are not there; gives them back."""
    function_modes = _get_current_function_mode_stack()
    dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
    missing = [mode for mode in modes if mode not in (*function_modes, *dispatch_modes)]
    for mode in missing:
        mode.__enter__()
    return missing


def remove_function_mode(mode: Any) -> bool:
    """Take `mode` off this thread's stack, leaving those above it; False if it is not there."""
    if mode not in _get_current_function_mode_stack():
        return False
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    return True


def remove_dispatch_mode(mode: Any) -> bool:
    """The same for dispatch modes."""
    if mode not in _python_dispatch._get_current_dispatch_mode_stack():
        return False
    above = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _python_dispatch._push_mode(other)
    return True


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
    """The same for dispatch modes."""
    above = []
    while torch._C._len_torch_dispatch_stack():
        above.append(_python_dispatch._pop_mode())
    for other in (mode, *reversed(above)):
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
