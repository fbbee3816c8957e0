"""What differs between cpu, cuda, npu and any other device: one row each, and nothing else.

Nothing outside this room asks which device it is on; it asks the row.

    device = device_layer(tensor.device)
    device.synchronize()
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorprobe.devices import ascend_runtime
from tensorprobe.errors import DeviceUnusable
from tensorprobe.torch_versions import accelerator_type, autocast_dtype


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class FusedOps:
    """Where a vendor keeps ops of its own, and the prefix their calls are named with."""

    module: str  # the Python package: torch_npu
    namespace: str  # of torch.ops: npu
    prefix: str  # of call names: NPU


@dataclass(frozen=True)
class OverflowFlag:
    """A status register that says an overflow happened, on chips that clamp instead of inf."""

    is_needed: Callable[[], bool]  # False where overflows show in the values themselves
    is_raised: Callable[[], bool]
    clear: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Device:
    """One row of the table. Where a device has nothing to offer, the row says so with None."""

    type: str
    find_module: Callable[[], Any]  # torch.cuda, torch.npu; None: the host needs none
    launch_blocking: str | None = None  # set to 1, an error names the call that made it
    log_folder: str | None = None  # the variable that says where the driver writes its log
    default_log: str | None = None  # where it writes when the variable is not set
    failure: str | None = None  # a pattern: what the runtime says when a kernel has failed
    uses_tf32: Callable[[], bool] = lambda: False  # float32 products keep eleven bits
    fused_ops: FusedOps | None = None
    overflow_flag: OverflowFlag | None = None
    kernel_dump: Callable[[Path], AbstractContextManager[None]] | None = None  # of a dump.json
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    set_deterministic_flags: Callable[[], None] = _nothing
    simulator: str | None = None  # the module that makes such a device without the hardware

    # -- which device ------------------------------------------------------------------------

    @property
    def is_host(self) -> bool:
        return self.find_module() is None and self.type == "cpu"

    def is_available(self) -> bool:
        """Whether a tensor can be put on this device now."""
        if self.is_host:
            return True
        module = self.find_module()
        return module is not None and bool(module.is_available())

    def count(self) -> int:
        """How many such devices this process sees."""
        if self.is_host:
            return 1
        return int(self.find_module().device_count()) if self.is_available() else 0

    def current(self) -> torch.device:
        """The device that a tensor asked for without a number lands on."""
        if self.is_host:
            return torch.device("cpu")
        return torch.device(self.type, self._module().current_device())

    # -- without the hardware ------------------------------------------------------------------

    def simulate(self) -> None:
        """Make a simulated device of this kind in this process."""
        if self.simulator is None:
            raise DeviceUnusable(f"there is no simulated device '{self.type}'")
        importlib.import_module(self.simulator).install()

    def simulated_by(self) -> Any:
        """The module that simulates this device here; None: it is real, or not there."""
        module = sys.modules.get(self.simulator or "")
        return module if module is not None and module.is_installed() else None

    # -- waiting -----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for everything launched so far."""
        if not self.is_host and self.is_available():
            self._module().synchronize()

    def current_stream(self, device: torch.device | None = None) -> Any:
        """The queue that calls go to now, on that device or the current one; or None."""
        current = getattr(self.find_module(), "current_stream", None)
        return current(device) if current is not None and self.is_available() else None

    def new_event(self) -> Any:
        """A mark to record on a stream and wait for, or None where work is not queued."""
        event = getattr(self.find_module(), "Event", None)
        return event() if event is not None and self.is_available() else None

    def can_pin_memory(self) -> bool:
        """Whether host memory can be pinned for copies that do not wait."""
        return not self.is_host and self.is_available() and _can_pin_memory(self.type)

    def is_launch_blocking(self) -> bool:
        """Whether an error surfaces at the call that makes it; always on the host."""
        return self.launch_blocking is None or os.environ.get(self.launch_blocking) == "1"

    def find_log(self) -> str | None:
        """The folder that the driver's log is in, or None where there is no such log."""
        if self.log_folder is None:
            return None
        return os.environ.get(self.log_folder) or self.default_log

    # -- random numbers ----------------------------------------------------------------------

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        """State of the random numbers, as a CPU tensor."""
        if self.is_host:
            return torch.get_rng_state()
        state: torch.Tensor = self._module().get_rng_state(self._numbered(index))
        return state

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """Put a state from `rng_state` back."""
        if self.is_host:
            torch.set_rng_state(state)
        else:
            self._module().set_rng_state(state, self._numbered(index))

    # -- the same twice ----------------------------------------------------------------------

    def set_deterministic_variables(self) -> dict[str, str]:
        """Set the variables by which equal runs give equal results; those already set stay.

        Returns what was set too late to count, because the device was in use.
        """
        missing = {k: v for k, v in self.deterministic_variables.items() if k not in os.environ}
        os.environ.update(missing)
        is_in_use = getattr(self.find_module(), "is_initialized", None)
        return missing if is_in_use is not None and is_in_use() else {}

    def _module(self) -> Any:
        if not self.is_available():
            raise DeviceUnusable(f"device '{self.type}' is not there. {how_to_get(self)}")
        return self.find_module()

    def _numbered(self, index: int | None) -> torch.device:
        return self.current() if index is None else torch.device(self.type, index)


# ---- rows --------------------------------------------------------------------------------------


def _cuda_flags() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _cuda_tf32() -> bool:
    backends: Any = torch.backends
    return bool(backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32)


_ROWS = {
    row.type: row
    for row in (
        Device(type="cpu", find_module=lambda: None),
        Device(
            type="cuda",
            find_module=lambda: torch.cuda,
            launch_blocking="CUDA_LAUNCH_BLOCKING",
            failure=r"CUDA error|device-side assert|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error",
            uses_tf32=_cuda_tf32,
            deterministic_variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            set_deterministic_flags=_cuda_flags,
        ),
        Device(
            type="npu",
            find_module=lambda: getattr(torch, "npu", None),
            launch_blocking="ASCEND_LAUNCH_BLOCKING",
            log_folder="ASCEND_PROCESS_LOG_PATH",
            default_log="~/ascend/log",
            failure=r"NPU error|NPU function error|aicore exception|vector core exception|"
            r"error code is \d{6}|\b(?:E[EIJKLZ]\d{4}|E[A-Z3]9999|ERR0\d{4})\b",
            fused_ops=FusedOps(module="torch_npu", namespace="npu", prefix="NPU"),
            overflow_flag=OverflowFlag(
                is_needed=ascend_runtime.saturates,
                is_raised=ascend_runtime.overflow_is_flagged,
                clear=ascend_runtime.clear_overflow_flag,
            ),
            kernel_dump=ascend_runtime.kernel_dump,
            simulator="tensorprobe.devices.sim_npu",
            deterministic_variables={
                "HCCL_DETERMINISTIC": "true",
                "LCCL_DETERMINISTIC": "1",
                "CLOSE_MATMUL_K_SHIFT": "1",
            },
        ),
    )
}


def device_layer(device: torch.device | str) -> Device:
    """The row of a device: `device_layer("npu")`, `device_layer(tensor.device)`.

    A device without a row of its own gets one from the module PyTorch keeps for it.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    return _ROWS.get(kind) or _generic(kind)


@functools.cache
def _generic(kind: str) -> Device:
    try:
        torch.device(kind)
    except RuntimeError as error:
        raise DeviceUnusable(f"PyTorch knows no device '{kind}'. {how_to_get(kind)}") from error
    return Device(type=kind, find_module=lambda: getattr(torch, kind, None))


def accelerator() -> Device | None:
    """The row of the accelerator of this machine, or None where there is only the host."""
    kind = accelerator_type()
    row = None if kind is None else device_layer(kind)
    return row if row is not None and row.is_available() else None


def rows() -> tuple[Device, ...]:
    """The rows that are written down, the host first."""
    return tuple(_ROWS.values())


def device_types() -> tuple[str, ...]:
    """The kinds of devices a program may use here: those with a row, and this build's own."""
    present = accelerator_type()
    return tuple(dict.fromkeys([*_ROWS, *([present] if present is not None else [])]))


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The dtype of autocast for each kind of device where it is on now."""
    found = {kind: autocast_dtype(kind) for kind in device_types()}
    return {kind: dtype for kind, dtype in found.items() if dtype is not None}


def block_launches() -> list[str]:
    """Let errors surface at the call that makes them, on devices that are not in use yet.

    Sets the variables of the table that nobody has set, and says which.
    """
    unset = []
    for row in rows():
        in_use = getattr(row.find_module(), "is_initialized", lambda: False)
        if row.launch_blocking is None or row.launch_blocking in os.environ or in_use():
            continue
        os.environ[row.launch_blocking] = "1"
        unset.append(row.launch_blocking)
    return unset


def failed_device(text: str) -> Device | None:
    """The row of the device whose runtime speaks in the text of an error; None: it was torch."""
    for row in rows():
        if row.failure is not None and re.search(row.failure, text):
            return row
    return None


@contextmanager
def rng_kept(device: torch.device | str) -> Iterator[None]:
    """Inside, random numbers may be drawn on `device` and the host; afterwards none were."""
    host, row = device_layer("cpu"), device_layer(device)
    kept = [(each, each.rng_state()) for each in ({host, row} if row.is_available() else {host})]
    try:
        yield
    finally:
        for each, state in kept:
            each.set_rng_state(state)


@functools.cache
def _can_pin_memory(kind: str) -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def how_to_get(device: Device | str) -> str:
    """What to do where a device is not there: what it needs, or which devices are."""
    kind = device if isinstance(device, str) else device.type
    if kind == "npu":
        return (
            "Install the torch_npu that belongs to this torch and `import torch_npu` first; "
            "without the hardware: --sim-npu, in Python tensorprobe.devices.sim_npu.install()"
        )
    return "Devices here: " + ", ".join(row.type for row in rows() if row.is_available())
