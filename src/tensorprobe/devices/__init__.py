"""What differs between devices, as a table; and a simulated NPU (`devices.sim_npu`)."""

from tensorprobe.devices.mistakes import check_environment, check_kernel_dump, explain
from tensorprobe.devices.ranks import current_rank, local_rank, world_size
from tensorprobe.devices.table import (
    Device,
    FusedOps,
    OverflowFlag,
    accelerator,
    device_layer,
    rng_kept,
    rows,
    seed_all,
)
from tensorprobe.devices.vendor_ops import VendorOp, vendor_op

__all__ = [
    "Device",
    "FusedOps",
    "OverflowFlag",
    "VendorOp",
    "accelerator",
    "check_environment",
    "check_kernel_dump",
    "current_rank",
    "device_layer",
    "explain",
    "local_rank",
    "rng_kept",
    "rows",
    "seed_all",
    "vendor_op",
    "world_size",
]
