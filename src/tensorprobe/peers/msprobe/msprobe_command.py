"""The words of msprobe's command line, handed on to compare and check; others say what to type."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named
from tensorprobe.terminal import say, warn

# Verbs without a counterpart under msprobe's name, with what to type.
_INSTEAD = {
    "api_precision_compare": "tensorprobe check CAPTURE --device D --against OTHER -o OUT",
    "config_check": "tensorprobe compare A B: it names versions and arguments that differ",
    "data2db": "tensorprobe show CAPTURE",
    "graph_visualize": "tensorprobe show CAPTURE, or tensorprobe compare A B -o OUT",
    "install_deps": "nothing: tensorprobe needs no further parts",
    "merge_result": "tensorprobe compare A B -o OUT: all ranks are in one report",
    "offline_dump": "tensorprobe ascend --help",
    "overflow_check": "tensorprobe run --guard SCRIPT, or task overflow_check while it runs",
    "parse": "tensorprobe convert CAPTURE --to native, or tensorprobe ascend --help",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0, 1, 2 and 3 as for `tensorprobe`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["-f"]:  # the framework, which earlier releases ask for
        if words[1:2] != ["pytorch"]:
            warn("msprobe -f: only pytorch is supported")
            return 2
        words = words[2:]
    verb = words[0] if words else "--help"
    if verb in _INSTEAD:
        warn(f"msprobe {verb} is not supported; use {_INSTEAD[verb]}")
        return 2
    parser = _parser()
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return 2
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except BadUsage as error:
        warn(f"msprobe {args.verb}: {error}")
        return 2
    except TensorprobeError as error:
        warn(f"msprobe {args.verb}: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tensorprobe.msprobe",
        description="msprobe's words for tensorprobe's verbs.",
        epilog=f"Not here, with what to use: {', '.join(sorted(_INSTEAD))}",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    _add_compare(verbs.add_parser("compare", help="two dumps, their tables as msprobe writes them"))
    for name in ("acc_check", "run_ut", "multi_acc_check", "multi_run_ut"):
        _add_check(verbs.add_parser(name, help="each API of a dump alone: tensorprobe check"))
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-tp", "--target_path", metavar="DUMP", help="the dump in question")
    add("-gp", "--golden_path", metavar="DUMP", help="the dump that is trusted")
    add("-i", "--input_path", metavar="FILE", help="a JSON file with npu_path and bench_path")
    add("-o", "--output_path", default="./output", metavar="OUT")
    add("--xlsx", action="store_true", help="a workbook, not a csv")
    for name in ("-dm", "-cm", "-lm"):
        add(name, nargs="?", const="", metavar="FILE", help="what is the same on both sides")
    for name in ("-fm", "-s", "-c", "-da", "-tensor_log"):
        add(name, action="store_true", help="done always, or of no consequence")
    parser.set_defaults(run=_compare)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-api_info", "--api_info_file", required=True, metavar="DUMP", help="a dump.json")
    add("-o", "--out_path", default="./", metavar="OUT")
    add("-d", "--device", nargs="*", default=[], metavar="ID", help="the device's number")
    add("-n", "--num_splits", type=int, default=1, metavar="N", help="processes")
    add("-config", "--config_path", metavar="FILE", help="white_list and black_list")
    add("-csv_path", "--result_csv_path", metavar="FILE", help="go on with an earlier check")
    for name in ("-save_error_data", "-j", "-f"):
        add(name, action="store_true", help="done always, or of no consequence")
    parser.set_defaults(run=_check)


def _compare(args: argparse.Namespace) -> int:
    from tensorprobe.peers.msprobe.msprobe_compare import compare, compare_distributed

    if args.input_path:
        param = _read(args.input_path)
    elif args.target_path and args.golden_path:
        param = {"npu_path": args.target_path, "bench_path": args.golden_path}
    else:
        raise BadUsage("give both dumps: -tp DUMP -gp DUMP")
    mappings = {"data_mapping": args.dm, "cell_mapping": args.cm, "layer_mapping": args.lm}
    more = {name: value for name, value in mappings.items() if value}
    actual, expected = param.get("npu_path"), param.get("bench_path")
    if _has_ranks(actual) and _has_ranks(expected):
        found = compare_distributed(
            str(actual), str(expected), args.output_path, xlsx=args.xlsx, **more
        )
    else:
        found = [compare(param, args.output_path, xlsx=args.xlsx, **more)]
    verdicts = {comparison.verdict.verdict for comparison in found}
    return 3 if "diverged" in verdicts else (1 if "incomparable" in verdicts else 0)


def _read(path: str) -> dict[str, Any]:
    try:
        content = read_json(open_named(Path(path)), Path(path))
    except (OSError, ValueError) as error:
        raise BadUsage(f"-i {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BadUsage(f"-i {path}: expected an object with npu_path and bench_path")
    return content


def _has_ranks(path: object) -> bool:
    if not isinstance(path, str) or not Path(path).is_dir():
        return False
    return len(list(Path(path).glob("rank*"))) > 1


def _check(args: argparse.Namespace) -> int:
    from tensorprobe.checking.run import check

    if args.result_csv_path:
        raise BadUsage("-csv_path: a check goes on by itself with the same -o; leave it out")
    lists = _lists(args.config_path)
    checked = check(
        args.api_info_file,
        args.out_path,
        device=_device(args.device),
        only=lists.get("white_list") or (),
        skip=lists.get("black_list") or (),
        jobs=args.num_splits,
        peer_tables=True,
    )
    say(*f"{checked}".split("\n"))
    if checked.is_idle:
        return 1
    return 0 if checked.passed else 3


def _lists(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    content = _read(path)
    section = content.get("acc_check") or content.get("run_ut") or {}
    return section if isinstance(section, dict) else {}


def _device(numbers: Sequence[str]) -> str:
    """msprobe asks for a number and takes the accelerator that is there; here the CPU will do."""
    from tensorprobe.devices import accelerator

    found = accelerator()
    if found is None:
        return "cpu"
    if not numbers:
        return found.type
    if len(numbers) > 1:
        raise BadUsage(f"-d {' '.join(numbers)}: one device a check; start one for each")
    return f"{found.type}:{numbers[0]}"
