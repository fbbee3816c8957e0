"""Comma-separated values: the quick way gives what the csv module gives, and no formula."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.report.csv import write_csv
from tensorprobe.report.table import Table

TEXTS = [
    "", "plain", "a,b", ",null", "x,true", "=1+1", 'quo"te', "back\\slash", "line\nbreak", "null",
    "+1", "-1", "-x", "@SUM(A1)", "\t=1", "|cmd", "%x", "'=1", "nan", "inf", "ünïcode", "[64, 64]",
]  # fmt: skip
CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.sampled_from(TEXTS)
)


def written(path: Path, rows: list[tuple[Any, ...]], free: tuple[int, ...] | None) -> list[Any]:
    table = Table(tuple(f"c{i}" for i in range(len(rows[0]))), ((row, "") for row in rows), free)
    write_csv(path, table)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def same(mine: str, other: str) -> bool:
    try:
        return math.isclose(float(mine), float(other), rel_tol=0) or "nan" in (mine, other)
    except ValueError:
        return mine == other


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 9), CELLS, CELLS, CELLS), min_size=1, max_size=8))
def test_the_quick_way_gives_the_same_cells(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    free = (1, 2, 3)
    quick = written(folder / "quick.csv", rows, free)
    slow = written(folder / "slow.csv", rows, None)
    for mine, other in zip(quick, slow, strict=True):
        assert all(map(same, mine, other)), (mine, other)


@pytest.mark.parametrize("free", [(1,), None])
@pytest.mark.parametrize("text", TEXTS)
def test_no_cell_begins_like_a_formula(
    tmp_path: Path, text: str, free: tuple[int, ...] | None
) -> None:
    ((_, cell),) = written(tmp_path / "t.csv", [(1, text)], free)
    assert cell.lstrip("'") == text.lstrip("'")
    assert not cell.startswith(("=", "+", "@", "\t", "|", "%")) or cell == "+1"
    assert not cell.startswith("-") or cell == "-1"


def test_infinities_are_no_formulas_either(tmp_path: Path) -> None:
    rows = [(1, -math.inf, math.inf, math.nan, None, True, 1e-7)]
    assert written(tmp_path / "t.csv", rows, ()) == [
        ["1", " -inf", " inf", "nan", "", "True", "1e-07"]
    ]
