"""Sends a recording to object storage: step by step while it grows, and what is left at its end.

The recorder writes into a spool, a folder of this machine. Another process uploads from there, so
the program waits for nothing; it goes on when the program is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorprobe.errors import BadUsage, TensorprobeError, UnreadableCapture
from tensorprobe.store.claim import EARLIER, RUN_FILE, run_of
from tensorprobe.store.picking import is_closed
from tensorprobe.store.remote import RemoteFailed, Storage, check_url, remote_errors
from tensorprobe.store.step_files import LOG_FILE

_SMALL_NBYTES = 1 << 20  # sent again in any case: some keep their size when they change


class Sent(NamedTuple):
    """What an upload has done."""

    files: int
    nbytes: int
    kept: int  # files that were there already


def upload(folder: Path, url: str, ranks: tuple[str, ...] | None = None) -> Sent:
    """Bring what is below a URL up to what is in a run's folder; of some ranks or all."""
    check_url(url)
    if not (folder / RUN_FILE).is_file():
        raise UnreadableCapture(f"'{folder}' is no recording: it has no {RUN_FILE}")
    with remote_errors(url, "written"):
        storage = Storage(url)
        _check_same_run(folder, storage)
        there = {file.name: file.nbytes for file in storage.files()}
        files = nbytes = kept = 0
        for path in _files(folder, ranks):
            name = path.relative_to(folder).as_posix()
            size = path.stat().st_size
            if size > _SMALL_NBYTES and there.get(name) == size:
                kept += 1
                continue
            storage.put(path, folder)
            files, nbytes = files + 1, nbytes + size
    return Sent(files, nbytes, kept)


def _check_same_run(folder: Path, storage: Storage) -> None:
    """A second run never mixes with the first."""
    text = storage.read(RUN_FILE)
    if text is None:
        return
    try:
        run = json.loads(text).get("run")
    except (ValueError, AttributeError):
        run = None
    if run != run_of(folder / RUN_FILE):
        raise RemoteFailed(
            f"'{storage.url}' holds another run already: nothing was sent. Give another URL; "
            f"the recording is in '{folder}'"
        )


def _files(folder: Path, ranks: tuple[str, ...] | None) -> Iterator[Path]:
    """The regular files of a run: no links, nothing hidden, no earlier runs."""
    tops = sorted(folder.iterdir())
    for top in tops:
        if top.name.startswith(".") or top.name == EARLIER:
            continue
        if top.is_dir() and not top.is_symlink():
            if ranks is not None and top.name not in ranks:
                continue
            for path in sorted(top.rglob("*")):
                if not path.name.startswith(".") and _is_regular(path):
                    yield path
        elif _is_regular(top):
            yield top


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


class Uploader:
    """The process that uploads for one recorder."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from tensorprobe.store.uploading import follow\n"
            f"follow({str(folder)!r}, {url!r})"
        )
        self._owner = os.getpid()
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # what ends the program need not end this
        )  # fmt: skip

    def tell(self, rank: str) -> None:
        """A step of this rank's folder may be finished."""
        if self._child is not None and self._child.stdin is not None:
            try:
                self._child.stdin.write(f"{rank}\n")
                self._child.stdin.flush()
            except OSError:  # what is wrong is told at the end
                pass

    def end(self) -> None:
        """Wait until all is there; an error says why it is not, and what to type."""
        child, self._child = self._child, None
        if child is None or os.getpid() != self._owner:
            return
        try:
            said, _ = child.communicate("\n")
        except OSError:  # it was killed, and what it was told is still on its way
            said = ""
            child.wait()
        if said.strip() != "sent":
            why = said.strip() or f"the process that uploads ended with {child.returncode}"
            raise RemoteFailed(
                f"not all of it was sent to '{self._url}': {why}. It is in '{self._folder}'. "
                f"Next: tensorprobe upload {self._folder} {self._url}"
            )


def follow(folder: str, url: str) -> None:
    """Upload finished steps whenever a line with a rank's folder comes in, all at the end."""
    place = Path(folder)
    ranks: set[str] = set()
    sent: set[Path] = set()
    for line in sys.stdin:
        if line == "\n":  # the end of it all is not seen while a process that was forked has it
            break
        ranks.add(line.strip())
        with contextlib.suppress(TensorprobeError, OSError):  # the end tries again, and tells
            _send_finished(place, url, ranks, sent)
    try:
        if ranks:
            upload(place, url, tuple(ranks))
        print("sent", flush=True)  # noqa: T201 (to the process that started this)
    except (TensorprobeError, OSError) as error:
        print(error, flush=True)  # noqa: T201


def _send_finished(folder: Path, url: str, ranks: set[str], sent: set[Path]) -> None:
    with remote_errors(url, "written"):
        storage = Storage(url)
        _check_same_run(folder, storage)
        for step in (step for rank in ranks for step in (folder / rank).glob("step*")):
            if step in sent or not is_closed(step / LOG_FILE):
                continue
            for path in sorted(step.iterdir()):
                if not path.name.startswith(".") and _is_regular(path):
                    storage.put(path, folder)
            sent.add(step)


def check_folder_and_url(folder: Path, url: str) -> None:
    """What the command was given."""
    if not folder.is_dir():
        raise BadUsage(f"'{folder}' is no folder; expected the recording that is to be sent")
    if "://" not in url:
        raise BadUsage(f"'{url}' is no URL; expected one like s3://BUCKET/FOLDER")
