"""Which calls of the ranks of a run are one communication, and what each gives and gets. No torch.

A call says which group it speaks with and how many times it has done so; where that was not
recorded, the group is read from its arguments, and it is the n-th of its name in its step.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from tensorprobe.nests import leaves_of
from tensorprobe.records import Call, Collective, TensorRecord

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "reduce",
    "gather", "barrier", "message",
]  # fmt: skip
FROM_ONE: tuple[Kind, ...] = ("broadcast", "scatter")  # `src` speaks, the others hear
TO_ONE: tuple[Kind, ...] = ("reduce", "gather")  # `dst` hears
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("monitored_barrier", "barrier"),
    ("barrier", "barrier"),
    ("all_?reduce", "all_reduce"),
    ("all_?gather", "all_gather"),
    ("reduce_?scatter", "reduce_scatter"),
    ("all_?to_?all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("i?send", "message"),
    ("i?recv", "message"),
)
_PATTERN = re.compile("_*(?:" + "|".join(f"({pattern})" for pattern, _ in _KINDS) + ")")
# What is of objects goes through other calls, which are recorded too.
_NOT_OURS = ("_object", "_multigpu")
_PREFIXES = ("Distributed.", "Ops._c10d_functional.", "Ops.c10d.", "Ops._dtensor.")
_FUNCTIONAL = ("torch.ops._c10d_functional", "torch.ops.c10d_functional", "torch.ops._dtensor")
_MEMBERS = re.compile(r"ranks \[([\d, ]*)\]")


class Key(NamedTuple):
    """What the calls of one communication have in common."""

    step: int
    group: str  # "0, 1, 2, 3"; "2 to 3" of a message; "" of all ranks
    kind: Kind
    number: int  # as the group has counted; else the n-th of its kind in this group and step
    name: str = ""  # torch's of the group: two may have the same members


def kind_of(call: Call) -> Kind | None:
    """What kind of communication a call is; None: of none that is known."""
    if call.direction != "forward" or not is_communication(call.name):
        return None
    found = _PATTERN.match(api_of(call))
    if found is None or any(word in api_of(call) for word in _NOT_OURS):
        return None
    return _KINDS[found.lastindex - 1][1] if found.lastindex else None


def is_communication(name: str) -> bool:
    """Whether a call of this name speaks with other ranks: it cannot be run alone."""
    return name.startswith(_PREFIXES)


def api_of(call: Call) -> str:
    """The name of what it calls: all_reduce."""
    parts = call.op.split(".")
    if call.op.startswith("torch.ops.") and len(parts) > 3:
        return parts[3]
    return parts[-1]


def is_speaking(call: Call) -> bool:
    """Whether a message goes out of this rank."""
    return api_of(call) in SENDS


def is_functional(call: Call) -> bool:
    """Whether its result is what it returns, and its argument stays as it is."""
    return call.op.startswith(_FUNCTIONAL)


def linked(calls: Iterable[Call]) -> Iterator[tuple[Key | None, Call]]:
    """The communications of one rank, in order, each with what it shares with those of others;
    None where it is not known whom it spoke to."""
    numbers: Counter[tuple[int, str, Kind]] = Counter()
    for call in calls:
        kind = kind_of(call)
        if kind is None:
            continue
        if call.collective is not None:
            yield _recorded(call, call.collective, kind), call
            continue
        group = _group(call, kind)
        if group is None:
            yield None, call
            continue
        counted = numbers[call.step, group, kind]
        numbers[call.step, group, kind] += 1
        yield Key(call.step, group, kind, counted), call


def _recorded(call: Call, told: Collective, kind: Kind) -> Key | None:
    group = _group_text(told.group)
    name = told.group_name
    if kind == "message":
        if told.peer is None:
            return None
        ends = (call.rank, told.peer) if is_speaking(call) else (told.peer, call.rank)
        group = f"{ends[0]} to {ends[1]}"
        name += f" tag {told.tag}" if told.tag else ""
    return Key(call.step, group, kind, told.sequence, name)


@functools.lru_cache(maxsize=1024)
def _group_text(group: tuple[int, ...]) -> str:
    """The same text each time, not one more: with a thousand ranks it is long."""
    return ", ".join(map(str, sorted(group)))


def _group(call: Call, kind: Kind) -> str | None:
    if kind == "message":
        speaks = is_speaking(call)
        other = argument(call, "dst" if speaks else "src", 1)
        if type(other) is not int:
            return None
        ends = (call.rank, other) if speaks else (other, call.rank)
        return f"{ends[0]} to {ends[1]}"
    for value in (*call.args, *call.kwargs.values()):
        text = getattr(value, "text", None)
        if getattr(value, "kind", None) == "process_group" and isinstance(text, str):
            members = _MEMBERS.match(text)
            return members[1] if members else text
    if is_functional(call):
        names = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, str)]
        return names[-1] if names else ""
    return ""


def members_of(key: Key, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a group, as far as its name says: else all."""
    if key.kind == "message":
        return tuple(int(each) for each in key.group.split(" to ") if each.lstrip("-").isdigit())
    return _numbers(key.group) or tuple(ranks)


@functools.lru_cache(maxsize=1024)
def _numbers(group: str) -> tuple[int, ...]:
    """The ranks that a group is called by; none if it is called otherwise."""
    numbers = group.split(", ")
    return tuple(map(int, numbers)) if all(each.isdigit() for each in numbers) else ()


def argument(call: Call, name: str, position: int) -> Any:
    """An argument by its name or its position; None where it was left out."""
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[position] if len(call.args) > position else None


def root_of(call: Call, kind: Kind) -> int | None:
    """The rank that speaks, or hears, alone."""
    if call.collective is not None:
        return call.collective.root
    name = "src" if kind in FROM_ONE else "dst"
    place = 2 if kind in ("scatter", "gather") else 1
    found = argument(call, name, place)
    if found is None and name == "src" and call.name.startswith("Distributed."):
        found = 0
    if found is None and name == "dst" and kind == "gather":
        found = 0
    return found if type(found) is int else None


def speaks(call: Call, kind: Kind) -> bool:
    """Whether others hear from this rank in this call."""
    if kind == "message":
        return is_speaking(call)
    return kind not in FROM_ONE or root_of(call, kind) == call.rank


def hears(call: Call, kind: Kind) -> bool:
    """Whether this rank hears from others in this call."""
    if kind == "message":
        return not is_speaking(call)
    return kind not in TO_ONE or root_of(call, kind) == call.rank


def reduction_of(call: Call) -> str | None:
    """How a call reduces: sum, avg, max, min, product; None where it was not recorded."""
    if call.collective is not None:
        return (call.collective.reduce or "sum").lower()
    for value in (*call.args, *call.kwargs.values()):
        if getattr(value, "kind", None) == "reduce_op":
            return _op_word(str(value.text))
        if isinstance(value, str) and value.lower() in ("sum", "avg", "max", "min", "product"):
            return value.lower()
    return None


def _op_word(text: str) -> str:
    return text.rpartition(".")[2].lower().removeprefix("redoptype.")


# Where each kind has what a rank gives, and what it gets: the position and name of the argument.
_GIVEN: dict[Kind, tuple[int, tuple[str, ...]]] = {
    "all_reduce": (0, ("tensor",)),
    "reduce": (0, ("tensor",)),
    "broadcast": (0, ("tensor",)),
    "message": (0, ("tensor",)),
    "all_gather": (1, ("tensor", "input_tensor", "input")),
    "reduce_scatter": (1, ("input_list", "input")),
    "all_to_all": (1, ("input_tensor_list", "input")),
    "gather": (0, ("tensor",)),
    "scatter": (1, ("scatter_list",)),
}
_GOT: dict[Kind, tuple[int, tuple[str, ...]]] = {
    "all_gather": (0, ("tensor_list", "output_tensor", "output")),
    "reduce_scatter": (0, ("output",)),
    "all_to_all": (0, ("output_tensor_list", "output")),
    "gather": (1, ("gather_list",)),
    "scatter": (0, ("tensor",)),
}


def given(call: Call, kind: Kind) -> list[TensorRecord]:
    """What a rank gives to a communication, without the memory that is there to be written to."""
    if not speaks(call, kind) or kind == "barrier":
        return []
    if is_functional(call):
        return list(_records(call.args[:1]))
    place, names = _GIVEN[kind]
    if kind == "gather" and call.op.startswith("torch.ops."):
        place = 1
    return list(_records(_place(call, place, names)))


def got(call: Call, kind: Kind) -> list[TensorRecord]:
    """What a rank gets by a communication."""
    if not hears(call, kind) or kind == "barrier":
        return []
    if is_functional(call):
        return [record for record in call.tensors if record.role == "output"]
    place, names = _GOT.get(kind) or _GIVEN[kind]
    if kind == "gather" and call.op.startswith("torch.ops."):
        place = 0
    wanted = {f"{call.name}.output.{place}", *(f"{call.name}.output.{name}" for name in names)}
    return [
        record
        for record in call.tensors
        if record.role == "output"
        and (record.name in wanted or record.name.startswith(tuple(f"{w}." for w in wanted)))
    ]


def _place(call: Call, position: int, names: Sequence[str]) -> Any:
    for name in names:
        if name in call.kwargs:
            return call.kwargs[name]
    return call.args[position] if len(call.args) > position else None


def _records(value: Any) -> Iterator[TensorRecord]:
    for leaf in leaves_of(value):
        if isinstance(leaf, TensorRecord):
            yield leaf


def told(key: Key, ranks: Sequence[int]) -> str:
    """A communication in words: all_reduce #12 of ranks 0, 1, 2, 3."""
    if key.kind == "message":
        return f"message #{key.number} from rank {key.group.replace(' to ', ' to rank ')}"
    if key.group and members_of(key, ()) == ():
        return f"{key.kind} #{key.number} of group {key.group}"
    members = members_of(key, ranks)
    if key.group == "" or len(members) == len(ranks):
        return f"{key.kind} #{key.number} of all ranks"
    return f"{key.kind} #{key.number} of {listed(members)}"


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """Rank 3; ranks 0, 1, 2 and 61 more."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"
