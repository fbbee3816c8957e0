"""One phase of a training, such as evaluation: what watches it, and where its steps end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from tensorprobe.guarding.guard import Guard
    from tensorprobe.record.recorder import Recorder

PhaseName = Literal["train", "eval", "predict", "test"]


class Companion(Protocol):
    """Whatever watches a training beside the recording: a tp.Guard, say. `start` and `stop` come
    by many times; `__exit__` comes once, with the error that the training ended by."""

    def start(self) -> Any: ...
    def stop(self) -> Any: ...
    def step(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


class WatchedPhase:
    """Training, evaluation or prediction, with one recording and one guard however often it begins.

    Nothing is imported or made before `enter`. `rest` lets the calls pass that come between two
    steps, and `leave` those of other phases.
    """

    def __init__(
        self,
        path: Path,
        name: PhaseName,
        *,
        recording: Mapping[str, Any],
        guard: Sequence[str] = (),
        companions: Sequence[Companion] = (),
        log: Callable[[str], None] | None = None,
        writers: Sequence[str] = (),
    ) -> None:
        self.path = path / name
        self.name = name
        self.is_on = False
        self.n_steps = 0  # since `enter`
        self.number = 0  # of the step that the program is in
        self._findings = path / "guard" / name
        self._recording = recording
        self._watches = tuple(guard)
        self._companions = companions
        self._writers = tuple(writers)
        self._log: dict[str, Any] = {} if log is None else {"log": log}
        self._recorder: Recorder | None = None
        self._guard: Guard | None = None

    def enter(self, step: int | None = None, root: Any = None) -> None:
        """Watch from here on; `step` is its number, where the program knows it. Module paths begin
        at `root`."""
        first = not self.is_on
        if self._recorder is None:
            self._build(step or 0)
        assert self._recorder is not None
        while step is not None and self.number < step:
            self.step()
        self._recorder.start()
        if first:
            self.is_on, self.n_steps = True, 0
            if root is not None and self._recorder.is_built:
                self._recorder.name_root(root)
            for each in self._beside():
                each.start()

    def step(self) -> None:
        """One step has ended."""
        self.number += 1
        self.n_steps += 1
        if self._recorder is not None:
            self._recorder.step()
        for each in self._beside():
            each.step()

    def rest(self) -> None:
        """Record nothing until the next `enter`."""
        if self._recorder is not None:
            self._recorder.pause()

    def leave(self) -> None:
        """Another phase begins."""
        self.rest()
        if self.is_on:
            self.is_on = False
            for each in reversed(self._beside()):
                each.stop()

    def close(self, error: BaseException | None = None) -> None:
        """The training is over, or has failed with `error`; another one is recorded anew."""
        self.is_on = False
        ended = None if error is None else type(error), error, None
        closing = contextlib.ExitStack()  # each of them, also where another raises
        if self._writers and self._guard is not None:
            closing.callback(self._publish)  # last: when the guard has written all
        for each in (self._recorder, self._guard):
            if each is not None:
                closing.callback(each.__exit__, *ended)
        self._recorder = self._guard = None
        self.number = 0
        closing.close()

    def _publish(self) -> None:
        """Add what the guard has found to the runs that the program has open."""
        from tensorprobe.monitoring.publishing import publish

        for folder in (self._findings, *self._findings.glob("rank*")):
            if (folder / "findings.json").is_file():
                publish(folder, self._writers, name=f"guard-{self.name}")

    def _beside(self) -> list[Companion]:
        return [*self._companions, *([] if self._guard is None else [self._guard])]

    def _build(self, step: int) -> None:
        from tensorprobe.guarding.guard import Guard
        from tensorprobe.record.recorder import Recorder

        self.number = step
        recorder = Recorder(self.path, first_step=step, **self._log, **self._recording)
        self._recorder = recorder
        if self._watches:
            self._guard = Guard(
                self._findings,
                self._watches,
                overflow_nums=-1,
                recorder=recorder,
                step_on="explicit",
                **self._log,
            )
        for each in self._beside():
            for _ in range(step):
                each.step()
