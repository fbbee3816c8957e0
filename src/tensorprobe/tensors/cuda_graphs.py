"""Asking a CUDA device for what has arrived, beside a program that captures a graph.

While one thread captures, CUDA refuses to all threads what may be unsafe then, and asking an event
is among that: the capture fails with it, in the program. A thread may say that it does nothing of
the kind, and our questions are about copies that no capture knows of.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Answer = TypeVar("_Answer")
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@functools.cache
def _cuda_exchange() -> Callable[[Any], int] | None:
    """CUDA's function that sets the mode of this thread, and gives the one before."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        found: Callable[[Any], int]
        found = ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no CUDA, or one that is linked in: a capture may fail
        return None
    return found


_EXCHANGES = {"cuda": _cuda_exchange}


def may_capture(device: torch.device) -> bool:
    """Whether a program may be capturing a graph on such a device."""
    return device.type in _EXCHANGES


def ask(device: torch.device, question: Callable[[], _Answer]) -> _Answer:
    """The answer to a question about work of ours on a device, which no capture is to notice."""
    find = _EXCHANGES.get(device.type)
    exchange = find() if find is not None else None
    if exchange is None:
        return question()
    with torch.cuda.device(device):  # or it would be made for the first device, in a new thread
        mode = ctypes.c_int(_RELAXED)
        exchange(ctypes.byref(mode))
        try:
            return question()
        finally:
            exchange(ctypes.byref(mode))
