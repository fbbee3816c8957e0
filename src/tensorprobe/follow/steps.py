"""When a step ends, for programs that do not say so themselves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

# explicit: at rec.step(). auto: as below. module: each call of the first-seen root module.
# A number: the optimizer of that number, in the order in which they first stepped.
StepOn = Literal["explicit", "auto", "module"] | int


class StepWatch:
    """Calls `advance` at the end of each step.

    The first optimizer that steps sets the pace: a GAN's two, a wrapper's inner one, gradient
    accumulation and LBFGS's many closures are then one step each time round. A GradScaler that
    skips it ends the step too. As long as no optimizer has stepped, the next call of the program's
    first root module ends the step when the call before it was inference (`generate`), or when
    there was a backward and the program has made no optimizer at all.
    """

    def __init__(self, step_on: StepOn, advance: Callable[[], None]) -> None:
        self._step_on = step_on
        self._advance = advance
        # in the order in which they were seen; None: one that a scaler skipped until now
        self._optimizers: list[tuple[int, weakref.ref[Any] | None]] = []
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._unit_over = False  # the root's next call is in the next step
        self._stepped: set[int] = set()  # optimizers, since the scaler last updated its scale
        self.scaler_seen = False
        self._ended_by_optimizer = False

    @property
    def automatic(self) -> bool:
        return self._step_on != "explicit"

    @property
    def is_paced(self) -> bool:
        """Whether steps end with those of an optimizer."""
        return self.automatic and self._step_on != "module" and bool(self._optimizers)

    @property
    def needs_roots(self) -> bool:
        """Whether calls of root modules may end a step."""
        if self._step_on == "auto":
            return not self._optimizers
        return self._step_on == "module"

    @property
    def needs_backward(self) -> bool:
        """Whether the end of a backward may be the end of a step, as far as is known."""
        return self._step_on == "auto" and not self._optimizers

    @property
    def awaits_optimizer(self) -> bool:
        """Whether the first step of an optimizer is to come, which a GradScaler may skip."""
        return self.needs_backward and _optimizer_made()

    @property
    def awaits_optimizer_or_first(self) -> bool:
        """Whether an optimizer may set the pace, and none has stepped yet."""
        return self._step_on in ("auto", 0) and not self._optimizers

    def say(self) -> None:
        """The program itself says that a step has ended, and will say so from now on."""
        self._step_on = "explicit"
        # the first that it says so of, its optimizer has ended already
        ended, self._ended_by_optimizer = self._ended_by_optimizer, False
        if not ended:
            self._advance()

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer's step, the outermost one, has ended."""
        number = self._number(optimizer)
        self.scaler_seen = self.scaler_seen or _scaler_steps()
        self._stepped.add(id(optimizer))
        if number == (0 if self._step_on == "auto" else self._step_on):
            self._end_by_optimizer()

    def scaler_updated(self, optimizers: Iterable[int]) -> None:
        """A GradScaler has ended its round with these optimizers, some of them maybe skipped."""
        self.scaler_seen = True
        skipped = [key for key in optimizers if key not in self._stepped]
        self._stepped.clear()
        if self._step_on not in ("auto", 0):
            return
        if not self._optimizers and skipped:
            self._optimizers.append((skipped[0], None))
        if self._optimizers and self._optimizers[0][0] in skipped:
            self._end_by_optimizer()

    def scaler_found(self) -> None:
        """A GradScaler has ended a round, of which no more is known."""
        self.scaler_seen = True
        self._stepped.clear()

    def backward_ended(self) -> None:
        """A backward pass is over."""
        if self._step_on == "auto" and not self._optimizers and not _optimizer_made():
            self._unit_over = True

    def root_called(self, module: torch.nn.Module) -> None:
        """A module is called that no other module calls."""
        if self._root is None or self._root() is None:
            self._root = weakref.ref(module)
        if self._root() is not module or not self.needs_roots:
            return
        if self._unit_over:
            self._unit_over = False
            self._advance()
        if self._step_on == "module" or not torch.is_grad_enabled():
            self._unit_over = True

    def _end_by_optimizer(self) -> None:
        self._ended_by_optimizer = True
        self._advance()

    def _number(self, optimizer: object) -> int:
        for number, (key, reference) in enumerate(self._optimizers):
            known = reference() if reference else None
            same = key == id(optimizer) and (reference is None or known is optimizer)
            # a program that makes its optimizer anew goes on with the number of the old one
            if same or (reference is not None and known is None):
                self._optimizers[number] = (id(optimizer), weakref.ref(optimizer))
                return number
        self._optimizers.append((id(optimizer), weakref.ref(optimizer)))
        return len(self._optimizers) - 1


def optimizers_in_round(frame: FrameType | None) -> list[int]:
    """Which optimizers the GradScaler handled that now updates its scale, by identity; `frame`
    is that of the call which does so."""
    for _ in range(16):  # each mode on the stack stands between with two frames or more
        if frame is None:
            break
        states = getattr(frame.f_locals.get("self"), "_per_optimizer_states", None)
        if states is not None:
            return list(states)
        frame = frame.f_back
    return []


def _scaler_steps() -> bool:
    """Whether the optimizer that now steps is called by a GradScaler."""
    frame: FrameType | None = sys._getframe()
    for _ in range(14):
        if frame is None:
            break
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False


def _optimizer_made() -> bool:
    """Whether the program has made an optimizer: torch marks a class when it is first used."""
    classes = [Optimizer]
    while classes:
        kind = classes.pop()
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        classes += kind.__subclasses__()
    return False
