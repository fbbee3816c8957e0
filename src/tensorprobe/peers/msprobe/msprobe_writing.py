"""Captures to msprobe's files: dump.json, stack.json, construct.json and a .pt a tensor."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe._version import __version__
from tensorprobe.errors import MissingDependency
from tensorprobe.peers.foreign_records import file_name
from tensorprobe.peers.msprobe.msprobe_folders import (
    CONSTRUCT_FILE,
    DATA_FOLDER,
    DEBUG_FILE,
    DUMP_FILE,
    STACK_FILE,
)
from tensorprobe.peers.msprobe.msprobe_leaves import digest_of, write_statistics, write_value
from tensorprobe.peers.msprobe.msprobe_reading import WRITTEN_BY
from tensorprobe.peers.peer_names import map_leaves, map_tensors, peer_name, renamed
from tensorprobe.records import (
    IN_MEMORY,
    Call,
    Capture,
    Fields,
    TensorRecord,
    by_rank_and_step,
)
from tensorprobe.store.frames import source_line
from tensorprobe.store.unread import Unread

_FRAME = re.compile(r"(?P<file>.+):(?P<line>\d+) in (?P<function>.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\]")
_SPELLED = "calls are named as operators: the recording does not say who wrote a.add(b) for a + b"
_OPTIMIZERS = "optimizer steps (msprobe has the calls inside them only)"
_ROOTS = "calls of the model itself (msprobe has its children only)"
# What msprobe's own dumps never have.
NOT_MSPROBES = (_OPTIMIZERS, _ROOTS)
_LONGEST_LIST = 2000  # of gradients by position: a larger number is a key


def write(capture: Capture, folder: Path) -> list[str]:
    """Write a capture as step{N}/rank{R} into a folder; says what could not be carried."""
    lost: Counter[str] = Counter()
    unread = Unread(capture.calls)
    for (rank, step), calls in by_rank_and_step(capture.calls).items():
        place = folder / f"step{step}" / f"rank{rank}"
        write_unit(calls, place, _config(capture), lost, unread)
    return [*(f"{count} {what}" for what, count in lost.items() if count), *unread.lines()]


def _config(capture: Capture) -> Mapping[str, Any]:
    config = capture.facts.get("config") or capture.facts.get("configuration")
    return config if isinstance(config, Mapping) else {}


def write_unit(
    calls: Sequence[Call],
    folder: Path,
    config: Mapping[str, Any],
    lost: Counter[str],
    unread: Unread,
    *,
    keep_files: bool = False,
    saved_alone: set[str] | None = None,
) -> None:
    """Write the calls of one step of one rank; `config` is what the recording was asked for.

    With `keep_files` tensor files that are there already are taken for what they should be.
    `saved_alone` names the values whose gradients nobody asked for; all others then have an entry
    for theirs, null where none came.
    """
    if config.get("operators") != "dunder":  # else the names say how the program wrote each call
        lost[_SPELLED] += sum(peer_name(c.name) != c.name for c in calls)
        calls = [renamed(call, peer_name) for call in calls]
    saved = [call for call in calls if call.name.startswith("Saved.")]
    others = _writable([call for call in calls if not call.name.startswith("Saved.")], lost)
    folder.mkdir(parents=True, exist_ok=True)
    unit = _UnitWriter(folder, config, lost, unread, keep_files)
    if saved:
        unit.write_saved(saved, saved_alone)
    if others or not saved:
        unit.write(others)


def _writable(calls: Sequence[Call], lost: Counter[str]) -> list[Call]:
    kept = []
    for call in calls:
        if call.name.startswith("Optimizer."):
            lost[_OPTIMIZERS] += 1
        elif call.name.startswith("Module.") and not call.module:
            lost[_ROOTS] += 1
        else:
            kept.append(call)
    return kept


def record_of(call: Call) -> dict[str, Any]:
    """A call as dump.json has it, without the contents of tensors."""

    def without_content(record: TensorRecord) -> TensorRecord:
        return msgspec.structs.replace(record, blob=None)

    bare = msgspec.structs.replace(
        call,
        args=map_tensors(call.args, without_content),
        kwargs=map_tensors(call.kwargs, without_content),
        outputs=map_tensors(call.outputs, without_content),
        tensors=tuple(map(without_content, call.tensors)),
    )
    return _UnitWriter(Path(), {}, Counter(), Unread(), keep_files=True).record(bare)


class _UnitWriter:
    """Writes the files of one step of one rank."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        lost: Counter[str],
        unread: Unread,
        keep_files: bool,
    ) -> None:
        self._folder = folder
        self._keep_files = keep_files
        self._data = folder / DATA_FOLDER
        self._lost = lost
        self._unread = unread
        self._sides = config.get("sides") or ("input", "output")
        self._level = config.get("level")
        self._structure = config.get("keep") == "structure"
        self._stacks = config.get("stacks", True) is not False
        self._wrote_tensor = False

    def write(self, calls: Sequence[Call]) -> None:
        names = {call.name for call in calls}
        data = {}
        if not self._structure:
            data = {call.name: self.record(call) for call in _children_first(calls)}
        self._write_dump(DUMP_FILE, self._level_of(calls), data)
        if self._stacks:
            self._write_json(STACK_FILE, _stacks(calls))
            self._write_json(
                CONSTRUCT_FILE,
                {} if self._level == "L1" else _tree(_children_first(calls), names),
            )

    def write_saved(self, calls: Sequence[Call], alone: set[str] | None) -> None:
        """Values given by hand, and their gradients: debug.json."""
        data: dict[str, Any] = {}
        backward = {call.name: call for call in calls if call.direction == "backward"}
        for call in calls:
            name, _, number = call.name[len("Saved.") :].rpartition(".")[0].rpartition(".")
            gradient = f"{name}_grad.{number}.debug"
            if call.direction == "backward":
                if gradient not in data and name not in (
                    alone or ()
                ):  # its value was saved in an earlier step
                    data[gradient] = self._debug(gradient, _saved_gradient(call))
                continue
            key = f"{name}.{number}.debug"
            data[key] = self._debug(key, call.outputs)
            found = backward.get(_forward_to_backward(call.name) or "")
            came = found is not None or any(record.requires_grad for record in call.tensors)
            if came if alone is None else name not in alone:
                data[gradient] = self._debug(gradient, _gradients_in(call, found))
        self._write_dump(DEBUG_FILE, "debug", data)

    def _debug(self, key: str, value: Any) -> Any:
        return write_value(value, lambda record, path: self._tensor(record, key, path))

    # Records

    def record(self, call: Call) -> dict[str, Any]:
        self._count_lost(call)
        if ".parameters_grad." in call.name:
            return {
                key: [leaf] for key, leaf in self._held(call, "parameter_grad", call.name).items()
            }
        record: dict[str, Any] = {}
        if call.direction == "backward":
            if "input" in self._sides:
                given = _merged(call.args, call.kwargs)
                record["input"] = self._values(call, "input", given)
            if "output" in self._sides:
                outputs = _by_position(call.outputs)
                record["output"] = self._values(call, "output", [] if outputs is None else outputs)
            return record
        if "input" in self._sides:
            record["input_args"] = self._values(call, "input", call.args)
            record["input_kwargs"] = self._values(call, "kwargs", call.kwargs)
        if "output" in self._sides and call.status == "complete":
            record["output"] = self._values(call, "output", _as_output(call.outputs))
        if call.name.startswith("Module."):
            record["parameters"] = self._held(call, "parameter", f"{call.name}.parameters")
        return record

    def _values(self, call: Call, category: str, value: Any) -> Any:
        base = f"{call.name}.{category}"
        return write_value(value, lambda tensor, path: self._tensor(tensor, base, path))

    def _held(self, call: Call, role: str, base: str) -> dict[str, Any]:
        return {
            key: self._tensor(record, base, (key,))
            for record in call.tensors
            if record.role == role and (key := record.name.removeprefix(base + "."))
        }

    def _tensor(self, record: TensorRecord, base: str, path: tuple[str, ...]) -> dict[str, Any]:
        leaf: dict[str, Any] = {
            "type": "torch.Tensor",
            "dtype": f"torch.{record.dtype}",
            "shape": list(record.shape),
            **write_statistics(record),
            "requires_grad": record.requires_grad,
        }
        digest = digest_of(record.digest)
        if digest is not None:
            leaf["md5"] = digest
        elif record.blob is None and not (record.digest or IN_MEMORY).startswith(IN_MEMORY):
            self._lost["digests (msprobe has a CRC-32, which cannot be made of one)"] += 1
        if record.blob is not None and record.numel:
            name = file_name(".".join((base, *path)), ".pt")
            if self._unread.attempt(record, lambda: self._save(record, self._data / name)):
                leaf["data_name"] = name
        return leaf

    def _save(self, record: TensorRecord, path: Path) -> bool:
        try:
            import torch
        except ImportError:
            raise MissingDependency("torch", "writing .pt files", "torch") from None
        self._wrote_tensor = True
        if self._keep_files and path.exists():
            return True
        self._data.mkdir(exist_ok=True)
        torch.save(record.load(), path)
        return True

    def _count_lost(self, call: Call) -> None:
        buffers = sum(record.role == "buffer" for record in call.tensors)
        if buffers:
            self._lost["buffers"] += buffers
        if call.status != "complete":
            self._lost["calls that did not end (written without output)"] += 1

    # Files

    def _level_of(self, calls: Sequence[Call]) -> str:
        if self._level == "L2":
            self._lost["steps of level L2 (written as L1)"] += 1
        if self._level in ("L0", "mix"):
            return str(self._level)
        modules = sum(call.name.startswith("Module.") for call in calls)
        if self._level is None and modules:
            return "L0" if modules == len(calls) else "mix"
        return "L1"

    def _write_dump(self, name: str, level: str, data: dict[str, Any]) -> None:
        task = "structure" if self._structure else "statistics"
        head = {
            "task": "tensor" if self._wrote_tensor else task,
            "level": level,
            "framework": "pytorch",
            "dump_data_dir": str(self._data) if self._wrote_tensor else None,
            WRITTEN_BY: f"tensorprobe {__version__}",
            "data": data,
        }
        self._write_json(name, head)

    def _write_json(self, name: str, value: Any) -> None:
        """Whole or not at all: a reader that comes by must not find half of it.

        As msprobe writes it, with the tokens NaN and Infinity, by which its tools find overflows.
        """
        path = self._folder / name
        temporary = path.with_name(f".{name}.new")
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(value, file, indent=1)
        temporary.replace(path)


def _gradients_in(call: Call, backward: Call | None) -> Any:
    """The value that was saved with each tensor's gradient in its place, null where none came."""
    found: dict[str, TensorRecord] = {}
    if backward is not None:
        base = f"{backward.name}.input."
        found = {record.name.removeprefix(base): record for record in backward.tensors}

    def gradient_of(record: TensorRecord) -> TensorRecord | None:
        return found.get(record.name.removeprefix(f"{call.name}.output."))

    return map_leaves(
        call.outputs, lambda leaf: gradient_of(leaf) if isinstance(leaf, TensorRecord) else None
    )


def _saved_gradient(call: Call) -> Any:
    """In the structure of the value, as far as that is known: one tensor, or several."""
    if len(call.args) == 1 and not call.kwargs:
        return call.args[0]
    return _merged(call.args, call.kwargs)


def _merged(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gradients that came in: a list, or by name where outputs have names."""
    if not kwargs:
        return list(args)
    return {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}


def _as_output(outputs: Any) -> Any:
    """What a call returned as msprobe nests it: a tuple's items, or the one value in a list."""
    if isinstance(outputs, list | tuple):
        return outputs
    if isinstance(outputs, Fields) and outputs.kind == "namedtuple":
        return outputs
    if isinstance(outputs, dict) and outputs and all(_is_index(key) for key in outputs):
        return _by_position(outputs)  # the arguments after the call
    return [outputs]


def _by_position(tree: Any) -> Any:
    """A dict whose keys are positions, as ours of gradients is, as a list with nulls between."""
    if not isinstance(tree, dict):
        return tree
    if not all(_is_index(key) for key in tree):
        return {key: _by_position(item) for key, item in tree.items()}
    items: list[Any] = [None] * (max(map(int, tree), default=-1) + 1)
    for key, item in tree.items():
        items[int(key)] = _by_position(item)
    return items


def _is_index(key: object) -> bool:
    if not isinstance(key, str) or not key.isdecimal() or len(key) > 9:
        return False
    return int(key) < _LONGEST_LIST


def _children_first(calls: Sequence[Call]) -> list[Call]:
    """The order of msprobe: a module's forward stands after everything that it called."""
    parents = {call.name: call.parent for call in calls}
    ends = {call.name: i for i, call in enumerate(calls)}
    for i, call in enumerate(calls):
        parent = call.parent if call.direction == "forward" else None
        while parent is not None and ends.get(parent, i) < i:
            ends[parent] = i
            parent = parents.get(parent)
    order = sorted(range(len(calls)), key=lambda i: (ends[calls[i].name], -i))
    return [calls[i] for i in order]


def _tree(calls: Sequence[Call], names: set[str]) -> dict[str, str | None]:
    """construct.json: each call's parent, calls of an optimizer under that word."""
    forward_parents = {call.name: call.parent for call in calls if call.direction == "forward"}
    tree: dict[str, str | None] = {}
    for call in calls:
        if ".parameters_grad." in call.name:
            continue
        parent = call.parent or None
        if call.direction == "backward":
            parent = _forward_to_backward(forward_parents.get(_forward(call.name)))
        elif (parent or "").startswith("Optimizer.") or (
            parent is None and any(_OPTIMIZER.search(frame) for frame in call.stack)
        ):
            tree.setdefault("optimizer", None)
            tree[call.name] = "optimizer"
            continue
        tree[call.name] = parent if parent in names else None
    return tree


def _forward(name: str) -> str:
    return re.sub(r"\.backward(?=$|\.\d+$)", ".forward", name)


def _forward_to_backward(name: str | None) -> str | None:
    return None if name is None else re.sub(r"\.forward(?=$|\.\d+$)", ".backward", name)


def _stacks(calls: Sequence[Call]) -> dict[str, Any]:
    """stack.json: forward calls by the stack they share."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for call in calls:
        if call.direction == "forward" and call.stack:
            shared.setdefault(call.stack, []).append(call.name)
    return {
        str(i): [names, [frame_text(frame) for frame in stack]]
        for i, (stack, names) in enumerate(shared.items())
    }


def frame_text(text: str) -> str:
    """A frame as msprobe writes it, with its line of source where that can be read."""
    found = _FRAME.fullmatch(text)
    if found is None:
        return text
    source = source_line(found["file"], found["line"])
    function = found["function"].rpartition(".")[2]
    return f"File {found['file']}, line {found['line']}, in {function}, \n {source}"
