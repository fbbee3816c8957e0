"""The culprits of all ranks as those of one program: who is an origin, and who received it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorprobe.collectives.links import Key
from tensorprobe.comparing.reach import Reach
from tensorprobe.comparing.verdict import Culprit, Received

_Place = tuple[int, int]  # a rank, and the number of one of its culprits


def settle_ranks(
    culprits: Mapping[int, Sequence[Culprit]], reaches: Mapping[int, Reach]
) -> tuple[list[Culprit], list[Received]]:
    """The causes, each with the culprits of other ranks that follow from it; and by which
    communication damage came to each rank that is no origin.

    Damage goes through what a rank gave to a communication to all that got something by it. What
    no communication puts in order is ordered by steps: within a step nobody is first.
    """
    spread = _Spread(reaches)
    reached = {
        (rank, n): spread.of(rank, n) for rank, found in culprits.items() for n in range(len(found))
    }
    places = sorted(reached, key=lambda at: _order(culprits[at[0]][at[1]], at))
    causes: list[_Place] = []
    follows: dict[_Place, _Place] = {}
    for at in places:
        cause = next((c for c in causes if _is_after(at, c, reached, reaches)), None)
        if cause is not None:
            follows[at] = cause
            continue
        for other in [c for c in causes if _is_after(c, at, reached, reaches)]:
            causes.remove(other)
            follows[other] = at
        causes.append(at)
    for at, cause in follows.items():
        while cause in follows:  # that one has turned out to follow too
            cause = follows[cause]
        follows[at] = cause
    causes = _merge_same(causes, culprits, follows)
    causes = _merge_boundaries(causes, culprits, follows)
    for at, cause in follows.items():
        culprits[cause[0]][cause[1]].follows.append(culprits[at[0]][at[1]])
    origins = {at[0] for at in causes}
    same = {at[0] for at, cause in follows.items() if _are_same(at, cause, culprits)}
    received = _received(origins | same, causes, reached, reaches)
    return [culprits[rank][n] for rank, n in causes], received


def origins_of(culprits: Sequence[Culprit], received: Sequence[Received]) -> list[int]:
    """The ranks of the causes, and of what is the same call on other ranks."""
    others = {each.rank for each in received}
    found = {culprit.rank for culprit in culprits}
    for culprit in culprits:
        same = (c.rank for c in culprit.follows if (c.name, c.step) == (culprit.name, culprit.step))
        found |= {rank for rank in same if rank not in others}
    return sorted(found)


def _order(culprit: Culprit, at: _Place) -> tuple[bool, int, bool, int, int]:
    return culprit.weak, culprit.step, culprit.kind == "boundary", at[1], at[0]


class _Spread:
    """Follows damage from communications over the ranks that heard them; each start only once."""

    def __init__(self, reaches: Mapping[int, Reach]) -> None:
        self._hearers: dict[Key, list[int]] = {}
        self._onward: dict[tuple[int, Key], list[Key]] = {}  # what a rank gives on of what it heard
        self._known: dict[frozenset[Key], frozenset[tuple[int, Key]]] = {}
        self._reaches = reaches
        for rank, reach in reaches.items():
            for key in reach.heard:
                self._hearers.setdefault(key, []).append(rank)
            for key, (_, before) in reach.into.items():
                for heard in before:
                    self._onward.setdefault((rank, heard), []).append(key)

    def of(self, rank: int, n: int) -> frozenset[tuple[int, Key]]:
        """The ranks that a culprit has reached, each with the communications that brought it."""
        reach = self._reaches.get(rank)
        if reach is None:
            return frozenset()
        first = frozenset(key for key, (into, _) in reach.into.items() if n in into)
        if first not in self._known:
            self._known[first] = frozenset(self._from(first))
        return self._known[first]

    def _from(self, keys: frozenset[Key]) -> set[tuple[int, Key]]:
        found: set[tuple[int, Key]] = set()
        todo, seen = list(keys), set(keys)
        while todo:
            key = todo.pop()
            for rank in self._hearers.get(key, ()):
                found.add((rank, key))
                new = [k for k in self._onward.get((rank, key), ()) if k not in seen]
                seen.update(new)
                todo += new
        return found


def _is_after(
    at: _Place,
    other: _Place,
    reached: Mapping[_Place, frozenset[tuple[int, Key]]],
    reaches: Mapping[int, Reach],
) -> bool:
    """Whether what `other` did has come to the culprit at `at` through communications."""
    rank, n = at
    reach = reaches.get(rank)
    if reach is None or rank == other[0] or n >= len(reach.culprits):
        return False
    return any((rank, key) in reached[other] for key in reach.culprits[n])


def _are_same(at: _Place, cause: _Place, culprits: Mapping[int, Sequence[Culprit]]) -> bool:
    a, b = culprits[at[0]][at[1]], culprits[cause[0]][cause[1]]
    return (a.name, a.step, a.cause, a.kind, a.side) == (b.name, b.step, b.cause, b.kind, b.side)


def _merge_same(
    causes: list[_Place],
    culprits: Mapping[int, Sequence[Culprit]],
    follows: dict[_Place, _Place],
) -> list[_Place]:
    """One call that is at fault in the same way on several ranks is one cause."""
    kept: dict[object, _Place] = {}
    found: list[_Place] = []
    for at in causes:
        c = culprits[at[0]][at[1]]
        first = kept.setdefault((c.name, c.step, c.cause, c.kind, c.side), at)
        if first == at or first[0] == at[0]:
            found.append(at)
        else:
            follows[at] = first
    return found


def _merge_boundaries(
    causes: list[_Place],
    culprits: Mapping[int, Sequence[Culprit]],
    follows: dict[_Place, _Place],
) -> list[_Place]:
    """What appears in one rank without a call that made it may have come from another rank, by
    code that was not recorded."""
    kept: list[_Place] = []
    for at in causes:
        first = culprits[causes[0][0]][causes[0][1]]
        is_boundary = culprits[at[0]][at[1]].kind == "boundary"
        if kept and is_boundary and at[0] != causes[0][0] and first.kind != "boundary":
            follows[at] = causes[0]
        else:
            kept.append(at)
    return kept


def _received(
    origins: set[int],
    causes: Sequence[_Place],
    reached: Mapping[_Place, frozenset[tuple[int, Key]]],
    reaches: Mapping[int, Reach],
) -> list[Received]:
    """For each rank that is no origin: the first communication by which damage came there."""
    found = []
    for rank, reach in sorted(reaches.items()):
        if rank in origins:
            continue
        for key, hearing in reach.heard.items():
            cause = next((c for c in causes if (rank, key) in reached[c]), None)
            if cause is not None:
                found.append(Received(rank, hearing.step, hearing.name, hearing.words, cause[0]))
                break
    return found
