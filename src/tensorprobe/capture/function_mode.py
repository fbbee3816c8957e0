"""Level L1: every public torch call of the program, seen by a function mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from tensorprobe.capture.naming import ApiName, Namer, is_noise
from tensorprobe.capture.steps import optimizers_in_round
from tensorprobe.capture.tape import Tape

# Calls that tell the recorder something even where calls are not recorded.
_SCALER_UPDATE = "_amp_update_scale_"


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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            torch.compiler.is_compiling()
        ):  # dynamo traces this very line: leave no mark in the graph
            return func(*args, **kwargs)
        if self.dispatch_depth > torch._C._len_torch_dispatch_stack():
            # Inside the handler of a dispatch mode that came by in backward: what a simulated
            # device, or another tool, does is not the program's call. In forward it is hidden too.
            return func(*args, **kwargs)
        try:
            api = self._plans[func]
        except KeyError:
            api = self._plan(func)
        except TypeError:  # a callable without a hash
            api = self._namer(func)
        if api is None:
            return func(*args, **kwargs)
        if not (self._record and self._tape.recording):
            result = func(*args, **kwargs)
        else:
            result = self._recorded(api, func, args, kwargs)
        if api.api == _SCALER_UPDATE:
            self._on_scaler_update(optimizers_in_round())
        return result

    def _plan(self, func: Any) -> ApiName | None:
        api = self._namer(func)
        plan = None if is_noise(api) else api
        self._plans[func] = plan
        return plan

    def _recorded(self, api: ApiName, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tape = self._tape
        names = tape.select(api, tape.counter.next(api), tape.place.module)
        if names is None:
            return func(*args, **kwargs)
        grad = torch.is_grad_enabled() and not torch._C._functorch.peek_interpreter_stack()
        call = tape.begin(names, args, kwargs, depth=2, grad=grad)
        if call is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            tape.raised(call, error)
            raise
        if api.prefix == "Distributed" and tape.await_work(call, result):
            return result
        tape.end(call, result)
        return result
