"""`tensorprobe ranks`: what the ranks of one run say without a reference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tensorprobe.terminal import busy, say

_EPILOG = """\
example:
  tensorprobe ranks runs/a -o report

Holds the ranks of a run against each other, and names the first NaN of all. Reads what was
recorded, natively or by msprobe or ptdbg_ascend. The exit status is 3 if ranks do not agree
where they should, hung, or a call makes NaN or infinity, else 0. Of a run of which only one
rank was recorded the first NaN alone is told, and the status is 2 where there is none, unless
`--only nonfinite` asks for no more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("capture", metavar="RUN", help="a run, or a dump of msprobe or ptdbg")
    parser.add_argument("-o", "--output", metavar="OUT", help="folder for ranks.json and its page")
    parser.add_argument("--json", action="store_true", help="print ranks.json, not lines")
    parser.add_argument(
        "--only", choices=["nonfinite"], help="only the first NaN: one rank is enough for that"
    )


def run(args: argparse.Namespace) -> int:
    from tensorprobe.comparing.inside_run import look_inside
    from tensorprobe.overflow.across_ranks import FirstNonfinite, find_first, has_statistics
    from tensorprobe.report.documents import write_document
    from tensorprobe.report.ranks_file import as_json, inside_lines, lines, save
    from tensorprobe.store.loading import load
    from tensorprobe.store.outputs import check_output

    if args.output is not None:  # before the work, not after it
        check_output(Path(args.output), Path(args.capture))
    with busy(f"reading {args.capture}"):
        capture = load(args.capture)
        several = len(capture.ranks) > 1
        inside = look_inside(capture) if several and args.only is None else None
        if inside is not None and not has_statistics(capture):
            found = FirstNonfinite(notes=["no statistics were kept: NaN is not seen"])
        else:
            found = find_first(capture)
    if args.json:
        say(*json.dumps(as_json(found, capture, inside), indent=1, allow_nan=False).split("\n"))
    else:
        if inside is not None:
            say(*inside_lines(inside, capture))
        say(*lines(found, capture))
        if args.only is None and not several:
            say(f"only rank {capture.ranks[0]} is in '{args.capture}': {_ALONE}")
    if args.output is not None:
        path = save(found, capture, Path(args.output), inside)
        page = write_document("ranks", path.parent)
        if not args.json:
            say("", f"written: {path}, {page}")
    if found.first or (inside is not None and inside.findings):
        return 3
    return 2 if args.only is None and not several else 0


_ALONE = (
    "ranks were not held against each other. Give the folder with all of them; "
    "for the first NaN alone: --only nonfinite"
)
