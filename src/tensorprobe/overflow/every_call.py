"""Looking at every call of the program: what it returns, and whether it is at fault."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe import native
from tensorprobe.capture import compiled
from tensorprobe.capture.function_mode import SCALER_UPDATE, UserCalls, below_backward
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.stand_ins import HANDLER, is_tracing
from tensorprobe.capture.steps import optimizers_in_round
from tensorprobe.capture.tracebacks import clean
from tensorprobe.overflow.backward_calls import send_later
from tensorprobe.overflow.bad_values import MODES_OFF, NEAR, OWN_FRAMES, made_by_scaler
from tensorprobe.overflow.call_kinds import PASSING, Kind, Passing, Plan, plan_for
from tensorprobe.overflow.call_site import NOWHERE
from tensorprobe.overflow.cases import POSITIONS, Case, Sighting, tensors_in, tensors_out
from tensorprobe.overflow.device_calls import ATOMS, LINEAR, LaterLooking
from tensorprobe.overflow.judge import Seen, bits_of, fault, is_pole, look_at, scalar_bits
from tensorprobe.overflow.optimizer_steps import OptimizerLooking
from tensorprobe.overflow.pending_calls import holds_all_of
from tensorprobe.overflow.saved_calls import write_forward
from tensorprobe.overflow.watched_call import (
    Glance,
    Tensors,
    contents_of,
    copied,
    edges_of,
    frames_of,
    labelled,
    live_tensors,
    recover,
    weaken,
)
from tensorprobe.tensors.finiteness import LIMITS, NAN, extent_now, readable

_MOST_ASLEEP = 64
_is_traced = torch.compiler.is_dynamo_compiling  # true of the code that dynamo reads, never of ours
_compiler = torch.compiler
_is_grad_enabled = torch.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_sequence_number = torch._C._autograd._get_sequence_nr
# torch.func is at work where there are some: its wrappers have no graph that can be walked
_transforms = torch._C._functorch.peek_interpreter_stack
_FACTS = {  # for C++
    "atoms": ATOMS,
    "casts": Kind.CASTS,
    "compiler": vars(_compiler),
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


class SightMode(UserCalls):
    """Hands every call of the program to a sight."""

    def __init__(self, sight: Sight) -> None:
        super().__init__()
        self._sight = sight
        self._calls: dict[Any, Plan | Literal[False] | None] = {}
        self._native = sight.in_native(self, self._calls)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # As its parent's, in one function: it is entered for every call, and for every property.
        if _is_traced():  # dynamo reads this line: leave no mark in its graph
            return func(*args) if kwargs is None else func(*args, **kwargs)
        try:
            native = self._native
            if (
                native is not None
            ):  # it does what follows, or says by itself that it has done nothing
                result = native.call(func, args, kwargs)
                if result is not native:
                    return result
            try:
                plan = self._calls[func]
            except KeyError:
                plan = self._learn(func)
            except Exception:  # noqa: BLE001 a callable whose hash or comparison raises: no name
                plan = None
            if kwargs is None:
                kwargs = {}
            if not plan or not self._sight.on or self._is_not_the_programs(plan):
                return self.make(func, args, kwargs)
            return self._sight.call(plan, func, args, kwargs)
        except BaseException as error:
            clean(error)
            raise

    def _is_not_the_programs(self, plan: Plan) -> bool:
        """Whether a tool, a simulated device or a compiled part makes this call."""
        if self.dispatch_depth and self.is_in_handler():
            return True
        if plan.is_operator and below_backward():
            return True
        if _compiler._is_compiling_flag or is_tracing():
            return True
        if not compiled.may_run():
            return False
        return compiled.in_backward() or compiled.running(3) is not None

    def _learn(self, func: Any) -> Plan | None:
        api = self._plan(func)
        if not api:  # C++ is told which never warn
            self._calls[func] = api
            return None
        plan = self._calls[func] = plan_for(api)
        return plan


class Sight(LaterLooking, OptimizerLooking):
    """Looks at what each call returns, at once or, on a device, when there is time."""

    # Calls

    def call(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Make a call of the program and look at what it returns."""
        number = self._tape.counter.next(plan.api)
        if self.stepping and threading.get_ident() in self.stepping:
            return self.make(func, args, kwargs)
        if plan.is_special:
            kind = plan.kind
            if kind is Kind.SCALES:
                return self._scaler_call(plan, func, args, kwargs)
            if kind is Kind.PASSES:
                return self._pass_on(plan, number, func, args, kwargs)
            if not plan.uninitialised:
                return self.make(func, args, kwargs)
        elif (
            (plan.is_short or (plan.may_write and kwargs.get("inplace") is False))
            and self._is_late
            and self._ring.active
        ):
            start = _sequence_number()
            result = self.make(func, args, kwargs)
            self._note_made(plan, number, start, args, kwargs, result)
            if self._watcher.attention:
                self._watcher.call_made()
            return result
        glance = self._before(plan, number, args, kwargs)
        result = self.make(func, args, kwargs)
        if glance is not None:
            self._after(glance, result)
        if self._watcher.attention:
            self._watcher.call_made()
        return result

    def _pass_on(
        self, plan: Plan, number: int, func: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A call that returns what it is given: of interest where that may be bad."""
        result = self.make(func, args, kwargs)
        if self.taint or self._ring.active:
            try:
                is_noted = self._is_noted_view(plan, number, args, result)
            except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
                self._watcher.trouble(plan.api.stem, error)
                return result
            if not is_noted:
                glance = self._before(plan, number, args, kwargs)
                if glance is not None:
                    self._after(glance, result)
            if self._watcher.attention:
                self._watcher.call_made()
        return result

    def _note_made(
        self, plan: Plan, number: int, start: int, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """A call that leaves its inputs as they are: all of it can be noted when it has ended."""
        try:
            if _function_modes():
                with MODES_OFF():
                    is_noted = self._note_later(plan, number, start, args, kwargs, result)
            else:  # ours is off while it is asked
                is_noted = self._note_later(plan, number, start, args, kwargs, result)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._watcher.trouble(plan.stem, error)
            return
        if not is_noted:
            glance = self._before(plan, number, args, kwargs, start)
            if glance is not None:
                self._after(glance, result)

    # What C++ asks for, where a call is not plain

    def in_native(self, mode: SightMode, calls: dict[Any, Any]) -> Any:
        """The part in C++ that makes the calls of a mode; None where it is not built."""
        if native.MODULE is None:
            return None
        made = native.MODULE.Sight(mode, self, calls, _FACTS)
        self._ring.native = made
        return made

    def made_later(self, *call: Any) -> None:
        """Note a call that C++ has made; a frame that stands for `call`, so that depths agree."""
        self._note_made(*call)

    def passed(
        self, plan: Plan, number: int, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Look at what a call has passed on that is no view of memory that is known."""
        glance = self._before(plan, number, args, kwargs)
        if glance is not None:
            self._after(glance, result)

    def _scaler_call(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if plan.api.api != SCALER_UPDATE:
            result = self.make(func, args, kwargs)
            self._watcher.unscaled()
            return result
        with Quiet():
            found = bool(args[2].item())
            scale = float(args[0].item()) if found else None  # before it is lowered
        result = self.make(func, args, kwargs)
        self._watcher.scale_updated(scale, optimizers_in_round())
        return result

    def _before(
        self,
        plan: Plan,
        number: int,
        args: tuple[Any, ...],
        kwargs: Any,
        start: int | None = None,
    ) -> Glance | None:
        """What to know of a call that is to be made; or was, and `start` is what it began with."""
        glance = Glance(plan, number, args, kwargs)
        try:
            with MODES_OFF():
                inputs = glance.inputs = tensors_in(args, kwargs)
                if plan.has_backward and _is_grad_enabled() and not _transforms():
                    self._note_graph(glance, inputs, start)
            if plan.writes:
                with Quiet():
                    self._copy_written(glance)
            elif plan.kind is Kind.COMMUNICATES:
                with Quiet():
                    self._before_collective(glance)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._watcher.trouble(plan.api.stem, error)
            return None
        return glance

    def _note_graph(self, glance: Glance, inputs: Tensors, start: int | None) -> None:
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
            self._watch_functions(functions)
        glance.needs = tuple(needs)
        glance.start = _sequence_number() if start is None else start
        if not glance.plan.leaves_inputs:
            edges_of(glance)

    def _copy_written(self, glance: Glance) -> None:
        """Keep what the first argument holds: the call writes to it, and may read it elsewhere."""
        first = glance.args[0] if glance.args else None
        tensors = tensors_in((first,), {})
        contents = [readable(tensor) for tensor, _ in tensors]
        if not any(each is not None and self._is_immediate(each) for each in contents):
            glance.noted = self._ring.inputs(glance.inputs)
            return
        storages = {each.untyped_storage()._cdata for each in contents if each is not None}
        for tensor, path in tensors:
            glance.written[path] = tensor
        glance.args = tuple(copied(arg, storages) for arg in glance.args)
        glance.kwargs = {key: copied(value, storages) for key, value in glance.kwargs.items()}

    def _before_collective(self, glance: Glance) -> None:
        """A collective writes to what it is given, which may be large: look, and copy nothing."""
        contents = contents_of(glance.inputs)
        now = [each for each in contents if self._is_immediate(each)]
        if len(now) < len(contents):
            glance.noted = self._ring.inputs(glance.inputs)
        for content in now:
            if extent_now(content).bits:
                glance.was_bad = self.taint.case_of(content) or True

    def _after(self, glance: Glance, result: Any) -> None:
        plan = glance.plan
        try:
            with MODES_OFF():
                outputs = tensors_out(result)
                if outputs and self._are_later(glance, outputs):
                    self._look_at_later(glance, outputs)
                    if glance.needs:
                        self._watch_backward_later(glance, outputs)
                    return
            with Quiet():
                if plan.kind is Kind.COMMUNICATES:
                    if _is_under_way(result):
                        return  # who waits for it, or reads it, sees what came
                    outputs = glance.inputs
                elif not outputs and (glance.written or plan.kind is Kind.MOVES):
                    outputs = glance.inputs[:1] if not glance.written else live_tensors(glance)
                if plan.uninitialised:
                    self._note_uninitialised(outputs)
                    return
                if not outputs and self._asleep:
                    self._read_out(glance)
                self._look_at(glance, result, outputs)
                if glance.needs:
                    self._watch_backward(glance, outputs)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._watcher.trouble(plan.api.stem, error)

    def _read_out(self, glance: Glance) -> None:
        """A value leaves torch, as by item()."""
        for each in look_at(labelled(glance.inputs, "input")):
            case = self.taint.case_of(each.tensor) if each.bits else None
            if case is not None:
                self._wake(case)

    def _look_at(self, glance: Glance, result: Any, outputs: Tensors) -> None:
        late: Tensors = []
        bad = near = on_device = False
        if self._is_harmless(glance, outputs):
            return
        for tensor, path in outputs:
            content = readable(tensor)
            on_device = on_device or not tensor.is_cpu
            if content is None or (glance.plan.kind is Kind.MOVES and tensor._is_view()):
                continue
            if not self._is_immediate(content):
                late.append((content, path))
                continue
            extent = extent_now(content)
            if extent.bits:
                bad = True
            elif extent.top >= NEAR[content.dtype]:
                near = True
        if late:
            self._look_later(glance, late, glance.plan.kind is not Kind.PASSES, OWN_FRAMES + 1)
        if bad:
            self._suspect(glance, result, outputs)
        elif near:
            self._remember_near(glance, outputs)
        if on_device and self._clamped(outputs):
            self._suspect_clamped(glance, result, outputs)

    def _is_harmless(self, glance: Glance, outputs: Tensors) -> bool:
        """Whether it is a cast to a dtype that holds more, or to its own: most are."""
        if glance.plan.kind is not Kind.CASTS or self.taint or not (glance.inputs and outputs):
            return False
        source, target = glance.inputs[0][0], outputs[0][0]
        if source.dtype not in LIMITS or target.dtype not in LIMITS:
            return True
        return holds_all_of(target, source)

    def _note_uninitialised(self, outputs: Tensors) -> None:
        for tensor, _ in outputs:
            content = readable(tensor)
            if content is not None:
                storage = content.untyped_storage()
                self._uninitialised[storage._cdata] = StorageWeakRef(storage)

    # Judging a call

    def _suspect(self, glance: Glance, result: Any, outputs: Tensors) -> None:
        """Something it returned is not finite: is it at fault?"""
        if self._ring.active:
            self.look()  # what a device has found comes first
        plan = glance.plan
        returned = look_at(labelled(outputs, "output"))
        if plan.kind is Kind.COMMUNICATES:
            self._suspect_collective(glance, returned)
            return
        inputs = look_at(labelled(tensors_in(glance.args, glance.kwargs), "input"))
        case = self._case_behind(inputs) or self._optimizer_behind(inputs)
        if case is not None:
            case.carry(Sighting(plan, glance.number, "", self.step, NOWHERE).name())
            self._spoil(returned, case)
            if bits_of(returned) & NAN:
                self._wake(case)
            return
        reason = self._reading_spoiled(inputs)
        if reason is not None:
            pass
        elif bits_of(inputs) & NAN:
            reason = self._reading(plan, inputs)
        else:
            reason = fault(plan, inputs, returned, scalar_bits(glance.args, glance.kwargs))
        if reason is not None:
            self._open(glance, result, reason, inputs, returned)

    def _suspect_collective(self, glance: Glance, returned: list[Seen]) -> None:
        sighting = self._sighting(glance)
        if isinstance(glance.was_bad, Case):
            glance.was_bad.carry(sighting.name())
            self._spoil(returned, glance.was_bad)
        elif not glance.was_bad and not self._watcher.is_full:
            bad = next(each for each in returned if each.bits)
            reason = (
                f"what this rank gave is finite, and {bad.label} is not: it came from another "
                "rank, or the sum overflows"
            )
            case = Case(sighting, "forward", reason, {e.label: e.facts for e in returned}, None)
            self._spoil(returned, case)
            self._watcher.add(case, pending=torch._C._current_graph_task_id() != -1)

    def _suspect_clamped(self, glance: Glance, result: Any, outputs: Tensors) -> None:
        """The chip clamps what overflows, and its flag says that something did."""
        inputs = look_at(labelled(tensors_in(glance.args, glance.kwargs), "input"))
        returned = look_at(labelled(outputs, "output"))
        case = self._case_behind(inputs, any_value=True)
        if case is not None:
            case.carry(Sighting(glance.plan, glance.number, "", self.step, NOWHERE).name())
            self._spoil(returned, case, any_value=True)
            return
        at_limit = [each for each in returned if each.top >= each.limit]
        shown = f"{at_limit[0].label} reaches {at_limit[0].limit:g}" if at_limit else "in between"
        reason = f"the chip clamps, and its overflow flag was raised: {shown}"
        self._open(glance, result, reason, inputs, returned, any_value=True)

    def _case_behind(self, inputs: list[Seen], *, any_value: bool = False) -> Case | None:
        for each in inputs:
            case = self.taint.case_of(each.tensor)
            if case is not None and (each.bits or any_value or each.top >= each.limit):
                return case
        return None

    def _reading(self, plan: Plan, inputs: list[Seen]) -> str | None:
        """Why NaN that is there already is this call's to be reported: it is the first to use it.
        None where there is no such NaN."""
        holders = [each for each in inputs if each.bits & NAN]
        if not holders or plan.kind is not Kind.COMPUTES:
            return None
        first = holders[0]
        count = f"{first.facts['nan']} NaN in {first.label}"
        earlier = self.taint.earlier_case_of(first.tensor)
        if earlier is not None:
            return f"it reads {count}, left by {earlier.name} in step {earlier.sighting.step}"
        if first.tensor.untyped_storage()._cdata in self._uninitialised:
            return f"it reads {count}: memory that was never written to (torch.empty)"
        return f"it reads {count}, which no call that was watched has made"

    def _open(
        self,
        glance: Glance,
        result: Any,
        reason: str,
        inputs: list[Seen],
        returned: list[Seen],
        *,
        any_value: bool = False,
    ) -> None:
        if self._watcher.is_full:
            return
        sighting = self._sighting(glance)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            reason += "; it runs inside backward"
        sleeps = is_pole(glance.plan, inputs, returned)
        write = self._forward_writer(glance, sighting, result, weakly=sleeps)
        metrics = {each.label: each.facts for each in (*inputs, *returned)}
        case = Case(sighting, "forward", reason, metrics, write)
        case.pending = in_backward or made_by_scaler(sighting.trail)
        known = bits_of(inputs) & NAN or self._reading_spoiled(inputs) is not None
        self._spoil([each for each in inputs if each.bits and known], case)
        self._spoil(returned, case, any_value=any_value)
        if sleeps:
            self._asleep.append(case)
            del self._asleep[:-_MOST_ASLEEP]
            return
        if in_backward:
            self._pass_case = case
        self._watcher.add(case, pending=case.pending)

    def _forward_writer(
        self, glance: Glance, sighting: Sighting, result: Any, *, weakly: bool
    ) -> Callable[[], bool]:
        """What puts a call into the capture; `weakly`: it keeps nothing alive that the call made,
        for that it goes away is a sign that all is well."""
        names, frames = sighting.names(), frames_of(sighting)
        args, kwargs = glance.args, glance.kwargs
        made, written = weaken(result) if weakly else result, {} if weakly else glance.written

        def write() -> bool:
            try:
                returned = recover(made)
            except LookupError:
                returned = None
            write_forward(self._tape, names, frames, args, kwargs, returned, written)
            return True

        return write

    def _remember_near(self, glance: Glance, outputs: Tensors) -> None:
        inputs = look_at(labelled(tensors_in(glance.args, glance.kwargs), "input"))
        if any(each.top >= each.limit for each in inputs):
            return  # a mask: the lowest number of its dtype, on purpose
        name = Sighting(glance.plan, glance.number, "", self.step, NOWHERE).name()
        for each in look_at(labelled(outputs, "output")):
            self._latent.see(f"{name}.{each.label}", self.step, each.top, each.limit)


def _is_under_way(result: Any) -> bool:
    """Whether a collective goes on after it returned: it gave a Work to wait for."""
    works = result if isinstance(result, list | tuple) else [result]
    return any(hasattr(work, "is_completed") for work in works)
