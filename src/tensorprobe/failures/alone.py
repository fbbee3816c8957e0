"""A failed call by itself: its repro written, run in a process of its own, and what came of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

import tensorprobe
from tensorprobe.devices.children import child
from tensorprobe.errors import TensorprobeError
from tensorprobe.replay.repro import repro

Outcome = Literal[
    "reproduced", "other error", "no error", "crashed", "timed out", "not tried", "not possible"
]

_RAISED = re.compile(r"^FAIL  raised (\w+): (.*)", re.MULTILINE)
# What differs between two occurrences of one error: addresses, counts, process numbers.
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Alone(NamedTuple):
    """What one call did by itself; `folder` is its repro, None where there can be none."""

    outcome: Outcome
    text: str
    folder: Path | None = None
    command: str = ""  # to see it again


def write_repro(capture: Path, name: str, step: int, rank: int, folder: Path) -> Path | str:
    """The folder of the repro, or why there is none."""
    try:
        return repro(capture, name, folder, step=step, rank=rank, recorded_here=True)
    except TensorprobeError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 replaying a call: the reason is the answer
        return f"no repro: {type(error).__name__}: {error}"


def run_alone(folder: Path, device: str, kind: str, text: str, timeout_s: float) -> Alone:
    """Run a repro where its call ran, and say whether it fails as it did, with `kind: text`."""
    start = child(device, [str(folder / "repro.py"), "--device", device])
    variables = [f"{name}={shlex.quote(value)}" for name, value in start.environment.items()]
    command = " ".join([*variables, "python", shlex.join(start.command[1:])])
    environment = {**os.environ, **start.environment, "PYTHONPATH": _python_path()}
    if not timeout_s:
        return Alone("not tried", "the call alone was not tried", folder, command)
    try:
        done = subprocess.run(
            start.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        late = f"the call alone did not end within {timeout_s:g} s"
        return Alone("timed out", late, folder, command)
    except OSError as problem:
        return Alone("not possible", f"the repro could not be started: {problem}", folder, command)
    found = _judge(done.returncode, done.stdout, device, kind, text)
    return found._replace(folder=folder, command=command)


def _judge(status: int, output: str, device: str, kind: str, text: str) -> Alone:
    raised = _RAISED.search(output)
    if raised:
        if raised[1] == kind and without_numbers(raised[2]) == without_numbers(
            text.partition("\n")[0]
        ):
            return Alone("reproduced", f"the call alone, on {device}, raises the same error")
        other = f"the call alone, on {device}, raises {raised[1]}: {raised[2]}"
        return Alone("other error", other)
    if status < 0:
        return Alone("crashed", f"the call alone, on {device}, dies by signal {-status}")
    if status in (0, 3):
        wrong = "" if status == 0 else ", though its numbers are wrong"
        return Alone(
            "no error",
            f"the call alone, on {device}, raises nothing{wrong}: the error needs what came before",
        )
    last = output.strip().rpartition("\n")[2]
    return Alone("not possible", f"the repro ended with status {status}: {last}")


def without_numbers(text: str) -> str:
    """What two occurrences of one error have in common."""
    return _NUMBERS.sub("#", text)


def _python_path() -> str:
    """With this package in front: the child of a simulated device needs it."""
    own = str(Path(tensorprobe.__file__).parents[1])
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))
