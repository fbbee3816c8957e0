"""`tensorprobe ranks`: what the ranks of one run say without a reference; the first NaN of all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tensorprobe.terminal import say

_EPILOG = """\
example:
  tensorprobe ranks runs/a -o report

Reads what was recorded, natively or by msprobe or ptdbg_ascend, of one rank or of many. The exit
status is 3 if a call makes NaN or infinity, else 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("capture", metavar="RUN", help="a run, or a dump of msprobe or ptdbg")
    parser.add_argument("-o", "--output", metavar="OUT", help="folder for ranks.json")
    parser.add_argument("--json", action="store_true", help="print ranks.json, not lines")


def run(args: argparse.Namespace) -> int:
    from tensorprobe.overflow.across_ranks import find_first
    from tensorprobe.report.ranks_file import as_json, lines, save
    from tensorprobe.store.loading import load
    from tensorprobe.store.outputs import check_output

    if args.output is not None:  # before the work, not after it
        check_output(Path(args.output), Path(args.capture))
    capture = load(args.capture)
    found = find_first(capture)
    if args.json:
        say(*json.dumps(as_json(found, capture), indent=1, allow_nan=False).split("\n"))
    else:
        say(*lines(found, capture))
    if args.output is not None:
        path = save(found, capture, Path(args.output))
        if not args.json:
            say("", f"written: {path}")
    return 3 if found.first else 0
