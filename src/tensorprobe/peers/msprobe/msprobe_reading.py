"""msprobe's dumps to captures: what is damaged is skipped, and becomes a gap with its position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import force_setattr

from tensorprobe.errors import BadArtefact, UnreadableCapture
from tensorprobe.garbage import no_garbage
from tensorprobe.operators import NATIVE_NAMES
from tensorprobe.peers.foreign_records import (
    MAX_DEPTH,
    confined,
    open_object,
    read_foreign,
    read_shape,
    sound_items,
)
from tensorprobe.peers.msprobe.msprobe_folders import (
    CONSTRUCT_FILE,
    DATA_FOLDER,
    DEBUG_FILE,
    DUMP_FILE,
    STACK_FILE,
    Unit,
    find,
)
from tensorprobe.peers.msprobe.msprobe_leaves import (
    is_tensor,
    read_digest,
    read_dtype,
    read_scalar,
    read_summary,
)
from tensorprobe.records import LAST_NODE, Call, Capture, Direction, Fields, Gap, Role, TensorRecord
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.layouts import check_layout, itemsize_of
from tensorprobe.tensors.opening import check_regular, inside

# What our writer adds on top of dump.json. msprobe's own backward records hold something else.
WRITTEN_BY = "written_by"
_KEEPS = {"tensor": "tensors", "structure": "structure"}
_PARENTS = ("optimizer", "clip_grad")  # in construct.json, no calls
_MICRO_STEP = "megatron_micro_step_number"
_API = re.compile(r"(?P<stem>[^.]+\.(?P<api>.+))\.(?P<number>\d+)\.(?P<direction>forward|backward)")
_MODULE = re.compile(
    r"Module\.(?P<path>.+)\.(?P<kind>[^.]+)\.(?P<what>forward|backward|parameters_grad)"
    r"(?:\.(?P<number>\d+))?"
)
_DEBUG = re.compile(r"(?P<name>.+?)(?P<grad>_grad)?\.(?P<number>\d+)\.debug")
_FRAME = re.compile(r"File (?P<file>.*?), line (?P<line>\d+), in (?P<function>[^,]*)", re.DOTALL)
# Frames of the tool itself: where a call was recorded, not where it was made.
_OWN_FRAME = re.compile(r"[/\\](?:msprobe|atat)[/\\](?:core|pytorch|mindspore)[/\\]")
_HOMES = {
    "Functional": "torch.nn.functional.",
    "Tensor": "torch.Tensor.",
    "Torch": "torch.",
    "VF": "torch.",
    "Aten": "torch.ops.aten.",
    "NPU": "torch_npu.",
    "Distributed": "torch.distributed.",
}


def read(path: Path) -> Capture:
    """Everything at a path of a msprobe dump: the run, one step, one rank, or a file of it."""
    units, gaps = find(path)
    if not units:
        raise UnreadableCapture(f"'{path}' is not a dump of msprobe: it has no {DUMP_FILE}")
    calls: list[Call] = []
    config: dict[str, Any] = {}
    index, last_rank = 0, None
    with no_garbage():
        for unit in units:
            if unit.rank != last_rank:
                index, last_rank = 0, unit.rank
            reader = _UnitReader(unit, index)
            found = reader.calls()
            calls += found
            gaps += reader.gaps
            index += len(found)
            config = config or reader.config
    return Capture(path, "msprobe", calls, gaps, {"configuration": config})


class _CallName(NamedTuple):
    """What the name of a record says."""

    op: str
    module: str
    direction: Direction


class _UnitReader:
    """Reads the files of one step of one rank."""

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit = unit
        self.gaps: list[Gap] = []
        self.config: dict[str, Any] = {}
        self._index = index
        self._stacks: dict[str, tuple[str, ...]] = {}
        self._parents: dict[str, str | None] = {}
        self._data = unit.folder / DATA_FOLDER
        self._files: set[str] = set()
        self._ours = False
        self._found: list[TensorRecord] = []
        self._name = ""

    def calls(self) -> list[Call]:
        folder = self.unit.folder
        self._stacks = dict(self._read_stacks(folder / STACK_FILE))
        self._parents = dict(self._read_parents(folder / CONSTRUCT_FILE))
        data = folder / DATA_FOLDER
        if data.is_dir():
            try:
                self._data = inside(data, self.unit.root)
                self._files = {path.name for path in data.iterdir()}
            except BadArtefact as error:
                self._gap(DATA_FOLDER, str(error))
        made: list[Call] = []
        for name in (DUMP_FILE, DEBUG_FILE):
            for key, record in self._records(folder / name):
                try:
                    made.append(self._call(key, record))
                except Exception as error:  # noqa: BLE001 reading one foreign record: a gap
                    self._gap(f"{name}: {key[:200]}", f"{type(error).__name__}: {error}"[:300])
        if self.config.get("keep") == "structure":
            made = self._structure()
        made = _in_order(made, self._parents)
        return [_numbered(call, self._index + i) for i, call in enumerate(made)]

    def _gap(self, name: str, reason: str) -> None:
        place = f"{self.unit.folder.parent.name}/{self.unit.folder.name}"
        self.gaps.append(Gap(f"{place}/{name}", reason, self.unit.step, self.unit.rank))

    # Files

    def _records(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        tell = partial(self._gap, path.name)
        text = read_foreign(path, tell, self.unit.root)
        if text is None:
            return
        try:
            head, at = open_object(text, "data")
        except BadArtefact as error:
            self._gap(path.name, f"{error}; nothing of it is read")
            return
        self._ours = isinstance(head.get(WRITTEN_BY), str)
        level = head.get("level")
        self.config = {
            "level": level if level in ("L0", "L1", "L2", "mix") else None,
            "keep": _KEEPS.get(str(head.get("task")), "stats"),
            "operators": "dunder",
        }
        yield from sound_items(text, tell, at)

    def _items(self, path: Path) -> Iterator[tuple[str, Any]]:
        tell = partial(self._gap, path.name)
        yield from sound_items(read_foreign(path, tell, self.unit.root), tell)

    def _read_stacks(self, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The stack of each call; until May 2025 under its name, since then one for many names."""
        for key, value in self._items(path):
            try:
                if isinstance(value, list) and all(isinstance(frame, str) for frame in value):
                    yield key, _stack(value)
                    continue
                names, frames = value
                stack = _stack(frames)
                for name in names:
                    yield str(name), stack
            except (TypeError, ValueError):
                self._gap(path.name, f"{key[:80]}: expected a list of names and one of frames")

    def _read_parents(self, path: Path) -> Iterator[tuple[str, str | None]]:
        for key, value in self._items(path):
            parent = value[0] if isinstance(value, list) and value else value
            if key == _MICRO_STEP or key in _PARENTS:
                continue
            yield key, parent if isinstance(parent, str) and parent not in _PARENTS else None

    # Calls

    def _structure(self) -> list[Call]:
        """A dump of task structure has no records: its calls are those of the tree."""
        return [self._call(name, {}) for name in self._parents]

    def _call(self, name: str, record: dict[str, Any]) -> Call:
        self._name, self._found = name, []
        if (debug := _DEBUG.fullmatch(name)) is not None:
            return self._saved(debug, record)
        if not isinstance(record, dict):
            raise ValueError(f"expected an object, found {str(record)[:60]!r}")
        about = _parse_name(name)
        if ".parameters_grad" in name and _MODULE.fullmatch(name):
            self._parameters(record, "parameter_grad", name)
            return self._make(name, about, (), {}, ())
        backward = about.direction == "backward"
        given = record.get("input" if backward else "input_args")
        args = self._tree(given or [], f"{name}.input", "input")
        kwargs = self._tree(record.get("input_kwargs") or {}, f"{name}.input", "input")
        if not isinstance(kwargs, dict):
            raise ValueError("`input_kwargs` is no object")
        if not isinstance(args, list):  # backward of a namedtuple's fields
            args, kwargs = [], {**kwargs, **_fields(args)}
        self._parameters(record.get("parameters") or {}, "parameter", f"{name}.parameters")
        outputs = self._outputs(record.get("output"), backward)
        notes = (LAST_NODE,) if backward and not self._ours and _API.fullmatch(name) else ()
        return self._make(name, about, tuple(args), kwargs, outputs, notes)

    def _make(
        self,
        name: str,
        about: _CallName,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        notes: tuple[str, ...] = (),
    ) -> Call:
        return Call(
            index=0,
            name=name,
            op=about.op,
            module=about.module or self._module_of(name),
            direction=about.direction,
            step=self.unit.step,
            rank=self.unit.rank,
            parent=self._parents.get(name),
            stack=self._stacks.get(name, ()),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            tensors=tuple(self._found),
            notes=notes,
        )

    def _module_of(self, name: str) -> str:
        """The path of the module that a call runs in, by its parent."""
        found = _MODULE.fullmatch(self._parents.get(name) or "")
        return found["path"] if found else ""

    def _saved(self, debug: re.Match[str], record: Any) -> Call:
        """A value given by hand, or the gradient of one."""
        backward = debug["grad"] is not None
        name = f"Saved.{debug['name']}.{debug['number']}.{'backward' if backward else 'forward'}"
        self._name = name
        about = _CallName(debug["name"], "", "backward" if backward else "forward")
        if backward:
            tree = self._tree(record, f"{name}.input", "input", lone=True)
            if not self._found:  # null, in the structure of the value: none came
                return self._make(name, about, (), {}, ())
            named = _fields(tree)
            args = () if named else tuple(tree if isinstance(tree, list) else [tree])
            return self._make(name, about, args, named, ())
        tree = self._tree(record, f"{name}.output", "output", lone=True)
        return self._make(name, about, (), {}, tree)

    def _outputs(self, record: Any, backward: bool) -> Any:
        base = f"{self._name}.output"
        if record is None:  # it was not dumped; of a call that returns None it is [null]
            return ()
        if isinstance(record, list) and len(record) == 1 and _is_plain_dict(record[0]):
            return self._tree(record[0], base, "output")  # one dict, named as if it were alone
        tree = self._tree(record, base, "output")
        if backward and isinstance(tree, list):
            return {str(i): item for i, item in enumerate(tree)}  # None: it never came
        if isinstance(tree, list):
            return tree[0] if len(tree) == 1 and not isinstance(tree[0], list) else tuple(tree)
        return Fields("namedtuple", "", tree) if isinstance(tree, dict) else tree

    def _parameters(self, record: Any, role: Role, base: str) -> None:
        if not isinstance(record, dict):
            raise ValueError(f"expected an object of parameters, found {str(record)[:60]!r}")
        for key, leaf in record.items():
            leaf = leaf[0] if isinstance(leaf, list) and len(leaf) == 1 else leaf
            if isinstance(leaf, dict) and is_tensor(leaf):
                self._tensor(leaf, f"{base}.{key}", role)

    def _tree(
        self, value: Any, name: str, role: Role, depth: int = 0, *, lone: bool = False
    ) -> Any:
        """A tree of leaves as values, each tensor in it also among what was found."""
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(value, list):
            return [
                self._tree(item, f"{name}.{i}", role, depth + 1) for i, item in enumerate(value)
            ]
        if not isinstance(value, dict):
            if value is None:
                return None
            raise ValueError(f"{str(value)[:60]!r} is no leaf")
        if isinstance(value.get("type"), str):
            if is_tensor(value):
                return self._tensor(value, f"{name}.0" if lone else name, role)
            return read_scalar(value)
        if "class_type" in value:  # a P2POp: its tensor, its peer and its kind
            tensor = value.get("tensor")
            rest = {key: item for key, item in value.items() if isinstance(item, str | int)}
            return {**rest, "tensor": self._tree(tensor, f"{name}.tensor", role, depth + 1)}
        return {
            key: self._tree(item, f"{name}.{key}", role, depth + 1) for key, item in value.items()
        }

    def _tensor(self, leaf: dict[str, Any], name: str, role: Role) -> TensorRecord:
        dtype, shape = read_dtype(leaf["dtype"]), read_shape(leaf["shape"])
        check_layout(dtype, shape)
        blob, gap = self._blob(leaf.get("data_name"), dtype, shape)
        record = TensorRecord(
            name,
            role,
            dtype,
            shape,
            requires_grad=leaf.get("requires_grad") is True,
            summary=read_summary(leaf),
            digest=read_digest(leaf.get("md5")),
            blob=blob,
            gap=gap,
        )
        self._found.append(record)
        return record

    def _blob(
        self, file: object, dtype: str, shape: tuple[int, ...]
    ) -> tuple[Blob | None, str | None]:
        """Where the tensor's file is, or why it has none. The path in dump.json is not followed."""
        if file is None or file == "-1":
            return None, None
        try:
            path = confined(self._data, file)
            if path.name not in self._files:
                return None, f"{DATA_FOLDER}/{path.name[:200]} is missing"
            if path.is_symlink():
                path = inside(path, self.unit.root)
            status = path.stat()
            check_regular(path, status.st_mode)
        except (ValueError, BadArtefact) as error:
            return None, str(error)
        nbytes = itemsize_of(dtype)
        for length in shape:
            nbytes *= length
        if nbytes > status.st_size and path.suffix in (".pt", ".npy"):
            return None, f"{path.name} is too small for {dtype} of shape {list(shape)}"
        if path.suffix == ".pt":
            return Blob(path, 0, nbytes, "pt"), None
        if path.suffix == ".npy":
            return Blob(path, 0, nbytes, "npy"), None
        return None, f"{path.name} is neither .pt nor .npy"


def _is_plain_dict(value: object) -> bool:
    return isinstance(value, dict) and "type" not in value and "class_type" not in value


def _fields(tree: Any) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}


def _parse_name(name: str) -> _CallName:
    found = _MODULE.fullmatch(name)
    if found is not None:
        forward = found["what"] == "forward"
        return _CallName(found["kind"], found["path"], "forward" if forward else "backward")
    found = _API.fullmatch(name)
    if found is None:
        raise ValueError("its name is not one that msprobe gives")
    prefix, api = name.partition(".")[0], found["api"]
    home = _HOMES.get(prefix, f"{prefix}.")
    op = home + (NATIVE_NAMES.get(api, api) if prefix == "Tensor" else api)
    return _CallName(op, "", "forward" if found["direction"] == "forward" else "backward")


def _stack(frames: list[Any]) -> tuple[str, ...]:
    texts = [_frame(frame) for frame in frames]
    return tuple([text for text in texts if not _OWN_FRAME.search(text)])


def _frame(text: object) -> str:
    """A frame as we write it: "model.py:8 in forward"."""
    found = _FRAME.match(str(text))
    if found is None:
        return str(text)[:300]
    return f"{found['file']}:{found['line']} in {found['function'].strip()}"


def _numbered(call: Call, index: int) -> Call:
    force_setattr(call, "index", index)  # frozen for its users, and not yet in their hands
    return call


def _in_order(calls: list[Call], parents: dict[str, str | None]) -> list[Call]:
    """Execution order: msprobe writes a module's forward when it ends, after all that it called,
    and gradients of parameters wherever they came by in backward."""
    place = {call.name: i for i, call in enumerate(calls)}
    starts = {name: float(i) for name, i in place.items()}
    for call in calls:
        if call.direction == "forward":
            name, depth = call.name, 0
            parent = parents.get(name)
            while parent is not None and parent in starts and depth < MAX_DEPTH:
                starts[parent] = min(starts[parent], starts[name])
                name, parent, depth = parent, parents.get(parent), depth + 1
    grads = [call for call in calls if ".parameters_grad" in call.name]
    rest = [call for call in calls if ".parameters_grad" not in call.name]
    # Of those that begin together the outer one, which is written last, comes first.
    rest.sort(key=lambda call: (starts[call.name], -place[call.name]))
    if not grads:
        return rest
    modules = {call.module: i for i, call in reversed(list(enumerate(rest)))}
    grads.sort(key=lambda call: modules.get(call.module, len(rest)))
    last = max((i for i, call in enumerate(rest) if call.direction == "backward"), default=-1)
    return [*rest[: last + 1], *grads, *rest[last + 1 :]]
