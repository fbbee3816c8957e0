"""Level L0: module calls with their parameters and buffers, and the gradients of parameters."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Set
from types import FrameType
from typing import Any

import torch
from torch import nn

from tensorprobe import native
from tensorprobe.follow.gradients import ONLY, Trace, Way, trace_found, trace_module, whole
from tensorprobe.follow.hidden_state import WRITES_STATISTICS
from tensorprobe.follow.module_hooks import CALL_IMPL, ModuleCall, ModuleHooks
from tensorprobe.follow.naming import ApiName, CallNames, module_name, name_parts
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.stacks import is_hidden
from tensorprobe.record.backward import Backward, ModuleBackward
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.encode import encode
from tensorprobe.record.making import MadeNotes, uncalled_parameters, uses_uncalled
from tensorprobe.record.tape import Tape, _state_notes
from tensorprobe.store.lines import CallLine, EndLine
from tensorprobe.torch_versions import COMPILER
from tensorprobe.trouble import OnTrouble

_DISABLED = torch._C.DisableTorchFunction  # tensors are read without any mode taking notice
_is_grad_enabled = torch.is_grad_enabled
_interpreter_stack = torch._C._functorch.peek_interpreter_stack
# The gradients of a module's parameters: what the call with them is named, where the module is.
_Named = list[tuple[str, torch.Tensor]]
_Gradients = tuple[ApiName, str, _Named]


def _program_frame(frame: FrameType) -> FrameType:
    """The first frame that is neither ours nor torch's machinery: those differ from one backward to
    the next, and would make two stacks of one."""
    here: FrameType | None = frame
    while here is not None and is_hidden(here.f_code):
        here = here.f_back
    return here or frame


class ModuleCalls:
    """Writes down the calls of modules when `record` is true, and the gradients that they get."""

    def __init__(self, tape: Tape, *, record: bool) -> None:
        self._tape = tape
        self._record = record
        # modules called in this step whose parameters may get a gradient, each with its thread
        self._trained: dict[int, tuple[weakref.ref[nn.Module], str, int]] = {}
        self._come_by: set[str] = set()  # paths of modules that backward was ever seen to come by
        self._grads_seen: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int]]] = {}
        self._gradients = threading.RLock()  # a signal's handler may go backward meanwhile
        self._made = MadeNotes()
        self._api: Callable[..., ApiName] = functools.lru_cache(maxsize=20_000)(_api)

    def begin_step(self) -> None:
        self._trained.clear()
        self._grads_seen.clear()

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> OpenCall | None:
        """A module is called; gives its call, where that is written down."""
        only = self._tape.only
        if only is None:
            records = self._record
        else:
            records = id(entry.module) in only
            entry.path = only.get(id(entry.module), entry.path)
        return self._begin(entry, args) if records else None

    def _begin(self, entry: ModuleCall, args: tuple[Any, ...]) -> OpenCall | None:
        module, tape, path = entry.module, self._tape, entry.path
        kind = type(module)
        api = self._api(path, kind)
        names = tape.select(api, tape.counter.next_name(api), path)
        if names is None:
            return None
        held: dict[str, Any] = {}
        if parameters := _parameters(module):
            held["parameters"] = parameters
        if buffers := _present(module._buffers):
            held["buffers"] = buffers
        call = tape.begin(
            names,
            args,
            # of no frame further out: start_state writes to this very dict
            entry.frame.f_locals.get("kwargs"),
            frame=entry.frame,
            grad=_is_grad_enabled() and not _interpreter_stack(),
            random=module.training,
            **held,
        )
        if names.wanted:
            tape.place.parent = names.name
        if call is None:
            return None
        entry.stack = call.stack
        if call.edges is not None and call.edges.has_leaves:
            entry.leaves = True
        if buffers:
            _note_buffers(call, buffers)
        if getattr(module, "_compiled_call_impl", None) or kind.__name__ == "OptimizedModule":
            call.notes.append("compiled: the calls inside are not visible")
        call.notes += self._made.of(module)
        if parameters:
            self._trained[id(module)] = (weakref.ref(module), path, threading.get_ident())
        return call

    def leave(
        self, entry: ModuleCall, call: OpenCall, result: Any, error: BaseException | None
    ) -> None:
        """A module has returned, or raised."""
        if error is not None:
            self._tape.raised(call, error)
            return
        owners, leaves = self._hooks.thread.owners, entry.leaves

        def tracer(outputs: Any, inputs: Any) -> Trace | Way:
            return trace_module(outputs, inputs, owners, leaves)

        buffers = self._changed_buffers(entry.module, call) if entry.module._buffers else ()
        self._tape.end(call, result, tracer, buffers)

    def _changed_buffers(self, module: nn.Module, call: OpenCall) -> list[tuple[str, torch.Tensor]]:
        """Buffers that the call wrote to, as they are now; named `running_mean.after`."""
        changed = []
        before = call.buffers or {}
        with _DISABLED():
            for name, buffer in _present(module._buffers):
                silent = module.training and name in ("running_mean", "running_var")
                if silent or before.get(name) != _state_of(buffer):
                    changed.append((f"{name}.after", buffer))
        if changed:
            self._tape.forget(buffer for _, buffer in changed)
        return changed

    # What C++ is given, and asks

    def attach(self, hooks: ModuleHooks) -> None:
        """These hooks tell of modules. Where C++ is built (native/module_hooks.h) it does so for
        modules inside of others, in a step that is recorded. It writes the calls down itself where
        nothing but statistics is kept."""
        tape = self._tape
        self._hooks = hooks
        if native.MODULE is None:
            return
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
                "stack_table": tape.stacks,
                "new_stack": tape._write_stack,
                "only_path": ONLY,
                "wants_input": tape.wants_input,
                "wants_output": tape.wants_output,
                "wants_parameters": tape.selection.wants_side("parameter"),
                "config_stacks": tape.config.stacks,
                "backward": tape.wants_backward,
                "sees_functions": tape._sees_functions,
            }
        swift = native.MODULE.Hooks(
            hooks=hooks,
            calls=self,
            tape=tape,
            place=tape.place,
            thread=hooks.thread,
            trained=self._trained,
            compiler=COMPILER,
            call_impl=CALL_IMPL,
            entered=hooks.entered,
            left=hooks.left,
            describe=self._describe,
            failed=hooks.failed,
            note_buffers=_note_buffers,
            entry=ModuleCall,
            call_names=CallNames,
            count=itertools.count,
            records=self._record,
            stacks=tape.config.stacks,
            **parts,
        )
        hooks.enter, hooks.leave = swift.enter, swift.leave

    def _describe(self, module: nn.Module) -> tuple[Any, ...] | None:
        """What stays the same of a module while it lives, and its notes; None of one that is not
        plain, or has not been called yet."""
        kind = type(module)
        known = self._hooks.paths.known(module)
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
        """Follow a call with more than one gradient into backward, as `Tape._trace` does."""
        trace = trace_found(outputs, edges, owners, leaves, found)
        if trace.notes:
            call.notes.extend(trace.notes)
        if trace.outputs:
            aliases = whole(edges).aliases if edges.has_aliases else {}
            self._tape.follow(call, trace, aliases)

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
            with OnTrouble(tape.gap, api.stem):
                names = CallNames(api, f"{api.stem}.{tape.counter.next(api)}", path, "backward")
                if tape.wants(names):
                    if stack is None and tape.config.stacks:
                        stack = tape.stack_number(_program_frame(sys._getframe()))
                    tape.found(names, gradients, stack)

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
                with OnTrouble(self._tape.gap, api.stem):
                    if fresh := self._fresh_gradients(module):
                        found.append((api, path, fresh))
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


def _note_buffers(call: OpenCall, buffers: list[tuple[str, torch.Tensor]]) -> None:
    with _DISABLED():
        call.buffers = {name: _state_of(buffer) for name, buffer in buffers}


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when another tensor takes its place, or it is written to."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version
