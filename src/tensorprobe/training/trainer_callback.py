"""What the user gives to a Trainer: a callback that records, by the trainer's own steps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from tensorprobe.config import Names, Numbers, RecordConfig, parse_choice
from tensorprobe.errors import BadUsage, GuardStopped, TensorprobeError
from tensorprobe.guarding.guard_options import check_watches
from tensorprobe.monitoring.monitor_options import check_writers
from tensorprobe.terminal import warn
from tensorprobe.training.watched_phase import Companion, PhaseName, WatchedPhase
from tensorprobe.trouble import OnTrouble, text_of

_PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


def _event(method: Callable[..., None]) -> Callable[..., None]:
    """What a framework calls. Whatever goes wrong in it is said, and never ends the training."""

    @functools.wraps(method)
    def shielded(probe: TensorProbeCallback, /, *args: Any, **kwargs: Any) -> None:
        if probe.is_active:
            with OnTrouble(probe.give_up):
                method(probe, *args, **kwargs)

    return shielded


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An event that tells us nothing."""


class TensorProbeCallback:
    """Records what a trainer does, by its own steps: a callback of Hugging Face's Trainer and of
    Lightning's.

        trainer = Trainer(model, args, callbacks=[tp.TensorProbeCallback("runs/a")])
        trainer.train()                      # runs/a/train has steps 0 and 1

    Training, evaluation and prediction are recorded apart, each into a folder named after it
    (`phases` says which of "train", "eval", "predict", "test"). A step is one of the trainer, with
    all batches that it accumulates; in the other phases it is a batch. `guard` is "overflow",
    "errors" or both: what is found is in PATH/guard. What else has `start`, `stop`, `step` and
    `__exit__`, such as a tp.Guard with options of its own, watches training as one of `also`. With
    `writers` the findings go to tp.publish: wandb, mlflow, tensorboard.
    All other arguments are those of tp.Recorder. With None for a path nothing is done.

    Trouble of ours is said, is in `failed`, and does not end a training, unless `strict=True`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        steps: Numbers | None = "0-1",
        phases: Names = ("train", "eval", "predict", "test"),
        guard: str | Iterable[str] | None = None,
        also: Iterable[Companion] = (),
        writers: Names = (),
        log: Callable[[str], None] | None = None,
        **recording: Any,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.failed: Exception | None = None
        self._log = log
        self._is_strict = RecordConfig.make(steps=steps, **recording).strict
        self._also = tuple(also)
        wanted = _phases(phases)
        watches = () if guard is None else check_watches(guard)
        known = check_writers(writers)
        self._phases: dict[str, WatchedPhase] = {}
        if self.path is not None:
            self._phases = {
                name: WatchedPhase(
                    self.path,
                    name,
                    recording={"steps": steps, **recording},
                    guard=watches,
                    companions=self._also if name == "train" else (),
                    log=log,
                    writers=known,
                )
                for name in wanted
            }
        self._told: set[str] = set()
        self._trains = False  # as far as Hugging Face's Trainer tells
        self._close_at_exit: Callable[[], None] | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is watched, or will be."""
        return self.failed is None and bool(self._phases)

    def give_up(self, error: Exception) -> None:
        """Say what went wrong and leave the training alone; what was asked to end it does."""
        if isinstance(error, GuardStopped):
            raise error
        if self._is_strict and isinstance(error, TensorprobeError):
            raise error
        self.failed = error
        kind = "" if isinstance(error, TensorprobeError) else f"{type(error).__name__}: "
        self._say(f"{kind}{text_of(error)}. The training goes on, and is not recorded any more")
        with OnTrouble(lambda problem: None):  # one is told, what follows from it is not
            self._close(error)

    @contextlib.contextmanager
    def phase(self, name: PhaseName) -> Iterator[WatchedPhase | None]:
        """Inside, the program is in that phase: for a loop of one's own, and for an evaluation that
        a Trainer does outside of training, of whose beginning it tells nobody.

            with probe.phase("predict"):
                trainer.predict(dataset)

        A loop of one's own ends its steps by `probe.step()`.
        """
        parse_choice(_PHASES)("phase", name)
        with OnTrouble(self.give_up):
            self._enter(name)
        try:
            yield self._phases.get(name)
        finally:
            with OnTrouble(self.give_up):
                self._leave(name)

    @_event
    def step(self) -> None:
        """One step has ended, as a loop of one's own says."""
        for phase in self._on():
            phase.step()

    @_event
    def close(self, error: BaseException | None = None) -> None:
        """Close all recordings and guards; the end of the program does so too."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._close_at_exit is not None:
            atexit.unregister(self._close_at_exit)
            self._close_at_exit = None
        with contextlib.ExitStack() as closing:
            for each in self._also:
                closing.callback(each.__exit__, None if error is None else type(error), error, None)
            for phase in self._phases.values():
                closing.callback(phase.close, error)

    def __enter__(self) -> TensorProbeCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)

    def __repr__(self) -> str:
        on = ", ".join(phase.name for phase in self._on())
        state = "failed" if self.failed else f"in {on}" if on else "off" if not self._phases else ""
        return f"<TensorProbeCallback {self.path}{state and ': ' + state}>"

    def __getattr__(self, name: str) -> Any:
        # Frameworks have more events with every release; those that are not here say nothing.
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")

    # Events of both

    @_event
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trains = False
        if (train := self._phases.get("train")) is not None:
            train.leave()
            train.close()

    # Events of Hugging Face's Trainer: (args, state, control, ...)

    @_event
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trains = True
        self._end("train")  # of an attempt that failed, such as one with too large a batch
        if getattr(args, "eval_on_start", False):
            self._enter("eval")

    @_event
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._enter("train", state.global_step)

    @_event
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step_and_rest("train")
        self._expect_evaluation(control)

    @_event
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._expect_evaluation(control)

    @_event
    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate:
            self._enter("eval")

    @_event
    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        phases = [phase for phase in self._on() if phase.name != "train"]
        wanted = {"eval"} if self._trains else {"eval", "predict"}
        if not phases and wanted & self._phases.keys():
            self._tell_once(
                "not recorded: the Trainer tells nobody when an evaluation or a prediction outside "
                'of training begins. Write: with callback.phase("eval"): trainer.evaluate()'
            )
        for phase in phases:
            phase.step()
            if phase.n_steps == _length(eval_dataloader):
                phase.rest()  # metrics are no step

    @_event
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._leave("eval")

    # Events of Lightning's Trainer: (trainer, module, ...)

    @_event
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._end("train")

    @_event
    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._enter("train", trainer.global_step, module)

    @_event
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        train = self._phases.get("train")
        if train is not None and trainer.global_step > train.number:
            train.step()
        self._rest("train")

    @_event
    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._enter("eval", root=module)

    @_event
    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._step_and_rest("eval")

    @_event
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._leave("eval")

    @_event
    def on_predict_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._enter("predict", root=module)

    @_event
    def on_predict_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._step_and_rest("predict")

    @_event
    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._leave("predict")

    @_event
    def on_test_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._enter("test", root=module)

    @_event
    def on_test_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self._step_and_rest("test")

    @_event
    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._leave("test")

    @_event
    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.close(error)

    # What Lightning asks of every callback

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    _legacy_state_key = state_key

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Nothing is to be set up."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Recordings of evaluations stay open for the next one."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint has nothing of ours."""

    # Phases

    def _on(self) -> list[WatchedPhase]:
        return [phase for phase in self._phases.values() if phase.is_on]

    def _enter(self, name: PhaseName, step: int | None = None, root: Any = None) -> None:
        """Leave other phases; the calls that follow are of this one, if it is wanted."""
        if not self.is_active:
            return
        for other in self._on():
            if other.name != name:
                other.leave()
        if (phase := self._phases.get(name)) is not None:
            if self._close_at_exit is None:
                self._close_at_exit = _closing(self)
                atexit.register(self._close_at_exit)
            phase.enter(step, root)

    def _leave(self, name: PhaseName) -> None:
        if (phase := self._phases.get(name)) is not None and self.is_active:
            phase.leave()

    def _rest(self, name: PhaseName) -> None:
        if (phase := self._phases.get(name)) is not None and phase.is_on:
            phase.rest()

    def _step_and_rest(self, name: PhaseName) -> None:
        if (phase := self._phases.get(name)) is not None and phase.is_on:
            phase.step()
            phase.rest()

    def _end(self, name: PhaseName) -> None:
        if (phase := self._phases.get(name)) is not None:
            phase.leave()
            phase.close()

    def _expect_evaluation(self, control: Any) -> None:
        """It comes next, but after the log, which has calls of its own."""
        if control.should_evaluate and not control.should_log:
            self._enter("eval")

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log(text)
        elif sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                warn(f"tensorprobe: {text}")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)


def _phases(names: Names) -> tuple[PhaseName, ...]:
    given = names.split(",") if isinstance(names, str) else list(names)
    if not given:
        raise BadUsage(f"phases={names!r}: expected some of {', '.join(_PHASES)}")
    return tuple(parse_choice(_PHASES)("phases", each) for each in given)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable without an end that is known
        return None


def _closing(probe: TensorProbeCallback) -> Callable[[], None]:
    reference = weakref.ref(probe)

    def close() -> None:
        alive = reference()
        if alive is not None:
            with OnTrouble(lambda error: warn(f"tensorprobe: {text_of(error)}")):
                alive.close()  # at the end of a program there is nobody to catch an error

    return close
