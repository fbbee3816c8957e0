"""A call between its beginning and its end."""

from __future__ import annotations

import torch

from tensorprobe.capture.gradients import InputEdges, Path
from tensorprobe.capture.naming import CallNames
from tensorprobe.records import Keep

NOTHING: frozenset[str] = frozenset()


class OpenCall:
    """A call that has begun and not ended."""

    __slots__ = (
        "draws",
        "edges",
        "id",
        "inputs",
        "keep",
        "names",
        "notes",
        "stack",
        "step",
        "versions",
        "writes",
    )

    def __init__(self, names: CallNames, keep: Keep, step: int) -> None:
        self.id = -1
        self.names = names
        self.keep = keep
        self.step = step
        self.stack: int | None = None
        self.edges: InputEdges | None = None
        self.inputs: list[tuple[torch.Tensor, Path]] = []
        self.versions: list[int] = []
        self.writes: frozenset[str] = NOTHING  # arguments written to without moving their version
        self.draws: tuple[torch.Generator, torch.Tensor] | None = None  # its state before the call
        self.notes: list[str] = []

    @property
    def written(self) -> bool:
        """Whether the call has a line; of others only the backward is wanted."""
        return self.id >= 0
