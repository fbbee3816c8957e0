"""The lines of calls.jsonl: one struct a kind of line, encoded to strict JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeGuard

import msgspec

from tensorprobe.records import Direction, Status, TensorSummary
from tensorprobe.tensors import sketch


class TensorLine(msgspec.Struct, omit_defaults=True, gc=False):
    """A tensor inside a tree, as `{"tensor": TensorLine}`; `value` is the id of its content."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    device: str = "cpu"
    grad: bool = False
    value: int | None = None
    gap: str | None = None
    same: str | None = None


# What most lines have of each section: shared, and left out when they are written. An empty dict
# would not be.
NO_TENSORS: Mapping[str, TensorLine] = MappingProxyType({})


class StackLine(msgspec.Struct, tag_field="type", tag="stack"):
    """A Python stack, innermost frame first; comes before the first call that names its id."""

    id: int
    frames: list[str]


class CallLine(msgspec.Struct, tag_field="type", tag="call", omit_defaults=True, kw_only=True):
    """A call that is about to run. `args` and `kwargs` hold trees (see tree.py)."""

    id: int
    name: str
    op: str
    module: str = ""
    direction: Direction = "forward"
    thread: str = "MainThread"
    parent: str | None = None
    stack: int | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    parameters: Mapping[str, TensorLine] = NO_TENSORS
    parameter_grads: Mapping[str, TensorLine] = NO_TENSORS
    buffers: Mapping[str, TensorLine] = NO_TENSORS
    states: Mapping[str, TensorLine] = NO_TENSORS
    notes: list[str] = []


class EndLine(msgspec.Struct, tag_field="type", tag="end", omit_defaults=True, kw_only=True):
    """The call `id` returned, or raised; what is named here adds to what its CallLine named.

    `args` and `kwargs` stand in for the CallLine's: some of them came only after it had begun.
    """

    id: int
    args: list[Any] | None = None
    kwargs: dict[str, Any] = {}
    outputs: Any = None
    parameters: Mapping[str, TensorLine] = NO_TENSORS
    parameter_grads: Mapping[str, TensorLine] = NO_TENSORS
    buffers: Mapping[str, TensorLine] = NO_TENSORS
    states: Mapping[str, TensorLine] = NO_TENSORS
    status: Status = "complete"
    error: str | None = None
    notes: list[str] = []


class ValueLine(
    msgspec.Struct, tag_field="type", tag="value", omit_defaults=True, kw_only=True, gc=False
):
    """The content of every tensor that names this id.

    `blob` is (shard, file offset, nbytes), and where the content is packed its own nbytes too.
    """

    id: int
    summary: list[Any] | None = None
    sketch: bytes | None = None
    digest: str | None = None
    blob: Annotated[tuple[int, ...], msgspec.Meta(min_length=3, max_length=4)] | None = None
    gap: str | None = None


class GapLine(msgspec.Struct, tag_field="type", tag="gap"):
    """Something that could not be recorded."""

    name: str
    reason: str


class ClosedLine(msgspec.Struct, tag_field="type", tag="closed", omit_defaults=True):
    """The step ended in good order. Lines after it are a recording resumed in the same step.

    It counts what came since the last such line; `whole` if that is all there is in the file.
    """

    calls: int
    gaps: int
    whole: bool = False


Line = StackLine | CallLine | EndLine | ValueLine | GapLine | ClosedLine
_encoder = msgspec.json.Encoder()
decode = msgspec.json.Decoder(Line).decode


# Of lines in a list (of anything else msgspec 0.22 keeps the iterator); raises where `encode` would
# write text that is not UTF-8 otherwise.
encode_now: Callable[[list[Any]], bytes] = _encoder.encode_lines


def encode(line: Line | TensorLine) -> bytes:
    """One line with its newline."""
    try:
        return encode_now([line])
    except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
        return _encoder.encode(speakable(msgspec.to_builtins(line))) + b"\n"


def encode_lines(lines: Sequence[Line]) -> bytes:
    """Many lines, each with its newline."""
    try:
        return _encoder.encode_lines(lines)
    except UnicodeEncodeError:
        return b"".join(map(encode, lines))


def speakable(tree: Any) -> Any:
    """The tree with text that UTF-8 cannot carry written as escapes."""
    if isinstance(tree, str):
        return tree.encode("utf-8", "backslashreplace").decode()
    if isinstance(tree, list):
        return [speakable(item) for item in tree]
    if isinstance(tree, dict):
        return {speakable(key): speakable(value) for key, value in tree.items()}
    return tree


def pack_summary(summary: TensorSummary | None) -> list[Any] | None:
    """A summary as seven JSON values, or eight where it is not counted; JSON has no NaN and no
    infinity, they become text."""
    if summary is None:
        return None
    s = summary
    fields: list[Any] = [s.min, s.max, s.mean, s.norm, s.nan_count, s.inf_count, s.zero_count]
    if not s.counted:
        fields.append(False)
    # One test for the usual case: NaN and infinity survive a sum.
    if math.isfinite((s.min or 0) + (s.max or 0) + (s.mean or 0) + (s.norm or 0)):
        return fields
    return [str(f) if type(f) is float and not math.isfinite(f) else f for f in fields]


_USUAL = (*(float,) * 4, *(int,) * 3)  # what most summaries hold


def unpack_summary(fields: list[Any], packed: bytes | None = None) -> TensorSummary:
    """What `pack_summary` made seven or eight values of, and its sketch; ValueError or TypeError
    for others."""
    sums = None if packed is None else sketch.check(packed)
    if tuple(map(type, fields)) == _USUAL and min(fields[4:]) >= 0 and max(fields[4:]) < 2**63:
        low, high, mean, norm, nan, inf, zero = fields
        return TensorSummary(low, high, mean, norm, nan, inf, zero, True, sums)
    values: list[Any] = [float(field) if type(field) is str else field for field in fields]
    if len(values) > 8:
        raise ValueError(f"no summary of a tensor: {str(fields)[:80]}")
    summary = msgspec.structs.replace(TensorSummary(*values), sketch=sums)
    if not all(map(_is_statistic, values[:4])) or not all(map(_is_count, values[4:7])):
        raise ValueError(f"no summary of a tensor: {str(fields)[:80]}")
    return summary


def _is_statistic(value: object) -> bool:
    return value is None or type(value) in (float, bool) or _is_int(value)


def _is_count(value: object) -> bool:
    return _is_int(value) and value >= 0


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int and -(2**63) <= value < 2**64
