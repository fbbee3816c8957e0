"""An alarm: which rule has fired, where, since when, and the last good step."""

from __future__ import annotations

from typing import Any

import msgspec


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a healthy training does not do.

    `kind` and `name` are the place: "gradient" of "layers.0.weight". `since` is the first step that
    was wrong, as far as can be told, and `step` the one in which it was certain.
    """

    rule: str
    step: int
    since: int
    last_good_step: int | None
    kind: str
    name: str
    reason: str
    value: float | None = None
    usual: float | None = None
    rank: int = 0
    recording: str | None = None  # of the steps that follow

    def __repr__(self) -> str:
        return f"<Alarm {self.rule}: {self.kind} {self.name}, step {self.step}, rank {self.rank}>"


def line_of(alarm: Alarm, *, several: bool = False) -> str:
    """One line: where, since when, what."""
    place = " ".join(filter(None, (alarm.kind, alarm.name)))
    rank = f", rank {alarm.rank}" if several or alarm.rank else ""
    since = f" since step {alarm.since}" if alarm.since != alarm.step else ""
    good = "none" if alarm.last_good_step is None else str(alarm.last_good_step)
    return (
        f"alarm {alarm.rule} at step {alarm.step}{rank}: {place}: {alarm.reason}{since} "
        f"(last good step: {good})"
    )


def plain_number(value: float | None) -> Any:
    """A number as JSON has it."""
    if value is None or value != value:
        return None
    return value if abs(value) != float("inf") else str(value)
