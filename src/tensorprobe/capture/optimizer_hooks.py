"""Optimizer steps as calls, so that a wrong learning rate shows where it enters."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensorprobe.capture.calls import OpenCall
from tensorprobe.capture.naming import optimizer_name
from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.tape import Tape


class _Thread(threading.local):
    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of parameters, when the last step began
        self.versions: dict[int, int] = {}  # of parameters, then, of an optimizer of torch's own
        # steps under way; a wrapper that is an Optimizer itself steps around the real one
        self.open: list[tuple[weakref.ref[Optimizer], OpenCall | None]] = []


class OptimizerHooks:
    """Records `Optimizer.{Class}.step`: settings, parameters and gradients in, parameters out."""

    def __init__(
        self,
        tape: Tape,
        parameter_names: Callable[[], dict[int, str]],
        on_step: Callable[[Optimizer], None],
    ) -> None:
        self._tape = tape
        self._parameter_names = parameter_names
        self._on_step = on_step
        self._handles: list[Any] = []
        self._thread = _Thread()
        # threads in which torch is going through its hooks, which must not change then
        self._inside: set[int] = set()
        self._on = False

    def install_once(self) -> None:
        self._on = True
        if self._handles:
            return
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks away; while one runs, they stay, idle, until the next `remove`."""
        self._on = False
        if self._inside:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._thread = _Thread()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._on or _is_inside(optimizer, sys._getframe(1)):
            return
        ident = threading.get_ident()
        self._inside.add(ident)
        try:
            self.forget_raised(sys._getframe(1))
            call = self._begin(optimizer) if self._tape.recording else None
            self._thread.open.append((weakref.ref(optimizer), call))
        finally:
            self._inside.discard(ident)

    def forget_raised(self, frame: FrameType) -> None:
        """Forget steps of this thread that are not among the callers of `frame`: no hook tells."""
        thread = self._thread
        if thread.open:
            under_way = _stepping(frame)
            thread.open = [step for step in thread.open if id(step[0]()) in under_way]

    def _begin(self, optimizer: Optimizer) -> OpenCall | None:
        tape = self._tape
        try:
            kind = type(optimizer)
            api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
            names = tape.select(api, tape.counter.next_name(api), "")
            if names is None:
                return None
            self._thread.names = self._parameter_names()
            parameters = self._parameters(optimizer)
            grads = _gradients(parameters)
            self._thread.versions = _versions(parameters) if _is_torchs_own(kind) else {}
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                tape.forget(grad for _, grad in grads)  # collectives move no version
            settings = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            return tape.begin(
                names,
                settings,
                depth=3,
                parameters=parameters,
                parameter_grads=grads,
            )
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            tape.gap(f"Optimizer.{type(optimizer).__name__}.step", error)
            return None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._on or _is_inside(optimizer, sys._getframe(1)):
            return
        ident = threading.get_ident()
        self._inside.add(ident)
        try:
            under_way = self._thread.open
            while under_way:
                reference, call = under_way.pop()
                if reference() is optimizer:
                    if call is not None:
                        self._end(optimizer, call)
                    break
            if not under_way:
                self._on_step(optimizer)
        finally:
            self._inside.discard(ident)

    def _end(self, optimizer: Optimizer, call: OpenCall) -> None:
        try:
            parameters = dict(self._parameters(optimizer))
            self._tape.forget(self._perhaps_unseen(parameters))
            self._tape.end(call, parameters)
        except Exception as error:  # noqa: BLE001 recording one call: it becomes a gap
            self._tape.gap(call.names.name, error)

    def _perhaps_unseen(self, parameters: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The parameters whose version may not tell that they were written to.

        Many optimizers write to `p.data`. Those of torch itself do not: what they wrote has another
        version, and is known already where the calls inside of the step were recorded.
        """
        before, self._thread.versions = self._thread.versions, {}
        with Quiet():
            return [
                parameter
                for parameter in parameters.values()
                if id(parameter) not in before or parameter._version == before[id(parameter)]
            ]

    def _parameters(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        names = self._thread.names
        return [
            (names.get(id(parameter)) or f"group{group_number}.{number}", parameter)
            for group_number, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        ]


def _gradients(parameters: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    with Quiet():  # a function mode makes reading a property ten times as dear
        grads = [(name, parameter.grad) for name, parameter in parameters]
    return [(name, grad) for name, grad in grads if grad is not None]


def _is_torchs_own(kind: type[Optimizer]) -> bool:
    return kind.__module__.startswith("torch.optim.")


def _versions(parameters: list[tuple[str, torch.Tensor]]) -> dict[int, int]:
    with Quiet():
        tracked = (parameter for _, parameter in parameters if not parameter.is_inference())
        return {id(parameter): parameter._version for parameter in tracked}


def _is_inside(optimizer: Optimizer, frame: FrameType) -> bool:
    """Whether the step that `frame` begins or ends is part of one: torch calls the hooks of a
    class that another is made of as well, once there has been an optimizer of just that class."""
    return id(optimizer) in _stepping(frame)


def _stepping(frame: FrameType | None) -> set[int]:
    """The optimizers whose step called this, by identity; not the one that begins now."""
    found: set[int] = set()
    frame = frame.f_back if frame else None
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and isinstance(frame.f_locals.get("args"), tuple):
            found |= {id(arg) for arg in frame.f_locals["args"][:1] if isinstance(arg, Optimizer)}
        frame = frame.f_back
    return found
