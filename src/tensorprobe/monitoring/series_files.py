"""The files of one rank: steps in segments of bounded size, the older ones thinned out."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe.monitoring.monitor_options import FileFormat
from tensorprobe.monitoring.parquet_steps import pyarrow, read_parquet, write_parquet
from tensorprobe.monitoring.series import StepValues
from tensorprobe.monitoring.step_lines import StepEncoder, read_lines

SEGMENTS = 16  # that the space is divided into
_NAME = re.compile(r"steps-(\d{8})-(\d{2})\.(jsonl|parquet)")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Segment(NamedTuple):
    """A file of steps: its number, and how often it was thinned."""

    path: Path
    number: int
    level: int
    nbytes: int


class SeriesFiles:
    """Writes steps as they come, one `write` each, and keeps within `max_disk` bytes.

    The newest segment is always lines of JSON, so that it can be read while it grows and after a
    crash; with the format parquet a segment is written anew as such when it is full. What is
    thinned loses every second step; those in `keep` stay.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_disk: int,
        format: FileFormat = "jsonl",
        header: dict[str, Any],
        keep: Collection[int] = (),
        boundaries: Collection[int] = (),
    ) -> None:
        if format == "parquet":
            pyarrow()  # its absence is said before the program runs
        self.folder = folder
        self._max = max_disk
        self._most = max(1 << 12, max_disk // SEGMENTS)
        self._format = format
        self._header = header
        self._keep = keep
        self._boundaries = boundaries  # segments that are not joined with the one before
        self._file = -1
        self._nbytes = 0
        self._path: Path | None = None
        self._encoder: StepEncoder | None = None
        self._tidying: threading.Thread | None = None
        self._trouble: Exception | None = None  # of the thread that tidies
        found = segments(folder)
        self._next = found[-1].number + 1 if found else 0

    def write(self, step: StepValues) -> None:
        """Add a step; it is in the file when this returns."""
        if self._encoder is None:
            self._open()
        assert self._encoder is not None
        lines = self._encoder.lines(step)
        self._append(lines)
        if self._nbytes >= self._most:
            path = self._end_segment()
            self._wait()  # for the segment before
            # The program does not wait until an old segment is written anew.
            self._tidying = threading.Thread(
                target=self._tidy, args=(path,), name="tensorprobe monitor", daemon=True
            )
            self._tidying.start()

    def close(self) -> None:
        """End the newest segment."""
        path = self._end_segment()
        self._wait()
        if path is not None:
            self._tidy(path)
            self._wait()

    def _end_segment(self) -> Path | None:
        if self._file < 0:
            return None
        os.close(self._file)
        self._file, path = -1, self._path
        self._encoder = None
        if path is not None and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "deleted while it was written", str(path))
        return path

    def _wait(self) -> None:
        if self._tidying is not None:
            self._tidying.join()
            self._tidying = None
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _tidy(self, path: Path) -> None:
        """Write a segment that is full in its last form, and make room."""
        try:
            if self._format == "parquet":
                steps = [*read_lines(path, self.folder, _ignore)]
                if steps:
                    self._replace(path.with_suffix(".parquet"), steps)
                    path.unlink()
            self._thin()
        except Exception as error:  # noqa: BLE001 another thread's: told by the next write
            self._trouble = error

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / _name(self._next, 0, "jsonl")
        self._file = os.open(self._path, _FLAGS, 0o644)
        self._next += 1
        self._nbytes = 0
        self._encoder = StepEncoder(self._header)
        self._append(self._encoder.beginning)

    def _append(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            left = left[os.write(self._file, left) :]
        self._nbytes += len(lines)

    # Thinning

    def _thin(self) -> None:
        """Halve the steps of old segments until there is room for another one."""
        for _ in range(4 * SEGMENTS):
            found = segments(self.folder)
            if self._path is not None and self._file >= 0:
                found = [each for each in found if each.path != self._path]  # being written
            if len(found) < 2 or sum(each.nbytes for each in found) + self._most <= self._max:
                return
            self._halve(self._oldest_for_its_level(found[:-1]), found)

    def _oldest_for_its_level(self, found: list[Segment]) -> Segment:
        """The older, the thinner: a segment is halved when it is twice as old as for its level."""
        aged = [(2.0**-each.level * (len(found) - n), each) for n, each in enumerate(found)]
        return max(aged, key=lambda pair: pair[0])[1]

    def _halve(self, segment: Segment, found: list[Segment]) -> None:
        steps = [*read_segment(segment, self.folder, _ignore)]
        kept = [
            step for number, step in enumerate(steps) if number % 2 == 0 or step.step in self._keep
        ]
        if len(kept) == len(steps) and len(steps) < 2:
            kept = []  # one step that is larger than its share
        older = next((each for each in reversed(found) if each.number < segment.number), None)
        target = segment
        if segment.number in self._boundaries:
            older = None
        if older is not None and older.nbytes + segment.nbytes // 2 < self._most // 2:
            kept = [*read_segment(older, self.folder, _ignore), *kept]
            target = older
        level = min(99, max(segment.level + 1, target.level))
        suffix = "parquet" if self._format == "parquet" else "jsonl"
        path = self.folder / _name(target.number, level, suffix)
        if kept:
            self._replace(path, kept)
        for gone in {segment.path, target.path} - {path}:
            gone.unlink()
        if not kept and path.exists():
            path.unlink()

    def _replace(self, path: Path, steps: list[StepValues]) -> None:
        """The file is whole at every moment."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if path.suffix == ".parquet":
                write_parquet(partial, steps)
            else:
                encoder = StepEncoder(self._header)
                with partial.open("wb") as file:
                    file.write(encoder.beginning)
                    for step in steps:
                        file.write(encoder.lines(step))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def segments(folder: Path) -> list[Segment]:
    """The files of steps in a folder, in order; of one number the thinnest."""
    found: dict[int, Segment] = {}
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is None:
                    continue
                made = Segment(
                    folder / entry.name, int(name[1]), int(name[2]),
                    entry.stat(follow_symlinks=False).st_size,
                )  # fmt: skip
                known = found.get(made.number)
                if known is None or (known.level, known.path.suffix) < (
                    made.level,
                    made.path.suffix,
                ):
                    found[made.number] = made
    return [found[number] for number in sorted(found)]


def read_segment(segment: Segment, root: Path, tell: Callable[[str], None]) -> Iterator[StepValues]:
    """The steps of a file of either form."""
    if segment.path.suffix == ".parquet":
        return read_parquet(segment.path, root, tell)
    return read_lines(segment.path, root, tell)


def last_steps(folder: Path, count: int) -> list[StepValues]:
    """The last steps that were written, for one that goes on."""
    found: list[StepValues] = []
    for segment in reversed(segments(folder)):
        found = [*read_segment(segment, folder, _ignore), *found]
        if len(found) >= count:
            break
    return found[-count:]


def move_aside(folder: Path, names: tuple[str, ...]) -> Path | None:
    """What an earlier run wrote is neither mixed with ours nor lost; says where it went."""
    old = [each.path for each in segments(folder)]
    old += [folder / name for name in names if (folder / name).exists()]
    if not old:
        return None
    numbers = (folder / "earlier" / str(number) for number in itertools.count(1))
    target = next(each for each in numbers if not each.exists())
    target.mkdir(parents=True)
    for path in old:
        path.rename(target / path.name)
    return target


def _name(number: int, level: int, suffix: str) -> str:
    return f"steps-{number:08}-{level:02}.{suffix}"


def _ignore(text: str) -> None:
    """What is damaged stays out."""
