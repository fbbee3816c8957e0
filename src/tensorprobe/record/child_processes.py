"""Processes that a recorded program starts: each records itself, as a rank or by its name."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing.process as processes
import multiprocessing.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tensorprobe.errors import TensorprobeError
from tensorprobe.record.launcher import when_imported

if TYPE_CHECKING:
    from tensorprobe.record.recorder import Recorder

Children = Literal["processes", "all", "none"]
# Helpers of libraries: workers of DataLoaders, of pools and executors, managers. Only on request.
_HELPERS = ("torch.utils.data", "multiprocessing", "concurrent.futures")
_NEVER = ("torch._inductor", "multiprocessing.managers", "multiprocessing.resource_sharer")
_RANKS = "torch.multiprocessing.spawn"
# Programs that libraries start for themselves: ours, and those of torch's compiler.
_OF_LIBRARIES = re.compile(r"tensorprobe(\.|$)|.*\b(from|import) tensorprobe|.*\b_inductor\b", re.S)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_ALONE = re.compile(r"-[A-Za-z]*[IES]")  # options by which Python leaves out what we need
VARIABLE = "TENSORPROBE_CHILD"
STARTUP = Path(__file__).parent / "startup"


class Recipe(msgspec.Struct, frozen=True):
    """How a process that is started is to record: the arguments of its Recorder, its run, and its
    seed if any."""

    path: Path
    step_on: Any
    arguments: dict[str, Any]
    seed: int | None = None
    deterministic: bool = False
    run: str = ""
    children: Children = "processes"
    outer_rank: str | None = None  # RANK, as the process that starts it has it
    name: str = ""  # of a program that has none by multiprocessing


class ChildProcesses:
    """While it is entered, processes that are started by multiprocessing, or as a Python of their
    own, record themselves; and those that they start."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._n_programs: dict[str, int] = {}
        self.n_armed = 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Arm the processes that are started inside."""
        undo = self.arm()
        try:
            yield
        finally:
            undo()

    def arm(self) -> Callable[[], None]:
        """Arm processes from now on; gives what ends that."""
        kind: Any = processes.BaseProcess
        popen: Any = subprocess.Popen
        start, begin = kind.start, popen.__init__

        @functools.wraps(start)
        def armed_start(process: Any) -> None:
            if self._is_passed_by(process):
                start(process)
                return
            # It is unpickled with the process, in the child, where that begins to record. A child
            # that is forked has it as it is, and looks at it first.
            process._tensorprobe = Arm(self._now())
            try:
                start(process)
                self.n_armed += 1
            finally:
                del process._tensorprobe

        @functools.wraps(begin)
        def armed_popen(started: Any, args: Any, *others: Any, **named: Any) -> None:
            name = _program_name(args, shell=bool(named.get("shell")))
            if name is not None and not (others and len(others) > 8):  # env, by its place
                named["env"] = self._environment(name, named.get("env"))
                self.n_armed += 1
            begin(started, args, *others, **named)

        kind.start = armed_start
        popen.__init__ = armed_popen
        multiprocessing.util.register_after_fork(self, _record_if_armed)

        def undo() -> None:
            kind.start = start
            popen.__init__ = begin

        return undo

    def _now(self) -> Recipe:
        """With the run as the process knows it by now."""
        if "torch.distributed.distributed_c10d" not in sys.modules:
            return self._recipe
        from tensorprobe.devices import agreed_by_all

        return msgspec.structs.replace(self._recipe, run=agreed_by_all(self._recipe.run))

    def _is_passed_by(self, process: Any) -> bool:
        module = getattr(getattr(process, "_target", None), "__module__", "") or ""
        if module == _RANKS:
            return False
        if module.startswith(_NEVER):
            return True
        return module.startswith(_HELPERS) and self._recipe.children != "all"

    def _environment(self, name: str, given: Mapping[str, str] | None) -> dict[str, str]:
        """The variables of a Python that records itself; it takes ours away again."""
        number = self._n_programs[name] = self._n_programs.get(name, 0) + 1
        name = name if number == 1 else f"{name}-{number}"
        environment = dict(os.environ if given is None else given)
        recipe = msgspec.structs.replace(self._now(), name=name)
        environment[VARIABLE] = msgspec.json.encode(recipe, enc_hook=str).decode()
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *([before] if before else ())])
        return environment


def _program_name(args: Any, *, shell: bool) -> str | None:
    """What a Python that is started is called, by its script or module; None for anything else."""
    if shell or isinstance(args, str | bytes | os.PathLike):
        try:
            words = shlex.split(os.fsdecode(args)) if not shell else []
        except (TypeError, ValueError):
            return None
    else:
        words = [os.fsdecode(word) for word in args if isinstance(word, str | bytes | os.PathLike)]
    if not words or not (_PYTHON.fullmatch(Path(words[0]).name) or words[0] == sys.executable):
        return None
    if any(_OF_LIBRARIES.match(word) for word in words[1:4]):
        return None
    return _name_in(words[1:])


def _name_in(words: Sequence[str]) -> str | None:
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return next(rest, "python").rpartition(".")[2]
        if word == "-c":
            return "python"
        if word in ("-W", "-X"):
            next(rest, None)
        elif _ALONE.fullmatch(word):
            return None
        elif not word.startswith("-"):
            return Path(word).stem
    return None


class Arm:
    """Is nothing in the parent; where it is unpickled the process records."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def run(self) -> str:
        return self.recipe.run

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def outer_rank(self) -> str | None:
        return self.recipe.outer_rank

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _record_this_process, (self.recipe,)


class _ChildRecording:
    """The recording of a process of multiprocessing, which ends without `atexit`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._recorder: Recorder | None = None

    def begin(self) -> None:
        """Record from now on, until the process ends."""
        from tensorprobe.record.recorder import Recorder, say
        from tensorprobe.record.seeding import seed_all

        recipe = self._recipe
        if recipe.seed is not None:
            seed_all(recipe.seed, deterministic=recipe.deterministic)
        log = _unsaid if recipe.name else say
        recorder = Recorder(recipe.path, step_on=recipe.step_on, log=log, **recipe.arguments)
        with contextlib.suppress(TensorprobeError):  # the recorder has said what is wrong
            self._recorder = recorder.start()

    def close_at_end(self, _: Any = None) -> None:
        """Have the recording closed when the process ends; what was asked for may be forgotten
        while the process is set up."""
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def close(self) -> None:
        """End the recording."""
        if self._recorder is not None:
            some = self._recorder.n_calls or self._recorder.failed
            with contextlib.suppress(TensorprobeError):
                self._recorder.close(tell=bool(some))


def _record_this_process(recipe: Recipe) -> Arm:
    recording = _ChildRecording(recipe)
    when_imported("torch", recording.begin)
    recording.close_at_end()
    multiprocessing.util.register_after_fork(recording, recording.close_at_end)
    ChildProcesses(_for_children(recipe)).arm()
    return Arm(recipe)


def _for_children(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, name="", outer_rank=os.environ.get("RANK"))


def _record_if_armed(_: ChildProcesses) -> None:
    """In a process that was forked: the recorder of the one before it has let go of it."""
    arm = getattr(processes.current_process(), "_tensorprobe", None)
    if arm is None:
        return
    recording = _ChildRecording(arm.recipe)
    when_imported("torch", recording.begin)
    recording.close_at_end()


def record_this_program() -> None:
    """In a Python that was started with VARIABLE: take away what is ours, and record."""
    recipe = msgspec.json.decode(os.environ.pop(VARIABLE), type=Recipe, dec_hook=_decoded)
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    left = [each for each in paths if each != str(STARTUP)]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)
    current: Any = processes.current_process()
    current._tensorprobe = Arm(recipe)
    recording = _ChildRecording(recipe)
    when_imported("torch", recording.begin)
    ChildProcesses(_for_children(recipe)).arm()


def _unsaid(text: str) -> None:
    """Of a program: what it prints, another one may read. The first process says what is there."""


def _decoded(kind: type, value: Any) -> Any:
    return kind(value)


def run_next_sitecustomize() -> None:
    """Import the sitecustomize that would have been found without ours."""
    sys.path[:] = [each for each in sys.path if each != str(STARTUP)]
    ours = sys.modules.pop("sitecustomize")
    spec = importlib.util.find_spec("sitecustomize")
    sys.modules["sitecustomize"] = ours  # Python looks for it when its import is over
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
