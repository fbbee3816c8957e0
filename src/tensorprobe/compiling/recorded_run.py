"""One recorded run of a compiled graph: its inputs, the graphs of each stage, their replays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tensorprobe.compiling.compile_records import (
    CompiledParts,
    GraphNode,
    GraphRun,
    RecordedGraph,
    Stage,
    StoredTensor,
    Value,
)
from tensorprobe.compiling.graph_replay import GraphReplay, is_random
from tensorprobe.compiling.rounded_replays import Given, RoundedReplays
from tensorprobe.compiling.stage_findings import FaultStage, StageFinding, StagesJudged
from tensorprobe.errors import NotReplayable
from tensorprobe.replay.rebuild import with_stride

_GIVEN_BY_PROGRAM = ("primals", "tangents")  # inputs of a backward graph that nobody may overwrite


class RecordedRun:
    """What the judges of all stages need of a run.

    `graph` is what inductor's passes made, `aot` what they were given, `source` the latter where it
    is known.
    """

    def __init__(self, parts: CompiledParts, run: GraphRun, judged: StagesJudged) -> None:
        self.parts = parts
        self.run = run
        self.judged = judged
        graph = parts.graphs.get(run.graph)
        if graph is None:
            raise NotReplayable("it was compiled before recording began, so its graph is not known")
        self.graph = graph
        self.aot = parts.before_inductor(graph)
        self.source = self.aot or graph
        self._refuse_draws_of_devices()
        self.inputs = [self.load(value, "input") for value in run.inputs]

    def _refuse_draws_of_devices(self) -> None:
        if any(is_random(node) for node in self.source.nodes) and any(
            isinstance(value, StoredTensor) and not value.device.startswith("cpu")
            for value in (*self.run.inputs, *self.run.outputs)
        ):
            raise NotReplayable("random numbers of kernels on a device cannot be drawn again here")

    def seed(self) -> None:
        """Set torch's generator to what it was when the run began."""
        if isinstance(self.run.rng, StoredTensor):
            torch.set_rng_state(self.load(self.run.rng, "rng"))
        else:
            torch.manual_seed(0)

    def load(self, value: Value, name: str) -> Any:
        """A recorded value."""
        if isinstance(value, StoredTensor):
            content = value.load(self.parts.folder, f"run {self.run.id}, {name}")
            return with_stride(content, value.stride)
        if isinstance(value, bool | int | float) or value is None:
            return value
        raise NotReplayable(f"{name} was not kept: {value.why}")

    def constants(self, graph: RecordedGraph) -> dict[str, torch.Tensor]:
        """The tensors that a graph holds."""
        return {
            name: self.load(value, name)
            for name, value in graph.constants.items()
            if isinstance(value, StoredTensor)
        }

    def replay(
        self,
        graph: RecordedGraph,
        inputs: Sequence[Any],
        *,
        dtype: torch.dtype | None = torch.float64,
        given: Given | None = None,
    ) -> tuple[GraphReplay, list[Any]]:
        """A graph that has been run, and its inputs as they are after that."""
        replay = GraphReplay(
            graph.nodes, graph.inner, self.constants(graph), dtype=dtype, given=given
        )
        mine = [replay.cast(value) for value in inputs]
        self.seed()
        replay.run(mine)
        return replay, mine

    def replay_thrice(self, graph: RecordedGraph, given: Given | None = None) -> RoundedReplays:
        """A graph run wide, as recorded, and moved by a rounding."""
        return RoundedReplays(graph, self.inputs, self.constants(graph), self.seed, given)

    def after(self, number: int) -> Value:
        """What an input was after the run."""
        return self.run.written.get(str(number), self.run.inputs[number])

    def may_overwrite(self, number: int) -> bool:
        """Whether an input is the compiled part's own: what forward saved for backward."""
        name = self.source.inputs[number].name
        return self.graph.is_backward and not name.startswith(_GIVEN_BY_PROGRAM)

    def forward_graph(self) -> RecordedGraph:
        """The graph of aot_autograd that dynamo's became, whose backward this may be."""
        assert self.aot is not None
        if self.aot.stage != "backward":
            return self.aot
        return self.parts.of(self.aot, "forward")[-1]

    def dynamo_graph(self) -> RecordedGraph:
        """Dynamo's graph; NotReplayable where inputs of the two are not one to one."""
        assert self.aot is not None
        graphs = self.parts.of(self.aot, "dynamo")
        if len(graphs) != 1:
            raise NotReplayable(f"{len(graphs)} graphs of dynamo for one compilation")
        stage: Stage = "inference" if self.aot.stage == "inference" else "forward"
        if len(self.parts.of(self.aot, stage)) > 1:
            raise NotReplayable(
                "dynamo's graph was split into several (DDP), which go by other inputs"
            )
        n_dynamo, n_aot = len(graphs[0].inputs), len(self.forward_graph().inputs)
        if n_dynamo != n_aot:
            raise NotReplayable(f"dynamo's graph has {n_dynamo} inputs, aot_autograd's {n_aot}")
        return graphs[0]

    def find(
        self,
        stage: FaultStage,
        node: GraphNode | None,
        error: float,
        text: str,
        *,
        kernel: str = "",
        about_random: bool = False,
        more: Iterable[str] = (),
        graph: RecordedGraph | None = None,
        of: RecordedRun | None = None,
    ) -> None:
        """Say that a stage is at fault. `graph` shows it alone, on the inputs of the run `of`."""
        given = of or self
        self.judged.findings.append(
            StageFinding(
                stage=stage,
                rank=self.parts.rank,
                step=self.run.step,
                run=self.run.id,
                compilation=self.graph.compilation,
                direction="backward" if self.graph.is_backward else "forward",
                node=node,
                text=text,
                error=math.inf if math.isnan(error) else error,
                kernel=kernel,
                about_random=about_random,
                more=list(more),
                graph=graph,
                inputs=given.inputs,
                leaves=[
                    i
                    for i, value in enumerate(given.run.inputs)
                    if isinstance(value, StoredTensor) and value.requires_grad
                ],
            )
        )
