"""The backward of recorded calls: gradients that come in, gradients sent to the inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tensorprobe.follow.gradients import ONLY, Gradients, Path, Spot
from tensorprobe.follow.naming import CallNames, split_direction, with_direction
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.encode import as_arguments, nest_gradients
from tensorprobe.records import Keep, Role
from tensorprobe.store.lines import CallLine, EndLine

if TYPE_CHECKING:
    from tensorprobe.record.tape import Tape

_DISABLED = torch._C.DisableTorchFunction
_graph_task_id = torch._C._current_graph_task_id
_ident = threading.get_ident


class _Followed(msgspec.Struct, eq=False, gc=False):
    """A recorded call whose backward is to come, as often as backward passes through it.

    It holds no node and no tensor of the graph, or the graph would never be freed. A Struct, as one
    is made for every call, in C; the garbage collector, which would walk them all, has no need to.
    """

    tape: Tape
    call: CallNames
    keep: Keep
    stack: int | None
    step: int

    @property
    def name(self) -> str:
        """What the backward is called."""
        name = self.call.name
        if name.endswith(".forward"):
            return f"{name[:-8]}.backward"
        if self.call.api.prefix == "Module":
            return f"{self.call.api.stem}.backward.{name.rpartition('.')[2]}"
        return with_direction(split_direction(name)[0], "backward")

    def _wanted_names(self) -> CallNames | None:
        names = CallNames(self.call.api, self.name, self.call.module, "backward")
        return names if self.tape.wants(names) else None

    def _notes(self, n_passes: int) -> list[str]:
        """What is special about a pass: that of another step, or not the first."""
        notes = []
        if self.step != self.tape.step:
            notes.append(f"its forward ran in step {self.step}")
        if n_passes > 1:
            notes.append(f"backward pass {n_passes} through the same graph")
        return notes


class NodeBackward(_Followed):
    """Of a call that made one graph node and returned one tensor, as most calls do: that node is
    entered once and left once in a pass. What `Backward` does of any call, with less.

    It is both hooks of the node itself: methods would be two objects more for each call, which
    live as long as the graph, and have the garbage collector look through all there is.
    """

    spots: tuple[Spot, ...]
    n_passes: int = 0

    def __call__(self, grads: Gradients, came_in: Gradients | None = None) -> None:
        if came_in is None:
            self.incoming(grads)
        else:
            self.outgoing(grads)

    def incoming(self, grads: Gradients) -> None:
        """Backward has come to the node."""
        tape = self.tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                key = (id(self), _graph_task_id())
                call = self.call
                names: CallNames | None
                if tape.everything and call.name.endswith(".forward"):  # as most, without a frame
                    name = f"{call.name[:-8]}.backward"
                    names = CallNames(call.api, name, call.module, "backward")
                else:
                    names = self._wanted_names()
                if names is None:
                    tape.running[key] = None
                    tape.entered.pop(_ident(), None)
                    return
                if not tape.is_open:
                    tape.open_step()
                self.n_passes = n_passes = self.n_passes + 1
                run = NodeRun(tape, key, names, self.keep, next(tape.ids))
                tape.entered[_ident()] = tape.running[key] = run
                args: list[Any] = [*grads[:1]]
                if args and args[0] is not None:
                    wanted = tape.wants_input
                    args[0] = tape.lines.encoded(args[0], run, "input", ONLY, wanted, False)
                line = CallLine(
                    id=run.id,
                    name=names.name,
                    op=names.api.op,
                    module=names.module,
                    direction="backward",
                    stack=self.stack,
                    args=args,
                    thread=tape.place.thread,
                )
                if n_passes > 1 or self.step != tape.step:
                    line.stack = self.stack if self.step == tape.step else None
                    line.notes = self._notes(n_passes)
                tape.writer.call(line)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def outgoing(self, grads: Gradients) -> None:
        """Backward leaves the node."""
        tape = self.tape
        if not tape.recording:
            return
        try:
            tape.entered.pop(_ident(), None)
            run: Any = tape.running.pop((id(self), _graph_task_id()), None)
            if run is None:
                return
            wanted, encoded, sent = tape.wants_output, tape.lines.encoded, []
            with _DISABLED():
                for position, path, _ in self.spots:
                    grad = grads[position]
                    if grad is not None:
                        grad = encoded(grad, run, "output", path, wanted, False)
                    sent.append([path[0], grad])
                tape.writer.end(EndLine(id=run.id, outputs={"dict": sent}))
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)


class WayBackward(NodeBackward):
    """Records the backward of a call that backward enters at one node and leaves at another."""

    def outgoing(self, grads: Gradients) -> None:
        """Backward leaves the node at the inputs' edges."""
        if (id(self), _graph_task_id()) not in self.tape.running:
            self.incoming(())  # it came by way of a tensor that left the call unseen
        NodeBackward.outgoing(self, grads)  # `super` takes longer than the call


class ModuleBackward(WayBackward):
    """Records the backward of a module with one output tensor and one input gradient."""

    def incoming(self, grads: Gradients) -> None:
        """Backward has come to the node of the output."""
        tape, ident = self.tape, _ident()
        around = tape.entered.get(ident)
        passed = tape.passed.get(ident)
        if passed is None:
            passed = tape.passed.setdefault(ident, set())
        passed.add(self.call.module)
        NodeBackward.incoming(self, grads)
        if around is not None:  # the call that made the output has the same node
            tape.entered[ident] = around


class Backward(_Followed):
    """Records the backward of any call."""

    contributions: dict[Path, int]
    n_nodes: int
    aliases: dict[Path, Path]
    n_passes: int = 0

    def incoming(self, spots: Sequence[Spot], grads: Gradients) -> None:
        """Backward has come to a node of an output."""
        tape = self.tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                run = self._run()
                # the node of a module's output is that of the call which made it
                if self.call.api.prefix != "Module":
                    tape.entered.pop(_ident(), None)
                else:
                    tape.passed.setdefault(_ident(), set()).add(self.call.module)
                if run is not None:
                    tape.entered.setdefault(_ident(), run)
                    run.receive(spots, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def hook(self, spots: Sequence[Spot]) -> Callable[..., None]:
        """Either hook of a node, for those who register one that is in Python."""

        def hook(grads: Gradients, came_in: Gradients | None = None) -> None:
            if came_in is None:
                self.incoming(spots, grads)
            else:
                self.outgoing(spots, grads)

        return hook

    def outgoing(
        self, spots: Sequence[Spot], grads: Gradients, came_in: Gradients | None = None
    ) -> None:
        """Backward leaves a node at an input's edge."""
        tape = self.tape
        if not tape.recording:
            return
        try:
            with _DISABLED():
                tape.entered.pop(_ident(), None)
                run = self._run()
                if run is not None:
                    run.send(spots, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def _run(self) -> BackwardRun | None:
        """The pass under way; None where it is not wanted, which is asked once a pass."""
        tape = self.tape
        key = (id(self), _graph_task_id())
        if key in tape.running:
            return tape.running[key]  # type: ignore[return-value]
        names = self._wanted_names()
        run = None
        if names is not None:
            tape.open_step()
            self.n_passes += 1
            notes = self._notes(self.n_passes)
            run = BackwardRun(tape, key, names, self.keep, next(tape.ids), self, notes)
            run.n_left = self.n_nodes
        tape.running[key] = run
        return run


class Run(msgspec.Struct, eq=False, gc=False):
    """One pass of backward through one call."""

    tape: Tape
    key: tuple[int, int]
    names: CallNames
    keep: Keep
    id: int

    @property
    def is_inside_module(self) -> bool:
        """Whether backward has come into a module, and not to its inputs yet."""
        return False

    def fail(self, error: str) -> None:
        """Backward was left by an exception inside of this call."""
        self.tape.running.pop(self.key, None)
        self.finish(error)

    def finish(self, error: str | None = None) -> None:
        """Write down what came; some of it may be missing, and is then not there to come."""
        raise NotImplementedError


class NodeRun(Run):
    """A pass through a call that is entered once and left once, and over then."""

    @property
    def is_inside_module(self) -> bool:
        return self.names.api.prefix == "Module"

    def finish(self, error: str | None = None) -> None:
        """The node was entered and never left."""
        line = EndLine(id=self.id, outputs={"dict": []})
        if error is not None:
            line.status, line.error = "raised", error
        self.tape.writer.end(line)


class BackwardRun(Run):
    """A pass through any call.

    Outputs may hang in different parts of the graph: a gradient that comes in after the call was
    written down is written with its end; one of an output nobody used never comes.
    """

    backward: Backward
    notes: list[str]
    n_left: int = 0  # nodes that backward has not come by yet
    left: dict[Path, int] | None = None  # of inputs that get several gradients
    received: dict[Path, Any] = {}
    sums: dict[Path, torch.Tensor] = {}
    sent: dict[Path, Any] = {}
    begun: bool = False
    late: bool = False  # a gradient came in after the call was written down

    def receive(self, spots: Sequence[Spot], grads: Gradients) -> None:
        """Gradients of outputs, as they come in."""
        tape = self.tape
        wanted = tape.wants_input
        for number, path, window in spots:
            if number >= len(grads):
                continue
            grad = grads[number]
            if grad is not None and window is not None:
                with Quiet():
                    grad = window.cut(grad)
            self.received[path] = self.line(grad, path, "input", wanted)
        if self.begun:
            self.late = True
        else:
            self._begin()
        self._count_down()

    def send(self, spots: Sequence[Spot], grads: Gradients) -> None:
        """Gradients of inputs, as they go out."""
        if not self.begun:
            self._begin()
        several = self.backward.contributions
        wanted = self.tape.wants_output
        for position, path, window in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is not None and window is not None:
                with Quiet():
                    grad = window.cut(grad)
            if path in several:
                self._add(path, grad)
            else:
                self.sent[path] = self.line(grad, path, "output", wanted)
        self._count_down()

    @property
    def is_inside_module(self) -> bool:
        return self.names.api.prefix == "Module" and not self.sent and self.left is None

    def finish(self, error: str | None = None) -> None:
        """Write down what came; some of it may be missing, and is then not there to come."""
        if not self.begun:
            self._begin()
        for path, grad in self.sums.items():  # backward did not come by every use
            self.sent[path] = self.line(grad, path, "output", self.tape.wants_output)
        notes = [
            f"output.{'.'.join(path)} is in output.{'.'.join(first)}: one tensor"
            for path, first in self.backward.aliases.items()
            if first in self.sent
        ]
        outputs = nest_gradients(_in_order(self.sent))
        line = EndLine(id=self.id, outputs=outputs, notes=notes)
        if error is not None:
            line.status, line.error = "raised", error
        if self.late:
            line.args, line.kwargs = as_arguments(_in_order(self.received))
        self.tape.writer.end(line)

    def _count_down(self) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            self.tape.running.pop(self.key, None)
            self.finish()

    def _add(self, path: Path, grad: torch.Tensor | None) -> None:
        """An input used several times gets its gradient in parts, which add up as they come."""
        if self.left is None:
            self.left = dict(self.backward.contributions)
        if grad is not None:
            before = self.sums.get(path)
            if before is not None:
                with Quiet():
                    grad = before + grad
            self.sums[path] = grad
        self.left[path] -= 1
        if self.left[path] == 0:
            self.sent[path] = self.line(
                self.sums.pop(path, None), path, "output", self.tape.wants_output
            )

    def _begin(self) -> None:
        self.begun = True
        tape, names, followed = self.tape, self.names, self.backward
        args, kwargs = as_arguments(_in_order(self.received))
        tape.writer.call(
            CallLine(
                id=self.id,
                name=names.name,
                op=names.api.op,
                module=names.module,
                direction="backward",
                stack=followed.stack if followed.step == tape.step else None,
                args=args,
                kwargs=kwargs,
                thread=tape.place.thread,
                notes=self.notes,
            )
        )

    def line(self, grad: torch.Tensor | None, path: Path, role: Role, wanted: bool) -> Any:
        if grad is None:
            return None
        # whether it has a gradient is said of tensors of the program: one has it by create_graph
        return self.tape.lines.encoded(grad, self, role, path, wanted, False)


def _in_order(leaves: dict[Path, Any]) -> dict[Path, Any]:
    """Gradients in the order of the arguments they belong to, not that of their coming."""
    if len(leaves) < 2:
        return leaves
    return {path: leaves[path] for path in sorted(leaves, key=_place)}


def _place(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (1 << 30, part) for part in path]
