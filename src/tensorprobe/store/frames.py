"""Lines of a call's stack: the one that a person wants to read, and the source of one."""

from __future__ import annotations

import functools
import linecache
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.opening import open_named, read_text

_MAX_SOURCE_NBYTES = 16 << 20
_TORCH = f"{os.sep}torch{os.sep}"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")


def users_line(stack: Sequence[str]) -> str:
    """The innermost line that is not torch's own, else the innermost; "" where there is none.

    As the person knows it: from the folder they are in, or from the package it is in.
    """
    line = next((frame for frame in stack if _TORCH not in frame), None) or next(iter(stack), "")
    package = _PACKAGES.match(line)  # not sub, which tries every place of a long line
    return line[package.end() if package else 0 :].removeprefix(os.getcwd() + os.sep)


def source_line(path: str, line: str) -> str:
    """That line of a Python file on this machine, "" where there is none.

    A capture of somebody else may name any file: nothing but Python's is read.
    """
    lines = _source(path)
    number = int(line) if line.isdecimal() and len(line) < 10 else 0
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


@functools.lru_cache(maxsize=256)
def _source(path: str) -> Sequence[str]:
    if path.startswith("<") and path in linecache.cache:  # a cell of IPython
        return linecache.getlines(path)
    if not os.path.isabs(path) or not path.endswith(".py"):
        return ()
    try:
        text = read_text(open_named(Path(path)), Path(path), _MAX_SOURCE_NBYTES)
    except (OSError, ValueError, BadArtefact):
        return ()
    return text.decode(errors="replace").split("\n")


def source_around(path: str, line: str, most: int) -> tuple[int, list[str]]:
    """The number of the first of the lines around that one, and the lines; none as above."""
    lines = _source(path)
    number = int(line) if line.isdecimal() and len(line) < 10 else 0
    if not 0 < number <= len(lines):
        return 0, []
    first = max(1, number - most)
    return first, [each.rstrip() for each in lines[first - 1 : number + most]]
