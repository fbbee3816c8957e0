"""Looking at every call: its outputs, its gradients, and parameters after an optimizer's step."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from tensorprobe.capture import compiled
from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.function_mode import SCALER_UPDATE, UserCalls
from tensorprobe.capture.gradients import (
    LEAF,
    Gradients,
    InputEdges,
    Path,
    Spot,
    Trace,
    trace_call,
    trace_function,
)
from tensorprobe.capture.naming import ApiName, optimizer_name
from tensorprobe.capture.optimizer_hooks import OptimizerHooks
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.steps import optimizers_in_round
from tensorprobe.capture.tape import Tape
from tensorprobe.devices import OverflowFlag, device_layer
from tensorprobe.guard.cases import Case, Sighting, Taint, tensors_in, tensors_out
from tensorprobe.guard.evidence import write_backward, write_forward
from tensorprobe.guard.hindsight import Hindsight
from tensorprobe.guard.judging import Seen, bits_of, fault, is_pole, look_at, scalar_bits
from tensorprobe.guard.kinds import Kind, Plan, plan_for
from tensorprobe.guard.latent import Latent
from tensorprobe.guard.ring import Event, Ring
from tensorprobe.guard.trail import BRIEF, Trail, render, trail_here
from tensorprobe.numerics.finiteness import LIMITS, NAN, extent_now, readable

_NEAR = {dtype: limit / 2 for dtype, limit in LIMITS.items()}
_MOST_ASLEEP = 64
_SCALER_FILE = "grad_scaler.py"
# Their backward computes nothing either.
_NO_BACKWARD = (Kind.PASSES, Kind.MAKES)

Tensors = list[tuple[torch.Tensor, Path]]


class Watcher(Protocol):
    """Whom a sight tells."""

    attention: bool

    @property
    def is_full(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def add(self, case: Case, *, pending: bool) -> None: ...
    def warn(self, name: str, step: int, text: str) -> None: ...
    def trouble(self, name: str, error: BaseException) -> None: ...
    def call_made(self) -> None: ...
    def unscaled(self) -> None: ...
    def scale_updated(self, skipped_at: float | None, optimizers: Iterable[int]) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...


class SightMode(UserCalls):
    """Hands every call of the program to a sight."""

    def __init__(self, sight: Sight) -> None:
        super().__init__()
        self._sight = sight
        self._by_api: dict[ApiName, Plan] = {}

    def called(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not self._sight.on or compiled.in_backward() or compiled.running() is not None:
            return func(*args, **kwargs)
        plan = self._by_api.get(api)
        if plan is None:
            plan = self._by_api[api] = plan_for(api)
        return self._sight.call(plan, func, args, kwargs)


class _Glance:
    """One call while it runs: what has to be known of it before, for the case that it is bad."""

    __slots__ = (
        "args",
        "edges",
        "inputs",
        "kwargs",
        "noted",
        "number",
        "plan",
        "trail",
        "was_bad",
        "written",
    )

    def __init__(self, plan: Plan, number: int, args: tuple[Any, ...], kwargs: Any) -> None:
        self.plan, self.number = plan, number
        self.args, self.kwargs = args, kwargs
        self.inputs: Tensors = []
        self.edges: InputEdges | None = None
        self.written: dict[Path, torch.Tensor] = {}  # live ones, of which `args` has copies
        self.noted: list[tuple[str, int]] | None = None  # memory of inputs that will be written to
        self.was_bad: Case | bool = False  # what a collective was given: it has no copies
        self.trail: Trail = ()


class Sight:
    """Looks at what each call returns, at once or, on a device, when there is time."""

    def __init__(self, tape: Tape, watcher: Watcher, look_every: int | None) -> None:
        self.on = False
        self.optimizers: OptimizerSight | None = None
        self._tape = tape
        self._watcher = watcher
        self._look_every = look_every
        self.step = 0
        self.taint = Taint()
        self._pass_case: Case | None = None  # of the backward that runs
        self._functions: set[tuple[int, int]] = set()
        self._uninitialised: dict[int, StorageWeakRef] = {}
        self._asleep: list[Case] = []  # infinite at a pole, such as 1 / 0: many programs mask that
        # gradients of leaves that were looked at in backward; the optimizer is given the same
        self._seen_gradients: dict[int, tuple[StorageWeakRef, int]] = {}
        # optimizers that stepped in this step and the one before, and the case their gradients had
        self._stepped: list[tuple[weakref.ref[Optimizer], Sighting, Case | None]] = []
        self._latent = Latent(watcher.warn)
        self._flag: OverflowFlag | None = None
        self._flags_needed: bool | None = None
        self._ring = Ring(look_every)
        self._hindsight = Hindsight(self._latent, self._found_late)

    # Steps

    def begin(self) -> None:
        """The watch begins: what was flagged on a device before is not ours."""
        row = device_layer("npu")
        self._flag = row.overflow_flag if row.is_available() else None
        if self._flag is not None and self._flag.is_needed():
            with contextlib.suppress(RuntimeError):  # no device is set yet: nothing has run on one
                self._flag.clear()

    def begin_step(self, step: int) -> None:
        """A new step: what is still bad counts anew."""
        self.step = step
        self._stepped = [each for each in self._stepped if each[1].step >= step - 1]
        self.taint.begin_step()
        self._pass_case = None
        self._functions.clear()
        self._asleep.clear()
        self._uninitialised.clear()
        self._seen_gradients.clear()
        self._ring.clear()
        self._hindsight.begin_step()

    def forgive(self, cases: Sequence[Case]) -> None:
        """These were GradScaler's to deal with, and it has."""
        self.taint.drop(cases)
        self._hindsight.forgive(cases)
        if self._pass_case in cases:
            self._pass_case = None

    # Calls

    def call(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Make a call of the program and look at what it returns."""
        number = self._tape.counter.next(plan.api)
        kind = plan.kind
        if self.optimizers is not None and self.optimizers.stepping:
            return func(*args, **kwargs)
        if kind is Kind.SCALES:
            return self._scaler_call(plan, func, args, kwargs)
        if kind is Kind.MAKES and not plan.uninitialised:
            return func(*args, **kwargs)
        if kind is Kind.PASSES and not self.taint and not self._ring.active:
            return func(*args, **kwargs)
        glance = self._before(plan, number, args, kwargs)
        result = func(*args, **kwargs)
        if glance is not None:
            self._after(glance, result)
        if self._watcher.attention:
            self._watcher.call_made()
        return result

    def _scaler_call(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if plan.api.api != SCALER_UPDATE:
            result = func(*args, **kwargs)
            self._watcher.unscaled()
            return result
        with Quiet():
            found = bool(args[2].item())
            scale = float(args[0].item()) if found else None  # before it is lowered
        result = func(*args, **kwargs)
        self._watcher.scale_updated(scale, optimizers_in_round())
        return result

    def _before(
        self, plan: Plan, number: int, args: tuple[Any, ...], kwargs: Any
    ) -> _Glance | None:
        glance = _Glance(plan, number, args, kwargs)
        try:
            with Quiet() as quiet:
                glance.inputs = tensors_in(args, kwargs)
                if plan.kind not in _NO_BACKWARD and quiet.grad and not _in_transform():
                    edges = glance.edges = InputEdges()
                    edges.add(glance.inputs)
                    if edges.functions:
                        self._watch_functions(edges.functions)
                if plan.writes:
                    self._copy_written(glance)
                elif plan.kind is Kind.COMMUNICATES:
                    self._before_collective(glance)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._watcher.trouble(plan.api.stem, error)
            return None
        return glance

    def _copy_written(self, glance: _Glance) -> None:
        """Keep what the first argument holds: the call writes to it, and may read it elsewhere."""
        first = glance.args[0] if glance.args else None
        tensors = tensors_in((first,), {})
        contents = [readable(tensor) for tensor, _ in tensors]
        if not any(each is not None and self._is_immediate(each) for each in contents):
            glance.noted = self._note_memory(glance.inputs)
            return
        storages = {each.untyped_storage()._cdata for each in contents if each is not None}
        for tensor, path in tensors:
            glance.written[path] = tensor
        glance.args = tuple(_copied(arg, storages) for arg in glance.args)
        glance.kwargs = {key: _copied(value, storages) for key, value in glance.kwargs.items()}

    def _before_collective(self, glance: _Glance) -> None:
        """A collective writes to what it is given, which may be large: look, and copy nothing."""
        contents = _contents(glance.inputs)
        now = [each for each in contents if self._is_immediate(each)]
        if len(now) < len(contents):
            glance.noted = self._note_memory(glance.inputs)
        for content in now:
            if extent_now(content).bits:
                glance.was_bad = self.taint.case_of(content) or True

    def _note_memory(self, tensors: Tensors) -> list[tuple[str, int]]:
        named = []
        for tensor, path in tensors:
            content = readable(tensor)
            if content is not None:
                named.append((f"input.{'.'.join(path)}", content))
        return self._ring.inputs(named)

    def _looks_now(self, tensor: torch.Tensor) -> bool:
        content = readable(tensor)
        return content is not None and self._is_immediate(content)

    def _is_immediate(self, content: torch.Tensor) -> bool:
        """Whether to look at these numbers now: reading host memory waits for nothing."""
        return content.is_cpu if self._look_every is None else self._look_every == 1

    def _after(self, glance: _Glance, result: Any) -> None:
        plan = glance.plan
        try:
            with Quiet():
                outputs = tensors_out(result)
                if plan.kind is Kind.COMMUNICATES:
                    if _is_under_way(result):
                        return  # who waits for it, or reads it, sees what came
                    outputs = glance.inputs
                elif not outputs and (glance.written or plan.kind is Kind.MOVES):
                    outputs = glance.inputs[:1] if not glance.written else _live(glance)
                if plan.uninitialised:
                    self._note_uninitialised(outputs)
                    return
                if not outputs and self._asleep:
                    self._read_out(glance)
                self._look_at(glance, result, outputs)
                if glance.edges:
                    self._watch_backward(glance, outputs)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._watcher.trouble(plan.api.stem, error)

    def _read_out(self, glance: _Glance) -> None:
        """A value leaves torch, as by item()."""
        for each in look_at(_labelled(glance.inputs, "input")):
            case = self.taint.case_of(each.tensor) if each.bits else None
            if case is not None:
                self._wake(case)

    def _look_at(self, glance: _Glance, result: Any, outputs: Tensors) -> None:
        late: list[tuple[str, torch.Tensor]] = []
        bad = near = on_device = False
        if self._is_harmless(glance, outputs):
            return
        for tensor, path in outputs:
            content = readable(tensor)
            on_device = on_device or not tensor.is_cpu
            if content is None or (glance.plan.kind is Kind.MOVES and tensor._is_view()):
                continue
            if not self._is_immediate(content):
                late.append((f"output.{'.'.join(path)}", content))
                continue
            extent = extent_now(content)
            if extent.bits:
                bad = True
            elif extent.top >= _NEAR[content.dtype]:
                near = True
        if late:
            self._look_later(glance, late)
        if bad:
            self._suspect(glance, result, outputs)
        elif near:
            self._remember_near(glance, outputs)
        if on_device and self._clamped(outputs):
            self._suspect_clamped(glance, result, outputs)

    def _is_harmless(self, glance: _Glance, outputs: Tensors) -> bool:
        """Whether it is a cast to a dtype that holds more, or to its own: most are."""
        if glance.plan.kind is not Kind.CASTS or self.taint or not (glance.inputs and outputs):
            return False
        source, target = glance.inputs[0][0], outputs[0][0]
        if source.dtype not in LIMITS or target.dtype not in LIMITS:
            return True
        same_place = source.is_cpu == target.is_cpu
        return same_place and LIMITS[source.dtype] <= LIMITS[target.dtype]

    def _sighting(self, glance: _Glance) -> Sighting:
        trail = glance.trail or trail_here(1)
        return Sighting(glance.plan, glance.number, self._tape.place.module, self.step, trail)

    def _note_uninitialised(self, outputs: Tensors) -> None:
        for tensor, _ in outputs:
            content = readable(tensor)
            if content is not None:
                storage = content.untyped_storage()
                self._uninitialised[storage._cdata] = StorageWeakRef(storage)

    # Judging a call

    def _suspect(self, glance: _Glance, result: Any, outputs: Tensors) -> None:
        """Something it returned is not finite: is it at fault?"""
        if self._ring.active:
            self.look()  # what a device has found comes first
        plan = glance.plan
        returned = look_at(_labelled(outputs, "output"))
        if plan.kind is Kind.COMMUNICATES:
            self._suspect_collective(glance, returned)
            return
        inputs = look_at(_labelled(tensors_in(glance.args, glance.kwargs), "input"))
        case = self._case_behind(inputs) or self._optimizer_behind(inputs)
        if case is not None:
            case.carry(Sighting(plan, glance.number, "", self.step, ()).name())
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

    def _suspect_collective(self, glance: _Glance, returned: list[Seen]) -> None:
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

    def _suspect_clamped(self, glance: _Glance, result: Any, outputs: Tensors) -> None:
        """The chip clamps what overflows, and its flag says that something did."""
        inputs = look_at(_labelled(tensors_in(glance.args, glance.kwargs), "input"))
        returned = look_at(_labelled(outputs, "output"))
        case = self._case_behind(inputs, any_value=True)
        if case is not None:
            case.carry(Sighting(glance.plan, glance.number, "", self.step, ()).name())
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

    def _optimizer_behind(self, inputs: list[Seen]) -> Case | None:
        """An optimizer that left a parameter bad, which shows when it is next used: parameters are
        not looked at after every step, that would read all of them once more."""
        for each in inputs:
            if each.bits and (found := self._writer_of(each.tensor)) is not None:
                sighting, case = found
                if case is None:
                    return self._blame_optimizer(sighting, [each])
        return None

    def _reading_spoiled(self, inputs: list[Seen]) -> str | None:
        """Why a call is reported that uses a parameter which an earlier step has spoiled."""
        for each in inputs:
            found = self._writer_of(each.tensor) if each.bits else None
            if found is not None and found[1] is not None:
                case = found[1]
                return (
                    f"it reads {each.label}, a parameter that {case.name} has spoiled in step "
                    f"{case.sighting.step}"
                )
        return None

    def _writer_of(self, content: torch.Tensor) -> tuple[Sighting, Case | None] | None:
        key = content.untyped_storage()._cdata
        for reference, sighting, case in reversed(self._stepped):
            optimizer = reference()
            for parameter in _parameters(optimizer) if optimizer is not None else ():
                held = readable(parameter)
                if held is not None and held.untyped_storage()._cdata == key:
                    return sighting, case
        return None

    def _blame_optimizer(self, sighting: Sighting, bad: list[Seen]) -> Case | None:
        if self._watcher.is_full:
            return None
        shape = "x".join(str(length) for length in bad[0].facts["shape"])
        count = bad[0].facts["nan"] + bad[0].facts["inf"]
        reason = (
            f"the gradients are finite, and {count} numbers of a parameter ({shape}, "
            f"{bad[0].facts['dtype']}) are not after it"
        )
        metrics = {f"parameter.{n}": each.facts for n, each in enumerate(bad)}
        case = Case(sighting, "forward", reason, metrics, None)
        self._spoil(bad, case)
        self._watcher.add(case, pending=False)
        return case

    def look_at_parameters(self) -> None:
        """The watch ends: nothing will use the parameters any more."""
        with Quiet():
            for reference, sighting, case in self._stepped:
                optimizer = reference()
                if optimizer is None or case is not None or sighting.step < self.step - 1:
                    continue
                tensors = [(p, (str(n),)) for n, p in enumerate(_parameters(optimizer))]
                contents = [(t, p) for t, p in tensors if self._looks_now(t)]
                bad = [each for each in contents if extent_now(_content(each[0])).bits]
                if bad and self.taint.case_of(_content(bad[0][0])) is None:
                    self._blame_optimizer(sighting, look_at(_labelled(bad[:8], "parameter")))
        self._stepped.clear()

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
        glance: _Glance,
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
        case.pending = in_backward or _made_by_scaler(sighting.trail)
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
        self, glance: _Glance, sighting: Sighting, result: Any, *, weakly: bool
    ) -> Callable[[], bool]:
        """What puts a call into the capture; `weakly`: it keeps nothing alive that the call made,
        for that it goes away is a sign that all is well."""
        names, frames = sighting.names(), _frames(sighting)
        args, kwargs = glance.args, glance.kwargs
        made, written = _weaken(result) if weakly else result, {} if weakly else glance.written

        def write() -> bool:
            try:
                returned = _recover(made)
            except LookupError:
                returned = None
            write_forward(self._tape, names, frames, args, kwargs, returned, written)
            return True

        return write

    def _wake(self, case: Case) -> None:
        """An infinity that may have been meant has done harm."""
        if case in self._asleep:
            self._asleep.remove(case)
            if not self._watcher.is_full:
                self._watcher.add(case, pending=case.pending)

    def wake_living(self) -> None:
        """The step ends: an infinity that is still there was not thrown away."""
        for case in list(self._asleep):
            if self.taint.is_alive(case):
                self._wake(case)
        self._hindsight.wake_living(self._ring)

    def _spoil(self, tensors: list[Seen], case: Case, *, any_value: bool = False) -> None:
        for each in tensors:
            if each.bits or any_value:
                self.taint.add(each.tensor, case)

    def _remember_near(self, glance: _Glance, outputs: Tensors) -> None:
        inputs = look_at(_labelled(tensors_in(glance.args, glance.kwargs), "input"))
        if any(each.top >= each.limit for each in inputs):
            return  # a mask: the lowest number of its dtype, on purpose
        name = Sighting(glance.plan, glance.number, "", self.step, ()).name()
        for each in look_at(_labelled(outputs, "output")):
            self._latent.see(f"{name}.{each.label}", self.step, each.top, each.limit)

    def _clamped(self, outputs: Tensors) -> bool:
        """Whether the device says that something was clamped since last asked."""
        flag = self._flag
        if flag is None and outputs:
            flag = self._flag = device_layer(outputs[0][0].device).overflow_flag
        if flag is None or not flag.is_needed() or not self._flag_is_free(outputs):
            return False
        if not flag.is_raised():
            return False
        flag.clear()
        return True

    def _flag_is_free(self, outputs: Tensors) -> bool:
        contents = [readable(tensor) for tensor, _ in outputs]
        return any(each is not None and self._is_immediate(each) for each in contents)

    # On a device: later

    def _look_later(self, glance: _Glance, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Note the call; what it made is known when the device has got there."""
        moves = glance.plan.kind is Kind.PASSES
        noted = glance.noted
        glance.trail = glance.trail or trail_here(1, BRIEF)
        event = Event(
            self._sighting(glance),
            inputs=self._note_memory(glance.inputs) if noted is None else noted,
            told=scalar_bits(glance.args, glance.kwargs),
            scaler=torch._C._current_graph_task_id() != -1,
        )
        for label, content in outputs:
            self._ring.hold(event, label, content, flag=not moves)
        self._ring.add(event)
        if self._ring.is_due:
            self.look()

    def look(self) -> None:
        """Look at what devices have found since the last look."""
        if not self._ring.active:
            return
        with Quiet():
            clamped = False
            if self._flag is not None and self._flag.is_needed():
                clamped = self._flag.is_raised()
                if clamped:
                    self._flag.clear()
            events, extents = self._ring.take()
            self._hindsight.go_through(events, extents, clamped)

    def _found_late(self, case: Case, pending: bool) -> bool:
        if self._watcher.is_full:
            return False
        self._watcher.add(case, pending=pending or _made_by_scaler(case.sighting.trail))
        return True

    # Backward

    def backward_begins(self, roots: Any) -> None:
        """Backward starts from these tensors."""
        if torch._C._current_graph_task_id() != -1:
            return  # inside another one: a checkpoint's
        self._pass_case = None
        with Quiet():
            tensors = [root for root in roots if isinstance(root, torch.Tensor)]
            nodes = [(root, root.grad_fn) for root in tensors]
            functions = [(r, node) for r, node in nodes if isinstance(node, BackwardCFunction)]
            self._watch_functions(functions)
            for root in tensors:
                content = readable(root)
                if content is None:
                    continue
                if not self._is_immediate(content):
                    event = Event(None, inputs=self._ring.inputs([("loss", content)]), note="loss")
                    self._ring.add(event)
                    continue
                case = self.taint.case_of(content) if extent_now(content).bits else None
                if case is not None:
                    case.reached = "the loss"
                    self._pass_case = case
                    self._wake(case)

    def _watch_functions(self, functions: list[tuple[torch.Tensor, Any]]) -> None:
        """Custom autograd.Functions: `apply` is no torch call, but their node is in the graph."""
        for _, node in functions:
            made = (threading.get_ident(), node._sequence_nr())
            if made in self._functions:
                continue
            self._functions.add(made)
            kind = getattr(type(node), "_forward_cls", type(node))
            api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            number = self._tape.counter.next(api)
            plan = plan_for(api)
            sighting = Sighting(plan, number, self._tape.place.module, self.step, trail_here(2))
            self._listen(trace_function(node), sighting, None, frozenset())

    def _watch_backward(self, glance: _Glance, outputs: Tensors) -> None:
        assert glance.edges is not None
        trace = trace_call(outputs, glance.edges)
        if trace.boundary:
            glance.trail = glance.trail or trail_here(1, BRIEF)
            leaves = frozenset(path for _, path in glance.edges.leaves.values())
            self._listen(trace, self._sighting(glance), _Remembered(glance), leaves)

    def _listen(
        self,
        trace: Trace,
        sighting: Sighting,
        forward: _Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        listener = _Listener(self, sighting, forward, leaves)
        boundary = trace.boundary
        for node, spots in trace.outputs.items():
            if node not in boundary:
                listener.waits = True
                if node._sequence_nr() != LEAF:
                    node.register_prehook(_Incoming(listener, spots))
        listener.nodes = len(boundary)
        for node, spots in boundary.items():
            node.register_hook(_Outgoing(listener, spots, trace.outputs.get(node)))

    def gradients(
        self,
        listener: _Listener,
        spots: list[Spot],
        grads: Gradients,
        received: dict[Path, torch.Tensor],
    ) -> None:
        """Backward leaves a call: look at what it sends on."""
        late: list[tuple[str, torch.Tensor]] = []
        bad = False
        for position, path, _ in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is None:
                continue
            content = readable(grad)
            if content is None:
                continue
            label = f"output.{'.'.join(path)}"
            if not self._is_immediate(content):
                late.append((label, content))
                continue
            extent = extent_now(content)
            if not extent.bits and path in listener.leaves:
                storage = content.untyped_storage()
                seen = (StorageWeakRef(storage), _version(content))
                self._seen_gradients[storage._cdata] = seen
            if extent.bits:
                bad = True
            elif extent.top >= _NEAR[content.dtype]:
                name = f"{listener.sighting.name('backward')}.{label}"
                self._latent.see(name, self.step, extent.top, LIMITS[content.dtype])
        if late:
            event = Event(listener.sighting, "backward", scaler=True)
            for label, content in late:
                self._ring.hold(event, label, content)
            self._ring.add(event)
            if self._ring.is_due:
                self.look()
        if bad or self._clamped_backward(spots, grads):
            self._suspect_backward(listener, spots, grads, received, clamped=not bad)

    def _clamped_backward(self, spots: list[Spot], grads: Gradients) -> bool:
        if all(grad is None or grad.is_cpu for grad in grads):
            return False
        return self._clamped(_sent(spots, grads))

    def _suspect_backward(
        self,
        listener: _Listener,
        spots: list[Spot],
        grads: Gradients,
        received: dict[Path, torch.Tensor],
        *,
        clamped: bool,
    ) -> None:
        sighting = listener.sighting
        sent = {path: tensor for tensor, path in _sent(spots, grads)}
        case = self._pass_case
        if case is None and self.taint:
            known = [self.taint.case_of(content) for content in _contents(_sent(spots, grads))]
            case = next((each for each in known if each is not None), None)
        if case is not None:
            self._pass_case = case
            case.carry(sighting.name("backward"))
            self._wake(case)
            return
        if self._watcher.is_full:
            return
        seen = look_at(_labelled([(t, p) for p, t in sent.items()], "output"))
        came = look_at(_labelled([(t, p) for p, t in received.items()], "input"))
        reason = _backward_reason(seen, came, clamped)
        here = Sighting(sighting.plan, sighting.number, sighting.module, self.step, sighting.trail)
        forward = listener.forward
        same_step = sighting.step == self.step

        def write() -> bool:
            whole = forward is not None and same_step and forward.write(self._tape, here)
            write_backward(self._tape, here.names("backward"), _frames(here), received, sent)
            return whole

        metrics = {each.label: each.facts for each in (*came, *seen)}
        case = self._pass_case = Case(here, "backward", reason, metrics, write)
        self._watcher.add(case, pending=True)

    # Optimizers

    def optimizer_begins(self, optimizer: Optimizer) -> tuple[Sighting, bool]:
        """Look at the gradients; whether one of them is bad."""
        self._watcher.optimizer_begins(optimizer)
        kind = type(optimizer)
        api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
        number = self._tape.counter.next(api)
        sighting = Sighting(plan_for(api), number, "", self.step, trail_here(1))
        if getattr(optimizer, "found_inf", None) is not None:
            return sighting, True  # a fused optimizer under a GradScaler: it looks itself
        bad = self._look_at_group(optimizer, sighting, "gradients")
        if bad and self._watcher.is_due:
            self._watcher.optimizer_begins(optimizer)
        return sighting, bad

    def optimizer_ended(self, optimizer: Optimizer, sighting: Sighting, was_bad: bool) -> None:
        """Parameters were written; on a device they are looked at, on the host when next used."""
        case = self._pass_case if was_bad else None
        self._stepped.append((weakref.ref(optimizer), sighting, case))
        self._look_at_group(optimizer, sighting, "parameters")

    def _look_at_group(self, optimizer: Optimizer, sighting: Sighting, what: str) -> bool:
        bad: Tensors = []
        event: Event | None = None
        with Quiet():
            for number, parameter in enumerate(_parameters(optimizer)):
                tensor = parameter.grad if what == "gradients" else parameter
                content = readable(tensor) if tensor is not None else None
                if tensor is None or content is None:
                    continue
                if not self._is_immediate(content):
                    event = event or Event(sighting, note=what)
                    self._ring.hold(event, f"{what}.{number}", content)
                elif what == "gradients" and self._is_bad_gradient(content):
                    bad.append((tensor, (str(number),)))
            if event is not None:
                self._ring.add(event)
            if bad:
                self._suspect_gradients(sighting, bad)
        return bool(bad)

    def _is_bad_gradient(self, content: torch.Tensor) -> bool:
        """Not looked at again where backward sent it just so."""
        known = self._seen_gradients.get(content.untyped_storage()._cdata)
        if known is not None and known[1] == _version(content):
            return False
        return extent_now(content).bits != 0

    def _suspect_gradients(self, sighting: Sighting, bad: Tensors) -> None:
        case = self._pass_case
        if case is None:
            found = [self.taint.case_of(content) for content in _contents(bad)]
            case = next((each for each in found if each is not None), None)
        if case is None and not self._watcher.is_full:
            seen = look_at(_labelled(bad[:8], "gradients"))
            why = "no call of backward made them: another rank, a hook, or their sum"
            reason = f"{len(bad)} gradients it is given are not finite, and {why}"
            case = Case(sighting, "forward", reason, {s.label: s.facts for s in seen}, None)
            self._watcher.add(case, pending=False)
        if case is not None:
            self._pass_case = case
            case.reached = f"{len(bad)} gradients of parameters"
            for content in _contents(bad):
                self.taint.add(content, case)


class OptimizerSight(OptimizerHooks):
    """The hooks around optimizers' steps: what happens inside is one call."""

    def __init__(
        self,
        tape: Tape,
        parameter_names: Callable[[], dict[int, str]],
        on_step: Callable[[Optimizer], None],
        sight: Sight,
    ) -> None:
        super().__init__(tape, parameter_names, on_step)
        self._sight = sight
        self._begun: dict[int, tuple[Sighting, bool]] = {}

    @property
    def stepping(self) -> bool:
        """Whether an optimizer is at work."""
        return bool(self._begun)

    def _begin(self, optimizer: Optimizer) -> OpenCall | None:
        self._begun.clear()
        sighting, bad = self._sight.optimizer_begins(optimizer)
        self._begun[id(optimizer)] = sighting, bad
        return OpenCall(sighting.names(), "structure", sighting.step)

    def _end(self, optimizer: Optimizer, call: OpenCall) -> None:
        sighting, bad = self._begun.pop(id(optimizer), (None, False))
        self._begun.clear()
        if sighting is not None:
            self._sight.optimizer_ended(optimizer, sighting, bad)


class _Remembered:
    """What a call was given, held weakly: whoever needs it for backward keeps it alive."""

    __slots__ = ("_args", "_kwargs", "_versions")

    def __init__(self, glance: _Glance) -> None:
        self._args = tuple(_weaken(arg) for arg in glance.args)
        self._kwargs = {key: _weaken(value) for key, value in glance.kwargs.items()}
        self._versions = [_version(tensor) for tensor, _ in glance.inputs]
        if glance.written:
            self._versions = []  # what it was given is no more

    def write(self, tape: Tape, sighting: Sighting) -> bool:
        """Put the forward call into the capture; False where something of it is gone."""
        try:
            args = tuple(_recover(arg) for arg in self._args)
            kwargs = {key: _recover(value) for key, value in self._kwargs.items()}
        except LookupError:
            return False
        if [_version(tensor) for tensor, _ in tensors_in(args, kwargs)] != self._versions:
            return False
        write_forward(tape, sighting.names(), _frames(sighting), args, kwargs, None, {})
        return True


class _Listener:
    """Follows one call into backward; it holds no node of the graph."""

    __slots__ = ("forward", "leaves", "left", "nodes", "received", "sight", "sighting", "waits")

    def __init__(
        self,
        sight: Sight,
        sighting: Sighting,
        forward: _Remembered | None,
        leaves: frozenset[Path],
    ) -> None:
        self.sight, self.sighting, self.forward = sight, sighting, forward
        self.leaves = leaves  # inputs that are parameters, or other leaves
        self.waits = False  # for gradients that come in at another node than they leave from
        self.received: dict[Path, torch.Tensor] = {}
        self.nodes = self.left = 0

    def incoming(self, spots: list[Spot] | None, grads: Gradients) -> dict[Path, torch.Tensor]:
        found = {}
        for number, path, window in spots or ():
            grad = grads[number] if number < len(grads) else None
            if grad is not None:
                found[path] = grad if window is None else window.cut(grad)
        return found


class _Incoming:
    """A prehook on a node of an output: keeps the gradient until the call's backward is over."""

    __slots__ = ("_listener", "_spots")

    def __init__(self, listener: _Listener, spots: list[Spot]) -> None:
        self._listener, self._spots = listener, spots

    def __call__(self, grads: Gradients) -> None:
        listener = self._listener
        if not listener.sight.on:
            return
        with Quiet():
            listener.received |= listener.incoming(self._spots, grads)
            listener.left = listener.nodes


class _Outgoing:
    """A hook on a node at the edge of an input: the call sends gradients on."""

    __slots__ = ("_listener", "_outputs", "_spots")

    def __init__(self, listener: _Listener, spots: list[Spot], outputs: list[Spot] | None) -> None:
        self._listener, self._spots, self._outputs = listener, spots, outputs

    def __call__(self, grads: Gradients, incoming: Gradients) -> None:
        listener = self._listener
        if not listener.sight.on:
            return
        try:
            with Quiet():
                received = listener.received
                if self._outputs is not None:
                    received = received | listener.incoming(self._outputs, incoming)
                listener.sight.gradients(listener, self._spots, grads, received)
                listener.left -= 1
                if listener.left <= 0:
                    listener.received = {}
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            listener.sight._watcher.trouble(listener.sighting.name("backward"), error)


def _backward_reason(sent: list[Seen], came: list[Seen], clamped: bool) -> str:
    if clamped:
        return "the chip clamps, and its overflow flag was raised in its backward"
    worst = max(sent, key=lambda each: each.facts["nan"] + each.facts["inf"])
    facts = worst.facts
    count, word = (facts["nan"], "NaN") if facts["nan"] else (facts["inf"], "infinite")
    label = worst.label.replace("output.", "input.")
    numbers = "1 number in the gradient" if count == 1 else f"{count} numbers in the gradient"
    verb = "is" if count == 1 else "are"
    made = f"{numbers} of {label} ({facts['dtype']}) {verb} {word}"
    if not came:
        return made
    if bits_of(came):
        return (
            f"it is given a gradient that is not finite though none was sent: the sum of the "
            f"gradients that meet there overflows, or the program began with it; {made}"
        )
    top = max(each.top for each in came)
    return f"the gradients it is given are finite (up to {top:.4g}), {made}"


def _sent(spots: list[Spot], grads: Gradients) -> Tensors:
    found: Tensors = []
    for position, path, window in spots:
        grad = grads[position] if position < len(grads) else None
        if grad is not None:
            found.append((grad if window is None else window.cut(grad), path))
    return found


def _content(tensor: torch.Tensor) -> torch.Tensor:
    content = readable(tensor)
    assert content is not None
    return content


def _contents(tensors: Tensors) -> list[torch.Tensor]:
    return [each for each in (readable(tensor) for tensor, _ in tensors) if each is not None]


def _labelled(tensors: Iterable[tuple[torch.Tensor, Path]], side: str) -> list[Any]:
    return [(f"{side}.{'.'.join(path)}", tensor) for tensor, path in tensors]


def _is_under_way(result: Any) -> bool:
    """Whether a collective goes on after it returned: it gave a Work to wait for."""
    works = result if isinstance(result, list | tuple) else [result]
    return any(hasattr(work, "is_completed") for work in works)


def _live(glance: _Glance) -> Tensors:
    return [(tensor, path) for path, tensor in glance.written.items()]


def _copied(value: Any, storages: set[int] | None = None) -> Any:
    """A copy of the tensors in an argument; of those in these storages, where some are given."""
    if isinstance(value, torch.Tensor):
        if storages is not None:
            content = readable(value)
            if content is None or content.untyped_storage()._cdata not in storages:
                return value
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item, storages) for item in value)
    return value


def _weaken(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    if type(value) in (list, tuple):
        return type(value)(_weaken(item) for item in value)
    return value


def _recover(value: Any) -> Any:
    if isinstance(value, weakref.ref):
        tensor = value()
        if tensor is None:
            raise LookupError("a tensor is gone")
        return tensor
    if type(value) in (list, tuple):
        return type(value)(_recover(item) for item in value)
    return value


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _frames(sighting: Sighting) -> tuple[str, ...]:
    return render(sighting.trail)


def _made_by_scaler(trail: Trail) -> bool:
    """Whether a GradScaler made the call: it multiplies the loss until something overflows."""
    return any(code.co_filename.endswith(_SCALER_FILE) for code, _ in trail[:8])


def _in_transform() -> bool:
    """Whether torch.func is at work: its wrappers have no graph that can be walked."""
    return bool(torch._C._functorch.peek_interpreter_stack())
