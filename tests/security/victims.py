"""Runs verbs on a hostile folder in a sandbox, and says everything they did that they must not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import traps

_HERE = Path(__file__).parent
_SRC = _HERE.parent.parent / "src"
STATUSES = (0, 1, 2, 3)
_CPU_S = 10.0
Step = dict[str, Any]  # {"verb": [...]}, {"script": path}, {"load": path} or {"view": path}


class Outcome(NamedTuple):
    """What came of a job: `problems` is empty where all is well."""

    problems: list[str]
    statuses: list[int | None]  # of each step; None where there was no script to run
    imported: set[str]
    texts: list[str]


class Sandbox:
    """A folder for one job: what is read, what may be written, and a file that is neither.

    Whatever appears beside `out`, or changes there, is a problem. Attacks write to `marker(name)`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.secret = folder / "secret.txt"
        self._about = folder.parent / f"{folder.name}.about"
        folder.mkdir(parents=True)
        self._about.mkdir()
        self.out.mkdir()
        self.secret.write_text("not for you\n")

    def marker(self, name: str) -> Path:
        return self.folder / f"{traps.CANARY}-{name}"

    def seen(self) -> dict[str, tuple[int, int]]:
        """Every file but those of the output, with its size and time."""
        found = {}
        for folder, folders, files in os.walk(self.folder):
            if folder == str(self.folder):
                folders.remove("out")
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                stat = os.lstat(path)
                is_folder = os.path.isdir(path)
                about = (0, 0) if is_folder else (stat.st_size, stat.st_mtime_ns)
                found[os.path.relpath(path, self.folder)] = about
        return found

    def job(self, steps: Sequence[Step]) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "outputs": [str(self.out), str(self._about)],
            "secrets": [str(self.secret)],
            "log": str(self._about / "log.jsonl"),
            "told": str(self._about),
            "steps": list(steps),
        }

    def outcome(self, steps: Sequence[Step], before: dict[str, Any], status: object) -> Outcome:
        log = self._about / "log.jsonl"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        events = [json.loads(line) for line in lines]
        log.unlink(missing_ok=True)
        problems, imported = [], set()
        statuses: list[int | None] = []
        at, done = -1, -1
        for event in events:
            kind = event.pop("event")
            if kind == "begin":
                at = event["step"]
            elif kind == "end":
                done = at
                statuses.append(event["status"])
                if event["status"] not in (None, *STATUSES):
                    problems.append(f"{_words(steps[at])}: exit status {event['status']}")
                if event["cpu_s"] > _CPU_S:
                    problems.append(f"{_words(steps[at])}: took {event['cpu_s']:.1f} s")
            elif kind == "imported":
                imported.add(event["name"])
            else:
                where = _words(steps[at]) if at >= 0 else "start"
                problems.append(f"{where}: {kind}: {event['why']}")
        if done < len(steps) - 1 or status != 0:
            where = _words(steps[done + 1]) if done + 1 < len(steps) else "end"
            problems.append(f"{where}: {_died(status)}")
        texts = []
        for number, step in enumerate(steps):
            told = self._about / f"{number}.txt"
            text = told.read_text(errors="replace") if told.exists() else ""
            told.unlink(missing_ok=True)
            texts.append(text)
            if "Traceback (most recent call last)" in text:
                last = text.strip().splitlines()[-1]
                problems.append(f"{_words(step)}: a traceback: {last[:300]}")
        after = self.seen()
        changed = sorted(
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        )
        problems += [f"'{path}' appeared, changed or went" for path in changed]
        problems = [line.replace(f"{self.folder}/", "") for line in problems]
        return Outcome(problems, statuses, imported, texts)

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        shutil.rmtree(self._about)


def _words(step: Step) -> str:
    if "verb" in step:
        return " ".join(word if len(word) < 80 else word[:77] + "..." for word in step["verb"])
    return " ".join(f"{kind} {what}" for kind, what in step.items())


def _died(status: object) -> str:
    if status is None:
        return "did not end"
    return "over its limit of time" if status == -24 else f"the process ended with {status}"


class Victim:
    """A warm Python to run jobs in, one after the other."""

    def __init__(self, *flags: str) -> None:
        path = os.pathsep.join([str(_SRC), str(_HERE)])
        self._process = subprocess.Popen(
            [sys.executable, *flags, str(_HERE / "warm_python.py")],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def run(self, sandbox: Sandbox, steps: Sequence[Step]) -> Outcome:
        """All steps in one process; what it did wrong."""
        before = sandbox.seen()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(sandbox.job(steps)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return sandbox.outcome(steps, before, answer["status"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


# What is done to a capture


def reading(capture: str, other: str | None = None, out: str = "out") -> list[Step]:
    """Every verb that takes a capture, and Python's own way to read one; `other` is its twin."""
    other = other or capture
    shown = (
        [],
        ["--limit", "100000"],
        ["--gaps"],
        ["--name", "*.a*"],
        ["--op", "*system"],
        ["--module", "a*"],
        ["--direction", "backward"],
        ["--offset", "3", "--step", "0", "--rank", "0"],
    )
    steps: list[Step] = [{"verb": ["show", capture, *options]} for options in shown]
    steps += [{"verb": ["show", "--limit", "100000", "--", capture, "*"]}]
    steps += [{"load": capture}, {"view": capture}]
    steps += [
        {"verb": ["check", capture, "--all", "--peer-tables", "--jobs", "2", "-o", f"{out}/check"]}
    ]
    steps += [
        {"verb": ["compare", capture, other, "--xlsx", "-o", f"{out}/compared"]},
        {"verb": ["compare", other, capture, "--columns", "msprobe", "-o", f"{out}/turned"]},
        {"verb": ["compare", capture, capture, "--jobs", "2", "-o", f"{out}/itself"]},
        {"verb": ["compare", capture, other, "--at", "outputs", "-o", f"{out}/chosen"]},
        {"verb": ["ranks", capture, "--only", "nonfinite", "-o", f"{out}/ranks"]},
        {"verb": ["env", "compare", capture, other]},
    ]
    steps += converting(capture, out)
    return steps


def reading_graphs(capture: str, other: str, out: str = "out") -> list[Step]:
    """What reads the graphs of compiled parts, and the scripts that it writes."""
    return [
        {"verb": ["compiled", capture, "--list"]},
        {"verb": ["compiled", capture, "--list", "--json"]},
        {"verb": ["compiled", capture, "--code", "1"]},
        {"verb": ["compiled", capture, "-o", f"{out}/stages"]},
        {"verb": ["compiled", capture, "--json", "--against", other]},
        *({"script": f"{out}/stages/repro{number}/repro.py"} for number in range(2)),
    ]


def reading_trends(folder: str, other: str, out: str = "out") -> list[Step]:
    """What reads the files of a monitor."""
    return [
        {"verb": ["monitor", "show", folder]},
        {"verb": ["monitor", "show", "--json", "--", folder, "*"]},
        {"verb": ["monitor", "compare", folder, other, "-o", f"{out}/trends.json"]},
        {"verb": ["monitor", "compare", other, folder, "--json"]},
        *(
            {"verb": ["monitor", "export", folder, "--to", target, "-o", f"{out}/{target}"]}
            for target in ("csv", "tensorboard")
        ),
    ]


def reading_weights(path: str, other: str, out: str = "out") -> list[Step]:
    """What reads checkpoints."""
    return [
        {"verb": ["checkpoints", path, other, "-o", f"{out}/weights"]},
        {"verb": ["checkpoints", other, path, "--only", "weights", "--json"]},
    ]


def reading_facts(path: str, other: str, out: str = "out") -> list[Step]:
    """What reads the files of an environment."""
    return [
        {"verb": ["env", "compare", path, other, "-o", f"{out}/env.json"]},
        {"verb": ["env", "compare", other, path, "--json"]},
    ]


def converting(capture: str, out: str = "out") -> list[Step]:
    steps: list[Step] = [
        {"verb": ["convert", capture, "--to", layout, "-o", f"{out}/{layout}"]}
        for layout in ("native", "msprobe", "ptdbg")
    ]
    return [
        *steps,
        {"verb": ["convert", capture, "--to", "native", "--compress", "-o", f"{out}/packed"]},
    ]


def reproducing(capture: str, names: Sequence[str], sandbox: Sandbox) -> list[Step]:
    """A repro of each call, and the script that it wrote."""
    steps: list[Step] = []
    for number, name in enumerate(names):
        out = f"out/repro{number}"
        steps.append({"verb": ["repro", "-o", out, "--", capture, name]})
        steps.append({"script": str(sandbox.folder / out / "repro.py")})
    return steps
