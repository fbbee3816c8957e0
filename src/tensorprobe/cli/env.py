"""`tensorprobe env`: the environment of a run in a file, and what two of them differ by."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from pathlib import Path

from tensorprobe.errors import BadUsage
from tensorprobe.terminal import say

_EPILOG = """\
examples:
  tensorprobe env collect -o here.json
  tensorprobe env compare runs/npu runs/gpu

In a program: tp.env("here.json", model=model). Exit status of compare: 0 nothing that could change
numbers differs, 3 something does, 1 a file cannot be read, 2 wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="env_verb", metavar="VERB", required=True)
    collect = verbs.add_parser("collect", help="write down the environment of this machine")
    collect.add_argument("-o", "--output", metavar="FILE", help="the file, such as env.json")
    collect.add_argument("--json", action="store_true", help="print it")
    compare = verbs.add_parser("compare", help="what differs, what can change numbers first")
    compare.add_argument("actual", metavar="ACTUAL", help="a capture, a file, an msprobe package")
    compare.add_argument("expected", metavar="EXPECTED", help="the one that is trusted")
    compare.add_argument(
        "-o", "--output", metavar="FILE", help="write the differences as JSON, and a page"
    )
    compare.add_argument("--json", action="store_true", help="print them as JSON")


def run(args: argparse.Namespace) -> int:
    output = None if args.output is None else Path(args.output)
    if output is not None and output.is_dir():
        raise BadUsage(f"'{output}' is a folder; expected the name of a file")
    return _collect(args, output) if args.env_verb == "collect" else _compare(args, output)


def _collect(args: argparse.Namespace, output: Path | None) -> int:
    from tensorprobe.environment.collecting import collect, write_facts

    if output is None and not args.json:
        raise BadUsage("give a file to write to: -o FILE; or --json to print it")
    for vendor in ("torch", "torch_npu"):  # whose versions and flags are wanted; both may be absent
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            importlib.import_module(vendor)
    facts = collect()
    for name in ("hyperparameters", "program", "random", "command"):  # of this command
        facts.pop(name, None)
    if args.json:
        say(*json.dumps(facts, indent=1).split("\n"))
    if output is not None:
        write_facts(output, facts)
        if not args.json:
            torch = facts.get("torch", {}).get("version", "no torch")
            packages = len(facts.get("installed", ()))
            say(f"written: {output}: Python {facts['python']}, torch {torch}, {packages} packages")
    return 0


def _compare(args: argparse.Namespace, output: Path | None) -> int:
    from tensorprobe.environment.environment_comparison import (
        as_json,
        compare_environments,
        json_text,
        lines,
    )
    from tensorprobe.report.documents import write_sheet
    from tensorprobe.report.sheets import environments_sheet

    found = compare_environments(Path(args.actual), Path(args.expected))
    found_json = as_json(found)
    text = json_text(found)
    say(*(text.split("\n") if args.json else lines(found)))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        page = write_sheet(
            "env compare", output.with_suffix(".html"), environments_sheet(found_json)
        )
        if not args.json:
            say("", f"written: {output}, {page}")
    sys.stdout.flush()
    return 3 if found.verdict == "differ" else 0
