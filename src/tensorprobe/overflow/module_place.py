"""Following the program into and out of modules, for a guard that only has to know where it is."""

from __future__ import annotations

import functools
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorprobe import native, torch_versions
from tensorprobe.follow import compiled
from tensorprobe.follow.module_hooks import ModuleHooks
from tensorprobe.follow.naming import Counter
from tensorprobe.follow.stand_ins import is_tracing
from tensorprobe.overflow.call_site import Trail, trail_from

_is_traced = torch_versions.is_dynamo_compiling
_is_compiling = torch_versions.is_compiling


# The module the program is in, the frame of its call, and the trail from there outwards.
Here = tuple[str, FrameType | None, Trail | None]


class GuardPlace(threading.local):
    """Where a thread is, all in one: to read one thing of a thread takes as long as a call."""

    def __init__(self) -> None:
        self.here: Here = ("", None, None)

    @property
    def module(self) -> str:
        """The path of the module."""
        return self.here[0]

    @module.setter
    def module(self, path: str) -> None:
        self.here = (path, *self.here[1:])


class GuardedProgram:
    """Where the threads of the program are, and how often each API was called in this step."""

    def __init__(self, counter: Counter) -> None:
        self.place = GuardPlace()
        self.counter = counter

    def trail(self, frame: FrameType | None) -> Trail:
        """The frames from `frame` outwards."""
        _, base, rest = self.place.here
        return trail_from(frame, base, rest)


class _Stay(NamedTuple):
    """A module call under way, and the place to go back to."""

    module: nn.Module
    frame: FrameType
    trail: Trail
    outer: Here
    call: None = None  # no observer is told

    def go_back(self, place: GuardPlace) -> None:
        """Put a thread back to where it made this call."""
        place.here = self.outer


_new_stay = functools.partial(tuple.__new__, _Stay)  # of all its fields, without a frame


class ModuleTrails:
    """Lets module hooks note of each call where it was made, and nothing else.

    At a third of the cost of telling an observer: a program has a module for every four calls.
    """

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks
        self._native = None  # what follows modules inside of others, in C++
        if native.MODULE is not None:
            native.check()
            parts = (_Stay, torch.fx.GraphModule, sys._getframe)
            self._native = native.MODULE.ModuleTrails(hooks, *parts)
        hooks.hooks = (self._enter, self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _is_traced() or _is_compiling() or is_tracing():
            return
        if self._native is not None and self._native.enter(module):
            return
        frame = sys._getframe(1)
        if isinstance(module, torch.fx.GraphModule) and compiled.is_generated(module, frame):
            return
        hooks = self._hooks
        entries: list[Any] = hooks.thread.entries
        place: GuardPlace = hooks.place
        trail = None
        if entries:
            inner = entries[-1]
            trail = trail_from(frame, inner.frame, inner.trail)
            if trail[-1] is None:  # that call was left by a KeyboardInterrupt or the like
                trail = None
                hooks.drop_left(frame)
        if not entries and not hooks.begins(module, frame):
            return
        try:
            hooks.enter_from(frame)
            outer = place.here
            if trail is None:
                trail = trail_from(frame, *outer[1:])
            parent = outer[0] if entries or hooks.around else None
            entries.append(_new_stay((module, frame, trail, outer, None)))
            place.here = (hooks.paths.path(module, parent), frame, trail)
        except Exception as error:  # noqa: BLE001 following one call: it becomes a gap
            hooks.failed(module, error)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        # first of all: dynamo, which traces this, must not come to the module
        if _is_traced() or _is_compiling() or is_tracing():
            return
        if self._native is not None and self._native.leave(module):
            return
        hooks = self._hooks
        entries: list[Any] = hooks.thread.entries
        if not entries or entries[-1].module is not module or len(entries) == 1:
            hooks.leave_and_clean(module, result, sys._getframe(1))
        else:
            entries.pop().go_back(hooks.place)
