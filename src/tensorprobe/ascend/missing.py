"""What a crash did not leave behind, and the settings that make the next run leave it."""

from __future__ import annotations

import shlex

import msgspec

from tensorprobe.ascend.graph import Op
from tensorprobe.ascend.kernel import FaultPlace, KernelFiles
from tensorprobe.ascend.log import Fault

_GRAPH_SETTINGS = (
    "export DUMP_GE_GRAPH=1      # 1 all, 2 without weights, 3 relations only",
    "export DUMP_GRAPH_LEVEL=1   # every stage; the Build stage names the kernels",
)
_LOG_SETTINGS = ("export ASCEND_GLOBAL_LOG_LEVEL=1   # INFO",)
_KERNEL_SETTINGS = (
    "op_debug_level=1: kernel_meta gets .cce, _loc.json, .o and .json (the default 0: not)",
    "op_debug_level=2: the same, compiled without optimisation and with line numbers",
    "Estimator: NPURunConfig(op_debug_level=2, ...)",
    'sess.run: custom_op.parameter_map["op_debug_level"].i = 2',
    'torch_npu: torch_npu.npu.set_option({"ACL_OP_DEBUG_LEVEL": 2})   # not verified on hardware',
)
_DUMP_SETTINGS = (
    "Estimator: NPURunConfig(enable_exception_dump=1, ...)   # written where the script runs",
    'sess.run: custom_op.parameter_map["enable_exception_dump"].i = 1',
    "torch_npu: export NPU_COLLECT_PATH=DIR before the run   # not verified on hardware",
)


class Missing(msgspec.Struct, frozen=True):
    """A piece that was not there, why perhaps, and what to set so that the next run leaves it."""

    what: str
    why: str
    settings: tuple[str, ...]


class GivenFiles(msgspec.Struct, frozen=True):
    """Which kinds of files there were to search in at all."""

    graphs: bool
    kernels: bool
    dumps: bool


def missing_pieces(
    fault: Fault,
    op: Op | None,
    kernel: KernelFiles | None,
    place: FaultPlace | None,
    *,
    has_dump: bool,
    has_allocations: bool,
    given: GivenFiles,
) -> list[Missing]:
    """What was not found for one fault, each with the settings for the next run."""
    missing = []
    if op is None:
        why = "no --graph was given" if not given.graphs else "no graph has this op"
        missing.append(Missing("graph", why, _GRAPH_SETTINGS))
    if fault.node is None or not has_allocations:
        why = "no [AIC_INFO] lines" if fault.node is None else "no DevMalloc lines"
        missing.append(Missing("log at INFO level", why, _LOG_SETTINGS))
    files = _absent_files(kernel)
    if files:
        why = "no --kernel-meta was given" if not given.kernels else "not in kernel_meta"
        missing.append(Missing(f"kernel files {', '.join(files)}", why, _KERNEL_SETTINGS))
    if place is not None and place.cce_line is None:
        name = kernel.base if kernel is not None else "KERNEL"
        binary, text = _word(f"{name}.o"), _word(f"{name}.o.txt")
        missing.append(
            Missing("object dump", "no line number without one", (
                f"cce-objdump -d --line-numbers {binary} > {text}   # where CANN is",
                f"tensorprobe ascend incident ... --objdump {text}",
            ))
        )  # fmt: skip
    if not has_dump:
        why = "no --dump was given" if not given.dumps else "no dump is of this op and task"
        written = [file for file in fault.files if not file.endswith((".o", ".json"))]
        dynamic = (op is not None and op.is_dynamic) or (kernel is not None and kernel.is_dynamic)
        if written:
            why += f"; the log says that {written[0]} was written"
        elif dynamic:
            why += "; the op has a dynamic shape, which the exception dump does not support"
        missing.append(Missing("dump", why, _DUMP_SETTINGS))
    return missing


def _word(name: str) -> str:
    """A file's name as one word of a command that a person will paste: never an option."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def _absent_files(kernel: KernelFiles | None) -> list[str]:
    if kernel is None:
        return [".o", ".json", ".cce", "_loc.json"]
    files = {
        ".o": kernel.binary, ".json": kernel.json_path, ".cce": kernel.cce,
        "_loc.json": kernel.loc,
    }  # fmt: skip
    return [suffix for suffix, path in files.items() if path is None]
