"""Steps as lines of JSON: a line of names where they are new, and a line for each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from tensorprobe.monitoring.series import COLUMNS, COUNTS, UPDATE_COLUMNS, StepTable, StepValues
from tensorprobe.tensors.opening import open_file, split_lines

FORMAT = 1
MAX_LINE_NBYTES = 64 << 20
_MAX_STEP = 1 << 53
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
_KNOWN_COLUMNS = frozenset((*COLUMNS, *UPDATE_COLUMNS))


class StepEncoder:
    """Makes the lines of one file; each file has the names that its steps refer to."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self.beginning = _encode({"format": FORMAT, "kind": "monitor", **header})

    def lines(self, step: StepValues) -> bytes:
        """The lines that a step adds."""
        made = bytearray()
        tables: dict[str, Any] = {}
        for kind, table in step.tables.items():
            number = self._numbers.get(table.names)
            if number is None:
                number = self._numbers[table.names] = len(self._numbers)
                made += _encode({"names": number, "list": table.names})
            tables[kind] = {"names": number, **dict(_columns(table))}
        scalars = {name: _scalar(value) for name, value in step.scalars.items()}
        line = {"step": step.step, "time": step.time, "scalars": scalars, "tables": tables}
        made += _encode(line)
        return bytes(made)


def _columns(table: StepTable) -> Iterator[tuple[str, list[float]]]:
    for name, column in table.columns.items():
        if name in COUNTS:
            if column.any():
                yield name, [int(each) if each == each else 0 for each in column.tolist()]
        else:
            yield name, column.tolist()  # NaN and infinity become null


def _scalar(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def read_lines(path: Path, root: Path, tell: Any) -> Iterator[StepValues]:
    """The steps of a file, as far as it was written; `tell` is given what is damaged."""
    with open_file(path, root) as file:
        yield from _read(file, path, tell)


def _read(file: BinaryIO, path: Path, tell: Any) -> Iterator[StepValues]:
    decoder = _Decoder()
    for number, line in enumerate(split_lines(file, MAX_LINE_NBYTES), 1):
        place = f"{path.name}, line {number}"
        if line is None:
            tell(f"{place}: longer than {MAX_LINE_NBYTES} bytes")
            continue
        if not line.endswith(b"\n"):
            tell(f"{place}: cut off while it was written")
            return
        try:
            step = decoder.step(line)
            if step is not None:
                yield step
        except _NoSteps as error:
            tell(f"{path.name}: {error}")
            return
        except _DAMAGED as error:
            tell(f"{place}: {type(error).__name__}: {error}"[:300])


class StepTail:
    """Reads a file that grows: each time the steps that were added."""

    def __init__(self, path: Path, root: Path) -> None:
        self._file = open_file(path, root)
        self._decoder = _Decoder()
        self._rest = b""

    def read(self) -> list[StepValues]:
        """The steps that are there by now and were not given yet."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        found = []
        for line in lines:
            try:
                step = self._decoder.step(line)
            except _DAMAGED:
                continue
            if step is not None:
                found.append(step)
        return found

    def close(self) -> None:
        self._file.close()


class _NoSteps(ValueError):
    """A file that is not of a monitor."""


class _Decoder:
    """Reads the lines of one file in their order."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, ...]] = {}
        self._begun = False

    def step(self, line: bytes) -> StepValues | None:
        """The step of a line; None for one that has something else."""
        found = msgspec.json.decode(line)
        if not self._begun:
            is_ours = isinstance(found, dict) and found.get("kind") == "monitor"
            if not is_ours or found.get("format") != FORMAT:
                raise _NoSteps(f"no file of a monitor, or of another format than {FORMAT}")
            self._begun = True
        elif not isinstance(found, dict):
            raise ValueError("expected an object")
        elif "list" in found:
            self._names[int(found["names"])] = tuple(str(each) for each in found["list"])
        elif "step" in found:
            return _step(found, self._names)
        return None


def _step(line: dict[str, Any], names: dict[int, tuple[str, ...]]) -> StepValues:
    scalars = {str(name): float(value) for name, value in line["scalars"].items()}
    tables = {}
    for kind, columns in line["tables"].items():
        rows = names[columns["names"]]
        held = {
            name: _column(values, len(rows))
            for name, values in columns.items()
            if name in _KNOWN_COLUMNS
        }
        if not held:  # each row has a number in its line; names alone would be rows for nothing
            raise ValueError(f"a table of {str(kind)[:40]} without numbers")
        for name in COUNTS if "count" in held else ():
            held.setdefault(name, np.zeros(len(rows)))
        tables[str(kind)] = StepTable(rows, held)
    step = int(line["step"])
    if abs(step) > _MAX_STEP:
        raise ValueError("a step beyond all numbers")
    return StepValues(step, float(line["time"]), scalars, tables)


def _column(values: Iterable[Any], length: int) -> Any:
    made = np.array([math.nan if each is None else each for each in values], float)
    if made.shape != (length,):
        raise ValueError(f"a column has {made.shape} numbers; expected {length}")
    return made
