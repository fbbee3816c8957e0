"""The calls that only one side has, by their names without numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.verdict import Side
from tensorprobe.records import Call


class Alike(msgspec.Struct):
    """Calls of one side with one name, but for its number."""

    name: str  # of the first
    after: str  # the paired call that it follows
    n: int = 0


OneSided = dict[tuple[str, Side], Alike]


def one_sided(pairs: Sequence[CallPair]) -> OneSided:
    """Those in steps that both sides have."""
    shared = {
        (call.rank, call.step)
        for pair in pairs
        if pair.is_paired
        for call in (pair.pair.actual, pair.pair.expected)
        if call is not None
    }
    found: OneSided = {}
    before = "the start"
    for pair in pairs:
        call = pair.call
        if pair.is_paired:
            before = call.name
        elif (call.rank, call.step) in shared:
            side: Side = "actual" if pair.pair.expected is None else "expected"
            found.setdefault((_stem(call), side), Alike(call.name, before)).n += 1
    return found


def add_one_sided(found: OneSided, more: OneSided) -> None:
    """Take in those of another rank."""
    for key, alike in more.items():
        if key in found:
            found[key].n += alike.n
        else:
            found[key] = alike


def _stem(call: Call) -> str:
    """A call's name without its number, wherever that stands."""
    return ".".join(part for part in call.name.split(".") if not part.isdigit())
