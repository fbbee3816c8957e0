"""Compiles the module: in the process of a build command, or in one of its own beside a program.

That one is started as a file, so this one imports nothing but Python's own library: it has no other
paths, and costs the machine no second torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

# The lock is the name of a socket that is no file: the kernel frees it when its owner is gone,
# however that ended, and it is the same for all users and folders of a machine (or of a container
# that has its own network).
LOCK = "\0tensorprobe-native-build"
_LOOK_EVERY_S = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Plan(NamedTuple):
    """All that a build needs to be told."""

    targets: list[str]  # where the module may go; the first folder that can be written to gets it
    compile: list[str]  # with `-o FILE` behind it
    trial: list[str]  # loads the module, with its path behind it
    superseded: str  # a pattern: what was built from other sources beside the first target
    grace_s: float  # beside a program: wait so long before the compiler starts


class Failed(Exception):
    """What is missing or wrong, in one line."""


class Ended(Exception):
    """The program that wanted it is over."""


def take_lock() -> socket.socket | None:
    """The right to build, until this and every copy of it is closed; None while another has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(LOCK)
    except OSError:
        lock.close()
        return None
    return lock


def failure_file(target: str) -> str:
    """The file that says why the module could not be built."""
    return target.removesuffix(".so") + ".failed"


def remember(target: str, reason: str, *, missing: bool = False) -> None:
    """Keep the reason of a failure; `missing` where it is quickly seen whether it still holds."""
    with contextlib.suppress(OSError):
        file = failure_file(target)
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        with open(f"{file}.{os.getpid()}", "w") as out:
            os.fchmod(out.fileno(), 0o644)  # whatever the umask, as below
            json.dump({"reason": reason, "missing": missing}, out)
        os.replace(out.name, file)


def make(plan: Plan, program: int | None = None) -> str:
    """Compile, try and publish the module; its path. Failed says why not, Ended that `program`, a
    file descriptor, has become readable: the program is over."""
    reason = "there is no folder for it"
    for target in plan.targets:
        folder = os.path.dirname(target)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            work = tempfile.mkdtemp(prefix=_work_prefix(), dir=folder)
        except OSError as error:
            reason = f"{error.filename or target}: {error.strerror}"
            continue
        try:
            _make_in(work, plan, target, program)
        except Failed as error:
            remember(target, str(error))
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(failure_file(target))
        return target
    raise Failed(reason)


def _make_in(work: str, plan: Plan, target: str, program: int | None) -> None:
    made = os.path.join(work, os.path.basename(target))
    _run(plan.compile[0], [*plan.compile, "-o", made], work, program)
    os.chmod(made, 0o755)  # whatever the umask: one that others can write to is not loaded
    _run("it was built, and cannot be loaded", [*plan.trial, made], work, program)
    os.replace(made, target)  # whole: another process may load it
    if target == plan.targets[0]:  # a cache is shared with other versions of this package
        for old in glob.glob(os.path.join(glob.escape(os.path.dirname(target)), plan.superseded)):
            if old not in (target, failure_file(target)):
                with contextlib.suppress(OSError):
                    os.unlink(old)


def _run(what: str, command: list[str], work: str, program: int | None) -> None:
    """Run a command, and end it with all that it started when the program is over."""
    said = os.path.join(work, "said")
    with open(said, "wb") as out:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "TMPDIR": work, "LC_ALL": "C"},
                preexec_fn=None if program is None else _die_with_parent(),
            )  # fmt: skip
        except OSError as error:
            raise Failed(f"{what}: {error.strerror}") from error
    try:
        while process.poll() is None:
            if is_over(program, _LOOK_EVERY_S):
                raise Ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise Failed(f"{what}: {_explain(said, process.returncode)}")


def _die_with_parent() -> Callable[[], None]:
    """What a child calls first, so that nobody can kill this process and leave a compiler."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _explain(said: str, status: int) -> str:
    with open(said, errors="replace") as file:
        lines = [line.strip() for line in file if "error" in line.lower()]
    return lines[0][:300] if lines else f"exit code {status}"


def is_over(program: int | None, timeout_s: float) -> bool:
    """Wait that long for the end of the program, or for SIGTERM where that is held back."""
    if program is None:
        time.sleep(timeout_s)
        return False
    poll = select.poll()
    poll.register(program, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000)) or signal.SIGTERM in signal.sigpending()


def remove_leftovers(plan: Plan) -> None:
    """What builds on this machine left that were killed; for whom no build is going on."""
    for target in plan.targets:
        folder = glob.escape(os.path.dirname(target))
        for work in glob.glob(os.path.join(folder, f"{glob.escape(_work_prefix())}*")):
            shutil.rmtree(work, ignore_errors=True)


def _work_prefix() -> str:
    return f".building-{socket.gethostname()}-"  # a folder may be shared with other machines


def _be_humble() -> None:
    """Let the program go first: also where the kernel weighs sessions and not their processes, and
    when memory runs out."""
    for file, text in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def main(program: int, plan: Plan) -> None:
    # Held back and looked for: it must not come between the start of a compiler and its end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with contextlib.suppress(Failed, Ended, OSError):
        _be_humble()
        if not is_over(program, plan.grace_s):
            remove_leftovers(plan)
            make(plan, program)


if __name__ == "__main__":
    main(int(sys.argv[1]), Plan(*json.loads(sys.argv[2])))
