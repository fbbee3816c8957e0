"""Calls under the names that the peers give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tensorprobe.operators import OPERATORS
from tensorprobe.records import Call, Fields, TensorRecord

# "Tensor.add.3.forward": the method, the number, and what follows.
_METHOD_CALL = re.compile(r"Tensor\.(\w+)\.(\d+)(\.(?:forward|backward))")
# The first of several wins: `add` is written "+", not "+ reversed". Of some the method is what
# people write, and in-place ones are mostly an optimizer's.
_WRITTEN_AS_METHODS = ("pow", "abs", "positive", "bitwise_not")
_DUNDERS = {
    operator.native: operator.dunder
    for operator in reversed(OPERATORS)
    if operator.native not in _WRITTEN_AS_METHODS and not operator.native.endswith("_")
}


def peer_name(name: str) -> str:
    """A call's name as the peers write it: of an operator they know the dunder, Tensor.__add__."""
    parts = _METHOD_CALL.fullmatch(name)
    if parts is None or parts[1] not in _DUNDERS:
        return name
    return f"Tensor.{_DUNDERS[parts[1]]}.{parts[2]}{parts[3]}"


def renamed(call: Call, names: Callable[[str], str]) -> Call:
    """The call, and everything in it, under the name that `names` gives for its own."""
    new, parent = names(call.name), names(call.parent) if call.parent else call.parent
    if new == call.name and parent == call.parent:
        return call
    old = call.name + "."
    tensors: dict[int, TensorRecord] = {}

    def rename(record: TensorRecord) -> TensorRecord:
        if id(record) not in tensors:
            alias = record.alias_of
            tensors[id(record)] = msgspec.structs.replace(
                record,
                name=f"{new}.{record.name.removeprefix(old)}",
                alias_of=alias and f"{new}.{alias.removeprefix(old)}",
            )
        return tensors[id(record)]

    return msgspec.structs.replace(
        call,
        name=new,
        parent=parent,
        args=map_tensors(call.args, rename),
        kwargs=map_tensors(call.kwargs, rename),
        outputs=map_tensors(call.outputs, rename),
        tensors=tuple([rename(record) for record in call.tensors]),
    )


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values in a tree of arguments, each with its place: "input.1.0", "input.mask"."""
    if isinstance(value, Fields):
        value = value.fields
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves(part, f"{name}.{i}")
    else:
        yield name, value


def map_tensors(value: Any, change: Callable[[TensorRecord], Any]) -> Any:
    """A tree of arguments with each tensor in it replaced."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, TensorRecord) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of arguments with each value in it replaced."""
    if isinstance(value, list | tuple):
        items = [map_leaves(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, Fields):
        return Fields(value.kind, value.type, map_leaves(value.fields, change))
    return change(value)
