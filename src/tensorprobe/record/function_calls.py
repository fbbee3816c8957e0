"""Custom autograd.Functions: `apply` is no torch call, but their nodes are in the graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch.autograd.function import BackwardCFunction

from tensorprobe.follow.gradients import Path, trace_function
from tensorprobe.follow.naming import ApiName
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.encode import nest
from tensorprobe.store.lines import CallLine, EndLine
from tensorprobe.trouble import OnTrouble

if TYPE_CHECKING:
    from tensorprobe.record.tape import Tape


class _Met(Struct, eq=False):
    """What is written on the node of a custom Function, which may live on over steps."""

    step: int | None = None  # the last one that has met it
    # its call there, with those of its outputs that were seen; None: not wanted
    seen: tuple[OpenCall, dict[Path, Any]] | None = None
    is_followed: bool = False  # into backward


class FunctionCalls:
    """Writes down a custom Function when one of its results is first used."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._key = object()  # of what is written on the nodes

    def begin_backward(self, roots: Iterable[Any]) -> None:
        """Backward starts: a loss may come from a custom Function that no other call has used."""
        with OnTrouble(self._tape.gap, "backward"), Quiet():
            nodes = [(root, root.grad_fn) for root in roots if isinstance(root, torch.Tensor)]
            self.record(
                [(root, node) for root, node in nodes if isinstance(node, BackwardCFunction)]
            )

    def record(self, results: Iterable[tuple[torch.Tensor, Any]]) -> None:
        """Write down the Functions that these tensors come from, each with its node."""
        tape = self._tape
        for tensor, node in results:
            # on the node itself: numbers of nodes are those of a thread
            met: _Met = node.metadata.setdefault(self._key, _Met())
            if met.step == tape.step:
                if met.seen is not None:
                    self._write_output(*met.seen, tensor)
                continue
            met.step, met.seen = tape.step, None
            kind = getattr(type(node), "_forward_cls", type(node))
            api = ApiName("Function", kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            names = tape.select(api, tape.counter.next_name(api), tape.place.module)
            if names is None:
                continue
            call = OpenCall(names, tape.selection.keep_for(names), tape.step)
            if names.wanted:
                self._write(call)
                outputs: dict[Path, Any] = {}
                met.seen = (call, outputs)
                self._write_output(call, outputs, tensor)
            if tape.wants_backward and not met.is_followed:
                met.is_followed = True
                tape.follow(call, trace_function(node), {})

    def _write(self, call: OpenCall) -> None:
        """Write down a Function that has run; its results follow as they are used."""
        tape = self._tape
        tape.open_step()
        call.id = next(tape.ids)
        api = call.names.api
        notes = ["seen by its graph node: the inputs are not visible"]
        if api.api == "CompiledFunction":
            notes.append("compiled: the calls inside are not visible")
        tape.writer.call(
            CallLine(
                id=call.id,
                name=call.names.name,
                op=api.op,
                module=call.names.module,
                parent=tape.place.parent,
                thread=tape.place.thread,
                notes=notes,
            )
        )

    def _write_output(self, call: OpenCall, outputs: dict[Path, Any], tensor: torch.Tensor) -> None:
        """One more result of a Function; the last end of a call is the one that is read."""
        tape = self._tape
        path = (str(tensor.output_nr),)
        if path in outputs or call.step != tape.step:
            return
        line = tape.lines.line(tensor, call, "output", path[0], tape.wants_output)
        outputs[path] = {"tensor": line}
        ordered = dict(sorted(outputs.items(), key=lambda item: int(item[0][0])))
        tape.writer.end(EndLine(id=call.id, outputs=nest(ordered)))
