"""`tensorprobe monitor`: what `run --monitor` and `tp.Monitor` have written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tensorprobe.errors import BadUsage
from tensorprobe.terminal import busy, say, warn

_EPILOG = """\
examples:
  tensorprobe run --monitor runs/a train.py      watch a training; alarms are said as they come
  tensorprobe monitor show runs/a                 alarms and curves, also while it runs
  tensorprobe monitor compare runs/a runs/b       the first step at which two trainings part
  tensorprobe monitor export runs/a --to csv -o tables

In a program: tp.Monitor("runs/a"). Exit status of show: 0 no alarms, 3 some. Of compare: 0 the
trends part nowhere beyond their noise, 3 they do, 1 a file cannot be read or nothing is in common,
2 wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="monitor_verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="alarms and curves of a training")
    show.add_argument("path", metavar="DIR", help="the folder of a monitor, or msprobe's output")
    show.add_argument("name", metavar="NAME", nargs="?", help="trends of this name: '*attn*'")
    show.add_argument("--limit", type=int, metavar="N", default=20, help="at most N of each (20)")
    show.add_argument("-o", "--output", metavar="OUT", help="folder for a page with the curves")
    show.add_argument("--json", action="store_true", help="print it as JSON, with all values")
    compare = verbs.add_parser("compare", help="where two trainings part")
    compare.add_argument("actual", metavar="ACTUAL", help="a monitor's folder, msprobe's output")
    compare.add_argument("expected", metavar="EXPECTED", help="the one that is trusted")
    compare.add_argument("-o", "--output", metavar="FILE", help="write trends.json, and a page")
    compare.add_argument("--json", action="store_true", help="print trends.json, not lines")
    export = verbs.add_parser("export", help="as CSV, Parquet or TensorBoard's files")
    export.add_argument("path", metavar="DIR", help="the folder of a monitor")
    export.add_argument("--to", required=True, choices=("csv", "parquet", "tensorboard"))
    export.add_argument("-o", "--output", metavar="OUT", required=True, help="a folder")
    export.add_argument("--json", action="store_true", help="print the names of the files as JSON")


def run(args: argparse.Namespace) -> int:
    if args.monitor_verb == "show":
        return _show(args)
    if args.monitor_verb == "compare":
        return _compare(args)
    return _export(args)


def _show(args: argparse.Namespace) -> int:
    from tensorprobe.monitoring.monitor_report import json_text, lines
    from tensorprobe.monitoring.series_reading import read_trends
    from tensorprobe.report.documents import write_sheet
    from tensorprobe.report.html import PAGE_FILE
    from tensorprobe.report.trend_curves import monitor_sheet
    from tensorprobe.store.outputs import check_output

    if args.limit < 1:
        raise BadUsage(f"--limit {args.limit}: expected a number from 1")
    if args.output is not None:  # before the work, not after it
        check_output(Path(args.output), Path(args.path))
    with busy(f"reading {args.path}"):
        ranks = read_trends(Path(args.path))
    if args.json:
        say(*json_text(ranks, args.name).split("\n"))
    else:
        say(*lines(ranks, args.name, args.limit))
    if args.output is not None:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        sheet = monitor_sheet(Path(args.path), args.name)
        page = write_sheet("monitor", folder / PAGE_FILE, sheet)
        if not args.json:
            say("", f"written: {page}")
    return 3 if any(rank.alarms for rank in ranks) else 0


def _compare(args: argparse.Namespace) -> int:
    from tensorprobe.monitoring.trend_comparison import compare_trends, json_text, lines
    from tensorprobe.report.documents import write_sheet
    from tensorprobe.report.trend_curves import trends_sheet

    output = None if args.output is None else Path(args.output)
    if output is not None and output.is_dir():
        raise BadUsage(f"'{output}' is a folder; expected the name of a file")
    if output is not None and output.suffix == ".html":
        raise BadUsage(
            f"'{output}': expected a name for the JSON, trends.json; the page is beside it"
        )
    with busy("comparing trends"):
        found = compare_trends(Path(args.actual), Path(args.expected))
    text = json_text(found)
    say(*(text.split("\n") if args.json else lines(found)))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        page = write_sheet("monitor compare", output.with_suffix(".html"), trends_sheet(found))
        if not args.json:
            say("", f"written: {output}, {page}")
    sys.stdout.flush()
    return 3 if found.verdict == "parted" else 0


def _export(args: argparse.Namespace) -> int:
    import json

    from tensorprobe.monitoring.exporting import export
    from tensorprobe.store.outputs import check_output

    output = Path(args.output)
    check_output(output)
    made = export(Path(args.path), args.to, output, warn)
    if args.json:
        say(json.dumps({"format": 1, "files": [str(path) for path in made]}))
    else:
        say(*(f"written: {path}" for path in made))
    return 0
