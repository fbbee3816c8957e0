"""A file of `torch.save`: its tensors and its other values, read by the opcodes of its pickle.

Nothing of it is run. Classes that are not known (argparse's Namespace, a Config of somebody) are
placeholders, whose fields are read as data.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tensorprobe.checkpoints.stored_weights import StoredWeight, check, whole
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.layouts import ITEMSIZES, itemsize_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.pickle_opcodes import GlobalName, PickledCall, StorageName, read_opcodes
from tensorprobe.tensors.tensor_files import (
    STORAGES,
    Stored,
    archive_entry,
    check_directory,
    entry_start,
)

Value = str | int | float | bool | None

_MAX_DIRECTORY_NBYTES = 64 << 20
_MAX_PICKLE_NBYTES = 256 << 20
_MAX_HEAD_NBYTES = 64 << 20  # of a file from before torch 1.6: all but its numbers
_MAX_NODES = 1_000_000
_MAX_DEPTH = 100
_MAX_TEXT = 200
_MAX_INTEGER = 1 << 256
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_KINDS = {
    **STORAGES,
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
_MAPPINGS = ("collections OrderedDict", "collections defaultdict", "builtins dict")
# What makes a tensor of another one, its first argument.
_WRAPPED = (
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_device_tensor_from_cpu_tensor",
)
_ORDERS = ("params", "param_names")  # of an optimizer: which parameter each number is


class FileContent(NamedTuple):
    """What is in a checkpoint, or in one file of it: tensors, other values, and what to say."""

    tensors: dict[str, StoredWeight]
    values: dict[str, Value]
    notes: list[str]
    shards: dict[str, ShardOf]


class ShardOf(NamedTuple):
    """Which part of a DTensor a file has: the whole shape, how each dimension of the mesh cuts it
    (the tensor's dimension, or None), and where in the mesh the file's rank is, if it says so."""

    shape: tuple[int, ...]
    cuts: tuple[int | None, ...]
    coordinate: tuple[int, ...] | None


class _Storage(NamedTuple):
    path: Path
    start: int
    nbytes: int
    dtype: str


class FileRegion(io.RawIOBase):
    """A region of a file, as a file: its reads end where the region ends."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self._nbytes - self._at))
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._at += got
        return int(got)


def read_torch_file(
    path: Path, start: int = 0, nbytes: int | None = None, key: str = ""
) -> FileContent:
    """The content of a .pt file, or of a region of a file that `torch.save` wrote to. `key` is what
    the whole of it is called."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            nbytes = size - start if nbytes is None else nbytes
            if not (start >= 0 and nbytes >= 0 and start + nbytes <= size):
                raise BadArtefact(f"'{path}' ends before what should be in it")
            region = io.BufferedReader(FileRegion(file, start, nbytes))
            if region.read(2) == b"PK":
                tree, storage = _read_archive(path, start, region)
            else:
                tree, storage = _read_old(path, start, nbytes, region)
            return _Walk(path, storage, key).content(tree)
    except BadArtefact:
        raise
    except FileNotFoundError as error:
        raise BadArtefact(f"'{path}' is missing") from error
    except OSError:
        raise
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, RuntimeError,
        TypeError, ValueError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise BadArtefact(f"'{path}' is damaged: {type(error).__name__}: {error}"[:400]) from error


_FindStorage = Callable[[Any], _Storage]


def _read_archive(path: Path, start: int, file: BinaryIO) -> tuple[Any, _FindStorage]:
    """A file of torch 1.6 and later, which is a zip archive."""
    check_directory(path, file, _MAX_DIRECTORY_NBYTES)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        found = {info.filename: info for info in entries}
        if len(found) != len(entries):
            raise BadArtefact(f"'{path}': its archive has two entries of one name")
        names = [n for n in found if n.endswith("/data.pkl") or n == "data.pkl"]
        if len(names) != 1:
            raise BadArtefact(f"'{path}': an archive without data.pkl is no torch file")
        root = names[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in found and b"big" in archive_entry(archive, order, 16):
            raise BadArtefact(f"'{path}' was written in big-endian order")
        pickled = archive_entry(archive, names[0], _MAX_PICKLE_NBYTES)
    size = file.seek(0, 2)
    known: dict[str, _Storage] = {}

    def storage(description: Any) -> _Storage:
        _, kind, key, _, _ = description[:5]
        name = f"{root}data/{key}"
        dtype = _dtype_of(path, kind)
        if name not in known:
            info = found.get(name)
            if info is None:
                raise BadArtefact(f"'{path}': its storage {str(key)[:40]!r} is not there")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise BadArtefact(f"'{path}': a storage is compressed or encrypted")
            begin = entry_start(file, info)
            if begin + info.file_size > size:
                raise BadArtefact(f"'{path}' is cut off")
            known[name] = _Storage(path, start + begin, info.file_size, "")
        return known[name]._replace(dtype=dtype)

    return read_opcodes(pickled), storage


def _read_old(path: Path, start: int, nbytes: int, file: BinaryIO) -> tuple[Any, _FindStorage]:
    """A file of earlier torch, or of `_use_new_zipfile_serialization=False`: pickles, then data."""
    file.seek(0)
    head = io.BytesIO(file.read(min(nbytes, _MAX_HEAD_NBYTES)))
    try:
        magic = read_opcodes(head)
    except ValueError as error:
        raise BadArtefact(f"'{path}' is no file of torch.save: {error}") from None
    if magic != _OLD_MAGIC:
        raise BadArtefact(f"'{path}' is no file of torch.save: it is another pickle")
    read_opcodes(head)  # the version of the protocol
    system = read_opcodes(head)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise BadArtefact(f"'{path}' was written in big-endian order")
    tree = read_opcodes(head)
    keys = read_opcodes(head)
    if not isinstance(keys, list):
        raise BadArtefact(f"'{path}': a list of its storages is missing")
    described: dict[str, tuple[str, int]] = {}
    for each in _storages_of(tree):
        if len(each) == 6 and each[5] is not None:
            raise BadArtefact(f"'{path}': views of storages, as torch 0.3 wrote them. Save it anew")
        described[str(each[2])] = (_dtype_of(path, each[1]), int(each[4]))
    places: dict[str, _Storage] = {}
    at = head.tell()
    for key in map(str, keys):
        dtype, count = described.get(key, ("", -1))
        file.seek(at)
        numel = int.from_bytes(file.read(8), "little")
        if numel != count:
            raise BadArtefact(
                f"'{path}': its storage {key[:40]!r} has {numel} numbers, not {count}"
            )
        size = numel * itemsize_of(dtype)
        if at + 8 + size > nbytes:
            raise BadArtefact(f"'{path}' is cut off")
        places[key] = _Storage(path, start + at + 8, size, dtype)
        at += 8 + size

    def storage(description: Any) -> _Storage:
        found = places.get(str(description[2]))
        if found is None:
            raise BadArtefact(f"'{path}': its storage {str(description[2])[:40]!r} is not there")
        return found

    return tree, storage


def _storages_of(tree: Any) -> Iterator[Any]:
    """The descriptions of all storages that a tree refers to."""
    seen: set[int] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, StorageName):
            yield node.description
        elif isinstance(node, (list, tuple, dict, PickledCall)) and not isinstance(
            node, GlobalName
        ):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, PickledCall):
                left += [node.arguments, node.state, node.items, node.pairs]
            else:
                left += node.values() if isinstance(node, dict) else node


def _dtype_of(path: Path, kind: Any) -> str:
    name = kind.name.rpartition(" ")[2] if isinstance(kind, GlobalName) else str(kind)
    dtype = _KINDS.get(name)
    if dtype is None:
        raise BadArtefact(f"'{path}': {name[:60]!r} is no storage of torch")
    return dtype


class _Walk:
    """From what the pickle says to tensors and values, by their path."""

    def __init__(self, path: Path, storage: _FindStorage, key: str) -> None:
        self._path = path
        self._key = key
        self._storage = storage
        self._found = FileContent({}, {}, [], {})
        self._nodes = 0

    def content(self, tree: Any) -> FileContent:
        self._walk(tree, "", 0)
        return self._found

    def _walk(self, node: Any, key: str, depth: int) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise BadArtefact(f"'{self._path}': more than {_MAX_NODES} values")
        if depth > _MAX_DEPTH:
            raise BadArtefact(f"'{self._path}': {key[:80]}: nested deeper than {_MAX_DEPTH}")
        if isinstance(node, PickledCall):
            self._made(node, key, depth)
        elif isinstance(node, StorageName):
            found = self._storage(node.description)
            count = found.nbytes // itemsize_of(found.dtype)
            self._tensor(key, found, found.dtype, 0, (count,), (1,))
        elif isinstance(node, dict):
            if not node:
                self._value(key, "{}")
            for word, child in node.items():
                self._walk(child, _below(key, _word(word)), depth + 1)
        elif isinstance(node, (list, tuple)) and not isinstance(node, GlobalName):
            is_plain = len(node) > 8 and all(type(n) in (int, float, bool, str) for n in node)
            if is_plain and (key or self._key).rpartition(".")[2] not in _ORDERS:
                self._nodes += len(node)
                self._value(key, _digested(f"{len(node)} values", repr(node).encode()))
                return
            if not node:
                self._value(key, "[]" if isinstance(node, list) else "()")
            for number, child in enumerate(node):
                self._walk(child, _below(key, str(number)), depth + 1)
        else:
            self._value(key, _plain(node))

    def _made(self, node: PickledCall, key: str, depth: int) -> None:
        if self._tensor_like(node, key, depth):
            return
        if not (node.pairs or node.items or node.state is not None):
            if isinstance(node.function, GlobalName) and node.function.name in _MAPPINGS:
                self._value(key, "{}")
                return
            if (text := _call_text(node)) is not None:
                self._value(key, text)
                return
            self._walk(node.arguments, key, depth + 1)
            return
        if node.pairs:
            self._walk(node.pairs, key, depth + 1)
        if node.items:
            self._walk(node.items, key, depth + 1)
        state = node.state
        is_mapping = isinstance(node.function, GlobalName) and node.function.name in _MAPPINGS
        if state is not None and not is_mapping:  # of a state_dict it is versions of modules
            if isinstance(node.function, GlobalName) and "_reconstruct" in node.function.name:
                self._value(key, _array_text(state))
                return
            if _is_tuple_of_fields(state):
                for fields in state:
                    if fields:
                        self._walk(fields, key, depth + 1)
                return
            self._walk(state, key, depth + 1)

    def _tensor_like(self, node: PickledCall, key: str, depth: int) -> bool:
        """Whether it is a tensor of some kind, which is noted then."""
        name = node.function.name if isinstance(node.function, GlobalName) else ""
        function = name.rpartition(" ")[2]
        arguments = node.arguments
        if not (name.startswith(("torch", "torch_npu")) and function.startswith("_rebuild")):
            return False
        if function in _WRAPPED:
            self._walk(arguments[0], key, depth + 1)
        elif function in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_npu_tensor"):
            notes = arguments[6] if len(arguments) > 6 else None
            self._plain_tensor(key, arguments, None, notes if isinstance(notes, dict) else {})
        elif function == "_rebuild_tensor_v3":
            notes = arguments[7] if len(arguments) > 7 else None
            dtype = arguments[6].name.removeprefix("torch ")
            self._plain_tensor(key, arguments, dtype, notes if isinstance(notes, dict) else {})
        elif function == "_rebuild_qtensor":
            self._plain_tensor(key, arguments, None, {})
            self._walk(arguments[4], _below(key, "quantizer"), depth + 1)
        elif function in ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"):
            words = ("indices", "values", "size", "is_coalesced")
            if "sparse_coo" not in (_call_text(arguments[0]) or ""):  # csr, csc, bsr, bsc
                words = ("compressed", "plain", "values", "size")
            for word, part in zip(words, arguments[1], strict=False):
                self._walk(part, _below(key, word), depth + 1)
        elif function == "_rebuild_from_type_v2":
            self._subclass(arguments, key, depth)
        else:
            self._walk(arguments, key, depth + 1)
        return True

    def _plain_tensor(
        self, key: str, arguments: Any, dtype: str | None, notes: dict[Any, Any]
    ) -> None:
        name, offset, shape, strides = arguments[:4]
        if not isinstance(name, StorageName):  # numbers of numpy's, as some devices have them
            raise BadArtefact(f"'{self._path}': {key[:80]} has no storage")
        found = self._storage(name.description)
        size, steps = numbers(shape), numbers(strides)
        marks = (notes.get("conj") is True, notes.get("neg") is True)
        self._tensor(key, found, dtype or found.dtype, offset, size, steps, marks)

    def _tensor(
        self, key: str, found: _Storage, dtype: str, offset: int, shape: tuple[int, ...],
        strides: tuple[int, ...], marks: tuple[bool, bool] = (False, False),
    ) -> None:  # fmt: skip
        if dtype not in ITEMSIZES:
            raise BadArtefact(f"'{self._path}': {key[:80]}: {dtype[:40]!r} is no dtype of torch")
        if dtype == "complex32" and any(marks):
            raise BadArtefact(f"'{self._path}': {key[:80]}: a conjugate of complex32")
        name = self._unused(key or "tensor")
        stored = Stored(found.path, found.start, found.nbytes, dtype, shape, offset, strides)
        check(name, stored)
        self._found.tensors[name] = whole(name, stored, *marks)

    def _subclass(self, arguments: Any, key: str, depth: int) -> None:
        """A tensor of a class of its own: a DTensor is its local part; of others, the fields."""
        function, _, inner, state = arguments[:4]
        states = state if _is_tuple_of_fields(state) else (state,)
        fields = {k: v for each in states if isinstance(each, dict) for k, v in each.items()}
        local, spec = fields.get("_local_tensor"), fields.get("_spec")
        if local is not None and isinstance(spec, PickledCall):
            self._walk(local, key, depth + 1)
            if key in self._found.tensors and (shard := _shard(spec)) is not None:
                self._found.shards[key] = shard
            return
        if isinstance(function, GlobalName) and function.name.endswith("_rebuild_wrapper_subclass"):
            self._walk(fields, key, depth + 1)
            return
        self._walk(PickledCall(function, inner), key, depth + 1)
        if fields:
            self._walk(fields, _below(key, "fields"), depth + 1)

    def _value(self, key: str, value: Value) -> None:
        self._found.values[self._unused(key or "value")] = value

    def _unused(self, key: str) -> str:
        """The name, or one like it: {"a": {"b": 1}, "a.b": 2} has two of one name."""
        unused, number = key, 2
        while unused in self._found.tensors or unused in self._found.values:
            unused, number = f"{key} ({number})", number + 1
        return unused


def numbers(node: Any) -> tuple[int, ...]:
    """A shape or strides, which some versions wrap in torch.Size."""
    if isinstance(node, PickledCall):
        node = node.arguments[0]
    if not isinstance(node, tuple | list) or not all(type(n) is int for n in node):
        raise BadArtefact(f"{str(node)[:60]} is no shape")
    return tuple(node)


def _shard(spec: PickledCall) -> ShardOf | None:
    """What the note of a DTensor says; None where it is whole or not understood."""
    fields = spec.state if isinstance(spec.state, dict) else {}
    mesh, placements, meta = (fields.get(n) for n in ("mesh", "placements", "tensor_meta"))
    if not (isinstance(placements, tuple | list) and isinstance(meta, PickledCall)):
        return None
    cuts: list[int | None] = []
    for each in placements:
        name = each.function.name if isinstance(each, PickledCall) else ""
        if name.endswith(" Replicate"):
            cuts.append(None)
        elif name.endswith(" Shard") and isinstance(each.state, dict):
            cuts.append(int(each.state["dim"]))
        else:
            return None
    of_mesh = mesh.state if isinstance(mesh, PickledCall) and isinstance(mesh.state, dict) else {}
    coordinate = of_mesh.get("_coordinate_on_dim")
    at: tuple[int, ...] | None = None
    if isinstance(coordinate, tuple | list) and all(type(n) is int for n in coordinate):
        at = tuple(coordinate)
    return ShardOf(numbers(meta.arguments[0]), tuple(cuts), at)


def _is_tuple_of_fields(state: Any) -> bool:
    """Whether it is what a class with slots leaves: its fields, and those in slots."""
    fits = isinstance(state, tuple) and not isinstance(state, GlobalName) and len(state) == 2
    return fits and all(each is None or isinstance(each, dict) for each in state)


def _below(key: str, word: str) -> str:
    return f"{key}.{word}" if key else word


def _word(word: Any) -> str:
    """A key of a dict, as text."""
    if isinstance(word, str):
        return word
    if isinstance(word, bytes):
        return word.decode(errors="backslashreplace")
    if isinstance(word, GlobalName):
        return word.name.replace(" ", ".")
    if isinstance(word, PickledCall):
        return _call_text(word) or "object"
    if isinstance(word, int) and abs(word) > _MAX_INTEGER:
        return f"a number of {word.bit_length()} bits"
    return str(word) if not isinstance(word, tuple) else "(" + ", ".join(map(_word, word)) + ")"


def _plain(node: Any) -> Value:
    """A leaf, as what a document can hold; large ones by their digest."""
    if isinstance(node, GlobalName):
        return node.name.replace(" ", ".")
    if isinstance(node, (bytes, bytearray)):
        return _digested(f"{len(node)} bytes", bytes(node))
    if isinstance(node, str):
        text = node.encode(errors="surrogatepass")
        return node if len(node) <= _MAX_TEXT else _digested(f"{len(node)} characters", text)
    if isinstance(node, int) and abs(node) > _MAX_INTEGER:
        width = node.bit_length() // 8 + 1
        return _digested("a large number", node.to_bytes(width, "little", signed=True))
    if node is None or isinstance(node, (bool, int, float)):
        return node
    return type(node).__name__


def _digested(what: str, content: bytes) -> str:
    return f"{what}, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def _call_text(node: PickledCall) -> str | None:
    """`torch.device('cuda', 0)`: a call of plain values; None where it holds more."""
    if not isinstance(node.function, GlobalName):
        return None
    arguments = node.arguments
    if len(arguments) == 1 and isinstance(arguments[0], tuple) and arguments[0]:
        arguments = arguments[0]
    shown = []
    for each in arguments:
        if isinstance(each, str) and node.function.name == "_codecs encode" and len(arguments) == 2:
            return _plain(each.encode("latin-1", errors="backslashreplace"))  # type: ignore[return-value]
        if not (each is None or isinstance(each, (str, int, float, bool, GlobalName, bytes))):
            return None
        shown.append(repr(_plain(each)))
    return f"{node.function.name.replace(' ', '.')}({', '.join(shown)})"


def _array_text(state: Any) -> str:
    """An array of numpy: its shape, dtype and a digest of its bytes."""
    _, shape, dtype, order, content = state[:5]
    if isinstance(content, PickledCall):  # text in latin-1, as protocol 2 writes bytes
        content = content.arguments[0].encode("latin-1")
    if not isinstance(content, bytes | bytearray):
        content = repr(_plain(content)).encode()
    kind = str(dtype.arguments[0])[:40] if isinstance(dtype, PickledCall) else "?"
    size = numbers(shape)
    words = f"array {kind} {list(size)}{' by columns' if order is True and len(size) > 1 else ''}"
    return _digested(words, bytes(content)) if math.prod(size) else words
