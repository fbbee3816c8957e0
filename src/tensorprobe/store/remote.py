"""Captures on object storage: their files are copied to this machine, and opened there as others.

Reads and writes by fsspec: s3:// by s3fs, gs:// by gcsfs, file:// of a mounted disk by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensorprobe.errors import (
    BadArtefact,
    BadUsage,
    MissingDependency,
    TensorprobeError,
    UnreadableCapture,
)
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_file

if TYPE_CHECKING:
    from typing import TypeGuard

# What each scheme needs beside fsspec, and the extra that brings it.
_NEEDS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "file": ("fsspec", "s3")}
PLACE = "TENSORPROBE_CACHE"  # the variable that says where copies and spools are
LIMIT = "TENSORPROBE_CACHE_LIMIT"  # and how many bytes one run may have there
_LIMIT_NBYTES = 100 << 30
_KNOWN_FILE = ".copied.json"  # which object each copy is of
_MAX_NAME = 255
_CHUNK_NBYTES = 1 << 20


class RemoteFailed(TensorprobeError):
    """Object storage could not be read or written."""


class RemoteFile(NamedTuple):
    """An object below a URL."""

    name: str  # below it: "rank0/step0/calls.jsonl"
    nbytes: int
    mark: str  # another one when it is written again


def is_url(path: object) -> TypeGuard[str]:
    """Whether a path is of object storage. A local folder may be called "s3:"."""
    return isinstance(path, str) and path.partition("://")[0] in _NEEDS and "://" in path


def check_url(url: str) -> None:
    """Refuse a URL without a folder in it, or of a scheme whose package is not installed."""
    scheme, _, rest = url.partition("://")
    parts = rest.strip("/").split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        raise BadUsage(f"'{url}': expected {scheme}://BUCKET/FOLDER")
    package, extra = _NEEDS[scheme]
    for name in ("fsspec", package):
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(name, f"'{url}'", extra)


def place_of(url: str, room: str) -> Path:
    """The folder of this machine that stands for a URL, among the copies or the spools."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    given = os.environ.get(PLACE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(given) if given else Path(home) / "tensorprobe"
    return base.absolute() / room / scheme / rest.strip("/")


def local_copy(path: str) -> Path:
    """A copy of all files below a URL. What was copied before and has not changed stays."""
    folder = place_of(path, "copies")
    with remote_errors(path, "read"):
        store = Storage(path)
        files = store.files()
    if not files:
        raise UnreadableCapture(f"no capture at '{path}': there is nothing below it")
    nbytes, limit = sum(file.nbytes for file in files), limit_nbytes()
    if nbytes > limit:
        raise RemoteFailed(
            f"'{path}' has {nbytes:,} bytes, and {limit:,} may be copied to '{folder}'. Name "
            f"a rank or a step of it, or give more: export {LIMIT}=BYTES (and {PLACE}=FOLDER)"
        )
    check_free(folder, nbytes)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _copy(path, store, files, folder)
    return folder


def _copy(path: str, store: Storage, files: list[RemoteFile], folder: Path) -> None:
    known = _known(folder)
    names = {file.name for file in files}
    for name in known.keys() - names:  # another run is there by now
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
    for file in files:
        place = folder / file.name
        mark = [file.nbytes, file.mark]
        if known.get(file.name) == mark and _is_whole(place, file.nbytes):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=".copying-")
        os.close(descriptor)
        try:
            with remote_errors(path, "read"):
                store.get(file.name, temporary)
            os.replace(temporary, place)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        known[file.name] = mark
    left = {name: mark for name, mark in known.items() if name in names}
    (folder / _KNOWN_FILE).write_bytes(msgspec.json.encode(left))


def _known(folder: Path) -> dict[str, list[Any]]:
    path = folder / _KNOWN_FILE
    try:
        return msgspec.convert(read_json(open_file(path), path), dict[str, list[Any]])
    except (OSError, ValueError, BadArtefact):
        return {}


def _is_whole(place: Path, nbytes: int) -> bool:
    with contextlib.suppress(OSError):
        return place.is_file() and place.stat().st_size == nbytes
    return False


def limit_nbytes() -> int:
    """How many bytes a run may have on this machine."""
    text = os.environ.get(LIMIT, "")
    if text and not text.isdigit():
        raise BadUsage(f"{LIMIT}={text}: expected a number of bytes")
    return int(text) if text else _LIMIT_NBYTES


def check_free(folder: Path, nbytes: int) -> None:
    """Refuse to fill the disk."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise RemoteFailed(f"'{folder}' would take {nbytes:,} bytes, and {free:,} are free")


class Storage:
    """What is below a URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self._system, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._root = str(root).rstrip("/")

    def files(self) -> list[RemoteFile]:
        """All files, with names that stay below the URL, by name."""
        found = []
        for key, about in self._system.find(self._root, detail=True).items():
            is_file = about.get("type") == "file" and not about.get("islink")
            if not is_file or key.rstrip("/") == self._root:
                continue
            name = str(key).removeprefix(self._root).lstrip("/")
            _check_name(self.url, name)
            mark = about.get("ETag") or about.get("etag") or about.get("md5Hash")
            mark = mark or about.get("LastModified") or about.get("mtime") or ""
            found.append(RemoteFile(name, int(about.get("size") or 0), str(mark)))
        return sorted(found)

    def get(self, name: str, place: str) -> None:
        """Copy one file to this machine."""
        self._system.get_file(f"{self._root}/{name}", place)

    def put(self, path: Path, folder: Path) -> None:
        """Copy one file of a folder of this machine."""
        name = path.relative_to(folder).as_posix()
        target = f"{self._root}/{name}"
        with contextlib.suppress(Exception):
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        with open_file(path, folder) as source, self._system.open(target, "wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_NBYTES)

    def read(self, name: str) -> bytes | None:
        """All of a small file; None if it is not there."""
        try:
            found: bytes = self._system.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return found


def _check_name(url: str, name: str) -> None:
    """Refuse what would lead out of the folder of the copy."""
    parts = name.split("/")
    wrong = any(part in ("", ".", "..") or len(part) > _MAX_NAME for part in parts)
    if wrong or "\0" in name or "\\" in name or PurePosixPath(name).is_absolute():
        raise RemoteFailed(f"'{url}' has an object that no capture has: {name[:200]!r}")


@contextlib.contextmanager
def remote_errors(url: str, done: str) -> Iterator[None]:
    """What goes wrong with a storage is an error in one line, whatever its package raises."""
    try:
        yield
    except TensorprobeError:
        raise
    except ImportError as error:
        package, extra = _NEEDS[url.partition("://")[0]]
        raise MissingDependency(str(error.name or package), f"'{url}'", extra) from error
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise RemoteFailed(
            f"'{url}' could not be {done}: {type(error).__name__}: {text[:300]}"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time brings a copy up to date."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
