"""Who made what: the call that gave each tensor, known by content, and what lies inside what."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tensorprobe.comparing.align import forward_of
from tensorprobe.comparing.content import content
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.records import Call

_INPUTS = ("input", "parameter", "buffer")


def find_containers(pairs: Sequence[CallPair]) -> list[bool]:
    """Which calls have others inside them: modules at `mix`, optimizer steps beside their ops, and
    custom functions whose backward is Python."""
    parents: set[tuple[int, int, str]] = set()
    for pair in pairs:
        for call in _calls(pair):
            if call.parent:
                parents.add((call.rank, call.step, call.parent))
    found = []
    for i, pair in enumerate(pairs):
        call = pair.call
        name = forward_of(call.name) if call.direction == "backward" else call.name
        # at L2 the parent of a backward operator is its forward one, which it is not inside of
        inside = name.startswith("Module.") and (call.rank, call.step, name) in parents
        if call.name.startswith("Optimizer.") and i + 1 < len(pairs):
            following = pairs[i + 1].call
            inside = following.step == call.step and not following.name.startswith(
                ("Module.", "Optimizer.")
            )
        if call.name.startswith("Function.") and call.direction == "backward":
            inside = _runs_calls(pairs, i)
        found.append(inside)
    return found


def _runs_calls(pairs: Sequence[CallPair], at: int) -> bool:
    """Whether the backward of a custom function is Python: forward calls between it and the next
    backward call. Checkpointing runs whole modules in there."""
    backward = pairs[at].call
    may_be = ("Optimizer.",) if "Checkpoint" in backward.name else ("Optimizer.", "Module.")
    for following in range(at + 1, len(pairs)):
        call = pairs[following].call
        if call.step != backward.step or call.name.startswith(may_be):
            return False
        if call.direction == "backward":
            return following > at + 1
    return False


class Dataflow:
    """For each side, which pair made the content that an input has."""

    def __init__(self, pairs: Sequence[CallPair], containers: Sequence[bool]) -> None:
        self.pairs = pairs
        # (side, pair, tensor name) -> the pair that made it
        self.producer: dict[tuple[int, int, str], int] = {}
        self.forward: dict[int, int] = {}  # a backward pair -> its forward pair
        for side in (0, 1):
            self._trace(side, containers)
        names: dict[tuple[int, int, str], int] = {}
        for i, pair in enumerate(pairs):
            call = pair.call
            if call.direction == "forward":
                names.setdefault((call.rank, call.step, call.name), i)
            elif (at := names.get((call.rank, call.step, forward_of(call.name)))) is not None:
                self.forward[i] = at

    def _trace(self, side: int, containers: Sequence[bool]) -> None:
        made: dict[Hashable, int] = {}
        for i, pair in enumerate(self.pairs):
            if pair.pair[side] is None:
                continue
            outputs = []
            for row in pair.tensors:
                record = row.actual if side == 0 else row.expected
                if record is None or (key := content(record)) is None:
                    continue
                role = record.role
                if role == "parameter_grad":
                    made.setdefault(key, i)  # what the engine has added up, seen here first
                elif role == "output" or (role == "buffer" and is_written(row)):
                    outputs.append(key)
                elif (at := made.get(key)) is not None:
                    self.producer[side, i, row.name] = at
            if containers[i]:
                continue
            for key in outputs:
                before = made.get(key)
                # A call of both sides is the better witness than one that only one side has.
                if before is None or pair.is_paired or not self.pairs[before].is_paired:
                    made[key] = i

    def producers(self, i: int, name: str) -> tuple[int | None, int | None]:
        return self.producer.get((0, i, name)), self.producer.get((1, i, name))


def _calls(pair: CallPair) -> list[Call]:
    return [call for call in (pair.pair.actual, pair.pair.expected) if call is not None]


def is_written(row: TensorPair) -> bool:
    """Whether a call made this content: an output, or an argument or buffer it wrote to in place.

    The latter are kept as `buffers.input.1`, named after the argument, and as
    `buffers.running_mean.after`.
    """
    if row.role == "buffer":
        return row.name.startswith("buffers.input.") or row.name.endswith(".after")
    return row.role == "output"
