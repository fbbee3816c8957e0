"""The smallest set of ops which, run elsewhere, cures a program: a probe is a run of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

import tensorprobe
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.follow.naming import aliases, api_name
from tensorprobe.records import Call, Capture
from tensorprobe.rerouting.minimize import all_are_needed, smallest
from tensorprobe.rerouting.targets import parse_target
from tensorprobe.store.loading import load
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file

FORMAT = 1
Verdict = Literal["found", "passes", "no cure"]
_MANY_FAILURES = 40  # ops that have no kernel elsewhere, before it is given up


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a bisection asks; another question needs another folder."""

    command: tuple[str, ...]  # the script and its arguments, or -m and a module
    check: str | None  # None: the script's own exit status
    to: str | None  # None: cpu; float64 where all is on the cpu already
    apis: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()
    repeat: int = 1
    compile: bool = False  # the passes of torch.compile, not calls


class Probe(msgspec.Struct, kw_only=True):
    """One run with some calls rerouted."""

    rules: dict[str, str]
    passed: bool
    status: int | None  # the script's; None: it ran out of time
    check_status: int | None
    elapsed_s: float
    calls: list[str] = []
    failed: dict[str, str] = {}


class State(msgspec.Struct, kw_only=True):
    """bisect.json: the question, every answer so far, and in the end the verdict."""

    format: int = FORMAT
    question: Question
    verdict: Verdict | None = None
    to: str | None = None
    culprits: list[dict[str, Any]] = []
    notes: list[str] = []
    probes: list[Probe] = []


@dataclass(frozen=True)
class Bisected:
    """What came out. `culprits` are rows of bisect.json: name, op, module, stack."""

    folder: Path
    verdict: Verdict
    to: str
    culprits: list[dict[str, Any]]
    n_apis: int
    n_calls: int
    n_probes: int
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Tell = Callable[[str], None]


def bisect(
    question: Question,
    folder: Path,
    *,
    timeout_s: float | None = None,
    restart: bool = False,
    tell: Tell = lambda line: None,
) -> Bisected:
    """Find the smallest set of calls which, run elsewhere, makes the check pass.

    Every answer is written to `folder`/bisect.json, and a second call with the same question goes
    on from there.
    """
    if question.to is not None:
        parse_target(question.to)
    return Bisection(question, folder, timeout_s, restart, tell).run()


class Bisection:
    """The search for calls. A probe's rules are names of calls and where they run instead."""

    def __init__(
        self, question: Question, folder: Path, timeout_s: float | None, restart: bool, tell: Tell
    ) -> None:
        self._question = question
        self._folder = folder
        self._timeout_s = timeout_s
        self._tell = tell
        self._file = folder / "bisect.json"
        self._variables: dict[str, str] = {}  # of the environment, for what is run
        folder.mkdir(parents=True, exist_ok=True)
        self._state = State(question=question) if restart else self._continued()
        self._state.culprits, self._state.notes = [], []

    def _continued(self) -> State:
        if not self._file.exists():
            return State(question=self._question)
        try:
            state = msgspec.convert(read_json(open_file(self._file), self._file), State)
        except ValueError as error:
            raise BadUsage(
                f"'{self._file}' is no state of a bisection ({error}); give another -o or --restart"
            ) from error
        if state.question != self._question:
            raise BadUsage(
                f"'{self._folder}' holds the bisection of another command or check: "
                f"{shlex.join(state.question.command)}. Give another -o, or --restart"
            )
        return state

    # The search

    def run(self) -> Bisected:
        if self._ask({}, "as it is").passed:
            return self._end("passes")
        self._state.to = self._question.to or self._default_target()
        everything = self._everything()
        if not everything.passed:
            return self._end("no cure", failed=everything.failed)
        if not everything.calls:
            raise TensorprobeError(
                f"the check passes with everything {phrase(self._to)}, but what the script called "
                "is not known: it ends by os._exit, or does its work in processes of its own"
            )
        groups = _by_api(everything.calls)
        apis = smallest(list(groups), lambda part: self._passes_apis(part, groups))
        calls = [call for api in apis for call in groups[api]]
        names, by_call = self._calls(apis, calls)
        return self._end("found", names, groups=groups, by_call=by_call)

    def _default_target(self) -> str:
        capture = self._recording()
        devices = {t.device for call in capture.calls for t in call.tensors} if capture else set()
        return "cpu" if devices - {"cpu", None, ""} else "float64"

    def _everything(self) -> Probe:
        """All ops elsewhere, except those that cannot run there."""
        to = self._to
        homes: dict[str, str] = {}
        wanted = dict.fromkeys(self._question.apis or ("*",), to)
        while True:
            without = f", without {len(homes)} that cannot" if homes else ""
            probe = self._ask({**homes, **wanted}, f"everything {phrase(to)}{without}")
            new = [name for name in probe.failed if name not in homes]
            if probe.passed or not new or len(homes) > _MANY_FAILURES:
                return probe
            homes |= dict.fromkeys(new, "home")

    def _passes_apis(self, apis: Sequence[str], groups: dict[str, list[str]]) -> bool:
        what = f"{len(apis)} of {len(groups)} APIs {phrase(self._to)}"
        names: Sequence[str] = apis
        if self._question.apis:  # an API may be called outside of what is looked at, too
            names = [call for api in apis for call in groups[api]]
        return self._ask(dict.fromkeys(names, self._to), what).passed

    def _calls(self, apis: list[str], calls: list[str]) -> tuple[list[str], bool]:
        """The smallest set of calls of these APIs, and whether it was found call by call."""

        def passes(part: Sequence[str]) -> bool:
            what = f"{len(part)} of {len(calls)} calls {phrase(self._to)}"
            return self._ask(dict.fromkeys(part, self._to), what).passed

        if len(calls) == len(apis):
            return calls, True
        if not passes(calls):
            self._state.notes.append(
                "rerouting these calls by their numbers does not pass the check, though all calls "
                "of their APIs do: the numbers are not the same in each run"
            )
            return apis, False
        if all_are_needed(calls, passes):
            self._state.notes.append(
                f"leaving out any one of the calls that were tried makes the check fail: taken as "
                f"all {len(calls)}"
            )
            return apis, False
        return smallest(calls, passes), True

    @property
    def _to(self) -> str:
        assert self._state.to is not None
        return self._state.to

    # One probe

    def _ask(self, rules: dict[str, str], what: str) -> Probe:
        known = next((probe for probe in self._state.probes if probe.rules == rules), None)
        if known is not None:
            return known
        probe = self._probe(rules)
        self._state.probes.append(probe)
        self._save()
        word = "passes" if probe.passed else "fails"
        self._tell(f"probe {len(self._state.probes)}: {what}: {word} ({probe.elapsed_s:.1f} s)")
        return probe

    def _probe(self, rules: dict[str, str]) -> Probe:
        folder = self._folder / "probes" / f"{len(self._state.probes) + 1:03}"
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        probe = Probe(rules=rules, passed=True, status=0, check_status=None, elapsed_s=0.0)
        for _ in range(self._question.repeat):
            self._run_script(probe, folder)
            self._run_check(probe, folder)
            if not probe.passed:
                break
        probe.elapsed_s = round(time.monotonic() - start, 2)
        return probe

    def _run_script(self, probe: Probe, folder: Path) -> None:
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        options = list(self._question.run_options)
        if probe.rules:
            (folder / "reroute.json").write_text(json.dumps(probe.rules, indent=1))
            options += ["--no-record", "--reroute-file", str(folder / "reroute.json")]
            options += ["--reroute-report", str(report)]
        else:  # as it is: what it calls, where, on which devices
            options += ["--level", "L1", "--keep", "structure", "--steps", "0-1"]
            options += ["-o", str(self._folder / "calls")]
        words = [sys.executable, "-m", "tensorprobe", "run", *options, *self._question.command]
        probe.status = self._execute(words, folder, "stdout", "stderr")
        probe.passed = probe.status == 0
        if probe.status == 2:
            _raise_refusal(folder / "stderr")
        if report.exists():
            found = json.loads(report.read_text())
            probe.calls, probe.failed = found["calls"], found["failed"]

    def _run_check(self, probe: Probe, folder: Path) -> None:
        """The check reads what the script printed; a script that died has failed it."""
        if not probe.passed or self._question.check is None:
            return
        with open(folder / "stdout", "rb") as printed:
            probe.check_status = self._execute(
                self._question.check, folder, "check", "check", stdin=printed
            )
        probe.passed = probe.check_status == 0

    def _execute(
        self, command: list[str] | str, folder: Path, stdout: str, stderr: str, stdin: Any = None
    ) -> int | None:
        """The exit status; None when the time was over."""
        with ExitStack() as files:
            out = files.enter_context(open(folder / stdout, "wb"))
            err = out if stderr == stdout else files.enter_context(open(folder / stderr, "wb"))
            process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                stdin=stdin or subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=_environment(folder) | self._variables,
                start_new_session=True,
            )
            try:
                return process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _save(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(self._state), indent=1)
        fresh = self._file.with_suffix(".new")
        fresh.write_bytes(text)
        os.replace(fresh, self._file)

    # The end

    def _end(
        self,
        verdict: Verdict,
        names: Sequence[str] = (),
        *,
        groups: dict[str, list[str]] | None = None,
        by_call: bool = True,
        failed: dict[str, str] | None = None,
    ) -> Bisected:
        groups = groups or {}
        state = self._state
        state.verdict = verdict
        for name, reason in (failed or {}).items():
            state.notes.append(f"{name} cannot run {phrase(self._to)}: {reason}")
        capture = self._recording() if verdict == "found" else None
        state.culprits = [_culprit(name, by_call, capture) for name in names]
        self._save()
        return Bisected(
            folder=self._folder,
            verdict=verdict,
            to=state.to or "",
            culprits=state.culprits,
            n_apis=len(groups),
            n_calls=sum(map(len, groups.values())),
            n_probes=len(state.probes),
            commands=self._commands(names, by_call, capture) if verdict == "found" else [],
            notes=state.notes,
        )

    def _commands(self, names: Sequence[str], by_call: bool, capture: Capture | None) -> list[str]:
        """What to type next: the cure, and the repro of the first culprit."""
        options, command = self._question.run_options, self._question.command
        rules = ",".join(f"{name}={self._to}" for name in names)
        first = names[0] if by_call else next(iter(_calls_of(capture, names[0])), None)
        tensors, repro = str(self._folder / "tensors"), str(self._folder / "repro")
        typed = [["run", *options, "--no-record", "--reroute", rules, *command]]
        if first is not None:
            name = first if isinstance(first, str) else first.name.removesuffix(".forward")
            keep = ["--level", "L1", "--keep", "tensors", "--steps", "0", "--calls", name]
            typed.append(["run", *options, *keep, "-o", tensors, *command])
            typed.append(["repro", tensors, f"{name}.forward", "-o", repro])
        return [f"tensorprobe {shlex.join(words)}" for words in typed]

    def _recording(self) -> Capture | None:
        """What the run as it is called; None where it could not be recorded."""
        try:
            return load(self._folder / "calls")
        except TensorprobeError:
            return None


def phrase(target: str) -> str:
    """How one says where a target is: "on cpu", "in float64"."""
    device, dtype = parse_target(target)
    return " ".join(filter(None, (device and f"on {device}", dtype and f"in {dtype}")))


def _raise_refusal(stderr: Path) -> None:
    """A run that tensorprobe itself refused is no answer."""
    lines = stderr.read_text(errors="replace").splitlines()
    refusal = lines[-1] if len(lines) == 1 else ""
    if refusal.startswith("tensorprobe run: "):
        raise BadUsage(refusal.removeprefix("tensorprobe run: "))


def _environment(folder: Path) -> dict[str, str]:
    source = str(Path(tensorprobe.__file__).parents[1])  # works from a source tree, too
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TENSORPROBE_PROBE_DIR": str(folder.resolve()),
    }


def _by_api(calls: Iterable[str]) -> dict[str, list[str]]:
    """Calls by what they call; torch.relu, F.relu and Tensor.relu are one, under the first name."""
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for call in calls:
        stem = call.rpartition(".")[0]
        prefix, _, api = stem.partition(".")
        is_torch = prefix in ("Tensor", "Torch", "Functional", "VF")
        key = first.setdefault(api if is_torch else stem, stem)
        groups.setdefault(key, []).append(call)
    return groups


def _calls_of(capture: Capture | None, name: str) -> list[Call]:
    """The recorded forward calls by that name, of a call or of an API."""
    if capture is None:
        return []
    number = name.rpartition(".")[2]
    found = []
    for call in capture.calls(direction="forward"):
        own = call.name.removesuffix(".forward")
        if own == name or (not number.isdigit() and name in aliases(api_name(call.op))):
            found.append(call)
    return found


def _culprit(name: str, by_call: bool, capture: Capture | None) -> dict[str, Any]:
    calls = _calls_of(capture, name)
    row: dict[str, Any] = {"name": f"{name}.forward" if by_call else name}
    first = calls[0] if calls else None
    row["op"] = first.op if first else None
    row["module"] = first.module if first else None
    row["stack"] = list(first.stack) if first else []
    return row
