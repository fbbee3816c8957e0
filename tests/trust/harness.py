"""A case is a pair of programs and the verdict that they must get; `judge` runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import io
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorprobe as tp
from tensorprobe.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


class Start:
    """Begins the one recording of a program: `with start():`, or `start.run(text)` of a script."""

    def __init__(self, folder: Path, keep: str, level: str) -> None:
        self.folder, self.keep, self.level = folder, keep, level
        self.begun = 0

    def __call__(self) -> tp.Recorder:
        self.begun += 1
        return tp.Recorder(self.folder, keep=self.keep, level=self.level, strict=True)

    def run(self, text: str, *arguments: str, **environ: str) -> None:
        """Under `tensorprobe run`, in a process of its own."""
        self.begun += 1
        script = self.folder.parent / "script.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tensorprobe",
                "run",
                "--keep",
                self.keep,
                "--level",
                self.level,
                "-o",
                str(self.folder),
                script.name,
                *arguments,
            ],
            cwd=script.parent,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environ},
        )
        assert done.returncode == 0, done.stderr


# Runs one side, the actual one if the flag is True.
Program = Callable[[Start, bool], None]

PLANTED = "planted"
ALL_KEEPS = ("tensors mix", "stats mix", "digest mix")


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair of programs. `at` and `cause` are of a fault; a healthy pair has neither.

    at: patterns, separated by `|`, one of which the first culprit's name must match. Other ones
    for a level: at={"*": "Functional.linear.1.forward", "L0": "Module.second.*"}. PLANTED: the
    call is looked up in recordings of digests that differ by nothing but the fault.
    cause: what verdict.json must give as the cause of the first culprit, separated by `|`.
    allowed: causes that a healthy pair may be `diverged` for.
    says: words, separated by `|`, one of which stands in the first lines of a healthy pair.
    culprits: how many there may be.
    """

    name: str
    family: str
    program: Program
    _: dataclasses.KW_ONLY
    at: str | dict[str, str] = ""
    cause: str = ""
    kind: str = ""
    step: int | None = None
    allowed: str = ""
    says: str = ""
    runs: tuple[str, ...] = ALL_KEEPS
    culprits: int = 1
    quick: bool = False
    needs: str = ""  # a package without which the case is skipped
    options: tuple[str, ...] = ()  # of compare
    mapping: str = ""  # the text of a mapping file

    def __post_init__(self) -> None:
        assert bool(self.at) == bool(self.cause), self.name

    @property
    def is_fault(self) -> bool:
        return bool(self.at)

    def place(self, level: str) -> str:
        if isinstance(self.at, str):
            return self.at
        return self.at.get(level, self.at["*"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was said of a case, and what is wrong with that; `wrong` is empty if nothing is."""

    case: str
    family: str
    keep: str
    level: str
    is_fault: bool
    verdict: str
    text: str
    wrong: str = ""
    wrong_cause: str = ""

    @property
    def name(self) -> str:
        return f"{self.case} {self.keep} {self.level}"


def judge(case: Case, run: str, folder: Path) -> Outcome:
    """Record both sides, compare them on the command line, and check the answer."""
    keep, level = run.split()
    said = Outcome(case.name, case.family, keep, level, case.is_fault, "", "")
    try:
        sides = []
        for side in ("actual", "expected"):
            sides.append(str(folder / side))
            _record(case.program, side == "actual", folder / side, keep, level)
        status, text, found = _compare(*sides, folder / "report", _options(case, folder))
        if case.at == PLANTED:
            case = dataclasses.replace(case, at=_planted(case, level, folder))
    except Exception:  # noqa: BLE001 - one case that dies must not end the table of all
        text = traceback.format_exc(limit=-4)
        return dataclasses.replace(said, verdict="crashed", text=text, wrong="crashed")
    said = dataclasses.replace(said, verdict=found["verdict"], text=text)
    wrong = _wrong_fault if case.is_fault else _wrong_alarm
    first, second = wrong(case, level, status, text, found)
    return dataclasses.replace(said, wrong=first, wrong_cause=second)


def run_case(case: Case, run: str, folder: Path) -> Outcome:
    """`judge` in a folder that is gone afterwards."""
    here = folder / f"{case.name}-{run.replace(' ', '-')}"
    try:
        return judge(case, run, here)
    finally:
        shutil.rmtree(here, ignore_errors=True)


def _record(program: Program, is_actual: bool, folder: Path, keep: str, level: str) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    start = Start(folder, keep, level)
    with _quiet(), _one_thread():
        program(start, is_actual)
    assert start.begun == 1, "a program is recorded once"


def _planted(case: Case, level: str, folder: Path) -> str:
    """The first call with equal inputs and other results, where nothing but the fault differs."""
    sides = []
    for side in ("actual", "expected"):
        here = folder / f"{side}-alone"
        program = functools.partial(case.program, alone=True)
        _record(program, side == "actual", here, "digest", level)
        sides.append(tp.load(here).calls)
    theirs = {(call.step, call.name): call for call in sides[1]}
    for call in sides[0]:
        other = theirs[call.step, call.name]
        holds_others = level != "L0" and call.name.startswith("Module.")
        if holds_others or ".empty" in call.name or _digests(call, False) != _digests(other, False):
            continue
        if _digests(call, True) != _digests(other, True):
            return call.name
    raise AssertionError("the fault changed nothing")


def _digests(call: tp.Call, outputs: bool) -> list[str | None]:
    return [t.digest for t in call.tensors if (t.role == "output") == outputs]


def _options(case: Case, folder: Path) -> list[str]:
    if not case.mapping:
        return list(case.options)
    file = folder / "mapping.yaml"
    file.write_text(case.mapping)
    return [*case.options, "--mapping", str(file)]


def _compare(
    actual: str, expected: str, report: Path, options: list[str]
) -> tuple[int, str, dict[str, Any]]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(["compare", actual, expected, "-o", str(report), "-j", "1", *options])
    file = report / "verdict.json"
    if not file.exists():
        raise RuntimeError(f"compare ended with {status}: {errors.getvalue()[-1500:]}")
    text = out.getvalue().partition("\nwritten: ")[0]
    text = text.replace(actual, "actual").replace(expected, "expected")
    return status, text, json.loads(file.read_text())


def _wrong_fault(
    case: Case, level: str, status: int, text: str, found: dict[str, Any]
) -> tuple[str, str]:
    if found["verdict"] != "diverged" or status != 3:
        return f"{found['verdict']}, exit {status}; expected diverged, exit 3", ""
    if not found["culprits"]:
        return "diverged without a culprit", ""
    first, place = found["culprits"][0], case.place(level)
    if not any(fnmatch.fnmatchcase(first["name"], pattern) for pattern in place.split("|")):
        where = f"{first['name']} (module {first['module']!r}, step {first['step']})"
        return f"names {where}; expected {place}", ""
    if case.step is not None and first["step"] != case.step:
        return f"names step {first['step']}; expected step {case.step}", ""
    if len(found["culprits"]) > case.culprits:
        names = [culprit["name"] for culprit in found["culprits"]]
        return "", f"{len(names)} culprits for one cause: {', '.join(names[:4])}"
    return "", _wrong_cause(case, found, first)


def _wrong_cause(case: Case, found: dict[str, Any], first: dict[str, Any]) -> str:
    if case.kind and first["kind"] not in case.kind.split("|"):
        return f"kind {first['kind']}; expected {case.kind}"
    cause = _cause(found, first)
    if case.cause and cause not in case.cause.split("|"):
        return f"cause {cause}; expected {case.cause}"
    return ""


def _wrong_alarm(
    case: Case, level: str, status: int, text: str, found: dict[str, Any]
) -> tuple[str, str]:
    del level
    head = "\n".join(text.splitlines()[:5])
    silent = case.says and not any(word in head for word in case.says.split("|"))
    if found["verdict"] == "match" and status == 0:
        return "", f"the first lines do not say {case.says!r}" if silent else ""
    culprits = found["culprits"]
    is_one = found["verdict"] == "diverged" and status == 3 and len(culprits) == 1
    if case.allowed and is_one and _cause(found, culprits[0]) in case.allowed.split("|"):
        return "", f"the first lines do not say {case.says!r}" if silent else ""
    wanted = "match, exit 0" + (f" (or one cause, {case.allowed})" if case.allowed else "")
    names = ", ".join(culprit["name"] for culprit in culprits[:4])
    return (
        f"{found['verdict']}, exit {status}: {names or found.get('reason')}; expected {wanted}",
        "",
    )


def _cause(found: dict[str, Any], culprit: dict[str, Any]) -> str | None:
    return culprit.get("cause", found.get("cause"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of the programs are not the matter here; nor what they and the recorder print."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        before, sys.stderr = sys.stderr, io.StringIO()
        try:
            yield
        finally:
            sys.stderr = before


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
