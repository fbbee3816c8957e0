"""Which calls of several ranks are one communication: the links between ranks in the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tensorprobe.overflow.across_ranks import speakers

if TYPE_CHECKING:
    from tensorprobe.comparing.measure import CallPair


class Communication(NamedTuple):
    """What the calls of its ranks have in common: the n-th of an api in a group and a step."""

    api: str
    group: str  # its ranks, as "0, 1"; empty: all
    number: int
    step: int


def communications(pairs: Sequence[CallPair]) -> dict[Communication, list[int]]:
    """The places of the calls that spoke with each other; none where there is one rank only."""
    found: dict[Communication, list[int]] = {}
    if len({pair.call.rank for pair in pairs}) < 2:
        return found
    counted: Counter[tuple[int, int, str, str]] = Counter()
    for at, pair in enumerate(pairs):
        call = pair.call
        if not call.name.startswith("Distributed.") or call.direction != "forward":
            continue
        known = speakers(call)
        if known is None:
            continue
        key = (call.rank, call.step, *known)
        found.setdefault(Communication(*known, counted[key], call.step), []).append(at)
        counted[key] += 1
    return found
