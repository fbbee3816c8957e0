"""Following the program into and out of modules, for a guard that only has to know where it is."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorprobe import native
from tensorprobe.capture import compiled
from tensorprobe.capture.module_hooks import ModuleHooks, is_below
from tensorprobe.capture.stand_ins import is_tracing
from tensorprobe.capture.tape import Place
from tensorprobe.overflow.call_site import Trail, trail_from

_is_traced = torch.compiler.is_dynamo_compiling  # true of the code that dynamo reads, never of ours
_compiler = torch.compiler


# The module the program is in, the frame of its call, and the trail from there outwards.
Here = tuple[str, FrameType | None, Trail | None]


class GuardPlace(Place):
    """Where a thread is, all in one: to read one thing of a thread takes as long as a call."""

    def __init__(self) -> None:
        self.here: Here = ("", None, None)
        super().__init__()

    @property
    def module(self) -> str:
        """The path of the module."""
        return self.here[0]

    @module.setter
    def module(self, path: str) -> None:
        self.here = (path, *self.here[1:])


class _Stay(NamedTuple):
    """A module call under way, and the place to go back to."""

    module: nn.Module
    frame: FrameType
    trail: Trail
    outer: Here
    call: None = None  # modules are not recorded


_new_stay = functools.partial(tuple.__new__, _Stay)  # of all its fields, without a frame


class Whereabouts(ModuleHooks):
    """Module hooks that record nothing, and note of each call where it was made.

    As those of its parent, and a third of their cost: a program has a module for every four calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._native = None  # what follows modules inside of others, in C++
        if native.MODULE is not None:
            parts = (_Stay, torch.fx.GraphModule, sys._getframe)
            self._native = native.MODULE.Whereabouts(self, *parts)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _is_traced() or _compiler._is_compiling_flag or is_tracing():
            return
        if self._native is not None and self._native.enter(module):
            return
        frame = sys._getframe(1)
        if isinstance(module, torch.fx.GraphModule) and compiled.is_generated(module, frame):
            return
        entries: list[Any] = self._thread.entries
        place: Any = self._tape.place
        trail = None
        if entries:
            inner = entries[-1]
            trail = trail_from(frame, inner.frame, inner.trail)
            if trail[-1] is None:  # that call was left by a KeyboardInterrupt or the like
                trail = None
                self._drop_left(frame)
        if not entries and not self._begins(module, frame):
            return
        try:
            if self._around is not None and not is_below(self._around, frame):
                self._forget_around()
            if not entries:
                self._enter_root()
            outer = place.here
            if trail is None:
                trail = trail_from(frame, *outer[1:])
            parent = outer[0] if entries or self._around else None
            entries.append(_new_stay((module, frame, trail, outer, None)))
            place.here = (self.paths.path(module, parent), frame, trail)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._tape.gap(f"Module.{type(module).__name__}", error)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        # first of all: dynamo, which traces this, must not come to the module
        if _is_traced() or _compiler._is_compiling_flag or is_tracing():
            return
        if self._native is not None and self._native.leave(module):
            return
        entries: list[Any] = self._thread.entries
        if not entries or entries[-1].module is not module or len(entries) == 1:
            super()._leave(module, args, result)
        else:
            self._go_back(entries.pop())

    def _go_back(self, entry: Any) -> None:
        place: Any = self._tape.place
        place.here = entry.outer
