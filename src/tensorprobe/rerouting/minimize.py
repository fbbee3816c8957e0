"""The smallest set that still passes a test, found by halving: delta debugging. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Passes = Callable[[Sequence[Item]], bool]
# That many of a long list are left out one by one, before it is halved again and again.
SAMPLES = 4


def smallest(items: Sequence[Item], passes: Passes[Item]) -> list[Item]:
    """A part of `items` that passes, and of which nothing can be left out.

    `items` itself is known to pass, and nothing at all to fail. The same question may be asked
    twice, and the items of a question are in the order of `items`.

        smallest("abcdef", lambda part: "b" in part and "e" in part)     # ["b", "e"]
    """
    if len(items) == 1:
        return list(items)
    found = _in_order(items, _needed(items, [], list(items), False, passes))
    # More is not always better: two wrongs can make a right. Then halve without that assumption.
    if not found or not passes(found):
        found = list(items)
    return _minimal(found, passes)


def all_are_needed(items: Sequence[Item], passes: Passes[Item]) -> bool:
    """Whether, as far as a few samples tell, none of a long list can be left out.

    A fault in every call of a kernel would else cost a probe for each call, several times over.
    """
    if len(items) <= 2 * SAMPLES:
        return False
    places = [round(i * (len(items) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)]
    return not any(passes([*items[:place], *items[place + 1 :]]) for place in places)


def _needed(
    order: Sequence[Item], base: list[Item], items: list[Item], grown: bool, passes: Passes[Item]
) -> list[Item]:
    """What `base` needs of `items` to pass; it takes about log2 questions for each item found.

    Right where whatever holds a passing set passes.
    """
    if grown and passes(_in_order(order, base)):
        return []
    if len(items) == 1:
        return items
    half = len(items) // 2
    first, second = items[:half], items[half:]
    late = _needed(order, [*base, *first], second, True, passes)
    early = _needed(order, [*base, *late], first, bool(late), passes)
    return [*early, *late]


def _minimal(items: list[Item], passes: Passes[Item]) -> list[Item]:
    """The smallest set by ddmin: try each part, then all without it, with ever smaller parts."""
    kept, parts = items, 2
    while len(kept) > 1:
        chunks = _split(kept, parts)
        found = next((chunk for chunk in chunks if passes(chunk)), None)
        if found is not None:
            kept, parts = found, 2
            continue
        # of two chunks, each is what the other leaves
        rests = ([i for other in chunks if other is not c for i in other] for c in chunks)
        found = next(filter(passes, rests), None) if parts > 2 else None
        if found is not None:
            kept, parts = found, max(parts - 1, 2)
        elif parts >= len(kept):
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _split(items: list[Item], parts: int) -> list[list[Item]]:
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def _in_order(order: Sequence[Item], items: list[Item]) -> list[Item]:
    return [item for item in order if item in items]
