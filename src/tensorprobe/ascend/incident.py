"""From a crash's leftovers to a report: what failed, with what data, where, and what to do next."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tensorprobe.ascend.abnormal_values import analyse_tensor
from tensorprobe.ascend.addresses import (
    AddressCheck,
    DeviceMemory,
    changed_arguments,
    overlapping,
)
from tensorprobe.ascend.artefact_files import files_below, require_file
from tensorprobe.ascend.decision import Branch, TensorReport, conclude
from tensorprobe.ascend.dump import (
    Dump,
    DumpTensor,
    original_name,
    parse_dump_name,
    read_dump,
    with_dtype,
)
from tensorprobe.ascend.element_types import dtype_of_name, has_values, kind_of
from tensorprobe.ascend.errorcodes import ErrorBit, decode_code
from tensorprobe.ascend.graph import (
    Graph,
    Op,
    TensorDesc,
    find_ops,
    flattened,
    graph_files,
    kernel_base,
    node_of_kernel_name,
    read_graph,
)
from tensorprobe.ascend.kernel import (
    FaultPlace,
    KernelFiles,
    KernelFolder,
    check_kernel,
    locate,
    pc_offset,
    refined_offset,
)
from tensorprobe.ascend.log import CoreError, Fault, LogFacts, LoggedTensor, read_logs
from tensorprobe.ascend.memory_formats import is_blocked, to_plain
from tensorprobe.ascend.missing import GivenFiles, Missing, missing_pieces
from tensorprobe.ascend.opcase import CaseTensor, OpCase
from tensorprobe.ascend.operator_references import (
    MAX_ELEMENTS,
    REFERENCES,
    ReferenceCheck,
    check_outputs,
)
from tensorprobe.errors import BadArtefact, BadUsage, TensorprobeError

Array = np.ndarray[Any, Any]
_NUMBER_PREFIX = re.compile(r"^[-\d_]+(?=\D)")
_FUNCTION = re.compile(r"^(?:te_|.*_[0-9a-f]{16,}|.*__kernel\d+$)")


class CrashEvidence(msgspec.Struct, frozen=True):
    """Where to look: everything but the logs may be missing."""

    logs: tuple[Path, ...]
    graphs: tuple[Path, ...] = ()
    kernel_meta: tuple[Path, ...] = ()
    dumps: tuple[Path, ...] = ()
    objdump: Path | None = None
    reproduced: bool | None = None


class Incident(msgspec.Struct, frozen=True):
    """One AI Core error, put together from everything that was found about it."""

    fault: Fault
    node: str | None
    op_type: str | None
    op: Op | None
    function: str | None
    kernel: KernelFiles | None
    error_bits: tuple[ErrorBit, ...]
    tensors: tuple[CaseTensor, ...]
    attributes: dict[str, Any]
    dump: Dump | None
    values: tuple[TensorReport, ...]
    addresses: tuple[AddressCheck, ...]
    place: FaultPlace | None
    reference: ReferenceCheck | None
    warnings: tuple[str, ...]
    missing: tuple[Missing, ...]
    branch: Branch
    conclusion: str
    next_steps: tuple[str, ...]

    @property
    def inputs(self) -> tuple[CaseTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "input")

    @property
    def outputs(self) -> tuple[CaseTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "output")

    def case(self, soc: str = "all") -> OpCase | None:
        """The single-operator case; None when not even the operator's type is known."""
        if self.op_type is None or not self.tensors:
            return None
        name = self.kernel.base if self.kernel is not None else self.function
        facts = self.fault.node.facts if self.fault.node is not None else {}
        return OpCase(
            self.op_type,
            kernel_base(name or self.fault.kernel_name or self.op_type),
            self.tensors,
            self.kernel,
            self.node,
            self.attributes,
            self.fault.device_id,
            _int(facts.get("block_dim") or self.fault.keys.get("blockDim")),
            _int(facts.get("tiling_key") or self.fault.keys.get("tiling_key")),
            _tiling_bytes(facts.get("tiling_data", "")),
            soc,
        )


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 20 else None


def _tiling_bytes(text: str) -> bytes:
    return bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-fA-F]{1,2})\b", text))


def investigate(evidence: CrashEvidence) -> tuple[LogFacts, list[Incident]]:
    """Find every AI Core error in the logs and all that the other files say about each."""
    facts = read_logs(evidence.logs)
    graphs, problems = _read_graphs(evidence.graphs)
    dumps = _dump_files(evidence.dumps)
    folder = KernelFolder([*evidence.kernel_meta, *evidence.dumps])  # newer dumps hold kernels too
    return facts, [
        _Investigation(fault, facts, evidence, graphs, problems, folder, dumps).result()
        for fault in facts.faults
    ]


def incident_of_op(op: Op, evidence: CrashEvidence) -> Incident:
    """What the files say about one op of a graph, without any failure."""
    facts = LogFacts([], [], 0, set(), 0, [])
    fault = Fault({"func_name": op.kernel} if op.kernel else {}, str(op.path))
    dumps = _dump_files(evidence.dumps)
    folder = KernelFolder([*evidence.kernel_meta, *evidence.dumps])
    investigation = _Investigation(fault, facts, evidence, [], [], folder, dumps)
    investigation.given_op = op
    return investigation.result()


def _read_graphs(paths: Sequence[Path]) -> tuple[list[Graph], list[str]]:
    graphs: list[Graph] = []
    problems: list[str] = []
    for path in graph_files(paths):
        try:
            graphs.append(read_graph(path))
        except BadArtefact as error:
            problems.append(f"graph not read: {error}")
    return graphs, problems


def _dump_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # A name that is all digits may stand for a longer one: mapping.csv tells, once read.
            every = files_below(path, lambda f: f.name.isdigit() or _is_dump(f.name), links=True)
            files += (file for file in every if _is_dump(original_name(file)))
        else:
            require_file(path, "--dump")
            files.append(path)
    return files


def _is_dump(name: str) -> bool:
    return parse_dump_name(name) is not None


class _Investigation:
    def __init__(
        self,
        fault: Fault,
        facts: LogFacts,
        evidence: CrashEvidence,
        graphs: list[Graph],
        problems: list[str],
        folder: KernelFolder,
        dumps: list[Path],
    ) -> None:
        self.fault = fault
        self.facts = facts
        self.evidence = evidence
        self.graphs = graphs
        self.folder = folder
        self.dumps = dumps
        self.warnings: list[str] = list(problems)
        self.given_op: Op | None = None

    def result(self) -> Incident:
        fault = self.fault
        op = self.given_op or self._op()
        node = op.name if op is not None else self._node_name()
        op_type = op.type if op is not None else (fault.node.type if fault.node else None)
        function = self._function(op)
        kernel = self._kernel(op)
        dump = self._dump(node, op_type)
        if op_type is None:
            op_type = self._type_from_names(dump, function)
        tensors = self._tensors(op, kernel, dump)
        bits = _bits(fault.core_errors)
        values = self._values(tensors)
        attributes = op.own_attributes if op is not None else {}
        reference = self._reference(op_type, tensors, attributes)
        memory = DeviceMemory(self.facts.allocations, fault.pid, fault.order)
        addresses = tuple(self._addresses(tensors, memory))
        place = self._place(kernel, bits)
        self._check_hashes(op, kernel, function)
        self._check_pieces(kernel, tensors, addresses)
        given = GivenFiles(bool(self.graphs), bool(self.evidence.kernel_meta), bool(self.dumps))
        missing = missing_pieces(
            fault, op, kernel, place, has_dump=dump is not None, has_allocations=memory.is_known,
            given=given,
        )  # fmt: skip
        branch, conclusion, steps = conclude(
            self.evidence.reproduced,
            values,
            addresses,
            bits,
            place,
            _producers(op),
            op_type is not None and bool(tensors),
        )
        return Incident(
            fault, node, op_type, op, function, kernel, bits, tensors, attributes, dump, values,
            addresses, place, reference, tuple(dict.fromkeys(self.warnings)), tuple(missing),
            branch, conclusion, steps,
        )  # fmt: skip

    # -- who --

    def _node_name(self) -> str | None:
        if self.fault.node is not None:
            return self.fault.node.name
        name = self.fault.kernel_name
        if name is None or _FUNCTION.match(name):
            return None
        return _NUMBER_PREFIX.sub("", name) or name

    def _op(self) -> Op | None:
        name = self.fault.kernel_name
        node = node_of_kernel_name(name, self.graphs) if name else None
        if node is None:
            node = self._node_name()
        functions = [*self.fault.functions, *([name] if name else [])]
        names: list[str | None] = [*functions] or [None]
        for function in names:
            found = find_ops(self.graphs, name=node, kernel=function)
            if found:
                return self._chosen(found)
        return None

    def _chosen(self, found: list[Op]) -> Op:
        if len(found) > 1:
            names = ", ".join(op.name for op in found[:5])
            self.warnings.append(f"{len(found)} ops of the graph fit: {names}; the first is shown")
        op = found[0]
        logged = self.fault.node
        if logged is not None and logged.type and logged.type != op.type:
            self.warnings.append(
                f"the log calls {logged.name} a {logged.type}, the graph {op.type}"
            )
        return op

    def _function(self, op: Op | None) -> str | None:
        functions = self.fault.functions
        if functions:
            return functions[0]
        if op is not None and op.kernel is not None:
            return op.kernel
        name = self.fault.kernel_name
        return name if name and _FUNCTION.match(name) else None

    def _type_from_names(self, dump: Dump | None, function: str | None) -> str | None:
        name = parse_dump_name(original_name(dump.path)) if dump is not None else None
        if name is not None and name.op_type:
            return name.op_type
        match = re.match(r"^([A-Z][A-Za-z0-9]*)_[0-9a-f]{16,}", function or "")
        return match[1] if match else None

    # -- files --

    def _kernel(self, op: Op | None) -> KernelFiles | None:
        names = [*self.fault.functions]
        if op is not None and op.kernel is not None:
            names.append(op.kernel)
        if self.fault.kernel_name:
            names.append(self.fault.kernel_name)
        return self.folder.find(names)

    def _check_hashes(
        self, op: Op | None, kernel: KernelFiles | None, function: str | None
    ) -> None:
        """Log, graph and kernel_meta must name one kernel: a case of mixed ones proves nothing."""
        names: dict[str, str] = {}
        if self.fault.functions:
            names["the log"] = kernel_base(self.fault.functions[0])
        if op is not None and op.kernel is not None:
            names["the graph"] = kernel_base(op.kernel)
        if kernel is not None:
            names["kernel_meta"] = kernel.base
            stated = kernel.info.get("kernelName")
            if isinstance(stated, str):
                names["the kernel json"] = kernel_base(stated)
        elif function is not None and self.folder.files:
            near = self.folder.like(function)
            if near:
                names["kernel_meta"] = ", ".join(near[:3])
        bases = set(names.values())
        related = all(
            a.startswith(b) or b.startswith(a) for a in bases for b in bases
        )  # a tiling key at the end is no other kernel
        if len(bases) > 1 and not related:
            listed = "; ".join(f"{where} has {name}" for where, name in names.items())
            self.warnings.append(
                f"{len(bases)} kernel names disagree: {listed}. These files are not of one run, "
                "or a name was copied wrongly; the case uses the name in "
                f"{'kernel_meta' if kernel is not None else next(iter(names))} throughout"
            )

    def _dump(self, node: str | None, op_type: str | None) -> Dump | None:
        candidates = self._dump_candidates(node, op_type)
        for path in candidates:
            try:
                dump = read_dump(path)
            except TensorprobeError as error:
                self.warnings.append(f"dump not read: {error}")
                continue
            self.warnings += (f"{path.name}: {warning}" for warning in dump.warnings)
            return dump
        return None

    def _dump_candidates(self, node: str | None, op_type: str | None) -> list[Path]:
        logged = {file.rsplit("/", 1)[-1] for file in self.fault.files}
        scored: list[tuple[int, str, Path]] = []
        for path in self.dumps:
            text = original_name(path)
            name = parse_dump_name(text)
            if name is None:
                if len(self.dumps) == 1:
                    scored.append((0, "", path))
                continue
            if name.is_overflow:
                continue
            same_node = node is not None and flattened(name.op_name) == flattened(node)
            same_task = name.task_id is not None and name.task_id == self.fault.task_id
            same_type = op_type is None or name.op_type in ("", op_type)
            if name.op_type == "" and not same_task:  # exception_info.stream.task.time
                continue
            if text in logged:
                score = 4
            elif same_node and same_task:
                score = 3
            elif same_task and same_type:
                score = 2
            elif same_node:
                score = 1
            else:
                continue
            scored.append((score, name.timestamp or "", path))
        scored.sort(key=lambda item: (item[0], item[1]), reverse=True)
        if scored and scored[0][0] == 1 and self.fault.task_id is not None:
            self.warnings.append(
                f"{scored[0][2].name} is of the node, but not of task {self.fault.task_id}"
            )
        return [path for _, _, path in scored]

    # -- tensors --

    def _tensors(
        self, op: Op | None, kernel: KernelFiles | None, dump: Dump | None
    ) -> tuple[CaseTensor, ...]:
        tensors: list[CaseTensor] = []
        for role in ("input", "output"):
            descs = () if op is None else op.inputs if role == "input" else op.outputs
            node = self.fault.node
            logged: dict[int, LoggedTensor] = {}
            if node is not None:
                logged = node.inputs if role == "input" else node.outputs
            dumped = _dumped(dump, role)
            built = _supported(kernel, role)
            number = len(descs) or max(
                len(dumped), max(logged, default=-1) + 1, 0 if dumped or logged else len(built)
            )
            if dumped and len(dumped) != number:
                self.warnings.append(
                    f"the dump has {len(dumped)} {role}s, the op {number}: absent optional ones "
                    "shift the numbering, check which is which"
                )
            tensors += (
                self._tensor(
                    role,
                    index,
                    descs[index] if index < len(descs) else None,
                    logged.get(index),
                    dumped[index] if index < len(dumped) else None,
                    built[index] if index < len(built) else {},
                )
                for index in range(number)
            )
        return tuple(tensors)

    def _tensor(
        self,
        role: Literal["input", "output"],
        index: int,
        desc: TensorDesc | None,
        logged: LoggedTensor | None,
        dumped: DumpTensor | None,
        built: dict[str, Any],
    ) -> CaseTensor:
        """One argument from all sources; what the graph leaves open the run has decided."""
        known = dumped is not None and has_values(dumped.dtype)
        dtypes = [
            desc.dtype if desc is not None else None,
            logged.dtype if logged is not None else None,
            dumped.dtype if dumped is not None and known else None,
            dtype_of_name(built["dtype"]) if isinstance(built.get("dtype"), str) else None,
        ]
        dtype = next((d for d in dtypes if d and has_values(d)), "undefined")
        shapes = [
            desc.shape if desc is not None else None,
            logged.shape if logged is not None else None,
            dumped.shape if dumped is not None and (known or dumped.shape) else None,
        ]
        stated = [shape for shape in shapes if shape is not None]
        fixed = [shape for shape in stated if all(size >= 0 for size in shape)]
        shape = fixed[0] if fixed else stated[0] if stated else ()
        for source, other in (("the log", shapes[1]), ("the dump", shapes[2])):
            if other is not None and all(s >= 0 for s in other) and other != shape:
                self.warnings.append(
                    f"{role} {index} has shape {list(shape)} by the graph, {list(other)} by "
                    f"{source}"
                )
        for source, found in (("the log", dtypes[1]), ("the dump", dtypes[2])):
            if found is not None and found != dtype:
                self.warnings.append(f"{role} {index} is {dtype}, {source} says {found}")
        if dumped is not None and not known and dtype != "undefined":
            dumped = with_dtype(dumped, dtype, shape if math.prod(shape) else None)
        formats = (desc.format if desc else None, logged.format if logged else None,
                   dumped.format if dumped else None)  # fmt: skip
        ori_shape = desc.origin_shape if desc is not None else None
        if ori_shape is not None and any(size < 0 for size in ori_shape):
            ori_shape = None
        if ori_shape is None and dumped is not None and dumped.original_shape:
            ori_shape = dumped.original_shape
        address = logged.address if logged is not None else None
        if address is None and dumped is not None:
            address = dumped.address
        return CaseTensor(
            role, shape, dtype, next((f for f in formats if f), "ND"), ori_shape,
            desc.origin_format if desc is not None else None,
            desc.name if desc is not None else None, dumped, address,
            _nbytes(shape, dtype) if dtype != "undefined" else None,
        )  # fmt: skip

    def _values(self, tensors: tuple[CaseTensor, ...]) -> tuple[TensorReport, ...]:
        reports: list[TensorReport] = []
        for index, tensor in _numbered(tensors):
            if tensor.data is None:
                continue
            if not has_values(tensor.data.dtype):
                self.warnings.append(
                    f"{tensor.data.name}: neither dump nor graph nor kernel says its dtype; its "
                    "values were not looked at"
                )
                continue
            self.warnings += (f"{tensor.data.name}: {w}" for w in tensor.data.warnings)
            statistics = analyse_tensor(tensor.data)
            reports.append(TensorReport(tensor.role, index, tensor.data, statistics))
        return tuple(reports)

    def _reference(
        self, op_type: str | None, tensors: tuple[CaseTensor, ...], attributes: dict[str, Any]
    ) -> ReferenceCheck | None:
        if op_type is None:
            return None
        if op_type not in REFERENCES:
            return ReferenceCheck(None, f"no reference exists for {op_type}")
        total = sum(tensor.data.size for tensor in tensors if tensor.data is not None)
        if total > MAX_ELEMENTS:
            return ReferenceCheck(
                None,
                f"no check against the reference: {total} elements, at most {MAX_ELEMENTS} are "
                "checked",
            )
        try:
            sides = {
                role: [_plain_array(t) for t in tensors if t.role == role and t.data is not None]
                for role in ("input", "output")
            }
        except BadUsage as error:
            return ReferenceCheck(None, f"no check against the reference: {error}")
        wanted = sum(tensor.role == "input" for tensor in tensors)
        if len(sides["input"]) < wanted:
            return ReferenceCheck(None, "no check against the reference: inputs are not dumped")
        dtypes = [t.dtype for t in tensors if t.role == "output" and t.data is not None]
        return check_outputs(op_type, sides["input"], sides["output"], dtypes, attributes)

    # -- where --

    def _addresses(
        self, tensors: tuple[CaseTensor, ...], memory: DeviceMemory
    ) -> list[AddressCheck]:
        checks = []
        before = self.fault.args_before
        for at, (index, tensor) in enumerate(_numbered(tensors)):
            what = f"{tensor.role} {index}"
            launched = before[at] if at < len(before) else None
            if launched is not None:
                # What the kernel got. The log's own address may be the host copy of a constant.
                checks.append(memory.check(what, launched, tensor.nbytes))
            elif tensor.address is not None:
                checks.append(memory.check(what, tensor.address, tensor.nbytes))
        if not checks:
            checks = [
                memory.check(f"argument {a.index}", a.address, a.nbytes)
                for a in self.fault.arguments
                if a.nbytes
            ]
        return checks

    def _place(self, kernel: KernelFiles | None, bits: tuple[ErrorBit, ...]) -> FaultPlace | None:
        for error in self.fault.core_errors:
            start, current = error.pc_start, error.pc_current
            if start is None or current is None:
                continue
            units = list(dict.fromkeys(bit.unit for bit in bits))
            refined = refined_offset(start, current, units, error.registers)
            place = locate(kernel, pc_offset(start, current), refined, self.evidence.objdump)
            if place.cce_line is None and refined is not None:
                # The refinement is a heuristic: the plain offset may still have a line.
                plain = locate(kernel, place.offset, None, self.evidence.objdump)
                if plain.cce_line is not None:
                    return msgspec.structs.replace(plain, refined_offset=refined)
            return place
        return None

    def _check_pieces(
        self,
        kernel: KernelFiles | None,
        tensors: tuple[CaseTensor, ...],
        addresses: tuple[AddressCheck, ...],
    ) -> None:
        fault = self.fault
        counts = [sum(t.role == role for t in tensors) for role in ("input", "output")]
        if kernel is not None:
            self.warnings += check_kernel(kernel, *counts)
            cleaned = self.facts.cleaned_nodes & {fault.kernel_name, self._node_name()}
            if kernel.zeroed_arguments and not cleaned:
                self.warnings.append(
                    f"arguments {kernel.zeroed_arguments} must be zeroed before the launch: check "
                    "that an atomic clean ran before this kernel"
                )
        changes = changed_arguments(fault.args_before, fault.args_after)
        if changes:
            self.warnings.append(
                f"{len(changes)} launch arguments changed while the kernel ran ({changes[0]}): "
                "something wrote over them, unless the two log lines show different buffers"
            )
        for error in fault.core_errors[:1]:
            hit = overlapping(error.pc_start, addresses) if error.pc_start else None
            if hit is not None:
                self.warnings.append(
                    f"the kernel is said to start at {error.pc_start:#x}, which is in {hit.what}: "
                    "code and data lie on each other, or the log's pc is not to be trusted"
                )
        self.warnings += fault.notes
        if self.facts.aicpu_count:
            self.warnings.append(
                f"the log also has {self.facts.aicpu_count} failures of AI CPU kernels, which are "
                "no AI Core errors and are not looked at here"
            )


def _numbered(tensors: tuple[CaseTensor, ...]) -> Iterator[tuple[int, CaseTensor]]:
    """Each tensor with its place among those of its own side."""
    counts = {"input": count(), "output": count()}
    for tensor in tensors:
        yield next(counts[tensor.role]), tensor


def _nbytes(shape: tuple[int, ...], dtype: str) -> int | None:
    if any(size < 0 for size in shape):
        return None
    return -(-math.prod(shape) * kind_of(dtype).bits // 8)


def _dumped(dump: Dump | None, role: str) -> list[DumpTensor]:
    """The tensors of one side; the newest dumps list all arguments as inputs and say which is."""
    tensors = dump.tensors if dump is not None else ()
    own = [t for t in tensors if t.role == role and t.kind in (None, "general")]
    return own + [t for t in tensors if t.role == "input" and t.kind == role == "output"]


def _supported(kernel: KernelFiles | None, role: str) -> list[dict[str, Any]]:
    info = kernel.info.get("supportInfo") if kernel is not None else None
    entries = info.get(f"{role}s") if isinstance(info, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _bits(errors: list[CoreError]) -> tuple[ErrorBit, ...]:
    bits: dict[int, ErrorBit] = {}
    for error in errors:
        if not error.is_number:
            bits.update((bit.bit, bit) for bit in decode_code(error.code))
    return tuple(bits[number] for number in sorted(bits))


def _plain_array(tensor: CaseTensor) -> Array:
    assert tensor.data is not None
    array = tensor.data.array()
    if is_blocked(tensor.format):
        return to_plain(
            array, tensor.format, original_shape=tensor.ori_shape or tensor.data.original_shape,
            origin_format=tensor.ori_format,
        )  # fmt: skip
    return array


def _producers(op: Op | None) -> list[str]:
    return [edge.producer for edge in op.edges if edge is not None] if op is not None else []
