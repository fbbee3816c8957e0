"""Looking at every call of the program: what it returns, and whether it is at fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from tensorprobe import native
from tensorprobe.follow.function_mode import SCALER_UPDATE, CallMode
from tensorprobe.follow.module_hooks import ModuleCall
from tensorprobe.follow.naming import ApiName
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.stand_ins import HANDLER
from tensorprobe.overflow.backward_calls import BackwardCalls, send_later
from tensorprobe.overflow.call_kinds import PASSING, Kind, Passing, Plan, plan_for
from tensorprobe.overflow.call_site import NOWHERE, render, trail_from
from tensorprobe.overflow.cases import NamedCall, Watcher
from tensorprobe.overflow.device_calls import ATOMS, LINEAR, DeviceCalls
from tensorprobe.overflow.guard_state import MODES_OFF, NEAR, GuardState
from tensorprobe.overflow.judge import (
    CallValues,
    clamped,
    fault,
    is_pole,
    look_at,
    near_limit,
    scalar_bits,
    seen_as,
)
from tensorprobe.overflow.module_place import Here
from tensorprobe.overflow.optimizer_steps import OptimizerSteps
from tensorprobe.overflow.pending_calls import holds_all_of
from tensorprobe.overflow.saved_calls import write_forward
from tensorprobe.overflow.watched_call import (
    POSITIONS,
    RunningCall,
    Tensors,
    contents_of,
    copied,
    edges_of,
    live_tensors,
    recover,
    tensors_in,
    tensors_out,
    weaken,
)
from tensorprobe.record.tape import Tape
from tensorprobe.tensors.finiteness import LIMITS, extent_now, readable
from tensorprobe.torch_versions import COMPILER

_is_grad_enabled = torch.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_sequence_number = torch._C._autograd._get_sequence_nr
# torch.func is at work where there are some: its wrappers have no graph that can be walked
_transforms = torch._C._functorch.peek_interpreter_stack
_FACTS = {  # for C++
    "atoms": ATOMS,
    "casts": Kind.CASTS,
    "compiler": COMPILER,
    "copied": Passing.COPIED,
    "fields": Plan._fields,
    "getframe": sys._getframe,
    "handler": HANDLER,
    "limits": LIMITS,
    "linear": LINEAR,
    "modules": sys.modules,
    "moves": Kind.MOVES,
    "nowhere": NOWHERE,
    "passes": Kind.PASSES,
    "passing": PASSING,
    "positions": POSITIONS,
    "scales": Kind.SCALES,
    "send_later": send_later,
}


class _Short(NamedTuple):
    """A call that does not write to its inputs: it is looked at when it has ended."""

    plan: Plan
    number: int
    start: int  # the number of the next graph node before the call
    args: tuple[Any, ...]
    kwargs: Any
    frame: FrameType | None


class _Passing(NamedTuple):
    """A call that returns what it is given: looked at only if that may be bad."""

    plan: Plan
    number: int
    args: tuple[Any, ...]
    kwargs: Any
    frame: FrameType | None


class _Scaling(NamedTuple):
    """A call of a GradScaler."""

    updates: bool
    skipped_at: float | None  # the scale at which it skips the step, before it is lowered


class OverflowObserver(Observer):
    """Looks at what each call returns, at once or, on a device, when there is time."""

    def __init__(self, tape: Tape, watcher: Watcher, look_every: int | None) -> None:
        self.state = GuardState(tape, watcher, look_every)
        self.backward = BackwardCalls(self.state)
        self.device = DeviceCalls(self.state, self.backward)
        self.optimizers = OptimizerSteps(self.state)

    @property
    def on(self) -> bool:  # type: ignore[override]
        """Whether calls are looked at."""
        return self.state.on

    # Calls

    def plan(self, api: ApiName) -> Plan:
        return plan_for(api)

    def begin(
        self,
        plan: Plan,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> _Short | _Passing | _Scaling | RunningCall | None:
        """Note what will be needed of a call that is about to be made."""
        number = self.state.program.counter.next(plan.api)
        state = self.state
        if (state.stepping or state.closures) and state.is_optimizers_own(frame):
            return None
        if plan.is_special:
            kind = plan.kind
            if kind is Kind.SCALES:
                return _scaling(plan, args)
            if kind is Kind.PASSES:
                return _Passing(plan, number, args, kwargs, frame)
            if not plan.uninitialised:
                return None
        elif (
            (plan.is_short or (plan.may_write and kwargs.get("inplace") is False))
            and self.state.is_late
            and self.state.pending.active
        ):
            return _Short(plan, number, _sequence_number(), args, kwargs, frame)
        return self._before(plan, number, args, kwargs, frame)

    def end(self, call: _Short | _Passing | _Scaling | RunningCall, result: Any) -> None:
        """Look at what a call has returned."""
        if isinstance(call, RunningCall):
            self._after(call, result)
        elif isinstance(call, _Short):
            self._note_made(*call, result)
        elif isinstance(call, _Passing):
            self._pass_on(*call, result)
        elif call.updates:
            self.state.watcher.scale_updated(call.skipped_at)
        else:
            self.state.watcher.unscaled()
        if self.state.watcher.attention:
            self.state.watcher.call_made()

    def _pass_on(
        self,
        plan: Plan,
        number: int,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType | None,
        result: Any,
    ) -> None:
        if self.state.cases or self.state.pending.active:
            try:
                is_noted = self.device.is_noted_view(plan, number, args, result)
            except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
                self.state.watcher.trouble(plan.api.stem, error)
                return
            if not is_noted:
                self.passed(plan, number, args, kwargs, frame, result)

    def _note_made(
        self,
        plan: Plan,
        number: int,
        start: int,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType | None,
        result: Any,
    ) -> None:
        given = (plan, number, start, args, kwargs, frame, result)
        try:
            if _function_modes():
                with MODES_OFF():
                    is_noted = self.device.note_later(*given)
            else:  # ours is off while it is asked
                is_noted = self.device.note_later(*given)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.state.watcher.trouble(plan.stem, error)
            return
        if not is_noted:
            watched = self._before(plan, number, args, kwargs, frame, start)
            if watched is not None:
                self._after(watched, result)

    # Modules, where others are told of them too; alone there is `ModuleTrails`

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> tuple[Here]:
        place = self.state.program.place
        outer = place.here
        place.here = (entry.path, entry.frame, trail_from(entry.frame, *outer[1:]))
        return (outer,)

    def leave(
        self, entry: ModuleCall, call: tuple[Here], result: Any, error: BaseException | None
    ) -> None:
        self.state.program.place.here = call[0]

    # Optimizers

    def optimizer_begins(self, optimizer: Any, frame: FrameType, has_closure: bool) -> NamedCall:
        return self.optimizers.begin(optimizer, frame, has_closure)

    def optimizer_ended(self, optimizer: Any, call: NamedCall) -> None:
        self.optimizers.end(optimizer, call)

    def optimizers_left(self) -> None:
        self.optimizers.left()

    # What the watch decides

    def backward_begins(self, roots: Any) -> None:
        self.state.watcher.backward_begins(roots)

    def step_ended(self) -> None:
        self.state.watcher.advance()

    def gap(self, name: str, reason: BaseException | str) -> None:
        self.state.tape.gap(name, reason)

    # What C++ asks for, where a call is not plain

    def shorten(self, mode: CallMode) -> None:
        """Let the part in C++ make the calls of a mode, where it is built."""
        if native.MODULE is not None:
            native.check()
            made = native.MODULE.EveryCall(mode, self, mode.plans, mode.stand_ins, _FACTS)
            self.state.pending.native = made
            mode.swift = made.call

    def made_later(self, *call: Any) -> None:
        """Note a call that C++ has made."""
        self._note_made(*call)

    def passed(
        self,
        plan: Plan,
        number: int,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType | None,
        result: Any,
    ) -> None:
        """Look at what a call has passed on, if it is no view of known memory."""
        watched = self._before(plan, number, args, kwargs, frame)
        if watched is not None:
            self._after(watched, result)

    def _before(
        self,
        plan: Plan,
        number: int,
        args: tuple[Any, ...],
        kwargs: Any,
        frame: FrameType | None,
        start: int | None = None,
    ) -> RunningCall | None:
        """What to know of a call that is to be made; or was, and `start` is what it began with."""
        watched = RunningCall(plan, number, args, kwargs, frame)
        try:
            with MODES_OFF():
                inputs = watched.inputs = tensors_in(args, kwargs)
                if plan.has_backward and _is_grad_enabled() and not _transforms():
                    self._note_graph(watched, inputs, start)
            if plan.writes:
                with Quiet():
                    self._copy_written(watched)
            elif plan.kind is Kind.COMMUNICATES:
                with Quiet():
                    self._before_collective(watched)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.state.watcher.trouble(plan.api.stem, error)
            return None
        return watched

    def _note_graph(self, watched: RunningCall, inputs: Tensors, start: int | None) -> None:
        """Where the inputs hang in the graph, as far as the call may change it."""
        needs = []
        functions: list[tuple[torch.Tensor, Any]] = []
        for tensor, path in inputs:
            if tensor.requires_grad:
                needs.append(path)
                node = tensor.grad_fn
                if isinstance(node, BackwardCFunction):
                    functions.append((tensor, node))
        if not needs:
            return
        if functions:
            self.backward.watch_functions(functions, watched.frame)
        watched.needs = tuple(needs)
        watched.start = _sequence_number() if start is None else start
        if not watched.plan.leaves_inputs:
            edges_of(watched)

    def _copy_written(self, watched: RunningCall) -> None:
        """Keep what the first argument holds: the call writes to it, and may read it elsewhere."""
        first = watched.args[0] if watched.args else None
        tensors = tensors_in((first,), {})
        contents = [readable(tensor) for tensor, _ in tensors]
        if not any(each is not None and self.state.is_immediate(each) for each in contents):
            watched.memory = self.state.pending.inputs(watched.inputs)
            return
        storages = {each.untyped_storage()._cdata for each in contents if each is not None}
        for tensor, path in tensors:
            watched.written[path] = tensor
        watched.args = tuple(copied(arg, storages) for arg in watched.args)
        watched.kwargs = {key: copied(value, storages) for key, value in watched.kwargs.items()}

    def _before_collective(self, watched: RunningCall) -> None:
        """A collective writes to what it is given, which may be large: look, and copy nothing."""
        for tensor, path in watched.inputs:
            content = readable(tensor)
            if content is None:
                continue
            if not self.state.is_immediate(content):
                watched.memory = watched.memory or self.state.pending.inputs(watched.inputs)
            elif (extent := extent_now(content)).bits:
                watched.before.append(seen_as(content, path, "input", extent))

    def _after(self, watched: RunningCall, result: Any) -> None:
        plan = watched.plan
        try:
            with MODES_OFF():
                outputs = tensors_out(result)
                if outputs and self.device.are_later(watched, outputs):
                    self.device.look_at_later(watched, outputs)
                    if watched.needs:
                        self.backward.watch_backward_later(watched, outputs)
                    return
            with Quiet():
                if plan.kind is Kind.COMMUNICATES:
                    if _is_under_way(result):
                        return  # who waits for it, or reads it, sees what came
                    outputs = watched.inputs
                elif not outputs and (watched.written or plan.kind is Kind.MOVES):
                    outputs = watched.inputs[:1] if not watched.written else live_tensors(watched)
                if plan.uninitialised:
                    for content in contents_of(outputs):
                        self.state.cases.note_uninitialised(content)
                    return
                if not outputs and self.state.cases.has_held_back:
                    self._read_out(watched)
                self._look_at(watched, result, outputs)
                if watched.needs:
                    self.backward.watch_backward(watched, outputs)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.state.watcher.trouble(plan.api.stem, error)

    def _read_out(self, watched: RunningCall) -> None:
        """A value leaves torch, as by item()."""
        now = [each for each in watched.inputs if self.state.looks_now(each[0])]
        case = self.state.cases.among(look_at(now, "input"))
        if case is not None:
            self.state.cases.release(case)

    def _look_at(self, watched: RunningCall, result: Any, outputs: Tensors) -> None:
        late: Tensors = []
        bad = near = on_device = False
        if self._is_harmless(watched, outputs):
            return
        for tensor, path in outputs:
            content = readable(tensor)
            on_device = on_device or not tensor.is_cpu
            if content is None or (watched.plan.kind is Kind.MOVES and tensor._is_view()):
                continue
            if not self.state.is_immediate(content):
                late.append((content, path))
                continue
            extent = extent_now(content)
            if extent.bits:
                bad = True
            elif extent.top >= NEAR[content.dtype]:
                near = True
        if late:
            self.device.look_later(watched, late, watched.plan.kind is not Kind.PASSES)
        if bad:
            self._suspect(watched, result, outputs)
        elif near:
            self._remember_near(watched, outputs)
        if on_device and self.state.was_clamped(outputs):
            self._suspect(watched, result, outputs, was_clamped=True)

    def _is_harmless(self, watched: RunningCall, outputs: Tensors) -> bool:
        """Whether it is a cast to a dtype that holds more, or to its own: most are."""
        if watched.plan.kind is not Kind.CASTS or self.state.cases:
            return False
        if not (watched.inputs and outputs):
            return False
        source, target = watched.inputs[0][0], outputs[0][0]
        if source.dtype not in LIMITS or target.dtype not in LIMITS:
            return True
        return holds_all_of(target, source)

    # A call that may be at fault

    def _suspect(
        self, watched: RunningCall, result: Any, outputs: Tensors, *, was_clamped: bool = False
    ) -> None:
        """Something it returned is not finite, or the flag of a chip that clamps was raised."""
        if self.state.pending.active and not was_clamped:
            self.state.look()  # what a device has found comes first
        cases, values = self.state.cases, self._values_of(watched, outputs)
        case = cases.behind(values, any_value=was_clamped)
        if case is None and not was_clamped:
            case = self.optimizers.optimizer_behind(values.inputs)
        if case is not None:
            cases.carry(case, self._name_only(watched), values, any_value=was_clamped)
            return
        if was_clamped:
            self._open(watched, result, values, clamped(values), any_value=True)
            return
        spoiled = self.optimizers.reading_spoiled(values.inputs)
        reason = spoiled or fault(values, cases.origin)
        if reason is not None:
            self._open(watched, result, values, reason, is_reader=spoiled is not None)

    def _values_of(self, watched: RunningCall, outputs: Tensors) -> CallValues:
        """What a call is judged by."""
        returned = look_at(outputs, "output")
        if watched.plan.kind is Kind.COMMUNICATES:
            return CallValues(watched.plan, watched.before, returned)
        inputs = look_at(tensors_in(watched.args, watched.kwargs), "input")
        told = scalar_bits(watched.args, watched.kwargs)
        return CallValues(watched.plan, inputs, returned, told)

    def _name_only(self, watched: RunningCall) -> NamedCall:
        return NamedCall(watched.plan, watched.number, "", self.state.step, NOWHERE)

    def _open(
        self, watched: RunningCall, result: Any, values: CallValues, reason: str, **how: bool
    ) -> None:
        if self.state.watcher.is_full:
            return
        call = NamedCall(*self.state.noted(watched))
        write = None
        if values.plan.kind is not Kind.COMMUNICATES:
            write = self._forward_writer(watched, call, result, weakly=is_pole(values))
        in_backward = torch._C._current_graph_task_id() != -1
        self.state.cases.blame(call, values, reason, in_backward=in_backward, write=write, **how)

    def _forward_writer(
        self, watched: RunningCall, call: NamedCall, result: Any, *, weakly: bool
    ) -> Callable[[], bool]:
        """What puts a call into the capture; `weakly`: it keeps nothing alive that the call made,
        for that it goes away is a sign that all is well."""
        names, frames = call.names(), render(call.trail)
        args, kwargs = watched.args, watched.kwargs
        made, written = weaken(result) if weakly else result, {} if weakly else watched.written

        def write() -> bool:
            try:
                returned = recover(made)
            except LookupError:
                returned = None
            write_forward(self.state.tape, names, frames, args, kwargs, returned, written)
            return True

        return write

    def _remember_near(self, watched: RunningCall, outputs: Tensors) -> None:
        near = near_limit(self._values_of(watched, outputs))
        self.state.growth.see(self._name_only(watched).name(), self.state.step, near)


def _scaling(plan: Plan, args: tuple[Any, ...]) -> _Scaling:
    if plan.api.api != SCALER_UPDATE:
        return _Scaling(False, None)
    with Quiet():
        found = bool(args[2].item())
        return _Scaling(True, float(args[0].item()) if found else None)


def _is_under_way(result: Any) -> bool:
    """Whether a collective goes on after it returned: it gave a Work to wait for."""
    works = result if isinstance(result, list | tuple) else [result]
    return any(hasattr(work, "is_completed") for work in works)
