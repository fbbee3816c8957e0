"""Level L0: module calls with their parameters and buffers; and, for every level, where we are.

Global hooks, not one per module: those would be copied and pickled along with the user's model.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence, Set
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

from tensorprobe import native
from tensorprobe.capture import compiled
from tensorprobe.capture.backward import Backward, ModuleBackward
from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import encode
from tensorprobe.capture.gradients import (
    ONLY,
    Trace,
    Way,
    new_owners,
    trace_found,
    trace_module,
    whole,
)
from tensorprobe.capture.hidden_state import WRITES_STATISTICS
from tensorprobe.capture.making import MadeNotes, uncalled_parameters, uses_uncalled
from tensorprobe.capture.mode_stack import enter_missing, leave, stand_aside
from tensorprobe.capture.naming import ApiName, CallNames, module_name, name_parts
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.stand_ins import is_tracing
from tensorprobe.capture.tape import Tape, _state_notes
from tensorprobe.capture.tracebacks import clean
from tensorprobe.store.lines import CallLine, EndLine

_DISABLED = torch._C.DisableTorchFunction  # tensors are read without any mode taking notice
_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling  # true of the code that dynamo reads, never of ours
_is_grad_enabled = torch.is_grad_enabled
_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_CALL_IMPL = nn.Module._call_impl.__code__
# The gradients of a module's parameters: what the call with them is named, where the module is.
_Named = list[tuple[str, torch.Tensor]]
_Gradients = tuple[ApiName, str, _Named]


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
        for root in list(self._roots.values()):
            module = root()
            if module is None:
                continue
            prefix = self._paths[id(module)][1]
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), ".".join(filter(None, (prefix, name))))
        return names

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


class _Entry(msgspec.Struct, eq=False):
    """A module call under way, and the place to go back to."""

    module: nn.Module
    frame: FrameType
    place: dict[str, Any]
    leaves: bool  # this call, or one around it, was given a leaf of the graph
    call: OpenCall | None = None
    buffers: dict[str, tuple[int, int]] | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.owners = new_owners()
        self.entered_modes: list[Any] = []


class ModuleHooks:
    """Follows the program into and out of modules; records their calls when `record` is true."""

    def __init__(
        self,
        tape: Tape,
        *,
        record: bool,
        modes: Sequence[Any],
        on_root: Callable[[nn.Module], None],
        stacks: bool = True,
    ) -> None:
        self._stacks = stacks and tape.config.stacks
        self.paths = ModulePaths()
        self._tape = tape
        self._record = record
        self._modes = modes
        self._on_root = on_root
        self._thread = _Thread()
        self._owner_thread = 0
        self._abroad: set[int] = set()  # the other threads that have our modes
        self._handles: list[Any] = []
        self._last: Any = None  # what stays until all threads have left the modules they are in
        self._around: FrameType | None = None  # of the module whose forward we were started in
        # modules called in this step whose parameters may get a gradient, each with its thread
        self._trained: dict[int, tuple[weakref.ref[nn.Module], str, int]] = {}
        self._come_by: set[str] = set()  # paths of modules that backward was ever seen to come by
        self._grads_seen: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int]]] = {}
        self._gradients = threading.RLock()  # a signal's handler may go backward meanwhile
        self._made = MadeNotes()
        self._api: Callable[..., ApiName] = functools.lru_cache(maxsize=20_000)(_api)
        if native.MODULE is not None and type(self) is ModuleHooks and type(tape) is Tape:
            # the same in C++, which asks here for what is not plain
            swift = self._swift()
            self.enter, self.leave = swift.enter, swift.leave  # type: ignore[method-assign]

    def install(self) -> None:
        self._owner_thread = threading.get_ident()
        self._forget_last()  # from here on `_leave` is told of threads that come home
        self._find_around()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._thread.entries:  # stopped inside a module
            self._go_back(self._thread.entries[0])
        self._thread.entries.clear()
        self._leave_root()
        self._forget_around()
        self._abroad &= {thread.ident for thread in threading.enumerate()}
        if self._abroad and self._last is None:  # those are inside modules, and have our modes on
            self._last = register_module_forward_hook(self._come_home, always_call=True)

    def _come_home(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module has returned after we were removed."""
        if _is_traced():
            return
        entries = self._thread.entries
        if entries and entries[0].module is module:
            self._go_back(entries[0])
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
            if frame.f_code is _CALL_IMPL:
                frames.append(frame)
            frame = frame.f_back
        if frames:
            self._around = frames[0]
            path = None
            for frame in reversed(frames):
                path = self.paths.path(frame.f_locals["self"], path)
            self._tape.place.module = path or ""

    def _forget_around(self) -> None:
        if self._around is not None:
            self._around = None
            self._tape.place.module = ""

    def begin_step(self) -> None:
        if self._around is not None and not is_below(self._around, sys._getframe()):
            self._forget_around()
        self._trained.clear()
        self._grads_seen.clear()

    # The hooks

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _is_traced():  # first of all: dynamo, which traces this, must not come to the rest
            return
        if not is_tracing():
            self.enter(module, args)
            return
        for mode in self._modes:
            if isinstance(mode, TorchDispatchMode):  # of what passes one, not all is traced
                stand_aside(mode, torch.jit._trace.__file__)
        self._tape.not_traced += self._tape.recording

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if _is_traced() or is_tracing():
            return
        self.leave(module, args, result)
        if result is None:  # it may have raised
            raised = sys.exc_info()[1]
            if raised is not None:
                clean(raised)

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called; by `_enter`, and that by torch."""
        if _is_compiling():
            return
        tape = self._tape
        entries = self._thread.entries
        frame = sys._getframe(2)
        if isinstance(module, torch.fx.GraphModule) and compiled.is_generated(module, frame):
            return
        if entries and not is_below(entries[-1].frame, frame):
            self._drop_left(frame)
        if not entries:
            if not self._begins(module, frame):
                return
        elif not tape.recording:  # only roots count steps and give names
            return
        try:
            if self._around is not None and not is_below(self._around, frame):
                self._forget_around()
            if not entries:
                self._enter_root()
            place = tape.place.__dict__  # this thread's
            parent = place["module"] if entries or self._around else None
            leaves = bool(entries) and entries[-1].leaves
            entry = _Entry(module, frame, place.copy(), leaves)
            entries.append(entry)
            path = self.paths.path(module, parent)
            only = tape.only
            if only is not None and id(module) in only:
                path = only[id(module)]
            if tape.recording and (self._record if only is None else id(module) in only):
                self._begin(entry, path, args)
            place["module"] = path
            if self._stacks and tape.recording:
                call = entry.call
                place["stack"] = (call is not None and call.stack) or tape.stack_number(2)
                place["frame"] = frame
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._failed(module, error)

    def _begins(self, module: nn.Module, frame: FrameType) -> bool:
        """Whether a call from outside of all modules is to be followed; it may begin a step."""
        if is_constructing(frame):
            return False  # a model that tries its parts while it is made: no root, and no step
        self._on_root(module)  # in no `try`: it may end the program, or the recording
        return bool(self._handles)

    def _drop_left(self, frame: FrameType) -> None:
        """Forget calls that were left by a KeyboardInterrupt or the like, which runs no hook."""
        entries = self._thread.entries
        while entries and not is_below(entries[-1].frame, frame):
            self._pop(entries.pop())

    def _pop(self, entry: _Entry) -> None:
        """Go back to where the call of `entry` was made; it left by an exception."""
        self._go_back(entry)
        if entry.call is not None:
            self._tape.raised(entry.call, RuntimeError("left by an exception"))

    def _go_back(self, entry: _Entry) -> None:
        self._tape.place.__dict__.update(entry.place)  # this thread's

    def _enter_root(self) -> None:
        self._thread.owners.clear()
        if threading.get_ident() == self._owner_thread:
            return
        # modes are not inherited by threads: bring ours along while a module runs
        self._thread.entered_modes = enter_missing(self._modes)
        if self._thread.entered_modes:
            self._abroad.add(threading.get_ident())

    def _begin(self, entry: _Entry, path: str, args: tuple[Any, ...]) -> None:
        module, tape = entry.module, self._tape
        kind = type(module)
        api = self._api(path, kind)
        names = tape.select(api, tape.counter.next_name(api), path)
        if names is None:
            return
        held: dict[str, Any] = {}
        if parameters := _parameters(module):
            held["parameters"] = parameters
        if buffers := _present(module._buffers):
            held["buffers"] = buffers
        call = entry.call = tape.begin(
            names,
            args,
            # of no frame further out: start_state writes to this very dict
            entry.frame.f_locals.get("kwargs"),
            depth=3,
            grad=_is_grad_enabled() and not _interpreter_stack(),
            random=module.training,
            **held,
        )
        if names.wanted:
            tape.place.parent = names.name
        if call is None:
            return
        if call.edges is not None and call.edges.has_leaves:
            entry.leaves = True
        if buffers:
            _note_buffers(entry, buffers)
        if getattr(module, "_compiled_call_impl", None) or kind.__name__ == "OptimizedModule":
            call.notes.append("compiled: the calls inside are not visible")
        call.notes += self._made.of(module)
        if parameters:
            self._trained[id(module)] = (weakref.ref(module), path, threading.get_ident())

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """A module has returned, or raised; by `_leave`, and that by torch."""
        if _is_compiling():
            return
        try:
            entries = self._thread.entries
            if not entries:
                return
            if entries[-1].module is not module:
                if not any(entry.module is module for entry in entries):
                    return  # it was entered before the recording began
                while entries[-1].module is not module:
                    self._pop(entries.pop())  # it left by an exception nobody told us of
            entry = entries.pop()
            self._go_back(entry)
            if entry.call is not None:
                # torch calls this hook from another function when the module has raised
                raised = sys._getframe(2).f_code is _CALL_IMPL
                self._end(entry, entry.call, result, sys.exc_info()[1] if raised else None)
            if not entries:
                self._leave_root()
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._failed(module, error)

    def _failed(self, module: nn.Module, error: Exception) -> None:
        self._tape.gap(f"Module.{type(module).__name__}", error)

    def _leave_root(self) -> None:
        self._thread.owners.clear()
        leave(self._thread.entered_modes)
        self._thread.entered_modes = []
        self._abroad.discard(threading.get_ident())

    def _end(self, entry: _Entry, call: OpenCall, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self._tape.raised(call, error)
            return
        owners, leaves = self._thread.owners, entry.leaves

        def tracer(outputs: Any, inputs: Any) -> Trace | Way:
            return trace_module(outputs, inputs, owners, leaves)

        buffers = self._changed_buffers(entry) if entry.module._buffers else ()
        self._tape.end(call, result, tracer, buffers)

    def _changed_buffers(self, entry: _Entry) -> list[tuple[str, torch.Tensor]]:
        """Buffers that the call wrote to, as they are now; named `running_mean.after`."""
        module, changed = entry.module, []
        before = entry.buffers or {}
        with _DISABLED():
            for name, buffer in _present(module._buffers):
                silent = module.training and name in ("running_mean", "running_var")
                if silent or before.get(name) != _state_of(buffer):
                    changed.append((f"{name}.after", buffer))
        if changed:
            self._tape.forget(buffer for _, buffer in changed)
        return changed

    # What C++ is given, and asks

    def _swift(self) -> Any:
        """`enter` and `leave` in C++ (native/hooks.h): of modules inside of others, in a step that
        is recorded. They write calls down themselves where nothing but statistics is kept."""
        tape = self._tape
        parts: dict[str, Any] = {"keep": None}
        if tape._keep not in (None, "tensors") and tape.lines.swift_named is not None:
            parts = {
                "keep": tape._keep,
                "lines": tape.lines,
                "named": tape.lines.swift_named,
                "results": tape.lines.swift_results,
                "versions": native.MODULE.versions,
                "edges": native.MODULE.Edges,
                "writer": tape.writer,
                "open_call": OpenCall,
                "call_line": CallLine,
                "end_line": EndLine,
                "way": ModuleBackward,
                "ways": Backward,
                "output_spots": ((0, ONLY, None),),
                "no_aliases": {},
                "is_autocast": torch._C._is_any_autocast_enabled,
                "graph_task": torch._C._current_graph_task_id,
                "state_notes": _state_notes,
                "functions_of": tape._record_functions_of,
                "encode": encode,
                "traced": self._traced,
                "end_failed": tape._end_failed,
                "stack_table": tape._stacks,
                "new_stack": tape._write_stack,
                "only_path": ONLY,
                "wants_input": tape.wants_input,
                "wants_output": tape.wants_output,
                "wants_parameters": tape.selection.wants_side("parameter"),
                "config_stacks": tape.config.stacks,
                "backward": tape._backward,
                "sees_functions": tape._sees_functions,
            }
        return native.MODULE.Hooks(
            hooks=self,
            tape=tape,
            place=tape.place,
            thread=self._thread,
            trained=self._trained,
            compiler=vars(torch.compiler),
            call_impl=_CALL_IMPL,
            entered=self.enter,
            left=self.leave,
            describe=self._describe,
            failed=self._failed,
            note_buffers=_note_buffers,
            entry=_Entry,
            call_names=CallNames,
            count=itertools.count,
            records=self._record,
            stacks=self._stacks,
            **parts,
        )

    def _describe(self, module: nn.Module) -> tuple[Any, ...] | None:
        """What stays the same of a module while it lives, and its notes; None of one that is not
        plain, or has not been called yet."""
        kind = type(module)
        known = self.paths.known(module)
        if known is None or uses_uncalled(module) or isinstance(module, torch.fx.GraphModule):
            return None
        asked = ("training", "_parameters", "_buffers", "_modules")
        if any(hasattr(kind, name) for name in asked) or kind.__name__ == "OptimizedModule":
            return None  # attributes of their own, or of a wrapper
        api = self._api(known[1], kind)
        if getattr(kind, "_compiled_call_impl", None) or api.op in WRITES_STATISTICS:
            return None
        counted_as, around = (api.prefix, api.api), name_parts(api, "forward")
        return (*known, api, counted_as, *around, self._made.told(module))

    def _traced(
        self, call: OpenCall, edges: Any, outputs: Any, owners: Any, leaves: bool, found: Any
    ) -> None:
        """As `Tape._trace`, of a call that is left in more than one way."""
        trace = trace_found(outputs, edges, owners, leaves, found)
        if trace.notes:
            call.notes.extend(trace.notes)
        if trace.outputs:
            aliases = whole(edges).aliases if edges.has_aliases else {}
            self._tape._follow(call, trace, aliases)

    # Gradients of parameters

    def record_gradients(self, going: Set[int], last: bool) -> None:
        """Write down the gradients that parameters of this step's modules have got.

        Backward has ended in this thread, one of those that are `going` backward; the `last` one
        where no other is. Of modules that another comes by, gradients are its own to write down:
        some are made by now, others not, and torch writes to them without asking anybody.
        """
        tape = self._tape
        stack = None
        for api, path, gradients in self._all_fresh_gradients(going, last):
            try:
                names = CallNames(api, f"{api.stem}.{tape.counter.next(api)}", path, "backward")
                if tape.wants(names):
                    if stack is None and tape.config.stacks:
                        stack = tape.stack_number(0)
                    tape.found(names, gradients, stack)
            except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
                tape.gap(api.stem, error)

    def _all_fresh_gradients(self, going: Set[int], last: bool) -> list[_Gradients]:
        found: list[_Gradients] = []
        own, passed = threading.get_ident(), self._tape.passed
        by_own = passed.pop(own, set())
        self._come_by.update(by_own, *list(passed.values()))

        def is_own(path: str, thread: int) -> bool:
            if path in by_own:
                return True
            others = [ident for ident, paths in list(passed.items()) if path in paths]
            if not going.isdisjoint(others):
                return False
            # the rest are threads of devices, which go backward for whichever calls it; nobody is
            # seen to come by where a module has returned no tensor that backward starts from
            return thread == own or (last and (bool(others) or path not in self._come_by))

        with Quiet(), self._gradients:  # backward may end in two threads at once
            for reference, path, thread in list(self._trained.values()):
                module = reference()
                if module is None or not is_own(path, thread):
                    continue
                api = self._api(path, type(module), ".parameters_grad")
                try:
                    if fresh := self._fresh_gradients(module):
                        found.append((api, path, fresh))
                except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
                    self._tape.gap(api.stem, error)
            if last:
                for ident in set(passed) - going:
                    passed.pop(ident, None)
        return found

    def _fresh_gradients(self, module: nn.Module) -> _Named:
        seen, fresh = self._grads_seen, []
        for name, parameter in _parameters(module):
            grad = parameter.grad
            if grad is None:
                continue
            state = _state_of(grad)
            known = seen.get(id(parameter))
            # by itself, too: a new one may lie where the last one lay
            if known is None or known[0]() is not grad or known[1] != state:
                seen[id(parameter)] = (weakref.ref(grad), state)
                fresh.append((name, grad))
        return fresh


def _api(path: str, kind: type, what: str = "") -> ApiName:
    """The name of the call of a module, or of something else about it."""
    api = module_name(path, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    own = path if path == kind.__name__ else api.api  # a root that goes by its class
    return api._replace(api=own + what)


def _parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters that belong to a call of this module."""
    own = _present(module._parameters)
    return own + uncalled_parameters(module) if uses_uncalled(module) else own


def _present(tensors: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    if not tensors:
        return []
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _note_buffers(entry: _Entry, buffers: list[tuple[str, torch.Tensor]]) -> None:
    with _DISABLED():
        entry.buffers = {name: _state_of(buffer) for name, buffer in buffers}


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when another tensor takes its place, or it is written to."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version


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
