"""A comparison as comma-separated values that no spreadsheet takes for formulas."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path

from tensorprobe.report.rows import Cell, Table

_STARTS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?")


def write_csv(path: Path, table: Table) -> None:
    """Write a table; its rows are made while they are written, so any number will do."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.header)
        writer.writerows(_cells(row) for row, _ in table.rows)


def _cells(row: Iterable[Cell]) -> list[Cell]:
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
