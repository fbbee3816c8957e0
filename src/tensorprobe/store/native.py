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
from tensorprobe.contents.json_files import read_json
from tensorprobe.contents.layouts import check_layout
from tensorprobe.contents.opening import inside, open_file, split_lines
from tensorprobe.errors import BadArtefact, UnreadableCapture
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
from tensorprobe.store.step_files import LOG_FILE, header_problem, shard_name

_MAX_LINE_NBYTES = 8 << 20  # a call of ours has some 1,000; as Python's objects it is 20 times that
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
            root = path if path.is_dir() else path.parent
            step = _StepReader(folder, root, _number(_STEP, folder.name), rank, index)
            calls += step.calls()
            gaps += step.gaps
            index = step.index
            if not step.finished:
                unfinished.append(f"{folder.parent.name}/{folder.name}")
    if not calls and gaps and all(gap.name.endswith(f"/{LOG_FILE}") for gap in gaps):
        raise UnreadableCapture(f"nothing of '{path}' can be read: {gaps[0].reason}")
    return Capture(path, "native", calls, gaps, {**facts, "unfinished": unfinished})


def write(capture: Capture, folder: Path, *, compress: bool = False) -> list[str]:
    """Write a capture in this layout."""
    from tensorprobe.store import native_copy  # here: reading needs neither it nor numpy

    return native_copy.write(capture, folder, compress=compress)


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else 0


def _facts(path: Path, steps: list[Path], gaps: list[Gap]) -> dict[str, Any]:
    """capture.json, with the content of every rank.json under `ranks`."""
    ranks = {_number(_RANK, step.parent.name): step.parent for step in steps}
    root = steps[0].parent.parent if steps else path
    facts = _read_facts(root / RUN_FILE, root, gaps)
    about = {rank: _read_facts(folder / RANK_FILE, root, gaps) for rank, folder in ranks.items()}
    return {**facts, "ranks": about}


def _read_facts(path: Path, root: Path, gaps: list[Gap]) -> dict[str, Any]:
    try:
        facts = msgspec.convert(read_json(open_file(path, root), path), dict[str, Any])
    except FileNotFoundError:  # a step or rank folder that was copied alone
        return {}
    except ValueError as error:
        gaps.append(Gap(path.name, str(error)))
        return {}
    if not isinstance(facts.get("config", {}), dict):
        gaps.append(Gap(path.name, "`config` is no object"))
        del facts["config"]
    version = facts.get("format")
    if version != FORMAT:
        raise UnreadableCapture(
            f"capture '{path.parent}' was written by format {version}; this version reads "
            f"{FORMAT}. Upgrade: pip install -U tensorprobe"
        )
    return facts


class _StepReader:
    """Reads one calls.jsonl; what cannot be read becomes gaps that name file and line."""

    def __init__(self, folder: Path, root: Path, step: int, rank: int, index: int) -> None:
        self.folder = folder
        self.root = root
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
        self._layouts: set[tuple[Any, ...]] = set()  # of tensors that can be
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
        try:
            file = open_file(self.folder / LOG_FILE, self.root)
        except BadArtefact as error:
            self._add_gap(LOG_FILE, str(error))
            return
        with file:
            for number, text in enumerate(split_lines(file, _MAX_LINE_NBYTES), 1):
                try:
                    if text is None:
                        self._damaged(number, f"a line of more than {_MAX_LINE_NBYTES} bytes")
                    elif text.endswith(b"\n"):
                        yield number, lines.decode(text)
                    else:
                        self._damaged(number, "cut off: the run ended while it was written")
                except (ValueError, RecursionError) as error:
                    self._damaged(number, str(error))

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
            except Exception as error:  # noqa: BLE001 reading one record: it becomes a gap
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
        line = msgspec.convert(body, lines.TensorLine) if isinstance(body, dict) else body
        layout = line.dtype, line.shape, line.stride
        if layout not in self._layouts:
            check_layout(*layout)
            self._layouts.add(layout)
        summary, digest, blob, gap = _NOTHING if line.value is None else self._content(line.value)
        record = TensorRecord(
            name,
            self._role,
            line.dtype,
            line.shape,
            line.stride,
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


_NO_END = lines.EndLine(id=-1)
_NOTHING: _Content = (None, None, None, None)
