"""What program a rank ran: program.json in its folder, written when its first call is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file

PROGRAM_FILE = "program.json"


def write_program(facts: Mapping[str, Any], rank_fd: int) -> None:
    """Write the file; one that is there stays."""
    text = msgspec.json.encode(facts)
    fd = os.open(PROGRAM_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=rank_fd)
    with os.fdopen(fd, "wb") as file:
        file.write(text + b"\n")


def read_program(folder: Path, root: Path) -> dict[str, Any]:
    """The facts in a rank's folder; nothing where an earlier version wrote it."""
    try:
        file = open_file(folder / PROGRAM_FILE, root)
    except FileNotFoundError:
        return {}
    return msgspec.convert(read_json(file, folder / PROGRAM_FILE), dict[str, Any])
