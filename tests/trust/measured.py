"""Keeps the outcome of each run in a file, a line each, so that a long measurement can go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from trust.harness import ROOT, Outcome

_FOLDERS = (ROOT / "src" / "tensorprobe", ROOT / "tests" / "trust")
_SUFFIXES = {".py", ".h", ".cpp", ".c"}


def digest_of_sources() -> str:
    """What the outcomes depend on: the tool, and the programs that it is tried on."""
    found = hashlib.sha256()
    for file in sorted(file for folder in _FOLDERS for file in folder.rglob("*")):
        if file.suffix in _SUFFIXES:
            found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


class Measured:
    """The outcomes in a file, with the sources each was measured with; the last of a run counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._sources = digest_of_sources()
        self._known: dict[tuple[str, str], tuple[str, Outcome]] = {}
        for sources, said in _lines(file):
            self._known[said.case, f"{said.keep} {said.level}"] = sources, said

    def of(self, case: str, run: str, *, older: bool = False) -> Outcome | None:
        """What a run came to with the sources as they are; `older`: or with earlier ones."""
        sources, said = self._known.get((case, run), ("", None))
        return said if older or sources == self._sources else None

    def is_new(self, said: Outcome) -> bool:
        """Whether it was measured with the sources as they are."""
        return self.of(said.case, f"{said.keep} {said.level}") is not None

    def add(self, said: Outcome) -> None:
        """Keep an outcome, at once: the measurement may end at any time."""
        self._known[said.case, f"{said.keep} {said.level}"] = self._sources, said
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            line = {"sources": self._sources, **dataclasses.asdict(said)}
            file.write(json.dumps(line) + "\n")


def _lines(file: Path) -> Iterator[tuple[str, Outcome]]:
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last one of a measurement that was ended
        yield fields.pop("sources"), Outcome(**fields)
