"""A run that hung or died: which rank waits in which communication, and where the others are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorprobe.collectives.links import Key, linked, listed, members_of, told
from tensorprobe.records import Call, Capture
from tensorprobe.store.frames import users_line


class Stop(NamedTuple):
    """Where a rank was when its recording ended."""

    rank: int
    call: Call | None  # the last one
    key: Key | None  # of a communication that it has not come out of
    ended: bool  # its recording was closed

    @property
    def where(self) -> str:
        if self.call is None:
            return "it has recorded no call"
        line = users_line(self.call.stack)
        at = f" at {line}" if line else ""
        state = {"begun": "in", "raised": "raised in"}.get(self.call.status, "after")
        return f"{state} {self.call.name} (step {self.call.step}){at}"


class Waiting(NamedTuple):
    """Ranks that wait in a communication, and members that have not come to it."""

    words: str
    name: str
    step: int
    waiting: tuple[int, ...]
    absent: tuple[Stop, ...]
    unrecorded: tuple[int, ...]

    @property
    def reason(self) -> str:
        """One sentence."""
        verb = "waits" if len(self.waiting) == 1 else "wait"
        text = f"{listed(self.waiting)} {verb} in {self.words}"
        parts = []
        for stop in self.absent[:4]:
            state = "ended" if stop.ended else "is"
            if stop.key is not None:
                state = "waits"
            parts.append(f"rank {stop.rank} {state} {stop.where}")
        if len(self.absent) > 4:
            parts.append(f"{len(self.absent) - 4} more have not come to it")
        if self.unrecorded:
            parts.append(f"{listed(self.unrecorded)} left no recording")
        return f"{text}; {'; '.join(parts)}" if parts else f"{text}; all members have come to it"


def stops_of(capture: Capture, calls: Mapping[int, Sequence[Call]]) -> list[Stop]:
    """Where each rank was at the end."""
    unfinished = {str(each).partition("/")[0] for each in capture.facts.get("unfinished") or ()}
    found = []
    for rank, mine in calls.items():
        keys = {id(call): key for key, call in linked(mine)}
        begun = next((c for c in reversed(mine) if c.status == "begun" and id(c) in keys), None)
        plain = (call for call in reversed(mine) if not call.name.startswith("Module."))
        last = begun or next(plain, mine[-1] if mine else None)
        key = keys.get(id(begun)) if begun is not None else None
        found.append(Stop(rank, last, key, f"rank{rank}" not in unfinished))
    return found


class Death(NamedTuple):
    """A rank that has left the others: its recording has no end, though others have, so it was
    killed or has crashed; or they raised in a communication to which it has not come."""

    stop: Stop
    raised: tuple[int, ...]  # ranks in whose communications this showed
    words: str

    @property
    def reason(self) -> str:
        """One sentence."""
        rank, where = self.stop.rank, self.stop.where
        text = f"rank {rank} was killed, or stopped while it hung: its recording ends {where}"
        if self.stop.ended:
            text = f"rank {rank} ended {where}"
        if self.raised:
            text += f"; {listed(self.raised)} raised in {self.words}, to which it has not come"
        return text


def deaths(
    capture: Capture, calls: Mapping[int, Sequence[Call]], ranks: Sequence[int]
) -> list[Death]:
    """The ranks that left while others lived on, and in which communication these noticed."""
    stops = stops_of(capture, calls)
    if not any(stop.ended for stop in stops):
        return []  # all were ended at once, from outside
    linked_calls = {rank: list(linked(mine)) for rank, mine in calls.items()}
    noticed = {
        rank for rank, mine in linked_calls.items() if any(c.status == "raised" for _, c in mine)
    }
    found = []
    for stop in stops:
        if stop.key is not None or stop.rank in noticed:
            continue  # one that waits is told by `waiting`
        reached = {key for key, _ in linked_calls[stop.rank]}
        missed: dict[Key, list[int]] = {}
        for rank, mine in linked_calls.items():
            for key, call in mine:
                is_late = key is not None and key not in reached and call.status == "raised"
                if key is not None and is_late and stop.rank in members_of(key, ranks):
                    missed.setdefault(key, []).append(rank)
        if stop.ended and not missed:
            continue
        first = min(missed, default=None)
        raised = tuple(missed[first]) if first is not None else ()
        found.append(Death(stop, raised, told(first, ranks) if first is not None else ""))
    return found


def waiting(
    capture: Capture, calls: Mapping[int, Sequence[Call]], ranks: Sequence[int]
) -> list[Waiting]:
    """The communications that some have begun and nobody has ended, the earliest first."""
    stops = stops_of(capture, calls)
    if all(stop.key is None for stop in stops):
        return []
    by_key: dict[Key, list[Stop]] = {}
    for stop in stops:
        if stop.key is not None:
            by_key.setdefault(stop.key, []).append(stop)
    reached = {
        rank: {key for key, call in linked(mine) if key is not None and call.status != "begun"}
        for rank, mine in calls.items()
    }
    found = []
    for key, here in sorted(by_key.items()):
        members = members_of(key, ranks)
        absent = tuple(
            stop
            for stop in stops
            if stop.rank in members and stop.key != key and key not in reached[stop.rank]
        )
        call = here[0].call
        assert call is not None
        found.append(
            Waiting(
                told(key, ranks), call.name, call.step, tuple(stop.rank for stop in here), absent,
                tuple(rank for rank in members if rank not in calls),
            )
        )  # fmt: skip
    return sorted(found, key=lambda each: (all(s.key is not None for s in each.absent), each.step))
