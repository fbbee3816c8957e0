"""`tensorprobe check`: each recorded call alone, against a reference it can trust."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorprobe.cli.options import as_options
from tensorprobe.terminal import printable, say, warn

if TYPE_CHECKING:
    from tensorprobe.checking.row import Row
    from tensorprobe.checking.run import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", metavar="CAPTURE", help="a run, a rank or a step of it")
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu, cuda, npu, npu:1... (default cpu)"
    )
    parser.add_argument(
        "-o", "--output", dest="path", metavar="OUT", required=True, help="folder for the rows"
    )
    parser.add_argument(
        "--against",
        metavar="CAPTURE2",
        help="a benchmark device's capture, or the OUT of a check there: D may be as far off",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="calls, ops or modules"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="calls, ops or modules"
    )
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument(
        "-j", "--jobs", type=int, default=1, metavar="N", help="processes (default 1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds a call may take (120)"
    )
    parser.add_argument(
        "--all", action="store_true", dest="every", help="also calls that are alike, each one"
    )
    parser.add_argument(
        "--references",
        metavar="FILE",
        help="a Python file run first in every process: references for custom operators",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose operators and modules may be called, or a Python file",
    )
    parser.add_argument(
        "--peer-tables",
        action="store_true",
        help="also the tables of ptdbg_ascend's and msprobe's accuracy check",
    )
    parser.add_argument(
        "--sim-npu",
        action="store_true",
        help="with a simulated NPU and a stand-in torch_npu, where the hardware is missing",
    )
    parser.add_argument("--restart", action="store_true", help="forget what OUT holds")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="rows shown (20)")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.checking.run import check

    progress = _Progress()
    try:
        with progress:
            checked = check(
                args.capture,
                args.path,
                device=args.device,
                against=args.against,
                only=args.only,
                skip=args.skip,
                every=args.every,
                jobs=args.jobs,
                timeout=args.timeout,
                references=args.references,
                imports=args.imports,
                peer_tables=args.peer_tables,
                restart=args.restart,
                step=args.step,
                rank=args.rank,
                sim_npu=args.sim_npu,
                progress=progress.show,
            )
    except KeyboardInterrupt:
        warn(
            f"tensorprobe check: interrupted, {progress.done} of {progress.total or '?'} calls are "
            f"done and kept in '{args.path}'. The same command goes on from there"
        )
        return 1
    say(*(as_options(line, args.option_names) for line in describe(checked, args.limit)))
    if checked.is_idle:
        warn("tensorprobe check: nothing was checked, every call was skipped for the reasons above")
        return 1
    return 0 if checked.passed else 3


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def __enter__(self) -> _Progress:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("checking", total=None)
        return self

    def show(self, done: int, total: int, row: Row) -> None:
        self.done, self.total = done, total
        if self._bar is not None:
            from rich.markup import escape

            name = escape(printable(row.name))
            self._bar.update(self._task, completed=done, total=total, description=name)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(checked: Checked, limit: int) -> list[str]:
    """Failures first with the command for their repro, the worst of the rest, the counts."""
    counts = checked.counts
    lines = []
    bad = [row for row in checked.rows if row.verdict in ("fail", "crashed")]
    for row in bad[:limit]:
        lines += [f"{row.verdict:8} {_what(row)}", f"         {row.reason}"]
        lines.append(f"         {row.repro}")
    if len(bad) > limit:
        lines.append(f"         and {len(bad) - limit} more in {checked.path / 'check.json'}")
    lines += _wrong_recordings(checked, limit)
    lines += _skipped(checked, limit)
    lines += [f"note     {note}" for note in checked.notes]
    wrong = sum(bool(row.recorded) for row in checked.rows)
    lines.append(
        f"{counts['calls']} calls, {counts['checked']} different: {counts['pass']} pass"
        + (f" ({wrong} of them recorded wrong)" if wrong else "")
        + f", {counts['fail']} fail, {counts['crashed']} crashed, {counts['skipped']} skipped"
        f"; {checked.path / 'check.json'}"
    )
    return lines


def _wrong_recordings(checked: Checked, limit: int) -> Iterator[str]:
    """Calls that pass here and did not where they were recorded."""
    rows = [row for row in checked.rows if row.recorded]
    for row in rows[:limit]:
        yield f"recorded {_what(row)} passes here, but what was recorded is wrong"
        yield f"         {row.recorded}"
        yield f"         {row.repro}"
    if len(rows) > limit:
        yield f"         and {len(rows) - limit} more in {checked.path / 'check.json'}"


def _skipped(checked: Checked, limit: int) -> Iterator[str]:
    """One line a reason. What to do about one call alone is left out where there are several."""
    reasons: dict[str, list[Row]] = {}
    for row in checked.rows:
        if row.verdict == "skipped":
            first, _, _ = row.reason.removeprefix(row.name + " ").partition(". ")
            reasons.setdefault(first, []).append(row)
    for first, rows in list(reasons.items())[:limit]:
        if len({row.reason for row in rows}) == 1:
            first = rows[0].reason.removeprefix(rows[0].name + " ")
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"skipped  {rows[0].name}{more}: {first}"
    if len(reasons) > limit:
        yield f"skipped  for {len(reasons) - limit} more reasons: --limit shows more"


def _what(row: Row) -> str:
    more = f" and {row.alike} alike" if row.alike else ""
    where = f" in {row.module}" if row.module else ""
    kinds = f"{row.device_dtype} on {row.device} against {row.reference_dtype}"
    return f"{row.name}{more}{where} ({row.kind}, {kinds})"
