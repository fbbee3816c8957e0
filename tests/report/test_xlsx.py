"""The workbook: colours, a header that stays, filters, and more rows than a sheet takes."""

from __future__ import annotations

from pathlib import Path

import openpyxl
import pytest
import torch

import tensorprobe as tp
from recorded import record
from tensorprobe.errors import TensorprobeError
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


def test_more_rows_than_a_sheet_takes_are_refused_in_one_line(
    found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_rows = sum(1 for _ in found.rows)
    monkeypatch.setattr(xlsx, "MAX_ROWS", n_rows)
    with pytest.raises(TensorprobeError) as refused:
        found.save(tmp_path / "out", xlsx=True)
    assert str(refused.value).startswith(
        f"comparison.xlsx would have {n_rows} rows, and a sheet takes {n_rows - 1}: not written."
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"verdict.json", "comparison.csv", "report.html"}
    assert "comparison.xlsx" not in names
    monkeypatch.setattr(xlsx, "MAX_ROWS", n_rows + 1)
    found.save(tmp_path / "out", xlsx=True)
    sheet = openpyxl.load_workbook(tmp_path / "out" / "comparison.xlsx")["comparison"]
    assert sheet.max_row - 1 == n_rows
    assert sheet.freeze_panes == "A2"
    assert sheet.auto_filter.ref


def test_the_culprit_has_a_colour_of_its_own(found: Comparison, tmp_path: Path) -> None:
    found.save(tmp_path / "out", xlsx=True)
    sheet = openpyxl.load_workbook(tmp_path / "out" / "comparison.xlsx")["comparison"]
    notes = [str(row[-1].value or "") for row in sheet.iter_rows(min_row=2)]
    colours = [row[0].fill.fgColor.rgb for row in sheet.iter_rows(min_row=2)]
    blamed = {colour for note, colour in zip(notes, colours, strict=True) if "culprit" in note}
    assert blamed == {"FFF8CBAD"}
    assert len(set(colours)) > 1
