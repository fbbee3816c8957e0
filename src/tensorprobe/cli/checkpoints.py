"""`tensorprobe checkpoints`: what two checkpoints of any form differ by."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tensorprobe.terminal import say

_STATUS = {"match": 0, "rounding": 3, "differ": 3}
_EPILOG = """\
example:
  tensorprobe checkpoints runs/a/model.pt runs/b/iter_0001000 --only weights -o report

Reads files of torch.save and safetensors, folders of Hugging Face, torch.distributed.checkpoint,
Megatron and FSDP. Nothing in them is run. Exit status: 0 all is equal, 3 something differs, 1 a
file cannot be read, 2 wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("actual", metavar="ACTUAL", help="the checkpoint in question")
    parser.add_argument("expected", metavar="EXPECTED", help="the one that is trusted")
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="folder for checkpoints.json, and its page"
    )
    parser.add_argument("--json", action="store_true", help="print checkpoints.json, not lines")
    parser.add_argument(
        "--only", choices=("all", "weights", "optimizer"), default="all",
        help="weights and buffers only, or the state of the optimizer only",
    )  # fmt: skip
    parser.add_argument("--mapping", metavar="FILE", help="which names are the same")
    parser.add_argument(
        "--allow-rounding", action="store_true", help="exit 0 if rounding is all that differs"
    )
    for side in ("actual", "expected"):
        parser.add_argument(
            f"--{side}-layout", metavar="FILE",
            help=f"sizes of tp, pp and dp of {side} (default: layout.yaml in it)",
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from tensorprobe.checkpoints.checkpoint_comparison import (
        compare_checkpoints,
        json_text,
        lines,
        save,
    )
    from tensorprobe.comparing.measure import Done, TerminalProgress
    from tensorprobe.report.documents import write_document
    from tensorprobe.store.outputs import check_output

    actual, expected = Path(args.actual), Path(args.expected)
    if args.output is not None:  # before the work, not after it
        check_output(Path(args.output), actual, expected)
    bar = TerminalProgress(noun="tensors") if sys.stderr.isatty() else None
    try:
        found = compare_checkpoints(
            actual,
            expected,
            mapping=args.mapping,
            only=args.only,
            actual_layout=None if args.actual_layout is None else Path(args.actual_layout),
            expected_layout=None if args.expected_layout is None else Path(args.expected_layout),
            told=None if bar is None else lambda *done: bar(Done(*done)),
        )
    finally:
        if bar is not None:
            bar.stop()
    if args.json:
        say(*json_text(found).split("\n"))
    else:
        say(*lines(found))
    if args.output is not None:
        path = save(found, Path(args.output))
        page = write_document("checkpoints", path.parent)
        if not args.json:
            say("", f"written: {path}, {page}")
    if found.verdict == "rounding" and args.allow_rounding:
        return 0
    return _STATUS[found.verdict]
