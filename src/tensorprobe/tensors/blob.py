"""Where the bytes of a tensor are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Container = Literal["raw", "packed", "npy", "pt"]


class Blob(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor's bytes are: `nbytes` of them, little-endian and row-major.

    Packed (`tensors.packing`) they are fewer there. In a file of its own, `npy` or `pt`, their
    place and layout are found when it is read.
    """

    path: Path
    offset: int
    nbytes: int
    container: Container = "raw"
    packed_nbytes: int = 0
