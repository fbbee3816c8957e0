"""What the modes and hooks see, turned into the lines of a capture."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from tensorprobe.capture.backward import Backward, BackwardRun
from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import encode, nest
from tensorprobe.capture.gradients import (
    InputEdges,
    Path,
    Trace,
    listen,
    trace_call,
    trace_function,
    trace_saved,
)
from tensorprobe.capture.naming import ApiName, CallNames, Counter, call_name
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.selection import Selection
from tensorprobe.capture.stacks import Stacks
from tensorprobe.capture.values import Values
from tensorprobe.config import RecordConfig
from tensorprobe.records import Direction, Role
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine
from tensorprobe.store.writer import CaptureWriter

_DTYPE_NAMES: dict[torch.dtype, str] = {}
# Reads the graph of a call that has ended: of an operator's, or of a module's.
Tracer = Callable[[list[tuple[torch.Tensor, Path]], InputEdges], Trace | None]
_SECTIONS: dict[Role, str] = {
    "input": "input",
    "output": "output",
    "parameter": "parameters",
    "parameter_grad": "parameters_grad",
    "buffer": "buffers",
}
# What an asynchronous collective returns; torch without distributed has none.
_WORK: tuple[type, ...] = tuple(filter(None, (getattr(torch.distributed, "Work", None),)))
_OUTPUT_IS_ARGUMENTS = "outputs are the arguments after the call"


class Place(threading.local):
    """Where a thread is: the module it is in, that module's own call, and its frame and stack."""

    def __init__(self) -> None:
        self.module = ""
        self.parent: str | None = None
        self.frame: FrameType | None = None
        self.stack = 0


class Tape:
    """Names calls, encodes their arguments, follows their gradients, and hands it all to the store.

    Whatever goes wrong in here becomes a gap with its reason; the program never sees it.
    """

    def __init__(
        self,
        config: RecordConfig,
        selection: Selection,
        writer: CaptureWriter,
        values: Values,
    ) -> None:
        self.config = config
        self.selection = selection
        self.writer = writer
        self.place = Place()
        self.counter = Counter()
        self.step = 0
        self.recording = False  # this step is wanted, and the recorder is on
        self.n_steps = 0
        self._open = False
        self._opening = threading.Lock()
        self._values = values
        self.ids = itertools.count()
        self._stacks = Stacks(self._write_stack)
        self._early_stacks: list[StackLine] = []  # of modules entered before the first call
        self.running: dict[tuple[int, int], BackwardRun] = {}
        self._functions: set[int] = set()  # nodes of custom Functions already written down
        self._pending_work: list[tuple[OpenCall, list[Any], list[tuple[torch.Tensor, Path]]]] = []
        self.wants_input = selection.wants_side("input")
        self.wants_output = selection.wants_side("output")
        self._backward = selection.wants_direction("backward")

    @property
    def nbytes(self) -> int:
        """Bytes of tensor content kept in this step, before equal content is written once."""
        return self._values.nbytes

    # Steps

    def begin_step(self, step: int, wanted: bool) -> None:
        self.end_step()
        self.step = step
        self.recording = wanted
        self.counter.reset()
        self.selection.begin_step()
        self.writer.end_step()
        self._open = False
        if wanted:
            self._values.begin_step()
            self._early_stacks.clear()
            self._stacks.reset()
            self._functions.clear()

    def end_step(self) -> None:
        """Close what is open: the step is over."""
        self.finish_backwards()
        if self._pending_work:
            with Quiet():
                self._finish_work(last=True)

    def open_step(self) -> None:
        """A step gets its folder with its first call, so that one nobody ran leaves no trace."""
        if self._open:
            return
        with self._opening:  # a thread that goes on too early would have nowhere to write
            if self._open:
                return
            self.n_steps += 1
            self.writer.begin_step(self.step)
            for line in self._early_stacks:
                self.writer.stack(line)
            self._early_stacks.clear()
            self._open = True

    # Calls

    def select(self, api: ApiName, number: int, module: str) -> CallNames | None:
        """The names of this call if it is wanted. Asked once for every call, in order."""
        names = CallNames(api, call_name(api, number), module)
        if self.selection.everything:
            return names
        if self.selection.decide(names) or self.selection.may_want_backward(names):
            return names
        return None

    def begin(
        self,
        names: CallNames,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        depth: int = 0,
        grad: bool = False,
        parent: str | None = None,
        direction: Direction = "forward",
        **named: Iterable[tuple[str, torch.Tensor]],
    ) -> OpenCall | None:
        """Write down a call before it runs. `named`: parameters, parameter_grads, buffers."""
        try:
            self.open_step()
            call = OpenCall(names, self.selection.keep_for(names), self.step)
            if grad:
                call.edges = InputEdges()
            if self.config.stacks:
                place = self.place
                call.stack = self._stacks.current(depth + 1, place.frame, place.stack)
            with Quiet():
                if self._pending_work:
                    self._finish_work()
                encoder = _Encoder(self, call, "input", self.wants_input, call.inputs)
                line = CallLine(
                    id=0,
                    name=names.name,
                    op=names.api.op,
                    module=names.module,
                    direction=direction,
                    parent=parent if parent is not None else self.place.parent,
                    stack=call.stack,
                    args=[encode(arg, encoder, (str(i),)) for i, arg in enumerate(args)],
                    kwargs={k: encode(v, encoder, (k,)) for k, v in (kwargs or {}).items()},
                    thread=threading.current_thread().name,
                    notes=_state_notes(),
                    **self._named(call, named),
                )
                for tensor, path in call.inputs:
                    call.versions.append(_version(tensor))
                    if call.edges is not None:
                        call.edges.add(tensor, path)
                if call.edges is not None and call.edges.functions:
                    self._record_functions(call.edges.functions)
                call.id = line.id = next(self.ids)
                self.writer.call(line)
            return call
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.gap(names.name, error)
            return None

    def end(self, call: OpenCall, result: Any, tracer: Tracer = trace_call) -> None:
        """Write down what a call returned, and listen to its backward."""
        try:
            outputs: list[tuple[torch.Tensor, Path]] = []
            with Quiet():
                mutated = self._mutated(call)
                encoder = _Encoder(self, call, "output", self.wants_output, outputs)
                tree = encode(result, encoder)
                written: dict[str, TensorLine] = {}
                if mutated and not outputs:
                    tree = self._arguments_after(call, mutated, outputs)
                    call.notes.append(_OUTPUT_IS_ARGUMENTS)
                elif mutated:
                    written = self._written(call, mutated, outputs)
                if call.edges is not None and self._backward:
                    trace = tracer(outputs, call.edges)
                    if trace is not None:
                        self._follow(call, trace, call.edges.aliases)
                self.writer.end(
                    EndLine(id=call.id, outputs=tree, buffers=written, notes=call.notes)
                )
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.gap(call.names.name, error)

    def save(self, name: str, value: Any) -> None:
        """Write down a value given by hand, as the output of a call of that name."""
        api = ApiName("Saved", name, name)
        names = self.select(api, self.counter.next(api), self.place.module)
        if names is None:
            return
        call = self.begin(names, depth=2)
        if call is not None:
            call.edges = InputEdges()
            self.end(call, value, trace_saved)

    def raised(self, call: OpenCall, error: BaseException) -> None:
        """The call did not return."""
        text = f"{type(error).__name__}: {error}"
        if type(error).__name__ == "_StopRecomputationError":
            # not a failure: torch.utils.checkpoint has all it needs and leaves by raising
            self.writer.end(EndLine(id=call.id, notes=["recomputation ended here"]))
            return
        self.writer.end(EndLine(id=call.id, status="raised", error=text[:2000]))

    def gap(self, name: str, reason: BaseException | str) -> None:
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self.open_step()
        self.writer.gap(GapLine(name=name, reason=text[:2000]))

    def line(
        self, tensor: torch.Tensor, call: OpenCall, role: Role, label: str, wanted: bool = True
    ) -> TensorLine:
        """One tensor of a call; its content is numbered and kept where the selection wants it."""
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            dtype = _DTYPE_NAMES[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
        try:
            line = TensorLine(dtype=dtype, shape=tuple(tensor.shape), grad=tensor.requires_grad)
            if not tensor.is_contiguous():
                line.stride = tensor.stride()
        except (RuntimeError, NotImplementedError) as error:  # nested and sparse tensors
            line = TensorLine(dtype=dtype, shape=(), gap=f"no shape or stride: {error}"[:200])
            line.shape = _shape_of(tensor)
        if not tensor.is_cpu:
            line.device = str(tensor.device)
        if wanted and self.selection.wants_tensor(dtype):
            line.value = self._values.of(tensor, _Label(call.names.name, role, label), call.keep)
        return line

    # After the call

    def _named(
        self, call: OpenCall, named: Mapping[str, Iterable[tuple[str, torch.Tensor]]]
    ) -> dict[str, Any]:
        roles: dict[str, Role] = {
            "parameters": "parameter",
            "parameter_grads": "parameter_grad",
            "buffers": "buffer",
        }
        lines = {}
        for section, tensors in named.items():
            role = roles[section]
            wanted = self.selection.wants_side(role)
            lines[section] = {
                name: self.line(tensor, call, role, name, wanted) for name, tensor in tensors
            }
        return lines

    def _mutated(self, call: OpenCall) -> list[tuple[torch.Tensor, Path]]:
        """Inputs that the call wrote to. Collectives write without moving the version."""
        if call.names.api.prefix == "Distributed":
            for tensor, _ in call.inputs:
                self._values.forget(tensor)
            return call.inputs
        found = [
            item
            for item, before in zip(call.inputs, call.versions, strict=True)
            if _version(item[0]) != before or item[1] in call.writes
        ]
        for tensor, _ in found:
            # an alias made by .data has a version of its own: drop all that is known of the storage
            self._values.forget(tensor)
        return found

    def _arguments_after(
        self,
        call: OpenCall,
        mutated: list[tuple[torch.Tensor, Path]],
        outputs: list[tuple[torch.Tensor, Path]],
    ) -> Any:
        tree: dict[Path, Any] = {}
        for tensor, path in mutated:
            line = self.line(tensor, call, "output", ".".join(path), self.wants_output)
            tree[path] = {"tensor": line}
            outputs.append((tensor, path))
        return nest(tree)

    def _written(
        self,
        call: OpenCall,
        mutated: list[tuple[torch.Tensor, Path]],
        outputs: list[tuple[torch.Tensor, Path]],
    ) -> dict[str, TensorLine]:
        returned = {id(tensor) for tensor, _ in outputs}
        lines = {}
        for tensor, path in mutated:
            if id(tensor) not in returned:
                label = f"input.{'.'.join(path)}"
                lines[label] = self.line(tensor, call, "buffer", label, self.wants_output)
        return lines

    def _follow(self, call: OpenCall, trace: Trace, aliases: dict[Path, Path]) -> None:
        """Record the backward of this call when it runs."""
        call.notes.extend(trace.notes)
        backward = Backward(self, call, trace, aliases)
        for reason in trace.gaps:
            self.gap(backward.name, reason)
        listen(trace, backward.incoming, backward.outgoing)

    def _record_functions(self, functions: list[tuple[torch.Tensor, Any]]) -> None:
        """Custom autograd.Functions: `apply` is no torch call, but their node is in the graph."""
        for tensor, node in functions:
            sequence = node._sequence_nr()
            if sequence in self._functions:
                continue
            self._functions.add(sequence)
            kind = getattr(type(node), "_forward_cls", type(node))
            api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            names = self.select(api, self.counter.next(api), self.place.module)
            if names is None:
                continue
            call = OpenCall(names, self.selection.keep_for(names), self.step)
            call.id = next(self.ids)
            notes = ["seen by its graph node: the inputs are not visible"]
            if "CompiledFunction" in kind.__qualname__:
                notes.append("compiled: the calls inside are not visible")
            self.writer.call(
                CallLine(
                    id=call.id,
                    name=names.name,
                    op=api.op,
                    module=names.module,
                    parent=self.place.parent,
                    notes=notes,
                )
            )
            path = (str(tensor.output_nr),)
            line = self.line(tensor, call, "output", path[0], self.wants_output)
            if self._backward:
                self._follow(call, trace_function(node), {})
            self.writer.end(EndLine(id=call.id, outputs=nest({path: {"tensor": line}})))

    # Backward

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Write down the custom Functions whose output backward begins from: no call took it."""
        try:
            with Quiet():
                found = InputEdges()
                for root in roots:
                    if isinstance(root, torch.Tensor):
                        found.add(root, ())
                self._record_functions(found.functions)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.gap("backward", error)

    def finish_backwards(self) -> None:
        """Close what backward calls are open: the backward pass has ended."""
        if self.running:
            with Quiet():
                for run in list(self.running.values()):
                    run.finish()
            self.running.clear()

    # Collectives that run on after they return

    def await_work(self, call: OpenCall, result: Any) -> bool:
        """Whether a collective goes on after it returned; it is written down when it is done."""
        try:
            works = _works_in(result)
            if not works:
                return False
            for tensor, _ in call.inputs:
                self._values.forget(tensor)
            self._pending_work.append((call, works, call.inputs))
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.gap(call.names.name, error)
            return False
        return True

    def _finish_work(self, *, last: bool = False) -> None:
        pending, self._pending_work = self._pending_work, []
        for item in pending:
            call, works, inputs = item
            try:
                done = all(work.is_completed() for work in works)
            except (RuntimeError, ValueError) as error:  # one of a coalesced batch has no state
                self._give_up_work(call, f"asynchronous, and cannot be asked: {error}")
                continue
            if done:
                for tensor, _ in inputs:
                    self._values.forget(tensor)
                tree = self._arguments_after(call, inputs, [])
                notes = [_OUTPUT_IS_ARGUMENTS, "asynchronous: read after it had completed"]
                self.writer.end(EndLine(id=call.id, outputs=tree, notes=notes))
            elif last:
                self._give_up_work(call, "asynchronous, and not waited for when the step ended")
            else:
                self._pending_work.append(item)

    def _give_up_work(self, call: OpenCall, reason: str) -> None:
        self.gap(call.names.name, f"{reason}: its result is not recorded")
        self.writer.end(EndLine(id=call.id, notes=[reason]))

    def stack_number(self, depth: int) -> int:
        """The number of the caller's stack, `depth` frames up."""
        return self._stacks.current(depth + 1, self.place.frame, self.place.stack)

    def _write_stack(self, id: int, frames: list[str]) -> None:
        line = StackLine(id=id, frames=frames)
        if self._open:
            self.writer.stack(line)
        else:
            self._early_stacks.append(line)


class _Label:
    """The full name of a tensor, put together only where it is needed."""

    __slots__ = ("call", "label", "role")

    def __init__(self, call: str, role: Role, label: str) -> None:
        self.call, self.role, self.label = call, role, label

    def __call__(self) -> str:
        return f"{self.call}.{_SECTIONS[self.role]}.{self.label}"


class _Encoder:
    """Encodes the tensors of one side of a call and collects them with their paths."""

    __slots__ = ("_call", "_role", "_seen", "_tape", "_tensors", "_wanted")

    def __init__(
        self,
        tape: Tape,
        call: OpenCall,
        role: Role,
        wanted: bool,
        tensors: list[tuple[torch.Tensor, Path]],
    ) -> None:
        self._tape, self._call, self._role, self._wanted = tape, call, role, wanted
        self._tensors = tensors
        self._seen: dict[int, str] = {}

    def __call__(self, tensor: torch.Tensor, path: Path) -> Any:
        label = ".".join(path) or "0"
        line = self._tape.line(tensor, self._call, self._role, label, self._wanted)
        first = self._seen.setdefault(id(tensor), label)
        if first is not label:
            line.same = f"{self._role}.{first}"
        self._tensors.append((tensor, path or ("0",)))
        return {"tensor": line}


def _works_in(result: Any) -> list[Any]:
    """The Work that a collective returned: alone, several (batch_isend_irecv), or boxed, as
    c10d's operators return it behind their tensors."""
    items = [result] if isinstance(result, (*_WORK, torch.ScriptObject)) else result
    if not isinstance(items, list | tuple) or not items:
        return []
    if isinstance(items[-1], torch.ScriptObject):
        return [torch.distributed.Work.unbox(items[-1])]
    return list(items) if all(isinstance(item, _WORK) for item in items) else []


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except (RuntimeError, NotImplementedError):
        return ()


def _state_notes() -> list[str]:
    """What about the surroundings changes how a call computes."""
    notes = [f"autocast {device} {torch.get_autocast_dtype(device)}" for device in _autocasts_on()]
    if torch._C._current_graph_task_id() != -1:
        notes.append("inside backward")
    return notes


def _autocasts_on() -> list[str]:
    if not torch._C._is_any_autocast_enabled():
        return []
    return [device for device in ("cpu", "cuda", "npu") if _autocasts(device)]


def _autocasts(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # no such device in this build
        return False
