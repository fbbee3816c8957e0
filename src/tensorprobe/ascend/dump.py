"""Ascend dump files: what tensors one holds and where, in every style it may be written in.

A file is `8-byte header length | DumpData header | data blocks` (the usual one), or one serialised
DumpData with the data inside (the first version), or a nano dump, or an ATB tensor file. All are
mapped, only headers are read, and every length in them is checked before it is used.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tensorprobe.ascend.artefact_files import open_file, read_file
from tensorprobe.ascend.element_types import (
    decode,
    dtype_of_name,
    ge_dtype,
    has_values,
    kind_of,
    proto_dtype,
)
from tensorprobe.ascend.memory_formats import FORMATS, format_name
from tensorprobe.ascend.source import LENGTH, VARINT, Field, Source, signed
from tensorprobe.errors import BadArtefact

Array = np.ndarray[Any, Any]
Role = Literal["input", "output", "l1buffer", "space"]
Style = Literal["adump", "serialised", "nano", "atb"]

MAX_DIMS = 32
MAX_TENSORS = 1 << 13
MAX_DECODED = 1 << 26
NANO_MAGIC = 0x5A5A5A5A
ATB_HEADER_LIMIT = 1 << 16
MAX_MAPPING_NBYTES = 1 << 24

# What else than an input an entry listed under `input` can be (newest writers say so).
_INPUT_KINDS = {
    1: "general", 3: "output", 4: "workspace", 5: "ascendc_log", 6: "mc2_ctx", 7: "tiling_data",
    8: "l1", 9: "l2", 10: "overflow_address", 11: "ffts_address", 12: "shape_tensor", 101: "args",
    102: "stack", 103: "device_kernel_object", 104: "simt_stack",
}  # fmt: skip


class DumpTensor(msgspec.Struct, frozen=True):
    """One tensor of a dump: what the header says of it, and where its bytes are."""

    path: Path
    role: Role
    index: int
    dtype: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    original_shape: tuple[int, ...] | None = None
    sub_format: int = 0
    address: int | None = None
    argument: int | None = None
    kind: str | None = None
    origin: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    @property
    def count(self) -> int | None:
        """How many elements the shape stands for; None when it is dynamic."""
        return None if any(size < 0 for size in self.shape) else math.prod(self.shape)

    @property
    def fits(self) -> bool:
        """Whether the block holds what the shape asks for; it may be padded."""
        if self.count is None or not _is_addressable(self.shape):
            return False
        if not has_values(self.dtype):
            return self.count == self.nbytes
        return self.count * kind_of(self.dtype).bits <= self.nbytes * 8

    @property
    def size(self) -> int:
        """How many elements are there."""
        if self.fits and self.count is not None:
            return self.count
        return self.nbytes * 8 // kind_of(self.dtype).bits

    def raw(self) -> Array:
        """The bytes of the block, mapped."""
        if self.nbytes == 0:
            return np.empty(0, np.uint8)
        with open_file(self.path) as file:
            return np.memmap(file, np.uint8, "r", self.offset, (self.nbytes,))

    def flat(self) -> Array:
        """The elements in one row, exact; only those that are there."""
        if not kind_of(self.dtype).is_view and self.size > MAX_DECODED:
            raise BadArtefact(
                f"{self.path}: {self.name}: {self.size} elements of {self.dtype}; expected at most "
                f"{MAX_DECODED} to be held at once. Convert it to npy without --format"
            )
        return decode(self.raw(), self.dtype, self.size)

    def array(self) -> Array:
        """The elements in their shape; in one row where block and shape disagree."""
        return self.flat().reshape(self.shape) if self.fits else self.flat()


def _is_addressable(shape: tuple[int, ...]) -> bool:
    """Whether numpy can have such an array: sizes count even where one of them is zero."""
    return math.prod(size for size in shape if size) < 1 << 58


class Dump(msgspec.Struct, frozen=True):
    """A dump file: its tensors, and what the header says beside them."""

    path: Path
    style: Style
    tensors: tuple[DumpTensor, ...]
    version: str = ""
    time_us: int = 0
    op_name: str = ""
    attributes: dict[str, str] = {}
    message: str = ""
    warnings: tuple[str, ...] = ()

    def role(self, role: Role) -> tuple[DumpTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == role)


class DumpName(msgspec.Struct, frozen=True):
    """What the name of a dump file says. `op_name` has `_` where the node has `/` or `.`."""

    op_type: str
    op_name: str
    task_id: int | None = None
    stream_id: int | None = None
    timestamp: str | None = None
    context_id: int | None = None
    thread_id: int | None = None

    @property
    def is_overflow(self) -> bool:
        return self.op_type == "Opdebug"


def parse_dump_name(name: str) -> DumpName | None:
    """The parts of a dump's file name, old and new; None when it is not such a name.

    Numbers are read from the right: `type.name.task.time`, `type.name.task.stream.time`, the
    latter with `.4.context.thread.device` behind, `exception_info.stream.task.time`.
    """
    first, *parts = name.split(".")
    split = len(parts)
    while split and _is_number(parts[split - 1]):
        split -= 1
    head, numbers = ".".join([first, *parts[:split]]), parts[split:]
    if head == "exception_info" and len(numbers) == 3:
        stream, task, time = numbers
        return DumpName("", "", int(task), int(stream), time)
    op_type, dot, op_name = head.partition(".")
    if not dot:
        return None
    values = [int(number) for number in numbers]
    if len(numbers) == 2:
        return DumpName(op_type, op_name, values[0], None, numbers[1])
    if len(numbers) == 3:
        return DumpName(op_type, op_name, values[0], values[1], numbers[2])
    if len(numbers) == 7:
        return DumpName(op_type, op_name, values[0], values[1], numbers[2], values[4], values[5])
    return None


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


@lru_cache(maxsize=256)
def _mapping(path: Path, modified_ns: int) -> dict[str, str]:
    text = read_file(path, MAX_MAPPING_NBYTES, "a table of names").decode("utf-8", "replace")
    try:
        rows = csv.reader(io.StringIO(text.replace("\0", ""), newline=""))
        return {row[0].strip(): row[1].strip() for row in rows if len(row) >= 2}
    except csv.Error as error:
        raise BadArtefact(f"{path}: {error}; expected lines of SHORT,LONG") from error


def original_name(path: Path) -> str:
    """The name a dump would have had: mapping.csv beside it knows those that were too long."""
    table = path.parent / "mapping.csv"
    if not path.name.isdigit() or not os.path.lexists(table):
        return path.name
    if table.is_symlink() and table.resolve().parent != path.parent.resolve():
        raise BadArtefact(f"{table}: a link that leads out of its folder; copy the file there")
    return _mapping(table, table.stat().st_mtime_ns).get(path.name, path.name)


def read_dump(path: Path | str) -> Dump:
    """Read the header of a dump file; the tensors are mapped and read when asked for.

    for tensor in read_dump("L2Loss.L2Loss.3.1638329841577837").tensors:
        print(tensor.name, tensor.dtype, tensor.array())
    """
    source = Source.open(Path(path))
    if source.nbytes <= 8:
        raise source.bad(0, f"a file of {source.nbytes} bytes", "a dump: more than 8 bytes")
    atb_end = _atb_header_end(source)
    if atb_end is not None:
        return _read_atb(source, atb_end)
    header_nbytes = source.unsigned(0, 8, "header length")
    if header_nbytes > source.nbytes - 8:
        return _read_serialised(source, header_nbytes)
    if source.nbytes >= 16 and source.unsigned(8, 4, "magic") == NANO_MAGIC:
        return _read_nano(source, header_nbytes)
    return _read_adump(source, header_nbytes)


# --- DumpData -------------------------------------------------------------------------------

_INPUT_FIELDS = {
    1: "dtype", 2: "format", 3: "shape", 4: "data", 5: "size", 6: "original_shape",
    7: "sub_format", 8: "address", 10: "argument", 11: "kind",
}  # fmt: skip
_OUTPUT_FIELDS = {
    1: "dtype", 2: "format", 3: "shape", 4: "origin", 5: "data", 6: "size", 7: "original_shape",
    8: "sub_format", 9: "address", 12: "argument",
}  # fmt: skip
_BLOCK_FIELDS = {2: "data", 3: "size"}
_ENTRIES: dict[int, tuple[Role, dict[int, str]]] = {
    4: ("input", _INPUT_FIELDS),
    3: ("output", _OUTPUT_FIELDS),
    5: ("l1buffer", _BLOCK_FIELDS),
    8: ("space", _BLOCK_FIELDS),
}
_SPANS = ("shape", "original_shape", "data", "origin")


class _DumpEntry:
    """One tensor description as it is read; fields a file does not set are zero."""

    def __init__(self, source: Source, span: Field, names: dict[int, str]) -> None:
        self.start = span.start
        self.numbers = dict.fromkeys((*names.values(), "size"), 0)
        self.spans: dict[str, list[Field]] = {}
        for field in source.fields(span.start, span.end):
            name = names.get(field.number)
            if name in _SPANS and field.wire_type == LENGTH:
                self.spans.setdefault(name, []).append(field)
            elif name is not None and name not in _SPANS and field.wire_type == VARINT:
                self.numbers[name] = field.value

    def dims(self, source: Source, name: str) -> tuple[int, ...] | None:
        spans = self.spans.get(name)
        if spans is None:
            return None
        return tuple(dim for span in spans for dim in _dims(source, span))

    @property
    def data(self) -> Field | None:
        return self.spans["data"][-1] if "data" in self.spans else None


def _dims(source: Source, span: Field) -> list[int]:
    dims: list[int] = []
    for field in source.fields(span.start, span.end):
        if field.number != 1:
            continue
        if field.wire_type == VARINT:
            dims.append(signed(field.value))
        elif field.wire_type == LENGTH:
            at = field.start
            while at < field.end and len(dims) <= MAX_DIMS:
                value, at = source.varint(at, field.end)
                dims.append(signed(value))
        if len(dims) > MAX_DIMS:
            raise source.bad(field.start, "a shape without end", f"at most {MAX_DIMS} dims")
    return dims


def _origin(source: Source, spans: list[Field]) -> str | None:
    texts = [
        source.text(field.start, field.end)
        for span in spans
        for field in source.fields(span.start, span.end)
        if field.number == 1 and field.wire_type == LENGTH
    ]
    return texts[-1] if texts and texts[-1] else None


class _Header:
    """A DumpData message, entries still in the order of the file."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source = source
        self.entries: dict[Role, list[_DumpEntry]] = {
            role: [] for role in ("input", "output", "l1buffer", "space")
        }
        self.version = self.op_name = self.message = ""
        self.time_us = 0
        self.attributes: dict[str, str] = {}
        for field in source.fields(start, end):
            self._take(field)
        if not any(self.entries.values()) and not (self.version or self.op_name):
            raise source.bad(start, "a header that describes no tensor", "a DumpData message")

    def _take(self, field: Field) -> None:
        if field.number == 2 and field.wire_type == VARINT:
            self.time_us = field.value
        if field.wire_type != LENGTH:
            return
        if field.number in _ENTRIES:
            role, names = _ENTRIES[field.number]
            if sum(map(len, self.entries.values())) == MAX_TENSORS:
                raise self.source.bad(field.start, "more tensors", f"at most {MAX_TENSORS}")
            self.entries[role].append(_DumpEntry(self.source, field, names))
        elif field.number == 1:
            self.version = self.source.text(field.start, field.end)
        elif field.number == 6:
            self.op_name = self.source.text(field.start, field.end)
        elif field.number == 7:
            pair = {
                part.number: self.source.text(part.start, part.end)
                for part in self.source.fields(field.start, field.end)
                if part.wire_type == LENGTH
            }
            self.attributes[pair.get(1, "")] = pair.get(2, "")
        elif field.number == 9:
            self.message = self.source.text(field.start, field.end)

    def ordered(self) -> Iterator[tuple[Role, int, _DumpEntry]]:
        """In the order of the data blocks: inputs, outputs, buffers, workspaces."""
        for role, entries in self.entries.items():
            for index, entry in enumerate(entries):
                yield role, index, entry

    def dump(self, style: Style, tensors: list[DumpTensor], warnings: list[str]) -> Dump:
        return Dump(
            self.source.path, style, tuple(tensors), self.version, self.time_us, self.op_name,
            self.attributes, self.message, tuple(warnings),
        )  # fmt: skip


def _tensor(
    source: Source, role: Role, index: int, entry: _DumpEntry, offset: int, nbytes: int
) -> DumpTensor:
    is_block = role in ("l1buffer", "space")
    dtype = "uint8" if is_block else proto_dtype(entry.numbers["dtype"])
    shape = (nbytes,) if is_block else entry.dims(source, "shape") or ()
    kind = entry.numbers.get("kind", 0)
    tensor = DumpTensor(
        source.path, role, index, dtype,
        "ND" if is_block else format_name(entry.numbers["format"]), shape, offset, nbytes,
        original_shape=None if is_block else entry.dims(source, "original_shape"),
        sub_format=entry.numbers.get("sub_format", 0) or (entry.numbers.get("format", 0) >> 8),
        address=entry.numbers.get("address") or None,
        argument=entry.numbers.get("argument") or None,
        kind=_INPUT_KINDS.get(kind),
        origin=_origin(source, entry.spans.get("origin", [])),
    )  # fmt: skip
    return _with_warnings(tensor)


def _with_warnings(tensor: DumpTensor) -> DumpTensor:
    notes = []
    if not has_values(tensor.dtype):
        notes.append(f"elements of type {tensor.dtype} have no value here: bytes")
    elif tensor.count is None:
        notes.append(f"shape {list(tensor.shape)} is dynamic: the elements are in one row")
    elif not tensor.fits:
        need = -(-tensor.count * kind_of(tensor.dtype).bits // 8)
        notes.append(
            f"shape {list(tensor.shape)} of {tensor.dtype} needs {need} bytes, the block has "
            f"{tensor.nbytes}: the elements that are there are in one row"
        )
    return msgspec.structs.replace(tensor, warnings=tuple(notes)) if notes else tensor


def _read_adump(source: Source, header_nbytes: int) -> Dump:
    header = _Header(source, 8, 8 + header_nbytes)
    tensors: list[DumpTensor] = []
    warnings: list[str] = []
    at = 8 + header_nbytes
    for role, index, entry in header.ordered():
        nbytes = entry.numbers["size"]
        if nbytes > source.nbytes - at:
            raise source.bad(
                at,
                f"{role}.{index} claims {nbytes} bytes",
                f"no more than the {source.nbytes - at} left (is the file cut off?)",
            )
        tensors.append(_tensor(source, role, index, entry, at, nbytes))
        at += nbytes
    general = [tensor.name for tensor in tensors if tensor.kind == "general"]
    if general and any(tensor.role != "input" for tensor in tensors):
        warnings.append(
            f"{', '.join(general)}: such blocks may have been written after the workspaces; "
            "contents of this file may be assigned to the wrong tensors"
        )
    if at < source.nbytes:
        warnings.append(f"{source.nbytes - at} bytes after the last block are not described")
    return header.dump("adump", tensors, warnings)


def _read_serialised(source: Source, header_nbytes: int) -> Dump:
    try:
        header = _Header(source, 0, source.nbytes)
    except BadArtefact as error:
        raise source.bad(
            0,
            f"a header length of {header_nbytes} in a file of {source.nbytes} bytes, and no "
            f"serialised DumpData either ({error})",
            "a dump, complete",
        ) from error
    tensors = []
    for role, index, entry in header.ordered():
        data = entry.data
        start, nbytes = (data.start, data.end - data.start) if data else (0, 0)
        tensors.append(_tensor(source, role, index, entry, start, nbytes))
    return header.dump("serialised", tensors, [])


# --- nano -----------------------------------------------------------------------------------


def _read_nano(source: Source, header_nbytes: int) -> Dump:
    """Records of `tag, length` behind the magic: 4 holds inputs, 5 outputs; then the blocks."""
    end = 8 + header_nbytes
    version = source.unsigned(12, 4, "version")
    described: list[tuple[DumpTensor, int]] = []
    for tag, start, stop in _records(source, 16, end):
        if tag in (4, 5):
            described += _nano_tensors(source, "input" if tag == 4 else "output", start, stop)
    if not described:
        raise source.bad(16, "no tensor is described", "records with tag 4 or 5")
    tensors = []
    at = end
    for tensor, nbytes in sorted(described, key=lambda pair: pair[0].role):  # input < output
        if nbytes > source.nbytes - at:
            raise source.bad(
                at,
                f"{tensor.name} claims {nbytes} bytes",
                f"no more than the {source.nbytes - at} left",
            )
        placed = msgspec.structs.replace(tensor, offset=at, nbytes=nbytes)
        tensors.append(_with_warnings(placed))
        at += nbytes
    return Dump(source.path, "nano", tuple(tensors), version=str(version))


def _records(source: Source, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    at = start
    while at < end:
        if end - at < 8:
            raise source.bad(at, f"{end - at} bytes left", "8 bytes of tag and length")
        tag = source.unsigned(at, 4, "tag")
        length = source.unsigned(at + 4, 4, "length")
        if length > end - at - 8:
            raise source.bad(at, f"a record of {length} bytes", f"at most {end - at - 8}")
        yield tag, at + 8, at + 8 + length
        at += 8 + length


def _nano_tensors(
    source: Source, role: Role, start: int, end: int
) -> Iterator[tuple[DumpTensor, int]]:
    words = 3 if role == "input" else 6
    fixed = 4 * words + 3 * 8 + 4
    at, index = start, 0
    while at < end:
        if end - at < fixed or index == MAX_TENSORS:
            raise source.bad(at, f"{end - at} bytes left", f"{fixed} bytes of a tensor")
        dtype = source.unsigned(at, 4, "dtype")
        layout = source.unsigned(at + 4, 4, "format")
        where = at + 4 * words
        address = source.unsigned(where, 8, "address")
        nbytes = source.unsigned(where + 16, 8, "size")
        more = source.unsigned(where + 24, 4, "length of the list")
        at += fixed
        if more > end - at:
            raise source.bad(at, f"a list of {more} bytes", f"at most {end - at}")
        shapes: dict[int, tuple[int, ...]] = {}
        origin = None
        for tag, first, last in _records(source, at, at + more):
            if tag in (0, 1):
                shapes[tag] = _nano_dims(source, first, last)
            elif tag == 2:
                origin = source.text(first, last).rstrip("\0")
        at += more
        yield (
            DumpTensor(
                source.path, role, index, ge_dtype(dtype), format_name(layout),
                shapes.get(0, ()), 0, 0, original_shape=shapes.get(1),
                address=address or None, origin=origin or None,
            ),
            nbytes,
        )  # fmt: skip
        index += 1


def _nano_dims(source: Source, start: int, end: int) -> tuple[int, ...]:
    if end - start > 8 * MAX_DIMS:
        raise source.bad(start, "a shape without end", f"at most {MAX_DIMS} dims")
    return tuple(
        signed(source.unsigned(at, 8, "dim")) for at in range(start, end - (end - start) % 8, 8)
    )


# --- ATB ------------------------------------------------------------------------------------

_ND = str(FORMATS.index("ND"))
_ATB_LINE = re.compile(rb"[$A-Za-z][\w.$]*=[^\n\0]*\n")


def _atb_header_end(source: Source) -> int | None:
    """Where the data of an ATB file begins: behind its `$End=` line. None: no ATB file."""
    head = source.data[:ATB_HEADER_LIMIT]
    at = 0
    while match := _ATB_LINE.match(head, at):
        at = match.end()
        if match[0].startswith(b"$End="):
            return at
    return None


def _read_atb(source: Source, start: int) -> Dump:
    lines = source.text(0, start).removesuffix("\n").split("\n")
    keys = dict(line.split("=", 1) for line in lines)
    try:
        dims = tuple(_int64(dim) for dim in keys.get("dims", "").split(",") if dim.strip())
        number, layout = _int64(keys["dtype"]), _int64(keys.get("format", _ND))
    except (KeyError, ValueError) as error:
        wanted = "dtype=NUMBER, format=NUMBER, dims=1,2,3"
        raise source.bad(0, f"header {str(keys)[:200]}", wanted) from error
    if len(dims) > MAX_DIMS:
        raise source.bad(0, f"{len(dims)} dims", f"at most {MAX_DIMS}")
    warnings = []
    if keys.get("data"):
        # Never followed: a path inside a foreign file may point anywhere.
        warnings.append(f"the data is said to be in {keys['data']!r}: convert that file instead")
    tensor = DumpTensor(
        source.path, "output", 0, ge_dtype(number), format_name(layout), dims, start,
        source.nbytes - start,
    )  # fmt: skip
    return Dump(source.path, "atb", (_with_warnings(tensor),), warnings=tuple(warnings))


def _int64(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} has more than 64 bits")
    return value


def with_dtype(tensor: DumpTensor, dtype: str, shape: tuple[int, ...] | None = None) -> DumpTensor:
    """The same bytes under a dtype found elsewhere (graph, kernel json) than in the dump."""
    changed = msgspec.structs.replace(
        tensor,
        dtype=dtype_of_name(dtype),
        shape=tensor.shape if shape is None else shape,
        warnings=(),
    )
    return _with_warnings(changed)
