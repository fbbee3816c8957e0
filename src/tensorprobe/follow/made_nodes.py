"""What is noted of graph nodes when they are made, and found again when backward comes to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tensorprobe import native

T = TypeVar("T")


class MadeNodes(Generic[T]):
    """Notes on nodes by their sequence number, which every thread counts by itself.

    Which thread has made a node is told by C++ alone. Without it a node is taken to be of the
    thread that goes backward, where that has made one of its number; else of the only one that has.
    """

    def __init__(self) -> None:
        self._notes: dict[int, dict[int, T]] = {}  # by thread
        self._thread: Callable[[], int] = threading.get_ident
        self._thread_of: Callable[[Any], int] | None = None
        if native.MODULE is not None:
            self._thread, self._thread_of = native.MODULE.thread, native.MODULE.thread_of

    def clear(self) -> None:
        self._notes.clear()

    def note(self, number: int, note: T) -> None:
        """Note something about the last node that this thread made. The first note stays."""
        thread = self._thread()
        notes = self._notes.get(thread)
        if notes is None:
            notes = self._notes.setdefault(thread, {})
        notes.setdefault(number, note)

    def find(self, node: Any) -> T | None:
        """What was noted of a node; None where that is nothing, or not known."""
        number = node._sequence_nr()
        thread = self._thread() if self._thread_of is None else self._thread_of(node)
        notes = self._notes.get(thread, {})
        if number in notes or self._thread_of is not None:
            return notes.get(number)
        found = [notes[number] for notes in list(self._notes.values()) if number in notes]
        return found[0] if len(found) == 1 else None
