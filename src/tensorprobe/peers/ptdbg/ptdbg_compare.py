"""compare and compare_distributed: dumps in, the guide's tables and advice out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe.comparing.comparison import Compared, compare_captures
from tensorprobe.errors import BadUsage, UnreadableCapture
from tensorprobe.peers.ptdbg import ptdbg_columns
from tensorprobe.peers.ptdbg import ptdbg_layout as ptdbg
from tensorprobe.peers.ptdbg.ptdbg_advice import advise
from tensorprobe.peers.ptdbg.ptdbg_telling import say
from tensorprobe.records import Capture
from tensorprobe.report.csv import write_csv
from tensorprobe.report.table import Table
from tensorprobe.store.loading import load
from tensorprobe.store.outputs import check_writable

AnyPath = str | os.PathLike[str]
_KEYS = (
    "npu_pkl_path",
    "bench_pkl_path",
    "npu_dump_data_dir",
    "bench_dump_data_dir",
    "is_print_compare_log",
)


def compare_dumps(
    given: Mapping[str, Any] | None, output_path: AnyPath, *, auto_analyze: bool, suffix: str
) -> Path:
    """Compare the two dumps that the dict of `compare` names."""
    if not isinstance(given, Mapping):
        raise BadUsage(f"compare({given!r}): expected a dict with {', '.join(_KEYS[:4])}")
    for key in given:
        if key not in _KEYS:
            raise BadUsage(f"compare: unknown key '{key}'; expected {', '.join(_KEYS)}")
    actual, expected = (
        _opened(side, given.get(f"{side}_pkl_path"), given.get(f"{side}_dump_data_dir"))
        for side in ("npu", "bench")
    )
    is_loud = bool(given.get("is_print_compare_log", True))
    folder = _folder(output_path)
    return _compare(actual, expected, folder, _text(suffix), auto_analyze, is_loud)


def _opened(side: str, index: Any, data: Any) -> Capture:
    """One dump; without its data folder, its statistics alone."""
    if not isinstance(index, str | os.PathLike) or not os.fspath(index):
        raise BadUsage(f"compare: '{side}_pkl_path' is missing. Give the dump's .pkl file")
    path = Path(index)
    if not path.exists():
        raise UnreadableCapture(f"'{side}_pkl_path' names '{path}', which is not there")
    folder = None if data in (None, "") else Path(data)
    if folder is not None and not folder.is_dir():
        raise UnreadableCapture(
            f"'{side}_dump_data_dir' names '{folder}', which is no folder. "
            "Leave it out to compare statistics only"
        )
    if not ptdbg.recognises(path):
        return load(path)  # a capture of another kind
    if path.is_dir():
        return ptdbg.read(path)
    calls, gaps = ptdbg.read_index(path, folder)
    return Capture(path, "ptdbg", calls, gaps, {"config": {"level": "L1"}})


def compare_ranks(
    npu_dump_dir: AnyPath,
    bench_dump_dir: AnyPath,
    output_path: AnyPath,
    *,
    auto_analyze: bool,
    suffix: str,
    is_loud: bool,
) -> list[Path]:
    """Compare rank by rank, by number; ranks that one side lacks are named."""
    ours, theirs = _units("npu_dump_dir", npu_dump_dir), _units("bench_dump_dir", bench_dump_dir)
    pairs = [(key, key) for key in sorted(ours.keys() & theirs.keys())]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(next(iter(ours)), next(iter(theirs)))]  # one process each: it is the same
    paired = {key for pair in pairs for key in pair}
    for name, units in (("npu_dump_dir", ours), ("bench_dump_dir", theirs)):
        missing = [str(unit) for unit in sorted(units) if unit not in paired]
        if missing:
            say(f"only in {name}, not compared: {', '.join(missing)}")
    if not pairs:
        raise UnreadableCapture(
            f"nothing to compare: '{npu_dump_dir}' has {_list(ours)}, "
            f"'{bench_dump_dir}' has {_list(theirs)}"
        )
    folder = _folder(output_path)
    several_steps = len({unit.step for unit in ours}) > 1
    tables = []
    for mine, other in pairs:
        parts = [_text(suffix), f"step{mine.step}" if several_steps else ""]
        parts.append(f"rank{mine.rank}-rank{other.rank}")
        name = "_".join(part for part in parts if part)
        sides = (ptdbg.read(ours[mine]), ptdbg.read(theirs[other]))
        tables.append(_compare(*sides, folder, name, auto_analyze, is_loud))
    return tables


class _Unit(NamedTuple):
    """One rank in one step."""

    step: int
    rank: int

    def __str__(self) -> str:
        return f"rank{self.rank}" + (f" of step{self.step}" if self.step else "")


def _list(units: Mapping[_Unit, Path]) -> str:
    return ", ".join(str(unit) for unit in sorted(units)) or "no ranks"


def _units(name: str, folder: AnyPath) -> dict[_Unit, Path]:
    """The dumps below a folder, by step and rank; what else lies there does not matter."""
    path = Path(folder)
    if not path.is_dir():
        raise UnreadableCapture(f"{name} names '{path}', which is no folder")
    found = ptdbg.find(path)
    if not found:
        raise UnreadableCapture(
            f"{name} names '{path}', which holds no dump: expected folders rank0, rank1, ... with "
            "one .pkl each"
        )
    return {_Unit(dump.step, dump.rank): dump.path for dump in found}


def _compare(
    actual: Capture,
    expected: Capture,
    folder: Path,
    suffix: str,
    auto_analyze: bool,
    is_loud: bool,
) -> Path:
    comparison = compare_captures(actual, expected, replay=False)
    table = ptdbg_columns.table(comparison)
    rows = list(table.rows)
    path, stamp = _free_name(folder, suffix)
    write_csv(path, Table(table.header, iter(rows)))
    if auto_analyze:
        advice = advise(comparison, table.header, [row for row, _ in rows])
        name = f"advisor_{suffix}_{stamp}.txt" if suffix else f"advisor_{stamp}.txt"
        (folder / name).write_text(advice.text(), encoding="utf-8")
        if is_loud:
            say(advice.text().rstrip())
    if is_loud:
        say(f"{len(rows)} rows compared{_problems(comparison)}: {path}")
    return path


def _problems(comparison: Compared) -> str:
    gaps = comparison.verdict.counts["gaps"]
    return f", {gaps} records of the dumps could not be read" if gaps else ""


def _folder(output_path: AnyPath) -> Path:
    folder = Path(output_path)
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _text(suffix: object) -> str:
    if not isinstance(suffix, str) or os.sep in suffix:
        raise BadUsage(f"suffix={suffix!r}: expected a part of a file's name")
    return suffix.strip("_")


def _free_name(folder: Path, suffix: str) -> tuple[Path, str]:
    """A name nobody has: two comparisons in one second must not share one."""
    now = time.time()
    while True:
        stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
        name = f"compare_result_{suffix}_{stamp}" if suffix else f"compare_result_{stamp}"
        path = folder / f"{name}.csv"
        if not path.exists():
            return path, stamp
        now += 1
