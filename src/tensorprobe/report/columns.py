"""The tables of a comparison: a header and rows of cells, in columns that a user names."""

from __future__ import annotations

import importlib

from tensorprobe.comparing.comparison import Compared
from tensorprobe.errors import BadUsage
from tensorprobe.report.table import Table

# Each is a module here, {name}_columns; only the one that is asked for is imported.
KINDS = ("native", "ptdbg", "msprobe")


def table(comparison: Compared, columns: str = "native") -> Table:
    """The rows of a comparison, in the columns of `native`, `ptdbg` or `msprobe`."""
    if columns not in KINDS:
        raise BadUsage(f"columns={columns!r}: expected one of {', '.join(KINDS)}")
    made: Table = importlib.import_module(f"tensorprobe.report.{columns}_columns").table(comparison)
    return made
