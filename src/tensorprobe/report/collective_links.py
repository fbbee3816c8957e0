"""Which calls of several ranks are one communication: the links between ranks in the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorprobe.collectives.links import Key, linked

if TYPE_CHECKING:
    from tensorprobe.comparing.measure import CallPair


def communications(pairs: Sequence[CallPair]) -> dict[Key, list[int]]:
    """The places of the calls that spoke with each other; none where there is one rank only."""
    of_rank: dict[int, dict[int, int]] = {}  # the place of each call
    for at, pair in enumerate(pairs):
        of_rank.setdefault(pair.call.rank, {})[id(pair.call)] = at
    found: dict[Key, list[int]] = {}
    if len(of_rank) < 2:
        return found
    for places in of_rank.values():
        for key, call in linked(pairs[at].call for at in places.values()):
            if key is not None:
                found.setdefault(key, []).append(places[id(call)])
    return {key: sorted(places) for key, places in found.items()}
