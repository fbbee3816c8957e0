"""Which backward belongs to which forward, and which call a name means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tensorprobe.operators import native_name
from tensorprobe.records import Call, Capture, no_such_call


class ForwardBackward(NamedTuple):
    """A call that can be run, and the backward that went through it."""

    forward: Call
    backward: Call | None


def backward_name(name: str) -> str:
    """The name of the backward of a forward call; modules have their number at the end."""
    if name.endswith(".forward"):
        return name.removesuffix(".forward") + ".backward"
    head, middle, number = name.rpartition(".forward.")
    return f"{head}.backward.{number}" if middle else name


def pair(calls: Iterable[Call]) -> list[ForwardBackward]:
    """The runnable calls in order, each with its backward.

    At L2 the ops that backward runs are calls of their own, with no forward of that name.
    """
    calls = list(calls)
    backwards: dict[tuple[int, int, str], Call] = {}
    for call in calls:
        if call.direction == "backward":
            backwards.setdefault((call.step, call.rank, call.name), call)
    pairs = []
    for call in calls:
        if call.direction == "forward":
            key = (call.step, call.rank, backward_name(call.name))
            pairs.append(ForwardBackward(call, backwards.pop(key, None)))
    alone = {id(call) for call in backwards.values() if call.op.startswith("torch.ops.")}
    pairs += [ForwardBackward(call, None) for call in calls if id(call) in alone]
    return sorted(pairs, key=lambda each: (each.forward.rank, each.forward.index))


def find_pair(
    capture: Capture, name: str, *, step: int | None = None, rank: int | None = None
) -> ForwardBackward:
    """The call that a name means: its own, its backward's, a tensor's, or the peers' spelling."""
    calls = capture.calls(step=step, rank=rank)
    pairs = pair(calls)
    wanted = native_name(name)
    for matches in (
        lambda call: call.name == name,
        lambda call: call.name == wanted,
        lambda call: call.name.startswith(wanted + "."),
        lambda call: wanted.startswith(call.name + "."),
    ):
        for each in pairs:
            if matches(each.forward) or (each.backward is not None and matches(each.backward)):
                return each
    raise no_such_call(capture, name, calls)


def is_generated(pair: ForwardBackward) -> bool:
    """Whether inputs are made up from statistics, because no content was kept."""
    calls = [each for each in pair if each is not None]
    return any(
        record.blob is None
        for each in calls
        for record in each.tensors
        if record.role in ("input", "parameter")
    )
