"""A thread that works out one thing while its caller does another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
_Work = tuple["Future[_Found]", Callable[[_Given], _Found], _Given]


class Beside(Generic[_Given, _Found]):
    """Calls functions in a thread of its own, started with the first of them.

    Not an executor: those take no more work once the interpreter begins to end, which is when the
    rest of a recording is written.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[_Work[_Found, _Given] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[_Given], _Found], given: _Given) -> Future[_Found]:
        """Begin to call a function; it is called here where no thread can be started."""
        future: Future[_Found] = Future()
        work = (future, function, given)
        if self._thread is None and not self._start_thread():
            _do(*work)
        else:
            self._todo.put(work)
        return future

    def stop(self) -> None:
        """End the thread; `start` may begin again."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._run, name="tensorprobe beside", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            _do(*work)
            del work  # holds what it was given


def _do(future: Future[_Found], function: Callable[[_Given], _Found], given: _Given) -> None:
    try:
        future.set_result(function(given))
    except Exception as error:  # noqa: BLE001 whoever asks for the result gets it
        future.set_exception(error)
