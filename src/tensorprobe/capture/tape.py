"""What the modes and hooks see, turned into the lines of a capture."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from tensorprobe.capture.encode import encode
from tensorprobe.capture.gradients import (
    Gradients,
    InputEdges,
    Path,
    Trace,
    Window,
    listen,
    trace_call,
    trace_function,
)
from tensorprobe.capture.naming import ApiName, CallNames, Counter, call_name
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.selection import Selection
from tensorprobe.capture.stacks import Stacks
from tensorprobe.capture.values import Values
from tensorprobe.config import RecordConfig
from tensorprobe.records import Direction, Keep, Role
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine
from tensorprobe.store.writer import CaptureWriter

_DTYPE_NAMES: dict[torch.dtype, str] = {}
# Reads the graph of a call that has ended: of an operator's, or of a module's.
Tracer = Callable[[list[tuple[torch.Tensor, Path]], InputEdges], Trace | None]
_OUTPUT_IS_ARGUMENTS = "outputs are the arguments after the call"


class Place(threading.local):
    """Where a thread is: the module it is in, that module's own call, and its frame and stack."""

    def __init__(self) -> None:
        self.module = ""
        self.parent: str | None = None
        self.frame: FrameType | None = None
        self.stack = 0


class OpenCall:
    """A call that has begun and not ended."""

    __slots__ = ("edges", "id", "inputs", "keep", "names", "notes", "stack", "step", "versions")

    def __init__(self, names: CallNames, keep: Keep, step: int) -> None:
        self.id = -1
        self.names = names
        self.keep = keep
        self.step = step
        self.stack: int | None = None
        self.edges: InputEdges | None = None
        self.inputs: list[tuple[torch.Tensor, Path]] = []
        self.versions: list[int] = []
        self.notes: list[str] = []


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
        self._values = values
        self._ids = itertools.count()
        self._stacks = Stacks(lambda id, frames: writer.stack(StackLine(id=id, frames=frames)))
        self._running: dict[tuple[int, int], BackwardRun] = {}
        self._functions: set[int] = set()  # nodes of custom Functions already written down
        self._pending_work: list[tuple[OpenCall, Any, list[tuple[torch.Tensor, Path]]]] = []
        self._input = selection.wants_side("input")
        self._output = selection.wants_side("output")
        self._backward = selection.wants_direction("backward")

    # Steps

    def begin_step(self, step: int, wanted: bool) -> None:
        self.finish_backwards()
        self.step = step
        self.recording = wanted
        self.counter.reset()
        self.selection.begin_step()
        self._pending_work.clear()
        if wanted:
            self._values.begin_step()
            self._stacks.reset()
            self._functions.clear()
            self.writer.begin_step(step)
        else:
            self.writer.end_step()

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
            call = OpenCall(names, self.selection.keep_for(names), self.step)
            if grad:
                call.edges = InputEdges()
            if self.config.stacks:
                place = self.place
                call.stack = self._stacks.current(depth + 1, place.frame, place.stack)
            with Quiet():
                if self._pending_work:
                    self._finish_work()
                encoder = _Encoder(self, call, "input", self._input, call.inputs)
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
                call.id = line.id = next(self._ids)
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
                encoder = _Encoder(self, call, "output", self._output, outputs)
                tree = _encode_outputs(result, encoder)
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
        device = tensor.device
        if device.type != "cpu":
            line.device = str(device)
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
            if _version(item[0]) != before
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
            line = self.line(tensor, call, "output", ".".join(path), self._output)
            tree[path] = {"tensor": line}
            outputs.append((tensor, path))
        return _nest(tree)

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
                lines[label] = self.line(tensor, call, "buffer", label, self._output)
        return lines

    def _follow(self, call: OpenCall, trace: Trace, aliases: dict[Path, Path]) -> None:
        """Record the backward of this call when it runs."""
        call.notes.extend(trace.notes)
        backward = Backward(self, call, trace.contributions(), len(trace.boundary), aliases)
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
            call.id = next(self._ids)
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
            line = self.line(tensor, call, "output", path[0], self._output)
            if self._backward:
                self._follow(call, trace_function(node), {})
            self.writer.end(EndLine(id=call.id, outputs=_nest({path: {"tensor": line}})))

    # Backward

    def finish_backwards(self) -> None:
        """Close what backward calls are open: the backward pass has ended."""
        if self._running:
            with Quiet():
                for run in list(self._running.values()):
                    run.finish()
            self._running.clear()

    # Collectives that run on after they return

    def await_work(self, call: OpenCall, work: Any) -> None:
        """The result of this call is there when `work` is done; write it down then."""
        self._pending_work.append((call, work, call.inputs))
        call.inputs = []

    def _finish_work(self, *, wait: bool = False) -> None:
        still = []
        for item in self._pending_work:
            call, work, inputs = item
            if not (wait or work.is_completed()):
                still.append(item)
                continue
            for tensor, _ in inputs:
                self._values.forget(tensor)
            tree = self._arguments_after(call, inputs, [])
            notes = [_OUTPUT_IS_ARGUMENTS, "asynchronous: read after it had completed"]
            self.writer.end(EndLine(id=call.id, outputs=tree, notes=notes))
        self._pending_work = still

    def stack_number(self, depth: int) -> int:
        """The number of the caller's stack, `depth` frames up."""
        return self._stacks.current(depth + 1, self.place.frame, self.place.stack)


class _Label:
    """The full name of a tensor, put together only where it is needed."""

    __slots__ = ("call", "label", "role")
    _sections = {
        "input": "input",
        "output": "output",
        "parameter": "parameters",
        "parameter_grad": "parameters_grad",
        "buffer": "buffers",
    }

    def __init__(self, call: str, role: Role, label: str) -> None:
        self.call, self.role, self.label = call, role, label

    def __call__(self) -> str:
        return f"{self.call}.{self._sections[self.role]}.{self.label}"


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


class Backward:
    """Follows one recorded call into backward, as often as backward passes through it.

    It holds no node and no tensor of the graph, or the graph would never be freed.
    """

    __slots__ = ("_aliases", "_call", "_contributions", "_expected", "_passes", "_tape")

    def __init__(
        self,
        tape: Tape,
        call: OpenCall,
        contributions: dict[Path, int],
        expected: int,
        aliases: dict[Path, Path],
    ) -> None:
        self._tape = tape
        self._call = (call.names, call.keep, call.stack, call.step)
        self._contributions = contributions
        self._expected = expected
        self._aliases = aliases
        self._passes = 0

    def incoming(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        tape = self._tape
        if not tape.recording:
            return
        try:
            with Quiet():
                run = self._run()
                if run is not None:
                    run.receive(places, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def outgoing(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        tape = self._tape
        if not tape.recording:
            return
        try:
            with Quiet():
                run = self._run()
                if run is not None:
                    run.send(places, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    @property
    def name(self) -> str:
        names = self._call[0]
        return call_name(names.api, _number(names.name), "backward")

    def _run(self) -> BackwardRun | None:
        task = torch._C._current_graph_task_id()
        key = (id(self), task)
        run = self._tape._running.get(key)
        if run is None:
            names, keep, stack, step = self._call
            backward = CallNames(names.api, self.name, names.module, "backward")
            if not (self._tape.selection.everything or self._tape.selection.decide(backward)):
                return None
            self._passes += 1
            call = OpenCall(backward, keep, self._tape.step)
            call.id = next(self._tape._ids)
            call.stack = stack if step == self._tape.step else None
            if step != self._tape.step:
                call.notes.append(f"its forward ran in step {step}")
            if self._passes > 1:
                call.notes.append(f"backward pass {self._passes} through the same graph")
            run = BackwardRun(
                self._tape, key, call, dict(self._contributions), self._expected, self._aliases
            )
            self._tape._running[key] = run
        return run


class BackwardRun:
    """One pass of backward through one call."""

    __slots__ = (
        "_aliases",
        "_begun",
        "_call",
        "_expected",
        "_key",
        "_left",
        "_received",
        "_sent",
        "_sums",
        "_tape",
    )

    def __init__(
        self,
        tape: Tape,
        key: tuple[int, int],
        call: OpenCall,
        left: dict[Path, int],
        expected: int,
        aliases: dict[Path, Path],
    ) -> None:
        self._tape, self._key, self._call = tape, key, call
        self._left, self._expected, self._aliases = left, expected, aliases
        self._received: dict[Path, Any] = {}
        self._sums: dict[Path, torch.Tensor] = {}
        self._sent: dict[Path, Any] = {}
        self._begun = False

    def receive(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        late = self._begun
        for number, path, window in places:
            if number >= len(grads):
                continue
            grad = grads[number]
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._received[path] = self._line(grad, path, "input", self._tape._input)
        if not late:
            self._begin()

    def send(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        if not self._begun:
            self._begin()
        for position, path, window in places:
            grad = grads[position] if position < len(grads) else None
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._add(path, grad)
        self._expected -= 1
        if self._expected == 0:
            self.finish()

    def _add(self, path: Path, grad: torch.Tensor | None) -> None:
        """An input used several times gets its gradient in parts, which add up as they come."""
        if grad is not None:
            before = self._sums.get(path)
            self._sums[path] = grad if before is None else before + grad
        self._left[path] -= 1
        if self._left[path] == 0:
            self._sent[path] = self._line(
                self._sums.pop(path, None), path, "output", self._tape._output
            )

    def _line(self, grad: torch.Tensor | None, path: Path, role: Role, wanted: bool) -> Any:
        if grad is None:
            return None
        line = self._tape.line(grad.detach(), self._call, role, ".".join(path), wanted)
        return {"tensor": line}

    def _begin(self) -> None:
        self._begun = True
        call = self._call
        args, kwargs = _as_arguments(self._received)
        self._tape.writer.call(
            CallLine(
                id=call.id,
                name=call.names.name,
                op=call.names.api.op,
                module=call.names.module,
                direction="backward",
                stack=call.stack,
                args=args,
                kwargs=kwargs,
                thread=threading.current_thread().name,
                notes=call.notes,
            )
        )

    def finish(self) -> None:
        self._tape._running.pop(self._key, None)
        notes: list[str] = []
        for path, grad in self._sums.items():  # backward did not come by every use
            self._sent[path] = self._line(grad, path, "output", self._tape._output)
        for path, first in self._aliases.items():
            if first in self._sent:
                notes.append(f"output.{'.'.join(path)} is in output.{'.'.join(first)}: one tensor")
        line = EndLine(id=self._call.id, outputs=_nest(self._sent, always=True), notes=notes)
        self._tape.writer.end(line)


def _number(name: str) -> int:
    parts = name.split(".")
    return int(parts[-1] if parts[-1].isdigit() else parts[-2])


def _encode_outputs(result: Any, encoder: Callable[[torch.Tensor, Path], Any]) -> Any:
    """A single value is output 0; a container's items are outputs by their own index or key."""
    return encode(result, encoder)


def _nest(leaves: Mapping[Path, Any], *, always: bool = False) -> Any:
    """A tree from paths: {("1", "0"): x} is {"dict": [["1", {"dict": [["0", x]]}]]}."""
    if not leaves and not always:
        return None
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        level = tree
        for part in path[:-1]:
            level = level.setdefault(part, {})
        level[path[-1]] = (leaf,)
    return _as_dict_tree(tree)


def _as_dict_tree(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "dict": [
            [key, item[0] if isinstance(item, tuple) else _as_dict_tree(item)]
            for key, item in tree.items()
        ]
    }


def _as_arguments(leaves: Mapping[Path, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Gradients by the path of their output, as positional and keyword arguments."""
    tops: dict[str, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        tops.setdefault(path[0], {})[path[1:]] = leaf
    trees = {
        top: below[()] if () in below else _nest(below, always=True) for top, below in tops.items()
    }
    numbers = [int(top) for top in trees if top.isdigit()]
    args = [trees.get(str(i)) for i in range(max(numbers, default=-1) + 1)]
    return args, {top: tree for top, tree in trees.items() if not top.isdigit()}


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except (RuntimeError, NotImplementedError):
        return ()


def _state_notes() -> list[str]:
    """What about the surroundings changes how a call computes."""
    notes = []
    if torch._C._current_graph_task_id() != -1:
        notes.append("inside backward")
    for device in _autocast_devices():
        notes.append(f"autocast {device} {torch.get_autocast_dtype(device)}")
    return notes


def _autocast_devices() -> list[str]:
    if not torch._C._is_any_autocast_enabled():
        return []
    return [device for device in ("cpu", "cuda", "npu") if _autocasts(device)]


def _autocasts(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # no such device in this build
        return False
