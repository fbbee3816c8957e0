"""Level L1: every public torch call of the program, seen by a function mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tensorprobe.capture import compiled
from tensorprobe.capture.hidden_state import writes_in_place
from tensorprobe.capture.naming import ApiName, Namer, is_noise
from tensorprobe.capture.steps import optimizers_in_round
from tensorprobe.capture.tape import Tape

# Calls that tell the recorder something even where calls are not recorded.
SCALER_UPDATE = "_amp_update_scale_"
_is_grad_enabled = torch.is_grad_enabled
_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_is_compiling = torch.compiler.is_compiling
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


class CallMode(TorchFunctionMode):
    """Records each call; on the stack it disturbs nothing, and torch pops it inside each call.

    So the calls that a functional written in Python makes are part of that one call, and what the
    recorder itself does never comes back here.
    """

    def __init__(
        self, tape: Tape, *, record: bool, on_scaler_update: Callable[[Iterable[int]], None]
    ) -> None:
        super().__init__()
        self._tape = tape
        self._record = record
        self._on_scaler_update = on_scaler_update
        self._namer = Namer(resolve_name)
        self._plans: dict[Any, ApiName | None] = {}
        self.dispatch_depth = 0  # dispatch modes on the stack while backward runs
        self._runs = compiled.Runs()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if _is_compiling():  # dynamo traces this line: leave no mark in its graph
            return func(*args, **kwargs)
        if self.dispatch_depth and self.dispatch_depth > torch._C._len_torch_dispatch_stack():
            # Inside the handler of a dispatch mode that came by in backward: what a simulated
            # device, or another tool, does is not the program's call. In forward it is hidden too.
            return func(*args, **kwargs)
        try:
            api = self._plans[func]
        except KeyError:
            api = self._plan(func)
        except Exception:  # noqa: BLE001 a callable whose hash or comparison raises: no name
            api = None
        if api is None or (api.prefix == "Aten" and below_backward()):
            return func(*args, **kwargs)
        if not (self._record and self._tape.recording):
            result = self._passed(api, func, args, kwargs)
        elif compiled.may_run():
            result = self._maybe_compiled(api, func, args, kwargs)
        else:
            result = self._recorded(api, func, args, kwargs)
        if api.api == SCALER_UPDATE:
            self._on_scaler_update(optimizers_in_round())
        return result

    def _plan(self, func: Any) -> ApiName | None:
        api = self._namer(func)
        plan = None if is_noise(api) else api
        self._plans[func] = plan
        return plan

    def _passed(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call that is not recorded; what it writes to may be recorded later in the step."""
        result = func(*args, **kwargs)
        if self._tape.recording and (writes_in_place(api) or "out" in kwargs):
            self._tape.forget_written(args, kwargs)
        return result

    def _maybe_compiled(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call in a program that compiles: it may be the inside of a compiled part."""
        if compiled.in_backward():
            return self._passed(api, func, args, kwargs)
        run = compiled.running()
        if run is None:
            self._runs.outside()
            return self._recorded(api, func, args, kwargs)
        if self._runs.is_new(run) and not run.has_node:
            self._record_compiled(run)
        return func(*args, **kwargs)

    def _record_compiled(self, run: compiled.Run) -> None:
        """Write down, as one call, a compiled part that has begun to run."""
        name = compiled.name_of(run)
        api = ApiName("Compiled", name, name)
        names = self._tape.select(api, self._tape.counter.next(api), self._tape.place.module)
        if names is None or not names.wanted:
            return
        call = self._tape.begin(names, run.entry.f_locals.get("args", ()), depth=4)
        if call is not None:
            call.notes.append(compiled.NOTE)
            self._tape.end(call, None)

    def _recorded(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tape = self._tape
        names = tape.select(api, tape.counter.next(api), tape.place.module)
        if names is None:
            return self._passed(api, func, args, kwargs)
        grad = _is_grad_enabled() and not _interpreter_stack()
        shown = args[:1] if api.api == "__deepcopy__" else args  # the rest is copy's own memo
        call = tape.begin(names, shown, kwargs, depth=2, grad=grad)
        if call is None:
            return func(*args, **kwargs)
        return tape.run(call, func, args, kwargs)
