"""The native layout: read reads it, the CaptureWriter of writer.py writes it.

capture.json, then rankR/rank.json, then rankR/stepN/calls.jsonl and its tensors-K.safetensors.
Every step folder stands alone, so one can be deleted or sent to a colleague.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from tensorprobe.errors import BadArtefact, TensorprobeError, UnreadableCapture
from tensorprobe.garbage import no_garbage
from tensorprobe.records import (
    Call,
    Capture,
    Gap,
    Role,
    TensorRecord,
    TensorSummary,
)
from tensorprobe.store import lines, tree
from tensorprobe.store.claim import EARLIER, FORMAT, RANK_FILE, RUN_FILE, processes_in
from tensorprobe.store.collective_lines import unpack_collective, unpack_sharding
from tensorprobe.store.ending import END_FILE, read_ending
from tensorprobe.store.step_files import LOG_FILE, header_problem, shard_name
from tensorprobe.tensors.blob import Blob
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.layouts import check_layout
from tensorprobe.tensors.opening import inside, open_file, split_lines

MAX_LINE_NBYTES = 8 << 20  # a call of ours has some 1,000; as Python's objects it is 20 times that
_CUT_OFF = "cut off"
_DAMAGED = re.compile(rf"{re.escape(LOG_FILE)}:\d+$")
NOT_WRITTEN = "value not written (the run ended before)"
_RANK = re.compile(r"rank(\d+)")
_STEP = re.compile(r"step(\d+)")
# What JSON that is no call of ours makes of its reader.
UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
Content = tuple[TensorSummary | None, str | None, Blob | None, str | None]
OnGap = Callable[[Gap], object]
_Layout = tuple[str, tuple[int, ...], tuple[int, ...] | None, str]
_Reader = TypeVar("_Reader", bound="StepReader")


def find(path: Path) -> list[Path] | None:
    """The step folders that a path of this layout stands for; None when it is no such path."""
    folder = path if path.is_dir() else path.parent
    if (folder / LOG_FILE).is_file():
        return [folder]
    if steps := _numbered(folder, _STEP, LOG_FILE):
        return steps
    ranks = _numbered(folder, _RANK)
    steps = [step for rank in ranks for step in _numbered(rank, _STEP, LOG_FILE)]
    known = (folder / RUN_FILE).is_file() or (folder / RANK_FILE).is_file()
    return steps if steps or known else None


def recognises(path: Path) -> bool:
    """Whether a path is of this layout."""
    return find(path) is not None


def _numbered(folder: Path, pattern: re.Pattern[str], holding: str = "") -> list[Path]:
    """The sub-folders of a name with a number, by that number."""
    found = []
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and (path / holding).exists():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def read(path: Path) -> Capture:
    """Everything at a path of a native capture: the run, one rank, one step, or a file of it."""
    gaps: list[Gap] = []
    steps, facts = open_run(path, gaps.append)
    found = read_steps(steps, root_of(path), gaps.append)
    check_readable(path, len(found.calls), len(gaps), found.unopened)
    add_endings(path, steps, found.unfinished, gaps.append)
    return Capture(path, "native", found.calls, gaps, {**facts, "unfinished": found.unfinished})


class StepsRead(NamedTuple):
    """The calls of some steps, and what is wrong with these."""

    calls: list[Call]
    unfinished: list[str]  # such as "rank0/step3"
    unopened: list[str]  # why not


def read_steps(steps: list[Path], root: Path, on_gap: OnGap) -> StepsRead:
    """Read step folders of a run, whose files do not lead out of `root`."""
    found = StepsRead([], [], [])
    with no_garbage():
        for step in in_turn(steps, lambda folder, n: StepReader(folder, root, n, on_gap)):
            found.calls.extend(step.calls())
            if not step.finished:
                found.unfinished.append(step.name)
            if step.unopened:
                found.unopened.append(step.unopened)
    return found


def open_run(path: Path, on_gap: OnGap) -> tuple[list[Path], dict[str, Any]]:
    """The step folders of a path, at least one, and the facts about their run."""
    steps = find(path)
    if steps is None:
        raise UnreadableCapture(f"'{path}' is not a native capture: it has no {RUN_FILE}")
    facts = _facts(path, steps, on_gap)
    processes = processes_in(path)
    if processes:
        facts["processes"] = processes
    if not steps and processes:
        listed = ", ".join(f"'{path / name}'" for name in processes[:4])
        more = f" and {len(processes) - 4} more" if processes[4:] else ""
        raise UnreadableCapture(
            f"'{path}' holds a recording of each process that the program started, and none of the "
            f"program itself. Name one: {listed}{more}"
        )
    if not steps:
        hint = f"; earlier runs are in '{path / EARLIER}'" if (path / EARLIER).is_dir() else ""
        raise UnreadableCapture(
            f"capture '{path}' is empty: the run ended before its first recorded step{hint}"
        )
    return steps, facts


def root_of(path: Path) -> Path:
    """The folder that files of a capture at this path must not lead out of."""
    return path if path.is_dir() else path.parent


def check_readable(path: Path, n_calls: int, n_gaps: int, unopened: list[str]) -> None:
    """Refuse a capture of which nothing is there but logs that cannot be opened, and why."""
    if unopened and not n_calls and n_gaps == len(unopened):
        raise UnreadableCapture(f"nothing of '{path}' can be read: {unopened[0]}")


def in_turn(steps: list[Path], reader: Callable[[Path, int], _Reader]) -> Iterator[_Reader]:
    """A reader a step, made of its folder and the index of its first call: when it is asked for the
    next one, the one before has been read."""
    index, last_rank = 0, None
    for folder in steps:
        rank = rank_of(folder)
        step = reader(folder, index if rank == last_rank else 0)
        yield step
        index, last_rank = step.index, rank


def damaged_records(capture: Capture) -> list[Gap]:
    """The gaps of lines that are there and cannot be read; not the last line of a run that was
    killed while it was written."""
    if capture.layout != "native":
        return []
    return [
        gap
        for gap in capture.gaps
        if _DAMAGED.search(gap.name) and not gap.reason.startswith(_CUT_OFF)
    ]


def write(capture: Capture, folder: Path, *, compress: bool = False) -> list[str]:
    """Write a capture in this layout."""
    from tensorprobe.store import native_copy  # here: reading needs neither it nor numpy

    return native_copy.write(capture, folder, compress=compress)


def rank_of(step: Path) -> int:
    """The rank that a step's folder is of."""
    return _number(_RANK, step.parent.name)


def add_endings(path: Path, steps: list[Path], unfinished: list[str], on_gap: OnGap) -> None:
    """What each rank says of how its recording ended; nothing where the path is of one step."""
    if any((folder / LOG_FILE).exists() for folder in (path, path.parent)):
        return
    for folder in dict.fromkeys(step.parent for step in steps):
        rank = _number(_RANK, folder.name)
        try:
            ending = read_ending(folder, root_of(path))
        except (OSError, ValueError, TensorprobeError) as error:
            on_gap(Gap(END_FILE, str(error), rank=rank))
            continue
        if ending is None:
            continue
        for gap in ending.gaps(rank):
            on_gap(gap)
        if not ending.ended and not any(name.startswith(f"{folder.name}/") for name in unfinished):
            unfinished.append(folder.name)


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else 0


def _facts(path: Path, steps: list[Path], on_gap: OnGap) -> dict[str, Any]:
    """capture.json, with the content of every rank.json under `ranks`."""
    ranks = {rank_of(step): step.parent for step in steps}
    root = steps[0].parent.parent if steps else path
    facts = _read_facts(root / RUN_FILE, root, on_gap)
    known: dict[bytes, Any] = {}  # what is the same on all ranks is in memory once
    about = {
        rank: {
            sys.intern(key): known.setdefault(msgspec.json.encode(value), value)
            for key, value in _read_facts(folder / RANK_FILE, root, on_gap).items()
        }
        for rank, folder in ranks.items()
    }
    return {**facts, "ranks": about}


def _read_facts(path: Path, root: Path, on_gap: OnGap) -> dict[str, Any]:
    try:
        facts = msgspec.convert(read_json(open_file(path, root), path), dict[str, Any])
    except FileNotFoundError:  # a step or rank folder that was copied alone
        return {}
    except ValueError as error:
        on_gap(Gap(path.name, str(error)))
        return {}
    if not isinstance(facts.get("config", {}), dict):
        on_gap(Gap(path.name, "`config` is no object"))
        del facts["config"]
    version = facts.get("format")
    if version != FORMAT:
        raise UnreadableCapture(
            f"capture '{path.parent}' was written by format {version}; this version reads "
            f"{FORMAT}. Upgrade: pip install -U tensorprobe"
        )
    return facts


class StepReader:
    """Reads one calls.jsonl; what cannot be read becomes gaps that name file and line."""

    def __init__(self, folder: Path, root: Path, index: int, on_gap: OnGap) -> None:
        self.folder = folder
        self.root = root
        self.name = f"{folder.parent.name}/{folder.name}"
        self.step = _number(_STEP, folder.name)
        self.rank = _number(_RANK, folder.parent.name)
        self.index = index
        self.finished = False
        self.unopened: str | None = None  # why not
        self.passed_by: tuple[bytes, ...] = ()  # lines that begin so are not looked at
        self._on_gap = on_gap
        self._begun: list[Begun] = []
        self._n_begun = 0  # calls since the last line that closes
        self._open: dict[int, Begun] = {}
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._values: dict[int, Content] = {}
        self._shards: dict[int, tuple[Path, int]] = {}
        self._layouts: dict[_Layout, _Layout] = {}  # of tensors that can be, each once
        self._call_name = ""  # of the call that is being put together, as are the next two
        self._role: Role = "input"
        self._found: list[TensorRecord] = []

    def calls(self) -> Iterator[Call]:
        """All calls in the order in which they began, with what their tensors hold."""
        for number, line in self._lines():
            if self._take(number, line):
                yield from self._settle()
        yield from self._settle()

    def _lines(self) -> Iterator[tuple[int, lines.Line]]:
        """The lines with their numbers, without those that begin with `passed_by`."""
        file = self._open_log()
        if file is None:
            return
        with file:
            for number, text in enumerate(split_lines(file, MAX_LINE_NBYTES), 1):
                if text is None:
                    self._damaged(number, f"a line of more than {MAX_LINE_NBYTES} bytes")
                elif text.startswith(self.passed_by):
                    pass
                elif not text.endswith(b"\n"):
                    self._damaged(number, f"{_CUT_OFF}: the run ended while it was written")
                else:
                    try:
                        line = lines.decode(text)
                    except (ValueError, RecursionError) as error:
                        self._damaged(number, str(error))
                    else:
                        yield number, line

    def _open_log(self) -> BinaryIO | None:
        try:
            return open_file(self.folder / LOG_FILE, self.root)
        except BadArtefact as error:
            self.unopened = str(error)
            self._add_gap(LOG_FILE, self.unopened)
            return None

    def _take(self, number: int, line: lines.Line) -> bool:
        """Take in a line; whether it closes what came before: ids may begin anew after it."""
        self.finished = False
        if type(line) is lines.ValueLine:
            self._value(number, line)
        elif type(line) is lines.CallLine:
            self._n_begun += 1
            self._begin(number, line)
        elif type(line) is lines.EndLine:
            self._end(number, line)
        elif type(line) is lines.StackLine:
            self._stacks[line.id] = tuple(line.frames)
        elif type(line) is lines.GapLine:
            self._on_gap(Gap(line.name, line.reason, self.step, self.rank))
        elif type(line) is lines.ClosedLine:
            self._close(number, line)
        return self.finished

    def _close(self, number: int, line: lines.ClosedLine) -> None:
        self.finished = True
        found, self._n_begun = self._n_begun, 0
        if found < line.calls and not self.passed_by:
            self._damaged(number, f"{line.calls} calls were written before it, {found} are there")

    def _damaged(self, number: int, reason: str) -> None:
        self._add_gap(f"{LOG_FILE}:{number}", reason)

    def _add_gap(self, name: str, reason: str) -> None:
        self._on_gap(Gap(f"{self.name}/{name}", reason, self.step, self.rank))

    def _value(self, number: int, line: lines.ValueLine) -> None:
        try:
            self._values[line.id] = self._read_value(line)
        except UNREADABLE as error:
            self._damaged(number, f"value {line.id}: {type(error).__name__}: {error}")

    def _begin(self, number: int, line: lines.CallLine) -> None:
        self._open[line.id] = begun = Begun(number, line)
        self._begun.append(begun)

    def _end(self, number: int, line: lines.EndLine) -> None:
        """The end of a call. A custom function has one for each result that comes to light, and
        the last says all."""
        begun = self._open.get(line.id)
        if begun is None:
            self._damaged(number, f"the end of call {line.id}, whose beginning is not there")
        else:
            begun.end, begun.end_number = line, number

    def _settle(self) -> Iterator[Call]:
        """The calls up to here."""
        for begun in self._begun:
            if call := self._call_of(begun, self.index):
                yield call
                self.index += 1
        self._begun, self._open = [], {}

    def _call_of(self, begun: Begun, index: int) -> Call | None:
        """A call by its two lines, or by the first where the second cannot be read."""
        line, end = begun.line, begun.end
        try:
            return self._call(line, end, index)
        except UNREADABLE as error:
            problem = f"{type(error).__name__}: {error}"
        if end is not None:
            try:
                call = self._call(line, None, index)
            except UNREADABLE:
                pass
            else:
                self._damaged(begun.end_number, f"the end of call {end.id}: {problem}")
                return call
        self._damaged(begun.number, f"{line.name}: {problem}")
        return None

    def _call(self, line: lines.CallLine, end: lines.EndLine | None, index: int) -> Call:
        # The same text each time, not one more: it is most of what a call takes in memory.
        self._call_name = name = sys.intern(line.name)
        self._found = []
        self._role = "input"
        base = f"{name}.input"
        after = end or _NO_END
        given: lines.CallLine | lines.EndLine = line if after.args is None else after
        args = tuple(
            [tree.decode(x, f"{base}.{i}", self._tensor) for i, x in enumerate(given.args or ())]
        )
        kwargs = {k: tree.decode(x, f"{base}.{k}", self._tensor) for k, x in given.kwargs.items()}
        self._held("parameter", "parameters", line.parameters, after.parameters)
        self._held("buffer", "buffers", line.buffers, after.buffers)
        self._held("state", "state", line.states, after.states)
        self._held("parameter_grad", "parameters_grad", line.parameter_grads, after.parameter_grads)
        self._role = "output"
        outputs = None
        if after.outputs is not None:
            outputs = tree.decode(
                after.outputs, tree.output_root(name, after.outputs), self._tensor
            )
        return Call(
            index=index,
            name=name,
            op=sys.intern(line.op),
            module=sys.intern(line.module),
            direction=line.direction,
            step=self.step,
            rank=self.rank,
            thread=sys.intern(line.thread),
            parent=None if line.parent is None else sys.intern(line.parent),
            stack=self._stacks.get(line.stack, ()) if line.stack is not None else (),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            tensors=tuple(self._found),
            status=after.status if end else "begun",
            error=after.error,
            notes=tuple(map(sys.intern, (*line.notes, *after.notes))),
            collective=unpack_collective(line.collective) if line.collective else None,
        )

    def _held(
        self,
        role: Role,
        group: str,
        before: Mapping[str, lines.TensorLine],
        after: Mapping[str, lines.TensorLine],
    ) -> None:
        """What the module of the call holds, as seen before and after the call."""
        if before or after:
            self._role = role
            name = self._call_name
            base = name if f".{group}." in name else f"{name}.{group}"
            for key, tensor in {**before, **after}.items():
                self._tensor(f"{base}.{key}", tensor)

    def _tensor(self, name: str, body: lines.TensorLine | dict[str, Any]) -> TensorRecord:
        line = self._tensor_line(body)
        summary, digest, blob, gap = _NOTHING if line.value is None else self._content(line.value)
        dtype, shape, stride, device = self._layouts[_layout_of(line)]
        record = TensorRecord(
            sys.intern(name),
            self._role,
            dtype,
            shape,
            stride,
            device,
            line.grad,
            summary,
            digest,
            blob,
            line.gap or gap,
            f"{self._call_name}.{line.same}" if line.same is not None else None,
            unpack_sharding(line.sharding) if line.sharding is not None else None,
        )
        self._found.append(record)
        return record

    def _tensor_line(self, body: lines.TensorLine | dict[str, Any]) -> lines.TensorLine:
        line = (
            body if isinstance(body, lines.TensorLine) else msgspec.convert(body, lines.TensorLine)
        )
        layout = _layout_of(line)
        if layout not in self._layouts:
            check_layout(line.dtype, line.shape, line.stride)
            self._layouts[layout] = layout
        return line

    def _content(self, value_id: int) -> Content:
        return self._values.get(value_id, NOT_THERE)

    def _read_value(self, line: lines.ValueLine) -> Content:
        summary = lines.unpack_summary(line.summary) if line.summary is not None else None
        if line.blob is None:
            return summary, line.digest, None, line.gap
        if min(line.blob) < 0 or max(line.blob) >= 1 << 63:
            return summary, line.digest, None, f"{LOG_FILE} has a wrong place for it: {line.blob}"
        number, offset, nbytes, *content_nbytes = line.blob
        path, size = self._shard(number)
        if offset + nbytes > size:
            missing = "is missing" if size < 0 else f"ends at byte {size}, before its content"
            return summary, line.digest, None, f"{path.name} {missing}"
        blob = Blob(path, offset, nbytes)
        if content_nbytes:
            blob = Blob(path, offset, content_nbytes[0], "packed", packed_nbytes=nbytes)
        return summary, line.digest, blob, line.gap

    def _shard(self, number: int) -> tuple[Path, int]:
        """A shard's path and size, looked at once; -1 when it is not there."""
        shard = self._shards.get(number)
        if shard is None:
            path, size = self.folder / shard_name(number), -1
            try:
                path = inside(path, self.root)
                problem = header_problem(path)
                size = path.stat().st_size
                if problem:
                    text = f"{problem}; its tensors are read by the log's offsets"
                    self._add_gap(path.name, text)
            except FileNotFoundError:
                self._add_gap(path.name, "missing: its tensors have statistics only")
            except BadArtefact as error:
                self._add_gap(path.name, f"{error}: its tensors have statistics only")
            shard = self._shards[number] = (path, size)
        return shard


def _layout_of(line: lines.TensorLine) -> _Layout:
    return line.dtype, line.shape, line.stride, line.device


class Begun(msgspec.Struct):
    """A call by its lines: the one that it began with, and its end if there is one."""

    number: int  # of the line in its file
    line: lines.CallLine
    end: lines.EndLine | None = None
    end_number: int = 0


_NO_END = lines.EndLine(id=-1)
_NOTHING: Content = (None, None, None, None)
NOT_THERE: Content = (None, None, None, NOT_WRITTEN)
