"""Which calls of a capture are checked: chosen by name, and of those that are alike only one."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorprobe.records import Call, Capture, Fields, TensorRecord, matches_name
from tensorprobe.replay.kinds import api_of
from tensorprobe.replay.pairing import ForwardBackward, pair


class Planned(NamedTuple):
    """A call to check, and how many more are like it."""

    pair: ForwardBackward
    alike: int


def plan(
    capture: Capture,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    every: bool = False,
    step: int | None = None,
    rank: int | None = None,
) -> list[Planned]:
    """The calls to check, in execution order."""
    pairs = [
        each
        for each in pair(capture.calls(step=step, rank=rank))
        if (not only or _named(each.forward, only)) and not _named(each.forward, skip)
    ]
    if every:
        return [Planned(each, 0) for each in pairs]
    groups: dict[Any, list[ForwardBackward]] = {}
    for each in pairs:
        groups.setdefault(likeness(each), []).append(each)
    return [Planned(group[0], len(group) - 1) for group in groups.values()]


def _named(call: Call, patterns: Sequence[str]) -> bool:
    names = (call.op, api_of(call.op), call.module)
    return any(
        matches_name(call.name, pattern) or any(fnmatch.fnmatchcase(n, pattern) for n in names)
        for pattern in patterns
    )


def likeness(pair: ForwardBackward) -> Any:
    """A key that is equal for calls of the same op, arguments, shapes, layouts and dtypes."""
    call, back = pair
    kinds = ("autocast", "made as", "made with", "eval")
    notes = tuple(note for note in call.notes if note.startswith(kinds))
    gradients = None if back is None else tuple(_shape(t) for t in back.tensors)
    inputs = _tree((call.args, call.kwargs))
    parameters = tuple(_shape(t) for t in call.tensors if t.role == "parameter")
    return call.op, inputs, parameters, gradients, notes


def _tree(value: Any) -> Any:
    if isinstance(value, TensorRecord):
        return _shape(value)
    if isinstance(value, list | tuple):
        return tuple(_tree(item) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _tree(item)) for key, item in value.items())
    if isinstance(value, Fields):
        return value.type, _tree(value.fields)
    if isinstance(value, slice):
        return "slice", _tree((value.start, value.stop, value.step))
    return type(value).__name__, repr(value)  # 1, 1.0 and True are not alike


def _shape(record: TensorRecord) -> Any:
    return record.dtype, record.shape, record.stride, record.requires_grad
