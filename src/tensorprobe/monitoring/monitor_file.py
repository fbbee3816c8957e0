"""The small files beside the steps: monitor.json with facts, alarms.jsonl with alarms."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.nests import strict_json
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file, split_lines

FACTS = "monitor.json"
ALARMS = "alarms.jsonl"
FORMAT = 1
_MAX_LINE_NBYTES = 1 << 20


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write monitor.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "kind": "monitor", **facts}
    text = msgspec.json.format(msgspec.json.encode(strict_json(content)), indent=1)
    partial = folder / f".{FACTS}.{os.getpid()}"
    partial.write_bytes(text + b"\n")
    os.replace(partial, folder / FACTS)


def read_facts(folder: Path) -> dict[str, Any]:
    """monitor.json, or nothing where there is none; ValueError where it is damaged."""
    path = folder / FACTS
    if not path.exists():
        return {}
    found = read_json(open_file(path), path)
    if not isinstance(found, dict) or found.get("kind") != "monitor":
        raise ValueError("it is not of a monitor")
    if found.get("format") != FORMAT:
        raise ValueError(f"it has format {found.get('format')!r}; this version reads {FORMAT}")
    return found


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """Each start of the training: which file of steps it begins with, and which step."""
    try:
        found = read_facts(folder).get("attempts")
    except ValueError:
        return []
    return [
        each
        for each in (found if isinstance(found, list) else ())
        if isinstance(each, dict)
        and type(each.get("first_segment")) is int
        and type(each.get("first_step")) is int
    ]


def append_alarm(folder: Path, alarm: Alarm) -> None:
    """Add a line to alarms.jsonl."""
    line = msgspec.json.encode(strict_json(msgspec.to_builtins(alarm))) + b"\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(folder / ALARMS, flags, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read_alarms(folder: Path, tell: Callable[[str], None]) -> list[Alarm]:
    """The alarms of a rank; `tell` is given what is damaged."""
    path = folder / ALARMS
    if not path.exists():
        return []
    found = []
    with open_file(path) as file:
        for number, line in enumerate(split_lines(file, _MAX_LINE_NBYTES), 1):
            try:
                if line is None or not line.endswith(b"\n"):
                    raise ValueError("cut off")
                found.append(msgspec.json.decode(line, type=Alarm))
            except (ValueError, RecursionError) as error:
                tell(f"{path.name}, line {number}: {error}"[:300])
    return found
