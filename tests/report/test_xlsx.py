"""The workbook: colours, a header that stays, filters, and more rows than a sheet takes."""

from __future__ import annotations

from pathlib import Path

import openpyxl
import pytest
import torch

import tensorprobe as tp
from recorded import record
from tensorprobe.report import xlsx
from tensorprobe.report.saving import Comparison


def program(scale: float) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for _ in range(6):
        x = torch.tanh(x) * scale
    x.sum()


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    sides = (("a", 2.0), ("e", 1.0))
    return tp.compare(*(record(tmp_path / name, lambda s=s: program(s)) for name, s in sides))


def test_rows_beyond_a_sheet_go_on_in_the_next(
    found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xlsx, "MAX_ROWS", 10)
    found.save(tmp_path / "out", xlsx=True)
    book = openpyxl.load_workbook(tmp_path / "out" / "comparison.xlsx")
    n_rows = sum(1 for _ in found.rows)
    sheets = [book[name] for name in book.sheetnames if name.startswith("comparison")]
    assert len(sheets) == -(-n_rows // 9) > 1
    assert sum(sheet.max_row - 1 for sheet in sheets) == n_rows
    headers = {tuple(cell.value for cell in sheet[1]) for sheet in sheets}
    assert len(headers) == 1
    assert all(sheet.freeze_panes == "A2" and sheet.auto_filter.ref for sheet in sheets)


def test_the_culprit_has_a_colour_of_its_own(found: Comparison, tmp_path: Path) -> None:
    found.save(tmp_path / "out", xlsx=True)
    sheet = openpyxl.load_workbook(tmp_path / "out" / "comparison.xlsx")["comparison"]
    notes = [str(row[-1].value or "") for row in sheet.iter_rows(min_row=2)]
    colours = [row[0].fill.fgColor.rgb for row in sheet.iter_rows(min_row=2)]
    blamed = {colour for note, colour in zip(notes, colours, strict=True) if "culprit" in note}
    assert blamed == {"FFF8CBAD"}
    assert len(set(colours)) > 1
