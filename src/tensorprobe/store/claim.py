"""Whose folder it is: the identity of a run, and making room for it where another run has been."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.errors import BadArtefact
from tensorprobe.store.lines import speakable
from tensorprobe.tensors.json_files import MAX_NBYTES, read_json
from tensorprobe.tensors.opening import open_file, read_text

FORMAT = 1
RUN_FILE = "capture.json"
RANK_FILE = "rank.json"
EARLIER = "earlier"
_RUN_MARK = ".run"
_RANK_FOLDER = re.compile(r"rank\d+")


# What launchers other than torchrun call a run, and how many processes it has.
_JOBS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS"),
    ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE"),
)


def run_identity(environ: Mapping[str, str]) -> str:
    """A text that all ranks of one run share and no other run has.

    A process alone is its own run, with the children that it starts by multiprocessing. Ranks on
    one host share the launcher, their parent process; ranks on several hosts share what torchrun,
    Slurm or Open MPI tells them.
    """
    world_size = environ.get("WORLD_SIZE", "1")
    parent = _parent_process()
    if parent is not None and "TORCHELASTIC_RUN_ID" not in environ:
        return f"{socket.gethostname()}/{parent}/{_start_time(parent)}"
    if world_size == "1" and "TORCHELASTIC_RUN_ID" not in environ:
        for job in _JOBS:
            values = [environ.get(name, "") for name in job]
            if all(values) and values[-1] != "1":
                return "/".join(values)
        return f"{socket.gethostname()}/{os.getpid()}/{_start_time(os.getpid())}"
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    parts = [environ.get(name, "") for name in names] + [world_size]
    if environ.get("LOCAL_WORLD_SIZE") == world_size:
        parent = os.getppid()
        parts += [socket.gethostname(), str(parent), _start_time(parent)]
    return "/".join(parts)


def _parent_process() -> int | None:
    """The process that has started this one by multiprocessing."""
    process: Any = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process is not None else None
    return parent.pid if parent is not None else None


def _start_time(pid: int) -> str:
    """When a process began, in clock ticks since boot: a pid alone is used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # no /proc, or a parent that is gone
        return ""
    return stat.rpartition(")")[2].split()[19]


def claim(
    root: Path,
    rank: int,
    run_id: str,
    facts: Mapping[str, Any],
    rank_facts: Mapping[str, Any],
    on_warning: Callable[[str], None],
) -> Path:
    """Make this run's folder for one rank; what another run left moves to earlier/N, whole."""
    root.mkdir(parents=True, exist_ok=True)
    mine = root / f"rank{rank}"
    with _locked(root):
        moved = _move_earlier(root, mine, run_id)
        mine.mkdir()
        about_rank = {"format": FORMAT, "rank": rank, "run": run_id, **rank_facts}
        _write_new(mine / RANK_FILE, about_rank)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about_run = {"tool": __version__, "run": run_id, "created": created, **facts}
        _write_new(root / RUN_FILE, {"format": FORMAT, **about_run})
    if moved is not None:
        on_warning(f"'{root}' held an earlier run: it is in '{moved}' now")
    return mine


def move_to_rank(root: Path, rank_fd: int, rank: int) -> Path | None:
    """Give a folder that is written to, by its descriptor, the name of the rank that it turned out
    to be. None where it is not among the folders of this run any more.

    A process of the same run that is there by mistake takes the name that becomes free.
    """
    mine = os.fstat(rank_fd)
    with _locked(root):
        for folder in root.iterdir():
            if _RANK_FOLDER.fullmatch(folder.name) and os.path.samestat(folder.stat(), mine):
                break
        else:
            return None
        target = root / f"rank{rank}"
        if target == folder:  # where another process has put it
            pass
        elif target.exists():
            aside = root / f".moving{os.getpid()}"
            target.rename(aside)
            folder.rename(target)
            aside.rename(folder)
        else:
            folder.rename(target)
        about = read_json(open_file(target / RANK_FILE), target / RANK_FILE)
        (target / RANK_FILE).unlink()
        _write_new(target / RANK_FILE, {**about, "rank": rank})
    return target


def make_way(
    root: Path, run_id: str, theirs: re.Pattern[str], on_warning: Callable[[str], None]
) -> None:
    """Move sub-folders of earlier runs, by their names, to earlier/N; the first rank to come does.

    For layouts that have no place for a run's identity: it is kept in a hidden file.
    """
    with _locked(root):
        mark = root / _RUN_MARK
        if run_of(mark) == run_id:
            return
        old = [folder for folder in root.iterdir() if theirs.fullmatch(folder.name)]
        if old:
            target = _earlier_folder(root, old)
            for path in old:
                path.rename(target / path.name)
            on_warning(f"'{root}' held an earlier run: it is in '{target}' now")
        mark.unlink(missing_ok=True)
        _write_new(mark, {"run": run_id})


def _move_earlier(root: Path, mine: Path, run_id: str) -> Path | None:
    """Move what is not of this run; returns the folder it went to, None when there was nothing."""
    if run_of(root / RUN_FILE) != run_id:
        old = [folder for folder in root.iterdir() if _RANK_FOLDER.fullmatch(folder.name)]
        old = [folder for folder in old if run_of(folder / RANK_FILE) != run_id]
        if (root / RUN_FILE).exists():
            old.append(root / RUN_FILE)
    else:
        old = [mine] if mine.exists() else []
    if not old:
        return None
    target = _earlier_folder(root, old)
    for path in old:
        # Without working locks (some network disks) another rank may have been faster.
        with contextlib.suppress(FileNotFoundError):
            path.rename(target / path.name)
    if not (target / RUN_FILE).exists() and (root / RUN_FILE).exists():
        whole = read_text(open_file(root / RUN_FILE), root / RUN_FILE, MAX_NBYTES)
        (target / RUN_FILE).write_bytes(whole)
    return target


def _earlier_folder(root: Path, moving: list[Path]) -> Path:
    """The folder to move these to: the first of the same run that lacks them, or else a new one.

    The ranks of a run that record again into one folder come one by one, and belong together.
    """
    run = run_of(root / RUN_FILE)
    taken = sorted(int(path.name) for path in root.glob(f"{EARLIER}/*") if path.name.isdigit())
    for folder in (root / EARLIER / str(number) for number in taken):
        same_run = run is not None and run_of(folder / RUN_FILE) == run
        if same_run and not any((folder / path.name).exists() for path in moving):
            return folder
    number = max(taken, default=0) + 1
    while True:
        folder = root / EARLIER / str(number)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def run_of(path: Path) -> str | None:
    """The run id in a capture.json or rank.json; None when there is none to be read."""
    try:
        return str(read_json(open_file(path), path)["run"])
    except (OSError, BadArtefact, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One rank at a time. A file, not the folder: network disks lock only what can be written."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with contextlib.suppress(OSError):  # a disk without locks: renames are atomic anyway
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write_new(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a whole file or nothing, and leave one that is there already."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = msgspec.json.encode(speakable(msgspec.to_builtins(facts, enc_hook=str)))
    temporary.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a disk without hard links
        temporary.rename(path)
        return
    temporary.unlink()
