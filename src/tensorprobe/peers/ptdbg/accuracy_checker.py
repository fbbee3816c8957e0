"""Records of api_accuracy_checker: forward_info_{pid}.json and its like become a Capture.

They hold what calls were given, as dtype, shape and range or as tensors, and never what they
returned: enough to check each call alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tensorprobe.errors import BadArtefact, UnreadableCapture
from tensorprobe.peers.foreign_records import (
    MAX_DEPTH,
    confined,
    read_foreign,
    read_shape,
    sound_items,
)
from tensorprobe.peers.ptdbg.ptdbg_names import Name, native_name, native_op
from tensorprobe.records import (
    Call,
    Capture,
    Direction,
    Gap,
    Special,
    TensorRecord,
    TensorSummary,
)
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.layouts import check_layout, itemsize_of
from tensorprobe.tensors.opening import inside
from tensorprobe.tensors.tensor_files import locate

_FORWARD = re.compile(r"forward_info_(\d{1,18})\.json")
_STEP = re.compile(r"step(\d{1,18})")
_KEY = re.compile(r"(?P<kind>[A-Za-z]+)(?P<mark>[*.])(?P<api>.+)(?P=mark)(?P<number>\d+)")
_FRAME = re.compile(r"File (?P<file>.*?), line (?P<line>\d+), in (?P<function>[^,]*)", re.DOTALL)
_PLAIN = ("int", "float", "bool", "str", "NoneType")


class Process(NamedTuple):
    """The files of one process in one step."""

    folder: Path
    pid: str
    step: int


def find(path: Path) -> list[Process]:
    """The processes that a file, a step's folder or the folder of the steps stands for."""
    if path.is_file():
        found = _FORWARD.fullmatch(path.name)
        return [_process(path.parent, found[1])] if found else []
    here = [_FORWARD.fullmatch(child.name) for child in sorted(path.iterdir())]
    processes = [_process(path, found[1]) for found in here if found]
    if processes or _STEP.fullmatch(path.name):
        return processes
    steps = [child for child in path.iterdir() if child.is_dir() and _STEP.fullmatch(child.name)]
    found_below = [process for step in steps for process in find(inside(step, path))]
    return sorted(found_below, key=lambda process: (process.step, process.pid))


def _process(folder: Path, pid: str) -> Process:
    step = _STEP.fullmatch(folder.resolve().name)
    return Process(folder, pid, int(step[1]) if step else 0)


def read(path: Path) -> Capture:
    """Every call at a path: a process of these records is a rank, in the order of their numbers."""
    processes = find(path)
    if not processes:
        raise UnreadableCapture(f"'{path}' holds no forward_info_*.json of api_accuracy_checker")
    calls: list[Call] = []
    gaps: list[Gap] = []
    ranks = {pid: rank for rank, pid in enumerate(sorted({p.pid for p in processes}))}
    counts = dict.fromkeys(ranks.values(), 0)
    for process in processes:
        rank = ranks[process.pid]
        reader = _ProcessReader(process, rank, counts[rank])
        calls += reader.calls()
        gaps += reader.gaps
        counts[rank] += reader.count
    return Capture(path, "api_accuracy_checker", calls, gaps, {"config": {"level": "L1"}})


class _ProcessReader:
    """Reads the files of one process; what is damaged becomes a gap with its position."""

    def __init__(self, process: Process, rank: int, start: int) -> None:
        self._process = process
        self._rank = rank
        self._start = start
        self.count = 0
        self.gaps: list[Gap] = []
        self._found: list[TensorRecord] = []

    def calls(self) -> Iterator[Call]:
        stacks = {
            key: tuple([_frame(frame) for frame in frames])
            for key, frames in self._items("stack_info")
            if isinstance(frames, list)
        }
        for key, value in self._items("forward_info"):
            yield from self._call(key, value, "forward", stacks.get(key, ()))
        for key, value in self._items("backward_info"):
            yield from self._call(key, {"args": value}, "backward", ())

    def _items(self, kind: str) -> Iterator[tuple[str, Any]]:
        path = self._process.folder / f"{kind}_{self._process.pid}.json"
        tell = partial(self._gap, path.name)
        yield from sound_items(read_foreign(path, tell), tell)

    def _gap(self, name: str, reason: str) -> None:
        self.gaps.append(Gap(name[:200], reason[:300], self._process.step, self._rank))

    def _call(
        self, key: str, value: Any, direction: Direction, stack: tuple[str, ...]
    ) -> Iterator[Call]:
        try:
            yield self._made(key, value, direction, stack)
            self.count += 1
        except Exception as error:  # noqa: BLE001 reading one foreign record: it becomes a gap
            self._gap(f"{direction}_info_{self._process.pid}.json: {key}", f"{error}")

    def _made(self, key: str, value: Any, direction: Direction, stack: tuple[str, ...]) -> Call:
        found = _KEY.fullmatch(key)
        if found is None or not isinstance(value, dict):
            raise ValueError("expected a name as Functional.linear.0 and an object")
        name = Name(found["kind"], found["api"], found["number"], direction, "", ".")
        text = native_name(name)
        self._found = []
        args, kwargs = value.get("args") or [], value.get("kwargs") or {}
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ValueError("expected a list of arguments and an object of keyword arguments")
        given = tuple(self._value(a, f"{text}.input.{i}", 0) for i, a in enumerate(args))
        named = {k: self._value(v, f"{text}.input.{k}", 0) for k, v in kwargs.items()}
        return Call(
            index=self._start + self.count,
            name=text,
            op=native_op(name),
            direction=direction,
            step=self._process.step,
            rank=self._rank,
            stack=stack,
            args=given,
            kwargs=named,
            tensors=tuple(self._found),
            notes=("what it returned was not recorded",) if direction == "forward" else (),
        )

    def _value(self, leaf: Any, name: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(leaf, list):
            return [self._value(part, f"{name}.{i}", depth + 1) for i, part in enumerate(leaf)]
        if leaf is None:
            return None
        if not isinstance(leaf, dict) or not isinstance(leaf.get("type"), str):
            raise ValueError(f"{str(leaf)[:60]!r} is no argument")
        kind = leaf["type"]
        if kind == "torch.Tensor":
            record = self._tensor(leaf, name)
            self._found.append(record)
            return record
        value = leaf.get("value")
        if kind == "slice" and isinstance(value, list) and len(value) == 3:
            return slice(*(part if type(part) is int else None for part in value))
        if kind in ("torch.device", "torch.dtype", "torch.Size"):
            return Special(kind.removeprefix("torch."), str(value)[:200])
        if kind.startswith("numpy."):
            return Special("numpy", str(value)[:200])
        if kind not in _PLAIN or not isinstance(value, bool | int | float | str | None):
            return Special("unsupported", f"{kind}: {value}"[:200])
        return value

    def _tensor(self, leaf: dict[str, Any], name: str) -> TensorRecord:
        grad = leaf.get("requires_grad") is True
        if "datapath" in leaf:
            return self._stored(leaf["datapath"], name, grad)
        dtype = str(leaf["dtype"]).removeprefix("torch.")
        summary = _summary(leaf)
        shape = read_shape(leaf["shape"])
        check_layout(dtype, shape)
        return TensorRecord(name, "input", dtype, shape, requires_grad=grad, summary=summary)

    def _stored(self, datapath: Any, name: str, grad: bool) -> TensorRecord:
        """A tensor in a file; of the path in the record only the file's own name is followed."""
        direction = "backward" if ".backward." in name else "forward"
        folder = self._process.folder / f"{direction}_real_data" / f"rank{self._process.pid}"
        path = confined(folder, PurePosixPath(str(datapath)).name)
        try:
            path = inside(path, self._process.folder)
            stored = locate(path)
        except BadArtefact as error:
            raise ValueError(f"{name.rpartition('.input.')[2]}: {error}") from error
        nbytes = itemsize_of(stored.dtype)
        for length in stored.shape:
            nbytes *= length
        blob = Blob(path, 0, nbytes, "npy" if path.suffix == ".npy" else "pt")
        return TensorRecord(
            name, "input", stored.dtype, stored.shape, requires_grad=grad, blob=blob
        )


def _summary(leaf: dict[str, Any]) -> TensorSummary | None:
    top = leaf.get("Max_origin", leaf.get("Max"))
    bottom = leaf.get("Min_origin", leaf.get("Min"))
    if not isinstance(top, int | float) or not isinstance(bottom, int | float):
        return None
    if leaf.get("dtype") == "torch.bool":
        return TensorSummary(bool(bottom), bool(top), None, None, 0, 0, 0, counted=False)
    nan = top != top or bottom != bottom
    infinite = top in (float("inf"), float("-inf")) or bottom in (float("inf"), float("-inf"))
    if nan:
        top = bottom = None
    return TensorSummary(bottom, top, None, None, int(nan), int(infinite), 0, counted=False)


def _frame(text: object) -> str:
    found = _FRAME.match(str(text))
    if found is None:
        return str(text)[:300]
    return f"{found['file']}:{found['line']} in {found['function'].strip()}"
