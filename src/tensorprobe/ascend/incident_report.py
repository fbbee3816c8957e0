"""Incidents as text for a person and as incident.json for a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorprobe.ascend.abnormal_values import Statistics
from tensorprobe.ascend.decision import TensorReport
from tensorprobe.ascend.errorcodes import decode_code, decode_register
from tensorprobe.ascend.incident import Incident
from tensorprobe.ascend.log import CoreError, LogFacts
from tensorprobe.nests import strict_json
from tensorprobe.terminal import printable

_MOST_CORES = 4


def incidents_json(incidents: Sequence[Incident], cases: Sequence[Path | None]) -> dict[str, Any]:
    """The content of incident.json; facts that are not known are null."""
    return {
        "format": 1,
        "incidents": [_json(i, case) for i, case in zip(incidents, cases, strict=True)],
    }


def _json(incident: Incident, case: Path | None) -> dict[str, Any]:
    fault = incident.fault
    place = incident.place
    return {
        "device_id": fault.device_id,
        "stream_id": fault.stream_id,
        "task_id": fault.task_id,
        "kernel": incident.function or fault.kernel_name,
        "node": incident.node,
        "op_type": incident.op_type,
        "error_codes": list(dict.fromkeys(error.code_text for error in fault.core_errors)),
        "inputs": [tensor.described() for tensor in incident.inputs],
        "outputs": [tensor.described() for tensor in incident.outputs],
        "attributes": strict_json(incident.attributes),
        "conclusion": incident.conclusion,
        "warnings": list(incident.warnings),
        "case": None if case is None else str(case),
        "branch": incident.branch,
        "next": list(incident.next_steps),
        "missing": [
            {"what": m.what, "why": m.why, "settings": list(m.settings)} for m in incident.missing
        ],
        "log": fault.where,
        "pid": fault.pid,
        "time": fault.time,
        "fault_kernel_name": fault.kernel_name,
        "error_bits": [
            {"bit": bit.bit, "name": bit.name, "meaning": bit.meaning}
            for bit in incident.error_bits
        ],
        "cores": [_core_json(error) for error in fault.core_errors],
        "pc": None if place is None else {
            "offset": hex(place.offset),
            "refined_offset": None if place.refined_offset is None else hex(place.refined_offset),
            "cce_line": place.cce_line,
            "python_file": place.python_file,
            "python_line": place.python_line,
        },
        "files": {
            "graph": None if incident.op is None else str(incident.op.path),
            "dump": None if incident.dump is None else str(incident.dump.path),
            "binary": _path(incident.kernel.binary if incident.kernel else None),
            "kernel_json": _path(incident.kernel.json_path if incident.kernel else None),
            "cce": _path(incident.kernel.cce if incident.kernel else None),
            "loc": _path(incident.kernel.loc if incident.kernel else None),
        },
        "values": [_values_json(report) for report in incident.values],
        "addresses": [
            {"what": c.what, "address": hex(c.address), "standing": c.standing, "detail": c.detail}
            for c in incident.addresses
        ],
        "reference": None if incident.reference is None else {
            "agrees": incident.reference.agrees,
            "text": incident.reference.text,
            "max_abs": _number(incident.reference.max_abs),
            "max_rel": _number(incident.reference.max_rel),
        },
    }  # fmt: skip


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _number(value: float | int | None) -> float | int | None:
    """JSON has no NaN and no infinity."""
    return value if value is None or abs(value) < float("inf") else None


def _core_json(error: CoreError) -> dict[str, Any]:
    return {
        "core_id": error.core_id,
        "error_code": error.code_text,
        "kind": error.kind,
        "text": error.text,
        "registers": {name: hex(value) for name, value in error.registers.items()},
    }


def _values_json(report: TensorReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "dtype": report.tensor.dtype,
        "shape": list(report.tensor.shape),
        **statistics_json(report.statistics),
    }


def statistics_json(statistics: Statistics) -> dict[str, Any]:
    """The numbers and findings of one array for a JSON file."""
    return {
        "min": _number(statistics.min),
        "max": _number(statistics.max),
        "mean": _number(statistics.mean),
        "std": _number(statistics.std),
        "findings": [
            {
                "problem": finding.problem,
                "count": finding.count,
                "first": [list(place) for place in finding.first],
                "note": finding.note,
            }
            for finding in statistics.findings
        ],
    }


# --- text -----------------------------------------------------------------------------------


def render(facts: LogFacts, incidents: Sequence[Incident], cases: Sequence[Path | None]) -> str:
    """The report a person reads."""
    if not incidents:
        text = f"no AI Core error in {len(facts.files)} files, {facts.line_count} lines"
        if facts.aicpu_count:
            text += (
                f"; {facts.aicpu_count} failures of AI CPU kernels, which this verb does not cover"
            )
        return text + "\n"
    parts = [
        _one(number, incident, case)
        for number, (incident, case) in enumerate(zip(incidents, cases, strict=True))
    ]
    return "\n".join(parts)


def _one(number: int, incident: Incident, case: Path | None) -> str:
    fault = incident.fault
    lines = [
        f"AI Core error {number}: {incident.node or 'node unknown'} "
        f"({incident.op_type or 'type unknown'})",
        f"  {incident.conclusion}",
        "",
        f"  device {_or(fault.device_id)}, stream {_or(fault.stream_id)}, task {_or(fault.task_id)}"
        + (f", {fault.time}" if fault.time else ""),
        f"  kernel  {incident.function or fault.kernel_name or 'unknown'}",
        f"  log     {fault.where}",
    ]
    if incident.op is not None:
        lines.append(f"  graph   {incident.op.path} ({incident.op.graph})")
    if incident.kernel is not None:
        lines.append(f"  files   {incident.kernel.binary or incident.kernel.json_path}")
    if incident.dump is not None:
        lines.append(f"  dump    {incident.dump.path}")
    lines += ["", "error"]
    lines += _error_lines(incident)
    if incident.tensors:
        lines += ["", "tensors"]
        lines += _tensor_lines(incident)
    if incident.attributes:
        lines += ["", "attributes"]
        lines += [f"  {key} = {value!r}"[:200] for key, value in incident.attributes.items()]
    if incident.addresses:
        lines += ["", "addresses"]
        lines += [f"  {check}" for check in incident.addresses]
    if incident.reference is not None:
        lines += ["", "reference", f"  {incident.reference.text}"]
    if incident.warnings:
        lines += ["", "warnings"]
        lines += [f"  {warning}" for warning in incident.warnings]
    if incident.missing:
        lines += ["", "missing"]
        for missing in incident.missing:
            lines.append(f"  {missing.what}: {missing.why}")
            lines += [f"    {setting}" for setting in missing.settings]
    lines += ["", "next"]
    lines += [f"  {step}" for step in incident.next_steps]
    if case is not None:
        lines.append(f"  case: {case}")
    return "\n".join(map(printable, lines)) + "\n"


def _or(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _error_lines(incident: Incident) -> list[str]:
    errors = incident.fault.core_errors
    if not errors:
        return ["  no error code in the log"]
    lines = []
    for error in errors[:_MOST_CORES]:
        lines.append(
            f"  core {_or(error.core_id)}: {error.code_text} {error.kind}".rstrip()
            + (f": {error.text}" if error.text else "")
        )
        if error.is_number:
            lines.append("    this chip numbers its errors; the text is all there is")
        elif not error.code:
            lines.append("    no bit is set: a timeout or a trap")
        bits = [] if error.is_number else decode_code(error.code)
        lines += [f"    bit {bit.bit} {bit.name}: {bit.meaning}" for bit in bits]
        units = {bit.unit for bit in bits}
        for name, value in error.registers.items():
            words = decode_register(name, value) if name.split()[0] in units else None
            if words and value:
                lines.append(f"    {name} {value:#x}: {words}")
    if len(errors) > _MOST_CORES:
        lines.append(f"  and {len(errors) - _MOST_CORES} more cores")
    place = incident.place
    if place is not None:
        text = f"  stopped at offset {place.offset:#x} of the kernel"
        if place.refined_offset is not None:
            text += f", the instruction at {place.refined_offset:#x}"
        lines.append(text)
        if place.cce_line is not None:
            lines.append(f"    CCE line {place.cce_line}: {place.cce_text or ''}".rstrip())
        if place.python_file is not None:
            lines.append(f"    Python {place.python_file}:{place.python_line}")
        marks = ["  "] * (len(place.instructions) - 1) + ["* "]
        for mark, text in zip(marks, place.instructions, strict=False):
            lines.append(f"    {mark}{text}")
    return lines


def _tensor_lines(incident: Incident) -> list[str]:
    reports = {report.name: report for report in incident.values}
    lines = []
    counts = {"input": 0, "output": 0}
    for tensor in incident.tensors:
        index = counts[tensor.role]
        counts[tensor.role] += 1
        name = f"{tensor.role} {index}" + (f" ({tensor.name})" if tensor.name else "")
        text = f"  {name}: {tensor.dtype} {list(tensor.shape)} {tensor.format}"
        if tensor.ori_shape is not None and tensor.ori_shape != tensor.shape:
            text += f", originally {list(tensor.ori_shape)} {tensor.ori_format or ''}".rstrip()
        if incident.op is not None and tensor.role == "input" and index < len(incident.op.edges):
            edge = incident.op.edges[index]
            text += f", from {edge}" if edge is not None else ""
        lines.append(text)
        report = reports.get(f"{tensor.role}.{index}")
        if report is not None:
            lines += [f"    {line}" for line in statistics_lines(report.statistics)]
    return lines


def statistics_lines(statistics: Statistics) -> list[str]:
    """The numbers of one array, and a line for each kind of abnormal value."""
    if not statistics.count:
        return ["empty"]
    numbers = [
        f"{name} {value:g}"
        for name, value in (
            ("min", statistics.min), ("max", statistics.max), ("mean", statistics.mean),
            ("std", statistics.std),
        )
        if value is not None
    ]  # fmt: skip
    lines = [", ".join(numbers) if numbers else "no finite value"]
    return lines + [str(finding) for finding in statistics.findings]
