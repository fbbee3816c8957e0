"""What the disk refuses while a program runs: said once, and the program goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tensorprobe.errors import TensorprobeError, WriteFailed


class Refusals:
    """Keeps errors of writing from the program; `failed` has the first.

    refusals = Refusals("the dump in ./dump", say)
    with refusals.told():
        path.write_bytes(content)
    """

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self.failed: WriteFailed | None = None
        self._what = what
        self._tell = tell

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Catch an error of writing; the first one is told to the user."""
        try:
            yield
        except (OSError, TensorprobeError) as error:
            if self.failed is None:
                self.failed = WriteFailed(f"{self._what} cannot be written: {error}")
                self._tell(f"{self.failed}. The program goes on")
