"""The ranks and steps of two captures: which go together, and which one side lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tensorprobe.config import parse_numbers
from tensorprobe.records import Call, Capture

Side = Literal["actual", "expected"]
Units = dict[tuple[int, int], list[Call]]  # by rank and step


class Lacking(NamedTuple):
    """A step of a rank that only one side has."""

    rank: int
    step: int
    only_in: Side
    n_calls: int
    is_whole_rank: bool  # the other side has no step of it
    is_meant: bool  # the other side was told not to record it


def units(capture: Capture, step: int | None, rank: int | None) -> Units:
    """The calls of each rank and step, of one step or rank where it is given."""
    found: Units = {}
    for call in capture.calls:
        if (step is None or call.step == step) and (rank is None or call.rank == rank):
            found.setdefault((call.rank, call.step), []).append(call)
    return found


def are_one_each(actual: Units, expected: Units) -> bool:
    """One step each: they go together, whatever their numbers."""
    return len(actual) == len(expected) == 1


def lacking(
    actual: Capture, expected: Capture, step: int | None, rank: int | None
) -> list[Lacking]:
    """What one side has and the other has not."""
    ours, theirs = units(actual, step, rank), units(expected, step, rank)
    if are_one_each(ours, theirs):
        return []
    return [*_only("actual", ours, theirs, expected), *_only("expected", theirs, ours, actual)]


def _only(side: Side, here: Units, there: Units, other: Capture) -> Iterable[Lacking]:
    ranks = {rank for rank, _ in there}
    for (rank, step), calls in sorted(here.items()):
        if (rank, step) not in there:
            is_meant = _was_left_out(other, rank, step)
            yield Lacking(rank, step, side, len(calls), rank not in ranks, is_meant)


def is_narrow(capture: Capture) -> bool:
    """Whether the recorder was told to leave calls out: what is missing was not looked at."""
    config = capture.facts.get("config")
    if not isinstance(config, dict):
        return False
    if any(config.get(key) for key in ("calls", "between", "apis", "modules", "names")):
        return True
    directions = config.get("directions")
    return isinstance(directions, list) and len(directions) == 1


def _was_left_out(capture: Capture, rank: int, step: int) -> bool:
    config = capture.facts.get("config")
    if not isinstance(config, dict):
        return False
    if config.get("keep_last") or is_narrow(capture):
        return True
    chosen = (parse_numbers(key, config.get(key)) for key in ("steps", "ranks"))
    return any(
        numbers is not None and number not in numbers
        for numbers, number in zip(chosen, (step, rank), strict=True)
    )


def describe(lacks: Sequence[Lacking]) -> str:
    """Such as: rank 1 is only in expected, steps 2, 3 are only in actual."""
    parts: dict[tuple[str, Side], list[int]] = {}
    for each in lacks:
        noun = "rank" if each.is_whole_rank else "step"
        numbers = parts.setdefault((noun, each.only_in), [])
        number = each.rank if each.is_whole_rank else each.step
        if number not in numbers:
            numbers.append(number)
    return ", ".join(
        f"{noun}{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))} "
        f"{'are' if numbers[1:] else 'is'} only in {side}"
        for (noun, side), numbers in parts.items()
    )
