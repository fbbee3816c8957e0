"""One pass over a capture: calls that are wanted are picked, all others are only counted."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from tensorprobe.errors import BadArtefact
from tensorprobe.records import Call, Capture, Gap
from tensorprobe.store import lines, tree
from tensorprobe.store.loading import find, layout
from tensorprobe.store.native import (
    MAX_LINE_NBYTES,
    NOT_THERE,
    UNREADABLE,
    Begun,
    Content,
    OnGap,
    StepReader,
    add_endings,
    check_readable,
    in_turn,
    open_run,
    root_of,
)
from tensorprobe.store.remote import is_url, local_copy
from tensorprobe.store.step_files import LOG_FILE
from tensorprobe.tensors.opening import open_file, split_lines

Wanted = Callable[[Call], bool]
_READ_NBYTES = 4 << 20  # of lines, which takes a tenth of a second
_CLOSED_NBYTES = 256  # more than such a line has
_CALL, _END, _VALUE, _STACK, _GAP = (
    b'{"type":"%s"' % kind for kind in (b"call", b"end", b"value", b"stack", b"gap")
)


_FORGOTTEN = lines.CallLine(id=-1, name="", op="")  # in place of a call that was only counted


class CaptureCounts(msgspec.Struct):
    """What a capture holds, in numbers."""

    calls: int = 0
    begun: int = 0  # of the calls, those that never ended
    gaps: int = 0
    steps: set[int] = msgspec.field(default_factory=set)
    ranks: set[int] = msgspec.field(default_factory=set)
    unfinished: list[str] = msgspec.field(default_factory=list)
    is_read: bool = True  # every line; where not, one that is damaged is not seen to be

    def add(self, step: _StepPicker) -> None:
        if step.n_calls:
            self.steps.add(step.step)
            self.ranks.add(step.rank)
        if not step.finished:
            self.unfinished.append(step.name)
        self.calls += step.n_calls
        self.begun += step.n_begun
        self.gaps += step.n_gaps


class Picked(msgspec.Struct):
    """A call; of a native capture without what its tensors hold, but with where that is."""

    call: Call
    begun: Begun | None = None
    folder: Path = Path()
    part: int = 0  # of the step: after so many lines that closed it
    values: Sequence[int] = ()  # their ids


class Picker(Protocol):
    """A capture that calls can be picked from."""

    path: Path
    layout: str

    def count(self, read_nbytes: int = ...) -> CaptureCounts:
        """How much it holds, quickly. Of a native capture the last steps are read, up to
        `read_nbytes`; in the others, lines are counted by how they begin or end."""

    def pick(
        self, wanted: Wanted, *, on_gap: OnGap = ..., most: int | None = ...
    ) -> tuple[list[Picked], CaptureCounts]:
        """The calls that are wanted, in the order in which they began, and what there is in all.

        `wanted` is asked of each call in that order; it sees names and numbers, no tensors. Where
        no more than `most` are to be picked, what comes behind them is neither read nor counted.
        """

    def whole(self, picked: Sequence[Picked]) -> Iterator[Call]:
        """These calls with the contents of their tensors."""


def open_picker(path: str | os.PathLike[str]) -> Picker:
    """Calls of a capture at a path, in any layout. A peer's capture is read as a whole."""
    name, place = find(Path(local_copy(path) if is_url(path) else path))
    return _Native(place) if name == "native" else _Loaded(layout(name).read(place))


def _ignore(gap: Gap) -> None: ...


class _Loaded:
    """Picks from a capture that is in memory."""

    def __init__(self, capture: Capture) -> None:
        self.path = capture.path
        self.layout = capture.layout
        self._capture = capture

    def count(self, read_nbytes: int = 0) -> CaptureCounts:
        capture = self._capture
        return CaptureCounts(
            len(capture.calls),
            len(capture.begun),
            len(capture.gaps),
            set(capture.steps),
            set(capture.ranks),
            list(capture.facts.get("unfinished", ())),
        )

    def pick(
        self, wanted: Wanted, *, on_gap: OnGap = _ignore, most: int | None = None
    ) -> tuple[list[Picked], CaptureCounts]:
        for gap in self._capture.gaps:
            on_gap(gap)
        found = (Picked(call) for call in self._capture.calls if wanted(call))
        return list(itertools.islice(found, most)), self.count()

    def whole(self, picked: Sequence[Picked]) -> Iterator[Call]:
        return (each.call for each in picked)


class _Native:
    """Picks from a native capture, line by line: in memory is what is picked, and no more."""

    layout = "native"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = root_of(path)
        self._early_gaps: list[Gap] = []
        self._steps, _ = open_run(path, self._early_gaps.append)

    def count(self, read_nbytes: int = _READ_NBYTES) -> CaptureCounts:
        tally = CaptureCounts(gaps=len(self._early_gaps))
        left = read_nbytes
        unopened: list[str] = []
        for folder in reversed(self._steps):  # the last ones first: there a run breaks off
            step = _StepPicker(folder, self._root, 0, lambda call: False)
            nbytes = (folder / LOG_FILE).stat().st_size
            if nbytes <= left:
                left -= nbytes
                step.read()
            else:
                tally.is_read = False
                step.count()
            tally.add(step)
            if step.unopened:
                unopened.insert(0, step.unopened)
        tally.unfinished.reverse()
        check_readable(self.path, tally.calls, tally.gaps, unopened)
        self._add_endings(tally, _ignore)
        return tally

    def pick(
        self, wanted: Wanted, *, on_gap: OnGap = _ignore, most: int | None = None
    ) -> tuple[list[Picked], CaptureCounts]:
        for gap in self._early_gaps:
            on_gap(gap)
        tally = CaptureCounts(gaps=len(self._early_gaps))
        picked: list[Picked] = []
        unopened: list[str] = []

        def picker(folder: Path, index: int) -> _StepPicker:
            left = None if most is None else most - len(picked)
            return _StepPicker(folder, self._root, index, wanted, on_gap, left)

        for step in in_turn(self._steps, picker):
            step.read()
            tally.add(step)
            picked += step.picked
            if step.unopened:
                unopened.append(step.unopened)
            if len(picked) == most:
                break
        check_readable(self.path, tally.calls, tally.gaps, unopened)
        self._add_endings(tally, on_gap)
        return picked, tally

    def _add_endings(self, tally: CaptureCounts, on_gap: OnGap) -> None:
        def told(gap: Gap) -> None:
            tally.gaps += 1
            on_gap(gap)

        add_endings(self.path, self._steps, tally.unfinished, told)

    def whole(self, picked: Sequence[Picked]) -> Iterator[Call]:
        for folder, group in itertools.groupby(picked, lambda each: each.folder):
            yield from _ValueReader(folder, self._root, list(group)).calls()


class _Numbers:
    """A set of whole numbers from 0, a bit each."""

    _LIMIT = 1 << 27  # 16 MB; no step has as many calls

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        if 0 <= number < self._LIMIT:
            at, bit = divmod(number, 8)
            self._bits.extend(bytes(max(0, at + 1 - len(self._bits))))
            self._bits[at] |= 1 << bit

    def __contains__(self, number: int) -> bool:
        at, bit = divmod(number, 8)
        return 0 <= at < len(self._bits) and bool(self._bits[at] >> bit & 1)


class _StepPicker(StepReader):
    """Picks from one step, and counts its calls and gaps."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        index: int,
        wanted: Wanted,
        on_gap: OnGap = _ignore,
        most: int | None = None,
    ) -> None:
        super().__init__(folder, root, index, self._gap)
        self.picked: list[Picked] = []
        self.n_calls = self.n_begun = self.n_gaps = 0
        self._wanted = wanted
        self._tell_gap = on_gap
        self._most = most
        self._by_id: dict[int, Picked] = {}
        self._unended: set[int] = set()  # of those
        self._seen = _Numbers()  # the ids of all calls that began
        self._part = 0
        self._asked: list[int] = []  # values of the call that is being put together

    def read(self) -> None:
        """Read line by line, until the last one or until all that is to be picked has ended."""
        for number, line in self._lines():
            if self._take(number, line):
                self._open, self._by_id, self._unended, self._seen = {}, {}, set(), _Numbers()
                self._part += 1
            if len(self.picked) == self._most:
                self.passed_by = (_CALL, _VALUE, _STACK, _GAP)
                self._on_gap = _ignore  # as ends are here whose calls were passed by
                if not self._unended and not any(map(_ends_again, self._by_id.values())):
                    return

    def count(self) -> None:
        """Count, but decode no more than the last line: if it closes the step it has counts."""
        file = self._open_log()
        if file is None:
            return
        with file:
            closed = _closed(file)
            if closed is not None and closed.whole:
                self.n_calls, self.n_gaps = closed.calls, closed.gaps
            else:
                self._count_beginnings(file)
        self.finished = closed is not None

    def _count_beginnings(self, file: BinaryIO) -> None:
        """Count lines by how they begin."""
        file.seek(0)
        for text in split_lines(file, MAX_LINE_NBYTES):
            if text is None or not text.endswith(b"\n"):  # too long, or cut off
                self.n_gaps += 1
            elif text.startswith(_VALUE):
                pass
            elif text.startswith(_CALL):
                self.n_calls += 1
                self.n_begun += 1
            elif text.startswith(_END) and self.n_begun:  # some calls end more than once
                self.n_begun -= 1
            elif text.startswith(_GAP):
                self.n_gaps += 1

    def _gap(self, gap: Gap) -> None:
        self.n_gaps += 1
        self._tell_gap(gap)

    def _value(self, number: int, line: lines.ValueLine) -> None:
        super()._value(number, line)
        self._values.clear()

    def _begin(self, number: int, line: lines.CallLine) -> None:
        if problem := self._problem(line):
            self._damaged(number, f"{line.name}: {problem}")
            return
        index = self.index
        self.index += 1
        self.n_calls += 1
        self.n_begun += 1
        self._open[line.id] = begun = Begun(number, _FORGOTTEN)
        self._by_id.pop(line.id, None)
        self._seen.add(line.id)
        if self._wanted(self._heading(line, index)):
            begun.line = line
            self._asked = []
            call = self._call(line, None, index)
            picked = Picked(call, begun, self.folder, self._part, self._asked)
            self.picked.append(picked)
            self._by_id[line.id] = picked
            self._unended.add(line.id)

    def _heading(self, line: lines.CallLine, index: int) -> Call:
        return Call(
            index=index,
            name=line.name,
            op=line.op,
            module=line.module,
            direction=line.direction,
            step=self.step,
            rank=self.rank,
        )

    def _end(self, number: int, line: lines.EndLine) -> None:
        begun, picked = self._open.get(line.id), self._by_id.get(line.id)
        if begun is None and line.id in self._seen:  # once more, of a call that is not picked
            return
        self._unended.discard(line.id)
        if problem := self._problem(line) if begun is not None else None:
            self._damaged(number, f"the end of call {line.id}: {problem}")
            return
        is_first = begun is not None and begun.end is None
        super()._end(number, line)
        if begun is None:
            return
        self.n_begun -= is_first
        if picked is None:
            del self._open[line.id]
            return
        self._asked = []
        picked.call = self._call(begun.line, line, picked.call.index)
        picked.values = self._asked

    def _problem(self, line: lines.CallLine | lines.EndLine) -> str | None:
        """Why no call can be made of a line, None where one can. Asked of each: it takes a third of
        the time that making the call does."""
        trees = [*(line.args or ()), *line.kwargs.values()]
        if isinstance(line, lines.EndLine):
            trees.append(line.outputs)
        try:
            for each in trees:
                tree.decode(each, "", self._check_tensor)
            for held in (line.parameters, line.parameter_grads, line.buffers, line.states):
                for tensor in held.values():
                    self._tensor_line(tensor)
        except UNREADABLE as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _check_tensor(self, name: str, body: dict[str, Any]) -> None:
        self._tensor_line(body)

    def _content(self, value_id: int) -> Content:
        self._asked.append(value_id)
        return NOT_THERE


def _ends_again(picked: Picked) -> bool:
    """Whether more lines may say how a call ended: its results come to light one by one."""
    return picked.call.name.startswith("Function.")


def is_closed(log: Path) -> bool:
    """Whether a log's last line closes its step: nothing is written to it any more."""
    try:
        with open_file(log) as file:
            return _closed(file) is not None
    except (OSError, BadArtefact):
        return False


def _closed(file: BinaryIO) -> lines.ClosedLine | None:
    """The last line of a log, if it closes the step."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _CLOSED_NBYTES))
    text = file.read()
    last = text[text.rfind(b"\n", 0, -1) + 1 :]
    try:
        line = lines.decode(last) if last.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, lines.ClosedLine) else None


class _ValueReader(StepReader):
    """Reads the values of picked calls, all of one step."""

    def __init__(self, folder: Path, root: Path, picked: Sequence[Picked]) -> None:
        super().__init__(folder, root, 0, _ignore)  # gaps were told when they were picked
        self.passed_by = (_CALL, _END, _STACK, _GAP)
        self._picked = deque(picked)
        self._asked = {value for each in picked for value in each.values}
        self._part = 0

    def _value(self, number: int, line: lines.ValueLine) -> None:
        if line.id in self._asked:
            super()._value(number, line)

    def _settle(self) -> Iterator[Call]:
        while self._picked and self._picked[0].part == self._part:
            picked = self._picked.popleft()
            assert picked.begun is not None
            call = self._call(picked.begun.line, picked.begun.end, picked.call.index)
            yield msgspec.structs.replace(call, stack=picked.call.stack)
        self._part += 1
