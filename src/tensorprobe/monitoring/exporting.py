"""What a monitor has written, in the files of other tools: CSV, Parquet, TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from tensorprobe.errors import BadUsage
from tensorprobe.monitoring.event_files import EventFile
from tensorprobe.monitoring.parquet_steps import pyarrow, write_parquet
from tensorprobe.monitoring.scalar_writers import scalars_of
from tensorprobe.monitoring.series import COLUMNS, UPDATE_COLUMNS
from tensorprobe.monitoring.series_reading import rank_folders, read_steps
from tensorprobe.store.outputs import make_folder

_MOST_TOLD = 100
TARGETS = ("csv", "parquet", "tensorboard")
_NUMBERS = tuple(dict.fromkeys((*COLUMNS, *UPDATE_COLUMNS)))


def export(path: Path, target: str, output: Path, tell: Callable[[str], None]) -> list[Path]:
    """Write the steps of each rank; gives the files or folders."""
    ranks = rank_folders(path)
    if not ranks:
        raise BadUsage(f"'{path}' is no folder of a monitor: expected one with rank0 in it")
    if target == "parquet":
        pyarrow()
    output.mkdir(parents=True, exist_ok=True)
    tell = _some(tell)
    made = []
    for rank, folder in ranks:
        if target == "tensorboard":
            made.append(output / f"rank{rank}")
            make_folder(made[-1])
            events = EventFile(made[-1])
            for step in read_steps(folder, tell):
                events.write(step.step, scalars_of(step, whole=True), step.time)
            events.close()
        elif target == "parquet":
            made.append(output / f"rank{rank}.parquet")
            write_parquet(made[-1], read_steps(folder, tell))
        else:
            made.append(output / f"rank{rank}.csv")
            _write_csv(made[-1], folder, tell)
    return made


def _write_csv(path: Path, folder: Path, tell: Callable[[str], None]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "time", "kind", "name", "value", *_NUMBERS])
        for step in read_steps(folder, tell):
            for name, value in step.scalars.items():
                writer.writerow([step.step, step.time, "scalar", name, value])
            for kind, table in step.tables.items():
                columns = [table.columns.get(name) for name in _NUMBERS]
                for row, name in enumerate(table.names):
                    numbers = ["" if each is None else float(each[row]) for each in columns]
                    writer.writerow([step.step, step.time, kind, _plain(name), "", *numbers])


def _some(tell: Callable[[str], None]) -> Callable[[str], None]:
    """The first of what is damaged; a file may have millions of lines."""
    told = 0

    def some(text: str) -> None:
        nonlocal told
        told += 1
        if told <= _MOST_TOLD:
            tell(text)
        elif told == _MOST_TOLD + 1:
            tell("and more that is damaged")

    return some


def _plain(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t") else name
