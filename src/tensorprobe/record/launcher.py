"""Running a script as Python would, with a recorder that starts as soon as it imports torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from tensorprobe.errors import (
    BadUsage,
    GuardStopped,
    MissingDependency,
    RecordingStopped,
    WriteFailed,
)
from tensorprobe.follow.tracebacks import clean

# Ours, which are said in one line; raised where the user has asked for it.
_STOPPED = (WriteFailed, RecordingStopped, GuardStopped)


class Program(NamedTuple):
    """A script or module, compiled and ready to be `__main__`."""

    name: str  # sys.argv[0], as typed
    file: str  # absolute
    code: CodeType
    folder: str  # sys.path[0]
    spec: importlib.machinery.ModuleSpec | None
    loader: Any
    package: str | None


def load_script(path: str) -> Program:
    """A script by its path; SyntaxError as Python raises it."""
    if not os.path.exists(path):
        hint = f". To run a module: -m {path}" if not path.endswith(".py") else ""
        raise BadUsage(f"no script at '{path}'{hint}")
    if os.path.isdir(path):
        raise BadUsage(f"'{path}' is a folder, not a script. Name the file, or -m PACKAGE")
    full = os.path.abspath(path)
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        raise BadUsage(f"cannot read '{path}': {error.strerror}") from error
    if b"\0" in source:
        raise BadUsage(f"'{path}' is not Python source")
    code = compile(source, full, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    return Program(path, full, code, os.path.dirname(os.path.realpath(path)), None, loader, None)


def load_module(name: str) -> Program:
    """A module as for `python -m`: a package stands for its `__main__`."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = _find(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec, package = _find(f"{name}.__main__"), name
            if spec is None:
                raise BadUsage(f"'{package}' is a package without a __main__; it cannot be run")
    finally:
        del sys.path[0]
    if spec is None:
        hint = f". Did you mean -m {name[:-3]}?" if name.endswith(".py") else ""
        raise BadUsage(f"no module named '{name}' in this folder or installed{hint}")
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise BadUsage(f"'{name}' has no Python code; it cannot be run")
    file = spec.origin or name
    return Program(file, file, code, os.getcwd(), spec, loader, spec.parent)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


class Launch:
    """One run of a program: `on_torch` is called once torch has been imported, by whomever.

    torch is not imported for the program: a script that sets OMP_NUM_THREADS or the like before
    its own `import torch` must find that it has its effect.
    """

    def __init__(self, program: Program, arguments: Sequence[str]) -> None:
        self._program = program
        self._arguments = list(arguments)

    def run(self, on_torch: Callable[[], None]) -> BaseException | None:
        """Run it to its end; returns what it left by, None when that was its last line.

        An exception nobody caught has been shown, without the frames of this file, and the
        program's threads are waited for, as Python does.
        """
        if importlib.util.find_spec("torch") is None:
            raise MissingDependency("torch", "tensorprobe run", "torch")
        main = self._become_main()
        end: BaseException | None = None
        try:
            when_imported("torch", on_torch)
            exec(self._program.code, main.__dict__)
        except (SystemExit, *_STOPPED) as leaving:
            end = leaving
        except BaseException as error:  # noqa: BLE001 the program's own, shown as Python shows it
            end = error
            show_exception(error)
        try:
            _join_threads()
        except KeyboardInterrupt as interrupt:
            end = interrupt
        return end

    def _become_main(self) -> ModuleType:
        program = self._program
        main = ModuleType("__main__")
        main.__dict__.update(
            __file__=program.file,
            __spec__=program.spec,
            __loader__=program.loader,
            __package__=program.package,
            __cached__=None,
            __annotations__={},
        )
        sys.modules["__main__"] = main
        sys.argv[:] = [program.name, *self._arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = program.folder
        elif program.spec is not None:
            with contextlib.suppress(ValueError):
                sys.path.remove(program.folder)
        return main


def show_exception(error: BaseException) -> None:
    """Show an exception through the program's own excepthook, without our frames."""
    clean(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _join_threads() -> None:
    """What they compute belongs to the program: Python ends when they have ended."""
    with _executors_ending():
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


@contextlib.contextmanager
def _executors_ending() -> Iterator[None]:
    """Inside, the threads of executors end when they have done their work, as in Python's end.

    They wait for more until the interpreter says that there will be none, and it does so before
    it waits for threads. Afterwards executors that have not been used serve as before.
    """
    futures: Any = sys.modules.get("concurrent.futures.thread")
    if futures is None:
        yield
        return
    with futures._global_shutdown_lock:
        before, futures._shutdown = futures._shutdown, True
    for queue in list(futures._threads_queues.values()):
        queue.put(None)
    try:
        yield
    finally:
        futures._shutdown = before


def when_imported(name: str, act: Callable[[], None]) -> None:
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportWatch(name, act))


def import_before(name: str, needed: str) -> None:
    """Let the first import of `name`, should it come before that of `needed`, import that first."""
    sys.meta_path.insert(0, _ImportsFirst(name, needed))


class _ImportsFirst(importlib.abc.MetaPathFinder):
    """Imports one module when another is looked for, which it may bring along."""

    def __init__(self, name: str, needed: str) -> None:
        self._name = name
        self._needed = needed

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        importlib.import_module(self._needed)
        return importlib.util.find_spec(fullname)


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Waits for one module: finds it like the other finders do, and acts when it is loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self._act)
        return spec


class _WatchedLoader(importlib.abc.Loader):
    """Loads with the module's own loader, which the module then has as if we were not there."""

    def __init__(self, loader: Any, act: Callable[[], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act()


def processes_started() -> int:
    """How many processes the program started by multiprocessing: nothing in them is recorded."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    counter = repr(getattr(multiprocessing, "_process_counter", "count(1)"))
    number = counter.removeprefix("count(").removesuffix(")")
    return int(number) - 1 if number.isdigit() else 0


def default_output(program: Program) -> Path:
    """Where a recording goes when nobody says: runs/ and the name of what is run."""
    name = program.package if program.package and program.spec else Path(program.file).stem
    return Path("runs") / (name or "recording")
