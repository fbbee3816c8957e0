"""`tensorprobe show`: the calls of a capture as a table, or everything about some of them."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.nests import leaves_of
from tensorprobe.store.claim import processes_in
from tensorprobe.terminal import busy, printable, say

if TYPE_CHECKING:
    from pathlib import Path

    from tensorprobe.records import Call, Gap, TensorRecord
    from tensorprobe.store.picking import CaptureCounts, Picked, Picker

Row = tuple[str, ...]
_MAX_CELL = 2000  # characters: all rows are padded to the longest
# Indices and counts are flush right, all else flush left.
_CALL_COLUMNS = (">index", ">step", ">rank", "name", "module", "op", "input", "output", "status")
_TENSOR_COLUMNS = (
    "tensor", "dtype", "shape", ">min", ">max", ">mean", ">norm", ">nan", ">inf", ">zero", "kept",
)  # fmt: skip


_UNLIKE = 8  # of a name that does not fit; see `likeness`
_NAMES_AT_ONCE = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", metavar="CAPTURE", help="a run, a rank or a step of it")
    parser.add_argument(
        "call", metavar="CALL", nargs="?", help="show these alone: a name, its beginning, a pattern"
    )
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--name", metavar="PATTERN", help="only calls of this name")
    parser.add_argument("--module", metavar="PATTERN", help="only calls in these modules")
    parser.add_argument("--op", metavar="PATTERN", help="only calls of these ops")
    parser.add_argument("--direction", choices=("forward", "backward"), help="only this direction")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="at most N (default 50)")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="skip the first N")
    parser.add_argument("--gaps", action="store_true", help="what is missing, and why")
    add_json(parser, "them, of one call with its tensors,")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.errors import BadUsage, UnreadableCapture
    from tensorprobe.store.picking import open_picker

    if args.limit < 1 or args.offset < 0:
        raise BadUsage("--limit must be at least 1 and --offset at least 0")
    page = _Page(args)
    gaps: list[Gap] = []
    with busy(f"reading {args.capture}"):
        capture = open_picker(args.capture)
        if args.gaps:
            picked, tally = capture.pick(page.wants, on_gap=gaps.append)
        elif page.is_narrowed:
            picked, tally = capture.pick(page.wants)
        else:
            tally = capture.count()
            picked, _ = capture.pick(page.wants, most=args.limit)
            page.found = tally.calls
    if args.call is not None and not page.found:
        raise UnreadableCapture(no_such_call(capture, page, args.call))
    if args.json:
        picked = page.without_others(picked)
        calls = [each.call for each in picked] if args.call is None else capture.whole(picked)
        found = [] if args.gaps else [_call_json(call, args.call is not None) for call in calls]
        more = 0 if args.gaps else page.found - args.offset - len(picked)
        say_json(_as_json(capture, tally, found, gaps, max(more, 0)))
        return 0
    if args.call is None:
        _write(header(capture, tally))
    if args.gaps:
        _write_gaps(gaps)
        return 0
    picked = page.without_others(picked)
    if args.call is not None:
        for call in capture.whole(picked):
            _write_call(call)
    elif page.found:
        _write_table(_CALL_COLUMNS, [call_row(each.call) for each in picked])
    else:
        _write(nothing_found(tally, page))
    left = page.found - args.offset - len(picked)
    if left > 0:
        _write([f"{left} more: --offset {args.offset + len(picked)}"])
    return 0


def _as_json(
    capture: Picker,
    tally: CaptureCounts,
    calls: Sequence[dict[str, Any]],
    gaps: Sequence[Gap],
    more: int,
) -> dict[str, Any]:
    return {
        "format": 1,
        "capture": str(capture.path),
        "layout": capture.layout,
        "steps": sorted(tally.steps),
        "ranks": sorted(tally.ranks),
        "processes": processes_in(capture.path),
        "counts": {"calls": tally.calls, "gaps": tally.gaps},
        "unfinished": list(tally.unfinished),
        "calls": list(calls),
        "more": more,
        "gaps": [
            {"step": gap.step, "rank": gap.rank, "name": gap.name, "reason": gap.reason}
            for gap in gaps
        ],
    }


def _call_json(call: Call, is_whole: bool) -> dict[str, Any]:
    """A row of the table; `is_whole`: also its stack, its arguments and its tensors."""
    found: dict[str, Any] = {
        "index": call.index,
        "step": call.step,
        "rank": call.rank,
        "name": call.name,
        "module": call.module,
        "op": call.op,
        "direction": call.direction,
        "status": call.status,
    }
    if not is_whole:
        return found
    found |= {"error": call.error, "parent": call.parent, "thread": call.thread}
    found |= {"notes": list(call.notes), "stack": list(call.stack)}
    named = [(f"input.{i}", value) for i, value in enumerate(call.args)]
    named += [(f"input.{key}", value) for key, value in call.kwargs.items()]
    found["arguments"] = {name: text for part in named for name, text in _leaves(*part)}
    found["tensors"] = [_tensor_json(call, record) for record in call.tensors]
    return found


def _tensor_json(call: Call, record: TensorRecord) -> dict[str, Any]:
    s = record.summary
    numbers = (s.min, s.max, s.mean, s.norm, s.nan_count, s.inf_count, s.zero_count) if s else ()
    names = ("min", "max", "mean", "norm", "nan", "inf", "zero")
    values = dict(zip_longest(names, numbers))
    return {
        "name": record.name.removeprefix(call.name + "."),
        "role": record.role,
        "dtype": record.dtype,
        "shape": list(record.shape),
        **values,
        "digest": record.digest,
        "stored": None if record.blob is None else record.blob.nbytes,
        "gap": record.gap,
    }


class _Page:
    """Says of each call that comes by whether it goes on the page, and counts those that could."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tensorprobe.records import call_tests

        self.total = 0  # that pass the filters
        self.found = 0  # that the name stands for, too
        self.seen: dict[str, dict[str, None]] = {}  # an option, and values that it could have
        self._tests = call_tests(
            args.step, args.rank, args.name, args.module, args.op, args.direction
        )
        self.is_narrowed = bool(self._tests) or args.call is not None
        self._wanted = args.call
        self._best = _UNLIKE
        self._places = range(args.offset + 1, args.offset + args.limit + 1)

    def wants(self, call: Call) -> bool:
        if not self.passes(call):
            self._see(call)
            return False
        self.total += 1
        likeness = self._likeness(call)
        if likeness == _UNLIKE or likeness > self._best:
            return False
        if likeness < self._best:
            self._best, self.found = likeness, 0
        self.found += 1
        return self.found in self._places

    def passes(self, call: Call) -> bool:
        return all(test(call) for test in self._tests)

    def without_others(self, picked: Sequence[Picked]) -> list[Picked]:
        """Of those that were wanted the ones most like the name: how like was not known before."""
        return [each for each in picked if self._likeness(each.call) == self._best]

    def _likeness(self, call: Call) -> int:
        return 0 if self._wanted is None else likeness(call.name, self._wanted)

    def _see(self, call: Call) -> None:
        for option, value in (
            ("--direction", call.direction),
            ("--name", f"{call.name.partition('.')[0]}.*"),
            ("--op", call.op),
            ("--module", call.module),
        ):
            if value:
                self.seen.setdefault(option, {})[value] = None


def likeness(name: str, wanted: str) -> int:
    """How well a call's name fits what was asked for: 0 is best, _UNLIKE not at all.

    That may be the name, a pattern, the beginning of it, or the name of a tensor; each as it is, or
    with Tensor.__add__ for Tensor.add.
    """
    from tensorprobe.operators import native_name
    from tensorprobe.records import matches_name

    for rank, spelling in ((0, str), (4, native_name)):
        spelt, want = spelling(name), spelling(wanted)
        if spelt == want:
            return rank
        if matches_name(spelt, want):
            return rank + 1
        if spelt.startswith(want):
            return rank + 2
        if want.startswith(spelt + "."):
            return rank + 3
        if "__" not in name and "__" not in wanted:  # both are spelt in one way only
            break
    return _UNLIKE


def header(capture: Picker, tally: CaptureCounts) -> list[str]:
    """What the capture is, in a few lines."""
    facts = [
        capture.layout,
        _numbers("step", sorted(tally.steps)),
        _numbers("rank", sorted(tally.ranks)),
        _count(tally.calls, "call"),
        _count(tally.gaps, "gap"),
        _size(_nbytes_recorded(capture.path)),
    ]
    lines = [f"{capture.path}: {', '.join(facts)}"]
    if processes := processes_in(capture.path):
        lines.append(f"other processes, each in its folder: {_some(processes)}")
    if tally.begun:
        lines.append(f"{_count(tally.begun, 'call')} begun, values missing")
    if tally.unfinished:
        lines.append(f"not closed: {', '.join(tally.unfinished)}")
    if not tally.is_read:
        lines.append("not every line was read to count them; to read all: --gaps")
    return [*lines, ""]


def nothing_found(tally: CaptureCounts, page: _Page) -> list[str]:
    """No call passes the filters: which values each of them could have had."""
    there: dict[str, list[str]] = {
        "--step": [str(step) for step in sorted(tally.steps)],
        "--rank": [str(rank) for rank in sorted(tally.ranks)],
        **{option: list(values) for option, values in page.seen.items()},
    }
    width = max(map(len, there))
    lines = [f"  {option:<{width}}  {_some(values)}" for option, values in there.items() if values]
    return ["no call passes these filters. There is:", *lines]


def _some(values: Sequence[str], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more


def no_such_call(capture: Picker, page: _Page, wanted: str) -> str:
    """No call has a name like this one: which names come near it. Takes a second pass."""
    names = _NearNames(wanted)

    def look(call: Call) -> bool:
        if page.passes(call):
            names.add(call.name)
        return False

    capture.pick(look)
    near = names.nearest()
    hint = f"near names: {', '.join(near)}" if near else "to see all: leave the name out"
    return f"no call '{wanted}' among {page.total} in '{capture.path}'; {hint}"


class _NearNames:
    """The three names nearest to one: those that hold it, else those that look like it."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._holding: list[str] = []
        self._alike: list[str] = []
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        self._names.add(name)
        if len(self._names) > _NAMES_AT_ONCE:
            self._compare()
            self._names.clear()

    def nearest(self) -> list[str]:
        self._compare()
        return self._holding or self._alike

    def _compare(self) -> None:
        names = {*self._names, *self._alike, *self._holding}
        self._holding = sorted(name for name in names if self._wanted in name)[:3]
        self._alike = difflib.get_close_matches(self._wanted, names)


def call_row(call: Call) -> Row:
    inputs = [record for record in call.tensors if record.role == "input"]
    outputs = [record for record in call.tensors if record.role == "output"]
    return (
        str(call.index),
        str(call.step),
        str(call.rank),
        call.name,
        call.module,
        _op(call),
        _kinds(inputs[:1]),
        _kinds(outputs),
        call.status,
    )


def describe(call: Call) -> Iterator[str]:
    """Where a call was made, and with what: everything but the statistics of its tensors."""
    parts = [("op", _op(call)), ("module", call.module), ("parent", call.parent or "")]
    parts = [(label, text) for label, text in parts if text]
    parts.append(
        ("where", f"step {call.step}, rank {call.rank}, index {call.index}, {call.thread}")
    )
    # an error of torch has many lines
    status = f"{call.status}: {call.error}" if call.error else call.status
    parts += [("" if i else "status", line) for i, line in enumerate(status.split("\n"))]
    parts += [("note", note) for note in call.notes]
    parts += [("" if i else "stack", frame) for i, frame in enumerate(call.stack)]
    for i, value in enumerate(call.args):
        parts += _leaves(f"input.{i}", value)
    for key, value in call.kwargs.items():
        parts += _leaves(f"input.{key}", value)
    if call.status == "complete":
        parts += _leaves("output" if _is_container(call.outputs) else "output.0", call.outputs)
    width = max(len(label) for label, _ in parts)
    yield call.name
    for label, text in parts:
        yield f"  {label:<{width}}  {text}"


def tensor_row(call: Call, record: TensorRecord) -> Row:
    s = record.summary
    numbers = (s.min, s.max, s.mean, s.norm, s.nan_count, s.inf_count, s.zero_count) if s else ()
    cells = [_number(number) for number in numbers] or [""] * 7
    kept = [f"digest {record.digest}"] if record.digest else []
    if record.blob is not None:
        packed = record.blob.packed_nbytes
        room = f" in {_size(packed)}" if packed else ""
        kept.append(f"{_size(record.blob.nbytes)} stored{room}")
    if record.alias_of:
        kept.append(f"same tensor as {record.alias_of.removeprefix(call.name + '.')}")
    if record.gap:
        kept.append(f"missing: {record.gap}")
    name = record.name.removeprefix(call.name + ".")
    return (name, record.dtype, str(list(record.shape)), *cells, ", ".join(kept))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each part of a value with its name; a container of plain numbers is one part."""
    from tensorprobe.records import Fields

    if not _is_container(value) or _is_plain(value):
        yield name, _text(value)
        return
    if isinstance(value, Fields):
        yield name, f"{value.kind} {value.type}"
        value = value.fields
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        yield from _leaves(f"{name}.{key}", part)


def _is_container(value: Any) -> bool:
    from tensorprobe.records import Fields

    return isinstance(value, list | tuple | dict | Fields)


def _is_plain(value: Any) -> bool:
    kinds = (bool, int, float, complex, str)
    return all(leaf is None or isinstance(leaf, kinds) for leaf in leaves_of(value))


def _text(value: Any) -> str:
    from tensorprobe.records import Special, TensorRecord

    if isinstance(value, TensorRecord):
        device = "" if value.is_on_host else f" on {value.device}"
        return f"tensor {_kind(value)}{device}{', requires grad' if value.requires_grad else ''}"
    if isinstance(value, Special):
        kind = "unsupported type:" if value.kind == "unsupported" else value.kind
        return f"{kind} {value.text}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    return "..." if value is ... else repr(value)


def _op(call: Call) -> str:
    from tensorprobe.operators import symbol_of

    # By its name too: the op of `1 - x`, Tensor.rsub, is torch.rsub.
    symbol = symbol_of(call.op) or symbol_of(".".join(call.name.split(".")[:2]))
    return f"{call.op} ({symbol})" if symbol else call.op


def _kind(record: TensorRecord) -> str:
    return f"{record.dtype}[{','.join(map(str, record.shape))}]"


def _kinds(records: Sequence[TensorRecord]) -> str:
    """The first few: an optimizer's step has one output a parameter."""
    more = [f"+{len(records) - 3}"] if len(records) > 3 else []
    return " ".join([*map(_kind, records[:3]), *more])


def _number(number: float | int | bool | None) -> str:
    if number is None:
        return "-"
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """Such as: step 3, steps 0-4, steps 0 2 5."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]}-{numbers[-1]}"
    return f"{noun}s {' '.join(map(str, numbers)) or 'none'}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _size(nbytes: int) -> str:
    """In powers of 1000, as `run` says what it wrote."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    power = min(int(math.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _nbytes_recorded(path: Path) -> int:
    """Lines and tensors, as `run` counts them: room for a shard's header is not content.

    A shard of a killed run has a size of which it uses little.
    """
    folder = path if path.is_dir() else path.parent
    nbytes = 0
    for file in folder.rglob("*"):
        if "earlier" in file.relative_to(folder).parts or not _is_regular(file):
            continue
        if file.name in ("capture.json", "rank.json", "end.json"):
            continue
        stat = file.lstat()
        nbytes += max(min(stat.st_size, stat.st_blocks * 512) - _header_nbytes(file), 0)
    return nbytes


def _is_regular(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _header_nbytes(file: Path) -> int:
    from tensorprobe.tensors.opening import open_file

    if file.suffix != ".safetensors":
        return 0
    with open_file(file) as shard:
        return 8 + int.from_bytes(shard.read(8), "little")


def _write_call(call: Call) -> None:
    _write(describe(call))
    if call.tensors:
        _write_table(_TENSOR_COLUMNS, [tensor_row(call, record) for record in call.tensors])
    _write([""])


def _write_gaps(gaps: Sequence[Gap]) -> None:
    rows = [(str(gap.step), str(gap.rank), gap.name, gap.reason) for gap in gaps]
    _write_table((">step", ">rank", "name", "reason"), rows)


def _write(lines: Iterator[str] | Sequence[str]) -> None:
    say(*lines)


def _write_table(columns: Row, rows: Sequence[Row]) -> None:
    """A table: on a terminal it fits the window, elsewhere every row is one whole line."""
    titles = tuple(column.removeprefix(">") for column in columns)
    right = [column.startswith(">") for column in columns]
    rows = [tuple(printable(cell[:_MAX_CELL]) for cell in row) for row in rows]
    if sys.stdout.isatty():
        _write_terminal_table(titles, right, rows)
        return
    widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = zip(row, widths, right, strict=True)
        texts = [cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in cells]
        _write(["  ".join(texts).rstrip()])


def _write_terminal_table(titles: Row, right: list[bool], rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, flush in zip(titles, right, strict=True):
        table.add_column(title, justify="right" if flush else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
