"""Calls that failed: saved, reported as findings, and tried alone when the program is over."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.devices import failed_device
from tensorprobe.failures.alone import Alone, run_alone, without_numbers, write_repro
from tensorprobe.failures.call_text import describe_call
from tensorprobe.failures.followed_calls import COMPILED, WatchedCall
from tensorprobe.failures.origin import chain, words
from tensorprobe.failures.overwrites import Writes
from tensorprobe.failures.recent_inputs import DROPPED, ENDED, GONE, STEPPING, TOO_LARGE
from tensorprobe.failures.saved_inputs import SavedInputs, direction_name
from tensorprobe.follow.naming import split_direction
from tensorprobe.guarding.findings import Finding
from tensorprobe.records import HOST, Direction
from tensorprobe.store.frames import users_line

_MAX_FINDINGS = 20  # errors that a program catches may come by the thousand
_CURABLE = (GONE, DROPPED, ENDED, STEPPING, TOO_LARGE)  # by a second run
_MAX_ALONE = 3  # each takes a start of Python
_CUSTOM = (
    "it cannot be run alone: a custom autograd.Function is the program's own code. What it was "
    "given is saved"
)
_OPAQUE = "it cannot be run alone: it is a compiled region: the calls inside are not visible"


class _Failure(msgspec.Struct):
    """A finding, and what is needed to try its call alone."""

    finding: Finding
    call: str  # its name without direction
    device: str
    error: tuple[str, str]
    missing: list[str]
    alone: Alone | None = None


class Failures:
    """What the watch for errors found in one run."""

    def __init__(
        self,
        place: Path,
        inputs: SavedInputs,
        troubles: Mapping[str, str],
        writes: Writes,
        report: Callable[..., None],
        log: Callable[[str], None],
        rerun: str | None,
        timeout_s: float,
    ) -> None:
        self._place = place
        self._inputs = inputs
        self._troubles = troubles  # of calls that could not be noted
        self._writes = writes
        self._report = report
        self._log = log
        self._rerun = rerun
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._found: list[_Failure] = []
        self._seen: set[tuple[str, ...]] = set()
        self._count = 0  # of all that failed, the same ones too

    def add(self, call: WatchedCall, direction: Direction, error: Exception, node: str) -> None:
        """Save and report one failure; the same one, met again, is only counted."""
        with self._lock:  # several threads may fail
            self._add(call, direction, error, node)

    def _add(self, call: WatchedCall, direction: Direction, error: Exception, node: str) -> None:
        kind, text = words(error)
        key = (call.names.api.op, *call.frames[:1], direction, kind, without_numbers(text[:200]))
        self._count += 1
        if key in self._seen or len(self._found) >= _MAX_FINDINGS:
            return
        self._seen.add(key)
        missing = self._inputs.save(call, direction, f"{kind}: {text}"[:2000])
        metrics: dict[str, Any] = {"error": f"{kind}: {text}"[:2000], "call": describe_call(call)}
        optional = {"node": node, "missing": missing, "notes": self._notes(call, text)}
        metrics |= {name: value for name, value in optional.items() if value}
        finding = Finding(
            name=direction_name(call, direction),
            kind="error",
            direction=direction,
            step=call.step,
            rank=self._inputs.rank,
            module=call.names.module,
            op=call.names.api.op,
            stack=tuple(call.frames),
            reason=f"{kind}: {text.partition(chr(10))[0]}",
            metrics=metrics,
            inputs=str(self._inputs.folder) if call.given or call.incoming else None,
        )
        stem = split_direction(finding.name)[0]
        self._found.append(_Failure(finding, stem, call.device, (kind, text), missing))
        self._report(finding, tell=False)
        self._log(_first_words(finding))

    def conclude(self, error: BaseException | None) -> None:
        """The program is over, by `error`: try what failed alone, and say what to do next."""
        left_by = [words(each) for each in chain(error)] if error is not None else []
        fatal = [failure for failure in self._found if failure.error in left_by]
        others = [failure for failure in self._found if failure.error not in left_by]
        for number, failure in enumerate(fatal[::-1] + others):
            if failure.alone is None and number < _MAX_ALONE:
                self._try_alone(failure, is_caught=failure in others)
        more = self._count - len(self._found)
        if more:
            self._log(f"{more} more errors were of the same kind, or beyond {_MAX_FINDINGS}")

    def _try_alone(self, failure: _Failure, *, is_caught: bool) -> None:
        finding = failure.finding
        folder = self._place / "repro" / f"step{finding.step}" / failure.call
        if finding.name.startswith("Function."):
            written: Path | str = (
                _OPAQUE if COMPILED in finding.metrics.get("notes", ()) else _CUSTOM
            )
        else:
            written = write_repro(
                self._inputs.folder, failure.call, finding.step, finding.rank, folder
            )
        if failure.missing:
            alone = Alone("not possible", f"it cannot be run alone: {failure.missing[0]}")
        elif isinstance(written, str):
            alone = Alone("not possible", written.replace(f"{failure.call}.forward ", "it ", 1))
        else:
            alone = run_alone(written, failure.device, *failure.error, self._timeout_s)
        failure.alone = alone
        metrics = {**finding.metrics, "alone": alone.outcome, "alone_text": alone.text}
        if alone.command:
            metrics["alone_command"] = alone.command
        if is_caught:
            metrics["caught"] = "the program caught it and went on"
        repro = None if alone.folder is None else str(alone.folder)
        next_command = self._confirm(failure, alone) if alone.folder else self._second_run(failure)
        failure.finding = finding = msgspec.structs.replace(
            finding, metrics=metrics, repro=repro, next=next_command
        )
        self._report(finding, tell=False)
        self._log(_last_words(finding))

    def _confirm(self, failure: _Failure, alone: Alone) -> str:
        """How to see that this operator is all that is wrong: by running it on the host."""
        op = failure.finding.op
        if failure.device == HOST or alone.outcome == "no error":
            return ""
        if self._rerun is None:
            return f'with tp.reroute({{"{op}": "{HOST}"}}): ...'
        return f"tensorprobe run --no-record --reroute {op}={HOST} {self._rerun}"

    def _second_run(self, failure: _Failure) -> str:
        """How to get the inputs that are missing: by holding those of this one call."""
        if not any(text.endswith(_CURABLE) for text in failure.missing):
            return ""
        if self._rerun is None:
            step = failure.finding.step
            return f'tp.Guard(watch="errors", calls=["{failure.call}"], steps=[{step}])'
        name = shlex.quote(failure.call)
        return (
            f"tensorprobe run --guard errors --calls {name} --steps {failure.finding.step} "
            f"--keep tensors {self._rerun}"
        )

    def _notes(self, call: WatchedCall, text: str) -> list[str]:
        """What else a person should know: about the device, and where the call was made."""
        held = [given.content.held for given in call.given]
        notes = [*call.notes, *self._writes.tell(text, filter(None, held))]
        row = failed_device(text)
        if row is None:
            return notes
        if not row.is_launch_blocking():
            notes.append(
                f"errors of {row.type} surface late, so an earlier call may be the guilty one. "
                f"Run once more with {row.launch_blocking}=1"
            )
        trouble = self._troubles.get(call.names.name)
        if trouble is not None and failed_device(trouble) is not None:
            notes.append("the device had failed before this call began: an earlier one is guilty")
        log = row.find_log()
        if log == row.default_log and not Path(log or "").expanduser().is_dir():
            return notes  # a simulated device, or a driver that was told to write none
        if log is not None:
            out = shlex.quote(str(self._place / "incident"))
            notes.append(f"the log of the device is in {log} ({row.log_folder} says where)")
            notes.append(f"to read it: tensorprobe ascend incident --log {log} -o {out}")
        return notes


def _first_words(finding: Finding) -> str:
    """What failed, said while the program still runs."""
    what = f"{finding.name} failed (step {finding.step}, rank {finding.rank}): {finding.reason}"
    where = users_line(finding.stack) or "an unknown line"
    lines = [what, finding.metrics["call"]]
    lines.append(f"called at {where}" + (f", in module {finding.module}" if finding.module else ""))
    if "node" in finding.metrics:
        lines.append(f"backward was in {finding.metrics['node']}")
    lines += finding.metrics.get("notes", [])
    if finding.inputs is not None:
        lines.append(f"its inputs: tensorprobe show {shlex.quote(finding.inputs)} {finding.name}")
    return "\n  ".join(lines)


def _last_words(finding: Finding) -> str:
    """What the call did alone, said when the program is over."""
    lines = [f"{finding.name}: {finding.metrics['alone_text']}"]
    if "alone_command" in finding.metrics:
        lines.append(f"to see it: {finding.metrics['alone_command']}")
    if finding.next:
        lines.append(f"next: {finding.next}")
    return "\n  ".join(lines)
