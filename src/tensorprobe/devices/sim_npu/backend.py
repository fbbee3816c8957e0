"""The module that `torch.npu` is while the simulated NPU is installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tensorprobe.devices.process_rank import local_rank
from tensorprobe.devices.sim_npu import amp as amp
from tensorprobe.devices.sim_npu import status_calls as utils
from tensorprobe.devices.sim_npu import streams
from tensorprobe.devices.sim_npu.acl_dump import AclDump
from tensorprobe.devices.sim_npu.chip import CHIP

Event = streams.Event
Stream = streams.Stream
current_stream = streams.current_stream
default_stream = streams.default_stream
set_stream = streams.set_stream
stream = streams.stream

_initialized = True  # torch.utils.checkpoint asks before it keeps the device's random state
_TOTAL_NBYTES = 64 * 2**30
_OPTIONS: dict[str, Any] = {}


class NotSimulated(NotImplementedError, AttributeError):
    """A name the simulated NPU does not have; an AttributeError too, so that hasattr works."""


def __getattr__(name: str) -> Any:
    raise NotSimulated(f"torch.npu.{name} is not part of the simulated NPU")


# ---- the device --------------------------------------------------------------------------------


def init() -> None:
    """Nothing is left to do once the backend is installed."""


_lazy_init = init


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: int | str | torch.device) -> None:
    CHIP.check_index(_index(device))
    CHIP.has_context = True


def synchronize(device: Any = None) -> None:
    CHIP.check_index(_index(device))


class device:
    """Context manager that makes a device current."""

    def __init__(self, device: int | str | torch.device | None) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        CHIP.check_index(self.idx)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """There is no other device to go back to."""


class device_of(device):
    """Context manager that makes the device of a tensor current."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "npu" else None)


def _index(device: int | str | torch.device | None) -> int | None:
    if device is None or isinstance(device, int):
        return device
    return torch.device(device).index


class DeviceProperties:
    """What the driver would say of the device."""

    name = "Simulated NPU"
    total_memory = _TOTAL_NBYTES

    def __repr__(self) -> str:
        return f"_NPUDeviceProperties(name='{self.name}', total_memory={self.total_memory >> 20}MB)"


def get_device_name(device: Any = None) -> str:
    return DeviceProperties.name


def get_device_properties(device: Any = None) -> DeviceProperties:
    return DeviceProperties()


def get_device_capability(device: Any = None) -> None:
    """NPUs have none; torch_npu returns None too."""


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def set_option(option: dict[str, Any]) -> None:
    """Compiler and runtime options are accepted and change nothing."""
    _OPTIONS.update(option)


def set_compile_mode(jit_compile: bool = False) -> None:
    set_option({"jit_compile": jit_compile})


def is_jit_compile_false() -> bool:
    return not _OPTIONS.get("jit_compile", False)


# ---- random numbers ----------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    CHIP.random.seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    CHIP.random.seed(torch.Generator().seed())


seed_all = seed


def initial_seed() -> int:
    return CHIP.random.initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return CHIP.random.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    CHIP.random.set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)


# ---- memory ------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    return CHIP.memory.allocated


def max_memory_allocated(device: Any = None) -> int:
    return CHIP.memory.peak


memory_reserved = memory_allocated  # nothing is kept back for reuse
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    CHIP.memory.peak = CHIP.memory.allocated


reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": CHIP.memory.allocated,
        "allocated_bytes.all.peak": CHIP.memory.peak,
        "reserved_bytes.all.current": CHIP.memory.allocated,
        "reserved_bytes.all.peak": CHIP.memory.peak,
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"simulated NPU: {CHIP.memory.allocated} bytes allocated, peak {CHIP.memory.peak}"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _TOTAL_NBYTES - CHIP.memory.allocated, _TOTAL_NBYTES


def empty_cache() -> None:
    """Nothing is cached."""


# ---- ACL dump ----------------------------------------------------------------------------------


def init_dump() -> None:
    """Begin; nothing is written before set_dump says where. Once: ACL refuses to begin twice."""
    utils.require_context()
    if CHIP.dump_is_begun:
        raise RuntimeError(
            "NPU error, error code is 100002: the dump is initialized already. "
            "End it first: finalize_dump() (simulated)"
        )
    CHIP.dump_is_begun = True


def set_dump(cfg_file: str) -> None:
    """From here on every kernel writes a file, as `cfg_file` (a dump.json) says."""
    CHIP.dump = AclDump(Path(cfg_file), local_rank())


def finalize_dump() -> None:
    CHIP.dump = None
    CHIP.dump_is_begun = False
