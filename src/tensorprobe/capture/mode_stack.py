"""Putting a mode on torch's mode stack, and taking it off when it is not the top one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch


def add_function_mode(mode: Any) -> None:
    """Put `mode` on top of this thread's stack."""
    mode.__enter__()


def add_dispatch_mode(mode: Any) -> None:
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
