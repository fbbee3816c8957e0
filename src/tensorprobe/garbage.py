"""Keeping Python from looking for garbage where there is none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MORE = 10  # times the objects live on: 1519 of a small Llama's forward pass, and 146 of a bare one
_MOST = 2**31 - 1  # that a threshold can be


@contextmanager
def no_garbage() -> Iterator[None]:
    """For making many small objects that are all kept: looking through them takes as long again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class RareSearches:
    """Lets Python look through all objects about as often as in a program that is not watched.

    What is noted of a call lives as long as its graph. So young objects are looked through far more
    often, and with every tenth of these searches comes one through all there is, which takes 0.1 s
    with torch loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[int, int, int] | None = None
        self._ours: tuple[int, int, int] | None = None

    def begin(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = first, second, third = gc.get_threshold()
                self._ours = (first, second, min(third * _MORE, _MOST))
                gc.set_threshold(*self._ours)

    def end(self) -> None:
        """Set the collector back when the last watcher ends, unless someone else has set it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before and gc.get_threshold() == self._ours:
                gc.set_threshold(*self._before)


rare_searches = RareSearches()
