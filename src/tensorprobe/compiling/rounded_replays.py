"""One graph run thrice: wide, as recorded, and wide with inputs moved by a rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tensorprobe.compiling.compile_records import RecordedGraph
from tensorprobe.compiling.graph_replay import GraphReplay, nodes_read
from tensorprobe.compiling.stage_errors import moved_by_rounding, value_error
from tensorprobe.replay.reference import ROUNDOFF

Given = Mapping[str, Callable[[Any], Any]]
Three = tuple[Any, Any, Any]  # a value wide, as recorded, and moved by a rounding


class RoundedReplays:
    """The three runs, each with what it leaves in its inputs."""

    def __init__(
        self,
        graph: RecordedGraph,
        inputs: Sequence[Any],
        constants: Mapping[str, torch.Tensor],
        seed: Callable[[], None],
        given: Given | None = None,
    ) -> None:
        self.graph = graph
        self._constants = constants
        self._seed = seed
        self._given = given
        self.wide, self._wide_after = self._run(inputs, torch.float64)
        self.native, self._native_after = self._run(inputs, None)
        self._readers = {node.name: nodes_read(node) for node in graph.nodes}
        self._dtypes = {node.name: node.dtype for node in graph.nodes}
        u = max((ROUNDOFF.get(dtype, 0.0) for dtype in self._dtypes.values()), default=0.0)
        generator = torch.Generator().manual_seed(0)
        moved = [moved_by_rounding(value, u, generator) for value in inputs]
        self.moved, self._moved_after = self._run(moved, torch.float64)

    def _run(
        self, inputs: Sequence[Any], dtype: torch.dtype | None
    ) -> tuple[GraphReplay, list[Any]]:
        replay = GraphReplay(
            self.graph.nodes, self.graph.inner, self._constants, dtype=dtype, given=self._given
        )
        mine = [replay.cast(value) for value in inputs]
        self._seed()
        replay.run(mine)
        return replay, mine

    def output(self, number: int) -> Three:
        wide, native, moved = (each.outputs for each in (self.wide, self.native, self.moved))
        return wide[number], native[number], moved[number]

    def after(self, number: int) -> Three:
        """What an input is afterwards."""
        return self._wide_after[number], self._native_after[number], self._moved_after[number]

    def node(self, name: str) -> Three:
        wide, native, moved = (each.values for each in (self.wide, self.native, self.moved))
        return wide.get(name), native.get(name), moved.get(name)

    def roundoff(self, name: str) -> float:
        """Of the coarsest dtype on the way to a node."""
        seen: set[str] = set()
        todo, found = [name], 0.0
        while todo:
            each = todo.pop()
            if each not in seen:
                seen.add(each)
                found = max(found, ROUNDOFF.get(self._dtypes.get(each, ""), 0.0))
                todo += self._readers.get(each, ())
        return found

    def error(self, actual: Any, name: str, three: Three) -> float:
        """How far `actual` is from the node's value, in units of what rounding explains."""
        return value_error(actual, *three, self.roundoff(name))
