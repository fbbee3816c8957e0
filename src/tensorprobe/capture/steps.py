"""When a step ends, for programs that do not say so themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

# explicit: at rec.step(). auto: as below. module: each call of the first-seen root module.
# A number: the optimizer of that number, in the order in which they first stepped.
StepOn = Literal["explicit", "auto", "module"] | int


class StepWatch:
    """Calls `advance` at the end of each step.

    The first optimizer that steps sets the pace: a GAN's two, a wrapper's inner one, gradient
    accumulation and LBFGS's many closures are then one step each time round. A GradScaler that
    skips it ends the step too. As long as no optimizer has stepped, a program without gradients
    (inference, `generate`) is in the next step each time it calls its first root module again.
    """

    def __init__(self, step_on: StepOn, advance: Callable[[], None]) -> None:
        self._step_on = step_on
        self._advance = advance
        self._optimizers: list[weakref.ref[Any]] = []
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._root_called = False
        self._stepped = False  # since the scaler last updated its scale
        self.scaler_seen = False

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer's step, the outermost one, has ended."""
        number = self._number(optimizer)
        wanted = 0 if self._step_on == "auto" else self._step_on
        if number == wanted:
            self._stepped = True
            self._advance()

    def scaler_updated(self) -> None:
        """A GradScaler has ended its round; the optimizer may have been skipped in it."""
        self.scaler_seen = True
        skipped = not self._stepped
        self._stepped = False
        if skipped and self._step_on in ("auto", 0):
            self._advance()

    def root_called(self, module: torch.nn.Module) -> None:
        """A module is called that no other module calls."""
        if self._root is None or self._root() is None:
            self._root = weakref.ref(module)
        if self._root() is not module:
            return
        inference = self._step_on == "auto" and not (self._optimizers or torch.is_grad_enabled())
        if (inference or self._step_on == "module") and self._root_called:
            self._advance()
        self._root_called = True

    def _number(self, optimizer: object) -> int:
        for number, reference in enumerate(self._optimizers):
            if reference() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1
