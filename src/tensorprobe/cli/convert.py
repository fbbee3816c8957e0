"""`tensorprobe convert`: a capture of any layout, written in another one."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.errors import BadUsage
from tensorprobe.store.loading import LAYOUTS
from tensorprobe.store.outputs import check_output
from tensorprobe.terminal import busy, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", metavar="CAPTURE", help="a run, a step or rank of one, a dump")
    parser.add_argument("--to", required=True, choices=tuple(LAYOUTS), help="the layout to write")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--compress", action="store_true", help="with --to native: tensors in fewer bytes"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tensorprobe.store import native
    from tensorprobe.store.loading import layout, load

    output = Path(args.output)
    if args.compress and args.to != "native":
        raise BadUsage(f"--compress needs --to native: tools for {args.to} could not read it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BadUsage(f"'{output}' is there already: -o takes a new folder, or an empty one")
    with busy(f"reading {args.capture}"):
        capture = load(args.capture)
    check_output(output, capture.path)
    with busy(f"writing {len(capture.calls)} calls to {output}"):
        if args.compress:
            lost = native.write(capture, output, compress=True)
        else:
            lost = layout(args.to).write(capture, output)
    if args.json:
        found = {"format": 1, "output": str(output), "layout": args.to, "from": capture.layout}
        counts = {"calls": len(capture.calls), "gaps": len(capture.gaps)}
        say_json({**found, "counts": counts, "not_as_it_was": lost})
        return 0
    count = f"{len(capture.calls)} calls of {args.capture} ({capture.layout})"
    say(f"{count} are in {output} ({args.to}).")
    say(*(f"not as it was: {line}" for line in lost))
    if capture.gaps:
        say(f"{len(capture.gaps)} gaps: tensorprobe show {shlex.quote(args.capture)} --gaps")
    return 0
