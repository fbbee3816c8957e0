"""Processes that a recorded program spawns by multiprocessing: each records itself, as a rank."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process as processes
import multiprocessing.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.errors import TensorprobeError
from tensorprobe.record.launcher import when_imported

if TYPE_CHECKING:
    from tensorprobe.record.recorder import Recorder

# Helpers of libraries, not ranks of the program: workers of DataLoaders, of pools, managers.
_HELPERS = ("torch.utils.data", "torch._inductor", "multiprocessing", "concurrent.futures")
_RANKS = "torch.multiprocessing.spawn"


class Recipe(msgspec.Struct, frozen=True):
    """How a spawned process is to record: the arguments of its Recorder, and its seed if any."""

    path: Path
    step_on: Any
    arguments: dict[str, Any]
    seed: int | None = None
    deterministic: bool = False


class ChildProcesses:
    """While it is entered, processes that are spawned or come from a fork server record themselves.

    A process that is forked is not: torch's threads do not survive that.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.n_armed = 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Arm the processes that are started inside."""
        kind: Any = processes.BaseProcess
        start = kind.start

        @functools.wraps(start)
        def armed_start(process: Any) -> None:
            if _is_helper(process):
                start(process)
                return
            # It is unpickled with the process, in the child, where that begins to record.
            process._tensorprobe = _Arm(self._recipe)
            try:
                start(process)
                self.n_armed += 1
            finally:
                del process._tensorprobe

        kind.start = armed_start
        try:
            yield
        finally:
            kind.start = start


def _is_helper(process: Any) -> bool:
    module = getattr(getattr(process, "_target", None), "__module__", "") or ""
    return module.startswith(_HELPERS) and module != _RANKS


class _Arm:
    """Is nothing in the parent; where it is unpickled the process records."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _record_this_process, (self._recipe,)


class _ChildRecording:
    """The recording of a process of multiprocessing, which ends without `atexit`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._recorder: Recorder | None = None

    def begin(self) -> None:
        """Record from now on, until the process ends."""
        from tensorprobe.record.recorder import Recorder
        from tensorprobe.record.seeding import seed_all

        recipe = self._recipe
        if recipe.seed is not None:
            seed_all(recipe.seed, deterministic=recipe.deterministic)
        recorder = Recorder(recipe.path, step_on=recipe.step_on, **recipe.arguments)
        with contextlib.suppress(TensorprobeError):  # the recorder has said what is wrong
            self._recorder = recorder.start()

    def close_at_end(self, _: Any = None) -> None:
        """Have the recording closed when the process ends; what was asked for may be forgotten
        while the process is set up."""
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def close(self) -> None:
        """End the recording."""
        if self._recorder is not None:
            with contextlib.suppress(TensorprobeError):
                self._recorder.close()


def _record_this_process(recipe: Recipe) -> _Arm:
    recording = _ChildRecording(recipe)
    when_imported("torch", recording.begin)
    recording.close_at_end()
    multiprocessing.util.register_after_fork(recording, recording.close_at_end)
    return _Arm(recipe)
