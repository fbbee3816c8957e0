"""The one way to open a file of a capture: regular ones only, and inside of their folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tensorprobe.errors import BadArtefact

# Without the second, opening a FIFO waits for somebody to write to it.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_CHUNK_NBYTES = 1 << 20


def open_file(path: Path, root: Path | None = None) -> BinaryIO:
    """A file of the capture in `root` (its own folder if that is not given), for reading.

    BadArtefact for what is no regular file, and for a link that leads out; OSError as `open`.
    """
    return _open(path, inside(path, root or path.parent))


def open_named(path: Path) -> BinaryIO:
    """A file that the user named: a link is followed, but it has to be a regular file."""
    return _open(path, Path(os.path.realpath(path)))


def inside(path: Path, root: Path) -> Path:
    """The path, or where it leads if it is a link; BadArtefact where that is out of `root`."""
    is_link = path.is_symlink()
    if is_link or path.parent != root:
        real, base = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath((real, base)) != base:
            raise BadArtefact(
                f"'{path}' is a link that leads out of the capture, to '{real}': not followed. "
                "If you trust it, put a copy there"
            )
        return Path(real) if is_link else path
    return path


def _open(path: Path, place: Path) -> BinaryIO:
    try:
        # Looked at before: opening some devices does something already.
        check_regular(path, place.lstat().st_mode)
        file = os.fdopen(os.open(place, _FLAGS), "rb")
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)  # it may be another by now
    except BadArtefact:
        file.close()
        raise
    return file


def check_regular(path: Path, mode: int) -> None:
    """BadArtefact for what is no regular file, by the mode that `stat` gives."""
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "no regular file")
        raise BadArtefact(f"'{path}' is {kind}; expected a regular file")


def read_text(file: BinaryIO, path: Path, most: int | None = None) -> bytes:
    """All of a text file; BadArtefact where it has holes or more than `most` bytes."""
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise BadArtefact(f"'{path}' has {nbytes} bytes; expected {most} at most")
        if nbytes > _CHUNK_NBYTES and (hole := _seek(file, 0, os.SEEK_HOLE, nbytes)) < nbytes:
            raise BadArtefact(f"'{path}' has a hole at byte {hole}, which no text file has")
        file.seek(0)
        return file.read()


def split_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """The lines of a file with their newlines; None for one of more than `most` bytes.

    The last one is without a newline where it was cut off.
    """
    while line := file.readline(most + 1):
        if len(line) <= most or line.endswith(b"\n"):
            yield line
        else:
            yield None
            _skip_line(file)


def _skip_line(file: BinaryIO) -> None:
    """Go behind the end of a line; holes of the file, which may be huge, are not read."""
    end = os.fstat(file.fileno()).st_size
    while (chunk := file.readline(_CHUNK_NBYTES)) and not chunk.endswith(b"\n"):
        file.seek(_seek(file, file.tell(), os.SEEK_DATA, end))


def _seek(file: BinaryIO, at: int, whence: int, end: int) -> int:
    """Where the next hole, or the next data, begins; `end` if there is none."""
    fd = file.fileno()
    before = os.lseek(fd, 0, os.SEEK_CUR)  # `file` relies on it
    try:
        return os.lseek(fd, at, whence)
    except OSError as error:  # ENXIO: no more data; else a disk that does not tell
        return at if whence == os.SEEK_DATA and error.errno != errno.ENXIO else end
    finally:
        os.lseek(fd, before, os.SEEK_SET)
