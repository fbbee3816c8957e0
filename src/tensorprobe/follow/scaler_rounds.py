"""GradScalers, found where they step an optimizer: their scale, and when they end a round."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

_FRAMES = 14  # between the scaler's own and ours


class ScalerRounds:
    """The GradScaler of a program. It is not told of; it is seen in the frames of what it calls.

    Its round is over when it begins with an empty record of its optimizers, which it does in
    `update`. That record is held here, so that another one never has its identity.
    """

    def __init__(self) -> None:
        self._scaler: weakref.ref[Any] | None = None
        self._round: Any = None

    @property
    def scaler(self) -> Any:
        """The scaler that was seen last, or None."""
        return None if self._scaler is None else self._scaler()

    @property
    def scale(self) -> Any:
        """Its scale, a tensor on the device; None without a scaler, or before it has one."""
        return getattr(self.scaler, "_scale", None)

    def find(self, frame: FrameType | None = None) -> None:
        """Look for a scaler among those who called this."""
        frame = frame or sys._getframe(1)
        for _ in range(_FRAMES):
            if frame is None:
                return
            if frame.f_code.co_name in ("_maybe_opt_step", "step"):  # the second with fused ones
                found = frame.f_locals.get("self")
                states = getattr(found, "_per_optimizer_states", None)
                if states is not None:
                    if found is not self.scaler:
                        self._scaler, self._round = weakref.ref(found), states
                    return
            frame = frame.f_back

    def ended(self) -> list[int]:
        """The optimizers of a round that has ended since this was asked, by identity."""
        scaler = self.scaler
        if scaler is None:
            self._round = None
            return []
        states = getattr(scaler, "_per_optimizer_states", None)
        before, self._round = self._round, states
        return list(before) if before is not None and before is not states else []
