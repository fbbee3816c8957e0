"""What one side has and the other has lost: it was killed, or its files are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.verdict import Side
from tensorprobe.records import TensorRecord
from tensorprobe.store.native import NOT_WRITTEN

_SIDES: tuple[Side, Side] = ("actual", "expected")


class Lost(NamedTuple):
    """How much was lost, and what the first is."""

    n: int = 0
    first: str = ""


def lost_values(
    pairs: Sequence[CallPair], unfinished: tuple[set[str], set[str]], *, of_several: bool = False
) -> Lost:
    """What a side has lost that the other one has; `unfinished` are the steps of each side. Of
    several ranks, which one it is."""
    n, first = 0, ""
    for pair in pairs:
        calls = (pair.pair.actual, pair.pair.expected)
        where = f"{pair.call.name} of step {pair.call.step}"
        where += f" on rank {pair.call.rank}" if of_several else ""
        unit = f"rank{pair.call.rank}/step{pair.call.step}"
        for side, at in zip(_SIDES, (0, 1), strict=True):
            mine, other = calls[at], calls[1 - at]
            if other is None or other.status == "begun":
                continue
            found = []
            if mine is None:
                if unit in unfinished[at] and unit not in unfinished[1 - at]:
                    found = [f"{side} ended before {where}"]
            elif mine.status == "begun":
                found = [f"{side} has no end of {where}"]
            else:
                found = [
                    f"{side} has no value of {row.name} of {where}"
                    for row in pair.tensors
                    if _is_lost((row.actual, row.expected)[at], (row.expected, row.actual)[at])
                ]
            if found and not n:
                first = found[0]
            n += len(found)
    return Lost(n, first)


def _is_lost(mine: TensorRecord | None, other: TensorRecord | None) -> bool:
    """Whether a value that the other side has was never written."""
    if mine is None or other is None or mine.gap != NOT_WRITTEN:
        return False
    return other.summary is not None or other.digest is not None
