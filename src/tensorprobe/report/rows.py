"""What a table is made of: a header, and rows of cells with a colour word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Cell = str | int | float | bool | None
Row = tuple[Cell, ...]


class Table(NamedTuple):
    """A header, and for every row its cells and a colour word: "", "good", "warn" or "bad"."""

    header: tuple[str, ...]
    rows: Iterator[tuple[Row, str]]
