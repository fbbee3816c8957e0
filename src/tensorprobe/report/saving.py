"""Writes a comparison into a folder: the verdict, the table, on demand a workbook."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from tensorprobe.compare import comparison as room
from tensorprobe.compare.comparison import Comparison
from tensorprobe.report.columns import table
from tensorprobe.report.csv import write_csv
from tensorprobe.store.outputs import check_output

VERDICT_FILE = "verdict.json"
CSV_FILE = "comparison.csv"
XLSX_FILE = "comparison.xlsx"

_P = ParamSpec("_P")


class Report(Comparison):
    """What two captures have in common and where they part, with files to show for it.

    comparison = tp.compare("runs/npu", "runs/cpu")
    print(comparison.verdict)
    comparison.save("report/")
    """

    def save(
        self, folder: str | os.PathLike[str], *, columns: str = "native", xlsx: bool = False
    ) -> list[Path]:
        """Write verdict.json and comparison.csv into a folder, with `xlsx` a workbook too."""
        return save(self, Path(folder), columns=columns, xlsx=xlsx)


def _with_files(function: Callable[_P, Comparison]) -> Callable[_P, Report]:
    @functools.wraps(function)
    def compare(*args: _P.args, **options: _P.kwargs) -> Report:
        c = function(*args, **options)
        return Report(c.actual, c.expected, c.pairs, c.verdict, c.structure)

    return compare


compare = _with_files(room.compare)


def save(
    comparison: Comparison, folder: Path, *, columns: str = "native", xlsx: bool = False
) -> list[Path]:
    """Write the files and give their paths."""
    rows = table(comparison, columns)  # first: an unknown name must not leave half a report
    check_output(folder, comparison.actual.path, comparison.expected.path)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / VERDICT_FILE, folder / CSV_FILE]
    text = json.dumps(comparison.verdict.to_json(), indent=1, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    write_csv(paths[1], rows)
    if xlsx:
        from tensorprobe.report.xlsx import write_xlsx

        paths.append(folder / XLSX_FILE)
        write_xlsx(paths[2], comparison, columns)
    return paths
