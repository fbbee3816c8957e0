"""A Python that has imported torch and tensorprobe already, and runs each job in a fork of it.

Started as a script; a job is a line of JSON on stdin, its end a line on stdout. Importing torch
takes a second, and there are thousands of jobs. Children that a verb starts are forks too: they
run the same code, with the same traps, and torch need not be imported again.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import traps

CRASHED = 70  # an exception that nobody caught
_CPU_S = 10
_WALL_S = 100  # for what waits: machines are shared, and time on the clock is no measure
_MEMORY_NBYTES = 8 << 30


class WarmPopen(subprocess.Popen[Any]):
    """Starts a Python by forking this one; everything else as always."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if not traps.is_ours(args):
            super()._execute_child(args, *rest)
            return
        pass_fds, cwd, env, files = rest[3], rest[4], rest[5], rest[9:15]
        p2cread, _, _, c2pwrite, _, errwrite = files
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ends = {0: p2cread, 1: c2pwrite, 2: errwrite}
                _enter(ends, set(pass_fds), cwd, env)
                _end(_python([os.fspath(word) for word in args[1:]]))
            finally:
                os._exit(CRASHED)
        self._child_created = True
        self._close_pipe_fds(*files)


def _enter(ends: dict[int, int], kept: set[int], cwd: Any, env: Any) -> None:
    for end, given in ends.items():
        if given >= 0:
            os.dup2(given, end)
    kept |= {0, 1, 2, traps.log_descriptor()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", write_through=True)


def _python(words: list[str]) -> int:
    """What `python WORDS` does."""
    words = [word for word in words if word not in ("-O", "-I", "-P", "-s", "-E", "-B", "-u")]
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            space = {"__name__": "__main__", "__builtins__": __builtins__}
            FunctionType(compile(words[1], "<warm>", "exec"), space)()  # exec would be trapped
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:0] = [os.path.dirname(words[0]), *path]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return _status(ended)
    except BaseException:  # noqa: BLE001 as Python does at the end of a script
        traceback.print_exc()
        return 1
    return 0


def _status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    sys.stderr.write(f"{ended.code}\n")
    return 1


def _end(status: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


# Jobs


def _run_job(job: dict[str, Any]) -> None:
    """In the fork: every step of the job, each with its output in a file of its own."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_NBYTES, -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(job["folder"])
    os.environ["TMPDIR"] = tempfile.tempdir = job["told"]  # a table is put together there
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = job["told"]  # made by torch._dynamo
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    traps.arm(log, job["outputs"], job["secrets"])
    for number, step in enumerate(job["steps"]):
        told = Path(job["told"]) / f"{number}.txt"
        with traps.paused():
            end = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            _enter({1: end, 2: end}, {end, log}, None, None)
        traps.tell("begin", step=number)
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + _CPU_S + 1, -1))
        status = _run_step(step)
        sys.stdout.flush()
        traps.tell("end", step=number, status=status, cpu_s=time.process_time() - began)
        os.close(end)


def _run_step(step: dict[str, Any]) -> int | None:
    try:
        if "script" in step:
            path = Path(step["script"])
            if not path.is_file():
                return None
            done = subprocess.run([sys.executable, str(path)], check=False, stdin=0)
            return done.returncode
        if "load" in step:
            return _load(step["load"])
        if "view" in step:
            return _view(step["view"])
        from tensorprobe.cli.main import main

        return main(step["verb"])
    except SystemExit as ended:
        return _status(ended)
    except BaseException:  # noqa: BLE001 what a user would see: a traceback
        traceback.print_exc()
        return CRASHED


def _load(path: str) -> int:
    import tensorprobe as tp
    from tensorprobe.errors import TensorprobeError

    try:
        capture = tp.load(path)
        repr(capture)
        for call in capture.calls:
            repr(call)
            for record in call.tensors:
                for read in (record.load, record.array):
                    with contextlib.suppress(TensorprobeError):
                        read()
    except TensorprobeError as error:
        print(error)
        return 1
    return 0


def _view(path: str) -> int:
    """What the server of `view` answers, without its socket."""
    from tensorprobe.errors import TensorprobeError
    from tensorprobe.report.serving import REFUSED, ServedPaths

    try:
        library = ServedPaths([Path(path)])
    except TensorprobeError as error:
        print(error)
        return 1
    for number in range(len(library.items[:20])):
        for ask in (
            lambda n: library.index(n),
            *(lambda n, at=at: library.call(n, at) for at in range(4)),
            *(lambda n, at=at: library.pictures(n, at) for at in range(4)),
        ):
            with contextlib.suppress(*REFUSED):
                ask(number)
    return 0


def _wait(pid: int) -> int | None:
    """Its status; None where it does not end."""
    until = time.monotonic() + _WALL_S
    pause = 0.001
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return None


def serve() -> None:
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    traps.install()
    _import_all()
    sys.dont_write_bytecode = True  # from here on, a file that is written is an attack
    for line in requests:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _run_job(job)
                os._exit(0)
            except BaseException:  # noqa: BLE001 a fault of the bench itself
                traceback.print_exc()
            finally:
                os._exit(CRASHED)
        status = _wait(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what an attack left running
        if status is None:
            os.waitpid(pid, 0)
        answers.write(json.dumps({"status": status}) + "\n")
        answers.flush()


def _import_all() -> None:
    """What the verbs import, so that a fork has it."""
    import ml_dtypes  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes

    for room in (
        *("checking", "checkpoints", "cli", "comparing", "compiling", "devices", "environment"),
        *("monitoring", "peers", "replay", "report", "store", "tensors"),
    ):
        _import_room(f"tensorprobe.{room}")
    torch.set_num_threads(1)
    # A compiler makes code of text all the time, and starts others: scripts run uncompiled.
    torch.compile = lambda model, **_: model  # type: ignore[assignment]


def _import_room(name: str) -> None:
    package = importlib.import_module(name)
    for each in pkgutil.iter_modules(package.__path__):
        if each.ispkg and each.name != "sim_npu":
            _import_room(f"{name}.{each.name}")
        elif not each.ispkg and each.name not in ("__main__", "triton_kernels"):
            with contextlib.suppress(ImportError):  # a kernel for a device that is not here
                importlib.import_module(f"{name}.{each.name}")


if __name__ == "__main__":
    serve()
