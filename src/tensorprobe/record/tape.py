"""What the modes and hooks see, turned into the lines of a capture."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from msgspec import Raw
from torch.autograd.function import BackwardCFunction

from tensorprobe import native
from tensorprobe.config import RecordConfig
from tensorprobe.devices import autocast_dtypes
from tensorprobe.follow.gradients import (
    ONLY,
    InputEdges,
    LeafListener,
    Path,
    Spot,
    Trace,
    Way,
    listen,
    one_node,
    trace_call,
    trace_saved,
    versions_of,
    whole,
)
from tensorprobe.follow.hidden_state import (
    OUT,
    WRITES_STATISTICS,
    Draws,
    declared_writes,
    lends,
    may_draw,
    random_state,
    silently_written,
)
from tensorprobe.follow.naming import ApiName, CallNames, Counter, writes_in_place
from tensorprobe.follow.place import Place
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS, POSITIONS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.stacks import Stacks
from tensorprobe.follow.stand_ins import HANDLER, StandIns
from tensorprobe.record.backward import (
    Backward,
    ModuleBackward,
    NodeBackward,
    NodeRun,
    Run,
    WayBackward,
)
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.collectives import FUNCTIONAL
from tensorprobe.record.encode import encode, map_tensors, nest
from tensorprobe.record.function_calls import FunctionCalls
from tensorprobe.record.selection import Selection
from tensorprobe.record.tensor_lines import TensorLines
from tensorprobe.record.unfinished_collectives import UnfinishedCollectives
from tensorprobe.record.values import Values
from tensorprobe.records import Role
from tensorprobe.store.lines import (
    NO_TENSORS,
    CallLine,
    CollectiveLine,
    EndLine,
    GapLine,
    StackLine,
    TensorLine,
    encode_now,
)
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.torch_versions import COMPILER
from tensorprobe.trouble import OnTrouble, text_of

# While it is entered, tensors are read without any function mode or subclass taking notice. It is
# all that most calls need; where something is computed, Quiet.
_DISABLED = torch._C.DisableTorchFunction
Tensors = list[tuple[torch.Tensor, Path]]
# Reads the graph of a call that has ended: of an operator's, or of a module's.
Tracer = Callable[[list[tuple[torch.Tensor, Path]], InputEdges], Trace | Way]
_ROLES: dict[str, Role] = {
    "parameters": "parameter",
    "parameter_grads": "parameter_grad",
    "buffers": "buffer",
    "states": "state",
}
_NO_KWARGS: dict[str, Any] = {}
_MAX_SILENT = 4096  # a program may make new operators without end
_NOTHING: list[tuple[torch.Tensor, Path]] = []
_autocasts = torch._C._is_any_autocast_enabled
_graph_task_id = torch._C._current_graph_task_id
_NO_ALIASES: dict[Path, Path] = {}  # of most calls: they are many, and live until backward
_OUTPUT_SPOTS: tuple[Spot, ...] = ((0, ONLY, None),)
_IN_BACKWARD = "inside backward"
_DISTRIBUTED = "Distributed"
_OUTPUT_IS_ARGUMENTS = "outputs are the arguments after the call"


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
        counter: Counter | None = None,
    ) -> None:
        self.config = config
        self.selection = selection
        self.writer = writer
        self.place = Place()
        self.counter = counter or Counter()
        self._counts_on = counter is not None  # somebody else's: it goes on over steps
        self.step = -1
        self.recording = False  # this step is wanted, and the recorder is on
        self.not_traced = 0  # calls that torch.jit.trace has followed
        # where given: nothing but these modules, by identity, under these names
        self.only: dict[int, str] | None = None
        self._steps: set[int] = set()
        self.is_open = False
        self.on_open: Callable[[int], None] = lambda step: None
        self._opening = threading.RLock()  # a signal's handler may make a call meanwhile
        self._is_opening = False
        self._values = values
        self.ids = itertools.count()
        self._silent: set[ApiName] = set()  # APIs that write to nothing but `out`
        self.stacks = Stacks(self._write_stack)
        self._early_stacks: list[StackLine] = []  # of modules entered before the first call
        # passes of backward under way; None: not wanted
        self.running: dict[tuple[int, int], Run | None] = {}
        self.entered: dict[int, Run] = {}  # by thread, the call whose node backward is in
        self.passed: dict[int, set[str]] = {}  # by thread, paths of modules that it came by
        self._leaf_listeners: list[LeafListener] = []
        self.functions = FunctionCalls(self)
        self.collectives = UnfinishedCollectives(values, self.gap)
        self._unfinished = self.collectives.running
        self.lines = TensorLines(selection, values)
        swift = native.MODULE
        self._versions_of: Callable[[Tensors], list[int]]
        self._versions_of = versions_of if swift is None else swift.versions
        self._note_edges: Callable[[Tensors], Any] = InputEdges if swift is None else swift.Edges
        self._keep = config.keep if not config.keep_tensors else None  # of every call
        self._sees_functions = config.level in ("L1", "mix")
        self.wants_input = selection.wants_side("input")
        self.wants_output = selection.wants_side("output")
        self._forward = selection.wants_direction("forward")
        self.wants_backward = selection.wants_direction("backward")
        self.everything = selection.everything and self._forward and self.wants_backward

    @property
    def n_steps(self) -> int:
        """Steps of which anything was recorded."""
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor content kept in this step, before equal content is written once."""
        return self._values.nbytes

    # Steps

    def begin_step(self, step: int, wanted: bool) -> None:
        """Go to another step; or on with this one, after a pause, where its numbers stand."""
        self.end_step()
        self.recording = wanted
        self.writer.end_step()
        self.is_open = False
        if step == self.step:
            return
        self.step = step
        if not self._counts_on:
            self.counter.reset()
        self.selection.begin_step()
        if wanted:
            self._values.begin_step()
            self._early_stacks.clear()
            self.stacks.reset()

    def open_step(self) -> None:
        """A step gets its folder with its first call, so that one nobody ran leaves no trace."""
        if self.is_open:
            return
        with self._opening:  # or a second thread's first call would find no file yet
            if self.is_open or self._is_opening:  # then there is no file yet for what it calls
                return
            self._is_opening = True
            try:
                self._steps.add(self.step)
                self.writer.begin_step(self.step)
                for line in self._early_stacks:
                    self.writer.stack(line)
                self._early_stacks.clear()
                self.is_open = True
            finally:
                self._is_opening = False
            self.on_open(self.step)

    # Calls

    def wants(self, names: CallNames) -> bool:
        """Whether this call is wanted. Asked once for every call, in order."""
        return self.everything or self.selection.decide(names)

    def select(self, api: ApiName, name: str, module: str) -> CallNames | None:
        """The names of this forward call, if it or its backward is wanted."""
        names = CallNames(api, name, module)
        if self.everything or self.selection.decide(names):
            return names
        if self.selection.may_want_backward(names):
            return names.but(wanted=False)
        return None

    def plain_calls(
        self,
        plans: dict[Any, Any],
        describe: Callable[[ApiName], tuple[str, str, str, frozenset[str]] | None],
        stand_ins: StandIns,
    ) -> Any:
        """What makes and records a call in C++, `(mode, func, args, kwargs)`, or gives the mode
        and has done nothing. None where there is none: not every call is
        recorded, or contents are kept by the names of their calls.

        `plans` has the names of functions. `describe` says what the calls of an API are named,
        around their number, its op, and what it writes to; None where none is plain.
        """
        lines, log, keep = self.lines.native, self.writer.log, self._keep
        if lines is None or log is None or keep in (None, "tensors") or not self._values.nameless:
            return None
        if not self.everything or type(self) is not Tape or not self._sees_functions:
            return None
        return native.MODULE.Calls(
            tape=self,
            lines=lines,
            log=log,
            plans=plans,
            describe=describe,
            counter=self.counter,
            place=self.place,
            keep=keep,
            stacks=self.stacks if self.config.stacks else None,
            stand_ins=stand_ins,
            handler=HANDLER,
            compiler=COMPILER,
            state_notes=_state_notes,
            encode=encode_now,
            positions=POSITIONS,
            only_path=ONLY,
            output_spots=_OUTPUT_SPOTS,
            no_aliases=_NO_ALIASES,
            open_call=OpenCall,
            out=OUT,
            call_names=CallNames,
            call_line=CallLine,
            end_line=EndLine,
            stack_line=StackLine,
            raw=Raw,
            one_node=NodeBackward,
            one_way=WayBackward,
            any_way=Backward,
            node_run=NodeRun,
            wants_input=self.wants_input,
            wants_output=self.wants_output,
        ).call

    def begin(
        self,
        names: CallNames,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        frame: FrameType | None = None,
        grad: bool = False,
        parent: str | None = None,
        random: bool | None = None,
        writes: frozenset[str] | None = None,
        stack: int | None = None,
        collective: CollectiveLine | None = None,
        **named: Iterable[tuple[str, torch.Tensor]],
    ) -> OpenCall | None:
        """Write down a call before it runs; `frame` makes it, or whoever calls this.

        `named`: parameters, parameter_grads, buffers, states.
        """
        try:
            kwargs = kwargs or _NO_KWARGS
            call = OpenCall(names, self._keep or self.selection.keep_for(names), self.step)
            call.collective = collective
            if not names.wanted:
                return self._watch(call, args, kwargs, grad)
            if not self.is_open:
                self.open_step()
            place = self.place
            if stack is not None:
                call.stack = stack
            elif self.config.stacks:
                frame = frame or sys._getframe(1)
                call.stack = self.stacks.current(frame, place.frame, place.stack)
            with _DISABLED():
                if self._unfinished:
                    self.collectives.read_finished()
                if writes is None:
                    if names.api not in self._silent or "out" in kwargs:
                        call.writes = self._writes_to(names.api, args, kwargs)
                elif writes:
                    call.writes = writes
                    self._forget_arguments(writes, args, kwargs)
                if call.writes and self._unfinished:
                    self.collectives.before_write(args, kwargs)
                positional, keywords = self.lines.arguments(call, args, kwargs, self.wants_input)
                call.versions = self._versions_of(call.inputs)
                line = CallLine(
                    id=0,
                    name=names.name,
                    op=names.api.op,
                    module=names.module,
                    direction=names.direction,
                    parent=place.parent if parent is None else parent,
                    stack=call.stack,
                    args=positional,
                    kwargs=keywords,
                    thread=place.thread,
                    collective=collective,
                )
                if _autocasts() or _graph_task_id() != -1:
                    line.notes = _state_notes(grad)
                if named:
                    for section, tensors in named.items():
                        if held := self._named(call, section, tensors):
                            setattr(line, section, held)
                if grad:
                    call.edges = edges = self._note_edges(call.inputs)
                    if self._sees_functions and edges.has_functions:
                        self._record_functions_of(edges)
                if call.keep == "tensors" and (may_draw(names.api) if random is None else random):
                    with Quiet():
                        call.draws = random_state(args, kwargs)
                call.id = line.id = next(self.ids)  # after the Functions that made the inputs
                self.writer.call(line)
            return call
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self.gap(names.name, error)
            return None

    def end(
        self,
        call: OpenCall,
        result: Any,
        tracer: Tracer = trace_call,
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        **named: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Write down what a call returned, and listen to its backward. `named`: parameter_grads,
        states, as they are now."""
        try:
            outputs: list[tuple[torch.Tensor, Path]] = []
            with _DISABLED():
                if self._unfinished:
                    self.collectives.read_finished()
                versions, prefix = self._versions_of(call.inputs), call.names.api.prefix
                if versions != call.versions or call.writes or prefix == _DISTRIBUTED:
                    mutated = self._mutated(call, versions)
                else:
                    mutated = _NOTHING
                edges = call.edges if self.wants_backward else None
                if call.id < 0:  # no line: only its backward is wanted
                    map_tensors(result, lambda tensor, path: outputs.append((tensor, path or ONLY)))
                    if edges is not None:
                        self._trace(call, edges, outputs or mutated, tracer)
                    return
                if type(result) in PLAIN_TENSORS:
                    outputs.append((result, ONLY))
                    tree = self.lines.encoded(result, call, "output", ONLY, self.wants_output)
                else:
                    encoder = self.lines.encoder(call, "output", self.wants_output, outputs, {})
                    tree = encode(result, encoder)
                line = EndLine(id=call.id, outputs=tree, notes=call.notes)
                held: dict[str, TensorLine] = {}
                if mutated:
                    if outputs:
                        held = self._written(call, mutated, outputs)
                    else:
                        line.outputs = self._arguments_after(call, mutated, outputs)
                        call.notes.append(_OUTPUT_IS_ARGUMENTS)
                if call.draws is not None:
                    held |= self._drawn(call, call.draws)
                for name, tensor in buffers:
                    held[name] = self.lines.line(tensor, call, "buffer", name, self.wants_output)
                if held:
                    line.buffers = held
                for section, tensors in named.items():
                    role = _ROLES[section]
                    if lines := self.lines.named(tensors, call, role, self.wants_output):
                        setattr(line, section, lines)
                if edges is not None:
                    self._trace(call, edges, outputs, tracer)
                self.writer.end(line)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._end_failed(call, error)

    def _end_failed(self, call: OpenCall, error: Exception) -> None:
        self.gap(call.names.name, error)
        if call.written:
            self.writer.end(EndLine(id=call.id, notes=["what it returned is not recorded"]))

    def _writes_to(
        self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> frozenset[str]:
        """The arguments that a call will write to, whatever their versions say."""
        writes = declared_writes(api)
        if not writes and api.op not in WRITES_STATISTICS and not lends(api):
            if len(self._silent) >= _MAX_SILENT:
                self._silent.clear()
            self._silent.add(api)
        if "out" in kwargs:
            writes |= OUT
        if api.op in WRITES_STATISTICS and (silent := silently_written(api, args, kwargs)):
            self._forget_arguments(silent, args, kwargs)
            writes |= silent
        if lends(api):
            self._values.lend(args[0])
        return writes

    def _forget_arguments(
        self, names: frozenset[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """What a call is about to write to unseen may have been written unseen before."""
        given = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
        for name in names & given.keys():
            map_tensors(given[name], lambda tensor, path: self._values.forget(tensor))

    def _watch(
        self, call: OpenCall, args: Sequence[Any], kwargs: Mapping[str, Any], grad: bool
    ) -> OpenCall:
        """Begin a call of which only the backward is wanted."""

        def note(tensor: torch.Tensor, path: Path) -> None:
            call.inputs.append((tensor, path))

        with _DISABLED():
            for name, arg in (*zip(map(str, range(len(args))), args, strict=True), *kwargs.items()):
                encode(arg, note, (name,))
            call.versions = self._versions_of(call.inputs)
            if grad:
                call.edges = self._note_edges(call.inputs)
        return call

    def _drawn(self, call: OpenCall, draws: Draws) -> dict[str, TensorLine]:
        """The state that a random call started from, by which it can be repeated."""
        read, before = draws
        with Quiet():
            if torch.equal(before, read()):
                return {}
        return {"rng_state": self.lines.kept(before, call, "buffer", "rng_state")}

    def _trace(
        self,
        call: OpenCall,
        edges: Any,
        outputs: list[tuple[torch.Tensor, Path]],
        tracer: Tracer,
    ) -> None:
        if tracer is trace_call and len(outputs) == 1:
            output = outputs[0][0]
            if not edges.has_leaves and not output.requires_grad:
                return  # what most calls without a gradient come to
            if not isinstance(edges, InputEdges):
                exits = edges.exits_of(output)
                if exits is not None:
                    if len(exits) > 1 or edges.is_nested:
                        self._listen(call, edges, len(exits))
                        return
                    kind = NodeBackward if edges.is_one_node else WayBackward
                    edges.listen(kind(self, call.names, call.keep, call.stack, call.step, exits[0]))
                    return
            elif (found := one_node(output, edges)) is not None:
                node, spots = found
                short = NodeBackward(self, call.names, call.keep, call.stack, call.step, spots)
                node.register_prehook(short)
                node.register_hook(short)
                return
        trace = tracer(outputs, edges)
        if isinstance(trace, Way):
            way = ModuleBackward(self, call.names, call.keep, call.stack, call.step, trace.spots)
            if trace.node is None:
                edges.listen(way)
            else:
                trace.node.register_prehook(way)
                trace.last.register_hook(way)
            return
        if trace.notes:
            call.notes.extend(trace.notes)
        if trace.outputs:
            self.follow(call, trace, whole(edges).aliases)

    def _listen(self, call: OpenCall, edges: Any, n_exits: int) -> None:
        """Listen to the backward of a call that is left at several nodes, found in C++."""
        backward = Backward(
            self, call.names, call.keep, call.stack, call.step, {}, 1 + n_exits, _NO_ALIASES
        )
        edges.listen(backward, _OUTPUT_SPOTS)

    def save(self, name: str, value: Any, frame: FrameType) -> None:
        """Write down a value given by hand in `frame`, as the output of a call of that name."""
        api = ApiName("Saved", name, name)
        names = self.select(api, self.counter.next_name(api), self.place.module)
        if names is None:
            return
        call = self.begin(names, frame=frame)
        if call is not None:
            call.edges = InputEdges()
            self.end(call, value, trace_saved)

    def found(
        self, names: CallNames, gradients: list[tuple[str, torch.Tensor]], stack: int | None
    ) -> None:
        """Write down gradients of parameters, as a call that is over: nothing runs inside it."""
        if not self.is_open:
            self.open_step()
        call = OpenCall(names, self._keep or self.selection.keep_for(names), self.step)
        with _DISABLED():
            if self._unfinished:
                self.collectives.read_finished()
            line = CallLine(
                id=next(self.ids),
                name=names.name,
                op=names.api.op,
                module=names.module,
                direction=names.direction,
                parent="",
                stack=stack,
                thread=self.place.thread,
                parameter_grads=self.lines.named(gradients, call, "parameter_grad") or NO_TENSORS,
            )
            if _autocasts() or _graph_task_id() != -1:
                line.notes = _state_notes(False)
            self.writer.call(line)
            self.writer.end(EndLine(id=line.id))

    def raised(self, call: OpenCall, error: BaseException) -> None:
        """The call did not return."""
        if not call.written:
            return
        text = _error_text(error)
        if type(error).__name__ == "_StopRecomputationError":
            # not a failure: torch.utils.checkpoint has all it needs and leaves by raising
            self.writer.end(EndLine(id=call.id, notes=["recomputation ended here"]))
            return
        self.writer.end(EndLine(id=call.id, status="raised", error=text[:2000]))

    def gap(self, name: str, reason: BaseException | str) -> None:
        text = reason if isinstance(reason, str) else _error_text(reason)
        with OnTrouble(self.writer.fail):  # no memory is left, say: recording ends here
            self.open_step()
            self.writer.gap(GapLine(name=name, reason=text[:2000]))

    # After the call

    def _named(
        self, call: OpenCall, section: str, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, Any]:
        role = _ROLES[section]
        if role == "buffer":  # small, and written by C++ that moves no version (DDP's broadcast)
            tensors = list(tensors)
            for _, tensor in tensors:
                self._values.forget(tensor)
        return self.lines.named(tensors, call, role)

    def contents(
        self, call: OpenCall, role: Role, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, Any]:
        """What tells the contents that tensors of a call have now from those they have later."""
        with _DISABLED():
            lines = self.lines.named(tensors, call, role)
        return {
            name: bytes(line) if type(line) is Raw else line.value for name, line in lines.items()
        }

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were perhaps written to in a way that moves no version."""
        with Quiet():
            for tensor in tensors:
                self._values.forget(tensor)

    def forget_call(self, api: ApiName, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call that is not recorded has ended: what it wrote may be recorded later."""
        if writes_in_place(api) or "out" in kwargs:
            self.forget_written(args, kwargs)
        elif lends(api):
            self._values.lend(args[0])
        elif names := declared_writes(api) | silently_written(api, args, kwargs):
            with OnTrouble(self.gap, "forget"), Quiet():
                self._forget_arguments(names, args, kwargs)

    def forget_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call that is not recorded wrote to some of these, perhaps through `.data`."""
        forget = self._values.forget
        with OnTrouble(self.gap, "forget"), Quiet():
            for value in (*args, *kwargs.values()):
                map_tensors(value, lambda tensor, path: forget(tensor))

    def _mutated(self, call: OpenCall, versions: list[int]) -> list[tuple[torch.Tensor, Path]]:
        """Inputs that the call wrote to; they have these versions by now."""
        api = call.names.api
        if api.prefix == _DISTRIBUTED and not api.op.startswith(FUNCTIONAL):  # moves no version
            for tensor, _ in call.inputs:
                self._values.forget(tensor)
            return call.inputs
        found = [
            item
            for item, before, after in zip(call.inputs, call.versions, versions, strict=True)
            if before != after or item[1][0] in call.writes
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
            line = self.lines.line(tensor, call, "output", path, self.wants_output)
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
                lines[label] = self.lines.line(tensor, call, "buffer", label, self.wants_output)
        return lines

    def follow(self, call: OpenCall, trace: Trace, aliases: dict[Path, Path]) -> None:
        """Record the backward of this call when it runs."""
        backward = Backward(
            self,
            call.names,
            call.keep,
            call.stack,
            call.step,
            trace.contributions(),
            len(trace.outputs) + len(trace.boundary),
            aliases or _NO_ALIASES,
        )
        for reason in trace.gaps:
            self.gap(backward.name, reason)
        self._leaf_listeners += listen(trace, backward.incoming, backward.outgoing)

    def _record_functions_of(self, edges: Any) -> None:
        self.functions.record(whole(edges).functions)

    # Backward

    def fail_backwards(self, error: BaseException, alone: bool) -> None:
        """An exception comes out of backward: the call it was in has raised, and the modules that
        the call is in. What raises elsewhere, as in a hook of the program's, is no call's.

        `alone`: no other thread goes backward meanwhile.
        """
        entered = self.entered.pop(threading.get_ident(), None)
        if entered is None and alone and self.entered:  # in a thread of a device
            entered = self.entered.popitem()[1]
        running = list(self.running.values())
        if entered is None or entered not in running:
            return
        text = _error_text(error)[:2000]
        tasks = (entered.key[1], _graph_task_id())  # and the backward around that one, if any
        for run in running:
            if run is None or (run.key[1] not in tasks and not alone):
                continue
            if run is entered or run.is_inside_module:
                with OnTrouble(self.gap, run.names.name), Quiet():
                    run.fail(text)

    def finish_backwards(self) -> None:
        """Close what backward calls are open: the backward pass has ended."""
        runs = list(self.running.values())
        self.running.clear()
        self.entered.clear()
        with Quiet():
            for run in filter(None, runs):
                with OnTrouble(self.gap, "backward"):
                    run.finish()

    def end_step(self) -> None:
        """Close what is open: the step is over, or the recording."""
        self.finish_backwards()
        self.collectives.end_step()
        for listener in self._leaf_listeners:
            listener.handle.remove()
        self._leaf_listeners.clear()

    def stack_number(self, frame: FrameType) -> int:
        """The number of the stack from `frame` outwards."""
        return self.stacks.current(frame, self.place.frame, self.place.stack)

    def add_stack(self, frames: Sequence[str]) -> int:
        """Write down a stack that was noted earlier; its number is for `begin`."""
        self.open_step()
        return self.stacks.add(list(frames))

    def _write_stack(self, id: int, frames: list[str]) -> None:
        line = StackLine(id=id, frames=frames)
        if self.is_open:
            self.writer.stack(line)
        else:
            self._early_stacks.append(line)


def _error_text(error: BaseException) -> str:
    kind, text = type(error).__name__, text_of(error)
    return f"{kind}: {text}" if text is not None else kind


def _state_notes(grad: bool) -> list[str]:
    """What about the surroundings changes how a call computes."""
    notes = []
    if _autocasts():
        notes += [f"autocast {device} {dtype}" for device, dtype in autocast_dtypes().items()]
    if _graph_task_id() != -1:
        notes.append("inside backward: recomputation" if grad and _recomputes() else _IN_BACKWARD)
    return notes


def _recomputes() -> bool:
    """Whether it is not a custom Function's backward that runs, but a checkpoint's forward."""
    node = torch._C._current_autograd_node()
    return not isinstance(node, BackwardCFunction) or "Checkpoint" in node.name()
