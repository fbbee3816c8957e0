"""torch.load with map_location="npu", also of files that were saved on the host."""

from __future__ import annotations

from typing import Any

import torch


class NpuStorage(torch.UntypedStorage):
    """Host bytes that say they are on the device, so that a tensor rebuilt on them is."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("npu", 0)


def register() -> None:
    """Be asked before PyTorch's own rule, which would need an allocator in C++."""
    register_package: Any = torch.serialization.register_package
    register_package(5, lambda storage: None, _to_npu)


def _to_npu(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """`storage` for a location on the NPU, None for any other: the next rule decides."""
    if location.partition(":")[0] != "npu":
        return None
    new_storage: Any = NpuStorage
    moved: torch.UntypedStorage = new_storage(storage.nbytes())
    moved.copy_(storage)
    return moved
