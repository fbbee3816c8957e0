"""Level L1: every public torch call of the program, seen by a function mode."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tensorprobe.capture import compiled
from tensorprobe.capture.engine import InBackward
from tensorprobe.capture.hidden_state import WRITES_STATISTICS, writes_in_place
from tensorprobe.capture.naming import ApiName, CallNames, Namer, is_noise, name_parts, never_warns
from tensorprobe.capture.spelling import Spelling
from tensorprobe.capture.stand_ins import StandIns, is_tracing
from tensorprobe.capture.steps import optimizers_in_round
from tensorprobe.capture.tape import Tape
from tensorprobe.capture.tracebacks import clean

# Torch's own changes the filters of warnings, so that Python forgets which it has shown: here its
# table is made, when nothing has been recorded yet, and it is read without that.
resolve_name(torch.relu)
name_of = inspect.unwrap(resolve_name)
# Calls that tell the recorder something even where calls are not recorded.
SCALER_UPDATE = "_amp_update_scale_"
_is_grad_enabled = torch.is_grad_enabled
_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling  # true of the code that dynamo reads, never of ours
_MAX_SILENT = 20_000  # functions made anew for every call would fill the table without end
_DISPATCH_DEPTH = 12  # frames between a __torch_dispatch__ and the operators it calls


def below_backward() -> bool:
    """Whether a dispatch mode or tensor subclass calls an operator on behalf of backward.

    Forward calls take our mode off the stack, so what happens below them is not seen; backward
    does not, and torch tells nobody how deep in its dispatcher a call is made.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DISPATCH_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


# What the calls of a function are named; None where they have no name, False where torch never
# warns of them either.
Plan = ApiName | Literal[False] | None


class UserCalls(InBackward, TorchFunctionMode):
    """Hands each torch call that the program makes to `called`, by its name.

    On the stack it disturbs nothing, and torch pops it inside each call: the calls that a
    functional written in Python makes are part of that one call, and what a tool itself does in
    `called` never comes back here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._namer = Namer(name_of)
        self._plans: dict[Any, Plan] = {}
        self.stand_ins = StandIns()
        self.make = self.stand_ins.make
        self.passes_on = False  # whether `passed_on` is to be asked
        self.swift: Any = None  # as `Tape.plain_calls` says

    def called(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call: make it, and return what it returns."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_traced():  # dynamo traces this line: leave no mark in its graph
            return func(*args) if kwargs is None else func(*args, **kwargs)
        try:
            if self.swift is not None:  # most calls are recorded in C++
                result = self.swift(self, func, args, kwargs)
                if result is not self:
                    return result
            try:
                api = self._plans[func]
            except KeyError:
                api = self._plan(func)
            except Exception:  # noqa: BLE001 a callable whose hash or comparison raises: no name
                api = None
            if kwargs is None:
                kwargs = {}
            if not api and not self.passes_on:
                if api is None or is_tracing():
                    return self.make(func, args, kwargs)
                return func(*args, **kwargs)
            if _is_compiling() or (self.dispatch_depth and self.is_in_handler()):
                return self.make(func, args, kwargs)
            if is_tracing():
                return self.traced(func, args, kwargs)
            if not api or (api.prefix == "Aten" and below_backward()):
                return self.passed_on(func, args, kwargs)
            return self.called(api, func, args, kwargs)
        except BaseException as error:
            clean(error)
            raise

    def passed_on(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call too small to have a name: a property, a size. There are more of these."""
        return self.make(func, args, kwargs)

    def traced(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call that torch.jit.trace follows: whatever is asked of a tensor would be traced."""
        return self.make(func, args, kwargs)

    def _plan(self, func: Any) -> Plan:
        api = self._namer(func)
        plan: Plan = api
        if is_noise(api):
            plan = False if never_warns(api) else None
        self._plans[func] = plan
        return plan


class QuietMode(InBackward, TorchFunctionMode):
    """Records no call, but sees those that tell a recorder of modules or operators something.

    Every small call of the program comes by here, so those without a meaning are passed on from the
    first frame: torch's own way to it is dear enough.
    """

    def __init__(self, tape: Tape, *, on_scaler_update: Callable[[Iterable[int]], None]) -> None:
        super().__init__()
        self._tape = tape
        self._on_scaler_update = on_scaler_update
        self._namer = Namer(name_of)
        self._make = StandIns().make
        self._silent: set[Any] = set()  # functions that tell nothing, unless they are given `out`

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_traced():  # dynamo traces this line: leave no mark in its graph
            return func(*args) if kwargs is None else func(*args, **kwargs)
        try:
            try:
                silent = func in self._silent
            except Exception:  # noqa: BLE001 a callable whose hash or comparison raises: no name
                silent = True
            kwargs = kwargs or {}
            if silent and not is_tracing():
                return self._pass_by(func, args, kwargs)
            if silent or is_tracing() or self.is_in_handler() or _is_compiling():
                return self._make(func, args, kwargs)
            api = self._namer(func)
            updates = api.api == SCALER_UPDATE
            if not updates and (is_noise(api) or not writes_in_place(api)):
                if len(self._silent) >= _MAX_SILENT:
                    self._silent.clear()
                self._silent.add(func)
                return self._pass_by(func, args, kwargs)
            result = self._make(func, args, kwargs)
            if self._tape.recording:
                self._tape.forget_written(args, kwargs)
            if updates:
                self._on_scaler_update(optimizers_in_round())
            return result
        except BaseException as error:
            clean(error)
            raise

    def _pass_by(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call that tells nothing, unless it is given `out`."""
        result = self._make(func, args, kwargs)
        if "out" in kwargs and self._tape.recording:
            self._tape.forget_written(args, kwargs)
        return result


def _describe_plain(api: ApiName, *, spells: bool) -> tuple[str, str, str] | None:
    """What the calls of an API are named, around their number, and its op; None where `CallMode`
    does something more of them."""
    if api.prefix in ("Aten", "Distributed") or api.api in ("__deepcopy__", SCALER_UPDATE):
        return None
    if api.op in WRITES_STATISTICS or (spells and api.prefix == "Tensor"):
        return None
    return (*name_parts(api, "forward"), api.op)


class CallMode(UserCalls):
    """Records each call."""

    def __init__(
        self,
        tape: Tape,
        *,
        on_scaler_update: Callable[[Iterable[int]], None],
        on_passed_error: Callable[[ApiName, Any, Any, Exception], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_passed_error = on_passed_error  # of calls that are too small to be recorded
        self.passes_on = on_passed_error is not None
        self._tape = tape
        self._on_scaler_update = on_scaler_update
        self._runs = compiled.Runs()
        self._spell = Spelling(__file__) if tape.config.operators == "dunder" else None
        if not self.passes_on:
            describe = functools.partial(_describe_plain, spells=self._spell is not None)
            self.swift = tape.plain_calls(self._plans, describe, self.stand_ins)

    def called(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tape = self._tape
        compiles = compiled.may_run()
        names = None
        if not tape.recording or tape.only is not None or (compiles and compiled.in_backward()):
            pass
        elif compiles and self._is_compiled():
            return self.make(func, args, kwargs)
        else:
            if self._spell is not None and api.prefix == "Tensor":
                api = self._spell(api, func, args, sys._getframe(1))
            name, module = tape.counter.next_name(api), tape.place.module
            # as `select`, which would be one frame more
            names = (
                CallNames(api, name, module) if tape.everything else tape.select(api, name, module)
            )
        if names is None:
            result = self.make(func, args, kwargs)
            # what it writes to may be recorded later in the step
            if tape.recording and (writes_in_place(api) or "out" in kwargs):
                tape.forget_written(args, kwargs)
        else:
            grad = _is_grad_enabled() and not _interpreter_stack()
            shown = args[:1] if api.api == "__deepcopy__" else args  # the rest is copy's own memo
            call = tape.begin(names, shown, kwargs, depth=2, grad=grad)
            if call is None:
                result = self.make(func, args, kwargs)
            else:
                try:  # as Tape.run, which would be one frame more
                    result = self.make(func, args, kwargs)
                except BaseException as error:
                    tape.raised(call, error)
                    raise
                if api.prefix != "Distributed" or not tape.await_work(call, result):
                    tape.end(call, result)
        if api.api == SCALER_UPDATE:
            self._on_scaler_update(optimizers_in_round())
        return result

    def passed_on(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        try:
            return self.make(func, args, kwargs)
        except Exception as error:
            if self._on_passed_error is not None:
                self._on_passed_error(self._namer(func), args, kwargs, error)
            raise

    def traced(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        self._tape.not_traced += self._tape.recording
        return self.make(func, args, kwargs)

    def _is_compiled(self) -> bool:
        """Whether this call is the inside of a compiled part, which is written down as one call."""
        run = compiled.running(up=4)
        if run is None:
            self._runs.outside()
            return False
        if self._runs.is_new(run) and not run.has_node:
            self._record_compiled(run)
        return True

    def _record_compiled(self, run: compiled.Run) -> None:
        """Write down, as one call, a compiled part that has begun to run."""
        name = compiled.name_of(run)
        api = ApiName("Compiled", name, name)
        names = self._tape.select(api, self._tape.counter.next_name(api), self._tape.place.module)
        if names is None or not names.wanted:
            return
        call = self._tape.begin(names, run.entry.f_locals.get("args", ()), depth=5)
        if call is not None:
            call.notes.append(compiled.NOTE)
            self._tape.end(call, None)
