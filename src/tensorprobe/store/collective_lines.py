"""Groups of ranks as they stand in a log, in collectives and shardings: "0-7" or "0-24/8"."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from tensorprobe.records import Collective, Sharding
from tensorprobe.store.lines import CollectiveLine, ShardingLine

MAX_RANKS = 1 << 20  # a text of a few bytes could name any number of them
_RUN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def pack_collective(collective: Collective) -> CollectiveLine:
    """A collective as part of a call's line."""
    fields = msgspec.structs.asdict(collective)
    return CollectiveLine(**{**fields, "group": pack_ranks(collective.group)})


def unpack_collective(line: CollectiveLine) -> Collective:
    """What `pack_collective` made a line of; ValueError where the ranks are none."""
    return Collective(**{**msgspec.structs.asdict(line), "group": unpack_ranks(line.group)})


def pack_sharding(sharding: Sharding) -> ShardingLine:
    """How a tensor is sharded, as part of its line."""
    fields = msgspec.structs.asdict(sharding)
    return ShardingLine(**{**fields, "ranks": pack_ranks(sharding.ranks)})


def unpack_sharding(line: ShardingLine) -> Sharding:
    """What `pack_sharding` made a line of; ValueError where it makes no sense."""
    ranks = unpack_ranks(line.ranks)
    if len(line.placements) != len(line.mesh_shape) or math.prod(line.mesh_shape) != len(ranks):
        raise ValueError(f"no mesh: {len(ranks)} ranks as {list(line.mesh_shape)[:8]}")
    return Sharding(**{**msgspec.structs.asdict(line), "ranks": ranks})


@functools.lru_cache(maxsize=1024)
def pack_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as text: what rises in equal steps is "first-last", with "/step" where that is not 1.

    pack_ranks((0, 8, 16, 24, 3))     # "0-24/8,3"
    """
    return ",".join(_runs(ranks))


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    start = 0
    while start < len(ranks):
        end, step = start + 1, 0
        if end < len(ranks) and ranks[end] > ranks[start]:
            step = ranks[end] - ranks[start]
            while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
                end += 1
        if end - start < 3:  # two are as short by themselves
            end = start + 1
        if end - start == 1:
            yield str(ranks[start])
        else:
            yield f"{ranks[start]}-{ranks[end - 1]}" + (f"/{step}" if step > 1 else "")
        start = end


@functools.lru_cache(maxsize=1024)  # calls of one group share one tuple
def unpack_ranks(text: str) -> tuple[int, ...]:
    """The ranks that `pack_ranks` made a text of; ValueError for other text."""
    ranks: list[int] = []
    for part in text.split(",") if text else ():
        found = _RUN.fullmatch(part)
        if found is None:
            raise ValueError(f"no ranks of a group: {text[:80]!r}")
        first, last, step = (int(number) if number else None for number in found.groups())
        run = range(first or 0, (first or 0) + 1 if last is None else last + 1, step or 1)
        if len(ranks) + len(run) > MAX_RANKS:
            raise ValueError(f"a group of more than {MAX_RANKS} ranks: {text[:80]!r}")
        ranks += run
    return tuple(ranks)
