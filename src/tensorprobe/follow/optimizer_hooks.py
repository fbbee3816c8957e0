"""Following the steps of optimizers."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensorprobe.follow.compiled import left_alone
from tensorprobe.follow.observer import Observer


class _Thread(threading.local):
    def __init__(self) -> None:
        # steps under way; a wrapper that is an Optimizer itself steps around the real one
        self.open: list[tuple[weakref.ref[Optimizer], Any]] = []


class OptimizerHooks:
    """Tells an observer when an optimizer begins a step and has ended it.

    `on_step` is called when the outermost step of a thread has ended.
    """

    def __init__(self, observer: Observer, on_step: Callable[[Optimizer], None]) -> None:
        self._observer = observer
        self._on_step = on_step
        self._handles: list[Any] = []
        self._thread = _Thread()
        # threads in which torch is going through its hooks, which must not change then
        self._inside: set[int] = set()
        self._on = False

    def install_once(self) -> None:
        self._on = True
        if self._handles:
            return
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks away; while one runs, they stay, idle, until the next `remove`."""
        self._on = False
        if self._inside:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._thread = _Thread()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        wrapper = sys._getframe(1)  # torch's, around `step`
        if not self._on or _is_inside(optimizer, wrapper):
            return
        ident = threading.get_ident()
        self._inside.add(ident)
        try:
            self.forget_raised(wrapper)
            frame = wrapper.f_back or wrapper
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            call = self._observer.optimizer_begins(optimizer, frame, closure is not None)
            self._thread.open.append((weakref.ref(optimizer), call))
        finally:
            self._inside.discard(ident)

    def forget_raised(self, frame: FrameType) -> None:
        """Forget steps of this thread that are not among the callers of `frame`: no hook tells."""
        thread = self._thread
        if thread.open:
            under_way = _stepping(frame)
            thread.open = [step for step in thread.open if id(step[0]()) in under_way]
        if not thread.open:
            self._observer.optimizers_left()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._on or _is_inside(optimizer, sys._getframe(1)):
            return
        ident = threading.get_ident()
        self._inside.add(ident)
        try:
            under_way = self._thread.open
            while under_way:
                reference, call = under_way.pop()
                if reference() is optimizer:
                    if call is not None:
                        self._observer.optimizer_ended(optimizer, call)
                    break
            if not under_way:
                self._on_step(optimizer)
        finally:
            self._inside.discard(ident)


def _is_inside(optimizer: Optimizer, frame: FrameType) -> bool:
    """Whether the step that `frame` begins or ends is part of one: torch calls the hooks of a
    class that another is made of as well, once there has been an optimizer of just that class."""
    return id(optimizer) in _stepping(frame)


def _stepping(frame: FrameType | None) -> set[int]:
    """The optimizers whose step called this, by identity; not the one that begins now."""
    found: set[int] = set()
    frame = frame.f_back if frame else None
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and isinstance(frame.f_locals.get("args"), tuple):
            found |= {id(arg) for arg in frame.f_locals["args"][:1] if isinstance(arg, Optimizer)}
        frame = frame.f_back
    return found


# Where the program compiles `step`, dynamo leaves its code for them instead of compiling them too.
left_alone(OptimizerHooks._before)
left_alone(OptimizerHooks._after)
