"""JSON files of a few pages: what a user names, and the facts of a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tensorprobe.tensors.opening import read_text

MAX_NBYTES = 16 << 20
MAX_DEPTH = 100
TOO_DEEP = f"nested deeper than {MAX_DEPTH}"
_MARK = b"\xef\xbb\xbf"


def read_json(file: BinaryIO, path: Path) -> Any:
    """The value of a file; ValueError says what is wrong with it, BadArtefact that it is huge."""
    text = read_text(file, path, MAX_NBYTES).removeprefix(_MARK)
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """ValueError for what is nested deeper than any document."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        parts = (part.values() if type(part) is dict else part for part in level)
        level = [part for below in parts for part in below if type(part) in (dict, list)]
    raise ValueError(TOO_DEEP)
