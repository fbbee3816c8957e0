"""Every ATen and collective operator, below autograd, forward and backward alike."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.follow import compiled
from tensorprobe.follow.function_mode import SCALER_UPDATE
from tensorprobe.follow.hidden_state import writes_unsaid, written_arguments
from tensorprobe.follow.naming import ApiName, is_noise, operator_name
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.stand_ins import is_tracing
from tensorprobe.follow.tracebacks import clean

_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


_TRACER = "Tracer"
_is_off = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_off = torch._C._dispatch_tls_set_dispatch_key_excluded


def make_operator_call(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Make a call that a dispatch mode was given.

    torch switches torch.jit.trace off inside of a mode. An operator that leaves it to others to be
    traced, as convolution does, would become a constant of the graph.
    """
    if not is_tracing():
        return _call(func, args, kwargs)
    was_off = _is_off(_TRACER)
    _set_off(_TRACER, False)
    try:
        return _call(func, args, kwargs)
    finally:
        _set_off(_TRACER, was_off)


def _call(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Make a call; a number that is a tensor, as in a traced graph, comes to a mode as a number,
    and few operators take it back."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "Unable to cast" not in str(error):
            raise
        tensors = tuple(map(_as_tensor, args))
        if all(map(operator.is_, tensors, args)):
            raise
    return func(*tensors, **kwargs)


def _as_tensor(value: Any) -> Any:
    dtype = _DTYPES.get(type(value))
    return value if dtype is None else torch.tensor(value, dtype=dtype)


class SeenOperator(NamedTuple):
    """What is known of an operator: its name, whether it draws, which arguments it writes to."""

    api: ApiName
    random: bool
    writes: frozenset[str]


def _look_up(func: Any) -> SeenOperator | None:
    namespace, _, name = func._schema.name.partition("::")
    api = operator_name(namespace, name, func._overloadname)
    if is_noise(api):
        return None
    random = torch.Tag.nondeterministic_seeded in func.tags
    return SeenOperator(api, random, written_arguments(func._schema) or writes_unsaid(func._schema))


class OperatorMode(TorchDispatchMode):
    """Tells an observer of each operator that makes tensor content."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._operators: dict[Any, SeenOperator | None] = {}  # None: makes no tensor content
        self.on = True  # else on the stack of a backward only, inside of which it was taken off
        self.saw_scaler = False  # a GradScaler has ended a round

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch hides each run of the handler: 3 us a time, and it imports dynamo for it."""
        return False

    @compiled.unseen
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            kwargs = kwargs or {}
            observer = self._observer
            if not (observer.on and self.on):
                return make_operator_call(func, args, kwargs)
            if func not in self._operators:
                self._operators[func] = _look_up(func)
                self.saw_scaler |= func._schema.name == f"aten::{SCALER_UPDATE}"
            operator = self._operators[func]
            if operator is None:
                return make_operator_call(func, args, kwargs)
            if is_tracing():
                observer.traced()
                return make_operator_call(func, args, kwargs)
            node = torch._C._current_autograd_node()
            call = observer.begin_operator(operator, node, args, kwargs)
            if call is None:
                return make_operator_call(func, args, kwargs)
            try:
                result = make_operator_call(func, args, kwargs)
            except BaseException as error:
                observer.raised(call, error)
                raise
            observer.end(call, result)
            return result
        except BaseException as error:
            clean(error)
            raise
