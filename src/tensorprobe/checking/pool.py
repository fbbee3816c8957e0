"""Processes that run calls: one that crashes or hangs is replaced, and its call is marked."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import msgspec

from tensorprobe.checking.row import Row, row_for
from tensorprobe.checking.worker import Setting
from tensorprobe.errors import BadUsage, DeviceUnusable
from tensorprobe.replay.child_limits import child_command
from tensorprobe.replay.pairing import ForwardBackward

_START_S = 120.0  # importing torch on a busy machine, and waking a device


class Task(NamedTuple):
    """A call to check, with the benchmark device's call where there is one."""

    number: int
    pair: ForwardBackward
    benchmark: ForwardBackward | None = None


class _Worker:
    """One process and what it is doing."""

    def __init__(self, setting: Setting) -> None:
        ours, theirs = socket.socketpair()
        code = f"from tensorprobe.checking.worker import main; main({theirs.fileno()})"
        self.process = subprocess.Popen(
            child_command(code),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send(setting)
        self.task: Task | None = None
        self.ready = False
        self.deadline = time.monotonic() + _START_S

    def give(self, task: Task, timeout_s: float) -> None:
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        self.connection.send(tuple(task))

    def is_overdue(self) -> bool:
        """Whether an answer should be there by now; one that nobody has read yet counts."""
        if self.ready and self.task is None:
            return False
        return time.monotonic() > self.deadline and not self.connection.poll()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def epitaph(self) -> str:
        """Why a process ended, in words."""
        code = self.process.wait()
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with status {code}"


class Pool:
    """Runs tasks in `jobs` processes and yields a row for each, in the order they finish.

    for row in Pool(setting, jobs=2).run(tasks): ...
    """

    def __init__(self, setting: Setting, jobs: int = 1, timeout_s: float = 120.0) -> None:
        self._setting = setting
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self.facts: dict[str, Any] = {}  # about the process that runs calls, once one is there

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Row]]:
        todo = deque(tasks)
        try:
            self._workers = [
                _Worker(self._setting) for _ in range(max(1, min(self._jobs, len(todo))))
            ]
            while todo or any(worker.task for worker in self._workers):
                for worker in list(self._workers):
                    if worker.ready and worker.task is None and todo:
                        self._give(worker, todo)
                yield from self._collect()
        finally:
            for worker in self._workers:
                worker.end()
            self._workers = []

    def _give(self, worker: _Worker, todo: deque[Task]) -> None:
        task = todo.popleft()
        try:
            worker.give(task, self._timeout_s)
        except OSError:  # it died after its last answer, which is not this call's doing
            todo.appendleft(task)
            self._replace(worker)

    def _collect(self) -> Iterator[tuple[Task, Row]]:
        """Wait for the next answer, death or deadline."""
        busy = {w.connection: w for w in self._workers if w.task is not None or not w.ready}
        left = min(w.deadline for w in busy.values()) - time.monotonic()
        for connection in wait(list(busy), max(left, 0.0)):
            assert isinstance(connection, Connection)
            yield from self._hear(busy[connection])
        for worker in busy.values():
            if worker in self._workers and worker.is_overdue():
                yield from self._give_up(worker)

    def _hear(self, worker: _Worker) -> Iterator[tuple[Task, Row]]:
        try:
            answer: Any = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            yield from self._bury(worker, worker.epitaph())
            return
        if not worker.ready:
            state, reason = answer
            if state == "misused":
                raise BadUsage(reason)
            if state == "unusable":
                raise DeviceUnusable(f"no call can be checked: {reason}")
            worker.ready = True
            self.facts = reason
            return
        task, worker.task = worker.task, None
        assert task is not None
        _, line, usable = answer
        if not usable:
            self._replace(worker)
        yield task, msgspec.json.decode(line, type=Row)

    def _give_up(self, worker: _Worker) -> Iterator[tuple[Task, Row]]:
        if worker.task is None:
            raise DeviceUnusable(
                f"a process for device '{self._setting.device}' did not start in {_START_S:g} s"
            )
        yield from self._bury(worker, f"no answer in {self._timeout_s:g} s")

    def _bury(self, worker: _Worker, reason: str) -> Iterator[tuple[Task, Row]]:
        if worker.task is None:
            raise DeviceUnusable(f"no call can be checked: {reason} before the first call")
        task = worker.task
        self._replace(worker)
        row = row_for(task.pair.forward, "crashed", reason)
        row.device = self._setting.device
        yield task, row

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._setting)
