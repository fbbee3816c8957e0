"""Which tensors are written without their content, as it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tensorprobe.errors import TensorprobeError
from tensorprobe.records import Call, TensorRecord

_Content = TypeVar("_Content")
_NAMED = 3


class Unread:
    """Collects them while `calls` are written in another layout; those whose content was seen to
    be missing when they were loaded are known from the start."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._reasons: dict[str, str] = {}
        self._first = ""
        self._count = 0  # each step and rank has tensors of the same names
        for record in (record for call in calls for record in call.tensors):
            if record.blob is None and record.gap is not None:
                self._add(record, record.gap)

    def attempt(self, record: TensorRecord, carry: Callable[[], _Content]) -> _Content | None:
        """What `carry` gives of a tensor's content, if that can be read; else None."""
        try:
            return carry()
        except (TensorprobeError, OSError, ValueError, TypeError, MemoryError) as error:
            self._add(record, str(error).removeprefix(f"{record.name}: "))
            return None

    def _add(self, record: TensorRecord, reason: str) -> None:
        if not self._count:
            self._first = reason
        self._reasons[record.name] = reason
        self._count += 1

    def why(self, record: TensorRecord) -> str | None:
        return self._reasons.get(record.name)

    def lines(self) -> list[str]:
        """How many there are, which, and why the first is one; nothing where there is none."""
        if not self._count:
            return []
        names = list(self._reasons)[:_NAMED]
        more = f" and {self._count - len(names)} more" if self._count > len(names) else ""
        tensors = "1 tensor is" if self._count == 1 else f"{self._count} tensors are"
        first = "" if self._count == 1 else "The first: "
        return [f"{tensors} without content: {', '.join(names)}{more}. {first}{self._first}"]
