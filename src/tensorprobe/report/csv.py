"""A comparison as comma-separated values that no spreadsheet takes for formulas."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

from tensorprobe.report.table import Cell, Row, Table

_STARTS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?")
_BATCH = 1000


def write_csv(path: Path, table: Table) -> None:
    """Write a table; its rows are made while they are written, so any number will do."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(table.header)
        rows = (row for row, _ in table.rows)
        while batch := list(itertools.islice(rows, _BATCH)):
            file.write(_batch_text(batch, table.free))


def _batch_text(rows: list[Row], free: tuple[int, ...] | None) -> str:
    """As written by the csv module; cell by cell only where something needs care."""
    if free is None or any(_is_risky(row, free) for row in rows):
        return _text(_cells(row) for row in rows)
    text = _text(rows)
    if any(word in text for word in (",inf", ",-inf", ",nan")):
        return _text(_cells(row) for row in rows)
    return text


def _text(rows: Iterable[Iterable[Cell]]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _is_risky(row: Row, free: tuple[int, ...]) -> bool:
    for column in free:
        cell = row[column]
        if cell and str(cell)[0] in _STARTS_FORMULA:
            return True
    return False


def _cells(row: Row) -> list[Cell]:
    return [cell if cell is None or type(cell) is int else _safe(cell) for cell in row]


def _safe(cell: Cell) -> Cell:
    if type(cell) is str:
        return safe_text(cell) if cell and cell[0] in _STARTS_FORMULA else cell
    if type(cell) is float and not math.isfinite(cell):
        return "nan" if cell != cell else f" {cell}"  # "-inf" would be read as a formula
    return cell


def safe_text(text: str) -> str:
    """The text with a quote before it where a spreadsheet would take it for a formula."""
    if text.startswith(_STARTS_FORMULA) and not _NUMBER.fullmatch(text):
        return "'" + text
    return text
