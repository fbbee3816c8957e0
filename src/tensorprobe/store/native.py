"""The native layout: read reads it, the CaptureWriter of writer.py writes it.

capture.json, then rankR/rank.json, then rankR/stepN/calls.jsonl and its tensors-K.safetensors.
Every step folder stands alone, so one can be deleted or sent to a colleague.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.contents.blob import Blob
from tensorprobe.errors import UnreadableCapture
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
from tensorprobe.store.claim import EARLIER, FORMAT, RANK_FILE, RUN_FILE
from tensorprobe.store.ending import read_ending
from tensorprobe.store.step_files import LOG_FILE, header_problem, shard_name

NOT_WRITTEN = "value not written (the run ended before)"
_RANK = re.compile(r"rank(\d+)")
_STEP = re.compile(r"step(\d+)")
_Content = tuple[TensorSummary | None, str | None, Blob | None, str | None]


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
    steps = find(path)
    if steps is None:
        raise UnreadableCapture(f"'{path}' is not a native capture: it has no {RUN_FILE}")
    gaps: list[Gap] = []
    facts = _facts(path, steps, gaps)
    if not steps:
        hint = f"; earlier runs are in '{path / EARLIER}'" if (path / EARLIER).is_dir() else ""
        raise UnreadableCapture(
            f"capture '{path}' is empty: the run ended before its first recorded step{hint}"
        )
    calls: list[Call] = []
    unfinished = []
    index, last_rank = 0, None
    with no_garbage():
        for folder in steps:
            rank = _number(_RANK, folder.parent.name)
            if rank != last_rank:
                index, last_rank = 0, rank
            step = _StepReader(folder, _number(_STEP, folder.name), rank, index)
            calls += step.calls()
            gaps += step.gaps
            index = step.index
            if not step.finished:
                unfinished.append(f"{folder.parent.name}/{folder.name}")
    if not any((folder / LOG_FILE).exists() for folder in (path, path.parent)):  # not of one step
        _read_endings(steps, gaps, unfinished)
    return Capture(path, "native", calls, gaps, {**facts, "unfinished": unfinished})


def write(capture: Capture, folder: Path, *, compress: bool = False) -> list[str]:
    """Write a capture in this layout."""
    from tensorprobe.store import native_copy  # here: reading needs neither it nor numpy

    return native_copy.write(capture, folder, compress=compress)


def _read_endings(steps: list[Path], gaps: list[Gap], unfinished: list[str]) -> None:
    """What each rank says of how its recording ended."""
    for folder in dict.fromkeys(step.parent for step in steps):
        ending = read_ending(folder)
        if ending is None:
            continue
        gaps += ending.gaps(_number(_RANK, folder.name))
        if not ending.ended and not any(name.startswith(f"{folder.name}/") for name in unfinished):
            unfinished.append(folder.name)


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else 0


def _facts(path: Path, steps: list[Path], gaps: list[Gap]) -> dict[str, Any]:
    """capture.json, with the content of every rank.json under `ranks`."""
    ranks = {_number(_RANK, step.parent.name): step.parent for step in steps}
    root = steps[0].parent.parent if steps else path
    facts = _read_facts(root / RUN_FILE, gaps)
    about = {rank: _read_facts(folder / RANK_FILE, gaps) for rank, folder in ranks.items()}
    return {**facts, "ranks": about}


def _read_facts(path: Path, gaps: list[Gap]) -> dict[str, Any]:
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:  # a step or rank folder that was copied alone
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        gaps.append(Gap(path.name, str(error)))
        return {}
    version = facts.get("format")
    if version != FORMAT:
        raise UnreadableCapture(
            f"capture '{path.parent}' was written by format {version}; this version reads "
            f"{FORMAT}. Upgrade: pip install -U tensorprobe"
        )
    return facts


class _StepReader:
    """Reads one calls.jsonl; what cannot be read becomes gaps that name file and line."""

    def __init__(self, folder: Path, step: int, rank: int, index: int) -> None:
        self.folder = folder
        self.step = step
        self.rank = rank
        self.index = index
        self.gaps: list[Gap] = []
        self.finished = False
        self._begun: list[tuple[int, lines.CallLine, lines.EndLine | None]] = []
        self._open: dict[int, int] = {}  # call id -> where it is in _begun
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._values: dict[int, lines.ValueLine] = {}
        self._contents: dict[int, _Content] = {}
        self._shards: dict[int, tuple[Path, int]] = {}
        self._call_name = ""  # of the call that is being put together, as are the next two
        self._role: Role = "input"
        self._found: list[TensorRecord] = []

    def calls(self) -> Iterator[Call]:
        for number, line in self._lines():
            self.finished = False
            if type(line) is lines.ValueLine:
                self._values[line.id] = line
            elif type(line) is lines.CallLine:
                self._open[line.id] = len(self._begun)
                self._begun.append((number, line, None))
            elif type(line) is lines.EndLine:
                self._end(number, line)
            elif type(line) is lines.StackLine:
                self._stacks[line.id] = tuple(line.frames)
            elif type(line) is lines.GapLine:
                self.gaps.append(Gap(line.name, line.reason, self.step, self.rank))
            else:
                self.finished = True
                yield from self._settle()
        yield from self._settle()

    def _lines(self) -> Iterator[tuple[int, lines.Line]]:
        data = (self.folder / LOG_FILE).read_bytes()
        texts = data.split(b"\n")
        torn = texts.pop()
        for number, text in enumerate(texts, 1):
            try:
                yield number, lines.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._damaged(number, str(error))
        if torn:
            self._damaged(len(texts) + 1, "cut off: the run ended while it was written")

    def _damaged(self, number: int, reason: str) -> None:
        self._add_gap(f"{LOG_FILE}:{number}", reason)

    def _add_gap(self, name: str, reason: str) -> None:
        name = f"{self.folder.parent.name}/{self.folder.name}/{name}"
        self.gaps.append(Gap(name, reason, self.step, self.rank))

    def _end(self, number: int, line: lines.EndLine) -> None:
        at = self._open.get(line.id)
        if at is None:
            self._damaged(number, f"the end of call {line.id}, whose beginning is not there")
            return
        begun, call, _ = self._begun[at]
        self._begun[at] = (begun, call, line)

    def _settle(self) -> Iterator[Call]:
        """The calls up to here. After a `closed` line ids may begin anew."""
        for number, call, end in self._begun:
            try:
                yield self._call(call, end)
            except (KeyError, TypeError, ValueError) as error:
                self._damaged(number, f"{call.name}: {type(error).__name__}: {error}")
        self._begun, self._open, self._contents = [], {}, {}

    def _call(self, line: lines.CallLine, end: lines.EndLine | None) -> Call:
        self._call_name = name = line.name
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
        self._held("parameter_grad", "parameters_grad", line.parameter_grads, after.parameter_grads)
        self._role = "output"
        outputs = None
        if after.outputs is not None:
            outputs = tree.decode(
                after.outputs, tree.output_root(name, after.outputs), self._tensor
            )
        call = Call(
            index=self.index,
            name=name,
            op=line.op,
            module=line.module,
            direction=line.direction,
            step=self.step,
            rank=self.rank,
            thread=line.thread,
            parent=line.parent,
            stack=self._stacks.get(line.stack, ()) if line.stack is not None else (),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            tensors=tuple(self._found),
            status=after.status if end else "begun",
            error=after.error,
            notes=(*line.notes, *after.notes),
        )
        self.index += 1
        return call

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
        line = body if isinstance(body, lines.TensorLine) else lines.TensorLine(**body)
        summary, digest, blob, gap = _NOTHING if line.value is None else self._content(line.value)
        record = TensorRecord(
            name,
            self._role,
            line.dtype,
            tuple(line.shape),
            tuple(line.stride) if line.stride is not None else None,
            line.device,
            line.grad,
            summary,
            digest,
            blob,
            line.gap or gap,
            f"{self._call_name}.{line.same}" if line.same is not None else None,
        )
        self._found.append(record)
        return record

    def _content(self, value_id: int) -> _Content:
        """What the value line says, once per value: many tensors share one."""
        content = self._contents.get(value_id)
        if content is None:
            line = self._values.get(value_id)
            content = self._read_value(line) if line else (None, None, None, NOT_WRITTEN)
            self._contents[value_id] = content
        return content

    def _read_value(self, line: lines.ValueLine) -> _Content:
        summary = lines.unpack_summary(line.summary) if line.summary is not None else None
        if line.blob is None:
            return summary, line.digest, None, line.gap
        if min(line.blob) < 0:
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
            path = self.folder / shard_name(number)
            size = path.stat().st_size if path.is_file() else -1
            if size < 0:
                self._add_gap(path.name, "missing: its tensors have statistics only")
            elif problem := header_problem(path):
                self._add_gap(path.name, f"{problem}; its tensors are read by the log's offsets")
            shard = self._shards[number] = (path, size)
        return shard


_NO_END = lines.EndLine(id=-1)
_NOTHING: _Content = (None, None, None, None)
