"""Opening a capture: finds which layout a path has, at any depth of its folder."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Protocol, cast

from tensorprobe.errors import MissingDependency, UnreadableCapture
from tensorprobe.parts import NamedParts
from tensorprobe.records import Capture
from tensorprobe.store.remote import is_url, local_copy

# The module of each layout. They are asked in this order whose a path is.
LAYOUTS = NamedParts(
    "layout",
    {
        "native": "tensorprobe.store.native",
        "msprobe": "tensorprobe.peers.msprobe.msprobe_layout",
        "ptdbg": "tensorprobe.peers.ptdbg.ptdbg_layout",
    },
)
# Files by which a dump is known whose layout is not installed.
_SIGNS = {"msprobe": ("dump.json", "debug.json"), "ptdbg": ("*.pkl", "forward_info_*.json")}
_FOLDERS_ABOVE = ("", "*/", "*/*/", "*/*/*/")
# Where a door keeps its recording until a step is over and turned into the files of its peer.
UNFINISHED = ".tensorprobe"


class Layout(Protocol):
    """What the module of a layout offers."""

    def recognises(self, path: Path) -> bool:
        """Whether the path is of this layout: a whole run, a part of one, or a file in it."""

    def read(self, path: Path) -> Capture: ...

    def write(self, capture: Capture, folder: Path) -> list[str]:
        """Write a capture into a folder; says what this layout could not carry, a line a thing."""


def layout(name: str) -> Layout:
    """The module of a layout, by its name in LAYOUTS."""
    return cast(Layout, LAYOUTS.module(name))


def load(path: str | os.PathLike[str]) -> Capture:
    """What was recorded at a path: a whole run, one rank of it, one step, or a file in there.

    It may be in the native layout, or in that of a peer. No torch is needed until a tensor is
    loaded as a torch tensor. Of a URL (s3://BUCKET/FOLDER) all files are copied to this machine.

        capture = tensorprobe.load("runs/a")
        for call in capture.calls(step=0, op="*linear"):
            print(call.name, call.tensor("output.0").summary)
    """
    name, place = find(Path(local_copy(path) if is_url(path) else path))
    return layout(name).read(place)


def find(path: Path) -> tuple[str, Path]:
    """The layout of what was recorded at a path, and where in it that begins."""
    if not path.exists():
        raise UnreadableCapture(
            f"no capture at '{path}': there is no such path. "
            f"To record one: tensorprobe run -o {quote(str(path))} SCRIPT"
        )
    if not path.is_file() and not path.is_dir():
        raise UnreadableCapture(f"'{path}' is not a capture: it is neither a file nor a folder")
    missing = {}
    for place in (path, *_unfinished(path)):
        for name in LAYOUTS:
            try:
                asked = layout(name)
            except MissingDependency as error:
                missing[name] = error
                continue
            if asked.recognises(place):
                return name, place
    for name, reason in missing.items():
        if sign := _sign(path, name):
            raise UnreadableCapture(f"'{path}' looks like a dump of {name} ({sign}): {reason}")
    raise UnreadableCapture(
        f"'{path}' is not a capture: {_description(path)}; expected a folder with "
        "capture.json, or a folder of ranks or steps in one; or a dump of msprobe or ptdbg_ascend"
    )


def _sign(path: Path, name: str) -> str | None:
    """The name of a file that a dump of this layout has; None if there is none."""
    for sign in _SIGNS.get(name, ()):
        if path.is_file():
            if path.match(sign):
                return path.name
            continue
        for above in _FOLDERS_ABOVE:
            if found := next(path.glob(above + sign), None):
                return str(found.relative_to(path))
    return None


def _unfinished(path: Path) -> list[Path]:
    """Where a door has left a recording that it could not finish, the newest first."""
    place = path if path.name == UNFINISHED else path / UNFINISHED
    if not place.is_dir():
        return []
    parts = [part for part in place.iterdir() if part.is_dir()]
    return [place, *sorted(parts, key=lambda part: part.stat().st_mtime, reverse=True)]


def _description(path: Path) -> str:
    if path.is_file():
        return "it is a file"
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return "it is an empty folder"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"it holds {', '.join(names[:4])}{more}"
