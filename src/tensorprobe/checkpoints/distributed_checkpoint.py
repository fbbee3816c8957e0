"""torch.distributed.checkpoint: a folder of `.distcp` files, and `.metadata`, which says what is
where in them. It is a pickle: its opcodes are read, nothing of it is run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tensorprobe.checkpoints.pickled_texts import numbers
from tensorprobe.checkpoints.stored_weights import WeightPart, join, whole
from tensorprobe.checkpoints.torch_checkpoint import FileContent, read_torch_file
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.opening import inside, open_file, read_text
from tensorprobe.tensors.pickle_opcodes import GlobalName, PickledCall, outline, read_opcodes

METADATA_FILE = ".metadata"
_MAX_METADATA_NBYTES = 256 << 20
_MAX_OPCODES = 20_000_000  # tens for each part of a tensor on each rank
_MAX_NAMES_NBYTES = 64 << 20
_LEAST_NBYTES = 16  # that a name of a part, or of a value, takes in it
_Place = tuple[str, tuple[int, ...] | None]


def read_distributed(folder: Path) -> FileContent:
    """The tensors and values of such a folder."""
    path = folder / METADATA_FILE
    try:
        text = read_text(open_file(path), path, _MAX_METADATA_NBYTES)
        tree = read_opcodes(text, _MAX_OPCODES)
        described = _fields(tree, "state_dict_metadata")
        stored = _fields(tree, "storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise TypeError("no state_dict_metadata and storage_data")
        places = {_index(key): _info(info) for key, info in stored.items()}
        reader = _PartsReader(folder, places, len(text) // _LEAST_NBYTES)
        for key, what in described.items():
            reader.add(key if isinstance(key, str) else outline(key), what)
    except (
        ArithmeticError, AttributeError, KeyError, TypeError, ValueError, IndexError
    ) as error:  # fmt: skip
        raise BadArtefact(f"'{path}' is damaged: {type(error).__name__}: {error}"[:400]) from error
    return reader.found


class _PartsReader:
    """Reads what the metadata describes; no more parts than it has room to name."""

    def __init__(self, folder: Path, places: dict[_Place, tuple[str, int, int]], most: int) -> None:
        self.found = FileContent({}, {}, [], {})
        self._folder = folder
        self._places = places
        self._left = most
        self._regions: dict[tuple[str, int, int], FileContent] = {}
        self._nbytes: Counter[str] = Counter()  # of the regions of each file

    def add(self, key: str, what: Any) -> None:
        """Add a tensor, or the values below one key."""
        function = what.function if isinstance(what, PickledCall) else None
        name = function.name if isinstance(function, GlobalName) else ""
        if name.endswith(" BytesStorageMetadata"):
            self._add_values(key)
        elif name.endswith(" TensorStorageMetadata"):
            self._add_tensor(key, what)
        else:
            raise BadArtefact(
                f"'{self._folder / METADATA_FILE}': {key[:120]} is {outline(function or what)}"
            )

    def _add_values(self, key: str) -> None:
        content = self._region(key, self._places.get((key, None)))
        if len(key) * len(content.values) > _MAX_NAMES_NBYTES:
            raise BadArtefact(f"'{self._folder}': {key[:80]}: many values with very long names")
        for word, weight in content.tensors.items():
            own = f"{key}.{word}" if word != "tensor" else key
            self.found.tensors[own] = weight._replace(key=own)
        self.found.values.update(
            (f"{key}.{word}" if word != "value" else key, value)
            for word, value in content.values.items()
        )

    def _add_tensor(self, key: str, what: PickledCall) -> None:
        folder = self._folder
        shape = numbers(what.state["size"])
        parts = []
        for chunk in what.state["chunks"]:
            self._left -= 1
            if self._left < 0:
                raise BadArtefact(f"'{folder / METADATA_FILE}' has more parts than room for them")
            offsets, sizes = (numbers(chunk.state[word]) for word in ("offsets", "sizes"))
            others = self._places.get((key, None)) if not any(offsets) else None
            content = self._region(key, self._places.get((key, offsets), others))
            if list(content.tensors) != ["tensor"]:
                raise BadArtefact(f"'{folder}': {key[:120]}: a part of it is no tensor")
            part = content.tensors["tensor"].parts[0]
            if part.stored.shape != sizes:
                raise BadArtefact(
                    f"'{part.stored.path}': {key[:120]}: a part of shape "
                    f"{list(part.stored.shape)}; {METADATA_FILE} says {list(sizes)}"
                )
            parts.append(WeightPart(part.stored, offsets, part.is_conjugate, part.is_negative))
        if not parts:
            raise BadArtefact(f"'{folder / METADATA_FILE}': {key[:120]} has no parts")
        if len(parts) == 1 and parts[0].stored.shape == shape:
            one = parts[0]
            self.found.tensors[key] = whole(key, one.stored, one.is_conjugate, one.is_negative)
        else:
            self.found.tensors[key] = join(key, parts, shape)

    def _region(self, key: str, place: tuple[str, int, int] | None) -> FileContent:
        """What a region of a file has; one that two keys name is taken for each of them."""
        if place is None:
            raise BadArtefact(f"'{self._folder / METADATA_FILE}' does not say where {key[:120]} is")
        known = self._regions.get(place)
        if known is not None:
            self._left -= len(known.values) + len(known.tensors)
            return known
        name, offset, length = place
        path = inside(self._folder / name, self._folder)
        try:
            found = self._regions[place] = read_torch_file(path, offset, length, key)
            self._nbytes[name] += length
            if self._nbytes[name] > path.stat().st_size:
                raise BadArtefact(f"'{path}': {METADATA_FILE} names more bytes than it has")
        except BadArtefact as error:
            raise BadArtefact(f"{key[:120]}: {error}") from error
        return found


def _fields(made: Any, name: str) -> Any:
    return made.state[name]


def _index(key: Any) -> _Place:
    offset, name = key.state.get("offset"), key.state["fqn"]
    if not isinstance(name, str):
        raise TypeError(f"{outline(name)} is no name of a tensor")
    return name, None if offset is None else numbers(offset)


def _info(info: Any) -> tuple[str, int, int]:
    name, offset, length = (info.state[word] for word in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
        raise ValueError("a place that is no file and numbers")
    if Path(name).name != name:
        raise ValueError(f"the file {name[:80]!r} is not in the folder itself")
    changed = info.state.get("transform_descriptors")
    if changed:
        raise ValueError(f"{name[:80]} is packed ({outline(changed)}), which is not supported")
    return name, offset, length
