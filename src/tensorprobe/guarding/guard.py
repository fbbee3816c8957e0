"""What the user holds: a Guard, which owns the watches and writes down what they find."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tensorprobe.devices import current_rank, world_size
from tensorprobe.errors import BadUsage, WriteFailed
from tensorprobe.follow.steps import StepOn
from tensorprobe.follow.tracebacks import clean_below
from tensorprobe.guarding.findings import FILE, Finding, describe, write_findings
from tensorprobe.guarding.guard_options import check_numbers, check_timeout, check_watches
from tensorprobe.keywords import keywords
from tensorprobe.native import background
from tensorprobe.notebooks import html_of
from tensorprobe.pages import write_page
from tensorprobe.record.recorder import Recorder, say
from tensorprobe.records import count
from tensorprobe.store.outputs import check_writable
from tensorprobe.store.refusals import Refusals

_WATCHES = {"overflow": "tensorprobe.overflow.watch", "errors": "tensorprobe.failures.watch"}


class Watch(Protocol):
    """One thing that a guard looks out for. `enter` and `leave` may come by several times."""

    def enter(self) -> None: ...
    def leave(self, error: BaseException | None) -> None: ...
    def step(self) -> None: ...


class Guard:
    """Watches the torch calls of a program for values that are not finite, and for errors.

        with tp.Guard("guard") as guard:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step()
        guard.findings

    `watch` holds "overflow" and "errors". The `overflow_nums`-th overflow of a rank ends the
    program by GuardStopped; -1 never does. `look_every` is how many calls go by between two looks
    at what a device found (None: each call on the host, each step elsewhere; 1 also saves the
    inputs of the call on every device). `keep_last` records as well, and keeps the last so many
    steps; the steps of a `recorder` of your own are kept from the first finding on. Steps end by
    themselves, as under `tensorprobe run`, until `step()` is called.

    For errors the inputs of recent calls are held, `inputs_budget` of them at most; `calls` and
    `steps` name the calls to hold instead, however large. A call that failed is run once more,
    alone, for `timeout` seconds at most; 0 does not run it.

    A folder that cannot be written to is said on stderr and is in `failed`; the program goes on,
    watched, and what is found is said.
    """

    @keywords(folder="path", alone_timeout_s="timeout")
    def __init__(
        self,
        path: str | os.PathLike[str] = "guard",
        watch: str | Iterable[str] = ("overflow",),
        *,
        overflow_nums: int = 1,
        look_every: int | None = None,
        keep_last: int | None = None,
        inputs_budget: int | str = "1G",
        calls: Sequence[str] = (),
        steps: Sequence[int] | None = None,
        timeout: float = 120.0,
        recorder: Recorder | None = None,
        step_on: StepOn = "auto",
        rerun: str | None = None,
        log: Callable[[str], None] = say,
    ) -> None:
        self.path = Path(path)
        self._refusals = Refusals(f"what the guard finds, in {self.path},", log)
        self._names = check_watches(watch)
        check_numbers(overflow_nums, look_every)
        if keep_last is not None and recorder is not None:
            raise BadUsage("keep_last and a recorder: give keep_last to the Recorder instead")
        self._log = log
        with self._refusals.told():
            check_writable(self.path)
        self._findings: list[Finding] = []
        self._notes: dict[str, Any] = {}
        self._place = self.path if world_size() == 1 else self.path / f"rank{current_rank()}"
        self._recorder = recorder
        self._own_recorder: Recorder | None = None
        if keep_last is not None:
            self._own_recorder = self._recorder = Recorder(
                self.path / "recording", step_on=step_on, log=log, level="L1", keep_last=keep_last
            )
        self._options: dict[str, Any] = {
            "overflow_nums": overflow_nums,
            "look_every": look_every,
            "step_on": step_on,
            "rerun": rerun,
            "log": log,
        }
        self._error_options: dict[str, Any] = {
            "inputs_budget": inputs_budget,
            "calls": calls,
            "steps": steps,
            "timeout_s": check_timeout(timeout),
            **{name: self._options[name] for name in ("step_on", "rerun", "log")},
        }
        self._watches: list[Watch] = []
        self._early_steps = 0  # before the first start, which makes the watches
        self._on = False
        self._closed = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found so far, in order."""
        return tuple(self._findings)

    @property
    def folder(self) -> Path:
        """The former name of `path`."""
        return self.path

    @property
    def failed(self) -> WriteFailed | None:
        """Why findings could not be written down; None while all is well."""
        return self._refusals.failed

    def start(self) -> Guard:
        """Watch from here on."""
        if self._closed:
            raise BadUsage("this guard was closed; make a new one to watch again")
        if self._on:
            return self
        if not self._watches:
            background.start(self._log)
            with self._refusals.told():
                _move_earlier(self._place)
            self._watches = [self._make(name) for name in self._names]
            for watch in self._watches * self._early_steps:
                watch.step()
        self._on = True
        if self._own_recorder is not None:
            self._own_recorder.start()
        for watch in self._watches:
            watch.enter()
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Watch no more until `start`."""
        if not self._on:
            return
        self._on = False
        for watch in reversed(self._watches):
            watch.leave(error)
        if self._own_recorder is not None:
            self._own_recorder.stop()

    def step(self) -> None:
        """One step of the program has ended; it counts as well while nothing is watched."""
        if not self._watches:
            self._early_steps += 1
        for watch in self._watches:
            watch.step()
        if self._own_recorder is not None:
            self._own_recorder.step()

    def close(self, error: BaseException | None = None) -> None:
        """Stop for good, and write findings.json with whatever was found, and its page."""
        if self._closed:
            return
        try:
            self.stop(error)
        finally:
            self._closed = True
            self._write()
            with self._refusals.told():
                write_page("guard", self._place)
            self._close_recorder()
        self._log(self._summary())

    def _repr_html_(self) -> str:
        return html_of(self)

    def __enter__(self) -> Guard:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean_below(error)
        self.close(error)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "watching" if self._on else "not watching"
        found = count(len(self._findings), "finding")
        return f"<Guard {self.path}: {state} {' and '.join(self._names)}, {found}>"

    # What the watches call

    def report(self, finding: Finding, *, tell: bool = True) -> None:
        """Write a finding down; one reported before, by the same call, takes its place.

        `tell` says it on the terminal too.
        """
        same = [n for n, known in enumerate(self._findings) if known.identity == finding.identity]
        if same:
            self._findings[same[0]] = finding
        else:
            self._findings.append(finding)
        if self._recorder is not None:
            self._recorder.keep_all_steps()
        self._write()
        if tell:
            self._log(describe(finding))

    def note(self, field: str, value: Any) -> None:
        """Set a further field of findings.json, such as its warnings."""
        self._notes[field] = value
        self._write()

    def _make(self, name: str) -> Watch:
        # Only what is asked for is imported: each watch brings modes and hooks of its own.
        module = importlib.import_module(_WATCHES[name])
        watch: Watch
        if name == "overflow":
            watch = module.OverflowWatch(self.path, self.report, self.note, **self._options)
        else:
            watch = module.ErrorWatch(self.path, self._place, self.report, **self._error_options)
        return watch

    def _write(self) -> None:
        with self._refusals.told():
            write_findings(self._place, self._findings, self._notes)

    def _close_recorder(self) -> None:
        if self._own_recorder is not None:
            self._own_recorder.close()

    def _summary(self) -> str:
        found = count(len(self._findings), "finding") if self._findings else "nothing found"
        skipped = self._notes.get("skipped_steps", [])
        if skipped:
            steps = ", ".join(str(step) for step in skipped[:8]) + (" ..." if skipped[8:] else "")
            noun = "step was" if len(skipped) == 1 else "steps were"
            found += f"; {len(skipped)} optimizer {noun} skipped by the GradScaler (step {steps})"
            forgiven = self._notes.get("forgiven", [])
            if forgiven:
                found += f", first for {forgiven[0].name}"
        if self.failed is not None:
            return f"guard: {found}. {self.failed}"
        return f"guard: {found}. All of it: {self._place / FILE}"


def _move_earlier(place: Path) -> None:
    """What an earlier run found must be neither mixed with ours nor lost."""
    old = [place / name for name in (FILE, "repro") if (place / name).exists()]
    if not old:
        return
    numbers = (place / "earlier" / str(number) for number in itertools.count(1))
    target = next(folder for folder in numbers if not (folder / FILE).exists())
    target.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.rename(target / path.name)
