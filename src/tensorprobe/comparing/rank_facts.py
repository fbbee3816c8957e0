"""Versions and numeric switches of all ranks: between two runs, and between the ranks of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.arguments import fact_differences
from tensorprobe.records import Capture
from tensorprobe.store.rank_folders import RankByRank


def facts_of_ranks(actual: Capture, expected: Capture, ranks: Sequence[int]) -> list[str]:
    """How the facts of two runs differ; with the ranks, where it is not all of these."""
    ours, theirs = facts_by_rank(actual.facts), facts_by_rank(expected.facts)
    common = [rank for rank in ranks if rank in ours and rank in theirs]
    if len(ranks) < 2 or not common:
        return fact_differences(actual.facts, expected.facts)
    found: dict[str, list[int]] = {}
    for rank in common:
        for text in fact_differences(ours[rank], theirs[rank]):
            found.setdefault(text, []).append(rank)
    known = {key for facts in ours.values() for key in facts}
    rest = {key: value for key, value in actual.facts.items() if key not in known}
    texts = fact_differences(rest, expected.facts)
    return texts + [
        text if len(found[text]) == len(common) else f"{text} ({listed(found[text])})"
        for text in sorted(found)
    ]


def world_size(capture: Capture) -> int | None:
    """How many ranks the run had; None where it was not written down."""
    for facts in (capture.facts, *facts_by_rank(capture.facts).values()):
        environment = facts.get("environment")
        size = environment.get("WORLD_SIZE") if isinstance(environment, Mapping) else None
        if isinstance(size, str) and size.isdigit():
            return int(size)
        if isinstance(size := facts.get("world_size"), int):
            return size
    if isinstance(capture, RankByRank):
        size = capture.seen.world_size
        return size if isinstance(size, int) else None
    groups = [c.collective.group for c in capture.calls if c.collective is not None]
    return max((max(group, default=-1) + 1 for group in groups), default=None)


class OddFact:
    """A fact by which some ranks of one run differ from most of them."""

    def __init__(self, name: str, value: str, usual: str, ranks: Sequence[int]) -> None:
        self.name, self.value, self.usual, self.ranks = name, value, usual, tuple(ranks)


def odd_facts(capture: Capture) -> list[OddFact]:
    """The facts that are not the same on all ranks of a run."""
    ranks = facts_by_rank(capture.facts)
    if len(ranks) < 2:
        return []
    usual = _usual(list(ranks.values()))
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, facts in ranks.items():
        for text in fact_differences(facts, usual):
            name, _, rest = text.partition(": ")
            value, _, other = rest.removesuffix(" expected").partition(" here, ")
            found.setdefault((name, value, other), []).append(rank)
    return [OddFact(*key, ranks) for key, ranks in sorted(found.items())]


def _usual(all_facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What most have of each fact."""
    usual: dict[str, Any] = {}
    for key in {key: None for facts in all_facts for key in facts}:
        values = [facts.get(key) for facts in all_facts]
        nested = [value for value in values if isinstance(value, Mapping)]
        if nested:
            usual[key] = _usual(nested)
            continue
        texts = Counter(repr(value) for value in values)
        most = texts.most_common(1)[0][0]
        value = next(value for value in values if repr(value) == most)
        if value is not None:
            usual[key] = value
    return usual


def facts_by_rank(of_run: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """What each rank of a run wrote down about itself."""
    about = of_run.get("ranks")
    if not isinstance(about, Mapping):
        return {}
    return {
        int(rank): {key: value for key, value in facts.items() if key != "rank"}
        for rank, facts in about.items()
        if str(rank).isdigit() and isinstance(facts, Mapping) and facts
    }
