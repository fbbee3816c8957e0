"""`tensorprobe repro`: a folder with a script and its tensors that show one call alone."""

from __future__ import annotations

import argparse

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.terminal import say, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", metavar="CAPTURE", help="a run, a rank or a step of it")
    parser.add_argument("call", metavar="CALL", help="the call's name, as `show` prints it")
    parser.add_argument(
        "-o", "--output", dest="path", metavar="DIR", required=True, help="folder to write"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the call of this step")
    parser.add_argument("--rank", type=int, metavar="N", help="the call of this rank")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose operators and modules may be called, or a Python file that "
        "registers one; the file goes into the folder",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tensorprobe.replay.repro import repro

    folder = repro(
        args.capture,
        args.call,
        args.path,
        step=args.step,
        rank=args.rank,
        imports=args.imports,
        log=_tell,
    )
    script = folder / "repro.py"
    if args.json:
        say_json({"format": 1, "folder": str(folder), "script": str(script)})
    else:
        say(f"wrote {folder}: python {script} --device cpu")
    return 0


def _tell(line: str) -> None:
    warn(f"tensorprobe repro: {line}")
