"""torch.npu.amp: mixed precision under the names scripts written for the NPU use."""

from __future__ import annotations

from typing import Any

import torch


class autocast(torch.amp.autocast):
    """torch.autocast("npu")."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, **other: Any
    ) -> None:
        super().__init__("npu", dtype=dtype, enabled=enabled, **other)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler("npu")."""

    def __init__(self, init_scale: float = 2.0**16, **other: Any) -> None:
        other.pop("dynamic", None)  # the vendor's switch for a fixed scale
        super().__init__("npu", init_scale=init_scale, **other)
