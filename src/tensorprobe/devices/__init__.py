"""What differs between devices, as a table; and a simulated NPU (`devices.sim_npu`)."""

from tensorprobe.devices.device_table import (
    Device,
    FusedOps,
    OverflowFlag,
    accelerator,
    autocast_dtypes,
    block_launches,
    device_layer,
    device_types,
    failed_device,
    how_to_get,
    rng_kept,
    rows,
)
from tensorprobe.devices.mistakes import check_environment, check_kernel_dump, explain
from tensorprobe.devices.process_rank import (
    agreed_by_all,
    current_rank,
    is_known_rank,
    local_rank,
    world_size,
)

__all__ = [
    "Device",
    "FusedOps",
    "OverflowFlag",
    "accelerator",
    "agreed_by_all",
    "autocast_dtypes",
    "block_launches",
    "check_environment",
    "check_kernel_dump",
    "current_rank",
    "device_layer",
    "device_types",
    "explain",
    "failed_device",
    "how_to_get",
    "is_known_rank",
    "local_rank",
    "rng_kept",
    "rows",
    "world_size",
]
