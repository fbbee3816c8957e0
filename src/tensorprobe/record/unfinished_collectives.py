"""Collectives that run on after they have returned: when their results may be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.collectives import FUNCTIONAL, group_of
from tensorprobe.record.encode import map_tensors
from tensorprobe.record.in_flight import Running, coalescing_of
from tensorprobe.record.values import Values, numbers_behind
from tensorprobe.tensors.memory import as_waiter, own_part
from tensorprobe.torch_versions import unboxed_work
from tensorprobe.trouble import OnTrouble

# What an asynchronous collective returns; torch without distributed has none.
_WORK: tuple[type, ...] = tuple(filter(None, (getattr(torch.distributed, "Work", None),)))
_C10D = "torch.ops.c10d."
_DISABLED = torch._C.DisableTorchFunction


class UnfinishedCollectives:
    """Follows the collectives of a recording from their calls to their ends."""

    def __init__(self, values: Values, gap: Callable[[str, BaseException | str], None]) -> None:
        self._values = values
        self._gap = gap
        self.running = values.in_flight.running

    def returned(self, call: OpenCall, result: Any) -> None:
        """A collective has returned; it may run on."""
        with OnTrouble(self._gap, call.names.name), _DISABLED():
            self._returned(call, result)

    def _returned(self, call: OpenCall, result: Any) -> None:
        api, in_flight = call.names.api, self._values.in_flight
        given = [numbers_behind(tensor) for tensor, _ in call.inputs]
        if api.op.startswith(FUNCTIONAL):
            if api.api == "wait_tensor":
                in_flight.wait_over(given)
            elif api.api != "_wrap_tensor_autograd":
                made: list[torch.Tensor] = []
                map_tensors(result, lambda tensor, path: made.append(numbers_behind(tensor)))
                self._run_on(Running(call.names.name, made))
            return
        running = Running(call.names.name, given)
        if api.op.startswith(_C10D):
            running.works = _works_in(result)
            if call.collective is not None and not call.collective.is_async:
                running.thread = threading.get_ident()
        elif call.collective is not None:
            running.coalescing = coalescing_of(group_of(call.collective.group_name))
            if running.coalescing is None:
                running.works = _works_in(result)
        if running.works or running.coalescing is not None:
            self._run_on(running)
            if running.thread is None:
                call.notes.append("asynchronous: read after it had completed")

    def _run_on(self, running: Running) -> None:
        for tensor in running.tensors:
            self._values.forget(tensor)
        if running.tensors:
            self._values.in_flight.begin(running)

    def read_finished(self) -> None:
        """Read the results that are there by now."""
        for running, reason in self._values.in_flight.poll():
            self._gap(running.name, f"{reason}: its result is not recorded")

    def before_write(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call is about to write to results of collectives, if to any: it will wait for them at
        once, and then they are gone."""
        waiters: list[Any] = []

        def note(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
            waiter = as_waiter(own_part(tensor))
            if waiter is not None and not waiter.completed:
                waiters.append(waiter)

        for value in (*args, *kwargs.values()):
            map_tensors(value, note)
        with Quiet():
            for waiter in waiters:
                waiter.trigger_wait()
                self._values.in_flight.wait_over([waiter.elem])

    def before_hidden(self, args: Sequence[Any], kwargs: Mapping[str, Any], writes: bool) -> None:
        """A call that is not recorded is about to run: read what it may write to."""
        if self.running:
            with OnTrouble(self._gap, "collective"), Quiet():
                self.read_finished()
                if writes:
                    self.before_write(args, kwargs)

    def end_step(self) -> None:
        """What is not there when the step ends is not recorded."""
        if not self.running:
            return
        with OnTrouble(self._gap, "collective"), Quiet():
            self.read_finished()
            reason = "asynchronous, and not waited for when the step ended"
            for running in self._values.in_flight.break_promises(reason):
                self._gap(running.name or "collective", f"{reason}: its result is not recorded")


def _works_in(result: Any) -> list[Any]:
    """The Work that a collective returned: alone, several (batch_isend_irecv), or boxed, as
    c10d's operators return it behind their tensors."""
    items = [result] if isinstance(result, (*_WORK, torch.ScriptObject)) else result
    if not isinstance(items, list | tuple) or not items:
        return []
    if isinstance(items[-1], torch.ScriptObject):
        return [unboxed_work(items[-1])]
    return list(items) if all(isinstance(item, _WORK) for item in items) else []
