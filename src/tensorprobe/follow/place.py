"""Where a thread of the program is: the module it runs, and what names the calls made there."""

from __future__ import annotations

import threading
from types import FrameType


class Place(threading.local):
    """Where a thread is: the module it is in, that module's own call, and its frame and stack."""

    def __init__(self) -> None:
        self.module = ""
        self.parent: str | None = None
        self.frame: FrameType | None = None
        self.stack = 0
        self.thread = threading.current_thread().name
