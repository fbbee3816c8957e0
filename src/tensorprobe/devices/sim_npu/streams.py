"""Streams and events of a device whose every call has finished when it returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **other: Any) -> None:
        self.device = device
        self.priority = priority
        self.stream_id = 0

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A moment in time."""

    def __init__(self, enable_timing: bool = False, **other: Any) -> None:
        self.enable_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("both events must be recorded before the time between them is asked")
        return (end._recorded_s - self._recorded_s) * 1000


DEFAULT = Stream()


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Work inside goes to `chosen`, which makes no difference here."""
    yield


def current_stream(device: Any = None) -> Stream:
    return DEFAULT


def default_stream(device: Any = None) -> Stream:
    return DEFAULT


def set_stream(chosen: Stream) -> None:
    """Accepted; there is one stream."""
