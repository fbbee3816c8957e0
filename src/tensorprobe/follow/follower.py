"""Following a whole program for an observer: calls, modules, optimizers, backward and steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tensorprobe.follow.engine import EngineEntry
from tensorprobe.follow.function_mode import CallMode
from tensorprobe.follow.mode_stack import add_mode, remove_mode
from tensorprobe.follow.module_hooks import ModuleHooks
from tensorprobe.follow.observer import Observer
from tensorprobe.follow.optimizer_hooks import OptimizerHooks
from tensorprobe.follow.scaler_rounds import ScalerRounds
from tensorprobe.follow.stacks import Stacks
from tensorprobe.follow.steps import StepOn, StepWatch


class Follower:
    """Owns the modes and hooks by which an observer is told what the program does.

    `place` is where each thread is, `stacks` has the numbers of their stacks. `more_modes` are on
    the stack, in backward and in other threads where the mode that sees calls is; that one is below
    all others where `is_lowest`. Without `sees_calls` no mode is on once it is known what ends a
    step: modules, backward and optimizers are told, calls are not.
    """

    def __init__(
        self,
        observer: Observer,
        place: Any,
        *,
        step_on: StepOn = "explicit",
        stacks: Stacks | None = None,
        more_modes: Sequence[Any] = (),
        is_lowest: bool = False,
        sees_calls: bool = True,
    ) -> None:
        self.observer = observer
        self.steps = StepWatch(step_on, self._advance)
        self.scalers = ScalerRounds()
        self._sees_calls = sees_calls
        self.mode = CallMode(
            observer, on_scaler_update=self.steps.scaler_updated, is_lowest=is_lowest
        )
        self._modes = [*([self.mode] if sees_calls else ()), *more_modes]
        self.modules = ModuleHooks(
            observer, place, modes=self._modes, on_root=self._root_called, stacks=stacks
        )
        self.optimizers = OptimizerHooks(observer, self._optimizer_stepped)
        self.engine = EngineEntry(self._modes, observer, self._backward_ended)
        self._advance_later = False
        self.is_on = False

    def install(self) -> None:
        """Follow the program from here on."""
        self.is_on = True
        self.modules.install()
        self.optimizers.install_once()
        self.engine.install()
        if not self._sees_calls and self.steps.awaits_optimizer_or_first:
            self._modes.insert(0, self.mode)  # whose scaler may skip it
        for mode in self._modes:
            add_mode(mode)

    def remove(self) -> None:
        """Leave it alone."""
        self.is_on = False
        for mode in reversed(self._modes):
            remove_mode(mode)
        self.engine.remove()
        self.optimizers.remove()
        self.modules.remove()

    def step(self) -> None:
        """One step has ended, as the program itself says."""
        self.steps.say()

    def _advance(self) -> None:
        if self.is_on and torch._C._current_graph_task_id() != -1:
            self._advance_later = True  # an optimizer that steps inside of backward
            return
        self.observer.step_ended()
        if self.is_on:
            self.modules.begin_step()

    def _root_called(self, module: torch.nn.Module) -> None:
        self.optimizers.forget_raised(sys._getframe())
        if not self._sees_calls:
            self._end_rounds()
        self.steps.root_called(module)

    def _optimizer_stepped(self, optimizer: object) -> None:
        if not self._sees_calls:
            self.scalers.find(sys._getframe())
        if self.steps.automatic:
            self.steps.optimizer_stepped(optimizer)
        if not self._sees_calls and self.mode in self._modes:
            self._modes.remove(self.mode)
            remove_mode(self.mode)

    def _end_rounds(self) -> None:
        """Without a mode on, the end of a scaler's round is seen when the next forward begins."""
        optimizers = self.scalers.ended()
        if optimizers and self.steps.automatic and self.mode not in self._modes:
            self.steps.scaler_updated(optimizers)

    def _backward_ended(self) -> None:
        self.steps.backward_ended()
        if self._advance_later:
            self._advance_later = False
            self._advance()
