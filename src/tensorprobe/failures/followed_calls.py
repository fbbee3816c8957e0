"""Calls as the watch for errors follows them: named as in a recording, noted before they run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import torch
from torch.autograd.function import BackwardCFunction

from tensorprobe.config import RecordConfig
from tensorprobe.failures.overwrites import Writes
from tensorprobe.failures.recent_inputs import STEPPING, TOO_LARGE, Content, Kept, can_be_lost
from tensorprobe.follow.compiled import NOTE, Run, name_of
from tensorprobe.follow.gradients import LEAF, Gradients, Path
from tensorprobe.follow.hidden_state import silently_written
from tensorprobe.follow.naming import (
    ApiName,
    CallNames,
    Counter,
    optimizer_name,
    writes_in_place,
)
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.place import Place
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.stacks import Stacks
from tensorprobe.record.encode import encode, map_tensors
from tensorprobe.record.selection import Selection
from tensorprobe.record.tensor_lines import TensorLines
from tensorprobe.record.values import Values
from tensorprobe.records import HOST, Keep
from tensorprobe.store.lines import TensorLine
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.summarizer import Summarizer
from tensorprobe.trouble import OnTrouble

COMPILED = (
    "compiled: the calls inside are not visible. To have the one that failed named, run once more "
    "with TORCHDYNAMO_DISABLE=1"
)
_BY_NODE = "seen by its graph node: the inputs are not visible"
_OF_BASE = "the call wrote to a view in place: its gradient is a part of that of the base"
_HALF_WAY = re.compile(r"_?(index|scatter|put|masked|select|slice|__setitem__)")
_MAX_GAPS = 1000


class Given(NamedTuple):
    """One tensor that a call was given: its line, its place among the arguments, its content."""

    line: TensorLine
    path: Path
    content: Content


class WatchedCall(msgspec.Struct, eq=False):
    """A call with what it was given, for as long as that is kept."""

    names: CallNames
    keep: Keep
    step: int
    inputs: list[tuple[torch.Tensor, Path]] = []
    notes: list[str] = []
    thread: str = ""
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    given: list[Given] = msgspec.field(default_factory=list)
    incoming: dict[Path, Given] = msgspec.field(
        default_factory=dict
    )  # the gradients of its outputs, once backward is here
    frames: list[str] = msgspec.field(default_factory=list)
    nbytes: int = 0  # of what was copied for it
    start: int = -1  # the number of its first graph node; -1 where it makes none

    @property
    def device(self) -> str:
        """The device it runs on: that of the first tensor which is not the host's."""
        devices = [given.line.device for given in self.given]
        return next((device for device in devices if device != HOST), HOST)


class Output(NamedTuple):
    """One output of a call: which of its node's it is, its place, and its shape."""

    number: int
    path: Path
    shape: Sequence[int]


class Stamp(NamedTuple):
    """On a graph node: the call that made it, and which outputs it is the node of.

    `outputs` None: of all, as for a custom Function, whose outputs are told by their gradients.
    """

    call: WatchedCall
    outputs: tuple[Output, ...] | None


class Told(NamedTuple):
    """Told of what the program does, beside the calls that are remembered here."""

    raised: Callable[[WatchedCall, Exception], None]
    small_call_raised: Callable[[ApiName, Any, Any, Exception, FrameType | None], None]
    around_backward: Callable[[Callable[[], Any], tuple[Any, ...]], Any]
    backward_begins: Callable[[Any], None]
    step: Callable[[], None]


class FollowedCalls(Observer):
    """Remembers the calls of the program, and writes nothing.

    Every call is followed. `calls` are those whose inputs are kept, however large they are; where
    they are given no others are, nor in other `steps`.
    """

    sees_small_calls = True
    surrounds_backward = True

    def __init__(
        self,
        writer: CaptureWriter,
        kept: Kept,
        calls: Sequence[str],
        steps: Sequence[int] | None,
        told: Told,
    ) -> None:
        self.selection = Selection(RecordConfig.make(keep="tensors", calls=calls, steps=steps))
        self.lines = TensorLines(self.selection, Values(writer, Summarizer()))
        self.place = Place()
        self.counter = Counter()
        self.stacks = Stacks(self._note_stack)
        self._step = -1
        self.key = f"tensorprobe {id(self)}"  # of stamps
        self.troubles: dict[str, str] = {}  # calls that could not be noted, and why
        self.writes = Writes()
        self.compiled: dict[ApiName, WatchedCall] = {}  # the last run of each compiled part
        self._kept = kept
        self._told = told
        self._frames: dict[int, list[str]] = {}
        # threads that are inside an optimizer, which is given all parameters there are
        self._stepping: set[int] = set()

    # Steps

    def begin_step(self, step: int) -> None:
        """Another step begins, or goes on."""
        self.on = True
        if step == self._step:
            return
        self._step = step
        self._kept.release()
        self._stepping.clear()
        self._frames.clear()
        self.compiled.clear()
        self.counter.reset()
        self.selection.begin_step()
        self.stacks.reset()

    # Calls

    def begin(
        self,
        api: ApiName,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> WatchedCall | None:
        names = self.select(api, self.counter.next_name(api), self.place.module)
        shown = args[:1] if api.api == "__deepcopy__" else args  # the rest is copy's own memo
        return self.note(names, shown, kwargs, frame)

    def compiled_began(self, run: Run, frame: FrameType | None) -> None:
        """Note a compiled part as one call."""
        name = name_of(run)
        api = ApiName("Compiled", name, name)
        names = self.select(api, self.counter.next_name(api), self.place.module)
        if names.wanted:
            frame = frame.f_back if frame is not None else None  # around the generated code
            call = self.note(names, run.entry.f_locals.get("args", ()), {}, frame)
            if call is not None:
                call.notes.append(NOTE)
                self.end(call, None)

    def optimizer_begins(
        self, optimizer: Any, frame: FrameType, has_closure: bool
    ) -> WatchedCall | None:
        if not self.on:
            return None
        kind = type(optimizer)
        api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
        names = self.select(api, self.counter.next_name(api), "")
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._stepping.add(threading.get_ident())
        return self.note(names, settings, {}, frame)

    def optimizer_ended(self, optimizer: Any, call: WatchedCall) -> None:
        self._stepping.discard(threading.get_ident())
        self.end(call, None)

    def select(self, api: ApiName, name: str, module: str) -> CallNames:
        """The names of a call, and whether its inputs are to be kept."""
        names = CallNames(api, name, module)
        return names.but(wanted=self._is_chosen(names))

    def _is_chosen(self, names: CallNames) -> bool:
        if self.selection.everything:
            return True
        wanted = self.selection.decide(names) or self.selection.may_want_backward(names)
        return wanted and self.selection.wants_step(self._step)

    def note(
        self,
        names: CallNames,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> WatchedCall | None:
        """Note a call before it runs."""
        with OnTrouble(self.gap, names.name):
            call = WatchedCall(names, "tensors", self._step, thread=self.place.thread)
            call.frames = self._frames_here(frame)
            writes_over = self._writes_over(names.api, args, kwargs)
            with Quiet():
                noting = _Noting(self, call, writes_over)
                call.args = [encode(arg, noting, (str(i),)) for i, arg in enumerate(args)]
                call.kwargs = {k: encode(v, noting, (k,)) for k, v in kwargs.items()}
                if noting.functions:
                    self.note_functions(noting.functions)
            if torch.is_grad_enabled():
                call.start = torch._C._autograd._get_sequence_nr()
            return call
        return None

    def take(self, call: WatchedCall, tensor: torch.Tensor, copy: bool) -> Content:
        """The content of a tensor that `call` is given."""
        if not call.names.wanted:
            return Content(None, reason="it is not among the calls whose inputs are kept")
        try:
            if not self.selection.everything:
                return self._kept.take(tensor, copy=True)
            if threading.get_ident() in self._stepping and can_be_lost(tensor):
                return Content(None, reason=STEPPING)
            copies = copy or can_be_lost(tensor)
            call.nbytes += tensor.nbytes if copies else 0
            if copies and call.nbytes > self._kept.budget:
                return Content(None, reason=TOO_LARGE)
            return self._kept.take(tensor, copy=copy)
        except Exception as error:  # noqa: BLE001 recording one call: this tensor is missing
            self.gap(call.names.name, error)
            return Content(None, reason=f"it could not be read: {error}".partition("\n")[0])

    def end(self, call: WatchedCall, result: Any) -> None:
        """Follow a call that has returned into backward, if it will be there."""
        with OnTrouble(self.gap, call.names.name):
            if call.start >= 0:
                with Quiet():
                    self._follow_result(call, result)
            if call.names.api.prefix == "Compiled":
                self.compiled[call.names.api] = call
            if _wrote(call):
                with Quiet():
                    self._note_writes(call)
        call.inputs.clear()

    def _note_writes(self, call: WatchedCall) -> None:
        """An in-place call writes to its first argument, or to `out`."""
        written = [tensor for tensor, path in call.inputs if path[0] in ("0", "out")]
        self.writes.note(call.names.name, call.frames, written)

    def raised(self, call: WatchedCall, error: BaseException) -> None:
        # the one below is no failure: torch.utils.checkpoint has all it needs and leaves by raising
        if isinstance(error, Exception) and type(error).__name__ != "_StopRecomputationError":
            self._told.raised(call, error)
        call.inputs.clear()

    def gap(self, name: str, reason: BaseException | str) -> None:
        if len(self.troubles) < _MAX_GAPS:
            self.troubles[name] = str(reason)

    def small_call_raised(
        self, api: ApiName, args: Any, kwargs: Any, error: Exception, frame: FrameType | None
    ) -> None:
        self._told.small_call_raised(api, args, kwargs, error, frame)

    def step_ended(self) -> None:
        self._told.step()

    # Backward

    def around_backward(self, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        return self._told.around_backward(run, args)

    def backward_begins(self, roots: Any) -> None:
        self._told.backward_begins(roots)

    def receive(self, stamp: Stamp, grads: Gradients) -> None:
        """Backward has come to a node of a call's outputs: the gradients are what it is given."""
        call = stamp.call
        if not call.names.wanted or stamp.outputs == ():
            return
        outputs = stamp.outputs
        if outputs is None:
            outputs = tuple(
                Output(number, (str(number),), grad.shape)
                for number, grad in enumerate(grads)
                if grad is not None
            )
        call.nbytes = 0
        taken = []
        for number, path, shape in outputs:
            grad = grads[number] if number < len(grads) else None
            if grad is None:
                continue
            line = self.lines.line(grad, call, "input", ".".join(path), False)
            line.grad = False
            if tuple(grad.shape) == tuple(shape):
                content = self.take(call, grad, False)
            else:
                content = Content(None, reason=_OF_BASE)
            call.incoming[path] = Given(line, path, content)
            taken.append(content)
        self._hold(taken)

    def note_functions(self, functions: Iterable[tuple[torch.Tensor, Any]]) -> None:
        """Custom autograd.Functions: `apply` is no torch call, but their node is in the graph."""
        for _, node in functions:
            if self.key in node.metadata:  # seen before, or made by an operator of torch.library
                continue
            kind = getattr(type(node), "_forward_cls", type(node))
            call = self.new_function(kind)
            node.metadata[self.key] = Stamp(call, None)

    def new_function(self, kind: type) -> WatchedCall:
        """A call of a custom autograd.Function, of which only the graph node is seen."""
        api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        names = self.select(api, self.counter.next_name(api), self.place.module)
        call = WatchedCall(names, "tensors", self._step, thread=self.place.thread)
        call.frames = self._frames_here(sys._getframe())
        seen = COMPILED if kind.__name__ == "CompiledFunction" else _BY_NODE
        call.notes.append(seen)
        return call

    def note_arguments(self, call: WatchedCall, args: Sequence[Any]) -> None:
        """What a custom Function that has failed was given."""
        with Quiet():
            noting = _Noting(self, call, False)
            call.args = [encode(arg, noting, (str(i),)) for i, arg in enumerate(args)]
        call.notes.clear()

    def _follow_result(self, call: WatchedCall, result: Any) -> None:
        outputs: list[tuple[torch.Tensor, Path]] = []
        map_tensors(result, lambda tensor, path: outputs.append((tensor, path or ("0",))))
        if self._stamp(call, outputs or call.inputs):
            self._hold([given.content for given in call.given])

    def _hold(self, contents: list[Content]) -> None:
        if self.selection.everything:
            self._kept.hold(contents)
        else:  # the few that were asked for by name: outside of the budget
            for content in contents:
                content.outlive_call()

    def _stamp(self, call: WatchedCall, outputs: Iterable[tuple[torch.Tensor, Path]]) -> bool:
        """Write on the nodes that this call made whose they are; False where it made none."""
        spots: dict[Any, list[Output]] = {}
        for tensor, path in outputs:
            node = tensor.grad_fn
            if node is not None and call.start <= node._sequence_nr() < LEAF:
                spots.setdefault(node, []).append(Output(tensor.output_nr, path, tensor.shape))
        todo, seen = list(spots), set(spots)
        while todo:
            node = todo.pop()
            node.metadata[self.key] = Stamp(call, tuple(spots.get(node, ())))
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    if call.start <= after._sequence_nr() < LEAF:
                        todo.append(after)
        return bool(spots)

    def _writes_over(self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether what it is given may have to be copied, for it is written over.

        Without a graph there is no backward to need it, and most calls that fail have not begun to
        write: an optimizer's are not worth a copy of every parameter. Scatters fail half-way.
        """
        if not torch.is_grad_enabled() and not _HALF_WAY.match(api.api):
            return False
        return _is_in_place(api, kwargs) or bool(silently_written(api, args, kwargs))

    def _frames_here(self, frame: FrameType | None) -> list[str]:
        number = self.stacks.current(frame, self.place.frame, self.place.stack)
        return self._frames.get(number, [])

    def _note_stack(self, id: int, frames: list[str]) -> None:
        self._frames[id] = frames


def _is_in_place(api: ApiName, kwargs: Mapping[str, Any]) -> bool:
    return writes_in_place(api) or "out" in kwargs or kwargs.get("inplace") is True


def _wrote(call: WatchedCall) -> bool:
    return bool(call.inputs) and _is_in_place(call.names.api, call.kwargs)


class _Noting:
    """Notes the tensors among the arguments of one call."""

    __slots__ = ("_call", "_calls", "_copy", "_seen", "functions")

    def __init__(self, calls: FollowedCalls, call: WatchedCall, copy: bool) -> None:
        self._calls, self._call, self._copy = calls, call, copy
        self._seen: dict[int, Given] = {}
        self.functions: list[tuple[torch.Tensor, Any]] = []

    def __call__(self, tensor: torch.Tensor, path: Path) -> Any:
        call = self._call
        line = self._calls.lines.line(tensor, call, "input", ".".join(path), False)
        first = self._seen.get(id(tensor))
        if first is not None:
            line.same = f"input.{'.'.join(first.path)}"
            given = Given(line, path, first.content)
        else:
            given = Given(line, path, self._calls.take(call, tensor, self._copy))
            self._seen[id(tensor)] = given
            call.inputs.append((tensor, path))
            node = tensor.grad_fn
            if isinstance(node, BackwardCFunction):
                self.functions.append((tensor, node))
        call.given.append(given)
        return {"tensor": line}
