"""Pages that are made of one JSON file, and the lines for where no script runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.errors import BadArtefact
from tensorprobe.report.chinese import sentences_in_chinese
from tensorprobe.report.html import LARGEST_NBYTES, PAGE_FILE, json_block, page, write
from tensorprobe.report.page_data import clean, shown
from tensorprobe.report.sheets import (
    Sheet,
    checkpoints_sheet,
    compiled_sheet,
    environments_sheet,
    ranks_sheet,
    users_source,
)
from tensorprobe.tensors.opening import open_file, read_text

_MOST_NBYTES = 256 << 20
_SOURCES = 20  # findings whose lines of source are shown
# What each is in, and the list in it.
FILES = {
    "check": ("check.json", "calls"),
    "guard": ("findings.json", "findings"),
    "incident": ("incident.json", "incidents"),
}
# Those that are an answer and tables: what each is in, and what makes the page of it.
SHEETS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Sheet]]] = {
    "ranks": ("ranks.json", ranks_sheet),
    "checkpoints": ("checkpoints.json", checkpoints_sheet),
    "compiled": ("stages.json", compiled_sheet),
    "environments": ("environments.json", environments_sheet),
}


def document(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of such a file's content."""
    lines = {"check": _check, "guard": _guard, "incident": _incident}[kind](found)
    text = [shown(line) for line in lines]
    shows = {**clean(found), "kind": kind, "tool": __version__, "text": text}
    if kind == "guard":
        for each, finding in zip(shows["findings"][:_SOURCES], found["findings"], strict=False):
            each["source"] = users_source(finding.get("stack") or ())
    return {**shows, "chinese": sentences_in_chinese(shows)}


def read_document(kind: str, folder: Path) -> dict[str, Any]:
    """The same, from the file in a folder."""
    path = folder / (FILES if kind in FILES else SHEETS)[kind][0]
    try:
        found = msgspec.json.decode(read_text(open_file(path), path, _MOST_NBYTES))
        if kind in SHEETS:
            return sheet_data(SHEETS[kind][1](found))
        rows = found[FILES[kind][1]]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TypeError(f"'{FILES[kind][1]}' is no list of objects")
        return document(kind, found)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
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


def sheet_data(sheet: Sheet) -> dict[str, Any]:
    """What the page shows of a sheet."""
    shows = msgspec.to_builtins(sheet)
    curves = [part.pop("curves", None) for part in shows["parts"]]
    shows = {**clean(shows), "kind": "sheet", "tool": __version__}
    for part, drawn in zip(shows["parts"], curves, strict=True):
        if drawn:  # columns of numbers are long, and base64
            part["curves"] = [
                {**each, "name": shown(each["name"]), "marks": clean(each["marks"])}
                for each in drawn
            ]
    shows["text"] = [f"{sheet.badge}: {sheet.answer}", *sheet.about, *sheet.facts, *sheet.notes]
    shows["text"] = [shown(line) for line in shows["text"]]
    return {**shows, "chinese": sentences_in_chinese(shows)}


def write_sheet(title: str, path: Path, sheet: Sheet) -> Path:
    """Write the page of a sheet into that file."""
    shows = sheet_data(sheet)
    write(path, page(f"tensorprobe {title}", shows["text"], {"index": json_block(shows)}))
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
