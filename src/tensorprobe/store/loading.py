"""Opening a capture: finds which layout a path has, at any depth of its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Capture
from tensorprobe.store import native


class Layout(Protocol):
    """What the module of a layout offers."""

    def find(self, path: Path) -> object | None:
        """None when the path is not of this layout."""

    def read(self, path: Path) -> Capture: ...


LAYOUTS: tuple[Layout, ...] = (native,)


def load(path: str | os.PathLike[str]) -> Capture:
    """What was recorded at a path: a whole run, one rank of it, one step, or a file in there.

    No torch is needed until a tensor is loaded as a torch tensor.

        capture = tensorprobe.load("runs/a")
        for call in capture.calls(step=0, op="*linear"):
            print(call.name, call.tensor("output.0").summary)
    """
    path = Path(path)
    if not path.exists():
        raise UnreadableCapture(
            f"no capture at '{path}': there is no such path. "
            f"To record one: tensorprobe run -o {path} SCRIPT"
        )
    for layout in LAYOUTS:
        if layout.find(path) is not None:
            return layout.read(path)
    raise UnreadableCapture(
        f"'{path}' is not a capture: {_description(path)}; expected a folder with "
        "capture.json, or a folder of ranks or steps in one"
    )


def _description(path: Path) -> str:
    if path.is_file():
        return "it is a file"
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return "it is an empty folder"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"it holds {', '.join(names[:4])}{more}"
