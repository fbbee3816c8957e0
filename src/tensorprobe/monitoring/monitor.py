"""What the user holds: a Monitor, which watches a training and writes its trends down."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.config import Names, Numbers, Size, parse_numbers
from tensorprobe.devices import current_rank, world_size
from tensorprobe.errors import BadUsage, WriteFailed
from tensorprobe.follow.follower import Follower
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.steps import StepOn
from tensorprobe.follow.tracebacks import clean_below
from tensorprobe.keywords import unknown_name
from tensorprobe.monitoring.alarm_rules import WINDOW, Judge
from tensorprobe.monitoring.alarms import Alarm, line_of
from tensorprobe.monitoring.measuring import MonitorObserver
from tensorprobe.monitoring.monitor_file import (
    ALARMS,
    FACTS,
    append_alarm,
    read_attempts,
    write_facts,
)
from tensorprobe.monitoring.monitor_options import MAX_DISK, check_options, check_rules
from tensorprobe.monitoring.pending_steps import PendingStep, PendingSteps
from tensorprobe.monitoring.replica_watch import ReplicaWatch
from tensorprobe.monitoring.responses import check_response
from tensorprobe.monitoring.rule_names import REPLICAS, RULE_NAMES
from tensorprobe.monitoring.scalar_writers import EVERY, ScalarWriter, make_writers, scalars_of
from tensorprobe.monitoring.series import StepValues
from tensorprobe.monitoring.series_files import SeriesFiles, last_steps, move_aside, segments
from tensorprobe.record.facts import mask_arguments
from tensorprobe.record.recorder import say
from tensorprobe.records import count
from tensorprobe.store.outputs import check_writable
from tensorprobe.store.refusals import Refusals
from tensorprobe.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from torch import nn

MOST_ALARMS = 1000  # that are listed
MOST_TOLD = 20  # lines on the terminal for one rule


class Monitor:
    """Watches a training: statistics of every step, alarms, and files to look at later.

        with tp.Monitor("runs/a/monitor") as monitor:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step()
                monitor.step()
        monitor.alarms

    Gradients, moments and updates are measured every step, parameters every 5th, activations every
    10th; `every` says otherwise ("activations=50,moments=10"; 0: never). `modules` are patterns of
    names ("*.attn*"), `rules` "all" or names of rules ("all,-drift"), or a mapping of names and
    settings. `max_disk` bounds the files: older steps are thinned out. `resume` goes on with the
    files of an earlier run instead of moving them aside. `first_step` is that of the first one, and
    only those of `steps` are measured. `writers` are tensorboard, wandb, mlflow.
    `on_alarm` is "record" or "guard": what is done with the steps after an alarm.

    Steps end by themselves, as under `tensorprobe run`, until `step()` is called. What goes wrong
    with the monitor is said on stderr, and the training goes on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "monitor",
        *,
        every: int | str | Mapping[str, int] = "",
        rules: str | Iterable[str] | Mapping[str, Mapping[str, Any]] = "all",
        modules: Names = (),
        ranks: Numbers | None = None,
        max_disk: Size = MAX_DISK,
        format: str = "jsonl",
        writers: Names = (),
        on_alarm: str | None = None,
        recording: Mapping[str, Any] | None = None,
        resume: bool = False,
        first_step: int | None = None,
        steps: Numbers | None = None,
        step_on: StepOn = "auto",
        program: Sequence[str] | None = None,
        log: Callable[[str], None] = say,
    ) -> None:
        self.path = Path(path)
        self._options = check_options(
            every=every or {}, modules=modules, ranks=ranks, max_disk=max_disk, format=format,
            writers=writers,
        )  # fmt: skip
        settings = dict(rules) if isinstance(rules, Mapping) else {}
        self._rules = check_rules("all" if settings else rules, RULE_NAMES)
        for name in settings:
            if name not in RULE_NAMES:
                raise unknown_name("rule", name, RULE_NAMES)
        self._settings = settings
        try:
            self._judge = Judge(self._rules, settings)
        except TypeError as error:
            raise BadUsage(f"rules={settings}: {error}") from None
        self._response = check_response(on_alarm, recording, self.path, log)
        self._log = log
        self._refusals = Refusals(f"the monitor in {self.path}", log)
        with self._refusals.told():
            check_writable(self.path)
        self._resume = resume
        self._first_step = first_step
        self._step_on = step_on
        self._program = program
        self._alarms: list[Alarm] = []
        self._n_alarms = 0
        self._told: dict[str, int] = {}
        self._gaps: dict[str, str] = {}
        self._files: SeriesFiles | None = None
        self._folder: Path | None = None
        self._writers: dict[str, ScalarWriter] = {}
        self._replicas: ReplicaWatch | None = None
        self._alarm_steps: set[int] = set()
        self._n_steps = 0
        self._last_step: int | None = None
        self._follower: Follower | None = None
        self._pid = os.getpid()
        self._on = self._closed = False
        self._pending = PendingSteps(Summarizer(), self._complete)
        self._observer = MonitorObserver(
            self._options.every,
            self._pending,
            modules=self._options.modules,
            steps=_chosen(steps),
            gap=self._gap,
            on_root=self._response.root_called,
            on_step=self._response.step_ended,
        )

    # What the user calls

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What was found so far, in order; the first thousand."""
        return tuple(self._alarms)

    @property
    def failed(self) -> WriteFailed | None:
        """Why nothing more could be written down; None while all is well."""
        return self._refusals.failed

    @property
    def current_step(self) -> int:
        """The number of the step that the program is in."""
        return self._observer.step

    def start(self) -> Monitor:
        """Watch from here on."""
        if self._closed:
            raise BadUsage("this monitor was closed; make a new one to watch again")
        if self._on:
            return self
        if self._follower is None:
            self._build()
        assert self._follower is not None
        self._on = True
        self._observer.is_watching = self._wants_rank()
        if self._observer.is_watching:
            self._follower.install()
        return self

    def stop(self) -> None:
        """Watch no more until `start`; the step under way is left out."""
        if not self._on:
            return
        self._on = False
        assert self._follower is not None
        with Quiet():
            self._observer.finish()
        if self._observer.is_watching:
            self._observer.is_watching = False
            self._follower.remove()
            self._observer.remove_hooks()
        with self._refusals.told(), Quiet():
            self._pending.wait()

    def step(self) -> None:
        """One step of the program has ended; it counts as well while nothing is watched."""
        if self._follower is None:
            self._build()
        assert self._follower is not None
        self._follower.step()
        self._observer.finish()  # one that the optimizer had ended stayed open

    def name_root(self, module: nn.Module, name: str = "") -> None:
        """Let the names of modules begin at this one, whichever module the program calls."""
        if self._follower is None:
            raise BadUsage("name_root comes after start()")
        self._follower.modules.paths.name_root(module, name)

    def log(self, **numbers: Any) -> None:
        """Numbers of the program in this step, as `loss=loss`; also tensors of one element."""
        for name, value in numbers.items():
            self._observer.log(name, value)

    def close(self) -> None:
        """Stop for good; all that was measured is in the files."""
        if self._closed:
            return
        try:
            self.stop()
        finally:
            self._closed = True
            atexit.unregister(self.close)
            self._response.close()
            for part in (self._files, self._replicas, *self._writers.values()):
                if part is not None:
                    with self._refusals.told():
                        part.close()
        if os.getpid() == self._pid and self._wants_rank():
            self._log(self._summary())

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean_below(error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "watching" if self._on else "not watching"
        return f"<Monitor {self.path}: {state}, step {self.current_step}, {self._counted()}>"

    # Building

    def _build(self) -> None:
        if self._first_step is not None:
            self._observer.begin_at(self._first_step)
        elif self._resume:
            with self._refusals.told():
                last = last_steps(self._rank_folder(), 1)
                if last:
                    self._observer.begin_at(last[-1].step + 1)
        observer = self._observer
        follower = Follower(observer, observer.place, step_on=self._step_on, sees_calls=False)
        observer.paths = follower.modules.paths
        observer.scalers = follower.scalers
        observer.is_explicit = lambda: not follower.steps.automatic
        self._follower = follower
        atexit.register(self.close)
        _stop_in_children(self)

    def _wants_rank(self) -> bool:
        return self._options.ranks is None or current_rank() in self._options.ranks

    def _rank_folder(self) -> Path:
        return self.path / f"rank{current_rank()}"

    def _open(self, step: int) -> None:
        """The files, made when the first step is complete: the rank is known by then."""
        self._folder = self._rank_folder()
        rank = current_rank()
        self._judge = Judge(self._rules, self._settings, rank, self._gap)
        attempts: list[dict[str, Any]] = []
        if self._resume:
            attempts = read_attempts(self._folder)
            for known in last_steps(self._folder, WINDOW):
                if known.step < step:
                    self._judge.judge(known, PendingStep(known.step, known.time))
        else:
            moved = move_aside(self._folder, (FACTS, ALARMS))
            if moved is not None:
                self._log(
                    f"monitor: what an earlier run wrote is in {moved}; resume goes on with it"
                )
        found = segments(self._folder)
        attempts.append(
            {
                "first_segment": found[-1].number + 1 if found else 0,
                "first_step": step,
                "time": time.time(),
                "program": mask_arguments(sys.argv if self._program is None else self._program),
                "tensorprobe": __version__,
            }
        )
        self._files = SeriesFiles(
            self._folder,
            max_disk=self._options.max_disk,
            format=self._options.format,
            header={"rank": rank},
            keep=self._alarm_steps,
            boundaries={each["first_segment"] for each in attempts},
        )
        write_facts(
            self._folder,
            {
                "rank": rank,
                "world_size": world_size(),
                "every": self._options.every,
                "rules": list(self._rules),
                "attempts": attempts,
            },
        )
        if rank and REPLICAS in self._rules and world_size() > 1:
            self._replicas = ReplicaWatch(self.path / "rank0")
        self._writers = make_writers(self._options.writers, self._folder)

    # Steps

    def _complete(self, facts: PendingStep, step: StepValues) -> None:
        """All numbers of a step have arrived."""
        if os.getpid() != self._pid:
            return
        if self._folder is None:
            with self._refusals.told():
                self._open(step.step)
        self._n_steps += 1
        self._last_step = step.step
        alarms = self._judge.judge(step, facts)
        if self._replicas is not None:
            for at, found in self._replicas.look(step):
                alarm = self._judge.alarm(REPLICAS, found, at)
                if alarm is not None:
                    alarms.append(alarm)
        for alarm in alarms:
            self._raise_alarm(alarm)
        if self._files is not None and self._refusals.failed is None:
            with self._refusals.told():
                self._files.write(step)
        self._send(step)

    def _raise_alarm(self, alarm: Alarm) -> None:
        answer = self._response.alarm(alarm, self._observer.step)
        if answer is not None:
            alarm = msgspec.structs.replace(alarm, recording=str(answer))
        self._n_alarms += 1
        if len(self._alarms) < MOST_ALARMS:
            self._alarms.append(alarm)
            self._alarm_steps.update(range(alarm.since - 1, alarm.step + 2))
        if self._folder is not None and self._n_alarms <= 10 * MOST_ALARMS:
            with self._refusals.told():
                append_alarm(self._folder, alarm)
        told = self._told[alarm.rule] = self._told.get(alarm.rule, 0) + 1
        if told <= MOST_TOLD:
            last = told == MOST_TOLD
            more = f". Further ones of this rule are in {self._folder}" if last else ""
            self._log(line_of(alarm, several=world_size() > 1) + more)

    def _send(self, step: StepValues) -> None:
        if not self._writers:
            return
        scalars = scalars_of(step, whole=step.step % EVERY == 0)
        for name, writer in [*self._writers.items()]:
            try:
                writer.write(step.step, scalars, step.time)
            except Exception as error:  # noqa: BLE001 another tool's: told, and left out
                del self._writers[name]
                kind = type(error).__name__
                self._log(f"monitor: nothing more goes to {name}: {kind}: {error}"[:300])

    def _gap(self, name: str, reason: BaseException | str) -> None:
        """Something could not be measured; told once."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        if name not in self._gaps and len(self._gaps) < 100:
            self._gaps[name] = text
            self._log(f"monitor: {name} could not be measured: {text}"[:300])

    def _counted(self) -> str:
        return count(self._n_alarms, "alarm") if self._n_alarms else "no alarms"

    def _summary(self) -> str:
        if not self._n_steps:
            why = str(self.failed) if self.failed is not None else "no step of a training was seen"
            return f"monitor: nothing was measured: {why}"
        rest = f". {self.failed}" if self.failed is not None else ""
        gaps = f", {count(len(self._gaps), 'gap')}" if self._gaps else ""
        steps = count(self._n_steps, "step")
        return (
            f"monitor: {steps}, {self._counted()}{gaps}{rest}. "
            f"Next: tensorprobe monitor show {self.path}"
        )


def _chosen(steps: Numbers | None) -> Container[int] | None:
    if isinstance(steps, range):  # which may be as long as a training
        return steps
    numbers = parse_numbers("steps", steps)
    return None if numbers is None else frozenset(numbers)


def _stop_in_children(monitor: Monitor) -> None:
    """A forked child (a DataLoader worker) has our hooks, but nothing of its work is measured."""
    reference = weakref.ref(monitor)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive._observer.is_watching = False
            alive._closed = True

    os.register_at_fork(after_in_child=in_child)
