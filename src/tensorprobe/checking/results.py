"""The rows of a check on disk: appended as they come, so that a check can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.checking.row import Row
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file, open_named, read_text

FORMAT = 1
_ROWS = "rows.jsonl"
_ORDER = {"fail": 0, "crashed": 1, "skipped": 2, "pass": 3}


def _decoded(line: bytes) -> dict[str, Any]:
    """What an earlier check was about; nothing where that cannot be told."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


class CheckResults:
    """The output folder of a check; what an earlier one of the same kind left in it is kept."""

    def __init__(self, folder: Path, about: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = folder
        self.rows: dict[tuple[int, int, str], Row] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / _ROWS
        self._about = dict(about)
        if self._file.exists() and not restart:
            self._take_up()
        else:
            self._file.write_bytes(json.dumps(self._about).encode() + b"\n")

    def _take_up(self) -> None:
        lines = read_text(open_file(self._file), self._file).splitlines()
        before = _decoded(lines[0]) if lines else {}
        if before != self._about and len(lines) < 2:  # it never came to its first call
            self._file.write_bytes(json.dumps(self._about).encode() + b"\n")
            return
        if before != self._about:
            changed = [key for key in self._about if self._about[key] != before.get(key)]
            raise BadUsage(
                f"'{self.folder}' holds another check ({', '.join(changed)} differ): "
                "give another `path`, or `restart=True`"
            )
        for line in lines[1:]:
            try:
                row = msgspec.json.decode(line, type=Row)
            except (ValueError, RecursionError):
                continue  # the last line, cut off when the check was killed
            self.rows[key_of(row)] = row

    def add(self, row: Row) -> None:
        self.rows[key_of(row)] = row
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def finish(self, calls: int, notes: Sequence[str] = ()) -> dict[str, int]:
        """Write check.json, failures first; gives the counts."""
        rows = ordered(self.rows.values())
        counts = {"calls": calls, "checked": len(rows)}
        counts |= dict.fromkeys(("pass", "fail", "skipped", "crashed"), 0)
        for row in rows:
            counts[row.verdict] += 1
        about = {**self._about, "notes": notes}
        report = {**about, "format": FORMAT, "counts": counts, "calls": rows}
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        (self.folder / "check.json").write_bytes(text + b"\n")
        return counts


def key_of(row: Row) -> tuple[int, int, str]:
    return row.step, row.rank, row.name


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Failures first, the worst of them on top."""
    return sorted(
        rows,
        key=lambda row: (
            _ORDER[row.verdict],
            -(row.error if row.error is not None else float("inf")),
            row.name,
        ),
    )


def benchmark_tensors(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What another check says about each tensor, by call and tensor."""
    try:
        report = read_json(open_named(path / "check.json"), path / "check.json")
        return {
            call["name"]: {t["name"]: t for t in call.get("tensors", ())}
            for call in report["calls"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCapture(
            f"'{path}' holds no check.json that can be read: {error}"
        ) from error
