"""`tensorprobe ascend`: dumps, graphs, AI Core errors and single-operator cases, offline."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.cli.options import add_json, say_json
from tensorprobe.errors import BadArtefact, BadUsage, TensorprobeError
from tensorprobe.terminal import say, warn

if TYPE_CHECKING:
    from tensorprobe.ascend.abnormal_values import Statistics
    from tensorprobe.ascend.artefact_files import FoundFile
    from tensorprobe.ascend.graph import Edge, Op, TensorDesc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="ascend_verb", metavar="VERB", required=True)
    _add_convert(verbs.add_parser("convert", help="dump files to npy, bin or safetensors"))
    _add_inspect(verbs.add_parser("inspect", help="what is in dumps and npy files, and abnormal"))
    _add_graph(verbs.add_parser("graph", help="one op of a GE graph and who feeds it"))
    _add_incident(verbs.add_parser("incident", help="from a crash's leftovers to report and case"))
    _add_opcase(verbs.add_parser("opcase", help="a single-operator case for op_test_frame"))


def run(args: argparse.Namespace) -> int:
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "convert": _convert,
        "inspect": _inspect,
        "graph": _graph,
        "incident": _incident,
        "opcase": _opcase,
    }
    return verbs[args.ascend_verb](args)


def _say_json(value: object) -> None:
    for line in json.dumps(value, indent=2).split("\n"):
        say(line)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(?:[,x]\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; expected as 1,16,224,224")
    return tuple(int(size) for size in re.split("[,x]", text))


# --- convert --------------------------------------------------------------------------------


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="DUMP|DIR")
    parser.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--to", choices=("npy", "bin", "safetensors"), default="npy")
    parser.add_argument("--format", help="put blocked formats in order: ND, NCHW, NHWC, HWCN...")
    parser.add_argument("--shape", type=_shape, help="the original shape, where the dump has none")
    parser.add_argument("--index", type=int, help="only the inputs and outputs of this number")
    parser.add_argument(
        "-j", "--jobs", type=int, help="processes; default: one a core for 2 GiB and more"
    )
    add_json(parser)


def _convert(args: argparse.Namespace) -> int:
    from tensorprobe.ascend.dump_conversion import FAILED_LIST, ConversionPlan, convert

    if args.shape is not None and args.format is None:
        raise BadUsage("--shape has no effect without --format, as --format ND")
    plan = ConversionPlan(args.to, args.format, args.shape, args.index)
    with _progress("converting") as advance:
        conversion = convert(args.paths, args.out, plan, jobs=args.jobs, progress=advance)
    if args.json:
        failures = [str(failure.error) for failure in conversion.failed]
        written = [str(path) for result in conversion.results for path in result.written]
        warned = [str(text) for result in conversion.results for text in result.warnings]
        counts = {"dumps": len(conversion.results), "passed_over": conversion.skipped}
        found = {"format": 1, "counts": counts, "written": written}
        say_json({**found, "failures": failures, "warnings": warned})
        return 1 if conversion.failed else 0
    for result in conversion.results:
        for warning in result.warnings:
            warn(f"{result.path}: {warning}")
    for failure in conversion.failed:
        warn(f"not converted: {failure.error}")
    done = len(conversion.results) - len(conversion.failed)
    files = sum(len(result.written) for result in conversion.results)
    text = f"{done} of {len(conversion.results)} dumps to {files} files in {args.out}"
    if conversion.skipped:
        text += f"; {conversion.skipped} other files were passed over"
    if conversion.failed:
        text += f"; the {len(conversion.failed)} failures are in {args.out / FAILED_LIST}"
    say(text)
    return 1 if conversion.failed else 0


@contextlib.contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing anywhere else."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# --- inspect --------------------------------------------------------------------------------


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="DUMP|NPY|DIR")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _inspect(args: argparse.Namespace) -> int:
    from tensorprobe.ascend.incident_report import statistics_json, statistics_lines

    records = []
    failed = alarmed = False
    found = list(_inspectable(args.paths))
    if not found:
        raise BadUsage(f"no dump or npy file in {', '.join(map(str, args.paths))}")
    for path, problem in found:
        try:
            if problem is not None:
                raise BadArtefact(problem)
            tensors = list(_inspected(path))
        except (TensorprobeError, OSError) as error:
            failed = True
            warn(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        if not args.json:
            say(str(path))
        for title, facts, statistics, notes in tensors:
            alarmed |= bool(statistics is not None and statistics.alarms)
            if args.json:
                values = {} if statistics is None else statistics_json(statistics)
                records.append({"file": str(path), **facts, **values, "warnings": notes})
                continue
            say(f"  {title}")
            for line in [*(statistics_lines(statistics) if statistics else []), *notes]:
                say(f"    {line}")
    if args.json:
        _say_json(records)
    return 1 if failed else 3 if alarmed else 0


def _inspectable(paths: list[Path]) -> Iterator[FoundFile]:
    from tensorprobe.ascend.artefact_files import FoundFile, found_below
    from tensorprobe.ascend.dump_conversion import is_candidate

    for path in paths:
        if path.is_dir():
            yield from found_below(path, lambda f: f.suffix == ".npy" or is_candidate(f))
        elif path.exists():
            yield FoundFile(path)
        else:
            raise BadUsage(f"{path}: no such file or directory")


_Row = tuple[str, dict[str, object], "Statistics | None", list[str]]


def _inspected(path: Path) -> Iterator[_Row]:
    from tensorprobe.ascend.abnormal_values import analyse, analyse_tensor, read_npy
    from tensorprobe.ascend.dump import original_name, parse_dump_name, read_dump
    from tensorprobe.ascend.element_types import has_values
    from tensorprobe.ascend.opdebug import parse_opdebug

    if path.suffix == ".npy":
        array = read_npy(path)
        facts = {"name": "npy", "dtype": array.dtype.name, "shape": list(array.shape)}
        yield f"{array.dtype.name} {list(array.shape)}", facts, analyse(array), []
        return
    dump = read_dump(path)
    name = parse_dump_name(original_name(path))
    for tensor in dump.tensors:
        title = f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} {tensor.format}"
        if tensor.original_shape is not None and tensor.original_shape != tensor.shape:
            title += f", originally {list(tensor.original_shape)}"
        facts = {
            "name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape),
            "format": tensor.format,
        }  # fmt: skip
        notes = list(tensor.warnings)
        if name is not None and name.is_overflow and tensor.role == "output":
            notes += json.dumps(parse_opdebug(tensor), indent=2).splitlines()
            yield title, facts, None, notes
            continue
        looked = has_values(tensor.dtype) and tensor.role in ("input", "output")
        yield title, facts, analyse_tensor(tensor) if looked else None, notes
    for warning in dump.warnings:
        warn(f"{path}: {warning}")


# --- graph ----------------------------------------------------------------------------------


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|DIR")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--op", metavar="NAME", help="the node's name")
    which.add_argument("--kernel", metavar="NAME", help="the kernel's name, as in the log")
    parser.add_argument("--all", action="store_true", help="the compiler's attributes too")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _graph(args: argparse.Namespace) -> int:
    ops = _find_ops(args.paths, args.op, args.kernel)
    if args.json:
        _say_json([_op_json(op, args.all) for op in ops])
        return 0
    for op in ops:
        for line in _op_lines(op, args.all):
            say(line)
    return 0


def _find_ops(paths: list[Path], name: str | None, kernel: str | None) -> list[Op]:
    from tensorprobe.ascend.graph import find_ops, graph_files, node_of_kernel_name, read_graph

    files = graph_files(paths)
    if not files:
        raise BadUsage(f"no graph file in {', '.join(map(str, paths))}; expected ge_proto_*.txt")
    graphs = []
    for file in files:
        try:
            graphs.append(read_graph(file))
        except BadArtefact as error:
            if len(files) == 1:
                raise
            warn(str(error))
    ops = find_ops(graphs, name=name, kernel=kernel)
    if not ops and kernel is not None:  # a `fault kernel_name` carries the node, not the function
        node = node_of_kernel_name(kernel, graphs)
        ops = find_ops(graphs, name=node) if node is not None else []
    if ops:
        return ops
    every = sorted({op.name for graph in graphs for op in graph.ops})
    kernels = sum(op.kernel is not None for graph in graphs for op in graph.ops)
    asked = f"op {name}" if name is not None else f"kernel {kernel}"
    near = [op for op in every if (name or kernel or "").lower() in op.lower()][:5]
    raise TensorprobeError(
        f"{asked} is in none of {len(graphs)} graphs ({len(every)} ops, {kernels} with a kernel "
        f"name). " + (f"Near: {', '.join(near)}" if near else f"First ops: {', '.join(every[:5])}")
    )


def _op_lines(op: Op, everything: bool) -> list[str]:
    lines = [f"{op.name} ({op.type})", f"  graph   {op.graph} in {op.path}"]
    if op.kernel:
        lines.append(f"  kernel  {op.kernel}")
    if op.fused_from:
        lines.append(f"  fused from {', '.join(op.fused_from)}")
    if op.is_dynamic:
        lines.append("  dynamic shape")
    for side, descs in (("input", op.inputs), ("output", op.outputs)):
        for index, desc in enumerate(descs):
            text = f"  {side} {index}" + (f" ({desc.name})" if desc.name else "")
            text += f": {desc.dtype} {list(desc.shape)} {desc.format}"
            if desc.origin_shape is not None and desc.origin_shape != desc.shape:
                text += (
                    f", originally {list(desc.origin_shape)} {desc.origin_format or ''}".rstrip()
                )
            edge = op.edges[index] if side == "input" and index < len(op.edges) else None
            if edge is not None:
                text += f", from {edge}"
            lines.append(text)
    if op.controls:
        lines.append(f"  after   {', '.join(op.controls)}")
    attributes = op.attributes if everything else op.own_attributes
    lines += [f"  {key} = {value!r}"[:300] for key, value in sorted(attributes.items())]
    return lines


def _op_json(op: Op, everything: bool) -> dict[str, object]:
    from tensorprobe.nests import strict_json

    return {
        "name": op.name,
        "type": op.type,
        "graph": op.graph,
        "file": str(op.path),
        "kernel": op.kernel,
        "fused_from": list(op.fused_from),
        "is_dynamic": op.is_dynamic,
        "inputs": [
            _desc_json(desc) | _edge_json(op.edges[index] if index < len(op.edges) else None)
            for index, desc in enumerate(op.inputs)
        ],
        "outputs": [_desc_json(desc) for desc in op.outputs],
        "after": list(op.controls),
        "attributes": strict_json(op.attributes if everything else op.own_attributes),
    }


def _desc_json(desc: TensorDesc) -> dict[str, object]:
    return {
        "name": desc.name,
        "shape": list(desc.shape),
        "dtype": desc.dtype,
        "format": desc.format,
        "ori_shape": None if desc.origin_shape is None else list(desc.origin_shape),
        "ori_format": desc.origin_format,
    }


def _edge_json(edge: Edge | None) -> dict[str, object]:
    if edge is None:
        return {"from": None, "source": None}
    return {"from": f"{edge.op}:{edge.index}", "source": edge.producer}


# --- incident -------------------------------------------------------------------------------


def _add_incident(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--graph", nargs="+", type=Path, default=[], metavar="PATH")
    parser.add_argument("--kernel-meta", nargs="+", type=Path, default=[], metavar="DIR")
    parser.add_argument("--dump", nargs="+", type=Path, default=[], metavar="PATH")
    parser.add_argument("--objdump", type=Path, help="text of cce-objdump -d --line-numbers K.o")
    parser.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="OUT")
    parser.add_argument(
        "--reproduced", choices=("yes", "no"), help="did the case fail (yes) or pass (no)?"
    )
    parser.add_argument("--case-log", type=Path, help="the output of the case, instead")
    parser.add_argument("--soc", default="all", help="what main.py passes to run()")
    add_json(parser, "incident.json")


def _incident(args: argparse.Namespace) -> int:
    import msgspec

    from tensorprobe.ascend.artefact_files import require_file
    from tensorprobe.ascend.incident import CrashEvidence, investigate
    from tensorprobe.ascend.incident_report import incidents_json, render
    from tensorprobe.ascend.opcase import case_warnings, write_case
    from tensorprobe.ascend.writing import folder_inside, write_text
    from tensorprobe.report.documents import write_document

    reproduced = None if args.reproduced is None else args.reproduced == "yes"
    if args.case_log is not None:
        reproduced = _case_result(args.case_log)
    if args.objdump is not None:
        require_file(args.objdump, "--objdump")
    evidence = CrashEvidence(
        tuple(args.log), tuple(args.graph), tuple(args.kernel_meta), tuple(args.dump),
        args.objdump, reproduced,
    )  # fmt: skip
    facts, incidents = investigate(evidence)
    args.out.mkdir(parents=True, exist_ok=True)
    cases: list[Path | None] = []
    for number, incident in enumerate(incidents):
        case = incident.case(args.soc)
        if case is None:
            cases.append(None)
            continue
        folder = write_case(case, folder_inside(args.out, Path(f"case_{number}")))
        more = case_warnings(case, folder)
        incidents[number] = msgspec.structs.replace(
            incident, warnings=tuple(dict.fromkeys((*incident.warnings, *more)))
        )
        cases.append(folder)
    text = render(facts, incidents, cases)
    write_text(args.out / "report.txt", text)
    content = json.dumps(incidents_json(incidents, cases), indent=2, default=str)
    write_text(args.out / "incident.json", content + "\n")
    write_document("incident", args.out)
    for line in (content if args.json else text.removesuffix("\n")).split("\n"):
        say(line)
    return 3 if incidents else 0


def _case_result(path: Path) -> bool | None:
    """The guide's rule: a runtime code 0x7.... means it failed as the network did."""
    from tensorprobe.ascend.artefact_files import read_file, require_file

    require_file(path, "--case-log")
    text = read_file(path, 1 << 26, "the output of a case").decode("utf-8", "replace")
    if re.search(r"\b0x7[0-9a-fA-F]{4}\b|kernel execut\w+ failed", text):
        return True
    if re.search(r"\b(?:success(?:ful|fully|ed)?|pass(?:ed)?)\b", text, re.IGNORECASE):
        return False
    return None


# --- opcase ---------------------------------------------------------------------------------


def _add_opcase(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", nargs="+", type=Path, required=True, metavar="PATH")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--op", metavar="NAME", help="the node's name")
    which.add_argument("--kernel", metavar="NAME", help="the kernel's name, as in the log")
    parser.add_argument("--kernel-meta", nargs="+", type=Path, default=[], metavar="DIR")
    parser.add_argument("--dump", nargs="+", type=Path, default=[], metavar="PATH")
    parser.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="OUT")
    parser.add_argument("--soc", default="all", help="what main.py passes to run()")
    add_json(parser)


def _opcase(args: argparse.Namespace) -> int:
    from tensorprobe.ascend.incident import CrashEvidence, incident_of_op
    from tensorprobe.ascend.opcase import case_warnings, write_case

    ops = _find_ops(args.graph, args.op, args.kernel)
    if len(ops) > 1:
        names = ", ".join(f"{op.name} ({op.type}) in {op.path}" for op in ops[:5])
        raise BadUsage(f"{len(ops)} ops fit: {names}. Name one with --op, its file with --graph")
    evidence = CrashEvidence((), (), tuple(args.kernel_meta), tuple(args.dump))
    incident = incident_of_op(ops[0], evidence)
    case = incident.case(args.soc)
    if case is None:
        raise TensorprobeError(f"{ops[0].name} has neither inputs nor outputs: no case to make")
    folder = write_case(case, args.out)
    warnings = dict.fromkeys([*incident.warnings, *case_warnings(case, folder)])
    if args.json:
        told = None if incident.reference is None else incident.reference.text
        found = {"format": 1, "op": ops[0].name, "type": ops[0].type, "folder": str(folder)}
        say_json({**found, "reference": told, "warnings": list(warnings)})
    else:
        for warning in warnings:
            warn(f"warning: {warning}")
        say(f"{ops[0].name} ({ops[0].type}): {folder / 'main.py'}")
        if incident.reference is not None:
            say(incident.reference.text)
    is_off = incident.reference is not None and incident.reference.agrees is False
    return 3 if is_off or any(report.statistics.alarms for report in incident.values) else 0
