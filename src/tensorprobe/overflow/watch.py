"""The overflow watch: which call first makes a value that is not finite, forward or backward."""

from __future__ import annotations

import os
import shlex
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tensorprobe.devices import current_rank
from tensorprobe.errors import GuardStopped
from tensorprobe.follow.follower import Follower
from tensorprobe.follow.steps import StepOn
from tensorprobe.garbage import rare_searches
from tensorprobe.guarding.findings import Finding
from tensorprobe.overflow.cases import Case
from tensorprobe.overflow.every_call import OverflowObserver
from tensorprobe.overflow.guard_state import GuardState
from tensorprobe.overflow.module_place import ModuleTrails
from tensorprobe.overflow.saved_calls import make_tape, write_repro
from tensorprobe.record.tape import Tape
from tensorprobe.trouble import OnTrouble

PATIENCE = 500  # calls that may go by after the last overflow to stop at, to see where it goes
SAVED = 20  # findings whose tensors are written
LISTED = 1000  # findings that are listed
UNSCALED = 1.0  # a GradScaler at this scale, or below, makes no gradient any larger


class Report(Protocol):
    """Called with each finding; with `tell` it is printed too."""

    def __call__(self, finding: Finding, *, tell: bool = True) -> None: ...


class OverflowWatch:
    """Owns the mode and the hooks that look at every call, and decides when to stop.

    A finding of forward is certain at once. One of backward waits until the optimizer steps, or
    the step ends: a GradScaler that finds the infinity itself skips the step, and all is well,
    unless its scale is so low that it cannot have made it.
    The program is stopped before backward begins, before the optimizer steps, or when the step
    ends, whichever comes first, so that it shows where the value went; on the host, where each call
    is looked at as it ends, no parameter is spoiled.
    """

    def __init__(
        self,
        folder: Path,
        report: Report,
        note: Callable[[str, Any], None],
        *,
        overflow_nums: int = 1,
        look_every: int | None = None,
        step_on: StepOn = "auto",
        rerun: str | None = None,
        log: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._capture = folder / "capture"
        self._report, self._note, self._log = report, note, log
        self._overflow_nums = overflow_nums
        self._look_every = look_every
        self._rerun = rerun
        self._step_on = step_on
        self._step = 0
        self._count = 0
        self._cases: list[Case] = []  # certain, of this step
        self._pending: list[Case] = []  # until it is known whether a scaler skips the step
        self._scaler_round = False  # gradients were unscaled, the scale was not updated yet
        self._round_step = 0
        self._skipped: list[int] = []
        self._forgiven: list[Finding] = []
        self._warnings: list[dict[str, Any]] = []
        self._gaps: list[dict[str, str]] = []
        self._patience = PATIENCE
        self._news: list[Case] = []  # certain, and not reported yet
        self.attention = False  # whether `call_made` is to be called after each call
        self._rank = 0
        self._tape: Tape | None = None
        self._on = False

    # What the guard calls

    def enter(self) -> None:
        """Put the mode and the hooks in place."""
        if self._tape is None:
            self._build()
        self._on = True
        self._begin_step()
        rare_searches.begin()
        self._follower.install()
        self._observer.state.begin_watch()
        self._observer.state.on = True

    def leave(self, error: BaseException | None) -> None:
        """Remove the mode and the hooks, and decide what backward left open."""
        if not self._on or self._tape is None:
            return
        self._on = False
        self._observer.state.on = False
        self._follower.remove()
        rare_searches.end()
        try:
            self._observer.state.look()
            self._observer.state.cases.release_living()
            self._settle(certain=True)
            self._observer.optimizers.look_at_parameters()
            self._report_news()
            if error is None:
                self._stop_if_due()
        finally:
            self._tell_cases()
            self._tape.end_step()
            self._tape.writer.close()

    def step(self) -> None:
        """One step of the program has ended, as the program itself says."""
        if self._tape is None:
            self._build()
        self._follower.step()

    def _build(self) -> None:
        self._rank = current_rank()
        tape = self._tape = make_tape(self._capture, self._log)
        self._observer = OverflowObserver(tape, self, self._look_every)
        place = self._observer.state.program.place
        self._follower = Follower(self._observer, place, step_on=self._step_on)
        self._observer.shorten(self._follower.mode)
        ModuleTrails(self._follower.modules)
        _stop_in_children(self._observer.state)

    # What is found

    @property
    def is_full(self) -> bool:
        """Whether as many overflows were found as were asked for."""
        found = self._count + len(self._pending)
        return found >= LISTED or 0 < self._overflow_nums <= found

    def add(self, case: Case) -> None:
        """Take a new case: certain ones are reported, those of backward wait."""
        if case.pending:
            self._pending.append(case)
        else:
            self._confirm(case)

    def _confirm(self, case: Case) -> None:
        self._count += 1
        self._cases.append(case)
        if case.write is not None and self._count <= SAVED:
            case.saved = case.write()
        case.write = None
        self._news.append(case)
        self.attention = True

    def _report_news(self) -> None:
        """Report what is certain.

        This is not done where it is found: a report may end the program, and code that looks at
        a call must not raise.
        """
        news, self._news = self._news, []
        for case in news:
            self._report(self._finding(case), tell=False)

    def _finding(self, case: Case, **more: Any) -> Finding:
        """The case as a finding, with the folder of its saved inputs."""
        if case.saved and self._tape is not None:
            self._tape.writer.drain()
            more["inputs"] = str(self._capture)
        return case.finding(self._rank, **more)

    def warn(self, name: str, step: int, text: str) -> None:
        """Note and print that something will overflow soon."""
        self._warnings.append({"name": name, "step": step, "reason": text})
        self._note("warnings", self._warnings)
        self._log(f"{name} (step {step}): {text}")

    def trouble(self, name: str, error: BaseException) -> None:
        """Note a gap: a call that could not be looked at."""
        if len(self._gaps) < SAVED:
            self._gaps.append({"name": name, "reason": f"{type(error).__name__}: {error}"[:300]})
            self._note("gaps", self._gaps)

    def call_made(self) -> None:
        """Called after a call of the program while there is something to report."""
        self._report_news()
        if not self.is_due:
            self.attention = False
            return
        self._patience -= 1
        if self._patience <= 0:
            self._patience = PATIENCE
            self._stop_if_due()

    @property
    def is_due(self) -> bool:
        """Whether the program is to be stopped."""
        return 0 < self._overflow_nums <= self._count

    # GradScaler

    def unscaled(self) -> None:
        """A GradScaler has looked for infinity in the gradients."""
        if not self._scaler_round:
            self._round_step = self._step  # a fused optimizer ends the step before the update
        self._scaler_round = True

    def scale_updated(self, skipped_at: float | None) -> None:
        """A GradScaler has ended its round; `skipped_at` is its scale if it skipped the step."""
        self._observer.state.look()
        self._scaler_round = False
        if skipped_at is not None:
            self._settle(certain=skipped_at <= UNSCALED)
            self._observer.state.cases.forgive(self._pending)
            self._note_forgiven()
            self._pending.clear()
            self._skipped.append(self._round_step)
            self._note("skipped_steps", self._skipped)

    def _note_forgiven(self) -> None:
        """Name the calls whose values the scaler has dealt with, which are no findings."""
        room = LISTED - len(self._forgiven)
        self._forgiven += [case.finding(self._rank) for case in self._pending[:room]]
        self._note("forgiven", self._forgiven)

    # Backward, optimizers, steps

    def backward_begins(self, roots: Any) -> None:
        """Backward starts from these tensors."""
        self._follower.optimizers.forget_raised(sys._getframe())
        with OnTrouble(self.trouble, "loss"):
            self._observer.backward.look_at_roots(roots)
        self._stop_if_due()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to write to the parameters."""
        self._stop_if_due()
        if not self._scaler_round and getattr(optimizer, "found_inf", None) is None:
            self._settle(certain=True)
            self._stop_if_due()

    def _settle(self, *, certain: bool) -> None:
        """Decide what backward left open."""
        if certain:
            pending, self._pending = self._pending, []
            for case in pending:
                self._confirm(case)

    def advance(self) -> None:
        """A step has ended."""
        if not self._on:
            self._step += 1  # the rest when it is entered again
            return
        self._observer.state.look()
        self._observer.state.cases.release_living()
        self._settle(certain=not self._scaler_round)
        try:
            self._stop_if_due()
        finally:
            self._tell_cases()
            self._step += 1
            self._begin_step()

    def _begin_step(self) -> None:
        """Tell the parts which step it is; after a pause it may be the same one."""
        assert self._tape is not None
        self._tape.begin_step(self._step, True)
        if self._observer.state.step != self._step:
            self._patience = PATIENCE
            self._cases.clear()
            self._observer.state.begin_step(self._step)

    # Telling and stopping

    def _stop_if_due(self) -> None:
        self._report_news()
        if not self.is_due:
            return
        last = self._cases[-1] if self._cases else None
        self._tell_cases()
        which = f": {last.name} in step {last.call.step}" if last is not None else ""
        times = "once" if self._count == 1 else f"{self._count} times"
        raise GuardStopped(
            f"stopped by the guard, values overflowed {times}{which}. "
            f"What was found is in {self._folder}; to go on: `overflow_nums=-1`"
        )

    def _tell_cases(self) -> None:
        for case in self._cases:
            if not case.told:
                case.told = True
                self._report(self._final(case))

    def _final(self, case: Case) -> Finding:
        """The finding with its repro, or the command that records what is missing."""
        assert self._tape is not None
        capture = shlex.quote(str(self._capture))
        if case.saved:
            self._tape.writer.drain()  # the repro is made from the files
            step, folder = case.call.step, self._folder / "repro" / f"{case.name}.step"
            folder = folder.with_name(f"{folder.name}{step}")
            made = write_repro(self._capture, case.name, step, self._rank, folder)
            return self._finding(
                case,
                repro=None if made is None else str(folder),
                next=f"tensorprobe show {capture} {case.name}",
            )
        return case.finding(self._rank, next=self._record_command(case))

    def _record_command(self, case: Case) -> str:
        """The command that records this call, whose inputs are gone."""
        names = case.name
        if case.direction == "backward":
            names = f"{case.call.name()},{names}"
        folder = shlex.quote(str(self._folder / "again"))
        rest = self._rerun if self._rerun is not None else shlex.join(sys.argv)
        step = case.call.step
        return (
            f"tensorprobe run --calls {names} --steps {step} --keep tensors "
            f"--stop-after-last-step -o {folder} {rest}"
        )


def _stop_in_children(state: GuardState) -> None:
    """A forked child (a DataLoader worker) has our mode: in it nothing is looked at."""
    reference = weakref.ref(state)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive.on = False

    os.register_at_fork(after_in_child=in_child)
