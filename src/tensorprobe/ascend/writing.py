"""Files that appear whole or not at all, and never outside the folder they are meant for."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorprobe.ascend.artefact_files import open_file
from tensorprobe.errors import BadArtefact, WriteFailed

Array = np.ndarray[Any, Any]
MAX_COPY_NBYTES = 1 << 28  # kernels have megabytes at most


def folder_inside(out: Path, folder: Path) -> Path:
    """The folder `out/folder`, made; an error where a link would lead out of `out`."""
    target = out / folder
    if not target.resolve().is_relative_to(out.resolve()):
        raise WriteFailed(f"{target} leads out of {out} through a link: nothing was written there")
    target.mkdir(parents=True, exist_ok=True)
    return target


# Names that Windows gives to devices, with any extension: a case may be unpacked anywhere.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)", re.IGNORECASE)


def safe_name(name: str, longest: int | None = None) -> str:
    """A file's name that cannot leave its folder, whatever a foreign table made of it.

    With `longest`, one of more bytes is cut, and a digest of the whole keeps it apart from others.
    """
    clean = "".join(c if _is_harmless(c) else "_" for c in name)
    if not clean.strip(". ") or _RESERVED.match(clean):
        clean = "_" + clean
    data = os.fsencode(clean)
    if longest is None or len(data) <= longest:
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return data[: longest - 17].decode("utf-8", "ignore") + "_" + digest


def _is_harmless(character: str) -> bool:
    # Bytes of a name that is no UTF-8 come as these halves of characters, and go back as they were.
    is_byte = "\udc80" <= character <= "\udcff"
    return is_byte or (character.isprintable() and character not in '/\\<>:"|?*')


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[io.FileIO]:
    """A file that appears whole or not at all, and never through a link that lies there."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
    try:
        with io.FileIO(os.open(part, flags, 0o600), "w") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """All of it: one write of an unbuffered file may take only a part."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) or 0 :]


def bytes_of(array: Array) -> memoryview:
    """The content of an array in row-major order."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_text(path: Path, text: str) -> Path:
    """A text file, whole."""
    with whole_file(path) as file:
        write_all(file, text.encode("utf-8", "surrogateescape"))
    return path


def copy_file(source: Path, target: Path) -> Path:
    """A copy, whole, of a file that is expected to be small."""
    with open_file(source) as reader, whole_file(target) as file:
        nbytes = os.fstat(reader.fileno()).st_size
        if nbytes > MAX_COPY_NBYTES:
            raise BadArtefact(f"{source}: {nbytes} bytes; expected at most {MAX_COPY_NBYTES}")
        while data := reader.read(1 << 22):
            write_all(file, data)
    return target
