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
from tensorprobe.records import Capture
from tensorprobe.replay.kinds import is_product

_LARGEST = 16.0  # roundings of the coarse arithmetic that a product may be off by


class RankSwitches:
    """The facts of each rank on both sides, and the ranks whose switches are their own."""

    def __init__(self, actual: Capture, expected: Capture, ranks: Sequence[int]) -> None:
        self._sides = (actual.facts, expected.facts)
        self._by_rank = (facts_by_rank(actual), facts_by_rank(expected))
        self._ranks = tuple(ranks)
        self._odd: dict[int, tuple[float, str]] = {}
        for switch in SWITCHES if len(ranks) > 1 else ():
            self._look_at(switch)

    def facts(self, rank: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """By which products of a rank are judged: none, where its switches are its own."""
        if rank in self._odd:
            return {}, {}
        ours, theirs = (
            found.get(rank, whole) for found, whole in zip(self._by_rank, self._sides, strict=True)
        )
        return ours, theirs

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

    def _look_at(self, switch: str) -> None:
        known = [rank for rank in self._ranks if all(rank in found for found in self._by_rank)]
        odd = []
        for rank in known:
            ours, theirs = (switch_unit(found[rank], switch) for found in self._by_rank)
            if ours != theirs:
                odd.append((rank, max(ours, theirs)))
        if not odd or len(odd) == len(known):
            return
        numbers = listed([rank for rank, _ in odd])
        for rank, unit in odd:
            here, there = (switch_value(found[rank], switch) for found in self._by_rank)
            text = f"{switch} is {here} on {numbers}, {there} expected, as on the other ranks"
            if unit > self._odd.get(rank, (0.0, ""))[0]:
                self._odd[rank] = unit, text
