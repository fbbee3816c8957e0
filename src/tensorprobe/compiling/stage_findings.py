"""What judging compiled parts says: which stage is wrong, where, and what could not be judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tensorprobe.compiling.compile_records import GraphNode, RecordedGraph

FaultStage = Literal[
    "dynamo", "aot_autograd", "inductor's joint-graph passes", "inductor's graph passes", "kernel"
]


@dataclass
class StageFinding:
    """A stage that made something else than it was given, and the node at which it shows."""

    stage: FaultStage
    rank: int
    step: int
    run: int
    compilation: str
    direction: str  # forward, backward
    node: GraphNode | None
    text: str  # what is wrong
    error: float  # in units of what rounding explains; inf for shapes, NaN, whole numbers
    kernel: str = ""
    about_random: bool = False  # it is the random numbers that are wrong
    more: list[str] = field(default_factory=list)  # other nodes that it may be
    graph: RecordedGraph | None = None  # of which a repro is made
    inputs: list[Any] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)  # inputs that get gradients


@dataclass
class StagesJudged:
    """What the runs of the compiled parts of a recording say."""

    findings: list[StageFinding] = field(default_factory=list)
    n_runs: int = 0
    n_judged: int = 0  # runs whose results were held against a replay
    from_dynamo: set[int] = field(default_factory=set)  # runs of which dynamo's graph was, too
    worst: float = 0.0  # the largest error that was taken for rounding
    unjudged: dict[str, int] = field(default_factory=dict)  # reason: how often

    @property
    def n_dynamo(self) -> int:
        return len(self.from_dynamo)

    def not_judged(self, why: str) -> None:
        self.unjudged[why] = self.unjudged.get(why, 0) + 1
