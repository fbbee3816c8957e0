"""The address check: did each argument of a kernel point into memory that was allocated then?"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from tensorprobe.ascend.log import Allocation

Standing = Literal["inside", "past the end", "freed", "unknown", "null", "host", "unchecked"]
# Host memory is mapped up here on the machines these cards sit in; device memory is not.
_HOST_FROM = 0x7F00_0000_0000
_TINY = 0x1000
BAD: frozenset[str] = frozenset({"past the end", "freed", "unknown", "null"})


class AddressCheck(msgspec.Struct, frozen=True):
    """Where one argument pointed."""

    what: str
    address: int
    nbytes: int | None
    standing: Standing
    detail: str

    @property
    def is_bad(self) -> bool:
        return self.standing in BAD

    def __str__(self) -> str:
        return f"{self.what} at {self.address:#x}: {self.standing}, {self.detail}"


class DeviceMemory:
    """What was allocated on the device at one line of a log."""

    def __init__(self, events: Sequence[Allocation], pid: int | None, order: int) -> None:
        self.live: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        for event in events:
            if event.order > order:
                break
            if pid is not None and event.pid is not None and event.pid != pid:
                continue
            if event.nbytes is not None:
                self.live[event.address] = event.nbytes
                self.freed.pop(event.address, None)
            elif event.address in self.live:
                self.freed[event.address] = self.live.pop(event.address)
        self._starts = sorted(self.live)

    @property
    def is_known(self) -> bool:
        return bool(self.live or self.freed)

    def check(self, what: str, address: int, nbytes: int | None) -> AddressCheck:
        """Where the block of that argument lies."""

        def result(standing: Standing, detail: str) -> AddressCheck:
            return AddressCheck(what, address, nbytes, standing, detail)

        if address < _TINY:
            return result("null", "no address")
        if address >= _HOST_FROM:
            return result("host", "an address of host memory, which the kernel cannot reach")
        if not self.is_known:
            return result("unchecked", "the log has no DevMalloc lines")
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            start = self._starts[at]
            end = start + self.live[start]
            if address < end:
                beyond = address + (nbytes or 0) - end
                block = f"block {start:#x} of {self.live[start]} bytes"
                if beyond > 0:
                    return result("past the end", f"{beyond} bytes behind the end of {block}")
                return result("inside", block)
        for start, size in self.freed.items():
            if start <= address < start + size:
                return result("freed", f"block {start:#x} of {size} bytes was freed before")
        return result("unknown", "in no block that was allocated")


def changed_arguments(before: Sequence[int], after: dict[int, list[int]]) -> list[str]:
    """Launch arguments that were others when the kernel had failed."""
    changes = []
    for start, values in sorted(after.items()):
        for at, value in enumerate(values, start):
            if at < len(before) and before[at] != value:
                changes.append(f"argument {at}: {before[at]:#x} before, {value:#x} after")
    return changes


def overlapping(pc_start: int, checks: Iterable[AddressCheck]) -> AddressCheck | None:
    """The tensor that lies where the code of the kernel is said to begin."""
    pc = pc_start & 0xFFFF_FFFF_FFFF
    for check in checks:
        if check.address <= pc < check.address + max(check.nbytes or 0, 1):
            return check
    return None
