"""A foreign file seen as bytes that nothing is believed about, and protobuf's wire format in it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorprobe.ascend.artefact_files import open_file
from tensorprobe.errors import BadArtefact

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = 0, 1, 2, 3, 4, 5
# Unknown groups nest; a hostile file must not exhaust the stack. protobuf itself stops at 100.
MAX_DEPTH = 100
# A header of 8192 tensors has some 100,000 fields and a megabyte of names.
MAX_FIELDS = 1 << 18
MAX_TEXT_NBYTES = 1 << 24


class Field(NamedTuple):
    """One field of a message: `value` of a number, or the bytes `start:end` of anything longer."""

    number: int
    wire_type: int
    value: int
    start: int
    end: int


class Source:
    """The bytes of a file, mapped and not read, with errors that say where in it."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.nbytes = len(data)
        self._field_count = self._text_nbytes = 0

    @classmethod
    def open(cls, path: Path) -> Source:
        """Map a file read-only; an empty one is empty bytes."""
        try:
            with open_file(path) as file:
                if file.seek(0, 2) == 0:
                    return cls(path, b"")
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise BadArtefact(f"{path}: cannot be opened ({error}); expected a file") from error

    def bad(self, offset: int, found: str, expected: str) -> BadArtefact:
        """The error to raise about `offset`."""
        return BadArtefact(f"{self.path}: at byte {offset}: {found}; expected {expected}")

    def unsigned(self, offset: int, nbytes: int, what: str) -> int:
        """A little-endian number of fixed width."""
        if offset + nbytes > self.nbytes:
            raise self.bad(
                offset, f"the file ends at byte {self.nbytes}", f"{nbytes} bytes of {what}"
            )
        return int.from_bytes(self.data[offset : offset + nbytes], "little")

    def text(self, start: int, end: int) -> str:
        """Bytes as text; what is no UTF-8 is kept visible."""
        self._text_nbytes += end - start
        if self._text_nbytes > MAX_TEXT_NBYTES:
            found = f"{self._text_nbytes} bytes of names"
            raise self.bad(start, found, f"at most {MAX_TEXT_NBYTES}")
        return self.data[start:end].decode("utf-8", "backslashreplace")

    def varint(self, offset: int, end: int) -> tuple[int, int]:
        """A base-128 number and the offset after it."""
        value = 0
        stop = min(end, offset + 10)
        for at in range(offset, stop):
            byte = self.data[at]
            value |= (byte & 0x7F) << (7 * (at - offset))
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at + 1
        if stop < offset + 10:
            raise self.bad(offset, "the message ends inside a number", "at most 10 bytes of varint")
        raise self.bad(offset, "a number of more than 10 bytes", "a varint")

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """The fields of the message in `start:end`, in order; groups are passed over."""
        groups: list[int] = []
        at = start
        while at < end:
            field, at = self._field(at, end)
            self._field_count += 1
            if self._field_count > MAX_FIELDS:
                raise self.bad(field.start, "more fields", f"at most {MAX_FIELDS}")
            if field.wire_type == GROUP:
                if len(groups) == MAX_DEPTH:
                    raise self.bad(field.start, "groups nested too deep", f"at most {MAX_DEPTH}")
                groups.append(field.number)
            elif field.wire_type == END_GROUP:
                if not groups or groups.pop() != field.number:
                    raise self.bad(field.start, f"end of group {field.number}", "a matching start")
            elif not groups:
                yield field
        if groups:
            raise self.bad(end, f"group {groups[-1]} never ends", "its end")

    def _field(self, at: int, end: int) -> tuple[Field, int]:
        tag, after = self.varint(at, end)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise self.bad(at, f"field number {number}", "1 to 536870911")
        if wire_type == VARINT:
            value, stop = self.varint(after, end)
            return Field(number, wire_type, value, after, stop), stop
        if wire_type in (GROUP, END_GROUP):
            return Field(number, wire_type, 0, at, after), after
        if wire_type == LENGTH:
            length, after = self.varint(after, end)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise self.bad(at, f"wire type {wire_type}", "0 to 5")
        if length > end - after:
            raise self.bad(
                at,
                f"field {number} claims {length} bytes",
                f"no more than the {end - after} left in its message",
            )
        stop = after + length
        value = 0
        if wire_type != LENGTH:
            value = int.from_bytes(self.data[after:stop], "little")
        return Field(number, wire_type, value, after, stop), stop


def signed(value: int) -> int:
    """A 64-bit field that carries a negative number as its two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value
