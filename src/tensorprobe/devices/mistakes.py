"""The mistakes people make with devices, each with what to do about it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import torch

from tensorprobe.devices.device_table import Device, device_layer, rows
from tensorprobe.devices.process_rank import local_rank


@dataclass(frozen=True)
class _Mistake:
    """A text found in an error, and the advice that goes with it; `{0}` is its first group."""

    pattern: str
    advice: str
    kinds: tuple[type[BaseException], ...] = (BaseException,)


_MISTAKES = (
    _Mistake(
        r"\b107002\b",
        "no NPU is set for this thread. Before the first call that needs one, write "
        "torch.npu.set_device('npu:{rank}') (in every process its own number: "
        "torch.npu.set_device(f'npu:{{local_rank}}'))",
    ),
    _Mistake(
        r"\bEI0006\b",
        "the processes of the job did not all reach this communication in time: look for one that "
        "stopped earlier, and for CANN versions that differ between machines",
    ),
    _Mistake(
        r"module 'torch' has no attribute '(_?npu_\w+|fast_gelu|one_)'",
        "{0} is an op of torch_npu: write torch_npu.{0}(...) and `import torch_npu`",
        (AttributeError,),
    ),
    _Mistake(
        r"module 'torch' has no attribute 'npu'|torch\.npu\b.*not.*(built|compiled|register)|"
        r"Expected one of cpu, .*device type at start of device string: npu",
        "torch alone has no NPU: `import torch_npu` right after `import torch`, and install the "
        "torch_npu built for torch {torch}",
    ),
    _Mistake(
        r"module 'torch_npu' has no attribute '(\w+)'|torch_npu\.(\w+) is not part of",
        "torch_npu has only the NPU's own ops: if {0} is PyTorch's, write torch.{0}; if it is the "
        "NPU's, this torch_npu is too old for it",
    ),
    _Mistake(
        r"name 'torch_npu' is not defined|No module named 'torch_npu'",
        "torch_npu is not here. On an NPU install the one built for torch {torch} and import it; "
        "on a GPU or CPU there is nothing to install, leave out what needs it (kernel-level dumps)",
    ),
    _Mistake(
        r"Expected all tensors to be on the same device.*?(\w+:\d+) and (\w+(?::\d+)?)",
        "one operand is on {0}, another on {1}: move the second with .to('{0}')",
    ),
    _Mistake(
        r"can't convert (\w+:\d+) device type tensor to numpy",
        "numpy reads host memory only: write tensor.cpu().numpy()",
    ),
    _Mistake(
        r"Attempting to deserialize object on (?:a )?(\w+)",
        "the file holds {0} tensors and this machine has none: torch.load(..., map_location='cpu')",
    ),
    _Mistake(
        r"\b(?:507015|507057|507018)\b|aicore exception|vector core exception",
        "a kernel failed on the device. Run once more with ASCEND_LAUNCH_BLOCKING=1, so that the "
        "stack is that of the failing call, and ASCEND_PROCESS_LOG_PATH=./log, then: "
        "tensorprobe ascend incident ./log",
    ),
    _Mistake(
        r"device-side assert|CUDA error",
        "CUDA errors surface late. Run once more with CUDA_LAUNCH_BLOCKING=1, so that the stack is "
        "that of the failing call",
    ),
)


def explain(error: BaseException) -> str | None:
    """What to do about an error that a device mistake causes; None where nothing is known.

    Causes are looked at too, so an error wrapped in another is explained all the same.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for mistake in _MISTAKES:
            found = re.search(mistake.pattern, str(current), re.DOTALL)
            if found and isinstance(current, mistake.kinds):
                groups = [group for group in found.groups() if group] or [""]
                return mistake.advice.format(*groups, torch=torch.__version__, rank=local_rank())
        current = current.__cause__ or current.__context__
    return None


def check_environment(
    device: torch.device | str | None = None, environment: Mapping[str, str] | None = None
) -> list[str]:
    """What in the environment will spoil a recording on `device`, each with what to do.

    Without a device, on all whose vendor's package is installed here; none is initialised.
    """
    variables = os.environ if environment is None else environment
    if device is not None:
        return _check_row(device_layer(device), variables)
    return [
        finding for row in rows() if _has_package(row) for finding in _check_row(row, variables)
    ]


def _has_package(row: Device) -> bool:
    name = row.fused_ops.module if row.fused_ops is not None else ""
    # find_spec imports nothing, but refuses a module that is there without a spec
    return bool(name) and (name in sys.modules or importlib.util.find_spec(name) is not None)


def _check_row(row: Device, variables: Mapping[str, str]) -> list[str]:
    findings = [text for text in (_versions_differ(row),) if text]
    if row.fused_ops is None:
        return findings
    if variables.get("NPU_ASD_ENABLE", "0") not in ("", "0"):
        findings.append(
            "NPU_ASD_ENABLE is on: silent-data-corruption detection hooks the same places, and "
            "calls go missing from the recording. export NPU_ASD_ENABLE=0"
        )
    if row.overflow_flag is not None and variables.get("INF_NAN_MODE_ENABLE") == "0":
        findings.append(
            "INF_NAN_MODE_ENABLE=0: overflows are clamped, and leave no inf or NaN to find. Where "
            "the chip allows it: export INF_NAN_MODE_ENABLE=1"
        )
    if row.overflow_flag is not None and variables.get("INF_NAN_MODE_FORCE_DISABLE") == "1":
        findings.append(
            "INF_NAN_MODE_FORCE_DISABLE=1: overflows are clamped, and leave no inf or NaN to find. "
            "unset INF_NAN_MODE_FORCE_DISABLE"
        )
    return findings


def check_kernel_dump(
    device: torch.device | str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """What stands in the way of an ACL dump on `device`, each with what to do."""
    variables = os.environ if environment is None else environment
    row = device_layer(device)
    if row.kernel_dump is None:
        return [
            f"{row.type} has no kernel-level dump: that is an Ascend facility. "
            "Record at level L2 instead, which sees every kernel on every device"
        ]
    if variables.get("TASK_QUEUE_ENABLE", "1") != "0":
        return [
            "TASK_QUEUE_ENABLE is on: kernels run after their calls have returned, and the dump "
            "may miss them. export TASK_QUEUE_ENABLE=0"
        ]
    return []


def _versions_differ(row: Device) -> str | None:
    """A vendor package built for another torch: 2.1 needs 2.1."""
    if row.fused_ops is None:
        return None
    try:
        version = metadata.version(row.fused_ops.module)
    except metadata.PackageNotFoundError:
        return None
    if version.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    return (
        f"{row.fused_ops.module} {version} is for another torch than {torch.__version__}: "
        "the first two numbers must agree. Install the matching pair"
    )
