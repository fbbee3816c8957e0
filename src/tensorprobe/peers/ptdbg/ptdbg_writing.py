"""Writes calls as ptdbg_ascend does: an index of JSON lines and a folder of .npy files."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

from tensorprobe.errors import WriteFailed
from tensorprobe.peers.foreign_records import file_name
from tensorprobe.peers.peer_names import leaves, peer_name, renamed
from tensorprobe.peers.ptdbg.ptdbg_names import name_of
from tensorprobe.records import Call, Capture, Fields, TensorRecord, TensorSummary
from tensorprobe.store.frames import source_line
from tensorprobe.store.unread import Unread
from tensorprobe.tensors.widening import is_widened, widen

Stacks = Literal["no", "yes", "only"]
Content = Literal["tensors", "statistics", "checksums"]

_FRAME = re.compile(r"(.*):(\d+) in (.*)", re.DOTALL)
_NOT_FLOAT = re.compile(r"u?int\d+|bool|qu?int\w+|bits\w+")
# What ptdbg_ascend records; a capture of ours knows further calls, and more of each.
_PEER_KINDS = (
    "Tensor", "Torch", "Functional", "NPU", "VF", "Aten", "Distributed", "Module", "Ops",
)  # fmt: skip
_SCALARS = (bool, int, float)
PART = ".part"  # of files that are being written
MARK = ".tensorprobe"  # in the folder of a dump's tensors: its gradients are those of the inputs


class Style(NamedTuple):
    """What goes into a dump, and in which release's way."""

    release: Literal["2.3", "5.0"] = "2.3"
    content: Content = "tensors"
    stacks: Stacks = "no"
    is_filtered: bool = False  # no integers and bools, no empty tensors, no Python numbers
    only_peers: bool = False  # only the kinds of calls and tensors that the original has
    flag: int | None = None  # the second field; the release's own where it is None
    # Calls, as undirected() has them, whose forward is not written; "*" is all. It is read all the
    # same: the numbers and the stack of a backward are those of its forward.
    backward_only: frozenset[str] = frozenset()

    @property
    def second_field(self) -> int:
        """1 in release 2.3, 0 later."""
        return self.flag if self.flag is not None else (1 if self.release == "2.3" else 0)


def undirected(name: str) -> str:
    """`Functional_gelu_2` of a call's name in any spelling, whatever its direction."""
    return re.sub(r"_(forward|backward)$", "", name.replace(".", "_"))


def write(capture: Capture, folder: Path) -> list[str]:
    """Write a capture as a dump; says what this layout could not carry.

    One step is written as release 2.3 lays it out, several as 5.0 does: a folder for each.
    """
    several = len(capture.steps) > 1
    release: Literal["2.3", "5.0"] = "5.0" if several else "2.3"
    has_tensors = any(record.blob for call in capture.calls for record in call.tensors)
    style = Style(release, "tensors" if has_tensors else "statistics", "yes")
    root = Path(folder) / f"ptdbg_dump_v{release}"
    config = capture.facts.get("config")
    knows = capture.layout != "native" or (config or {}).get("operators") == "dunder"

    def spelt(call: Call) -> Call:
        # of `a + b` and `a.add(b)` a native name does not tell which it was; mostly the former
        return call if knows else renamed(call, peer_name)

    unread = Unread(capture.calls)
    for step in capture.steps:
        for rank in capture.ranks:
            calls = [spelt(call) for call in capture.calls(step=step, rank=rank)]
            place = root / f"step{step}" if several else root
            if calls:
                index = place / f"rank{rank}" / "api_stack_dump.pkl"
                write_dump(calls, index, style, unread=unread)
    return [*_lost(capture), *unread.lines()]


def _lost(capture: Capture) -> list[str]:
    """What the layout has no place for, of what this capture has."""
    lost = []
    texts = sum(_is_lost(leaf) for call in capture.calls for leaf in _all_leaves(call))
    if texts:
        lost.append(f"{texts} arguments that are neither tensors nor numbers (None, text, dtypes)")
    keywords = sum(bool(call.kwargs) for call in capture.calls)
    if keywords:
        lost.append(f"the names of keyword arguments of {keywords} calls: they are numbered on")
    if any(call.module and not call.name.startswith("Module.") for call in capture.calls):
        lost.append("the module each call ran in, devices, strides and requires_grad")
    if capture.gaps:
        lost.append(f"{len(capture.gaps)} gaps")
    return lost


def _all_leaves(call: Call) -> Iterator[Any]:
    for value in (*call.args, *call.kwargs.values()):
        yield from _values(value)


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _values(part)
    elif isinstance(value, dict | Fields):
        parts = value.fields if isinstance(value, Fields) else value
        for part in parts.values():
            yield from _values(part)
    else:
        yield value


def _is_lost(value: Any) -> bool:
    return not isinstance(value, TensorRecord) and type(value) not in _SCALARS


def write_dump(
    calls: Iterable[Call],
    index: Path,
    style: Style,
    *,
    append: bool = False,
    unread: Unread | None = None,
    on_moved: Callable[[Path], None] = lambda path: None,
) -> int:
    """Write one index and its folder of tensors; gives the number of calls in it.

    What another run left there is moved aside first, to name.1, and `on_moved` is told. With
    `append` the calls are added to what is there. `unread` gets the tensors whose content cannot be
    read: of those there are statistics only.
    """
    part, part_data = index.with_name(index.name + PART), index.with_name(index.stem + PART)
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part_data, ignore_errors=True)
        part_data.mkdir()
        with part.open("w", encoding="utf-8") as file:
            count = _Dump(file, part_data, style, unread or Unread()).write(calls)
        if append and index.exists():
            _join(part, part_data, index)
        else:
            moved = make_room(index)
            if moved is not None:
                on_moved(moved)
            _settle(part, part_data, index)
    except OSError as error:
        raise WriteFailed(
            f"the dump '{index}' could not be written: {error.strerror or error}"
        ) from error
    return count


def _settle(part: Path, part_data: Path, index: Path) -> None:
    if any(part_data.iterdir()):
        (part_data / MARK).touch()
        part_data.rename(index.with_suffix(""))
    else:
        part_data.rmdir()
    part.rename(index)


def _join(part: Path, part_data: Path, index: Path) -> None:
    data = index.with_suffix("")
    for tensor in part_data.iterdir():
        data.mkdir(exist_ok=True)
        tensor.replace(data / tensor.name)
    part_data.rmdir()
    with index.open("a", encoding="utf-8") as file:
        file.write(part.read_text(encoding="utf-8"))
    part.unlink()


def make_room(index: Path) -> Path | None:
    """Move an index and its folder to name.1 (or .2, ...); None when there was nothing."""
    data = index.with_suffix("")
    if not (index.exists() or data.exists()):
        return None
    number = 1
    while any(
        index.with_name(f"{index.stem}.{number}{suffix}").exists() for suffix in ("", index.suffix)
    ):
        number += 1
    target = index.with_name(f"{index.stem}.{number}{index.suffix}")
    with contextlib.suppress(FileNotFoundError):
        index.rename(target)
    with contextlib.suppress(FileNotFoundError):
        data.rename(index.with_name(f"{index.stem}.{number}"))
    return target


class _Dump:
    """Writes the lines of one index, and the files they name."""

    def __init__(self, lines: TextIO, data: Path, style: Style, unread: Unread) -> None:
        self._lines = lines
        self._data = data
        self._style = style
        self._unread = unread
        self._keywords: dict[str, dict[str, str]] = {}  # forward call -> keyword -> its place

    def write(self, calls: Iterable[Call]) -> int:
        count = 0
        for call in calls:
            if self._style.only_peers and call.name.partition(".")[0] not in _PEER_KINDS:
                continue
            if call.direction == "forward" and self._is_unwanted(call):
                self._places(call)
            else:
                count += self._call(call)
        return count

    def _is_unwanted(self, call: Call) -> bool:
        hidden = self._style.backward_only
        return bool(hidden) and ("*" in hidden or undirected(call.name) in hidden)

    def _call(self, call: Call) -> bool:
        stem = name_of(call).stem
        if self._style.stacks != "only":
            for suffix, value in self._leaves(call):
                self._value(f"{stem}_{suffix}", value)
        if self._style.stacks != "no" and call.stack:
            frames = [_frame(text) for text in call.stack]
            self._line([f"{stem}_stack_info", frames])
        return True

    def _leaves(self, call: Call) -> Iterator[tuple[str, Any]]:
        """The tensors and numbers of a call, by what follows its name in theirs."""
        places = self._places(call)
        yield from _walk("input", call.args)
        for key, value in call.kwargs.items():
            yield from _walk(f"input.{places.get(key, key)}", value)
        if isinstance(call.outputs, dict):
            for key, value in call.outputs.items():
                yield from _walk(f"output.{places.get(key, key)}", value)
        else:
            yield from _walk("output", call.outputs)
        if not self._style.only_peers:
            # the gradients of a module's parameters are a call, whose name says so already
            start = "parameters_grad." if ".parameters_grad." in call.name else ""
            for record in call.tensors:
                if record.role not in ("input", "output"):
                    yield start + record.name.removeprefix(call.name + "."), record

    def _places(self, call: Call) -> dict[str, str]:
        """Keywords by the number they have in the dump, which knows places only."""
        forward = call.name.replace(".backward", ".forward")
        if call.direction == "backward":
            return self._keywords.pop(forward, {})
        places = {key: str(len(call.args) + i) for i, key in enumerate(call.kwargs)}
        if places:
            self._keywords[forward] = places
        return places

    def _value(self, name: str, value: Any) -> None:
        if isinstance(value, TensorRecord):
            is_unwanted = value.summary is None and value.blob is None and value.gap is None
            if not (self._style.is_filtered and _is_dropped(value)) and not is_unwanted:
                self._tensor(name, value)
        elif not self._style.is_filtered:
            stats = [value] * (3 if self._style.release == "2.3" else 4)
            self._line([name, self._style.second_field, [], str(type(value)), "[]", stats])
            number = np.array(value)
            if self._style.content == "tensors" and not number.dtype.hasobject:  # 10**30 is one
                self._save(name, number)

    def _tensor(self, name: str, record: TensorRecord) -> None:
        has_content = record.blob is not None and self._style.content != "statistics"
        array = self._unread.attempt(record, record.array) if has_content else None
        checksum: str | list[Any] = []
        stats = _statistics(record.summary, self._style)
        if array is not None and is_widened(record.dtype):
            array = widen(np.ascontiguousarray(array).reshape(array.shape), record.dtype)
        if array is not None and self._style.content == "checksums":
            checksum = f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
            stats = []
        fields = [f"torch.{record.dtype}", list(record.shape), stats]
        self._line([name, self._style.second_field, checksum, *fields])
        if array is not None and self._style.content == "tensors":
            self._save(name, array)

    def _save(self, name: str, array: np.ndarray[Any, Any]) -> None:
        with (self._data / f"{file_name(name, '.npy')}").open("wb") as file:
            np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)

    def _line(self, fields: list[Any]) -> None:
        # ASCII with Python's NaN and Infinity: what their own reader takes
        fields[0] = file_name(fields[0], "")
        self._lines.write(json.dumps(fields) + "\n")


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    for place, leaf in leaves(value, name):
        if isinstance(leaf, TensorRecord) or type(leaf) in _SCALARS:
            yield place, leaf


def _is_dropped(record: TensorRecord) -> bool:
    # The original drops a tensor of no dimension too, and with it the loss.
    return record.numel == 0 or _NOT_FLOAT.fullmatch(record.dtype) is not None


def _statistics(summary: TensorSummary | None, style: Style) -> list[Any]:
    """max, min, mean and later the norm; bools have none, and NaN is all there is where one is."""
    short = style.release == "2.3"
    if summary is None:
        return []
    values: list[Any] = [summary.max, summary.min, summary.mean]
    if isinstance(summary.max, bool):
        values = [[], [], []]
    elif summary.nan_count:
        values = [math.nan] * 3
    elif summary.inf_count:
        values = [_float(value) for value in values[:2]] + [_mean_of_infinite(summary)]
    else:
        values = [_float(value) for value in values]
    if short:
        return values
    norm = summary.norm if summary.norm is not None and not summary.inf_count else None
    return [*values, "Nan" if norm is None else (math.nan if summary.nan_count else norm)]


def _float(value: float | int | bool | None) -> Any:
    return [] if value is None else float(value)


def _mean_of_infinite(summary: TensorSummary) -> float:
    if summary.max == math.inf and summary.min == -math.inf:
        return math.nan
    return math.inf if summary.max == math.inf else -math.inf


def _frame(text: str) -> list[Any]:
    """[path, line, function, source or null], as they write a frame."""
    found = _FRAME.fullmatch(text)
    if found is None:
        return [text, "0", "", None]
    path, line, function = found.groups()
    return [path, line, function, source_line(path, line) or None]
