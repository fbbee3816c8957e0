"""Where a command may write: asked before the work, and never inside of a capture."""

from __future__ import annotations

import os
from pathlib import Path

from tensorprobe.errors import BadUsage
from tensorprobe.store.claim import RANK_FILE, RUN_FILE, run_of


def check_folder(folder: Path) -> Path:
    """Refuse a file in the place of a folder; gives what is there of the folder's path."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise BadUsage(f"cannot write to '{folder}': '{existing}' is a file; give a folder")
    return existing


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made, or not be written to."""
    existing = check_folder(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BadUsage(f"cannot write to '{folder}': '{existing}' is not writable")


def check_output(folder: Path, *captures: Path) -> None:
    """Refuse also what lies in one of these captures, or in any native one: it would litter it."""
    check_writable(folder)
    _check_entries(folder)
    own = {capture.resolve() for capture in captures if capture.is_dir()}
    place = folder.resolve()
    for above in (place, *place.parents):
        if above in own or run_of(above / RUN_FILE) or run_of(above / RANK_FILE):
            raise BadUsage(
                f"cannot write to '{folder}': it is in the capture '{os.path.relpath(above)}'; "
                "give a folder outside of it"
            )


def make_folder(folder: Path) -> None:
    """Make a folder in an output; refuse a link, and links in it, as they lead out of that."""
    if folder.is_symlink():
        raise BadUsage(f"cannot write to '{folder}': it is a link; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    _check_entries(folder)


def _check_entries(folder: Path) -> None:
    """Refuse links and FIFOs that lie where files will be written: a folder may come with the
    capture, and what is written would go where it points, or wait for ever."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.is_file(follow_symlinks=False) or entry.is_dir()):
                raise BadUsage(
                    f"cannot write to '{folder}': '{entry.name}' in it is no regular file; "
                    "give another folder"
                )
