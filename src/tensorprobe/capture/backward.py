"""The backward of recorded calls: gradients that come in, gradients sent to the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import as_arguments, nest_gradients
from tensorprobe.capture.gradients import Gradients, Path, Spot, Trace
from tensorprobe.capture.naming import CallNames, split_direction, with_direction
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.tensor_lines import ONLY
from tensorprobe.records import Keep, Role
from tensorprobe.store.lines import CallLine, EndLine

if TYPE_CHECKING:
    from tensorprobe.capture.tape import Tape

_DISABLED = torch._C.DisableTorchFunction
_graph_task_id = torch._C._current_graph_task_id
_NO_NOTES: list[str] = []  # of most calls; never added to


class _Followed:
    """A recorded call whose backward is to come, as often as backward passes through it.

    It holds no node and no tensor of the graph, or the graph would never be freed.
    """

    __slots__ = ("_keep", "_names", "_passes", "_stack", "_step", "_tape")

    def __init__(self, tape: Tape, call: OpenCall) -> None:
        self._tape = tape
        self._names, self._keep = call.names, call.keep
        self._stack, self._step = call.stack, call.step
        self._passes = 0

    @property
    def name(self) -> str:
        """What the backward is called."""
        name = self._names.name
        if name.endswith(".forward"):
            return f"{name[:-8]}.backward"
        return with_direction(split_direction(name)[0], "backward")

    def _wanted_names(self) -> CallNames | None:
        names = CallNames(self._names.api, self.name, self._names.module, "backward")
        return names if self._tape.wants(names) else None

    def _place(self, run: Run) -> None:
        """Tell a pass that has begun where the call was made, and what is special about it."""
        if self._step == self._tape.step:
            run.stack = self._stack
        else:
            run.notes = [f"its forward ran in step {self._step}"]
        self._passes += 1
        if self._passes > 1:
            again = f"backward pass {self._passes} through the same graph"
            run.notes = [*run.notes, again]


class NodeBackward(_Followed):
    """Of a call that made one graph node and returned one tensor, as most calls do: that node is
    entered once and left once in a pass. What `Backward` does of any call, with less."""

    __slots__ = ("_spots",)

    def __init__(self, tape: Tape, call: OpenCall, spots: list[Spot]) -> None:
        super().__init__(tape, call)
        self._spots = spots

    def incoming(self, grads: Gradients) -> None:
        """Backward has come to the node."""
        tape = self._tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                key = (id(self), _graph_task_id())
                names = self._wanted_names()
                if names is None:
                    tape.entered = tape.running[key] = None
                    return
                run = _NodeRun(tape, key, names, self._keep)
                self._place(run)
                tape.entered = tape.running[key] = run
                grad = grads[0]
                if grad is None:
                    run.begin([None], {})
                else:
                    wanted = tape.wants_input
                    run.begin([tape.lines.encoded(grad, run, "input", ONLY, wanted, False)], {})
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def outgoing(self, grads: Gradients, came_in: Gradients) -> None:
        """Backward leaves the node."""
        tape = self._tape
        if not tape.recording:
            return
        try:
            tape.entered = None
            run: Any = tape.running.pop((id(self), _graph_task_id()), None)
            if run is None:
                return
            wanted, encoded, sent = tape.wants_output, tape.lines.encoded, []
            with _DISABLED():
                for position, path, _ in self._spots:
                    grad = grads[position]
                    if grad is not None:
                        grad = encoded(grad, run, "output", path, wanted, False)
                    sent.append([path[0], grad])
                tape.writer.end(EndLine(id=run.id, outputs={"dict": sent}))
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)


class Backward(_Followed):
    """Of any call."""

    __slots__ = ("aliases", "contributions", "n_nodes")

    def __init__(self, tape: Tape, call: OpenCall, trace: Trace, aliases: dict[Path, Path]) -> None:
        super().__init__(tape, call)
        self.contributions = trace.contributions()
        self.n_nodes = len(trace.outputs) + len(trace.boundary)
        self.aliases = aliases

    def incoming(self, spots: list[Spot], grads: Gradients) -> None:
        """Backward has come to a node of an output."""
        tape = self._tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                run = self._run()
                # the node of a module's output is that of the call which made it
                if tape.entered is None or self._names.api.prefix != "Module":
                    tape.entered = run
                if run is not None:
                    run.receive(spots, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def outgoing(self, spots: list[Spot], grads: Gradients, came_in: Gradients) -> None:
        """Backward leaves a node at an input's edge."""
        tape = self._tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                tape.entered = None
                run = self._run()
                if run is not None:
                    run.send(spots, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def _run(self) -> BackwardRun | None:
        """The pass under way; None where it is not wanted, which is asked once a pass."""
        running = self._tape.running
        key = (id(self), _graph_task_id())
        if key in running:
            return running[key]  # type: ignore[return-value]
        names = self._wanted_names()
        run = None if names is None else BackwardRun(self._tape, key, names, self._keep, self)
        if run is not None:
            self._place(run)
        running[key] = run
        return run


class Run:
    """One pass of backward through one call."""

    __slots__ = ("_key", "_tape", "id", "keep", "names", "notes", "stack")

    def __init__(self, tape: Tape, key: tuple[int, int], names: CallNames, keep: Keep) -> None:
        if not tape.is_open:
            tape.open_step()
        self._tape, self._key = tape, key
        self.names, self.keep = names, keep
        self.id = next(tape.ids)
        self.stack: int | None = None
        self.notes: list[str] = _NO_NOTES

    def line(self, grad: torch.Tensor | None, path: Path, role: Role, wanted: bool) -> Any:
        if grad is None:
            return None
        # whether it has a gradient is said of tensors of the program: one has it by create_graph
        return self._tape.lines.encoded(grad, self, role, path, wanted, False)

    def begin(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Write down that backward has come to the call."""
        tape, names = self._tape, self.names
        tape.writer.call(
            CallLine(
                id=self.id,
                name=names.name,
                op=names.api.op,
                module=names.module,
                direction="backward",
                stack=self.stack,
                args=args,
                kwargs=kwargs,
                thread=tape.place.thread,
                notes=self.notes,
            )
        )

    @property
    def is_inside_module(self) -> bool:
        """Whether backward has come into a module, and not to its inputs yet."""
        return False

    def fail(self, error: str) -> None:
        """Backward was left by an exception inside of this call."""
        self._tape.running.pop(self._key, None)
        self.finish(error)

    def finish(self, error: str | None = None) -> None:
        """Write down what came; some of it may be missing, and is then not there to come."""
        raise NotImplementedError


class _NodeRun(Run):
    """A pass through a call of one node."""

    __slots__ = ()

    def finish(self, error: str | None = None) -> None:
        """The node was entered and never left."""
        line = EndLine(id=self.id, outputs={"dict": []})
        if error is not None:
            line.status, line.error = "raised", error
        self._tape.writer.end(line)


class BackwardRun(Run):
    """A pass through any call.

    Outputs may hang in different parts of the graph: a gradient that comes in after the call was
    written down is written with its end; one of an output nobody used never comes.
    """

    __slots__ = ("_backward", "_begun", "_late", "_left", "_n_left", "_received", "_sent", "_sums")

    def __init__(
        self, tape: Tape, key: tuple[int, int], names: CallNames, keep: Keep, backward: Backward
    ) -> None:
        super().__init__(tape, key, names, keep)
        self._backward = backward
        self._left: dict[Path, int] | None = None  # of inputs that get several gradients
        self._n_left = backward.n_nodes
        self._received: dict[Path, Any] = {}
        self._sums: dict[Path, torch.Tensor] = {}
        self._sent: dict[Path, Any] = {}
        self._begun = False
        self._late = False  # a gradient came in after the call was written down

    def receive(self, spots: list[Spot], grads: Gradients) -> None:
        """Gradients of outputs, as they come in."""
        tape = self._tape
        wanted = tape.wants_input
        for number, path, window in spots:
            if number >= len(grads):
                continue
            grad = grads[number]
            if grad is not None and window is not None:
                with Quiet():
                    grad = window.cut(grad)
            self._received[path] = self.line(grad, path, "input", wanted)
        if self._begun:
            self._late = True
        else:
            self._begin()
        self._count_down()

    def send(self, spots: list[Spot], grads: Gradients) -> None:
        """Gradients of inputs, as they go out."""
        if not self._begun:
            self._begin()
        several = self._backward.contributions
        wanted = self._tape.wants_output
        for position, path, window in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is not None and window is not None:
                with Quiet():
                    grad = window.cut(grad)
            if path in several:
                self._add(path, grad)
            else:
                self._sent[path] = self.line(grad, path, "output", wanted)
        self._count_down()

    @property
    def is_inside_module(self) -> bool:
        return self.names.api.prefix == "Module" and not self._sent and self._left is None

    def finish(self, error: str | None = None) -> None:
        """Write down what came; some of it may be missing, and is then not there to come."""
        if not self._begun:
            self._begin()
        for path, grad in self._sums.items():  # backward did not come by every use
            self._sent[path] = self.line(grad, path, "output", self._tape.wants_output)
        notes = [
            f"output.{'.'.join(path)} is in output.{'.'.join(first)}: one tensor"
            for path, first in self._backward.aliases.items()
            if first in self._sent
        ]
        outputs = nest_gradients(_in_order(self._sent))
        line = EndLine(id=self.id, outputs=outputs, notes=notes)
        if error is not None:
            line.status, line.error = "raised", error
        if self._late:
            line.args, line.kwargs = as_arguments(_in_order(self._received))
        self._tape.writer.end(line)

    def _count_down(self) -> None:
        self._n_left -= 1
        if self._n_left == 0:
            self._tape.running.pop(self._key, None)
            self.finish()

    def _add(self, path: Path, grad: torch.Tensor | None) -> None:
        """An input used several times gets its gradient in parts, which add up as they come."""
        if self._left is None:
            self._left = dict(self._backward.contributions)
        if grad is not None:
            before = self._sums.get(path)
            if before is not None:
                with Quiet():
                    grad = before + grad
            self._sums[path] = grad
        self._left[path] -= 1
        if self._left[path] == 0:
            self._sent[path] = self.line(
                self._sums.pop(path, None), path, "output", self._tape.wants_output
            )

    def _begin(self) -> None:
        self._begun = True
        self.begin(*as_arguments(_in_order(self._received)))


def _in_order(leaves: dict[Path, Any]) -> dict[Path, Any]:
    """Gradients in the order of the arguments they belong to, not that of their coming."""
    if len(leaves) < 2:
        return leaves
    return {path: leaves[path] for path in sorted(leaves, key=_place)}


def _place(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (1 << 30, part) for part in path]
