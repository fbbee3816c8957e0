"""Starts the build of the parts in C++ beside a program that records without them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tensorprobe import native
from tensorprobe.native import build, builder

SWITCH = "TENSORPROBE_BUILD"
# The shell ends at once, and what it started is nobody's child: a program that waits for all its
# children does not wait for ours.
_DETACHED = 'nice -n 19 "$@" >/dev/null & echo $!'
# Held open, and by this process alone, where the kernel has no other sign of its end.
_ends: list[int] = []


def start(log: Callable[[str], None]) -> None:
    """Start building what is missing, at most one build a machine, and say so in one line.

    Not where it was tried before in vain: that was said then, and `tensorprobe doctor` tells.
    """
    if "0" in (os.environ.get(SWITCH), os.environ.get(native.SWITCH)) or native.MODULE is not None:
        return
    try:
        build.check_possible()
        lock = builder.take_lock()
        if lock is not None:
            with lock:
                _start(log, lock.fileno())
    except builder.Failed:
        return
    except OSError:  # no process or file can be had any more: that is the program's to find out
        return


def _start(log: Callable[[str], None], lock: int) -> None:
    places = build.targets()
    if not places or any(map(native.is_there, native.places())):
        return
    failure = read_failure()
    if failure is not None and not failure.missing:
        return
    try:
        plan = build.plan()
    except builder.Failed as error:
        if failure is None:
            builder.remember(str(places[0]), str(error), missing=True)
            log(f"recording without its C++ parts, at twice the cost: {error} (tensorprobe doctor)")
        return
    _start_process(plan, lock)
    log(
        "building the C++ parts in the background: recordings after that cost about half. "
        "To build them now: tensorprobe doctor --fix"
    )


def _start_process(plan: builder.Plan, lock: int) -> None:
    program = _sign_of_our_end()
    script = str(native.FOLDER / "builder.py")
    command = [sys.executable, "-I", "-S", script, str(program), json.dumps(plan)]
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _DETACHED, "sh", *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", start_new_session=True, pass_fds=(program, lock), check=False,
        )  # fmt: skip
    finally:
        os.close(program)
    if not done.stdout.strip():
        raise OSError("the shell could not start it")
    if os.getpid() == 1:  # in a container the first process is given what is nobody's
        threading.Thread(target=_bury, args=(int(done.stdout),), daemon=True).start()


def _sign_of_our_end() -> int:
    """A file descriptor that becomes readable when this process is over."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # Linux before 5.3
        read, write = os.pipe()
        _ends.append(write)
        return read


def _bury(process: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


class Failure(NamedTuple):
    """Why a build failed that was tried for this torch and these sources."""

    path: Path
    reason: str
    missing: bool  # something that can be looked for again


def read_failure() -> Failure | None:
    """What was kept of it, where nobody else can have written that."""
    for place in native.places():
        path = Path(builder.failure_file(str(place)))
        try:
            if native.distrust(path) is None:
                said = json.loads(path.read_text())
                return Failure(path, str(said["reason"]), bool(said["missing"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
