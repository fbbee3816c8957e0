"""A capture of any layout written as a native one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorprobe.errors import WriteFailed
from tensorprobe.records import (
    Call,
    Capture,
    Gap,
    Role,
    TensorRecord,
    TensorSummary,
    by_rank_and_step,
)
from tensorprobe.store import tree
from tensorprobe.store.claim import run_identity
from tensorprobe.store.collective_lines import pack_collective, pack_sharding
from tensorprobe.store.lines import CallLine, EndLine, GapLine, StackLine, TensorLine
from tensorprobe.store.shard import Bytes
from tensorprobe.store.unread import Unread
from tensorprobe.store.writer import CaptureWriter

# Facts that a writer gives anew.
_OWN_FACTS = ("format", "ranks", "unfinished", "run", "tool", "created")
_SECTIONS: dict[Role, tuple[str, str]] = {
    "parameter": ("parameters", "parameters"),
    "parameter_grad": ("parameters_grad", "parameter_grads"),
    "buffer": ("buffers", "buffers"),
    "state": ("state", "states"),
}


class _KnownSummary(msgspec.Struct):
    """A result that is there already."""

    summary: TensorSummary | None
    digest: str | None
    error: str | None
    ready: bool = True


def write(capture: Capture, folder: Path, *, compress: bool = False) -> list[str]:
    """Write a capture into a folder; all of it is carried, the names of its calls too.

    Says what of it cannot be read.
    """
    unread = Unread(capture.calls)
    units = by_rank_and_step(capture.calls)
    ranks: dict[int, list[int]] = {}
    for rank, step in units:
        ranks.setdefault(rank, []).append(step)
    for rank, steps in ranks.items():
        facts = _facts(capture), _rank_facts(capture, rank)
        writer = CaptureWriter(folder, rank, run_identity(os.environ), *facts, compress=compress)
        for step in steps:
            gaps = [gap for gap in capture.gaps if (gap.rank, gap.step) == (rank, step)]
            _StepWriter(writer, unread).write(step, units[rank, step], gaps)
        writer.close()
        if writer.error is not None:
            raise WriteFailed(f"'{folder}' could not be written: {writer.error}")
    return unread.lines()


def _facts(capture: Capture) -> dict[str, Any]:
    facts = {name: value for name, value in capture.facts.items() if name not in _OWN_FACTS}
    return {**facts, "converted_from": {"layout": capture.layout, "path": str(capture.path)}}


def _rank_facts(capture: Capture, rank: int) -> dict[str, Any]:
    about = capture.facts.get("ranks", {})
    facts = about.get(rank, {}) if isinstance(about, dict) else {}
    return {name: value for name, value in facts.items() if name not in (*_OWN_FACTS, "rank")}


class _StepWriter:
    """Writes the calls of one step; equal stacks and contents once."""

    def __init__(self, writer: CaptureWriter, unread: Unread) -> None:
        self._writer = writer
        self._unread = unread
        self._stacks: dict[tuple[str, ...], int] = {}
        self._values: dict[Any, int] = {}

    def write(self, step: int, calls: Sequence[Call], gaps: Sequence[Gap]) -> None:
        self._writer.begin_step(step)
        for gap in gaps:
            self._writer.gap(GapLine(gap.name, gap.reason))
        for number, call in enumerate(calls):
            self._call(number, call)
        self._writer.end_step()

    def _call(self, number: int, call: Call) -> None:
        line = CallLine(
            id=number,
            name=call.name,
            op=call.op,
            module=call.module,
            direction=call.direction,
            thread=call.thread,
            parent=call.parent,
            stack=self._stack(call.stack) if call.stack else None,
            args=[tree.encode(arg, lambda t: self._tensor(call, t)) for arg in call.args],
            kwargs={
                key: tree.encode(arg, lambda t: self._tensor(call, t))
                for key, arg in call.kwargs.items()
            },
            notes=list(call.notes),
            collective=pack_collective(call.collective) if call.collective else None,
        )
        for role, (group, field) in _SECTIONS.items():
            if held := self._held(call, role, group):
                setattr(line, field, held)
        self._writer.call(line)
        if call.status != "begun":
            outputs = tree.encode(call.outputs, lambda t: self._tensor(call, t))
            self._writer.end(
                EndLine(id=number, outputs=outputs, status=call.status, error=call.error)
            )

    def _held(self, call: Call, role: Role, group: str) -> dict[str, TensorLine]:
        base = call.name if f".{group}." in call.name else f"{call.name}.{group}"
        return {
            record.name.removeprefix(base + "."): self._tensor(call, record)
            for record in call.tensors
            if record.role == role
        }

    def _stack(self, frames: tuple[str, ...]) -> int:
        number = self._stacks.get(frames)
        if number is None:
            number = self._stacks[frames] = len(self._stacks) + 1
            self._writer.stack(StackLine(number, list(frames)))
        return number

    def _tensor(self, call: Call, record: TensorRecord) -> TensorLine:
        alias = record.alias_of
        return TensorLine(
            dtype=record.dtype,
            shape=record.shape,
            stride=record.stride,
            device=record.device,
            grad=record.requires_grad,
            value=self._value(record),
            same=alias.removeprefix(call.name + ".") if alias is not None else None,
            sharding=pack_sharding(record.sharding) if record.sharding is not None else None,
        )

    def _value(self, record: TensorRecord) -> int | None:
        content = (record.summary, record.digest, record.blob, record.gap)
        if content == (None, None, None, None):
            return None
        known = (record.dtype, *content)  # equal bytes of another dtype may be packed otherwise
        number = self._values.get(known)
        if number is None:
            number = self._values[known] = len(self._values) + 1
            gap = record.gap
            if record.blob is not None:
                data = self._unread.attempt(record, lambda: _bytes(record))
                if data is None:
                    gap = self._unread.why(record)
                else:
                    self._writer.tensor(number, record.name, record.dtype, record.shape, data)
            self._writer.value(number, _KnownSummary(record.summary, record.digest, gap))
        return number


def _bytes(record: TensorRecord) -> Bytes:
    array = np.ascontiguousarray(record.array())
    return array.reshape(-1).view(np.uint8)
