"""Threads that work things out while their caller does another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
_Work = tuple["Future[_Found]", Callable[[_Given], _Found], _Given]


class Beside(Generic[_Given, _Found]):
    """Calls functions in threads of its own, started with the first of them.

    Not an executor: those take no more work once the interpreter begins to end, which is when the
    rest of a recording is written.
    """

    def __init__(self, threads: int = 1) -> None:
        self._todo: SimpleQueue[_Work[_Found, _Given] | None] = SimpleQueue()
        self._n_threads = threads
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[[_Given], _Found], given: _Given) -> Future[_Found]:
        """Begin to call a function; it is called here where no thread can be started."""
        future: Future[_Found] = Future()
        work = (future, function, given)
        if self._threads or self._start_threads():
            self._todo.put(work)
        else:
            _do(*work)
        return future

    def each_of(
        self, function: Callable[[_Given], _Found], given: Iterable[_Given]
    ) -> Iterator[_Found]:
        """What the function gives for each of them, in order."""
        for future in [self.start(function, each) for each in given]:
            yield future.result()

    def stop(self) -> None:
        """End the threads; `start` may begin again."""
        for _ in self._threads:
            self._todo.put(None)
        while self._threads:
            self._threads.pop().join()

    def _start_threads(self) -> bool:
        """Whether there is one at least."""
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, or there is a limit
            while len(self._threads) < self._n_threads:
                thread = threading.Thread(target=self._run, name="tensorprobe beside", daemon=True)
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            _do(*work)
            del work  # holds what it was given


def _do(future: Future[_Found], function: Callable[[_Given], _Found], given: _Given) -> None:
    try:
        future.set_result(function(given))
    except Exception as error:  # noqa: BLE001 whoever asks for the result gets it
        future.set_exception(error)
