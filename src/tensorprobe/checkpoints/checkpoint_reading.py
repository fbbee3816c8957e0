"""A checkpoint of any form, read: what kind a path is, and the tensors and values that it holds."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe.checkpoints.distributed_checkpoint import METADATA_FILE, read_distributed
from tensorprobe.checkpoints.pickled_texts import Value
from tensorprobe.checkpoints.rank_files import Rank, join_megatron, join_ranks
from tensorprobe.checkpoints.safetensors_files import is_safetensors, read_safetensors
from tensorprobe.checkpoints.stored_weights import StoredWeight
from tensorprobe.checkpoints.torch_checkpoint import FileContent, read_torch_file
from tensorprobe.errors import BadArtefact, BadUsage
from tensorprobe.parallel_layout import LAYOUT_FILE, ParallelLayout, read_layout
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import inside, open_file, read_text

_TRACKER = "latest_checkpointed_iteration.txt"
_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_MODEL_FILE = re.compile(
    r"(model|pytorch_model|adapter_model|diffusion_pytorch_model|consolidated)\.(safetensors|bin)"
)
_MEGATRON = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_RANK_FILE = re.compile(r"(.*?)[_.-]?rank[_-]?(\d{1,6})(?:_of_\d+)?\.(pt|pth|bin)")
_WORLD = re.compile(r"world_size_(\d{1,6})$")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MAX_INDEX_NBYTES = 64 << 20
_MAX_FILES = 20_000
_MAX_DEPTH = 3


class Checkpoint(NamedTuple):
    """What a checkpoint holds: tensors and other values by name, in the order of its files."""

    path: Path
    form: str  # in words, for a person
    tensors: dict[str, StoredWeight]
    values: dict[str, Value]
    notes: list[str]


def read_checkpoint(path: Path, layout: Path | None = None) -> Checkpoint:
    """The checkpoint that a path names; BadArtefact says which file and key cannot be read."""
    if not path.exists():
        raise BadUsage(f"no such file or folder: '{path}'")
    place = Path(os.path.realpath(path))  # the user named it: links are followed so far
    if place.is_dir():
        form, content = _Folder(place, layout).read()
    else:
        if layout is not None:
            raise BadUsage(f"'{path}' is one file: it has no layout of ranks")
        if place.name == METADATA_FILE:
            form, content = "DCP", read_distributed(place.parent)
        elif _INDEX.fullmatch(place.name):
            form, content = "Hugging Face", _read_index(place)
        else:
            form, content = read_file(place)
            _note_parts(content)
    if not content.tensors and not content.values:
        raise BadArtefact(f"'{path}' ({form}) holds no tensor and no value")
    return Checkpoint(path, form, content.tensors, content.values, content.notes)


def read_file(path: Path) -> tuple[str, FileContent]:
    """One file, known by how it begins."""
    with open_file(path) as file:
        beginning = file.read(9)
        size = os.fstat(file.fileno()).st_size
    if is_safetensors(beginning, size):
        return "safetensors", FileContent(read_safetensors(path), {}, [], {})
    if beginning[:2] == b"PK" or beginning[:1] == b"\x80":
        return "torch", read_torch_file(path)
    raise BadArtefact(
        f"'{path}' is no checkpoint: expected a file of torch.save or safetensors, or a folder. It "
        f"begins with {beginning[:8]!r}"
    )


def _note_parts(content: FileContent) -> None:
    parts = [k for k, shard in content.shards.items() if content.tensors[k].shape != shard.shape]
    if parts:
        content.notes.append(f"{len(parts)} tensors are one rank's part of a whole: {parts[0]}")


def _read_index(path: Path) -> FileContent:
    """A model of Hugging Face in several files."""
    folder = path.parent
    try:
        tree = read_json(open_file(path), path)
        names = tree["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise TypeError("its weight_map is no object of names")
    except (ValueError, KeyError, TypeError) as error:
        raise BadArtefact(f"'{path}' is damaged: {type(error).__name__}: {error}"[:300]) from error
    files: dict[str, FileContent] = {}
    for key, name in names.items():
        if name not in files:
            if Path(name).name != name:
                raise BadArtefact(f"'{path}': {key[:120]}: '{name[:80]}' is not in the folder")
            shard = _inside(folder / name, folder)
            if not shard.exists():
                raise BadArtefact(f"'{folder / name}' is missing, which has {key[:120]}")
            files[name] = read_file(shard)[1]
    found = FileContent({}, {}, [], {})
    for key, name in names.items():
        weight = files[name].tensors.get(key)
        if weight is None:
            raise BadArtefact(f"'{folder / name}' has no {key[:120]}, which the index says it has")
        found.tensors[key] = weight
    for name, content in files.items():
        more = [key for key in content.tensors if names.get(key) != name]
        if more:
            count = f"{len(more)} tensors that the index leaves out"
            found.notes.append(f"{name} has {count}: {more[0]}")
    return found


def _inside(path: Path, folder: Path) -> Path:
    """Where a file of a folder is. The cache of Hugging Face has links into its `blobs`."""
    root = folder
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        root = folder.parents[1]
    return inside(path, root) if root == folder else _linked(path, root)


def _linked(path: Path, root: Path) -> Path:
    place = Path(os.path.realpath(path))
    if root not in place.parents:
        return inside(path, path.parent)  # which says that it leads out
    return place


class _Folder:
    """A folder, by what is in it."""

    def __init__(self, path: Path, layout: Path | None, depth: int = 0) -> None:
        self.path = path
        self.depth = depth
        own = path / LAYOUT_FILE
        if layout is None and own.exists():
            layout = inside(own, path)
        self.layout_file = layout
        self.layout = read_layout(layout) if layout is not None else None
        names = sorted(os.listdir(path))
        if len(names) > _MAX_FILES:
            raise BadArtefact(f"'{path}' has {len(names)} entries; expected {_MAX_FILES} at most")
        self.names = names

    def read(self) -> tuple[str, FileContent]:
        if _TRACKER in self.names:
            return self._latest()
        if METADATA_FILE in self.names:
            return self._distributed()
        if ranks := [name for name in self.names if _MEGATRON.fullmatch(name)]:
            return self._megatron(ranks)
        if ranks := [name for name in self.names if _RANK_FILE.fullmatch(name)]:
            groups = {_RANK_FILE.fullmatch(name)[1] for name in ranks}  # type: ignore[index]
            if len(ranks) > len(groups) or any(_WORLD.search(group) for group in groups):
                return self._by_rank(ranks)
        self._check_ranks(1)
        return self._files()

    def _check_ranks(self, count: int) -> None:
        if self.layout is not None and self.layout_file is not None:
            self.layout.check(count, self.layout_file)

    def _latest(self) -> tuple[str, FileContent]:
        path = self.path / _TRACKER
        text = read_text(open_file(path), path, 100).decode(errors="replace").strip()
        name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else ""
        folder = _inside(self.path / name, self.path)
        if not name or not folder.is_dir() or self.depth >= _MAX_DEPTH:
            raise BadArtefact(f"'{path}' names {text[:40]!r}, which is no folder here")
        return _Folder(folder, self.layout_file, self.depth + 1).read()

    def _distributed(self) -> tuple[str, FileContent]:
        content = read_distributed(self.path)
        if "common.pt" in self.names:  # what Megatron keeps beside it
            _add(content, read_torch_file(_inside(self.path / "common.pt", self.path)), "common.")
        return "DCP", content

    def _megatron(self, names: list[str]) -> tuple[str, FileContent]:
        ranks: dict[Rank, FileContent] = {}
        for name in names:
            found = _MEGATRON.fullmatch(name)
            if found is None:
                continue
            if found[3]:
                raise BadArtefact(
                    f"'{self.path / name}': experts on ranks of their own are not put together. "
                    "Compare the folders of two ranks"
                )
            folder = _inside(self.path / name, self.path)
            rank = Rank(int(found[1]), int(found[2] or 0))
            ranks[rank] = _Folder(folder, None, self.depth + 1)._files(bare=True)[1]
        self._check_ranks_of_model(len(ranks))
        if len(ranks) == 1:
            return "Megatron", next(iter(ranks.values()))
        tp, pp = (len({rank[n] for rank in ranks}) for n in (0, 1))
        return f"Megatron, tp {tp}, pp {pp}", join_megatron(ranks)

    def _check_ranks_of_model(self, count: int) -> None:
        """Replicas have no folders of their own there."""
        if self.layout is not None and self.layout_file is not None:
            ours = self.layout.size("tp") * self.layout.size("pp")
            if ours != count:
                self.layout._replace(
                    sizes=tuple((n, s) for n, s in self.layout.sizes if n in ("tp", "pp"))
                ).check(count, self.layout_file)

    def _by_rank(self, names: list[str]) -> tuple[str, FileContent]:
        groups: dict[str, dict[int, str]] = defaultdict(dict)
        for name in names:
            found = _RANK_FILE.fullmatch(name)
            if found is not None:
                if int(found[2]) in groups[found[1]]:
                    raise BadArtefact(f"'{self.path / name}': there are two files of its rank")
                groups[found[1]][int(found[2])] = name
        whole = FileContent({}, {}, [], {})
        for group, files in groups.items():
            self._check_ranks(len(files))
            world = _WORLD.search(group)
            size = max(max(files) + 1, int(world[1]) if world else 0)
            missing = [rank for rank in range(size) if rank not in files]
            if missing:
                raise BadArtefact(f"'{self.path}': the file of rank {missing[0]} is missing")
            read = [
                read_file(_inside(self.path / files[rank], self.path))[1] for rank in sorted(files)
            ]
            joined = join_ranks(read) if self.layout is None else _by_layout(read, self.layout)
            _add(whole, joined, "" if len(groups) == 1 else f"{group.strip('_.-') or 'rank'}.")
        count = max(len(files) for files in groups.values())
        return f"files of {count} ranks", whole

    def _files(self, bare: bool = False) -> tuple[str, FileContent]:
        """Each file of the folder; those of the model under their own names."""
        whole = FileContent({}, {}, [], {})
        done = set()
        forms = set()
        indices = [name for name in self.names if _INDEX.fullmatch(name)]
        models = [name for name in self.names if _MODEL_FILE.fullmatch(name)]
        if chosen := _preferred(indices) or _preferred(models):
            path = _inside(self.path / chosen, self.path)
            is_index = chosen in indices
            _add(whole, _read_index(self.path / chosen) if is_index else read_file(path)[1], "")
            forms.add("Hugging Face")
            done = {n for n in self.names if _is_model_part(n)}
            left_out = [n for n in (indices or models) if n != chosen]
            if left_out:
                whole.notes.append(f"{chosen} was read, and not {', '.join(left_out)}")
        files = [n for n in self.names if n.endswith(_SUFFIXES) and n not in done]
        for name in files:
            form, content = read_file(_inside(self.path / name, self.path))
            forms.add(form)
            alone = len(files) == 1 and not whole.tensors
            main = bare and name.startswith("model")
            _add(whole, content, "" if alone or main else f"{Path(name).stem}.")
        if not forms and self.depth < _MAX_DEPTH:
            for name in self.names:
                folder = self.path / name
                if folder.is_dir() and not folder.is_symlink():
                    below = _Folder(folder, None, self.depth + 1)
                    if below._has_something():
                        form, content = below.read()
                        forms.add(form)
                        _add(whole, content, f"{name}.")
        if not forms:
            raise BadArtefact(
                f"'{self.path}' holds no checkpoint: no {', '.join(_SUFFIXES)} file, no "
                f"{METADATA_FILE}, no mp_rank folder"
            )
        return ", ".join(sorted(forms)), whole

    def _has_something(self) -> bool:
        return METADATA_FILE in self.names or any(
            name.endswith(_SUFFIXES) or _MEGATRON.fullmatch(name) for name in self.names
        )


def _preferred(names: list[str]) -> str | None:
    """The file of a model that several tools wrote; safetensors before .bin."""
    order = sorted(names, key=lambda name: (".safetensors" not in name, len(name), name))
    return order[0] if order else None


def _is_model_part(name: str) -> bool:
    """Whether a file is the model or a shard of it."""
    return bool(
        _MODEL_FILE.fullmatch(name) or re.fullmatch(r"\w*model-\d+-of-\d+\.(safetensors|bin)", name)
    )


def _add(whole: FileContent, part: FileContent, prefix: str) -> None:
    for key, weight in part.tensors.items():
        name = f"{prefix}{key}"
        if name in whole.tensors:
            raise BadArtefact(f"'{weight.path}': {name[:120]} is in another file too")
        whole.tensors[name] = weight._replace(key=name)
    whole.values.update((f"{prefix}{key}", value) for key, value in part.values.items())
    whole.notes.extend(part.notes)


def _by_layout(ranks: list[FileContent], layout: ParallelLayout) -> FileContent:
    """Files of all ranks, of which the layout says which part of the model each has."""
    replicas: dict[Rank, list[FileContent]] = defaultdict(list)
    for number, content in enumerate(ranks):
        at: dict[str, Any] = layout.coordinates(number)
        replicas[Rank(at.get("tp", 0), at.get("pp", 0))].append(content)
    joined = {
        rank: join_ranks(group) if len(group) > 1 else group[0] for rank, group in replicas.items()
    }
    return next(iter(joined.values())) if len(joined) == 1 else join_megatron(joined)
