"""The first NaN or infinity over all ranks of a recording, ordered by steps and collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from tensorprobe.collectives.links import Key, hears, linked, listed, speaks
from tensorprobe.errors import UnreadableCapture
from tensorprobe.overflow.call_kinds import Kind
from tensorprobe.overflow.recorded_calls import BadCall, RankReader, What, api_of, kind_of, words
from tensorprobe.records import Call, Capture, Direction, by_rank_and_step, count


class Origin(msgspec.Struct, frozen=True):
    """A call in which NaN or infinity begins, or comes in."""

    name: str
    what: str  # makes, reads, receives or appears
    holds: str  # "NaN and -inf"
    direction: Direction
    step: int
    rank: int
    module: str
    op: str
    stack: tuple[str, ...]
    tensor: str
    reason: str
    kind: str = "nonfinite"


class FirstNonfinite(msgspec.Struct, frozen=True):
    """The answer: where it begins, and what is not known of that."""

    first: list[Origin] = []  # several: none is known to come before the others
    later: list[Origin] = []  # further calls that make it
    received: list[Origin] = []  # for each other rank, how it came there
    notes: list[str] = []  # what could not be ordered, or not be seen


def find_first(capture: Capture) -> FirstNonfinite:
    """Name the first call that made NaN or infinity, of all ranks and steps.

    Within a rank that is its execution order, across ranks the order of steps, and within a step
    what collectives and messages tell. UnreadableCapture where nothing has statistics.
    """
    units = by_rank_and_step(capture.calls)
    notes = _unseen(capture)
    events: dict[int, dict[int, list[BadCall]]] = defaultdict(dict)
    unwritten: list[Call] = []
    for rank in capture.ranks:
        reader = RankReader()
        for step in capture.steps:
            if found := list(reader.events(units.get((rank, step), []))):
                events[step][rank] = found
        if reader.on_unwritten is not None:
            unwritten.append(reader.on_unwritten.call)
    if unwritten:
        call = unwritten[0]
        notes.append(
            f"{call.name} (step {call.step}, {listed([c.rank for c in unwritten])}) has NaN "
            "or infinity from memory that nobody had written to; no parameter was given it"
        )
    origins = {step: _origins(ranks) for step, ranks in events.items()}
    begins = min((step for step, found in origins.items() if found), default=None)
    if begins is None:
        appears = [e for step in sorted(events) for each in events[step].values() for e in each]
        return FirstNonfinite(
            [_told(e) for e in appears[:1]], [], list(map(_told, appears[1:])), notes
        )
    found = origins[begins]
    calls = {rank: units.get((rank, begins), []) for rank in capture.ranks}
    order = _Order(calls, {event.call.rank: event.call for event in found})
    first = [event for event in found if not order.before.get(event.call.rank)]
    notes += order.notes
    ranks = sorted(event.call.rank for event in first)
    if len(first) > 1:
        notes.append(f"ranks {_listed(ranks)}: no collective between them says which was first")
    chosen = {id(event) for event in first}
    others = [e for s in sorted(events) for r in sorted(events[s]) for e in events[s][r]]
    later = [e for e in others if e.what is What.MAKES and id(e) not in chosen]
    came = [e for e in others if e.what is not What.MAKES and id(e) not in chosen]
    return FirstNonfinite(
        [_told(event) for event in first],
        [_told(event) for event in later],
        [_told(event) for event in came],
        notes,
    )


def has_statistics(capture: Capture) -> bool:
    """Whether any tensor has statistics, in which NaN would be seen."""
    return any(record.summary for call in capture.calls for record in call.tensors)


def _origins(ranks: dict[int, list[BadCall]]) -> list[BadCall]:
    """The first event of each rank in which it begins there."""
    own = (What.MAKES, What.READS)
    found = [
        next((e for e in events if e.what in own), None) for _, events in sorted(ranks.items())
    ]
    return [event for event in found if event is not None]


def _told(event: BadCall) -> Origin:
    call = event.call
    return Origin(
        call.name, event.what.value, words(event.bits), call.direction, call.step, call.rank,
        call.module, call.op, call.stack, event.tensor.name, event.reason,
    )  # fmt: skip


def _unseen(capture: Capture) -> list[str]:
    """What a NaN could hide in."""
    notes = []
    records = [record for call in capture.calls for record in call.tensors if record.numel]
    blind = sum(record.summary is None for record in records)
    if records and blind == len(records):
        raise UnreadableCapture(
            f"'{capture.path}' has no statistics of its tensors, so NaN cannot be seen in it; "
            "record with keep='stats'"
        )
    if not records:
        raise UnreadableCapture(f"'{capture.path}' has no tensors: nothing to look at")
    if blind:
        notes.append(f"{count(blind, 'tensor')} without statistics: NaN there is not seen")
    if capture.gaps:
        notes.append(f"{count(len(capture.gaps), 'gap')}: NaN there is not seen")
    if capture.begun:
        notes.append(f"{count(len(capture.begun), 'call')} that did not end")
    missing = [rank for rank in range(max(capture.ranks, default=0)) if rank not in capture.ranks]
    if missing:
        notes.append(f"{count(len(missing), 'rank')} not recorded: {_listed(missing)}")
    return notes


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


class _Order:
    """What came before what in one step, by the messages between ranks.

    Each rank goes through its calls and waits at a communication for the others of it. It knows of
    an event, a bit for each, once a rank that knows of it has spoken to it.
    """

    def __init__(self, calls: dict[int, list[Call]], events: dict[int, Call]) -> None:
        self.before: dict[int, int] = {}  # for the event of each rank: those that came before
        self.notes: list[str] = []
        self._knows = dict.fromkeys(calls, 0)
        self._bits = {rank: 1 << i for i, rank in enumerate(sorted(events))}
        self._events = events
        self._unlinked: Counter[str] = Counter()
        if len(calls) > 1 and len(events) > 1:
            self._follow({rank: list(self._stops(rank, found)) for rank, found in calls.items()})
        for api, number in self._unlinked.items():
            self.notes.append(f"{number} calls of {api}: it is not known who spoke to whom")

    def _stops(self, rank: int, calls: Sequence[Call]) -> Iterator[tuple[Key | None, Call]]:
        """Where a rank speaks with others, and its event."""
        keys = {id(call): key for key, call in linked(calls)}
        for call in calls:
            if call is self._events.get(rank):
                yield None, call
            elif id(call) in keys:
                key = keys[id(call)]
                if key is None:
                    self._unlinked[api_of(call)] += 1
                else:
                    yield key, call
            elif kind_of(call) is Kind.COMMUNICATES and call.direction == "forward":
                self._unlinked[api_of(call)] += 1

    def _follow(self, stops: dict[int, list[tuple[Key | None, Call]]]) -> None:
        members: dict[Key, dict[int, Call]] = defaultdict(dict)
        for rank, found in stops.items():
            for link, call in found:
                if link is not None:
                    members[link][rank] = call
        at = dict.fromkeys(stops, 0)
        while True:
            for rank, found in stops.items():
                while at[rank] < len(found) and found[at[rank]][0] is None:
                    self.before[rank] = self._knows[rank]
                    self._knows[rank] |= self._bits[rank]
                    at[rank] += 1
            waiting = {
                rank: found[at[rank]][0] for rank, found in stops.items() if at[rank] < len(found)
            }
            if not waiting:
                return
            here = Counter(waiting.values())
            met = [link for link, n in here.items() if link is not None and n == len(members[link])]
            for link in met:
                self._speak(link, members[link])
            if not met:  # they do not all do the same: the first goes on without the others
                link = min(
                    (each for each in here if each is not None),
                    key=lambda each: (each.number, each),
                )
                self._unlinked[link.kind] += 1
                met = [link]
            for rank, link in waiting.items():
                if link in met:
                    at[rank] += 1

    def _speak(self, link: Key, members: dict[int, Call]) -> None:
        if len(members) < 2:
            return
        hearing = {rank for rank, call in members.items() if hears(call, link.kind)}
        speaking = {rank for rank, call in members.items() if speaks(call, link.kind)}
        if not speaking or not hearing:
            self._unlinked[link.kind] += 1
        known = 0
        for rank in speaking:
            known |= self._knows[rank]
        for rank in hearing:
            self._knows[rank] |= known
