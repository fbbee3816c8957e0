"""The words of msprobe's command line, handed on to compare and check; others say what to type."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorprobe._version import __version__
from tensorprobe.errors import BadUsage, TensorprobeError
from tensorprobe.peers.msprobe.msprobe_packages import VERSION
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named
from tensorprobe.terminal import say, warn

# Verbs without a counterpart under msprobe's name, with what to type.
_GRAPH = "tensorprobe compare A B -o OUT: its report.html has the model as a graph"
INSTEAD = {
    "code_mapping": "msprobe itself: it is for MindSpore",
    "api_precision_compare": "tensorprobe check DUMP --device D --against OTHER -o OUT",
    "data2db": "tensorprobe show DUMP",
    "graph": _GRAPH,
    "graph_visualize": _GRAPH,
    "install_deps": "nothing: tensorprobe needs no further parts",
    "merge_result": "tensorprobe compare A B -o OUT: all ranks are in one report",
    "offline_dump": "tensorprobe ascend --help",
    "op_generate": "tensorprobe repro DUMP CALL -o DIR: a script and its tensors",
    "parse": "tensorprobe convert DUMP --to native -o OUT, or tensorprobe ascend --help",
}  # fmt: skip
# Options of `compare` that have an effect on nothing here, or that another command has.
NEEDLESS: dict[tuple[str, ...], str] = {
    ("-f", "-fm", "--fuzzy_match"): "always: calls are aligned as a diff does",
    ("-da", "--diff_analyze"): "always: the verdict names the first culprit",
    ("-tensor_log", "--is_print_compare_log"): "nothing to print: the table has all of it",
    ("-s", "--stack_mode"): "always, where the dump has stacks",
    ("-c", "--compare_only"): "always: the table, and the verdict",
    ("-hl", "--highlight"): "always: a workbook has colours",
}
ELSEWHERE: dict[tuple[str, ...], str] = {
    ("-am", "--api_mapping"): "it is for MindSpore; calls are aligned by order, or by -dm FILE",
    ("--config",): "tensors are compared as they are; to multiply them first, load both in Python",
    ("--consistent_check",): "use -lm FILE; weights that one side has merged have no counterpart",
    ("--backend",): "use -lm FILE; weights that one side has merged have no counterpart",
    **dict.fromkeys(
        (
            ("-fr", "--fusion_rule_file"),
            ("-qfr", "--quant_fusion_rule_file"),
            ("-cfr", "--close_fusion_rule_file"),
            ("--input_data",),
            ("--input_shape",),
            ("--output_size",),
            ("--dym_shape_range",),
            ("-ofs", "--onnx_fusion_switch"),
        ),
        "it is for offline models; use tensorprobe ascend --help",
    ),
}
CHECKS = {
    "acc_check": "each API of a dump alone: tensorprobe check",
    "run_ut": "the same by its name of 2024",
    "multi_acc_check": "the same in several processes: -n",
    "multi_run_ut": "the same by its name of 2024",
    "run_overflow_check": "the same: an overflow that the reference has too is no fault",
}
OVERFLOWS = {
    "overflow_check": "the first call of all ranks that made NaN or infinity: tensorprobe ranks",
    "nan_analyze": "the same by its name of 2025",
}
CONFIG_CHECKS = {
    "config_check": "`-c` of two packages: tensorprobe env compare; of two checkpoints: "
    "tensorprobe checkpoints",
}
# Its other options.
_PACK = "tensorprobe env collect -o FILE, or tp.env(FILE) in the program"
_LOGS = "tensorprobe env compare A B, of recordings or of files that tp.env wrote"
CONFIG_INSTEAD: dict[tuple[str, ...], str] = {
    ("-d", "--dump"): _PACK,
    ("-vc", "--verl-compare"): _LOGS,
    ("-vv", "--verl-verify"): _LOGS,
    ("-sc", "--slime-compare"): _LOGS,
}
MAPPINGS: dict[tuple[str, ...], str] = {
    ("-dm", "--data_mapping"): "which tensors are the same on both sides",
    ("-cm", "--cell_mapping"): "which modules are the same on both sides",
    ("-lm", "--layer_mapping"): "which layers are the same on both sides",
}


_MAPPING_NAMES = tuple(names[-1].removeprefix("--") for names in MAPPINGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0, 1, 2 and 3 as for `tensorprobe`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("--framework="):
        words = [*words[0].split("=", 1), *words[1:]]
    if words[:1] in (["-f"], ["--framework"]):  # which earlier releases ask for
        if words[1:2] != ["pytorch"]:
            warn("msprobe -f: only pytorch is supported")
            return 2
        words = words[2:]
    verb = words[0] if words else "--help"
    if verb in INSTEAD:
        warn(f"msprobe {verb} is not supported; use {INSTEAD[verb]}")
        return 2
    parser = command_line()
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


def command_line() -> argparse.ArgumentParser:
    """The verbs that are here, with their options."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorprobe.msprobe",
        description="msprobe's words for tensorprobe's verbs.",
        epilog=f"Not here, with what to use: {', '.join(sorted(INSTEAD))}",
    )
    version = f"tensorprobe {__version__}, with the words of msprobe {VERSION}"
    parser.add_argument("-V", "--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    _add_compare(verbs.add_parser("compare", help="two dumps, their tables as msprobe writes them"))
    for name, text in CHECKS.items():
        _add_check(verbs.add_parser(name, help=text))
    for name, text in OVERFLOWS.items():
        _add_overflow(verbs.add_parser(name, help=text))
    for name, text in CONFIG_CHECKS.items():
        _add_config_check(verbs.add_parser(name, help=text))
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-tp", "--target_path", metavar="DUMP", help="the dump in question")
    add("-gp", "--golden_path", metavar="DUMP", help="the dump that is trusted")
    add("-i", "--input_path", metavar="FILE", help="a JSON file with npu_path and bench_path")
    add("-o", "--output_path", nargs="?", const="./output", default="./output", metavar="OUT",
        help="folder for the table")  # fmt: skip
    add("--xlsx", action="store_true", help="a workbook, not a csv")
    add(
        "-m", "--mode", default="auto", metavar="MODE", help="auto; other dumps: tensorprobe ascend"
    )
    add("--rank", type=int, metavar="N", help="this rank only")
    add("--step", type=int, metavar="N", help="this step only")
    for names, text in MAPPINGS.items():
        add(*names, nargs="?", const="", metavar="FILE", help=text)
    for names, text in NEEDLESS.items():
        add(*names, action="store_true", help=text)
    for names, text in ELSEWHERE.items():
        add(*names, nargs="?", const="", metavar="FILE", dest=names[-1], help=f"refused: {text}")
    parser.set_defaults(run=_compare)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-api_info", "--api_info_file", required=True, metavar="DUMP", help="a dump.json")
    add("-o", "--out_path", default="./", metavar="OUT", help="folder for the tables")
    add("-d", "--device", nargs="*", default=[], metavar="ID", help="the device's number")
    add("-n", "--num_splits", type=int, default=1, metavar="N", help="processes")
    add("-config", "--config_path", metavar="FILE", help="white_list and black_list")
    add("-csv_path", "--result_csv_path", metavar="FILE",
        help="refused: a check goes on by itself with the same -o")  # fmt: skip
    add("-save_error_data", action="store_true", help="not needed: tensorprobe repro DUMP CALL")
    add("-real_data_path", metavar="DIR", help="not needed: tensors beside the dump are used")
    add("-j", "--jit_compile", action="store_true", help="of no consequence")
    add("-f", "--filter_api", action="store_true", help="of no consequence: each API is run once")
    parser.set_defaults(run=_check)


def _add_overflow(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input_path", required=True, metavar="DUMP", help="a dump: a run, or a step of it")
    add("-o", "--output_path", default="./output", metavar="OUT", help="folder for the result")
    parser.set_defaults(run=_overflow)


def _add_config_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-c", "--compare", nargs=2, metavar="FILE_OR_DIR", help="two packages, or two checkpoints")
    add("-o", "--output", metavar="FILE", help="a JSON file that is not there yet")
    for names, text in CONFIG_INSTEAD.items():
        add(*names, nargs="*", metavar="FILE", dest=names[-1], help=f"refused: use {text}")
    parser.set_defaults(run=_config_check)


def _config_check(args: argparse.Namespace) -> int:
    for names, text in CONFIG_INSTEAD.items():
        if getattr(args, names[-1]) is not None:
            raise BadUsage(f"{names[0]} is not supported; use {text}")
    if args.compare is None:
        raise BadUsage("give two packages or two checkpoints: -c A B")
    actual, expected = map(Path, args.compare)
    are_packages = args.compare[0].endswith(".zip")
    default = "./config_check_result.json" if are_packages else "./ckpt_similarity.json"
    output = Path(args.output or default)
    if output.exists():
        raise BadUsage(f"'{output}' is there already: -o takes the name of a new file")
    if are_packages:
        from tensorprobe.environment import environment_comparison as environments

        found = environments.compare_environments(actual, expected)
        say(*environments.lines(found))
        text, is_match = environments.json_text(found), found.verdict == "match"
    else:
        from tensorprobe.checkpoints import checkpoint_comparison as checkpoints
        from tensorprobe.peers.msprobe.msprobe_similarity import similarity

        weights = checkpoints.compare_checkpoints(actual, expected, only="weights")
        say(*checkpoints.lines(weights))
        text = json.dumps(similarity(weights), indent=4)
        is_match = weights.verdict == "match"
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text + "\n")
    say("", f"written: {output}")
    return 0 if is_match else 3


def _compare(args: argparse.Namespace) -> int:
    from tensorprobe.peers.msprobe.msprobe_compare import compare, compare_distributed

    for names, text in ELSEWHERE.items():
        if getattr(args, names[-1]) is not None:
            raise BadUsage(f"{names[-1]} is not supported: {text}")
    if args.mode != "auto":
        raise BadUsage(f"-m {args.mode} is not supported: for such dumps use tensorprobe ascend")
    if args.input_path:
        param = _read(args.input_path)
    elif args.target_path and args.golden_path:
        param = {"npu_path": args.target_path, "bench_path": args.golden_path}
    else:
        raise BadUsage("give both dumps: -tp DUMP -gp DUMP")
    mappings = {name: getattr(args, name) for name in _MAPPING_NAMES}
    more: dict[str, Any] = {name: value for name, value in mappings.items() if value}
    actual, expected = param.get("npu_path"), param.get("bench_path")
    chosen = {"rank": args.rank, "step": args.step}
    if args.rank is None and _has_ranks(actual) and _has_ranks(expected):
        found = compare_distributed(
            str(actual), str(expected), args.output_path, xlsx=args.xlsx, step=args.step, **more
        )
    else:
        found = [compare(param, args.output_path, xlsx=args.xlsx, **chosen, **more)]
    verdicts = {comparison.verdict.verdict for comparison in found}
    return 3 if "diverged" in verdicts else (1 if "incomparable" in verdicts else 0)


def _overflow(args: argparse.Namespace) -> int:
    from tensorprobe.overflow.across_ranks import find_first
    from tensorprobe.peers.msprobe.msprobe_anomalies import write_anomalies
    from tensorprobe.report.ranks_file import lines, save
    from tensorprobe.store.loading import load
    from tensorprobe.store.outputs import check_output

    output = Path(args.output_path)
    check_output(output, Path(args.input_path))
    capture = load(args.input_path)
    found = find_first(capture)
    say(*lines(found, capture))
    if not found.first:
        return 0
    paths = save(found, capture, output), write_anomalies(found, capture, output)
    say("", f"written: {', '.join(str(path) for path in paths)}")
    return 3


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
    from tensorprobe.report.check_lines import lines

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
    say(*lines(checked))
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
