"""`tensorprobe show`: the calls of a capture as a table, or everything about some of them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tensorprobe.records import Call, Calls, Capture, TensorRecord

Row = tuple[str, ...]
# Indices and counts are flush right, all else flush left.
_CALL_COLUMNS = (">index", ">step", ">rank", "name", "module", "op", "input", "output", "status")
_TENSOR_COLUMNS = (
    "tensor", "dtype", "shape", ">min", ">max", ">mean", ">norm", ">nan", ">inf", ">zero", "kept",
)  # fmt: skip


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


def run(args: argparse.Namespace) -> int:
    from tensorprobe.errors import BadUsage
    from tensorprobe.store.loading import load

    if args.limit < 1 or args.offset < 0:
        raise BadUsage("--limit must be at least 1 and --offset at least 0")
    capture = load(args.capture)
    calls = capture.calls(
        step=args.step,
        rank=args.rank,
        name=args.name,
        module=args.module,
        op=args.op,
        direction=args.direction,
    )
    if args.call is not None:
        calls = find_calls(capture, calls, args.call)
    else:
        _write(header(capture))
    if args.gaps:
        _write_gaps(capture)
        return 0
    page = calls[args.offset : args.offset + args.limit]
    if args.call is not None:
        for call in page:
            _write_call(call)
    elif calls:
        _write_table(_CALL_COLUMNS, [call_row(call) for call in page])
    else:
        _write(nothing_found(capture))
    left = len(calls) - args.offset - len(page)
    if left > 0:
        _write([f"{left} more: --offset {args.offset + len(page)}"])
    return 0


def header(capture: Capture) -> list[str]:
    """What the capture is, in a few lines."""
    facts = [
        capture.layout,
        _numbers("step", capture.steps),
        _numbers("rank", capture.ranks),
        _count(len(capture.calls), "call"),
        _count(len(capture.gaps), "gap"),
        _size(_nbytes_recorded(capture.path)),
    ]
    lines = [f"{capture.path}: {', '.join(facts)}"]
    if begun := len(capture.begun):
        lines.append(f"{_count(begun, 'call')} begun, values missing")
    if unfinished := capture.facts.get("unfinished"):
        lines.append(f"not closed: {', '.join(unfinished)}")
    return [*lines, ""]


def nothing_found(capture: Capture) -> list[str]:
    """No call passes the filters: which values each of them could have had."""
    prefixes = dict.fromkeys(call.name.partition(".")[0] for call in capture.calls)
    ops = dict.fromkeys(call.op for call in capture.calls)
    modules = dict.fromkeys(call.module for call in capture.calls if call.module)
    directions = dict.fromkeys(call.direction for call in capture.calls)
    there: dict[str, list[str]] = {
        "--step": [str(step) for step in capture.steps],
        "--rank": [str(rank) for rank in capture.ranks],
        "--direction": list(directions),
        "--name": [f"{prefix}.*" for prefix in prefixes],
        "--op": list(ops),
        "--module": list(modules),
    }
    width = max(map(len, there))
    lines = [f"  {option:<{width}}  {_some(values)}" for option, values in there.items() if values]
    return ["no call passes these filters. There is:", *lines]


def _some(values: Sequence[str], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more


def find_calls(capture: Capture, calls: Calls, wanted: str) -> Calls:
    """The calls that a name, its beginning, a pattern or a tensor's name stands for."""
    from tensorprobe.operators import native_name
    from tensorprobe.records import Calls, matches_name, no_such_call

    tests: tuple[Callable[[str, str], bool], ...] = (
        lambda name, want: name == want,
        matches_name,
        lambda name, want: name.startswith(want),
        lambda name, want: want.startswith(name + "."),
    )
    for spelling in (str, native_name):  # as it is; then with Tensor.__add__ for Tensor.add
        want = spelling(wanted)
        for test in tests:
            if found := [call for call in calls if test(spelling(call.name), want)]:
                return Calls(found)
    raise no_such_call(capture, wanted, calls)


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
    parts.append(("status", f"{call.status}: {call.error}" if call.error else call.status))
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
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        return all(_is_plain(part) for part in value.values())
    return value is None or isinstance(value, bool | int | float | complex | str)


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
        if "earlier" in file.relative_to(folder).parts or not file.is_file():
            continue
        if file.name in ("capture.json", "rank.json"):
            continue
        stat = file.stat()
        nbytes += max(min(stat.st_size, stat.st_blocks * 512) - _header_nbytes(file), 0)
    return nbytes


def _header_nbytes(file: Path) -> int:
    if file.suffix != ".safetensors":
        return 0
    with file.open("rb") as shard:
        return 8 + int.from_bytes(shard.read(8), "little")


def _write_call(call: Call) -> None:
    _write(describe(call))
    if call.tensors:
        _write_table(_TENSOR_COLUMNS, [tensor_row(call, record) for record in call.tensors])
    _write([""])


def _write_gaps(capture: Capture) -> None:
    rows = [(str(gap.step), str(gap.rank), gap.name, gap.reason) for gap in capture.gaps]
    _write_table((">step", ">rank", "name", "reason"), rows)


def _write(lines: Iterator[str] | Sequence[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _write_table(columns: Row, rows: Sequence[Row]) -> None:
    """A table: on a terminal it fits the window, elsewhere every row is one whole line."""
    titles = tuple(column.removeprefix(">") for column in columns)
    right = [column.startswith(">") for column in columns]
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
