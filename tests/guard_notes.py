"""What a guard has noted of a program that is looked at later; flags as those of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensorprobe as tp
from tensorprobe.overflow.call_site import render
from tensorprobe.overflow.device_calls import DeviceCalls
from tensorprobe.overflow.late_calls import LateCalls
from tensorprobe.overflow.pending_calls import UNFLAGGED, Note, calls_in
from tensorprobe.tensors import finiteness


class Noted:
    """What a guard has noted of a program, in words and with what was found in each tensor."""

    def __init__(self, *, in_backward: bool) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._storages: dict[int, int] = {}  # by the order in which they occur
        self._in_backward = in_backward  # whether to tell those of gradients from each other

    def take(self, notes: list[Note], found: Any) -> None:
        self._storages = {}
        for event in calls_in(notes):
            call = event.call
            name, place = "", ()
            if call is not None:
                name = call.name(event.direction)
                place = (call.module, tuple(_line(frame) for frame in render(call.trail)))
            told_apart = self._in_backward or (event.direction == "forward" and not event.note)
            inputs = [(label, self._number(key)) for label, key in event.inputs]
            outputs = [
                (
                    held.label,
                    self._number(held.storage) if told_apart else None,
                    None if held.ticket == UNFLAGGED else tuple(found[held.device][held.ticket]),
                    held.dtype,
                    held.shape,
                    held.whole,
                )
                for held in event.outputs
            ]
            entry = (name, place, inputs, outputs, event.told, event.in_backward, event.note)
            self.events.append(entry)

    def _number(self, storage: int) -> int:
        return self._storages.setdefault(storage, len(self._storages))


def _line(frame: str) -> str:
    """Where a frame is; of this file, whose tests call a program twice, its function."""
    return frame.rpartition(" in ")[2] if "test_short_way" in frame else frame


def noted(
    folder: Path, program: Callable[[], object], *, in_backward: bool = True
) -> tuple[Noted, int]:
    """The notes of a program, and how many of its calls took the short way in Python."""
    result, shorts = Noted(in_backward=in_backward), 0
    go_through, note_later = LateCalls.go_through, DeviceCalls.note_later

    def watched(self: LateCalls, notes: list[Note], found: Any, clamped: bool) -> None:
        result.take(notes, found)
        go_through(self, notes, found, clamped)

    def counted(self: DeviceCalls, *args: Any) -> bool:
        nonlocal shorts
        is_short = note_later(self, *args)
        shorts += is_short
        return is_short

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateCalls, "go_through", watched)
        patch.setattr(DeviceCalls, "note_later", counted)
        guard = tp.Guard(folder, overflow_nums=-1, look_every=10**6, log=lambda text: None)
        with guard:
            torch.ones(2) * 1  # from here on the guard knows that it looks later
            program()
    return result, shorts


class Kernels:
    """Flags started as those of a GPU are, with a kernel in Python that reads host memory."""

    def __init__(self) -> None:
        self.table = np.zeros((finiteness.SLOTS, 2))
        self._index, self._flags_at = 3, 7
        self._forms: dict[Any, Any] = {}
        self._seen = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self, 3, lambda: 3, lambda index: 0, lambda: False, self._flags_at, 528

    def flag(self, tensor: Tensor, dtype: torch.dtype, count: int, address: int, slot: int) -> None:
        key = (dtype, address % 16 == 0, count < 2**31)
        if key not in self._forms:
            self._forms[key] = (self._run, ("before", dtype), ("after",), 1000, 9)
        self._run(
            min(-(-count // 1000), 528), 1, 1, 0, "before", dtype,
            address, 9, self._flags_at, count, slot, "after",
        )  # fmt: skip

    def _run(self, programs: int, y: int, z: int, stream: int, *given: Any) -> None:
        before, dtype, address, table_at, flags_at, count, slot, after = given
        assert (y, z, stream, before, table_at, flags_at, after) == (
            1,
            1,
            0,
            "before",
            9,
            7,
            "after",
        )
        assert programs == min(-(-count // 1000), 528)
        nbytes = count * dtype.itemsize
        memory = bytearray((ctypes.c_char * nbytes).from_address(address))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            numbers = torch.frombuffer(memory, dtype=dtype).double()
            self.table[slot] = finiteness.extent_now(numbers)

    def read(self, count: int) -> Any:
        found = self.table[:count].copy()
        self.table[:] = 0
        return found


def stand_in_for_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let tensors of the host be flagged as those of a GPU are."""
    patch.setitem(
        finiteness._CHOICES,
        "cpu",
        lambda device: finiteness.KernelFlags(Kernels()),  # type: ignore[arg-type]
    )
