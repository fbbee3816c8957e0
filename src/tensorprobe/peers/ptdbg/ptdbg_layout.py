"""The layout of ptdbg_ascend, releases 2.3 to 6.0: `read` reads a dump, `write` writes one.

A dump is an index, name.pkl (JSON lines, whatever its suffix says), and a folder of the same name
with one .npy a tensor; above it rankN, in later releases stepN, and {tag}_v{release}.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tensorprobe.errors import BadArtefact, UnreadableCapture
from tensorprobe.peers.foreign_records import Problem, confined, parse_lines, read_shape
from tensorprobe.peers.ptdbg import accuracy_checker
from tensorprobe.peers.ptdbg.ptdbg_names import (
    Name,
    module_path,
    native_name,
    native_op,
    parse_name,
    stem_of,
)
from tensorprobe.peers.ptdbg.ptdbg_writing import MARK, write
from tensorprobe.records import (
    LAST_NODE,
    Call,
    Capture,
    Gap,
    Role,
    Special,
    TensorRecord,
    TensorSummary,
)
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.layouts import check_layout, itemsize_of
from tensorprobe.tensors.opening import inside, open_file, read_text

__all__ = ["find", "read", "read_index", "recognises", "write"]

# Frames of the tool itself at the inner end of every stack.
_OWN_FRAMES = re.compile(r"(hook_module|wrap_\w+)\.py$")
_SPELT = "in the dump: "
_RANK = re.compile(r"rank(\d+)")
_STEP = re.compile(r"step(\d+)")
_TAGGED = re.compile(r".+_v\d+(\.\w+)+")
_OLDER = re.compile(r"(.+)\.\d+")
_OVERFLOW = re.compile(r"Overflow_info_\d{8}_\d{6}(_\d+)?|.+_(?:forward|backward)_\d+")
_ROLES: dict[str, Role] = {
    "input": "input",
    "output": "output",
    "parameters": "parameter",
    "buffers": "buffer",
    "parameters_grad": "parameter_grad",
    "state": "state",
}
_SCALARS = ("<class 'int'>", "<class 'float'>", "<class 'bool'>")
_MOST_ARGUMENTS = 10_000
_DEEPEST = 32
# Keyword arguments, None, strings, dtypes and, with the filter on, numbers are in no dump: a call
# run again without them would be another call.
UNKNOWN = Special("unsupported", "what a ptdbg dump leaves out")
_REST = {"others": UNKNOWN}


class DumpFile(NamedTuple):
    """One index with the step and rank it belongs to."""

    path: Path
    step: int
    rank: int

    @property
    def data(self) -> Path:
        """The folder with its tensors."""
        return self.path.with_suffix("")


# Finding


def recognises(path: Path) -> bool:
    """Whether this is a dump of ptdbg_ascend, or a folder in or above one.

    The records of api_accuracy_checker, its sister, count as such.
    """
    return bool(find(path)) or bool(accuracy_checker.find(path))


def find(path: Path) -> list[DumpFile] | None:
    """The indexes that a path stands for; None when it is no such path."""
    if path.is_file():
        return [_located(path)] if _is_index(path) else None
    beside = path.with_name(path.name + ".pkl")  # the folder of tensors was named
    if _is_index(beside):
        return [_located(beside)]
    return _below(path, path, set()) or None


def _below(folder: Path, root: Path, seen: set[Path]) -> list[DumpFile]:
    here = [path for path in sorted(folder.glob("*.pkl")) if _is_index(path)]
    if here:
        return [_located(path) for path in _one_dump(folder, here)]
    found = []
    for pattern in (_RANK, _STEP, _TAGGED):
        parts = [child for child in folder.iterdir() if pattern.fullmatch(child.name)]
        for child in sorted(parts, key=lambda part: (_number(pattern, part.name), part.name)):
            if child.is_dir() and (place := inside(child, root).resolve()) not in seen:
                seen.add(place)  # links can go round in circles
                found += _below(child, root, seen)
    return sorted(found, key=lambda dump: (dump.rank, dump.step))


def _one_dump(folder: Path, indexes: list[Path]) -> list[Path]:
    """Of the indexes in one folder those that are one dump: overflows come in a file each."""
    newest = [path for path in indexes if not _is_older(path, indexes)]
    if all(_OVERFLOW.fullmatch(path.stem) for path in newest):
        return sorted(newest, key=lambda path: (_count_of(path.stem), path.name))
    if len(newest) > 1:
        names = ", ".join(path.name for path in newest)
        raise UnreadableCapture(f"'{folder}' holds {len(newest)} dumps: {names}. Name one of them")
    return newest


def _is_older(path: Path, indexes: list[Path]) -> bool:
    found = _OLDER.fullmatch(path.stem)
    return found is not None and path.with_name(found[1] + ".pkl") in indexes


def _count_of(stem: str) -> int:
    tail = stem.rpartition("_")[2]
    return int(tail) if tail.isdigit() and len(tail) < 6 else 0


def _located(path: Path) -> DumpFile:
    step = rank = 0
    for part in path.resolve().parent.parts[-3:]:
        rank = _number(_RANK, part) if _RANK.fullmatch(part) else rank
        step = _number(_STEP, part) if _STEP.fullmatch(part) else step
    return DumpFile(path, step, rank)


def _number(pattern: re.Pattern[str], name: str) -> int:
    found = pattern.fullmatch(name)
    if found is None or not found.lastindex or not found[1].isdigit() or len(found[1]) > 18:
        return 0
    return int(found[1])


def _is_index(path: Path) -> bool:
    """Whether the file begins as an index does; a real pickle never does."""
    if path.suffix != ".pkl" or not path.exists():
        return False
    with open_file(path) as file:
        start = file.read(4096)
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    return start.startswith(b'["') or (not start and path.with_suffix("").is_dir())


# Reading


def read(path: Path) -> Capture:
    """Everything at a path of a dump: one index, one rank, one step, or all of them."""
    dumps = find(path)
    if not dumps and accuracy_checker.find(path):
        return accuracy_checker.read(path)
    if not dumps:
        raise UnreadableCapture(f"'{path}' is no dump of ptdbg_ascend: it has no index (name.pkl)")
    calls: list[Call] = []
    gaps: list[Gap] = []
    for dump in dumps:
        found, problems = read_index(dump.path, dump.data, step=dump.step, rank=dump.rank)
        calls += found
        gaps += problems
    if not calls and not gaps:
        raise UnreadableCapture(f"dump '{path}' is empty: {dumps[0].path.name} holds no line")
    counts: dict[int, itertools.count[int]] = {}
    numbered = [_renumbered(call, counts) for call in calls]
    return Capture(path, "ptdbg", numbered, gaps, {"config": {"level": "L1"}})


def _renumbered(call: Call, counts: dict[int, itertools.count[int]]) -> Call:
    index = next(counts.setdefault(call.rank, itertools.count()))
    return call if call.index == index else msgspec.structs.replace(call, index=index)


def read_index(
    path: Path, data: Path | None, *, step: int = 0, rank: int = 0
) -> tuple[list[Call], list[Gap]]:
    """The calls of one index; `data` is where its tensors are, None to leave them."""
    reader = _IndexReader(path, data, step, rank)
    calls = reader.calls()
    return calls, reader.gaps


class _Lines(NamedTuple):
    """What the index says of one call."""

    name: Name
    tensors: dict[str, tuple[int, list[Any]]]  # rest of the name -> line number, fields
    stack: list[tuple[str, ...]]


class _IndexReader:
    """Reads one index; what cannot be read becomes a gap that names file, line and column."""

    def __init__(self, path: Path, data: Path | None, step: int, rank: int) -> None:
        self._path = path
        self._step = step
        self._rank = rank
        self.gaps: list[Gap] = []
        self._data = data if data is not None and data.is_dir() else None
        self._root = path.parent
        if self._data is not None and self._data.parent != path.parent:  # named by the user
            self._root = self._data
        self._files = self._look() if self._data is not None else {}
        self._ours = MARK in self._files
        self._calls: list[_Lines] = []
        self._last: dict[str, _Lines] = {}  # the latest call of each name
        self._lost: dict[int, str] = {}  # by id() of a call: why its tensors are not there

    def _look(self) -> dict[str, bool]:
        """Which files there are, and whether they are links: one look, not one at each of them."""
        assert self._data is not None
        try:
            with os.scandir(inside(self._data, self._root)) as files:
                return {file.name: file.is_symlink() for file in files}
        except BadArtefact as error:
            self.gaps.append(Gap(self._data.name, str(error), self._step, self._rank))
            return {}

    def calls(self) -> list[Call]:
        for number, record in self._records():
            self._sort(number, record)
        done: list[Call] = []
        for lines in self._calls:
            try:
                done.append(self._call(len(done), lines))
            except Exception as error:  # noqa: BLE001 reading one foreign record: it becomes a gap
                number = min((n for n, _ in lines.tensors.values()), default=0)
                self._gap(number, f"{lines.name.stem}: {type(error).__name__}: {error}")
        return done

    def _gap(self, number: int, reason: str) -> None:
        self.gaps.append(Gap(f"{self._path.name}:{number}", reason, self._step, self._rank))

    def _records(self) -> Iterator[tuple[int, Any]]:
        for number, record in parse_lines(read_text(open_file(self._path), self._path)):
            if isinstance(record, Problem):
                self._gap(number, f"column {record.column}: {record.reason}")
            else:
                yield number, record

    def _sort(self, number: int, record: Any) -> None:
        """Put a line to the call it belongs to."""
        if not isinstance(record, list) or not record or not isinstance(record[0], str):
            self._gap(number, f"{_outline(record)} is no record: expected [name, ...]")
            return
        name = parse_name(record[0])
        if name is None or not name.rest:
            self._gap(number, f"{_outline(record[0])} is no name of a tensor or stack")
            return
        if name.rest == "stack_info":
            self._of(name, lambda lines: not lines.stack).stack.extend(_frames(record))
        elif len(record) < 5 or name.rest.partition(".")[0] not in _ROLES:
            self._gap(number, f"{_outline(record)}: expected 5 or 6 fields of an input or output")
        else:
            lines = self._of(name, lambda lines: name.rest not in lines.tensors)
            lines.tensors[name.rest] = (number, record)

    def _of(self, name: Name, has_room: Any) -> _Lines:
        """The lines of this call; a name that comes again begins another call."""
        stem = name.stem
        lines = self._last.get(stem)
        if lines is not None and has_room(lines):
            return lines
        if lines is not None:
            self._lost[id(lines)] = "the dump wrote a later call of this name over it"
        lines = _Lines(name._replace(rest=""), {}, [])
        self._last[stem] = lines
        self._calls.append(lines)
        return lines

    def _call(self, index: int, lines: _Lines) -> Call:
        name = lines.name
        text = native_name(name)
        call = Call(
            index=index,
            name=text,
            op=native_op(name),
            module=module_path(name),
            direction=name.direction,
            step=self._step,
            rank=self._rank,
            stack=tuple(f"{path}:{line} in {function}" for path, line, function in lines.stack),
        )
        records: list[TensorRecord] = []
        trees: dict[str, dict[str, Any]] = {}
        for rest, (number, fields) in lines.tensors.items():
            section, _, path = rest.partition(".")
            if section == "output" and not path:
                path, trees["lone"] = "0", {}
            full = f"{text}.{section}.{path}"
            if section == "parameters_grad" and ".parameters_grad." in text:
                full = f"{text}.{path}"
            try:
                value = self._value(full, _ROLES[section], fields, lines)
            except (ValueError, TypeError, OverflowError) as error:
                self._gap(number, f"{rest}: {error}")
                continue
            if isinstance(value, TensorRecord):
                records.append(value)
            trees.setdefault(section, {})[path] = value
        made = _with_trees(call, trees, records, name)
        if made.direction == "backward" and not self._ours and made.tensors:
            # Theirs are what comes out of the autograd node of the output, whatever that is.
            return msgspec.structs.replace(made, notes=(*made.notes, LAST_NODE))
        return made

    def _value(self, name: str, role: Role, fields: list[Any], lines: _Lines) -> Any:
        """A tensor's record, or a Python number."""
        dtype = fields[3]
        stats = fields[5] if len(fields) > 5 else None
        if dtype in _SCALARS:
            return _scalar(dtype, stats)
        if not isinstance(dtype, str) or not dtype.startswith("torch."):
            raise ValueError(f"dtype {_outline(dtype)}: expected torch.float32 or the like")
        shape = read_shape(fields[4])
        check_layout(dtype.removeprefix("torch."), shape)
        digest = fields[2] if isinstance(fields[2], str) and fields[2] else None
        record = TensorRecord(
            name,
            role,
            dtype.removeprefix("torch."),
            shape,
            summary=_summary(stats, shape),
            digest=f"crc32:{digest}" if digest is not None else None,
        )
        return self._with_content(record, fields[0], lines)

    def _with_content(self, record: TensorRecord, spelt: str, lines: _Lines) -> TensorRecord:
        if self._data is None:
            return record
        lost = self._lost.get(id(lines))
        if lost is None and f"{spelt}.npy" not in self._files:
            lost = f"{spelt[:80]}.npy is missing"
        if lost is not None:
            return msgspec.structs.replace(record, gap=lost)
        file = confined(self._data, f"{spelt}.npy")
        if self._files[file.name]:
            try:
                file = inside(file, self._root)
            except BadArtefact as error:
                return msgspec.structs.replace(record, gap=str(error))
        blob = Blob(file, 0, record.numel * itemsize_of(record.dtype), "npy")
        return msgspec.structs.replace(record, blob=blob)


def _outline(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer too long to print
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _frames(record: list[Any]) -> Iterator[tuple[str, ...]]:
    """The frames of a stack line, innermost first, without the tool's own at that end."""
    frames = record[1] if len(record) > 1 and isinstance(record[1], list) else []
    inside = True
    for frame in frames:
        if not isinstance(frame, list) or len(frame) < 3:
            continue
        path, line, function = (str(part)[:4096] for part in frame[:3])
        inside = inside and _OWN_FRAMES.search(path) is not None
        if not inside:
            yield path, line, function


def _scalar(dtype: str, stats: Any) -> Any:
    value = stats[0] if isinstance(stats, list) and stats else None
    if not isinstance(value, int | float):
        raise ValueError(f"{dtype} with the value {_outline(value)}")
    if dtype == "<class 'bool'>":
        return bool(value)
    return float(value) if dtype == "<class 'float'>" else value


def _summary(stats: Any, shape: tuple[int, ...]) -> TensorSummary | None:
    """max, min, mean and, since 4.0, l2norm; of NaN and infinity it is known whether, not how many.

    A norm of "Nan" and an empty list stand for what was not worked out (bools, empty tensors).
    """
    if not isinstance(stats, list) or len(stats) < 3:
        return None
    numbers = [_number_or_none(value) for value in stats[:4]]
    top, bottom, mean = numbers[:3]
    norm = numbers[3] if len(numbers) > 3 else None
    if top is None and bottom is None:
        return None
    nan = any(value is not None and value != value for value in (top, bottom, mean))
    infinite = any(value is not None and math.isinf(value) for value in (top, bottom))
    zeros = math.prod(shape) if top == bottom == 0 else 0
    return TensorSummary(
        min=None if bottom != bottom else bottom,
        max=None if top != top else top,
        mean=mean if mean is not None and math.isfinite(mean) else None,
        norm=norm if norm is not None and math.isfinite(norm) else None,
        nan_count=int(nan),
        inf_count=int(infinite),
        zero_count=zeros,
        counted=False,
    )


def _number_or_none(value: Any) -> float | int | bool | None:
    if type(value) not in (int, float, bool):
        return None
    if type(value) is int and abs(value) >= 2**64:
        return math.copysign(math.inf, value)
    return value  # type: ignore[no-any-return]


# Trees of arguments


def _with_trees(
    call: Call, trees: dict[str, dict[str, Any]], records: list[TensorRecord], name: Name
) -> Call:
    given = _nest(trees.get("input", {}))
    args = tuple(_filled({key: v for key, v in given.items() if key.isdigit()}))
    kwargs = {key: _plain(value) for key, value in given.items() if not key.isdigit()}
    outputs: Any = None
    if "output" in trees:
        nested = _nest(trees["output"])
        if "lone" in trees:
            outputs = next(iter(nested.values()))
        elif call.direction == "backward":
            outputs = nested
        else:
            outputs = _plain(nested)
            outputs = tuple(outputs) if isinstance(outputs, list) else outputs
    spelt = name.stem
    changed = msgspec.structs.replace(
        call,
        args=args,
        kwargs={**kwargs, **_REST} if call.direction == "forward" else kwargs,
        outputs=outputs,
        tensors=tuple(records),
    )
    if stem_of(changed) != spelt:
        changed = msgspec.structs.replace(changed, notes=(_SPELT + spelt,))
    return changed


def spelt_name(call: Call) -> str:
    """The call's name as the dump has it, or would have it."""
    for note in call.notes:
        if note.startswith(_SPELT):
            return note.removeprefix(_SPELT)
    return stem_of(call)


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    """{"0": a, "1.0": b} as {"0": a, "1": {"0": b}}; a part that is in the way is replaced."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        parts = path.split(".", _DEEPEST)
        node = root
        for part in parts[:-1]:
            below = node.get(part)
            if not isinstance(below, dict):
                below = node[part] = {}
            node = below
        node[parts[-1]] = value
    return root


def _plain(node: Any) -> Any:
    """A nest of dicts with numbers for keys as a list."""
    if not isinstance(node, dict):
        return node
    if node and all(key.isdigit() for key in node):
        return _filled(node)
    return {key: _plain(value) for key, value in node.items()}


def _filled(items: dict[str, Any]) -> list[Any]:
    """By their numbers, with a mark where the dump has nothing: None, text, what was filtered."""
    numbered = {int(key): value for key, value in items.items() if len(key) < 6}
    length = min(max(numbered, default=-1) + 1, _MOST_ARGUMENTS)
    return [_plain(numbered.get(i, UNKNOWN)) for i in range(length)]
