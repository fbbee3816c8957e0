"""The backward of recorded calls: gradients that come in, gradients sent to the inputs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.encode import as_arguments, nest
from tensorprobe.capture.gradients import Gradients, Path, Trace, Window
from tensorprobe.capture.naming import CallNames, call_name
from tensorprobe.capture.quiet import Quiet
from tensorprobe.records import Role
from tensorprobe.store.lines import CallLine, EndLine

if TYPE_CHECKING:
    from tensorprobe.capture.tape import Tape


class Backward:
    """Follows one recorded call into backward, as often as backward passes through it.

    It holds no node and no tensor of the graph, or the graph would never be freed.
    """

    __slots__ = ("_aliases", "_awaited", "_call", "_contributions", "_expected", "_passes", "_tape")

    def __init__(
        self,
        tape: Tape,
        call: OpenCall,
        trace: Trace,
        aliases: dict[Path, Path],
    ) -> None:
        self._tape = tape
        self._call = (call.names, call.keep, call.stack, call.step)
        self._contributions = trace.contributions()
        self._expected = len(trace.boundary)
        self._awaited = len(trace.outputs)
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
        run = self._tape.running.get(key)
        if run is None:
            names, keep, stack, step = self._call
            backward = CallNames(names.api, self.name, names.module, "backward")
            if not (self._tape.selection.everything or self._tape.selection.decide(backward)):
                return None
            self._tape.open_step()
            self._passes += 1
            call = OpenCall(backward, keep, self._tape.step)
            call.id = next(self._tape.ids)
            call.stack = stack if step == self._tape.step else None
            if step != self._tape.step:
                call.notes.append(f"its forward ran in step {step}")
            if self._passes > 1:
                call.notes.append(f"backward pass {self._passes} through the same graph")
            nodes = (self._awaited, self._expected)
            run = BackwardRun(
                self._tape, key, call, dict(self._contributions), nodes, self._aliases
            )
            self._tape.running[key] = run
        return run


class BackwardRun:
    """One pass of backward through one call."""

    __slots__ = (
        "_aliases",
        "_awaited",
        "_begun",
        "_call",
        "_expected",
        "_key",
        "_late",
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
        nodes: tuple[int, int],
        aliases: dict[Path, Path],
    ) -> None:
        self._tape, self._key, self._call = tape, key, call
        self._left, self._aliases = left, aliases
        self._awaited, self._expected = nodes  # still to bring a gradient in, and to send one
        self._received: dict[Path, Any] = {}
        self._sums: dict[Path, torch.Tensor] = {}
        self._sent: dict[Path, Any] = {}
        self._begun = False
        self._late = False  # a gradient came in after the call was written down

    def receive(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        self._late = self._late or self._begun
        for number, path, window in places:
            if number >= len(grads):
                continue
            grad = grads[number]
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._received[path] = self._line(grad, path, "input", self._tape.wants_input)
        if not self._begun:
            self._begin()
        self._awaited -= 1
        self._finish_if_over()

    def send(self, places: list[tuple[int, Path, Window | None]], grads: Gradients) -> None:
        if not self._begun:
            self._begin()
        for position, path, window in places:
            grad = grads[position] if position < len(grads) else None
            if grad is not None and window is not None:
                grad = window.cut(grad)
            self._add(path, grad)
        self._expected -= 1
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """Outputs that nobody used bring no gradient: then the end of backward is the end."""
        if self._expected == 0 and self._awaited == 0:
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
        line = self._tape.line(grad.detach(), self._call, role, ".".join(path), wanted)
        return {"tensor": line}

    def _begin(self) -> None:
        self._begun = True
        call = self._call
        args, kwargs = as_arguments(self._received)
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
        self._tape.running.pop(self._key, None)
        notes: list[str] = []
        for path, grad in self._sums.items():  # backward did not come by every use
            self._sent[path] = self._line(grad, path, "output", self._tape.wants_output)
        for path, first in self._aliases.items():
            if first in self._sent:
                notes.append(f"output.{'.'.join(path)} is in output.{'.'.join(first)}: one tensor")
        sent = {path: self._sent[path] for path in sorted(self._sent, key=_in_order)}
        line = EndLine(id=self._call.id, outputs=nest(sent, always=True), notes=notes)
        if self._late:
            line.args, line.kwargs = as_arguments(self._received)
        self._tape.writer.end(line)


def _number(name: str) -> int:
    parts = name.split(".")
    return int(parts[-1] if parts[-1].isdigit() else parts[-2])


def _in_order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (1 << 30, part) for part in path]
