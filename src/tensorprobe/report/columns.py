"""The tables of a comparison: a header and rows of cells, in columns that a user names."""

from __future__ import annotations

from collections.abc import Callable

from tensorprobe.compare.comparison import Comparison
from tensorprobe.errors import BadUsage
from tensorprobe.report import msprobe_columns, native_columns, ptdbg_columns
from tensorprobe.report.table import Table


def table(comparison: Comparison, columns: str = "native") -> Table:
    """The rows of a comparison, in the columns of `native`, `ptdbg` or `msprobe`."""
    kinds: dict[str, Callable[[Comparison], Table]] = {
        "native": native_columns.table,
        "ptdbg": ptdbg_columns.table,
        "msprobe": msprobe_columns.table,
    }
    if columns not in kinds:
        raise BadUsage(f"--columns {columns}: expected one of {', '.join(kinds)}")
    return kinds[columns](comparison)
