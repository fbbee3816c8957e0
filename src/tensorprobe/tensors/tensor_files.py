"""Tensors in files of their own (.npy, .pt): where their bytes are, and nothing of it is run.

A .pt file is a zip archive with a pickle in it. The pickle is not unpickled: its opcodes are read
as text that may say one thing only, which storage the tensor has and how it lies in it.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.dtypes import numpy_dtype
from tensorprobe.tensors.layouts import itemsize_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.pickle_opcodes import PickledCall, outline, read_opcodes

_MAX_HEADER_NBYTES = 1 << 16  # of a .npy; torch's own are 118
_MAX_PICKLE_NBYTES = 1 << 16  # of one tensor's; they are some 300
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 1 << 48  # elements; larger than any disk
_MAX_DIRECTORY_NBYTES = 1 << 20  # of an archive of one tensor
_END_NBYTES = 66_000  # where the records that end an archive are; a comment may follow them
_END, _END_64 = struct.Struct("<12xI6x"), struct.Struct("<40xQ8x")  # bytes of the directory
_SEE_END_64 = 0xFFFF_FFFF
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


class Stored(NamedTuple):
    """A tensor in a file: its storage begins at a byte, and it lies in it by offset and strides."""

    path: Path
    start: int  # byte where the storage begins
    nbytes: int  # of the storage
    dtype: str  # torch's name
    shape: tuple[int, ...]
    offset: int  # in elements
    strides: tuple[int, ...]  # in elements

    @property
    def is_whole(self) -> bool:
        """Whether all its numbers are there and follow each other in row-major order."""
        count = math.prod(self.shape)
        end = (self.offset + count) * itemsize_of(self.dtype)
        return count > 0 and self.strides == _strides(self.shape) and end <= self.nbytes

    def array(self) -> np.ndarray[Any, Any]:
        """The tensor, memory-mapped and read-only."""
        dtype = numpy_dtype(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        # The second: an absurd shape with strides of 0 takes no room in the file, but in memory.
        if max(last + 1, math.prod(self.shape)) * dtype.itemsize > self.nbytes:
            raise BadArtefact(
                f"{self.path}: its tensor of shape {list(self.shape)} reaches beyond the "
                f"{self.nbytes} bytes that are there"
            )
        raw: np.ndarray[Any, Any]
        with open_file(self.path) as file:
            raw = np.memmap(file, np.uint8, "r", self.start, (self.nbytes,))
        if self.start % dtype.alignment:  # ml_dtypes wants alignment
            raw = np.array(raw)
            raw.flags.writeable = False
        steps = [s * dtype.itemsize for s in self.strides]
        begin = self.offset * dtype.itemsize
        return np.ndarray(self.shape, dtype, raw, begin, steps)


def locate(path: Path) -> Stored:
    """Where the tensor of a .npy or .pt file is; BadArtefact says what is wrong with the file."""
    try:
        with open_file(path) as file:
            locate_in = _locate_npy if path.suffix == ".npy" else _locate_pt
            found = locate_in(path, file)
    except BadArtefact:
        raise
    except FileNotFoundError as error:
        raise BadArtefact(f"{path} is missing") from error
    except Exception as error:
        raise BadArtefact(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for number in (found.offset, *found.shape, *found.strides):
        if not 0 <= number <= _MAX_LENGTH:
            raise BadArtefact(f"{path}: {number} is no length, stride or offset of a tensor")
    if len(found.shape) != len(found.strides) or len(found.shape) > _MAX_DIMENSIONS:
        raise BadArtefact(f"{path}: {len(found.shape)} lengths, {len(found.strides)} strides")
    return found


# .npy

_DESCR = re.compile(r"[<>|=]?([biufc?])(\d*)")
_NPY_KINDS = {"b": "int", "i": "int", "u": "uint", "f": "float", "c": "complex", "?": "bool"}


def _locate_npy(path: Path, file: BinaryIO) -> Stored:
    start = file.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY":
        raise BadArtefact(f"{path} is no .npy file: it begins with {start[:6]!r}")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_HEADER_NBYTES:
        raise BadArtefact(f"{path}: a header of {length} bytes")
    header = file.read(length)
    begin = file.tell()
    nbytes = _size(file) - begin
    try:
        fields = ast.literal_eval(header.decode("latin-1").strip())
        descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise BadArtefact(f"{path}: its header is damaged: {type(error).__name__}") from error
    dtype = _npy_dtype(path, descr)
    if not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        raise BadArtefact(f"{path}: its shape is {str(shape)[:60]}")
    return Stored(path, begin, nbytes, dtype, shape, 0, _strides(shape, bool(fortran)))


def _npy_dtype(path: Path, descr: object) -> str:
    found = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if found is None or str(descr).startswith(">"):
        raise BadArtefact(
            f"{path} holds {str(descr)[:40]!r}: neither numbers nor bools in little-endian order"
        )
    kind, size = found.groups()
    if kind == "b" and size == "1" and str(descr)[0] == "|":
        return "bool"
    name = f"{_NPY_KINDS[kind]}{8 * int(size or 1) if kind != '?' else ''}"
    try:
        numpy_dtype(name)
    except ValueError:
        raise BadArtefact(f"{path} holds {descr!r}, which torch has no dtype for") from None
    return name


def _strides(shape: tuple[int, ...], column_major: bool = False) -> tuple[int, ...]:
    strides, step = [], 1
    for length in shape if column_major else reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides if column_major else reversed(strides))


# .pt

# The classes that torch 1.6 and later write for a typed storage; other dtypes are named apart.
STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def _locate_pt(path: Path, file: BinaryIO) -> Stored:
    if file.read(2) != b"PK":
        raise BadArtefact(
            f"{path} is no zip archive, so no torch file of 1.6 or later. "
            "Load it where it was made and save it again"
        )
    check_directory(path, file, _MAX_DIRECTORY_NBYTES)
    with zipfile.ZipFile(file) as archive:
        names = [n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"]
        if len(names) != 1:
            raise BadArtefact(f"{path}: an archive without data.pkl is no torch file")
        root = names[0].removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and b"big" in archive_entry(
            archive, f"{root}byteorder", 16
        ):
            raise BadArtefact(f"{path} was written in big-endian order")
        pickled = archive_entry(archive, names[0], _MAX_PICKLE_NBYTES)
        key, dtype, offset, shape, strides = _description(path, pickled)
        info = archive.getinfo(f"{root}data/{key}")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise BadArtefact(f"{path}: its storage is compressed or encrypted")
    start = entry_start(file, info)
    if start + info.file_size > _size(file):
        raise BadArtefact(f"{path} is cut off")
    return Stored(path, start, info.file_size, dtype, shape, offset, strides)


def check_directory(path: Path, file: BinaryIO, most: int) -> None:
    """Refuse an archive of a huge table of contents, which zipfile would read as a whole."""
    size = _size(file)
    file.seek(max(0, size - _END_NBYTES))
    end = file.read()
    sizes = [
        record.unpack_from(end, found.start())[0]
        for record, mark in ((_END, b"PK\x05\x06"), (_END_64, b"PK\x06\x06"))
        for found in re.finditer(re.escape(mark), end)
        if found.start() + record.size <= len(end)
    ]
    nbytes = max((size for size in sizes if size != _SEE_END_64), default=0)
    if nbytes > most:
        raise BadArtefact(f"{path}: a table of contents of {nbytes} bytes; expected {most} at most")


def archive_entry(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A small part of an archive, unpacked; BadArtefact where it is larger than `limit`."""
    method = archive.getinfo(name).compress_type
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others take any memory
        raise BadArtefact(f"{archive.filename}: {name} is compressed by method {method}")
    with archive.open(name) as entry:
        content = entry.read(limit + 1)
    if len(content) > limit:
        raise BadArtefact(f"{archive.filename}: {name} is larger than {limit} bytes")
    return content


def entry_start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """The byte of the file at which a part of its archive begins."""
    file.seek(info.header_offset)
    fields = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise BadArtefact("an entry of the archive has no header")
    return int(info.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10])


def _size(file: BinaryIO) -> int:
    return file.seek(0, 2)


def _description(
    path: Path, pickled: bytes
) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """What the pickle says of its one tensor: storage key, dtype, offset, shape, strides."""
    try:
        made = read_opcodes(pickled)
        if _calls(made, "torch._utils _rebuild_parameter"):
            made = made.arguments[0]
        if _calls(made, "torch._utils _rebuild_tensor_v2") and len(made.arguments) == 6:
            storage, offset, shape, strides = made.arguments[:4]
            dtype = None
        elif _calls(made, "torch._utils _rebuild_tensor_v3"):
            storage, offset, shape, strides = made.arguments[:4]
            dtype = made.arguments[6].name.removeprefix("torch ")
        else:
            raise BadArtefact(f"{path} holds {outline(made)}, not one plain tensor")
        _, kind, key, _, _ = storage.description
        if not isinstance(key, str):
            raise BadArtefact(f"{path}: {outline(key)} is no name of a storage")
        dtype = dtype or STORAGES[kind.name.removeprefix("torch ")]
        itemsize_of(dtype)
        numbers = (int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadArtefact(f"{path} holds no plain tensor: {error}"[:300]) from error
    return key, dtype, *numbers


def _calls(made: object, function: str) -> bool:
    return isinstance(made, PickledCall) and made.calls(function)
