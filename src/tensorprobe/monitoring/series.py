"""What is known of one step of a training: scalars, and a table of numbers for each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# The numbers of a tensor; `norm` and `mean` are over its finite values, the rest counts elements.
COLUMNS = ("norm", "mean", "min", "max", "nan", "inf", "zero", "count")
# Of an update: its L2 norm, and that of the parameter before it.
UPDATE_COLUMNS = ("norm", "before")
COUNTS = frozenset(("nan", "inf", "zero"))  # most are 0, and are not written then

# In the order in which a step makes them: of two that part in one step, the earlier is the cause.
KINDS = (
    "input",  # what the model is given
    "activation",  # what a module returns
    "gradient.local",  # of one rank, before the reduction over ranks
    "gradient.backward",  # when backward has ended: before unscaling and clipping
    "gradient",  # as the optimizer gets it
    "moment",  # moment.exp_avg, moment.momentum_buffer...
    "update",
    "parameter",
)


class StepTable(NamedTuple):
    """Numbers of one kind in one step: a row for each name."""

    names: tuple[str, ...]
    columns: dict[str, Array]

    def column(self, name: str) -> Array:
        """One number of every row; NaN where it is not known."""
        found = self.columns.get(name)
        return np.full(len(self.names), np.nan) if found is None else found

    def rms(self) -> Array:
        """The root mean square of each row: a norm that does not depend on the size."""
        count = self.column("count") - self.column("nan") - self.column("inf")
        with np.errstate(all="ignore"):
            made: Array = self.column("norm") / np.sqrt(count)
        return made


class StepValues(NamedTuple):
    """Everything that is known of a step. `scalars` has loss, loss_scale, lr.0, lr.1..."""

    step: int
    time: float
    scalars: dict[str, float]
    tables: dict[str, StepTable]

    def total_norm(self, kind: str = "gradient") -> float | None:
        """The norm of all rows of a kind together; None where the step has none."""
        table = self.tables.get(kind)
        if table is None or not table.names:
            return None
        return float(np.sqrt(np.nansum(table.column("norm") ** 2)))


def kind_number(kind: str) -> int:
    """Where a kind stands among KINDS; `moment.exp_avg` is a moment."""
    name = kind if kind in KINDS else kind.partition(".")[0]
    return KINDS.index(name) if name in KINDS else len(KINDS)
