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
from typing import Any, NamedTuple

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


class Who(NamedTuple):
    """What a process is in its run: a rank of it, or another process with a folder of its own."""

    role: str = ""  # the name of that folder, "" among the ranks
    name: str = "main"  # of the folder, where a rank has the place that the process would have
    is_rank: bool = False  # torch.distributed or a launcher says so


class Identity(NamedTuple):
    """Which process of which run."""

    rank: int
    run: str
    who: Who = Who()


def process_identity() -> str:
    """A text that no other process of any machine has."""
    return f"{socket.gethostname()}/{os.getpid()}/{_start_time(os.getpid())}"


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
        return process_identity()
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
    who: Who = Who(),  # noqa: B008 a tuple
) -> Path:
    """Make this run's folder for one rank; what another run left moves to earlier/N, whole.

    A process that is no rank, and runs beside ranks, has its folder in one of its role.
    """
    root.mkdir(parents=True, exist_ok=True)
    about_rank = {"format": FORMAT, "rank": rank, "run": run_id, **rank_facts}
    about_rank |= {"process": process_identity(), "name": who.name, "is_rank": who.is_rank}
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about_run = {"format": FORMAT, "tool": __version__, "run": run_id, "created": created, **facts}
    with _locked(root):
        moved = _move_earlier_run(root, run_id)
        mine = root / f"rank{rank}"
        if who.role:
            mine = _free_place(root, who.role, rank, run_id)
        elif mine.exists():
            if not _gives_way(root, mine, run_id, who):
                mine = _free_place(root, who.name, rank, run_id)
            elif mine.exists():
                moved = _move(root, [mine])
        mine.mkdir(parents=True)
        _write_new(mine / RANK_FILE, about_rank)
        _write_new(root / RUN_FILE, about_run)
        if mine.parent != root:
            _write_new(mine.parent / RUN_FILE, {**about_run, "role": mine.parent.name})
    if moved is not None:
        on_warning(f"'{root}' held an earlier run: it is in '{moved}' now")
    return mine


def _gives_way(root: Path, there: Path, run_id: str, who: Who) -> bool:
    """Whether the process that has this place of a rank is to leave it for one of these kind.

    One that is no rank is given a folder of its own, here and now.
    """
    other = _about(there)
    if other.get("run") != run_id or other.get("process", "") in ("", process_identity()):
        return True  # one of our own, that is over
    if not other.get("is_rank"):
        if who.is_rank:
            _give_role(root, there, str(other.get("name") or "main"))
            return True
        return not _is_alive(str(other["process"]))
    return who.is_rank and not _is_alive(str(other["process"]))


def _give_role(root: Path, folder: Path, name: str) -> Path:
    """Move the folder of a rank into one of a role; who writes to it does so by descriptor."""
    about = _about(folder)
    place = _free_place(root, name, int(about.get("rank", 0)), str(about.get("run")))
    place.parent.mkdir(exist_ok=True)
    folder.rename(place)
    if not (place.parent / RUN_FILE).exists():
        run = read_json(open_file(root / RUN_FILE), root / RUN_FILE)
        _write_new(place.parent / RUN_FILE, {**run, "role": place.parent.name})
    return place


def _free_place(root: Path, role: str, rank: int, run_id: str) -> Path:
    """The folder of a rank in one of a role: ROLE, or ROLE-2 and so on where that is taken."""
    number = 1
    while True:
        folder = root / (role if number == 1 else f"{role}-{number}")
        ours = not folder.exists() or (role_of(folder) and run_of(folder / RUN_FILE) == run_id)
        if ours and not (folder / f"rank{rank}").exists():
            return folder / f"rank{rank}"
        number += 1


def role_of(folder: Path) -> str | None:
    """The role that a folder in a run is of; None if it is none of these."""
    try:
        return str(read_json(open_file(folder / RUN_FILE), folder / RUN_FILE)["role"])
    except (OSError, BadArtefact, ValueError, KeyError, TypeError):
        return None


def processes_in(root: Path) -> list[str]:
    """The roles of the processes beside the ranks of a run, such as ["main", "worker-0"]."""
    own = run_of(root / RUN_FILE) if root.is_dir() else None
    if own is None:
        return []
    folders = [path for path in root.iterdir() if path.is_dir() and (path / RUN_FILE).is_file()]
    return sorted(path.name for path in folders if role_of(path) and run_of(path / RUN_FILE) == own)


def _is_alive(process: str) -> bool:
    """Whether a process runs on this machine; of one of another machine nobody knows."""
    host, _, rest = process.partition("/")
    pid, _, began = rest.partition("/")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and _start_time(int(pid)) == began


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = read_json(open_file(folder / RANK_FILE), folder / RANK_FILE)
    except (OSError, BadArtefact, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def move_to_rank(root: Path, rank_fd: int, rank: int, who: Who = Who()) -> Path | None:  # noqa: B008
    """Give a folder that is written to, by its descriptor, the name of the rank that it turned out
    to be. None where it is not among the folders of this run any more.

    A process of the same run that is there by mistake takes the name that becomes free.
    """
    mine = os.fstat(rank_fd)
    with _locked(root):
        for folder in [*root.glob("rank*"), *root.glob("*/rank*")]:
            if _RANK_FOLDER.fullmatch(folder.name) and os.path.samestat(folder.stat(), mine):
                break
        else:
            return None
        was_alone = folder.parent != root
        if was_alone and who.role:
            return folder
        target = root / f"rank{rank}"
        if target == folder:  # where another process has put it
            pass
        elif not target.exists():
            folder.rename(target)
        elif was_alone:
            if not _gives_way(root, target, str(_about(folder).get("run")), who):
                return folder
            if target.exists():
                _move(root, [target])
            folder.rename(target)
        else:
            aside = root / f".moving{os.getpid()}"
            target.rename(aside)
            folder.rename(target)
            aside.rename(folder)
        about = {**_about(target), "rank": rank, "is_rank": who.is_rank}
        (target / RANK_FILE).unlink()
        _write_new(target / RANK_FILE, about)
        if was_alone:
            _remove_if_empty(folder.parent)
    return target


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a role that nothing is left of."""
    if not any(folder.glob("rank*")):
        (folder / RUN_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


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


def _move_earlier_run(root: Path, run_id: str) -> Path | None:
    """Move what is not of this run; returns the folder it went to, None when there was nothing."""
    if run_of(root / RUN_FILE) == run_id:
        return None
    old = [folder for folder in root.iterdir() if _RANK_FOLDER.fullmatch(folder.name)]
    old = [folder for folder in old if run_of(folder / RANK_FILE) != run_id]
    old += [root / role for role in processes_in(root)]
    if (root / RUN_FILE).exists():
        old.append(root / RUN_FILE)
    return _move(root, old) if old else None


def _move(root: Path, old: list[Path]) -> Path:
    """Move these to earlier/N."""
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
