"""`tensorprobe compiled`: what torch.compile made of a program, and which stage made it wrong."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import NotReplayable
from tensorprobe.records import count
from tensorprobe.store.frames import users_line
from tensorprobe.terminal import busy, say, warn

if TYPE_CHECKING:
    from tensorprobe.compiling.compile_records import CompiledParts
    from tensorprobe.compiling.stage_findings import StageFinding, StagesJudged

_EPILOG = """\
examples:
  tensorprobe compiled runs/a                   which stage made a wrong result, if one did
  tensorprobe compiled runs/a --against runs/eager   also what eager torch says: stale guards
  tensorprobe compiled runs/a --list            graphs, graph breaks, recompilations
  tensorprobe compiled runs/a -o report         stages.json, and a script for each fault

The run was recorded with --compiled graphs (or kernels) --keep tensors. Exit status 3: a stage
is at fault; 0: what came out of each run was judged, and none is; 1: not all could be judged,
or the uncompiled run differs and no stage is why.
"""
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("capture", metavar="RUN", help="a run recorded with --compiled graphs")
    parser.add_argument("--against", metavar="RUN", help="the same program, recorded uncompiled")
    parser.add_argument("--list", action="store_true", help="tell what was compiled; judge nothing")
    parser.add_argument(
        "--code", type=int, metavar="N", help="print the code that was generated for graph N"
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="folder for stages.json, its page, and scripts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not lines")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds that judging may take (default: 600)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from tensorprobe.compiling.compile_records import read_compiled
    from tensorprobe.store.outputs import check_output

    if args.output is not None:
        check_output(Path(args.output), Path(args.capture))
    if args.code is None and not args.list:
        return _judge(args) if args.here else _judge_apart(args)
    ranks = read_compiled(Path(args.capture))
    if args.code is not None:
        return _print_code(ranks, args.code)
    if args.list:
        listed = [_listing(parts) for parts in ranks]
        if args.json:
            _print_json({"ranks": listed})
        else:
            for each in listed:
                say(*_list_lines(each))
    return 0


def _judge_apart(args: argparse.Namespace) -> int:
    """Judge in a process of its own, as operators run on what a file says."""
    from tensorprobe.replay.child_limits import child_command

    words = ["compiled", "--here", *(["--json"] if args.json else ())]
    words += ["--against", args.against] if args.against is not None else []
    words += ["-o", args.output] if args.output is not None else []
    code = (
        "from tensorprobe.cli.main import main\n"
        "from tensorprobe.replay.child_limits import limit_memory\n"
        f"limit_memory(); sys.exit(main({[*words, '--', args.capture]!r}))"
    )
    sys.stdout.flush()
    try:
        status = subprocess.run(
            child_command(code), stdin=subprocess.DEVNULL, check=False, timeout=args.timeout
        ).returncode
    except subprocess.TimeoutExpired:
        warn(f"tensorprobe compiled: not judged within {args.timeout:g} s: --timeout gives more")
        return 1
    if status < 0:
        warn(f"tensorprobe compiled: the process that replays graphs died of signal {-status}")
        return 1
    return status


def _judge(args: argparse.Namespace) -> int:
    from tensorprobe.compiling.compile_records import read_compiled
    from tensorprobe.compiling.compile_stages import judge_compiled
    from tensorprobe.report.documents import write_document

    ranks = read_compiled(Path(args.capture))
    with busy("judging compiled parts"):
        judged = [judge_compiled(parts) for parts in ranks]
    against = ""
    if args.against is not None:
        from tensorprobe.comparing.stale_guards import judge_guards

        against = judge_guards(Path(args.capture), Path(args.against), ranks, judged)
    findings = [finding for each in judged for finding in each.findings]
    scripts = _write_scripts(findings, Path(args.output)) if args.output is not None else {}
    is_all = all(each.n_judged == each.n_runs > 0 for each in judged)
    is_all = is_all and against in ("", "against eager: match")
    verdict = "fault" if findings else ("match" if is_all else "incomparable")
    result = {
        "verdict": verdict,
        "against": against or None,
        "ranks": [_as_json(each, scripts) for each in judged],
    }
    if args.json:
        _print_json(result)
    else:
        say(*_lines(args.capture, ranks, judged, scripts))
        if against:
            say(f"  {against}")
    if args.output is not None:
        path = Path(args.output) / "stages.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        page = write_document("compiled", path.parent)
        if not args.json:
            say(f"written: {path}, {page}")
    return {"fault": 3, "match": 0, "incomparable": 1}[verdict]


def _write_scripts(findings: list[StageFinding], folder: Path) -> dict[int, str]:
    from tensorprobe.compiling.stage_repro import write_repro

    found: dict[int, str] = {}
    for number, finding in enumerate(_different(findings)[:_SHOWN]):
        try:
            found[id(finding)] = str(write_repro(finding, folder / f"repro{number}"))
        except NotReplayable as error:
            warn(f"no script for the fault at run {finding.run}: {error}")
    return found


def _different(findings: list[StageFinding]) -> list[StageFinding]:
    """The first finding of each place: later runs of a graph show the same."""
    found: dict[tuple[Any, ...], StageFinding] = {}
    for each in findings:
        node = each.node.name if each.node is not None else ""
        found.setdefault((each.stage, each.compilation, each.direction, node, each.kernel), each)
    return list(found.values())


# What a person reads


def _lines(
    path: str, ranks: list[CompiledParts], judged: list[StagesJudged], scripts: dict[int, str]
) -> list[str]:
    lines = []
    findings = [finding for each in judged for finding in each.findings]
    n_runs = sum(each.n_runs for each in judged)
    n_judged = sum(each.n_judged for each in judged)
    n_dynamo = sum(each.n_dynamo for each in judged)
    if findings:
        different = _different(findings)
        what = "a stage" if len(different) == 1 else f"{len(different)} places"
        lines.append(f"fault: of {n_runs} runs of compiled graphs {what} gave something else")
        for finding in different[:_SHOWN]:
            lines += _finding_lines(finding, scripts)
    elif n_judged:
        worst = max(each.worst for each in judged)
        is_all = all(each.n_judged == each.n_runs > 0 for each in judged)
        lines.append(
            f"{'match' if is_all else 'incomparable'}: {n_judged} of {n_runs} runs of compiled "
            f"graphs give what their graphs say, within rounding (at most {worst:.3g} of 16 units)"
        )
        if not is_all:
            lines.append("  what the others give could not be judged")
    else:
        lines.append(f"nothing could be judged of {n_runs} runs of compiled graphs in '{path}'")
    lines.append(f"  dynamo's graph was held against that of aot_autograd in {n_dynamo} of them")
    for each in judged:
        for why, times in list(each.unjudged.items())[:_SHOWN]:
            lines.append(f"  not judged, {count(times, 'time')}: {why}")
    for parts in ranks:
        for gap in parts.gaps[:_SHOWN]:
            lines.append(f"  not recorded: {gap.what}: {gap.why}")
    return lines


def _finding_lines(finding: StageFinding, scripts: dict[int, str]) -> list[str]:
    where = f"{finding.direction} of {finding.compilation}, rank {finding.rank}"
    lines = [f"stage: {finding.stage} ({where}, step {finding.step})", f"  {finding.text}"]
    if finding.kernel:
        lines.append(f"  kernel: {finding.kernel}")
    node = finding.node
    if node is not None:
        made = f", made of {node.aten}" if node.aten else ""
        lines.append(f"  node: {node.name} = {node.target}{made}")
        if node.stack:
            lines.append(f"  line: {users_line(node.stack)}")
    if finding.more:
        names = ", ".join(finding.more[-8:])
        lines.append(f"  among: {names}. Record with --compiled kernels to have the kernel named")
    script = scripts.get(id(finding))
    if script is not None:
        lines.append(f"  alone: python {script}")
    return lines


def _listing(parts: CompiledParts) -> dict[str, Any]:
    graphs = [
        {
            "id": graph.id,
            "stage": graph.stage,
            "compilation": graph.compilation,
            "direction": "backward" if graph.is_backward else "forward",
            "nodes": sum(node.kind in ("call", "method") for node in graph.nodes),
            "runs": sum(run.graph == graph.id for run in parts.runs),
            "has_code": graph.id in parts.code,
        }
        for graph in parts.graphs.values()
    ]
    with_graph = {graph.compilation for graph in parts.graphs.values()}
    events = [
        {"kind": event.kind, "compilation": event.compilation, "text": event.text}
        for event in parts.events
        if event.kind != "guards" or event.compilation in with_graph
    ]
    gaps = [{"what": gap.what, "why": gap.why} for gap in parts.gaps]
    return {"rank": parts.rank, "graphs": graphs, "events": events, "gaps": gaps}


def _list_lines(listed: dict[str, Any]) -> list[str]:
    lines = [f"rank {listed['rank']}"]
    for graph in listed["graphs"]:
        runs = f", {count(graph['runs'], 'run')}" if graph["stage"] == "inductor" else ""
        code = f", code: --code {graph['id']}" if graph["has_code"] else ""
        lines.append(
            f"  graph {graph['id']}: {graph['stage']} of {graph['compilation']}, "
            f"{graph['direction']}, {count(graph['nodes'], 'call')}{runs}{code}"
        )
    for event in listed["events"]:
        if event["kind"] == "guards":
            lines_there = count(event["text"].count("\n"), "line")
            lines.append(f"  guards of {event['compilation']}: {lines_there}, in --json")
            continue
        text = [line.strip() for line in event["text"].splitlines() if line.strip()]
        lines.append(f"  {event['kind']} at {event['compilation']}:")
        lines += [f"    {line}" for line in text[:6]]
    lines += [f"  not recorded: {gap['what']}: {gap['why']}" for gap in listed["gaps"]]
    return lines


def _print_code(ranks: list[CompiledParts], number: int) -> int:
    for parts in ranks:
        if number in parts.code:
            say(*parts.code[number].text.splitlines())
            return 0
    known = sorted(graph for parts in ranks for graph in parts.code)
    warn(f"tensorprobe compiled: graph {number} has no code; these have: {known}")
    return 1


def _print_json(value: dict[str, Any]) -> None:
    say(*json.dumps(value, indent=1, allow_nan=False).split("\n"))


def _as_json(judged: StagesJudged, scripts: dict[int, str]) -> dict[str, Any]:
    return {
        "runs": judged.n_runs,
        "judged": judged.n_judged,
        "judged_from_dynamo": judged.n_dynamo,
        "worst": judged.worst,
        "unjudged": judged.unjudged,
        "findings": [
            {
                "stage": finding.stage,
                "rank": finding.rank,
                "step": finding.step,
                "run": finding.run,
                "compilation": finding.compilation,
                "direction": finding.direction,
                "node": finding.node.name if finding.node is not None else None,
                "target": finding.node.target if finding.node is not None else None,
                "aten": finding.node.aten if finding.node is not None else None,
                "stack": list(finding.node.stack) if finding.node is not None else [],
                "kernel": finding.kernel or None,
                "among": finding.more,
                "error": None if math.isinf(finding.error) else finding.error,
                "text": finding.text,
                "script": scripts.get(id(finding)),
            }
            for finding in judged.findings
        ],
    }
