"""`tensorprobe bisect`: the smallest set of ops which, run elsewhere, cures a program."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.cli.options import add_json
from tensorprobe.errors import BadUsage
from tensorprobe.store.frames import users_line
from tensorprobe.store.outputs import check_output
from tensorprobe.terminal import say, warn

if TYPE_CHECKING:
    from tensorprobe.rerouting.bisect import Bisected

_EPILOG = """\
examples:
  tensorprobe bisect -- train.py                         the script's own exit status is the check
  tensorprobe bisect --check "grep -q 'loss 0.69'" -- train.py --steps 3
  tensorprobe bisect --compile -- train.py               which stage and pass of torch.compile
  tensorprobe bisect --check 'python check.py' --to float64 -o runs/bisect -- -m mypackage.train

The check reads what the script printed on its standard input, and in the folder
$TENSORPROBE_PROBE_DIR (stdout, stderr). It is not run when the script itself failed.
The same command again goes on where it was interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tensorprobe bisect [options] -- script.py [arguments]"
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--check", metavar="CMD", help="passes when it exits 0 (default: the script's own status)"
    )
    parser.add_argument(
        "--to", metavar="TARGET", help="cpu, float32, float64, cpu:float64 (default: cpu; float64 "
        "for a script that computes on the CPU)"
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", default="runs/bisect", metavar="DIR", help="answers so far (%(default)s)"
    )
    parser.add_argument(
        "--apis", "--api", dest="apis", action="append", default=[], metavar="NAME,...",
        help="look among these only: *norm*, F.linear, encoder.layers.0",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="switch stages and passes of torch.compile off, "
        "not run calls elsewhere"
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds a run may take")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="runs that must all pass (1)"
    )
    parser.add_argument("--restart", action="store_true", help="forget the answers in DIR")
    add_json(parser, "bisect.json")
    group = parser.add_argument_group("options of run")
    group.add_argument("--sim-npu", action="store_true", help="with a simulated NPU")
    group.add_argument("--seed", metavar="N", help="seed every generator first")
    group.add_argument("--deterministic", action="store_true", help="deterministic algorithms")
    group.add_argument("--step-on", metavar="WHAT", help="what ends a step")
    group.add_argument("--load-start", metavar="DIR", help="begin as the run that saved it")


def run(args: argparse.Namespace) -> int:
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    _check(args, words)
    from tensorprobe.rerouting.bisect import Question, bisect
    from tensorprobe.rerouting.compile_bisect import bisect_compile

    question = Question(
        command=tuple(words),
        check=args.check,
        to=args.to,
        apis=tuple(name for text in args.apis for name in text.split(",") if name),
        run_options=tuple(_run_options(args)),
        repeat=args.repeat,
        compile=args.compile,
    )
    search = bisect_compile if args.compile else bisect
    try:
        found = search(
            question,
            Path(args.output),
            timeout_s=args.timeout,
            restart=args.restart,
            tell=warn,
        )
    except KeyboardInterrupt:
        warn(f"tensorprobe bisect: interrupted. The same command goes on from '{args.output}'")
        return 130
    if args.json:
        from tensorprobe.tensors.opening import open_named, read_text

        file = found.folder / "bisect.json"
        say(*read_text(open_named(file), file).decode().splitlines())
    else:
        say(*(describe_compile(found) if args.compile else describe(found)))
    return {"found": 3, "passes": 0, "no cure": 1}[found.verdict]


def _check(args: argparse.Namespace, words: list[str]) -> None:
    if not words:
        raise BadUsage("no script given. For example: tensorprobe bisect --check CMD -- train.py")
    if words[0] == "-m" and len(words) == 1:
        raise BadUsage("-m without a module. For example: tensorprobe bisect -- -m mypackage.train")
    if words[0] != "-m" and words[0].startswith("-"):
        raise BadUsage(f"unknown option {words[0]}: options come first, then -- and the script")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise BadUsage(f"no script at '{words[0]}'. To run a module: -- -m {words[0]}")
    if args.compile and (args.to or args.apis):
        raise BadUsage(
            "--compile switches passes of torch.compile off; --to and --apis are for calls that "
            "run elsewhere. Leave them out"
        )
    if args.compile and args.sim_npu:
        raise BadUsage("--compile does not go with --sim-npu, on which nothing is compiled")
    if args.repeat < 1:
        raise BadUsage(f"--repeat {args.repeat}: expected a number from 1")
    check_output(Path(args.output))


def _run_options(args: argparse.Namespace) -> list[str]:
    options = []
    if args.sim_npu:
        options.append("--sim-npu")
    if args.deterministic:
        options.append("--deterministic")
    for name in ("seed", "step_on", "load_start"):
        value = getattr(args, name)
        if value is not None:
            options += [f"--{name.replace('_', '-')}", value]
    return options


def describe(found: Bisected) -> list[str]:
    """What a person reads in the end."""
    probes = f"{found.n_probes} probe{'' if found.n_probes == 1 else 's'}"
    state = f"{probes}; {found.folder / 'bisect.json'}"
    if found.verdict == "passes":
        return [f"nothing to find: the check passes as it is. {state}"]
    from tensorprobe.rerouting.bisect import phrase

    there = phrase(found.to)
    if found.verdict == "no cure":
        last = found.folder / "probes" / f"{found.n_probes:03}"
        return [
            f"no set of ops cures it: the check fails with all of them {there}, too. "
            f"What that run said is in {shlex.quote(str(last))}. {state}",
            *found.notes,
        ]
    lines = [f"the check fails; it passes with {_these(found)} {there}:"]
    for culprit in found.culprits:
        where = f" in {culprit['module']}" if culprit["module"] else ""
        line = f", {users_line(culprit['stack'])}" if culprit["stack"] else ""
        lines.append(f"  {culprit['name']}{where}{line}")
    lines += found.notes
    lines += [
        f"the smallest set: leaving out any of it fails. Of {found.n_apis} APIs and "
        f"{found.n_calls} calls; {state}",
        "next:",
        *(f"  {command}" for command in found.commands),
    ]
    return lines


def describe_compile(found: Bisected) -> list[str]:
    """The same where stages and passes of torch.compile were switched off."""
    probes = f"{found.n_probes} probe{'' if found.n_probes == 1 else 's'}"
    state = f"{probes}; {found.folder / 'bisect.json'}"
    if found.verdict == "passes":
        return [f"nothing to find: the check passes as it is. {state}"]
    if found.verdict == "no cure":
        return [
            f"torch.compile is not the cause: the check fails without it, too. {state}",
            *found.notes,
        ]
    culprit = found.culprits[0]
    lines = [f"the check fails; it passes without this part of torch.compile: {culprit['name']}"]
    if culprit["op"]:
        lines.append(f"  what it was applied to: {culprit['op']}")
    lines += found.notes
    return [*lines, state, "next:", *(f"  {command}" for command in found.commands)]


def _these(found: Bisected) -> str:
    return "this one" if len(found.culprits) == 1 else f"these {len(found.culprits)}"
