"""The backward of recorded calls: gradients that come in, gradients sent to the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import as_arguments, nest
from tensorprobe.capture.gradients import Gradients, Path, Spot, Trace
from tensorprobe.capture.naming import CallNames, split_direction, with_direction
from tensorprobe.capture.quiet import Quiet
from tensorprobe.records import Role
from tensorprobe.store.lines import CallLine, EndLine

if TYPE_CHECKING:
    from tensorprobe.capture.tape import Tape


class Backward:
    """Follows one recorded call into backward, as often as backward passes through it.

    It holds no node and no tensor of the graph, or the graph would never be freed.
    """

    __slots__ = ("_call", "_passes", "_tape", "aliases", "contributions", "n_nodes")

    def __init__(self, tape: Tape, call: OpenCall, trace: Trace, aliases: dict[Path, Path]) -> None:
        self._tape = tape
        self._call = (call.names, call.keep, call.stack, call.step)
        self._passes = 0
        self.contributions = trace.contributions()
        self.n_nodes = len(trace.outputs) + len(trace.boundary)
        self.aliases = aliases

    @property
    def name(self) -> str:
        """What the backward is called."""
        return with_direction(split_direction(self._call[0].name)[0], "backward")

    def incoming(self, spots: list[Spot], grads: Gradients) -> None:
        """Backward has come to a node of an output."""
        self._event(BackwardRun.receive, spots, grads)

    def outgoing(self, spots: list[Spot], grads: Gradients) -> None:
        """Backward leaves a node at an input's edge."""
        self._event(BackwardRun.send, spots, grads)

    def _event(self, event: Any, spots: list[Spot], grads: Gradients) -> None:
        tape = self._tape
        if not tape.recording:
            return
        try:
            with Quiet():
                run = self._run()
                if run is not None:
                    event(run, spots, grads)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(self.name, error)

    def _run(self) -> BackwardRun | None:
        """The pass under way; None where it is not wanted, which is asked once a pass."""
        running = self._tape.running
        key = (id(self), torch._C._current_graph_task_id())
        if key in running:
            return running[key]
        call = self._begin()
        running[key] = run = BackwardRun(self._tape, key, call, self) if call else None
        return run

    def _begin(self) -> OpenCall | None:
        tape = self._tape
        names, keep, stack, step = self._call
        names = CallNames(names.api, self.name, names.module, "backward")
        if not tape.wants(names):
            return None
        tape.open_step()
        call = OpenCall(names, keep, tape.step)
        call.id = next(tape.ids)
        if step == tape.step:
            call.stack = stack
        else:
            call.notes.append(f"its forward ran in step {step}")
        self._passes += 1
        if self._passes > 1:
            call.notes.append(f"backward pass {self._passes} through the same graph")
        return call


class BackwardRun:
    """One pass of backward through one call.

    Outputs may hang in different parts of the graph: a gradient that comes in after the call was
    written down is written with its end; one of an output nobody used never comes.
    """

    __slots__ = (
        "_aliases",
        "_begun",
        "_call",
        "_key",
        "_late",
        "_left",
        "_n_left",
        "_received",
        "_sent",
        "_sums",
        "_tape",
    )

    def __init__(
        self, tape: Tape, key: tuple[int, int], call: OpenCall, backward: Backward
    ) -> None:
        self._tape, self._key, self._call = tape, key, call
        self._aliases = backward.aliases
        self._left = dict(backward.contributions)
        self._n_left = backward.n_nodes
        self._received: dict[Path, Any] = {}
        self._sums: dict[Path, torch.Tensor] = {}
        self._sent: dict[Path, Any] = {}
        self._begun = False
        self._late = False  # a gradient came in after the call was written down

    def receive(self, spots: list[Spot], grads: Gradients) -> None:
        """Gradients of outputs, as they come in."""
        for number, path, window in spots:
            if number >= len(grads):
                continue
            grad = grads[number]
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._received[path] = self._line(grad, path, "input", self._tape.wants_input)
        if self._begun:
            self._late = True
        else:
            self._begin()
        self._count_down()

    def send(self, spots: list[Spot], grads: Gradients) -> None:
        """Gradients of inputs, as they go out."""
        if not self._begun:
            self._begin()
        for position, path, window in spots:
            grad = grads[position] if position < len(grads) else None
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._add(path, grad)
        self._count_down()

    def finish(self) -> None:
        """Write down what came; some of it may be missing, and is then not there to come."""
        if not self._begun:
            self._begin()
        for path, grad in self._sums.items():  # backward did not come by every use
            self._sent[path] = self._line(grad, path, "output", self._tape.wants_output)
        notes = [
            f"output.{'.'.join(path)} is in output.{'.'.join(first)}: one tensor"
            for path, first in self._aliases.items()
            if first in self._sent
        ]
        outputs = nest(_in_order(self._sent), always=True)
        line = EndLine(id=self._call.id, outputs=outputs, notes=notes)
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
        if grad is not None:
            before = self._sums.get(path)
            self._sums[path] = grad if before is None else before + grad
        self._left[path] -= 1
        if self._left[path] == 0:
            self._sent[path] = self._line(
                self._sums.pop(path, None), path, "output", self._tape.wants_output
            )

    def _line(self, grad: torch.Tensor | None, path: Path, role: Role, wanted: bool) -> Any:
        if grad is None:
            return None
        line = self._tape.line(grad, self._call, role, ".".join(path), wanted)
        line.grad = False  # said of tensors of the program; a gradient has one by create_graph
        return {"tensor": line}

    def _begin(self) -> None:
        self._begun = True
        call = self._call
        args, kwargs = as_arguments(_in_order(self._received))
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
                thread=self._tape.place.thread,
                notes=call.notes,
            )
        )


def _in_order(leaves: dict[Path, Any]) -> dict[Path, Any]:
    """Gradients in the order of the arguments they belong to, not that of their coming."""
    if len(leaves) < 2:
        return leaves
    return {path: leaves[path] for path in sorted(leaves, key=_place)}


def _place(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (1 << 30, part) for part in path]
