"""A comparison as a workbook: colours, a header that stays, filters, and nothing that runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.errors import MissingDependency, TensorprobeError
from tensorprobe.report.columns import table
from tensorprobe.report.table import Cell, Table

MAX_ROWS = 1_048_576  # of a sheet, with its header
_COLOURS = {"bad": "#F8CBAD", "warn": "#FFF2CC", "good": "#E2EFDA"}
_MAX_TEXT = 32_767


class TooManyRows(TensorprobeError):
    """A workbook cannot have so many."""


def write_xlsx(path: Path, comparison: Compared, columns: str = "native") -> None:
    """Write the verdict and the table; more rows than a sheet takes are refused."""
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
    n = _n_rows(comparison)
    if n >= MAX_ROWS:
        raise TooManyRows(
            f"comparison.xlsx would have {n:,} rows, and a sheet takes {MAX_ROWS - 1:,}: not "
            "written. comparison.csv has them all; or compare less: `rank=N`, `step=N`"
        )
    with xlsxwriter.Workbook(str(path), options) as book:
        _verdict_sheet(book, comparison)
        _table_sheet(book, table(comparison, columns))


def _n_rows(comparison: Compared) -> int:
    if isinstance(comparison.pairs, PairsOfRanks):
        return comparison.pairs.n_rows
    return sum(len(pair.tensors) or 1 for pair in comparison.pairs)


def _verdict_sheet(book: Any, comparison: Compared) -> None:
    sheet = book.add_worksheet("verdict")
    sheet.set_column(0, 0, 120)
    for i, line in enumerate(str(comparison.verdict).splitlines()):
        sheet.write_string(i, 0, line[:_MAX_TEXT])


def _table_sheet(book: Any, found: Table) -> None:
    bold = book.add_format({"bold": True, "bottom": 1})
    formats = {name: book.add_format({"bg_color": colour}) for name, colour in _COLOURS.items()}
    sheet = book.add_worksheet("comparison")
    sheet.freeze_panes(1, 0)
    for column, title in enumerate(found.header):
        sheet.set_column(column, column, max(10, min(len(title) + 2, 24)))
        sheet.write_string(0, column, title, bold)
    n = 0
    for n, (row, colour) in enumerate(found.rows, 1):
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
