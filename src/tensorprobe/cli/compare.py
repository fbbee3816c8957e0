"""`tensorprobe compare`: two captures, the call that made them differ, and the tables behind it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.cli.options import as_options, former_name
from tensorprobe.errors import BadUsage
from tensorprobe.report.columns import COLUMNS
from tensorprobe.terminal import printable, say

if TYPE_CHECKING:
    from tensorprobe.comparing.measure import Workers
    from tensorprobe.report.saving import Comparison

_STATUS = {"match": 0, "diverged": 3, "incomparable": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("actual", metavar="ACTUAL", help="the run in question")
    parser.add_argument("expected", metavar="EXPECTED", help="the run that is trusted")
    parser.add_argument("-o", "--output", metavar="OUT", help="folder for the report")
    parser.add_argument("--json", action="store_true", help="print verdict.json, not lines")
    parser.add_argument("--step", type=int, metavar="N", help="this step only")
    parser.add_argument("--rank", type=int, metavar="N", help="this rank only")
    parser.add_argument(
        "--noise", nargs="+", default=[], metavar="RUN",
        help="further runs of the expected side: what they differ by is noise",
    )  # fmt: skip
    parser.add_argument("--mapping", metavar="FILE", help="which calls or modules are the same")
    parser.add_argument(
        "--at", action="append", default=[], metavar="PLACE",
        help="chosen places only: outputs, gradients, modules, or a pattern; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--rows", metavar="HOW",
        help="with --at: which rows go together: auto, same, inputs, saved, sum, '[:, 1:] = [:]'",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=float, metavar="X",
        help="with --at: allow errors of this share of a tensor's size",
    )  # fmt: skip
    parser.add_argument(
        "--layout", metavar="FILE",
        help="layout.yaml of the run with several ranks, where the other is one process",
    )  # fmt: skip
    parser.add_argument(
        "--references", metavar="FILE", help="Python file with @tensorprobe.reference functions"
    )
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="PACKAGE",
        help="a package whose operators and modules may be called, or a Python file",
    )  # fmt: skip
    parser.add_argument(
        "--columns", choices=tuple(COLUMNS), default="native",
        help="columns of comparison.csv",
    )  # fmt: skip
    parser.add_argument("--xlsx", action="store_true", help="write comparison.xlsx too")
    parser.add_argument(
        "--model-explorer", action="store_true",
        help="write graph and errors for ai-edge-model-explorer too",
    )  # fmt: skip
    parser.add_argument(
        "-j", "--jobs", type=int, metavar="N", help="processes (default: one a core)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S",
        help="seconds for replaying suspects in float64; 0: none (default 120)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", metavar="E",
        help="ray: spread ranks over workers of Ray; ray://HOST:PORT: over those of a cluster",
    )  # fmt: skip
    former_name(parser, "--processes", "jobs", type=int)
    former_name(parser, "--replay-seconds", "timeout", type=float)


def run(args: argparse.Namespace) -> int:
    from tensorprobe.comparing.large_runs import is_streamed
    from tensorprobe.comparing.measure import workers_for

    for option, wanted in (("--xlsx", args.xlsx), ("--model-explorer", args.model_explorer)):
        if wanted and args.output is None:
            raise BadUsage(f"{option} needs a folder to write to: -o OUT")
    sources = (args.actual, args.expected)
    if args.engine is not None or is_streamed(sources, args.rank, args.jobs, bool(args.noise)):
        return _run(args, args.jobs, "ranks")
    # first of all: the rest is imported, and the captures are read, while they start
    with workers_for(sources, args.jobs) as workers:
        return _run(args, workers or 1, "calls")


def _run(args: argparse.Namespace, jobs: int | Workers | None, noun: str) -> int:
    from tensorprobe.comparing.comparison import compare_captures
    from tensorprobe.comparing.measure import TerminalProgress
    from tensorprobe.report.console import render
    from tensorprobe.report.saving import verdict_text, with_files
    from tensorprobe.store.outputs import check_output

    if args.output is not None:  # before the work, not after it
        check_output(Path(args.output), Path(args.actual), Path(args.expected))
    progress = None
    if sys.stderr.isatty():
        progress = TerminalProgress(noun=noun)
    try:
        compared = compare_captures(
            args.actual,
            args.expected,
            noise=args.noise,
            mapping=args.mapping,
            at=args.at,
            rows=args.rows,
            within=args.within,
            layout=args.layout,
            step=args.step,
            rank=args.rank,
            jobs=jobs,
            timeout=args.timeout,
            references=args.references,
            imports=args.imports,
            engine=args.engine,
            progress=progress,
        )
    finally:
        if progress is not None:
            progress.stop()
    comparison = with_files(compared)
    lines = as_options(render(comparison), args.option_names).split("\n")
    if args.json:
        say(*verdict_text(comparison.verdict).splitlines())
    elif sys.stdout.isatty():
        _say_in_colour(comparison, lines)
    else:
        say(*lines)
    if args.output is not None:
        paths = comparison.save(
            args.output,
            columns=args.columns,
            xlsx=args.xlsx,
            model_explorer=args.model_explorer,
        )
        if not args.json:
            say("", f"written: {', '.join(str(path) for path in paths)}")
    return _STATUS[comparison.verdict.verdict]


_STYLES = {"match": "bold green", "diverged": "bold red", "incomparable": "bold yellow"}


def _say_in_colour(comparison: Comparison, lines: list[str]) -> None:
    """The lines on a terminal, with the error along the run below the verdict."""
    from rich.console import Console
    from rich.text import Text

    from tensorprobe.report.along import sparkline

    console = Console(highlight=False, soft_wrap=True)
    first, *rest = map(printable, lines)
    console.print(Text(first, _STYLES[comparison.verdict.verdict]))
    if bars := sparkline(comparison, max(10, min(console.width - 8, 100))):
        console.print(Text(f"  error {bars}", "cyan"))
    for line in rest:
        is_culprit, is_next = line.startswith(">  "), line.startswith("  next: ")
        console.print(Text(line, "red" if is_culprit else "bold" if is_next else ""))
