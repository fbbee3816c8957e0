"""Processes that go through ranks: of this machine, one a core, or those of another engine."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from tensorprobe.comparing.measure import WORKER_ENVIRONMENT
from tensorprobe.comparing.rank_work import Engine, RankFailed, Work
from tensorprobe.errors import BadUsage, TensorprobeError

Task = TypeVar("Task")
Result = TypeVar("Result")
TRIES = 3  # of a task whose process dies
_AHEAD = 16  # results a process that wait until those before them are there


def engine_named(name: str, jobs: int | None) -> Engine:
    """The engine of a name: "ray", or "ray://HOST:PORT" of a cluster."""
    if name == "ray" or name.startswith("ray://"):
        from tensorprobe.comparing.ray_engine import RayEngine

        return RayEngine(None if name == "ray" else name, jobs)
    raise BadUsage(f"engine '{name}': expected ray or ray://HOST:PORT")


def in_order(
    pool: concurrent.futures.Executor,
    ask: Callable[[Task], Result],
    tasks: Iterator[Task],
    most: int,
) -> Iterator[tuple[Task, Result]]:
    """What `ask` gives for each task, in order; tasks are taken when one of `most` is free."""
    waiting: deque[tuple[Task, concurrent.futures.Future[Result]]] = deque()
    is_over = False
    while True:
        busy = [future for _, future in waiting if not future.done()]
        while not is_over and len(busy) < most and len(waiting) < _AHEAD * most:
            try:
                task = next(tasks)
            except StopIteration:
                is_over = True
                break
            future = pool.submit(ask, task)
            waiting.append((task, future))
            busy.append(future)
        if not waiting:
            return
        while waiting and waiting[0][1].done():
            task, future = waiting.popleft()
            yield task, future.result()
        if busy and waiting:
            concurrent.futures.wait(busy, return_when=concurrent.futures.FIRST_COMPLETED)


class RankProcesses:
    """A number of processes of this machine. Where one dies, another one does its task again."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process() for _ in range(n)]
        for process in self._processes:
            self._free.put(process)

    def run(
        self, work: Work[Task, Result], tasks: Iterator[Task]
    ) -> Iterator[tuple[Task, Result | RankFailed]]:
        shared = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)

        def ask(task: Task) -> Result | RankFailed:
            process = self._free.get()
            try:
                found: Result | RankFailed = process.do(shared, task)
                return found
            finally:
                self._free.put(process)

        with concurrent.futures.ThreadPoolExecutor(self._n) as pool:
            try:
                yield from in_order(pool, ask, tasks, self._n)
            except BaseException:  # Ctrl-C, say: nobody waits for what the processes do
                self.close()
                raise

    def close(self) -> None:
        for process in self._processes:
            process.end()


class _Process:
    """One process, and the way to it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._shared: bytes | None = None  # the work that it has
        self._start()

    def do(self, shared: bytes, task: object) -> Any:
        """What it answers; why there is nothing where it has died more than once of this task."""
        why = ""
        for _ in range(TRIES):
            if self._is_over:
                return RankFailed("it was not waited for")
            if self._child is None:
                self._start()
            try:
                answer = self._ask(shared, task)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                why = self._epitaph()
                continue
            if isinstance(answer, Raised):
                raise answer.error
            return answer
        return RankFailed(f"{TRIES} processes have died of it, the last {why}")

    def _ask(self, shared: bytes, task: object) -> Any:
        known = self._shared == shared
        pickle.dump((None if known else shared, task), self._to, pickle.HIGHEST_PROTOCOL)
        self._to.flush()
        self._shared = shared
        return pickle.load(self._from)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _code(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | WORKER_ENVIRONMENT,
            )
        self._end = ours
        self._to, self._from = ours.makefile("wb"), ours.makefile("rb")
        self._shared = None

    def _epitaph(self) -> str:
        self._hang_up()
        child, self._child = self._child, None
        if child is None:  # `end` has
            return ""
        status = child.wait()
        if status < 0:
            with suppress(ValueError):
                return f"by {signal.Signals(-status).name}"
        return f"with status {status}"

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # it may be waited for in another thread
        for each in (self._to, self._from, self._end):
            with suppress(OSError):
                each.close()

    def end(self) -> None:
        """It has nothing to lose."""
        self._is_over = True
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._hang_up()
            child.wait()


class Raised:
    """An error that the user is to see."""

    def __init__(self, error: TensorprobeError) -> None:
        self.error = error


def _code(end: int) -> str:
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # its parent ends it
        "from tensorprobe.comparing.rank_processes import serve\n"
        f"serve({end})"
    )


def serve(end: int) -> NoReturn:
    """Do what is asked, until the other end is closed."""
    doing: Doing | None = None
    with (
        suppress(EOFError, OSError),
        open(end, "rb") as source,
        open(end, "wb", closefd=False) as sink,
    ):
        while True:
            shared, task = pickle.load(source)
            if shared is not None:
                doing = Doing(shared)
            assert doing is not None
            pickle.dump(doing(task), sink, pickle.HIGHEST_PROTOCOL)
            sink.flush()
    os._exit(0)


class Doing:
    """Does tasks of one work."""

    def __init__(self, work: bytes) -> None:
        self._work: Work[Any, Any] = pickle.loads(work)

    def __call__(self, task: object) -> Any:
        try:
            return self._work.do(task)
        except TensorprobeError as error:
            return Raised(error)
