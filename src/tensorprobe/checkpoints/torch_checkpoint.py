"""A file of `torch.save`: its tensors and its other values, read by the opcodes of its pickle.

Nothing of it is run. Classes that are not known (argparse's Namespace, a Config of somebody) are
placeholders, whose fields are read as data.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tensorprobe.checkpoints.pickled_texts import PickledTexts, Value, numbers
from tensorprobe.checkpoints.stored_weights import StoredWeight, check, whole
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.layouts import ITEMSIZES, MAX_DIMENSIONS, itemsize_of
from tensorprobe.tensors.opening import open_file
from tensorprobe.tensors.pickle_opcodes import (
    GlobalName,
    PickledCall,
    StorageName,
    outline,
    read_opcodes,
)
from tensorprobe.tensors.tensor_files import (
    STORAGES,
    Stored,
    archive_entry,
    check_directory,
    entry_start,
)

_MAX_DIRECTORY_NBYTES = 16 << 20  # 150,000 storages
_MAX_PICKLE_NBYTES = 256 << 20
_MAX_HEAD_NBYTES = 64 << 20  # of a file from before torch 1.6: all but its numbers
_MAX_NODES = 300_000
_LEAST_NODES = 1000
_MAX_NODES_A_BYTE = 4
_MAX_DEPTH = 100
_LONG_NAME = 100  # what is longer counts for several
_MAX_LIST_TEXT = 1 << 20  # characters of a list that is shown by its digest
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
                tree, size, storage = _read_archive(path, start, region)
            else:
                tree, size, storage = _read_old(path, start, nbytes, region)
            return _Walk(path, storage, size, key).content(tree)
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


def _read_archive(path: Path, start: int, file: BinaryIO) -> tuple[Any, int, _FindStorage]:
    """A file of torch 1.6 and later, which is a zip archive: its tree, and the bytes of that."""
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
        if found[names[0]].compress_type != zipfile.ZIP_STORED:
            raise BadArtefact(f"'{path}': its pickle is compressed, which torch never does")
        pickled = archive_entry(archive, names[0], _MAX_PICKLE_NBYTES)
    size = file.seek(0, 2)
    known: dict[str, _Storage] = {}

    def storage(description: Any) -> _Storage:
        _, kind, key, _, _ = description[:5]
        if not isinstance(key, str):
            raise BadArtefact(f"'{path}': {outline(key)} is no name of a storage")
        name = f"{root}data/{key}"
        dtype = _dtype_of(path, kind)
        if name not in known:
            info = found.get(name)
            if info is None:
                raise BadArtefact(f"'{path}': its storage {key[:40]!r} is not there")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise BadArtefact(f"'{path}': a storage is compressed or encrypted")
            begin = entry_start(file, info)
            if begin + info.file_size > size:
                raise BadArtefact(f"'{path}' is cut off")
            known[name] = _Storage(path, start + begin, info.file_size, "")
        return known[name]._replace(dtype=dtype)

    return read_opcodes(pickled), len(pickled), storage


def _read_old(path: Path, start: int, nbytes: int, file: BinaryIO) -> tuple[Any, int, _FindStorage]:
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
        described[outline(each[2])] = (_dtype_of(path, each[1]), int(each[4]))
    places: dict[str, _Storage] = {}
    at = head.tell()
    for key in map(outline, keys):
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
        key = outline(description[2])
        found = places.get(key)
        if found is None:
            raise BadArtefact(f"'{path}': its storage {key[:40]!r} is not there")
        return found

    return tree, head.tell(), storage


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
    name = outline(kind).rpartition(" ")[2]
    dtype = _KINDS.get(name)
    if dtype is None:
        raise BadArtefact(f"'{path}': {name[:60]!r} is no storage of torch")
    return dtype


class _Walk:
    """From what the pickle says to tensors and values, by their path."""

    def __init__(self, path: Path, storage: _FindStorage, nbytes: int, key: str) -> None:
        self._path = path
        self._key = key
        self._storage = storage
        # Parts that are referred to often may make more of a pickle than its bytes; not without end
        self._most = min(_MAX_NODES, _LEAST_NODES + _MAX_NODES_A_BYTE * nbytes)
        self._found = FileContent({}, {}, [], {})
        self._nodes = 0
        self._texts = PickledTexts()
        self._numbers: dict[str, int] = {}  # how many have a name

    def content(self, tree: Any) -> FileContent:
        self._walk(tree, "", 0)
        return self._found

    def _walk(self, node: Any, key: str, depth: int) -> None:
        self._nodes += 1 + len(key) // _LONG_NAME
        if self._nodes > self._most:
            raise BadArtefact(f"'{self._path}': more than {self._most} values, or very long names")
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
                self._walk(child, _below(key, self._texts.word(word)), depth + 1)
        elif isinstance(node, (list, tuple)) and not isinstance(node, GlobalName):
            is_order = (key or self._key).rpartition(".")[2] in _ORDERS
            if len(node) > 8 and not is_order and self._is_plain(node):
                self._value(key, self._texts.values(node))
                return
            if not node:
                self._value(key, "[]" if isinstance(node, list) else "()")
            for number, child in enumerate(node):
                self._walk(child, _below(key, str(number)), depth + 1)
        else:
            self._value(key, self._texts.plain(node))

    def _is_plain(self, node: list[Any] | tuple[Any, ...]) -> bool:
        """Whether it has numbers and words only, and not so many that they would not end."""
        self._nodes += len(node)
        if self._nodes > self._most or not all(type(n) in (int, float, bool, str) for n in node):
            return False
        return sum(len(n) for n in node if type(n) is str) <= _MAX_LIST_TEXT

    def _made(self, node: PickledCall, key: str, depth: int) -> None:
        if self._tensor_like(node, key, depth):
            return
        if not (node.pairs or node.items or node.state is not None):
            if isinstance(node.function, GlobalName) and node.function.name in _MAPPINGS:
                self._value(key, "{}")
                return
            if (text := self._texts.call(node)) is not None:
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
                self._value(key, self._texts.array(state))
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
            if "sparse_coo" not in (self._texts.call(arguments[0]) or ""):  # csr, csc, bsr, bsc
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
        unused, number = key, self._numbers.get(key, 1)
        while unused in self._found.tensors or unused in self._found.values:
            number += 1
            unused = f"{key} ({number})"
        self._numbers[key] = number
        return unused


def _shard(spec: PickledCall) -> ShardOf | None:
    """What the note of a DTensor says; None where it is whole or not understood."""
    fields = spec.state if isinstance(spec.state, dict) else {}
    mesh, placements, meta = (fields.get(n) for n in ("mesh", "placements", "tensor_meta"))
    if not (isinstance(placements, tuple | list) and isinstance(meta, PickledCall)):
        return None
    if len(placements) > MAX_DIMENSIONS:
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
    if isinstance(coordinate, tuple | list) and len(coordinate) == len(placements):
        at = tuple(coordinate) if all(type(n) is int for n in coordinate) else None
    return ShardOf(numbers(meta.arguments[0]), tuple(cuts), at)


def _is_tuple_of_fields(state: Any) -> bool:
    """Whether it is what a class with slots leaves: its fields, and those in slots."""
    fits = isinstance(state, tuple) and not isinstance(state, GlobalName) and len(state) == 2
    return fits and all(each is None or isinstance(each, dict) for each in state)


def _below(key: str, word: str) -> str:
    return f"{key}.{word}" if key else word
