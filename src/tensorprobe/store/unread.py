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
        tensors = (record for call in calls for record in call.tensors)
        self._reasons = {
            record.name: record.gap
            for record in tensors
            if record.blob is None and record.gap is not None
        }

    def attempt(self, record: TensorRecord, carry: Callable[[], _Content]) -> _Content | None:
        """What `carry` gives of a tensor's content, if that can be read; else None."""
        try:
            return carry()
        except (TensorprobeError, OSError, ValueError, TypeError) as error:
            self._reasons[record.name] = str(error).removeprefix(f"{record.name}: ")
            return None

    def why(self, record: TensorRecord) -> str | None:
        return self._reasons.get(record.name)

    def lines(self) -> list[str]:
        """How many there are, which, and why the first is one; nothing where there is none."""
        if not self._reasons:
            return []
        names = list(self._reasons)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        tensors = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        which = f"{', '.join(names[:_NAMED])}{more}"
        first = "" if len(names) == 1 else "The first: "
        return [f"{tensors} without content: {which}. {first}{self._reasons[names[0]]}"]
