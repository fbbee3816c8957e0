"""The tables of a comparison: a header and rows of cells, in columns that a user names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorprobe.parts import NamedParts

if TYPE_CHECKING:
    from tensorprobe.comparing.comparison import Compared
    from tensorprobe.report.table import Table

# The module of each: `table(comparison)` gives a Table.
COLUMNS = NamedParts(
    "columns",
    {
        "native": "tensorprobe.report.native_columns",
        "ptdbg": "tensorprobe.peers.ptdbg.ptdbg_columns",
        "msprobe": "tensorprobe.peers.msprobe.msprobe_columns",
    },
)


def table(comparison: Compared, columns: str = "native") -> Table:
    """The rows of a comparison, in the columns of that name."""
    made: Table = COLUMNS.module(columns).table(comparison)
    return made
