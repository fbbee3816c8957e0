"""A call between its beginning and its end."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tensorprobe.follow.gradients import Path
from tensorprobe.follow.hidden_state import Draws
from tensorprobe.follow.naming import CallNames
from tensorprobe.records import Keep
from tensorprobe.store.lines import CollectiveLine

NOTHING: frozenset[str] = frozenset()


class OpenCall(msgspec.Struct, eq=False):
    """A call that has begun and not ended. A Struct: one is made for every call, in C."""

    names: CallNames
    keep: Keep
    step: int
    id: int = -1
    stack: int | None = None
    edges: Any = None  # InputEdges, or their short form in C++
    inputs: list[tuple[torch.Tensor, Path]] = []
    versions: list[int] = []
    writes: frozenset[str] = NOTHING  # arguments written to, whatever their versions say
    draws: Draws | None = None
    notes: list[str] = []
    buffers: dict[str, tuple[int, int]] | None = None  # of a module: which they were, before
    collective: CollectiveLine | None = None

    @property
    def written(self) -> bool:
        """Whether the call has a line; of others only the backward is wanted."""
        return self.id >= 0
