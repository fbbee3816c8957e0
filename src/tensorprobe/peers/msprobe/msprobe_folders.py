"""Where in a path msprobe's dumps are: at any depth, and whose they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tensorprobe.peers.foreign_records import numbered
from tensorprobe.records import Gap
from tensorprobe.store.loading import UNFINISHED
from tensorprobe.tensors.opening import open_file

DUMP_FILE = "dump.json"
DEBUG_FILE = "debug.json"
STACK_FILE = "stack.json"
CONSTRUCT_FILE = "construct.json"
DATA_FOLDER = "dump_tensor_data"
STEP = re.compile(r"step(\d+)")
RANK = re.compile(r"rank(\d+)")
# A process without a rank: "proc4711", until 2026 just "rank".
PROCESS = re.compile(r"(?:proc(?=\d)|rank(?!\d))(\d*)")
# Other tools have a dump.json too: these keys are on top of msprobe's.
_HEAD = re.compile(rb'"(task|level)"\s*:')
_HEAD_NBYTES = 4096


class Unit(NamedTuple):
    """The dump of one step of one rank."""

    step: int
    rank: int
    folder: Path
    root: Path  # of the whole dump: no link may lead out of it


def recognises(path: Path) -> bool:
    """Whether a path is of this layout."""
    return bool(find(path)[0])


def find(path: Path) -> tuple[list[Unit], list[Gap]]:
    """The dumps that a path stands for, and which were left out."""
    folder = path if path.is_dir() else path.parent
    if folder.name == DATA_FOLDER:
        folder = folder.parent
    if path.is_file() and path.parent == folder and path.suffix != ".json":
        return [], []
    gaps: list[Gap] = []
    if _is_dump(folder, folder):
        step, rank = _number(STEP, folder.parent.name), _number(RANK, folder.name)
        return [Unit(step, rank, folder, folder)], gaps
    steps = numbered(folder, STEP, folder)
    if steps:
        units = [unit for step, place in steps for unit in _ranks(step, place, folder, gaps)]
    else:
        units = _ranks(_number(STEP, folder.name), folder, folder, gaps)
    units.sort(key=lambda unit: (unit.rank, unit.step))
    if units and (folder / UNFINISHED).is_dir():
        gaps.append(
            Gap(
                str(folder / UNFINISHED),
                "a step that the run did not finish; "
                "to see it: tensorprobe convert "
                f"{shlex.quote(str(folder / UNFINISHED))} --to msprobe -o OUT",
            )
        )
    return units, gaps


def _ranks(step: int, folder: Path, root: Path, gaps: list[Gap]) -> list[Unit]:
    """The ranks of a step; processes without a rank are one each, and the newest is taken."""
    places = numbered(folder, RANK, root)
    ranks = [Unit(step, rank, place, root) for rank, place in places if _is_dump(place, root)]
    processes = [p for _, p in numbered(folder, PROCESS, root) if _is_dump(p, root)]
    processes.sort(key=_written)
    if processes and not ranks:
        ranks.append(Unit(step, 0, processes.pop(), root))
    reason = "of an earlier process, and left out; it can be read by its own path"
    gaps += [Gap(f"{folder.name}/{place.name}", reason, step) for place in processes]
    return ranks


def _is_dump(folder: Path, root: Path) -> bool:
    for name in (DUMP_FILE, DEBUG_FILE):
        path = folder / name
        if path.exists():
            with open_file(path, root) as file:
                head = file.read(_HEAD_NBYTES).replace(b"\0", b"")  # UTF-16 has every second
            if len(set(_HEAD.findall(head))) == 2:
                return True
    return False


def _written(folder: Path) -> tuple[float, str]:
    path = folder / DUMP_FILE
    return (path if path.exists() else folder / DEBUG_FILE).stat().st_mtime, folder.name


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match and len(match[1]) < 10 else 0
