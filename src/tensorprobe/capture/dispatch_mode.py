"""Level L2: every ATen and collective op, below autograd, forward and backward alike."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.capture import compiled
from tensorprobe.capture.function_mode import SCALER_UPDATE
from tensorprobe.capture.hidden_state import written_arguments
from tensorprobe.capture.made_nodes import MadeNodes
from tensorprobe.capture.naming import (
    ApiName,
    CallNames,
    call_name,
    is_noise,
    operator_name,
)
from tensorprobe.capture.stand_ins import is_tracing
from tensorprobe.capture.tape import Tape
from tensorprobe.capture.tracebacks import clean
from tensorprobe.records import Direction

_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


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


class _Operator(NamedTuple):
    api: ApiName
    random: bool
    writes: frozenset[str]


def _look_up(func: Any) -> _Operator | None:
    namespace, _, name = func._schema.name.partition("::")
    api = operator_name(namespace, name, func._overloadname)
    if is_noise(api):
        return None
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _Operator(api, random, written_arguments(func._schema) or _unsaid(func._schema))


def _unsaid(schema: Any) -> frozenset[str]:
    """The arguments of an operator that writes in place, or to `out`, and does not say to which.

    Torch's own do say it (aten::__lshift__ writes to none).
    """
    names = [argument.name for argument in schema.arguments]
    writes = schema.name.endswith("_") or "out" in names
    if not writes or schema.name.startswith("aten::"):
        return frozenset()
    return frozenset([*names, *(str(i) for i in range(len(names)))])


class OpMode(TorchDispatchMode):
    """Records each op with its inputs and outputs; one run by backward names its forward op."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._operators: dict[Any, _Operator | None] = {}  # None: makes no tensor content
        self._made = MadeNodes[str]()  # the call of the forward op that was making the node
        self.on = True  # else on the stack of a backward only, inside of which recording was paused
        self.saw_scaler = False  # a GradScaler has ended a round

    def begin_step(self) -> None:
        self._made.clear()

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
            tape = self._tape
            if not (tape.recording and self.on):
                return _call(func, args, kwargs)
            if func not in self._operators:
                self._operators[func] = _look_up(func)
                self.saw_scaler |= func._schema.name == f"aten::{SCALER_UPDATE}"
            known = self._operators[func]
            if known is None:
                return _call(func, args, kwargs)
            if is_tracing():
                tape.not_traced += 1
                return _call(func, args, kwargs)
            api, random, writes = known
            node = torch._C._current_autograd_node()
            number = tape.counter.next(api)
            direction: Direction = "forward" if node is None else "backward"
            names = CallNames(api, call_name(api, number, direction), tape.place.module, direction)
            if not tape.wants(names):
                result = _call(func, args, kwargs)
                if writes:
                    tape.forget_written(args, kwargs)
                return result
            parent = tape.place.parent
            if node is None:
                # the first op after a node was made is the node's own; saving its output detaches
                # it
                self._made.note(torch._C._autograd._get_sequence_nr() - 1, names.name)
            else:
                parent = self._made.find(node) or node.name()
            # the stack from this frame on, which is hidden: in a device's own thread it is the
            # only one
            call = tape.begin(names, args, kwargs, parent=parent, random=random, writes=writes)
            if call is None:
                return _call(func, args, kwargs)
            return tape.run(call, _call, (func, args, kwargs), {})
        except BaseException as error:
            clean(error)
            raise
