"""How the recording of a rank ended: a small file that has its room on the disk from the start."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tensorprobe.records import Gap
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file

END_FILE = "end.json"
_ROOM_NBYTES = 4096  # taken at the start, so that a disk that is full by the end takes it still


class Ending(msgspec.Struct, omit_defaults=True):
    """What end.json says. While it is recorded, and for ever where the process was killed, a
    recording has not ended. `lost` are calls by step that were seen and are not in the files,
    `torn` the steps of which only values may be missing."""

    ended: bool
    problem: str = ""
    lost: dict[int, int] = {}
    torn: list[int] = []

    def gaps(self, rank: int) -> list[Gap]:
        """What a reader is told is missing."""
        found = [Gap("values", f"not all written: {self.problem}", n, rank) for n in self.torn]
        found += [
            Gap("calls", f"{count} lost: {self.problem}", step, rank)
            for step, count in sorted(self.lost.items())
        ]
        if self.problem and not found:
            found.append(Gap("recording", f"ended early: {self.problem}", rank=rank))
        return found


def write_ending(ending: Ending, rank_fd: int) -> None:
    """Write it over what stands in the file, which keeps its room."""
    text = msgspec.json.encode(ending)
    fd = os.open(END_FILE, os.O_RDWR | os.O_CREAT, 0o644, dir_fd=rank_fd)
    try:
        room = max(_ROOM_NBYTES, os.fstat(fd).st_size)
        os.pwrite(fd, text.ljust(room - 1) + b"\n", 0)
    finally:
        os.close(fd)


def read_ending(folder: Path, root: Path) -> Ending | None:
    """How the recording in a rank's folder ended; None where nothing says so, as in a capture of
    an earlier version. Raises for a file that is none of ours."""
    try:
        file = open_file(folder / END_FILE, root)
    except FileNotFoundError:
        return None
    return msgspec.convert(read_json(file, folder / END_FILE), Ending, strict=False)
