"""What one rank heard of the others: a part of what its results are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tensorprobe.collectives.links import Key

if TYPE_CHECKING:
    from tensorprobe.collectives.reductions import ReductionError


class ToldRow(NamedTuple):
    """A tensor that another rank gave, as far as it matters here."""

    distance: float  # rounding.distance
    unit: float  # rounding.pair_roundoff
    same_bits: bool | None
    nonfinite_differs: bool

    @property
    def relative(self) -> float:
        """How far it is from its partner relative to its size, instead of in roundings of it."""
        return self.distance * self.unit if self.unit else self.distance


class Heard(msgspec.Struct):
    """What one rank heard in one communication."""

    key: Key
    words: str  # "all_reduce #0 of ranks 0, 1"
    rows: list[ToldRow]  # what the others gave
    own: set[str]  # the inputs that this rank gave, without the memory that it only got
    got: set[str]
    members: tuple[int, ...]
    missing: tuple[int, ...]  # members that were not compared
    is_alone: bool = False  # the run has ranks that were not compared
    judged: tuple[ReductionError | None, ReductionError | None] = (
        None,
        None,
    )  # of each side, by tensors
    otherwise: dict[int, list[str]] = {}  # members that call it with other arguments

    @property
    def is_partial(self) -> bool:
        return bool(self.missing) or self.is_alone


class Others(NamedTuple):
    """How far apart what others sent to a parameter is, relative to its size, and that size."""

    apart: float
    size: float
    members: tuple[int, ...]


class RankHears(msgspec.Struct):
    """What one rank heard: by step and name of the call, and by step and parameter."""

    calls: dict[tuple[int, str], Heard] = {}
    gradients: dict[tuple[int, str], Others] = {}
    own_gradients: dict[tuple[int, str], tuple[float, float]] = {}  # how far apart, and the size
    ddp_steps: set[int] = set()  # in which a model runs in DistributedDataParallel
    is_whole: bool = True  # all ranks of the run were compared
