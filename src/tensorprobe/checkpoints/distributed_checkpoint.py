"""torch.distributed.checkpoint: a folder of `.distcp` files, and `.metadata`, which says what is
where in them. It is a pickle: its opcodes are read, nothing of it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorprobe.checkpoints.stored_weights import WeightPart, join, whole
from tensorprobe.checkpoints.torch_checkpoint import FileContent, numbers, read_torch_file
from tensorprobe.errors import BadArtefact
from tensorprobe.tensors.opening import inside, open_file, read_text
from tensorprobe.tensors.pickle_opcodes import GlobalName, PickledCall, read_opcodes

METADATA_FILE = ".metadata"
_MAX_METADATA_NBYTES = 256 << 20
_Place = tuple[str, tuple[int, ...] | None]


def read_distributed(folder: Path) -> FileContent:
    """The tensors and values of such a folder."""
    path = folder / METADATA_FILE
    try:
        tree = read_opcodes(read_text(open_file(path), path, _MAX_METADATA_NBYTES))
        described = _fields(tree, "state_dict_metadata")
        stored = _fields(tree, "storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise TypeError("no state_dict_metadata and storage_data")
        places = {_index(key): _info(info) for key, info in stored.items()}
        found = FileContent({}, {}, [], {})
        for key, what in described.items():
            _add(found, folder, str(key), what, places)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise BadArtefact(f"'{path}' is damaged: {type(error).__name__}: {error}"[:400]) from error
    return found


def _add(
    found: FileContent,
    folder: Path,
    key: str,
    what: Any,
    places: dict[_Place, tuple[str, int, int]],
) -> None:
    name = (
        what.function.name
        if isinstance(what, PickledCall) and isinstance(what.function, GlobalName)
        else ""
    )
    if name.endswith(" BytesStorageMetadata"):
        content = _region(folder, key, places.get((key, None)))
        for word, weight in content.tensors.items():
            own = f"{key}.{word}" if word != "tensor" else key
            found.tensors[own] = weight._replace(key=own)
        found.values.update(
            (f"{key}.{word}" if word != "value" else key, value)
            for word, value in content.values.items()
        )
        return
    if not name.endswith(" TensorStorageMetadata"):
        raise BadArtefact(f"'{folder / METADATA_FILE}': {key[:120]} is a {name[:80] or what!r}")
    shape = numbers(what.state["size"])
    parts = []
    for chunk in what.state["chunks"]:
        offsets, sizes = (numbers(chunk.state[word]) for word in ("offsets", "sizes"))
        place = places.get((key, offsets), places.get((key, None)) if not any(offsets) else None)
        content = _region(folder, key, place)
        if list(content.tensors) != ["tensor"]:
            raise BadArtefact(f"'{folder}': {key[:120]}: a part of it is no tensor")
        part = content.tensors["tensor"].parts[0]
        if part.stored.shape != sizes:
            raise BadArtefact(
                f"'{part.stored.path}': {key[:120]}: a part of shape {list(part.stored.shape)}; "
                f"{METADATA_FILE} says {list(sizes)}"
            )
        parts.append(WeightPart(part.stored, offsets, part.is_conjugate, part.is_negative))
    if not parts:
        raise BadArtefact(f"'{folder / METADATA_FILE}': {key[:120]} has no parts")
    if len(parts) == 1 and parts[0].stored.shape == shape:
        one = parts[0]
        found.tensors[key] = whole(key, one.stored, one.is_conjugate, one.is_negative)
    else:
        found.tensors[key] = join(key, parts, shape)


def _region(folder: Path, key: str, place: tuple[str, int, int] | None) -> FileContent:
    if place is None:
        raise BadArtefact(f"'{folder / METADATA_FILE}' does not say where {key[:120]} is")
    name, offset, length = place
    path = inside(folder / name, folder)
    try:
        return read_torch_file(path, offset, length, key)
    except BadArtefact as error:
        raise BadArtefact(f"{key[:120]}: {error}") from error


def _fields(made: Any, name: str) -> Any:
    return made.state[name]


def _index(key: Any) -> _Place:
    offset = key.state.get("offset")
    return str(key.state["fqn"]), None if offset is None else numbers(offset)


def _info(info: Any) -> tuple[str, int, int]:
    name, offset, length = (info.state[word] for word in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
        raise ValueError("a place that is no file and numbers")
    if Path(name).name != name:
        raise ValueError(f"the file {name[:80]!r} is not in the folder itself")
    changed = info.state.get("transform_descriptors")
    if changed:
        raise ValueError(f"{name[:80]} is packed ({str(changed)[:60]}), which is not supported")
    return name, offset, length
