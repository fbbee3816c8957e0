"""`tensorprobe check`: each recorded call alone, against a reference it can trust."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.cli.options import add_json, as_options
from tensorprobe.terminal import printable, say, warn

if TYPE_CHECKING:
    from tensorprobe.checking.row import Row


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
    add_json(parser, "check.json")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.checking.run import check
    from tensorprobe.report.check_lines import lines

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
    if args.json:
        from tensorprobe.tensors.opening import open_named, read_text

        file = Path(args.path) / "check.json"
        say(*read_text(open_named(file), file).decode().splitlines())
    else:
        say(*(as_options(line, args.option_names) for line in lines(checked, args.limit)))
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
