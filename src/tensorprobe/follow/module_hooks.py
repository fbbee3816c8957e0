"""Following a program into and out of its modules, by hooks that see every module.

Global hooks, not one per module: those would be copied and pickled along with the user's model.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe import torch_versions
from tensorprobe.follow import compiled
from tensorprobe.follow.gradients import new_owners
from tensorprobe.follow.mode_stack import enter_missing, leave, stand_aside
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.stacks import Stacks
from tensorprobe.follow.stand_ins import is_tracing
from tensorprobe.follow.tracebacks import clean

_is_compiling = torch_versions.is_compiling
_is_traced = torch_versions.is_dynamo_compiling
CALL_IMPL = nn.Module._call_impl.__code__


class ModulePaths:
    """What modules are called: their path below the module that the program calls.

    The first such root has no name of its own; a second one (a loss, a discriminator) goes by its
    class, so that "net.0" of two models are two names.
    """

    def __init__(self) -> None:
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}  # by the name they go by
        self._prune_at = 1000
        self._lock = threading.RLock()  # a signal's handler may call a new module meanwhile

    def path(self, module: nn.Module, parent: str | None) -> str:
        """The path of a module that is being called; `parent` is where it is called from."""
        known = self._paths.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        with self._lock:
            if self.known(module) is not None:  # by now: another thread has called it
                pass
            elif parent is None:
                self._add(module, self._root_name(module))
            else:  # made on the fly, or hung in after the root was first called
                self._add(module, ".".join(filter(None, (parent, type(module).__name__))))
        return self._paths[id(module)][1]

    def known(self, module: nn.Module) -> tuple[weakref.ref[nn.Module], str] | None:
        """A module and its path, which it keeps for as long as it lives; None before its call."""
        known = self._paths.get(id(module))
        return known if known is not None and known[0]() is module else None

    def name_root(self, module: nn.Module, name: str) -> None:
        """Let a module be a root, and its children go by paths below it, whoever calls it."""
        with self._lock:
            self._roots[name] = weakref.ref(module)
            self._add(module, name)

    def parameter_names(self) -> dict[int, str]:
        """Every parameter of the modules seen, by identity."""
        names: dict[int, str] = {}
        for name, parameter in self.named_parameters():
            names.setdefault(id(parameter), name)
        return names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of the modules seen; one of two roots comes twice."""
        for root in list(self._roots.values()):
            module = root()
            if module is None:
                continue
            prefix = self._paths[id(module)][1]
            for name, parameter in module.named_parameters():
                yield ".".join(filter(None, (prefix, name))), parameter

    def _root_name(self, module: nn.Module) -> str:
        self._forget_dead()
        name = type(module).__name__
        taken = set(self._roots)
        first = self._roots[""]() if "" in taken else None
        if first is not None:
            taken.add(type(first).__name__)  # its own call goes by that
        numbered = (f"{name}_{number}" if number else name for number in itertools.count())
        found = "" if "" not in taken else next(n for n in numbered if n not in taken)
        self._roots[found] = weakref.ref(module)
        return found

    def _forget_dead(self) -> None:
        """A root that is gone gives its name to the next: a loss made anew in every step."""
        self._roots = {name: root for name, root in self._roots.items() if root() is not None}
        if len(self._paths) > self._prune_at:
            self._paths = {key: known for key, known in self._paths.items() if known[0]()}
            self._prune_at = 2 * len(self._paths) + 1000

    def _add(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules():
            known = self._paths.get(id(module))
            if known is None or known[0]() is not module:
                path = ".".join(filter(None, (prefix, name)))
                self._paths[id(module)] = (weakref.ref(module), path)


class ModuleCall(msgspec.Struct, eq=False):
    """A module call under way, and the place to go back to."""

    module: nn.Module
    frame: FrameType  # torch's own, which calls the module
    place: dict[str, Any]
    leaves: bool  # this call, or one around it, was given a leaf of the graph
    call: Any = None  # what the observer made of it; None: the end is not told
    path: str = ""
    stack: int | None = None  # the number of the frame's stack, where the observer has asked for it

    def go_back(self, place: Any) -> None:
        """Put a thread back to where it made this call."""
        place.__dict__.update(self.place)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.owners = new_owners()
        self.entered_modes: list[Any] = []


class ModuleHooks:
    """Follows the program into and out of modules, and tells an observer.

    `place` is where each thread is. `modes` come along into the threads that call modules;
    `on_root` is told of modules that no other module calls. With `stacks` the place has the number
    of the stack of each module, so that calls inside of it walk the few frames from there on.
    """

    def __init__(
        self,
        observer: Observer,
        place: Any,
        *,
        modes: Sequence[Any],
        on_root: Callable[[nn.Module], None],
        paths: ModulePaths | None = None,
        stacks: Stacks | None = None,
    ) -> None:
        self.paths = paths or ModulePaths()
        self.thread = _Thread()
        self.place = place
        self.around: FrameType | None = None  # of the module whose forward we were started in
        self._observer = observer
        self._stacks = stacks
        self._modes = modes
        self._on_root = on_root
        self._owner_thread = 0
        self._abroad: set[int] = set()  # the other threads that have our modes
        self._handles: list[Any] = []
        self._last: Any = None  # what stays until all threads have left the modules they are in
        # the hooks of torch, and what they call; an observer may have a shorter way
        self.hooks: tuple[Any, Any] = (self._enter, self._leave)
        self.enter, self.leave = self.entered, self.left

    def install(self) -> None:
        self._owner_thread = threading.get_ident()
        self._forget_last()  # from here on `_leave` is told of threads that come home
        self._find_around()
        before, after = self.hooks
        self._handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.thread.entries:  # stopped inside a module
            self.thread.entries[0].go_back(self.place)
        self.thread.entries.clear()
        self._leave_root()
        self.forget_around()
        self._abroad &= {thread.ident for thread in threading.enumerate()}
        if self._abroad and self._last is None:  # those are inside modules, and have our modes on
            self._last = register_module_forward_hook(self._come_home, always_call=True)

    def _come_home(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module has returned after we were removed."""
        if _is_traced():
            return
        entries = self.thread.entries
        if entries and entries[0].module is module:
            entries[0].go_back(self.place)
            entries.clear()
            self._leave_root()
        if not self._abroad:
            self._forget_last()

    def _forget_last(self) -> None:
        if self._last is not None:
            self._last.remove()
            self._last = None

    def _find_around(self) -> None:
        """Started inside a module's forward: the modules around it name those that it calls."""
        frames = []
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is CALL_IMPL:
                frames.append(frame)
            frame = frame.f_back
        if frames:
            self.around = frames[0]
            path = None
            for frame in reversed(frames):
                path = self.paths.path(frame.f_locals["self"], path)
            self.place.module = path or ""

    def forget_around(self) -> None:
        """We are out of the module that we were started in."""
        if self.around is not None:
            self.around = None
            self.place.module = ""

    def begin_step(self) -> None:
        if self.around is not None and not is_below(self.around, sys._getframe()):
            self.forget_around()

    # The hooks

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _is_traced():  # first of all: dynamo, which traces this, must not come to the rest
            return
        if not is_tracing():
            self.enter(module, args, sys._getframe(1))
            return
        for mode in self._modes:
            if isinstance(mode, TorchDispatchMode):  # of what passes one, not all is traced
                stand_aside(mode, torch.jit._trace.__file__)
        self._observer.traced()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if not (_is_traced() or is_tracing()):
            self.leave_and_clean(module, result, sys._getframe(1))

    def leave_and_clean(self, module: nn.Module, result: Any, frame: FrameType) -> None:
        """A module has returned, or raised: then the traceback has no frames of ours."""
        self.leave(module, result, frame)
        if result is None:  # it may have raised
            raised = sys.exc_info()[1]
            if raised is not None:
                clean(raised)

    def entered(self, module: nn.Module, args: tuple[Any, ...], frame: FrameType) -> None:
        """A module is called, by torch's `frame`."""
        if _is_compiling():
            return
        observer = self._observer
        entries = self.thread.entries
        if isinstance(module, torch.fx.GraphModule) and compiled.is_generated(module, frame):
            return
        if entries and not is_below(entries[-1].frame, frame):
            self.drop_left(frame)
        if not entries:
            if not self.begins(module, frame):
                return
        elif not observer.on:  # only roots count steps and give names
            return
        try:
            self.enter_from(frame)
            place = self.place.__dict__  # this thread's
            parent = place["module"] if entries or self.around else None
            leaves = bool(entries) and entries[-1].leaves
            entry = ModuleCall(module, frame, place.copy(), leaves)
            entries.append(entry)
            entry.path = self.paths.path(module, parent)
            if not observer.on:
                place["module"] = entry.path
                return
            entry.call = observer.enter(entry, args)
            place["module"] = entry.path
            if self._stacks is not None:
                known = place["frame"], place["stack"]
                place["stack"] = entry.stack or self._stacks.current(frame, *known)
                place["frame"] = frame
        except Exception as error:  # noqa: BLE001 following one call: it becomes a gap
            self.failed(module, error)

    def begins(self, module: nn.Module, frame: FrameType) -> bool:
        """Whether a call from outside of all modules is to be followed; it may begin a step."""
        if is_constructing(frame):
            return False  # a model that tries its parts while it is made: no root, and no step
        self._on_root(module)  # in no `try`: it may end the program, or the recording
        return bool(self._handles)

    def drop_left(self, frame: FrameType) -> None:
        """Forget calls that were left by a KeyboardInterrupt or the like, which runs no hook."""
        entries = self.thread.entries
        while entries and not is_below(entries[-1].frame, frame):
            self._pop(entries.pop())

    def _pop(self, entry: Any) -> None:
        """Go back to where the call of `entry` was made; it left by an exception."""
        entry.go_back(self.place)
        if entry.call is not None:
            self._observer.leave(entry, entry.call, None, RuntimeError("left by an exception"))

    def enter_from(self, frame: FrameType) -> None:
        """A module is about to be entered; the first of a thread brings our modes along."""
        if self.around is not None and not is_below(self.around, frame):
            self.forget_around()
        if self.thread.entries:
            return
        self.thread.owners.clear()
        if threading.get_ident() == self._owner_thread:
            return
        # modes are not inherited by threads: bring ours along while a module runs
        self.thread.entered_modes = enter_missing(self._modes)
        if self.thread.entered_modes:
            self._abroad.add(threading.get_ident())

    def left(self, module: nn.Module, result: Any, frame: FrameType) -> None:
        """A module has returned, or raised; torch's `frame` tells which."""
        if _is_compiling():
            return
        try:
            entries = self.thread.entries
            if not entries:
                return
            if entries[-1].module is not module:
                if not any(entry.module is module for entry in entries):
                    return  # it was entered before the recording began
                while entries[-1].module is not module:
                    self._pop(entries.pop())  # it left by an exception nobody told us of
            entry = entries.pop()
            entry.go_back(self.place)
            if entry.call is not None:
                error = _caught_by(frame)
                self._observer.leave(entry, entry.call, result, error)
            if not entries:
                self._leave_root()
        except Exception as error:  # noqa: BLE001 following one call: it becomes a gap
            self.failed(module, error)

    def failed(self, module: nn.Module, error: Exception) -> None:
        """A call of a module could not be followed."""
        self._observer.gap(f"Module.{type(module).__name__}", error)

    def _leave_root(self) -> None:
        self.thread.owners.clear()
        leave(self.thread.entered_modes)
        self.thread.entered_modes = []
        self._abroad.discard(threading.get_ident())


def is_below(outer: FrameType, frame: FrameType | None) -> bool:
    """Whether `outer` is among the callers of `frame`."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def is_constructing(frame: FrameType | None) -> bool:
    """Whether a module is being made further down this stack."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def _caught_by(frame: FrameType) -> BaseException | None:
    """The exception that the module has raised, if torch calls our hook because of it.

    The program may be handling another one. From torch 2.2 on a module that has not raised calls
    its hooks in another function; in 2.1 in the same.
    """
    error = sys.exc_info()[1] if frame.f_code is CALL_IMPL else None
    if error is None or error.__traceback__ is None:
        return error
    return error if error.__traceback__.tb_frame is frame else None
