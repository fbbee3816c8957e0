"""A comparison as a workbook: colours, a header that stays, filters, and nothing that runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from tensorprobe.comparing.comparison import Compared
from tensorprobe.errors import MissingDependency
from tensorprobe.report.columns import table
from tensorprobe.report.table import Cell, Table

MAX_ROWS = 1_048_576  # of a sheet, with its header
_COLOURS = {"bad": "#F8CBAD", "warn": "#FFF2CC", "good": "#E2EFDA"}
_MAX_TEXT = 32_767


def write_xlsx(path: Path, comparison: Compared, columns: str = "native") -> None:
    """Write the verdict and the table; more rows than a sheet takes go on in further sheets."""
    try:
        import xlsxwriter
    except ImportError:
        raise MissingDependency("XlsxWriter", "a workbook (`xlsx=True`)", "xlsx") from None
    options = {
        "constant_memory": True,
        "strings_to_formulas": False,
        "strings_to_urls": False,
        "strings_to_numbers": False,
        "nan_inf_to_errors": False,
    }
    with xlsxwriter.Workbook(str(path), options) as book:
        _verdict_sheet(book, comparison)
        _table_sheets(book, table(comparison, columns))


def _verdict_sheet(book: Any, comparison: Compared) -> None:
    sheet = book.add_worksheet("verdict")
    sheet.set_column(0, 0, 120)
    for i, line in enumerate(str(comparison.verdict).splitlines()):
        sheet.write_string(i, 0, line[:_MAX_TEXT])


def _table_sheets(book: Any, found: Table) -> None:
    bold = book.add_format({"bold": True, "bottom": 1})
    formats = {name: book.add_format({"bg_color": colour}) for name, colour in _COLOURS.items()}
    rows = iter(found.rows)
    for number in itertools.count(1):
        part = itertools.islice(rows, MAX_ROWS - 1)
        first = next(part, None)
        if first is None and number > 1:
            return
        sheet = book.add_worksheet("comparison" if number == 1 else f"comparison {number}")
        sheet.freeze_panes(1, 0)
        for column, title in enumerate(found.header):
            sheet.set_column(column, column, max(10, min(len(title) + 2, 24)))
            sheet.write_string(0, column, title, bold)
        n = 0
        for n, (row, colour) in enumerate(itertools.chain([first] if first else [], part), 1):
            style = formats.get(colour)
            for column, cell in enumerate(row):
                _write(sheet, n, column, cell, style)
        sheet.autofilter(0, 0, n, len(found.header) - 1)


def _write(sheet: Any, row: int, column: int, cell: Cell, style: Any) -> None:
    if cell is None or cell == "":
        if style is not None:
            sheet.write_blank(row, column, None, style)
    elif isinstance(cell, bool):
        sheet.write_boolean(row, column, cell, style)
    elif isinstance(cell, str):
        sheet.write_string(row, column, cell[:_MAX_TEXT], style)
    elif (isinstance(cell, float) and not math.isfinite(cell)) or (
        isinstance(cell, int) and abs(cell) >= 2**53
    ):
        sheet.write_string(row, column, str(cell), style)
    else:
        sheet.write_number(row, column, cell, style)
