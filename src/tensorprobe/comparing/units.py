"""The steps of each rank, and what one side has of them that the other has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorprobe.comparing.verdict import Side
from tensorprobe.config import parse_numbers
from tensorprobe.records import Call, Capture

Unit = tuple[int, int]  # a rank and a step
Units = dict[Unit, list[Call]]


class Lacking(NamedTuple):
    """A step of a rank that only one side has."""

    rank: int
    step: int
    only_in: Side
    n_calls: int
    is_whole_rank: bool  # the other side has no step of it
    is_meant: bool  # the other side was told not to record it
    has_model: bool  # or a step of an optimizer's; else what a program does before it ends


class Size(NamedTuple):
    """How much there is of a step."""

    n_calls: int
    is_beside: bool  # none is the model's or an optimizer's


def units_of(calls: Sequence[Call], step: int | None, rank: int | None) -> Units:
    """The calls of each rank and step, of one step or rank where it is given."""
    found: Units = {}
    for call in calls:
        if (step is None or call.step == step) and (rank is None or call.rank == rank):
            found.setdefault((call.rank, call.step), []).append(call)
    return found


def renumbered(ours: Units, theirs: Units) -> Units:
    """Those of the expected side: one rank each go together, whatever its number."""
    ranks = [{rank for rank, _ in found} for found in (ours, theirs)]
    if len(ranks[0]) == len(ranks[1]) == 1 and ranks[0] != ranks[1]:
        (mine,) = ranks[0]
        return {(mine, number): calls for (_, number), calls in theirs.items()}
    return theirs


def are_one_each(actual: Mapping[Unit, object], expected: Mapping[Unit, object]) -> bool:
    """One step each: they go together, whatever their numbers."""
    return len(actual) == len(expected) == 1


def lacking(
    ours: Mapping[Unit, Size], theirs: Mapping[Unit, Size], actual: Capture, expected: Capture
) -> list[Lacking]:
    """What one side has and the other has not."""
    if are_one_each(ours, theirs):
        return []
    return [*_only("actual", ours, theirs, expected), *_only("expected", theirs, ours, actual)]


def _only(
    side: Side, here: Mapping[Unit, Size], there: Mapping[Unit, Size], other: Capture
) -> list[Lacking]:
    ranks = {rank for rank, _ in there}
    found = []
    for (rank, step), size in sorted(here.items()):
        if (rank, step) not in there:
            is_meant = _was_left_out(other, rank, step)
            has_model = rank not in ranks or not size.is_beside
            found.append(
                Lacking(rank, step, side, size.n_calls, rank not in ranks, is_meant, has_model)
            )
    return found


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


def lacking_told(lacks: Sequence[Lacking]) -> str:
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


def is_outside(call: Call) -> bool:
    """Whether a call is outside of all modules, in forward."""
    return call.direction == "forward" and not call.module and not call.name.startswith("Module.")


def is_beside(call: Call) -> bool:
    """Whether a call is neither the model's nor an optimizer's."""
    return is_outside(call) and not call.name.startswith("Optimizer.")
