"""Pages of a check, a guard and an incident: their JSON, and the lines for where no script runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.errors import BadArtefact
from tensorprobe.report.chinese import sentences_in_chinese
from tensorprobe.report.html import LARGEST_NBYTES, PAGE_FILE, json_block, page, write
from tensorprobe.report.page_data import clean, shown
from tensorprobe.tensors.opening import open_file, read_text

_MOST_NBYTES = 256 << 20
# What each is in, and the list in it.
FILES = {
    "check": ("check.json", "calls"),
    "guard": ("findings.json", "findings"),
    "incident": ("incident.json", "incidents"),
}


def document(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of such a file's content."""
    lines = {"check": _check, "guard": _guard, "incident": _incident}[kind](found)
    text = [shown(line) for line in lines]
    shows = {**clean(found), "kind": kind, "tool": __version__, "text": text}
    return {**shows, "chinese": sentences_in_chinese(shows)}


def read_document(kind: str, folder: Path) -> dict[str, Any]:
    """The same, from the file in a folder."""
    path = folder / FILES[kind][0]
    try:
        found = msgspec.json.decode(read_text(open_file(path), path, _MOST_NBYTES))
        rows = found[FILES[kind][1]]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TypeError(f"'{FILES[kind][1]}' is no list of objects")
        return document(kind, found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadArtefact(f"'{path}' cannot be shown: {error}") from error


def write_document(kind: str, folder: Path) -> Path:
    """Write report.html beside such a file."""
    shows = read_document(kind, folder)
    path = folder / PAGE_FILE
    block = json_block(shows)
    if len(block) > LARGEST_NBYTES and kind == "check":
        for row in shows["calls"]:
            if row["verdict"] == "pass":
                row["tensors"] = []
        block = json_block(shows)
    write(path, page(f"tensorprobe {kind}", shows["text"], {"index": block}))
    return path


def _check(found: Mapping[str, Any]) -> Iterable[str]:
    yield ", ".join(f"{number} {word}" for word, number in found["counts"].items())
    for row in found["calls"]:
        if row["verdict"] in ("fail", "crashed"):
            yield f"{row['verdict']} {row['name']}: {row.get('reason', '')}"


def _guard(found: Mapping[str, Any]) -> Iterable[str]:
    for each in found["findings"]:
        yield f"{each['name']} (step {each['step']}, rank {each['rank']}): {each['reason']}"
    if not found["findings"]:
        yield "the guard found nothing"


def _incident(found: Mapping[str, Any]) -> Iterable[str]:
    for each in found["incidents"]:
        yield f"{each.get('node') or each.get('kernel')}: {each.get('conclusion')}"
    if not found["incidents"]:
        yield "no AI Core error was found"
