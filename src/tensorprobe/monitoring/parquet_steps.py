"""Steps as Parquet files, which pandas, polars and others open; pyarrow is an extra."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.errors import MissingDependency
from tensorprobe.monitoring.series import COLUMNS, UPDATE_COLUMNS, StepTable, StepValues
from tensorprobe.tensors.opening import open_file

_NUMBERS = tuple(dict.fromkeys((*COLUMNS, *UPDATE_COLUMNS)))


def pyarrow() -> Any:
    """pyarrow and its part for Parquet; MissingDependency names the extra."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise MissingDependency("pyarrow", "a Parquet file of a monitor", "monitor") from None


def write_parquet(path: Path, steps: Iterable[StepValues]) -> None:
    """A row for each scalar and each tensor of each step."""
    arrow = pyarrow()
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "time", "kind", "name", "value")}
    numbers: dict[str, list[Any]] = {name: [] for name in _NUMBERS}

    def add(step: StepValues, kind: str, names: tuple[str, ...], table: StepTable | None) -> None:
        columns["step"] += [step.step] * len(names)
        columns["time"] += [step.time] * len(names)
        columns["kind"] += [kind] * len(names)
        columns["name"] += names
        scalars = [step.scalars[name] if table is None else None for name in names]
        columns["value"] += scalars
        for name in _NUMBERS:
            column = None if table is None else table.columns.get(name)
            numbers[name] += [None] * len(names) if column is None else column.tolist()

    for step in steps:
        add(step, "scalar", tuple(step.scalars), None)
        if not step.scalars and not step.tables:
            continue
        for kind, table in step.tables.items():
            add(step, kind, table.names, table)
    text = arrow.dictionary(arrow.int32(), arrow.string())
    double = arrow.float64()
    table = arrow.table(
        {
            "step": arrow.array(columns["step"], arrow.int64()),
            "time": arrow.array(columns["time"], double),
            "kind": arrow.array(columns["kind"], arrow.string()).cast(text),
            "name": arrow.array(columns["name"], arrow.string()).cast(text),
            "value": arrow.array(columns["value"], double),
            **{name: arrow.array(values, double) for name, values in numbers.items()},
        }
    )
    arrow.parquet.write_table(table, path, compression="zstd")


def read_parquet(path: Path, root: Path, tell: Any) -> Iterator[StepValues]:
    """The steps of a file; `tell` is given what is damaged."""
    arrow = pyarrow()
    try:
        with open_file(path, root) as file:
            table = arrow.parquet.read_table(file)
        columns = {
            name: table.column(name).to_pylist() for name in ("step", "time", "kind", "name")
        }
        values = _floats(table.column("value"))
        numbers = {
            name: _floats(table.column(name)) for name in _NUMBERS if name in table.column_names
        }
    except (arrow.ArrowException, ValueError, KeyError, TypeError, OSError) as error:
        tell(f"{path.name}: {type(error).__name__}: {error}"[:300])
        return
    start = 0
    steps = columns["step"]
    while start < len(steps):
        end = start
        while end < len(steps) and steps[end] == steps[start]:
            end += 1
        yield _step(columns, values, numbers, start, end)
        start = end


def _floats(column: Any) -> Any:
    return np.array([math.nan if each is None else each for each in column.to_pylist()], float)


def _step(columns: dict[str, list[Any]], values: Any, numbers: Any, start: int, end: int) -> Any:
    kinds, names = columns["kind"], columns["name"]
    scalars = {
        names[row]: float(values[row]) for row in range(start, end) if kinds[row] == "scalar"
    }
    tables = {}
    row = start
    while row < end:
        last = row
        while last < end and kinds[last] == kinds[row]:
            last += 1
        if kinds[row] != "scalar":
            wanted = UPDATE_COLUMNS if kinds[row] == "update" else COLUMNS
            held = {name: numbers[name][row:last] for name in wanted if name in numbers}
            tables[kinds[row]] = StepTable(tuple(names[row:last]), held)
        row = last
    return StepValues(int(columns["step"][start]), float(columns["time"][start]), scalars, tables)
