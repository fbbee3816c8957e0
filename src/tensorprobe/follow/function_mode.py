"""Every public torch call of the program, seen by a function mode."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tensorprobe import torch_versions
from tensorprobe.follow import compiled
from tensorprobe.follow.engine import InBackward
from tensorprobe.follow.hidden_state import may_write
from tensorprobe.follow.mode_stack import add_below, remove_mode
from tensorprobe.follow.naming import Namer, is_noise, never_warns
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.stand_ins import StandIns, is_tracing
from tensorprobe.follow.steps import optimizers_in_round
from tensorprobe.follow.tracebacks import clean

# Torch's own changes the filters of warnings, so that Python forgets which it has shown: here its
# table is made, when nothing has been recorded yet, and it is read without that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch 2.1 asks for names of its own that it has deprecated
    resolve_name(torch.relu)
name_of = inspect.unwrap(resolve_name)
# Calls that tell the recorder something even where calls are not recorded.
SCALER_UPDATE = "_amp_update_scale_"
_is_compiling = torch_versions.is_compiling
_is_traced = torch_versions.is_dynamo_compiling
_MAX_SILENT = 20_000  # functions made anew for every call would fill the table without end
_DISPATCH_DEPTH = 12  # frames between a __torch_dispatch__ and the operators it calls


def below_backward(frame: FrameType | None) -> bool:
    """Whether `frame` calls an operator for a dispatch mode or tensor subclass in backward.

    Forward calls take our mode off the stack, so what happens below them is not seen; backward
    does not, and torch tells nobody how deep in its dispatcher a call is made.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    for _ in range(_DISPATCH_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


# Is told which optimizers a GradScaler has handled in the round that it ends, by identity.
OnScalerUpdate = Callable[[Iterable[int]], None]


class CallMode(InBackward, TorchFunctionMode):
    """Tells an observer of each torch call that the program makes.

    On the stack it disturbs nothing, and torch pops it inside each call: the calls that a
    functional written in Python makes are part of that one call, and what an observer itself calls
    never comes back here. `is_lowest` puts it below all other modes: they see the calls first.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        on_scaler_update: OnScalerUpdate | None = None,
        is_lowest: bool = False,
    ) -> None:
        super().__init__()
        self._observer = observer
        self._on_scaler_update = on_scaler_update
        self._is_lowest = is_lowest
        self._namer = Namer(name_of)
        # What the observer has planned for a function; None where its calls have no name, False
        # where torch never warns of them either.
        self.plans: dict[Any, Any] = {}
        self._operators: set[Any] = set()  # those of ATen, among the functions that have plans
        self._scaler: Any = None  # the function by which a GradScaler ends its round
        self._runs = compiled.Runs()
        self.stand_ins = StandIns()
        # Makes a call in C++, `(mode, func, args, kwargs)`, or gives the mode and has done nothing.
        self.swift: Any = None

    def __enter__(self) -> CallMode:
        if self._is_lowest:
            add_below(self)
        else:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_lowest:
            remove_mode(self)
        else:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_traced():  # dynamo traces this line: leave no mark in its graph
            return func(*args) if kwargs is None else func(*args, **kwargs)
        try:
            if self.swift is not None:  # most calls are made in C++
                result = self.swift(self, func, args, kwargs)
                if result is not self:
                    return result
            try:
                plan = self.plans[func]
            except KeyError:
                plan = self._plan(func)
            except Exception:  # noqa: BLE001 a callable whose hash or comparison raises: no name
                plan = None
            if kwargs is None:
                kwargs = {}
            frame = sys._getframe().f_back
            sees_small = self._observer.sees_small_calls
            if not plan and not sees_small:
                if plan is None or is_tracing():
                    return self.stand_ins.make(func, args, kwargs, frame)
                return func(*args, **kwargs)
            if _is_compiling() or (self.dispatch_depth and self.is_in_handler()):
                return self.stand_ins.make(func, args, kwargs, frame)
            if is_tracing():
                self._observer.traced()
                return self.stand_ins.make(func, args, kwargs, frame)
            if plan and not (func in self._operators and below_backward(frame)):
                return self._called(plan, func, args, kwargs, frame)
            try:
                return self.stand_ins.make(func, args, kwargs, frame)
            except Exception as error:
                if sees_small:
                    observer = self._observer
                    observer.small_call_raised(self._namer(func), args, kwargs, error, frame)
                raise
        except BaseException as error:
            clean(error)
            raise

    def _called(
        self, plan: Any, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType | None
    ) -> Any:
        """Make a call that has a plan, while nothing is traced, and tell the observer."""
        observer = self._observer
        if not observer.on:
            call = None
        elif not compiled.may_run():
            call = observer.begin(plan, func, args, kwargs, frame)
        elif compiled.in_backward():
            call = observer.begin_hidden(plan, args, kwargs)
        elif self._is_compiled(frame):
            return self.stand_ins.make_untraced(func, args, kwargs, frame)
        else:
            call = observer.begin(plan, func, args, kwargs, frame)
        if call is None:
            result = self.stand_ins.make_untraced(func, args, kwargs, frame)
        else:
            try:
                if observer.makes_calls:
                    make = partial(self.stand_ins.make_untraced, frame=frame)
                    result = observer.make(call, func, args, kwargs, make)
                else:
                    result = self.stand_ins.make_untraced(func, args, kwargs, frame)
            except BaseException as error:
                observer.raised(call, error)
                raise
            observer.end(call, result)
        if func is self._scaler and self._on_scaler_update is not None:
            self._on_scaler_update(optimizers_in_round(frame))
        return result

    def _is_compiled(self, frame: FrameType | None) -> bool:
        """Whether a compiled part makes this call; it is told when it begins."""
        run = compiled.running(frame)
        if run is None:
            self._runs.outside()
            return False
        if self._runs.is_new(run) and not run.has_node:
            self._observer.compiled_began(run, frame)
        return True

    def _plan(self, func: Any) -> Any:
        api = self._namer(func)
        if is_noise(api):
            plan: Any = False if never_warns(api) else None
        else:
            plan = self._observer.plan(api)
            if api.is_operator:
                self._operators.add(func)
            if api.api == SCALER_UPDATE:
                self._scaler = func
        self.plans[func] = plan
        return plan


class WriteMode(InBackward, TorchFunctionMode):
    """Tells an observer of calls that write to their arguments, and of no others.

    Every small call of the program comes by here, so those without a meaning are passed on from the
    first frame: torch's own way to it is dear enough.
    """

    def __init__(self, observer: Observer, *, on_scaler_update: OnScalerUpdate) -> None:
        super().__init__()
        self._observer = observer
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
            frame = sys._getframe().f_back
            if silent and not is_tracing():
                return self._pass_by(func, args, kwargs, frame)
            if silent or is_tracing() or self.is_in_handler() or _is_compiling():
                return self._make(func, args, kwargs, frame)
            api = self._namer(func)
            updates = api.api == SCALER_UPDATE
            if not updates and (is_noise(api) or not may_write(api)):
                if len(self._silent) >= _MAX_SILENT:
                    self._silent.clear()
                self._silent.add(func)
                return self._pass_by(func, args, kwargs, frame)
            result = self._make(func, args, kwargs, frame)
            if self._observer.on:
                self._observer.wrote(api, args, kwargs)
            if updates:
                self._on_scaler_update(optimizers_in_round(frame))
            return result
        except BaseException as error:
            clean(error)
            raise

    def _pass_by(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType | None
    ) -> Any:
        """A call that tells nothing, unless it is given `out`."""
        result = self._make(func, args, kwargs, frame)
        if "out" in kwargs and self._observer.on:
            self._observer.wrote(self._namer(func), args, kwargs)
        return result


# A compiled part that is left for a moment, by a graph break, calls torch with dynamo still on.
compiled.traced_only(CallMode.__torch_function__)
