"""Optimizer steps as calls, so that a wrong learning rate shows where it enters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tensorprobe.follow.naming import optimizer_name
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.optimizer_state import LeftState, NamedTensors, state_of
from tensorprobe.record.tape import Tape
from tensorprobe.trouble import OnTrouble


class _Thread(threading.local):
    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of parameters, when the last step began
        # of parameters and the state, then, of an optimizer of torch's own
        self.versions: dict[int, int] = {}
        self.grads: dict[str, Any] = {}  # the contents of gradients, then
        self.around: list[str | None] = []  # what the steps under way are inside of


class OptimizerCalls:
    """Writes down `Optimizer.{Class}.step`: settings, parameters, gradients and state in,
    parameters and state out. Calls inside of the step name it as their parent.

    The state is written down before a step only where no recorded step has left it so.
    """

    def __init__(self, tape: Tape, parameter_names: Callable[[], dict[int, str]]) -> None:
        self._tape = tape
        self._parameter_names = parameter_names
        self._left: dict[int, LeftState] = {}  # by optimizer
        self._thread = _Thread()

    def forget_states(self) -> None:
        """Steps that come now are not seen: what the last ones left may change."""
        self._left.clear()

    def begin(self, optimizer: Optimizer, frame: FrameType, has_closure: bool) -> OpenCall | None:
        """An optimizer's step begins; `frame` has called it."""
        tape = self._tape
        with OnTrouble(tape.gap, f"Optimizer.{type(optimizer).__name__}.step"):
            left = self._left.pop(id(optimizer), None)
            if not tape.recording:
                return None
            kind = type(optimizer)
            api = optimizer_name(kind.__name__, f"{kind.__module__}.{kind.__qualname__}.step")
            names = tape.select(api, tape.counter.next_name(api), "")
            if names is None:
                return None
            self._thread.names = self._parameter_names()
            parameters = self._parameters(optimizer)
            grads = _gradients(parameters)
            state = state_of(optimizer, _by_identity(parameters))
            self._thread.versions = _versions(parameters + state) if _is_torchs_own(kind) else {}
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                tape.forget(grad for _, grad in grads)  # collectives move no version
            settings = [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            is_known = left is not None and left.is_still(optimizer, state)
            if tape.config.keep_last is not None:
                is_known = False  # the step that has it may be deleted
            call = tape.begin(
                names,
                settings,
                frame=frame,
                parameters=parameters,
                # what a closure makes is not there yet
                parameter_grads=() if has_closure else grads,
                states=() if is_known else state,
            )
            self._thread.grads = {}
            if call is None:
                return None
            if has_closure:
                call.notes.append("stepped by a closure: its gradients are those it made last")
            else:
                self._thread.grads = tape.contents(call, "parameter_grad", grads)
            self._thread.around.append(tape.place.parent)
            if call.written:
                tape.place.parent = names.name
            return call
        return None

    def end(self, optimizer: Optimizer, call: OpenCall) -> None:
        """It is over."""
        with OnTrouble(self._tape.gap, call.names.name):
            if self._thread.around:
                self._tape.place.parent = self._thread.around.pop()
            parameters = self._parameters(optimizer)
            state = state_of(optimizer, _by_identity(parameters))
            grads = self._new_gradients(call, parameters)
            before, self._thread.versions = self._thread.versions, {}
            self._tape.forget(_perhaps_unseen([*parameters, *state], before))
            self._tape.end(
                call,
                dict(parameters),
                parameter_grads=grads,
                states=[(f"{name}.after", tensor) for name, tensor in state],
            )
            self._left[id(optimizer)] = LeftState(optimizer, state)

    def left(self) -> None:
        """No step is under way in this thread: those that began have ended, or raised."""
        if self._thread.around:
            self._tape.place.parent = self._thread.around[0]
            self._thread.around.clear()

    def _new_gradients(self, call: OpenCall, parameters: NamedTensors) -> NamedTensors:
        """Gradients that are others than when the step began: a closure made them, a hook clipped
        them, a fused kernel unscaled them."""
        before, self._thread.grads = self._thread.grads, {}
        grads = _gradients(parameters)
        now = self._tape.contents(call, "parameter_grad", grads)
        return [(name, grad) for name, grad in grads if before.get(name) != now[name]]

    def _parameters(self, optimizer: Optimizer) -> NamedTensors:
        names = self._thread.names
        return [
            (names.get(id(parameter)) or f"group{group_number}.{number}", parameter)
            for group_number, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        ]


def _gradients(parameters: NamedTensors) -> NamedTensors:
    with Quiet():  # a function mode makes reading a property ten times as dear
        grads = [(name, parameter.grad) for name, parameter in parameters]
    return [(name, grad) for name, grad in grads if grad is not None]


def _perhaps_unseen(tensors: NamedTensors, before: dict[int, int]) -> list[torch.Tensor]:
    """The tensors that may have been written to without a new version.

    Many optimizers write to `p.data`, and fused kernels move no version. All else that torch's own
    optimizers write has another version, and is known already where the calls inside of the step
    were recorded.
    """
    with Quiet():
        return [
            tensor
            for _, tensor in tensors
            if id(tensor) not in before or tensor._version == before[id(tensor)]
        ]


def _versions(tensors: NamedTensors) -> dict[int, int]:
    with Quiet():
        tracked = (tensor for _, tensor in tensors if not tensor.is_inference())
        return {id(tensor): tensor._version for tensor in tracked}


def _by_identity(tensors: NamedTensors) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensors}


def _is_torchs_own(kind: type[Optimizer]) -> bool:
    return kind.__module__.startswith("torch.optim.")
