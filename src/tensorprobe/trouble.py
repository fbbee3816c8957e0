"""Trouble of ours, which is never the program's: it is told, and the program goes on."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any


class OnTrouble:
    """Catches what the lines inside raise, and hands it on. Ctrl-C is not caught.

    with OnTrouble(tape.gap, "backward"):
        ...  # if this raises an error, `tape.gap("backward", error)` is called

    Not in what runs for every call: a `try` costs nothing there, and this costs a microsecond.
    """

    __slots__ = ("_tell", "_what")

    def __init__(self, tell: Callable[..., object], *what: Any) -> None:
        self._tell, self._what = tell, what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._tell(*self._what, error)
        return True


def text_of(error: BaseException) -> str | None:
    """The text of an exception, which is the program's own code; None where that fails."""
    with OnTrouble(lambda error: None):
        return str(error)
    return None
