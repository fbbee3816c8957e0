"""Writes a comparison into a folder: the verdict, the table, on demand a workbook."""

from __future__ import annotations

import json
from pathlib import Path

from tensorprobe.compare.comparison import VERDICT_FILE, Comparison, require_folder
from tensorprobe.report.columns import table
from tensorprobe.report.csv import write_csv

CSV_FILE = "comparison.csv"
XLSX_FILE = "comparison.xlsx"


def save(
    comparison: Comparison, folder: Path, *, columns: str = "native", xlsx: bool = False
) -> list[Path]:
    """Write the files and give their paths."""
    rows = table(comparison, columns)  # first: an unknown name must not leave half a report
    folder = require_folder(folder)
    paths = [folder / VERDICT_FILE, folder / CSV_FILE]
    text = json.dumps(comparison.verdict.to_json(), indent=1, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    write_csv(paths[1], rows)
    if xlsx:
        from tensorprobe.report.xlsx import write_xlsx

        paths.append(folder / XLSX_FILE)
        write_xlsx(paths[2], comparison, columns)
    return paths
