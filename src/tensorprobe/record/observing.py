"""The recorder as an observer: which of the calls it is told of are written down, and as what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from tensorprobe.follow import compiled, function_mode
from tensorprobe.follow.dispatch_mode import SeenOperator
from tensorprobe.follow.function_mode import SCALER_UPDATE, CallMode
from tensorprobe.follow.hidden_state import WRITES_STATISTICS, declared_writes, lends, may_write
from tensorprobe.follow.made_nodes import MadeNodes
from tensorprobe.follow.module_hooks import ModuleCall, ModuleHooks
from tensorprobe.follow.naming import ApiName, CallNames, call_name, name_parts
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.spelling import Spelling
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.collectives import Collectives, operation_of
from tensorprobe.record.module_calls import ModuleCalls
from tensorprobe.record.optimizer_calls import OptimizerCalls
from tensorprobe.record.tape import Tape
from tensorprobe.records import Direction
from tensorprobe.store.lines import CollectiveLine
from tensorprobe.trouble import OnTrouble

_MAY_COMMUNICATE = ("Distributed", "Ops")  # of calls with these prefixes some are collectives
_is_grad_enabled = torch.is_grad_enabled
_interpreter_stack = torch._C._functorch.peek_interpreter_stack


class _Unrecorded(NamedTuple):
    """A call that is not recorded, but writes to what may be recorded later in the step."""

    api: ApiName
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class BackwardTold(NamedTuple):
    """Who is told that backward begins, is left by an exception, and is over."""

    begins: Callable[[Any], None]
    raised: Callable[[BaseException, bool], None]
    ended: Callable[[bool], None]


class RecordingObserver(Observer):
    """Puts what the program does on a tape; the calls of modules where `records_modules`."""

    def __init__(
        self,
        tape: Tape,
        identity: Callable[[], object] = lambda: None,
        *,
        records_modules: bool,
        parameter_names: Callable[[], dict[int, str]],
        on_backward: BackwardTold,
    ) -> None:
        self._tape = tape
        self._spell = (
            Spelling(function_mode.__file__) if tape.config.operators == "dunder" else None
        )
        self._made = MadeNodes[str]()  # the call of the forward operator that was making the node
        self.modules = ModuleCalls(tape, record=records_modules)
        self._optimizers = OptimizerCalls(tape, parameter_names)
        self._on_backward = on_backward
        self._collectives = Collectives()
        self._identity = identity  # asked while there are process groups: later they may be gone

    @property
    def on(self) -> bool:  # type: ignore[override]
        """Whether this step is recorded."""
        return self._tape.recording

    def shorten(self, mode: CallMode | None, hooks: ModuleHooks) -> None:
        """Let C++ do what most calls and modules need; it has no other observer to tell."""
        if mode is not None:
            describe = functools.partial(_describe_plain, spells=self._spell is not None)
            mode.swift = self._tape.plain_calls(mode.plans, describe, mode.stand_ins)
        self.modules.attach(hooks)

    def begin_step(self) -> None:
        """Another step begins, or goes on."""
        self.modules.begin_step()
        self._made.clear()

    def begin(
        self,
        api: ApiName,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> OpenCall | _Unrecorded | None:
        tape = self._tape
        if tape.only is not None:
            return self.begin_hidden(api, args, kwargs)
        if self._spell is not None and api.prefix == "Tensor":
            api = self._spell(api, func, args, frame)
        collective = None
        if api.prefix in _MAY_COMMUNICATE:
            collective = self._collective(api, func, args, kwargs)
        name, module = tape.counter.next_name(api), tape.place.module
        # as `select`, which would be one frame more
        names = CallNames(api, name, module) if tape.everything else tape.select(api, name, module)
        if names is None:
            return self.begin_hidden(api, args, kwargs)
        grad = _is_grad_enabled() and not _interpreter_stack()
        shown = args[:1] if api.api == "__deepcopy__" else args  # the rest is copy's own memo
        return tape.begin(names, shown, kwargs, frame=frame, grad=grad, collective=collective)

    def _collective(
        self, api: ApiName, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CollectiveLine | None:
        with OnTrouble(self.gap, api.stem):
            found = self._collectives.of(api, func, args, kwargs)
            if found is not None:
                self._identity()
            return found
        return None

    def begin_hidden(
        self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Unrecorded | None:
        writes = "out" in kwargs or may_write(api)
        self._tape.collectives.before_hidden(args, kwargs, writes)
        return _Unrecorded(api, args, kwargs) if writes else None

    def begin_operator(
        self, operator: SeenOperator, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpenCall | _Unrecorded | None:
        """An operator begins; one that backward runs names its forward operator as its parent."""
        api, random, writes = operator
        tape = self._tape
        collective = None
        if api.prefix in _MAY_COMMUNICATE:
            collective = self._collective(api, None, args, kwargs)
        direction: Direction = "forward" if node is None else "backward"
        name = call_name(api, tape.counter.next(api), direction)
        names = CallNames(api, name, tape.place.module, direction)
        if not tape.wants(names):
            tape.collectives.before_hidden(args, kwargs, bool(writes))
            return _Unrecorded(api, args, kwargs) if writes else None
        parent = tape.place.parent
        if node is None:
            # the first op after a node was made is the node's own; saving its output detaches it
            self._made.note(torch._C._autograd._get_sequence_nr() - 1, name)
        else:
            parent = self._made.find(node) or node.name()
        # the stack from this frame on, which is hidden: in a device's own thread it is the only one
        return tape.begin(
            names, args, kwargs,
            parent=parent, random=random, writes=writes, collective=collective,
        )  # fmt: skip

    def end(self, call: OpenCall | _Unrecorded, result: Any) -> None:
        tape = self._tape
        if type(call) is _Unrecorded:
            tape.forget_call(*call)
            return
        assert type(call) is OpenCall
        if call.names.api.prefix in _MAY_COMMUNICATE:
            tape.collectives.returned(call, result)
        tape.end(call, result)

    def raised(self, call: OpenCall | _Unrecorded, error: BaseException) -> None:
        if type(call) is OpenCall:
            self._tape.raised(call, error)

    def compiled_began(self, run: compiled.Run, frame: FrameType | None) -> None:
        """Write down, as one call, a compiled part that has begun to run."""
        name = compiled.name_of(run)
        api = ApiName("Compiled", name, name)
        names = self._tape.select(api, self._tape.counter.next_name(api), self._tape.place.module)
        if names is None or not names.wanted:
            return
        frame = frame.f_back if frame is not None else None  # around the generated code
        call = self._tape.begin(names, run.entry.f_locals.get("args", ()), frame=frame)
        if call is not None:
            call.notes.append(compiled.NOTE)
            self._tape.end(call, None)

    def wrote(self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._tape.forget_call(api, args, kwargs)

    def gap(self, name: str, reason: BaseException | str) -> None:
        self._tape.gap(name, reason)

    def enter(self, entry: ModuleCall, args: tuple[Any, ...]) -> OpenCall | None:
        return self.modules.enter(entry, args)

    def leave(
        self, entry: ModuleCall, call: OpenCall, result: Any, error: BaseException | None
    ) -> None:
        self.modules.leave(entry, call, result, error)

    def optimizer_begins(
        self, optimizer: Any, frame: FrameType, has_closure: bool
    ) -> OpenCall | None:
        return self._optimizers.begin(optimizer, frame, has_closure)

    def optimizers_left(self) -> None:
        self._optimizers.left()

    def forget_states(self) -> None:
        """The hooks of optimizers are taken away."""
        self._optimizers.forget_states()

    def optimizer_ended(self, optimizer: Any, call: OpenCall) -> None:
        self._optimizers.end(optimizer, call)

    def backward_begins(self, roots: Any) -> None:
        self._on_backward.begins(roots)

    def backward_raised(self, error: BaseException, alone: bool) -> None:
        self._on_backward.raised(error, alone)

    def backward_ended(self, last: bool) -> None:
        self._on_backward.ended(last)

    def traced(self) -> None:
        self._tape.not_traced += self._tape.recording


def _describe_plain(api: ApiName, *, spells: bool) -> tuple[str, str, str, frozenset[str]] | None:
    """What the calls of an API are named, around their number, its op, and the arguments that it
    writes to; None where more than that is to be known of them."""
    if api.prefix in ("Aten", "Distributed") or api.api in ("__deepcopy__", SCALER_UPDATE):
        return None
    if operation_of(api) is not None:
        return None
    if api.op in WRITES_STATISTICS or lends(api) or (spells and api.prefix == "Tensor"):
        return None
    return (*name_parts(api, "forward"), api.op, declared_writes(api))
