"""Trouble to come: values near the limit of their dtype that grow from step to step."""

from __future__ import annotations

from collections.abc import Callable

CLOSE = 0.9  # of the limit


class Latent:
    """Remembers how large the values of a call were in the step before; warns once a call."""

    def __init__(self, warn: Callable[[str, int, str], None]) -> None:
        self._warn = warn
        self._tops: dict[str, tuple[int, float]] = {}
        self._warned: set[str] = set()

    def see(self, name: str, step: int, top: float, limit: float) -> None:
        """A tensor of this name came up to `top`, at least half of the limit."""
        before = self._tops.get(name)
        if before is not None and before[0] == step:
            top = max(top, before[1])
        self._tops[name] = (step, top)
        if before is None or before[0] == step or top == limit or name in self._warned:
            return
        if top >= CLOSE * limit and top > before[1]:
            self._warned.add(name)
            self._warn(
                name,
                step,
                f"values up to {top:.5g} are {top / limit:.0%} of what their dtype holds, and "
                f"grow: {before[1]:.5g} in step {before[0]}",
            )
