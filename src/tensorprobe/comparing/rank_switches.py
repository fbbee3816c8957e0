"""A switch that makes products coarser and is set on some ranks only: nobody means that.

Where all ranks have it, products are judged by its rounding. A rank that has it alone is at fault,
so its products are judged as those of the others, and what they are off by is put down to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.rank_facts import facts_by_rank
from tensorprobe.comparing.rounding import SWITCHES, roundoff, switch_unit, switch_value
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.replay.kinds import is_product

_LARGEST = 16.0  # roundings of the coarse arithmetic that a product may be off by


Facts = Mapping[str, Any]


class RankSwitches:
    """The switches of each rank on both sides, and the ranks whose switches are their own."""

    def __init__(self, sides: tuple[Facts, Facts], ranks: Sequence[int]) -> None:
        by_rank = [
            {rank: _switches(facts) for rank, facts in facts_by_rank(side).items()}
            for side in sides
        ]
        self._usual = _switches(sides[0]), _switches(sides[1])
        self._own: dict[int, tuple[Facts, Facts]] = {}  # of ranks that have others
        for rank in ranks:
            ours, theirs = (
                found.get(rank, usual) for found, usual in zip(by_rank, self._usual, strict=True)
            )
            if (ours, theirs) != self._usual:
                self._own[rank] = ours, theirs
        self._odd: dict[int, tuple[float, str]] = {}
        known = [rank for rank in ranks if all(rank in found for found in by_rank)]
        for switch in SWITCHES if len(ranks) > 1 else ():
            self._look_at(switch, known)

    def facts(self, rank: int) -> tuple[Facts, Facts]:
        """By which products of a rank are judged: none, where its switches are its own."""
        return ({}, {}) if rank in self._odd else self._of(rank)

    def _of(self, rank: int) -> tuple[Facts, Facts]:
        return self._own.get(rank, self._usual)

    def name(self, culprits: Sequence[Culprit]) -> None:
        """Say of products whose error a switch of their rank makes that this is the cause."""
        for culprit in culprits:
            unit, text = self._odd.get(culprit.rank, (0.0, ""))
            largest = _LARGEST * unit / roundoff("float32")
            if (
                culprit.cause == "result"
                and is_product(culprit.op)
                and culprit.own_error <= largest
            ):
                culprit.cause = "flag"
                culprit.reason = f"{text}; {culprit.reason}"
            self.name(culprit.follows)

    def _look_at(self, switch: str, known: Sequence[int]) -> None:
        odd = []
        for rank in known:
            ours, theirs = (switch_unit(facts, switch) for facts in self._of(rank))
            if ours != theirs:
                odd.append((rank, max(ours, theirs)))
        if not odd or len(odd) == len(known):
            return
        numbers = listed([rank for rank, _ in odd])
        for rank, unit in odd:
            here, there = (switch_value(facts, switch) for facts in self._of(rank))
            text = f"{switch} is {here} on {numbers}, {there} expected, as on the other ranks"
            if unit > self._odd.get(rank, (0.0, ""))[0]:
                self._odd[rank] = unit, text


def _switches(facts: Facts) -> Facts:
    """What has to be known of the facts of a rank, of which there may be many."""
    found: dict[str, dict[str, object]] = {}
    for switch in SWITCHES:
        room, _, name = switch.partition(".")
        if (value := switch_value(facts, switch)) is not None:
            found.setdefault(room, {})[name] = value
    return found
