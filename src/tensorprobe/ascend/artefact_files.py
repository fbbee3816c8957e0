"""Foreign files opened without waiting, and folders of them walked without being led out."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tensorprobe.errors import BadArtefact, BadUsage

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class FoundFile(NamedTuple):
    """A file of a folder, and why it must not be read where it must not."""

    path: Path
    problem: str | None = None


def _objection(path: Path, mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    return f"{path}: {kind}; expected a regular file"


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else is refused before it can make us wait."""
    # Opening a device may already do something to it: look first, and again at what was opened.
    problem = _objection(path, os.stat(path).st_mode)
    if problem is not None:
        raise BadArtefact(problem)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(handle, "rb")
    problem = _objection(path, os.fstat(handle).st_mode)
    if problem is not None:
        file.close()
        raise BadArtefact(problem)
    return file


def require_file(path: Path, option: str = "") -> None:
    """Refuse a path of the command line that is no regular file."""
    if not path.exists():
        raise BadUsage(f"{option} {path}: no such file or directory".lstrip())
    open_file(path).close()


def read_file(path: Path, limit: int, what: str) -> bytes:
    """The whole content of a file that is expected to be small."""
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise BadArtefact(f"{path}: {nbytes} bytes; expected {what}: at most {limit}")
        return file.read(limit)


def found_below(
    folder: Path,
    wanted: Callable[[Path], bool],
    *,
    links: bool = False,
    skip: Path | None = None,
) -> Iterator[FoundFile]:
    """The files below a folder whose names are wanted, in order; nothing of the folder `skip`.

    Links to folders are not followed, those to files only with `links`. Links that lead out of
    the folder, and pipes, sockets and devices, come with the reason not to read them.
    """
    home = folder.resolve()
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if _target(Path(where) / n) != skip)
        linked = {name for name in folders if os.path.islink(os.path.join(where, name))}
        for name in sorted([*names, *linked]):
            path = Path(where) / name
            if name not in linked and not wanted(path):
                continue
            problem = _problem(path, home)
            if problem is not None:
                yield FoundFile(path, problem)
            elif name not in linked and path.is_file() and (links or not path.is_symlink()):
                yield FoundFile(path)


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike resolve(), takes a link to itself


def _problem(path: Path, home: Path) -> str | None:
    if path.is_symlink():
        target = _target(path)
        if not target.is_relative_to(home):
            return f"{path}: a link that leads out of its folder, to {target}; copy the file there"
    try:
        mode = os.stat(path).st_mode
    except OSError:  # a link to nothing, or a file that is gone by now
        return None
    return None if stat.S_ISDIR(mode) else _objection(path, mode)


def files_below(
    folder: Path, wanted: Callable[[Path], bool], *, links: bool = False
) -> Iterator[Path]:
    """The files of `found_below`; one that must not be read is an error."""
    for path, problem in found_below(folder, wanted, links=links):
        if problem is not None:
            raise BadArtefact(problem)
        yield path
