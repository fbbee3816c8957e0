"""Replays suspects in a process of their own: a call from a file may hang, crash or fill memory.

The process is started for the first suspect and serves all comparisons of this program that bring
the same code of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from tensorprobe.comparing.evidence import Evidence, matters, own_error
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.records import Call

_START_S = 120.0  # importing torch on a busy machine


class UserCode(msgspec.Struct, frozen=True):
    """What a user allows to be run besides torch: a file of references, packages and files."""

    references: Path | None = None
    imports: tuple[str | Path, ...] = ()


class Replayer:
    """Own errors and effects of arguments, worked out in another process."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def start(self) -> None:
        """Start the process; BadUsage where the user's code cannot be imported."""
        with self._lock:
            self._ready()

    def own_error(
        self, forward: Call, backward: Call | None = None, *, noise: bool = True, seconds: float
    ) -> Evidence:
        """As evidence.own_error has it; a process that dies or is late is a problem of the call."""
        if _has_reference(forward):
            return own_error(forward, backward, noise=noise)
        answer = self._ask("own_error", (forward, backward, noise), seconds)
        if isinstance(answer, str):
            return Evidence(problem=f"{(backward or forward).name} has no replay: {answer}")
        assert isinstance(answer, Evidence)
        return answer

    def matters(self, call: Call, other: Call | None, *, seconds: float) -> float | None:
        """As evidence.matters has it; None also where the process dies or is late."""
        if other is None:
            return None
        if _has_reference(call):
            return matters(call, other)
        answer = self._ask("matters", (call, other), seconds)
        return None if isinstance(answer, str) else answer

    def _ask(self, what: str, call: tuple[Any, ...], seconds: float) -> Any:
        """The answer, or as text why there is none."""
        with self._lock:
            child = self._ready()
            try:
                return child.ask((what, *call), seconds)
            except TimeoutError:
                reason = f"no answer in {seconds:.0f} s"
            except (EOFError, OSError):
                reason = child.epitaph()
            child.end()
            self._child = None
            return reason

    def _ready(self) -> _Child:
        child = self._child
        if child is None or not child.is_of_this_process:
            child = self._child = _Child(self._code)
        return child


def _has_reference(call: Call) -> bool:
    """Whether the user has registered a reference for the call in this process."""
    references: Any = sys.modules.get("tensorprobe.replay.references")  # it would import torch
    return references is not None and references.find(call.op, references.registered()) is not None


@functools.lru_cache(maxsize=4)
def replayer_for(code: UserCode) -> Replayer:
    """The replayer of this program for some code of the user's."""
    return Replayer(code)


class _Child:
    """The process and the way to it."""

    def __init__(self, code: UserCode) -> None:
        from tensorprobe.replay.limits import child_command

        ours, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs:
            start = f"from tensorprobe.comparing.replaying import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                child_command(start),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self._process, self._connection, self._owner)
        try:
            problem = self.ask(code, _START_S)
        except (TimeoutError, EOFError, OSError) as error:
            problem = f"the process that replays calls did not start: {self.epitaph() or error}"
        if problem is not None:
            self.end()
            raise BadUsage(problem)

    @property
    def is_of_this_process(self) -> bool:
        return self._owner == os.getpid()

    def ask(self, question: Any, seconds: float) -> Any:
        self._connection.send(question)
        if not self._connection.poll(max(seconds, 0.0)):
            raise TimeoutError
        return self._connection.recv()

    def epitaph(self) -> str:
        """What a process that is gone died of."""
        deadline = time.monotonic() + 5.0
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        code = self._process.poll()
        return "the process that ran it died" + (f" (signal {-code})" if code and code < 0 else "")


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has nothing to end
        return
    with contextlib.suppress(OSError):  # a program may close all files that it does not know
        connection.close()
    process.kill()
    process.wait()


# In the process itself


def serve(descriptor: int) -> None:
    """Answer questions until the other end is closed."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        connection.send(_prepare(connection.recv()))
        while True:
            connection.send(_answer(*connection.recv()))


def _prepare(code: UserCode) -> str | None:
    """Import what the user brings, and take no more memory than allowed; what is wrong, if so."""
    from tensorprobe.replay.limits import limit_memory
    from tensorprobe.replay.references import bring_in, run_file

    try:
        if code.references is not None:
            run_file(code.references)
        bring_in(code.imports)
    except TensorprobeError as error:
        return str(error)
    limit_memory()
    return None


def _answer(what: Literal["own_error", "matters"], *call: Any) -> Any:
    try:
        if what == "own_error":
            forward, backward, noise = call
            return own_error(forward, backward, noise=noise)
        return matters(*call)
    except Exception as error:  # noqa: BLE001 judging one call: the reason is its result
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
