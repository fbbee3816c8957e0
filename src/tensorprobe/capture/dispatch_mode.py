"""Level L2: every ATen and collective op, below autograd, forward and backward alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe.capture.naming import ApiName, CallNames, call_name, operator_name
from tensorprobe.capture.tape import Tape
from tensorprobe.records import Direction


class OpMode(TorchDispatchMode):
    """Records each op with its inputs and outputs; one run by backward names its forward op."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._names: dict[Any, ApiName] = {}
        self._writes: dict[Any, frozenset[str]] = {}
        # sequence number of the graph node a forward op was making -> that op's call
        self._made: dict[int, str] = {}

    def begin_step(self) -> None:
        self._made.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tape = self._tape
        if not tape.recording:
            return func(*args, **kwargs)
        api = self._names.get(func)
        if api is None:
            namespace, _, name = func._schema.name.partition("::")
            api = self._names[func] = operator_name(namespace, name, func._overloadname)
            self._writes[func] = _written_arguments(func._schema)
        node = torch._C._current_autograd_node()
        number = tape.counter.next(api)
        direction: Direction = "forward" if node is None else "backward"
        names = CallNames(api, call_name(api, number, direction), tape.place.module, direction)
        if not (tape.selection.everything or tape.selection.decide(names)):
            return func(*args, **kwargs)
        parent = tape.place.parent
        if node is None:
            # the first op after a node was made is the node's own; saving its output detaches it
            self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, names.name)
        else:
            parent = self._made.get(node._sequence_nr(), node.name())
        call = tape.begin(names, args, kwargs, depth=2, direction=direction, parent=parent)
        if call is None:
            return func(*args, **kwargs)
        written = self._writes[func]
        if written:  # autograd moves the version of a tensor only after the op below it has run
            call.writes += tuple(path for _, path in call.inputs if path[0] in written)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            tape.raised(call, error)
            raise
        if api.prefix == "Distributed" and tape.await_work(call, result):
            return result
        tape.end(call, result)
        return result


def _written_arguments(schema: Any) -> frozenset[str]:
    """The arguments an op writes to, by position and by name."""
    written: set[str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {str(position), argument.name}
    return frozenset(written)
