"""Which stage of torch.compile made a wrong result: each stage's graph is run by itself.

From what a compiled part was given, dynamo's graph is run node by node, then the graphs of
aot_autograd, then the one that inductor's passes made, each in float64. The first that says
something else than the one before is at fault; if all agree, and what came out of the generated
code is beyond rounding of them, a kernel is. Rounding is what a run of the same graph in the
recorded dtypes, and one with inputs moved by a rounding, are off by: fused multiply-adds, reordered
sums, and numbers kept wide inside of a kernel stay below that.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
from tensorprobe.compiling.graph_replay import GraphReplay, is_random, nodes_read
from tensorprobe.devices import rng_kept
from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.replay.rebuild import with_stride
from tensorprobe.replay.reference import ROUNDOFF, misplaced, quiet, rms, smallest

FaultStage = Literal[
    "dynamo", "aot_autograd", "inductor's joint-graph passes", "inductor's graph passes", "kernel"
]
LIMIT = 16.0  # units of what rounding explains, as for recorded calls
_PEAK = 64.0  # of one number, in roundings of its size
_FEW = 0.01  # of the numbers: decisions that rounding may turn over
_STATISTICAL = 6.0  # standard deviations
_CPU = torch.device("cpu")
_DROPOUT = re.compile(r"(^|\.)(dropout|alpha_dropout|feature_alpha_dropout|native_dropout)\b")


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
    more: list[str] = field(default_factory=list)  # other nodes that it may be
    graph: RecordedGraph | None = None  # of which a repro is made
    inputs: list[Any] = field(default_factory=list)


@dataclass
class StagesJudged:
    """What the runs of the compiled parts of a recording say."""

    findings: list[StageFinding] = field(default_factory=list)
    n_runs: int = 0
    n_judged: int = 0  # runs whose results were held against a replay
    n_dynamo: int = 0  # runs of which dynamo's graph was, too
    worst: float = 0.0  # the largest error that was taken for rounding
    unjudged: dict[str, int] = field(default_factory=dict)  # reason: how often

    def not_judged(self, why: str) -> None:
        self.unjudged[why] = self.unjudged.get(why, 0) + 1


def judge_compiled(
    parts: CompiledParts, tell: Callable[[str], object] | None = None
) -> StagesJudged:
    """Judge every recorded run of the compiled parts of one rank."""
    judged = StagesJudged()
    for run in parts.runs:
        judged.n_runs += 1
        if tell is not None:
            tell(f"run {run.id + 1} of {len(parts.runs)}")
        try:
            with quiet(), rng_kept(_CPU):
                _RunJudge(parts, run, judged).judge()
        except (NotReplayable, UnreadableCapture) as error:
            judged.not_judged(str(error))
        except Exception as error:  # noqa: BLE001 replaying one run
            text = str(error).strip().partition("\n")[0][:160]
            judged.not_judged(f"{type(error).__name__}: {text}")
    if not parts.runs:
        judged.not_judged("no tensors were kept: record with keep='tensors'")
    return judged


class _Replays:
    """One graph run thrice: wide, as recorded, and wide with inputs moved by a rounding."""

    def __init__(
        self, graph: RecordedGraph, inputs: Sequence[Any], constants: Mapping[str, torch.Tensor],
        seed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.graph = graph
        self._constants = constants
        self._seed = seed
        self.wide, self.wide_after = self._run(inputs, torch.float64)
        self.native, self.native_after = self._run(inputs, None)
        self._readers = {node.name: nodes_read(node) for node in graph.nodes}
        self._dtypes = {node.name: node.dtype for node in graph.nodes}
        u = max((ROUNDOFF.get(dtype, 0.0) for dtype in self._dtypes.values()), default=0.0)
        generator = torch.Generator().manual_seed(0)
        moved = [_moved(value, u, generator) for value in inputs]
        self.moved, self.moved_after = self._run(moved, torch.float64)

    def _run(
        self, inputs: Sequence[Any], dtype: torch.dtype | None
    ) -> tuple[GraphReplay, list[Any]]:
        replay = GraphReplay(self.graph.nodes, self.graph.inner, self._constants, dtype=dtype)
        mine = [replay.cast(value) for value in inputs]
        self._seed()
        replay.run(mine)
        return replay, mine

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

    def error(self, actual: Any, name: str, three: tuple[Any, Any, Any]) -> float:
        """How far `actual` is from the node's value, in units of what rounding explains."""
        return _error(actual, *three, self.roundoff(name))


class _RunJudge:
    """Judges one run of a compiled graph."""

    def __init__(self, parts: CompiledParts, run: GraphRun, judged: StagesJudged) -> None:
        self._parts = parts
        self._run = run
        self._judged = judged
        graph = parts.graphs.get(run.graph)
        if graph is None:
            raise NotReplayable("it was compiled before recording began, so its graph is not known")
        self._graph = graph
        self._aot = parts.before_inductor(graph)
        self._source = self._aot or graph
        if any(is_random(node) for node in self._source.nodes) and any(
            isinstance(value, StoredTensor) and not value.device.startswith("cpu")
            for value in (*run.inputs, *run.outputs)
        ):
            raise NotReplayable("random numbers of kernels on a device cannot be drawn again here")
        self._inputs = [self._load(value, "input") for value in run.inputs]
        self._opaque = ""  # a node of dynamo's whose numbers are taken over as they are

    def judge(self) -> None:
        replays = _Replays(
            self._source, self._inputs, self._constants(self._source), self._seed
        )  # fmt: skip
        names = _output_names(self._source)
        wrong = self._wrong_outputs(replays, names)
        self._judged.n_judged += 1
        if wrong:
            self._blame_inductor(replays, wrong)
        if self._aot is None:
            self._judged.not_judged("the graph of aot_autograd was not seen")
        elif not self._graph.is_backward:
            self._judge_forward_of_dynamo(replays)
        else:
            self._judge_backward_of_dynamo()

    # The generated code

    def _wrong_outputs(self, replays: _Replays, names: list[str]) -> list[tuple[str, float, str]]:
        """Results that are beyond rounding: the node, by how much, and what it is called."""
        run = self._run
        if len(run.outputs) != len(replays.wide.outputs):
            raise NotReplayable(
                f"the run gave {len(run.outputs)} results, its graph gives "
                f"{len(replays.wide.outputs)}"
            )
        found = []
        for i, value in enumerate(run.outputs):
            if not isinstance(value, StoredTensor):
                expected = replays.wide.outputs[i]
                if isinstance(expected, int | float) and value != expected:
                    found.append((names[i], math.inf, f"result {i}"))
                continue
            three = tuple(each.outputs[i] for each in (replays.wide, replays.native, replays.moved))
            error = replays.error(self._load(value, f"output {i}"), names[i], three)
            found += self._if_wrong(names[i], error, f"result {i}")
        inputs = self._source.inputs
        for key, value in run.written.items():
            i = int(key) if key.isdigit() else -1
            if not 0 <= i < len(inputs) or not isinstance(value, StoredTensor):
                continue
            after = (replays.wide_after, replays.native_after, replays.moved_after)
            three = tuple(each[i] for each in after)
            error = replays.error(self._load(value, "written"), inputs[i].name, three)
            found += self._if_wrong(inputs[i].name, error, f"what is written to input {i}")
        return found

    def _if_wrong(self, name: str, error: float, what: str) -> list[tuple[str, float, str]]:
        if error > LIMIT:
            return [(name, error, what)]
        self._judged.worst = max(self._judged.worst, error)
        return []

    def _blame_inductor(self, replays: _Replays, wrong: list[tuple[str, float, str]]) -> None:
        name, error, what = max(wrong, key=lambda each: each[1])
        if self._aot is not None:
            try:
                if self._blame_passes(replays):
                    return
            except NotReplayable as reason:
                self._judged.not_judged(f"the graph after inductor's passes: {reason}")
        kernel, node = self._first_wrong_kernel(replays)
        more: list[str] = []
        if node is None:
            fine = [
                name
                for name in _output_names(self._source)
                if name and name not in {each[0] for each in wrong}
            ]
            more = _suspects(self._source, [each[0] for each in wrong], fine)
            node = _named(self._source, name)
            if node is not None and node.kind == "input":
                node = None
        self._find(
            "kernel", node, error,
            f"{what} ({name}) of the generated code is {_far(error)} its graph in float64",
            kernel=kernel, more=more, graph=self._source,
        )  # fmt: skip

    def _blame_passes(self, replays: _Replays) -> bool:
        """Whether inductor's passes made another graph of the one that they were given."""
        assert self._aot is not None
        after = GraphReplay(
            self._graph.nodes, self._graph.inner, self._constants(self._graph), dtype=torch.float64
        )
        inputs = [after.cast(value) for value in self._inputs]
        self._seed()
        after.run(inputs)
        names = _output_names(self._aot)
        worst = ("", 0.0, 0)
        for i, expected in enumerate(replays.wide.outputs):
            three = (expected, replays.native.outputs[i], replays.moved.outputs[i])
            error = replays.error(after.outputs[i], names[i], three)
            if error > max(LIMIT, worst[1]):
                worst = (names[i], error, i)
        for i, expected in enumerate(replays.wide_after):
            three = (expected, replays.native_after[i], replays.moved_after[i])
            error = replays.error(inputs[i], self._aot.inputs[i].name, three)
            if error > max(LIMIT, worst[1]):
                worst = (self._aot.inputs[i].name, error, -1)
        if not worst[1]:
            return False
        node = None
        for each in self._graph.nodes:
            before = replays.wide.values.get(each.name)
            now = after.values.get(each.name)
            if each.kind == "input" or not isinstance(before, torch.Tensor):
                continue
            u = replays.roundoff(each.name)
            if _error(now, before, before, before, u) > LIMIT:
                node = each
                break
        if node is None:
            node = _named(self._graph, _output_names(self._graph)[worst[2]])
        self._find(
            "inductor's graph passes", node, worst[1],
            f"the graph after inductor's passes gives another {worst[0]} than before them: "
            f"{_far(worst[1])} it, both in float64",
            graph=self._aot,
        )  # fmt: skip
        return True

    def _first_wrong_kernel(self, replays: _Replays) -> tuple[str, GraphNode | None]:
        """The first kernel that gave something else, where kernels were recorded."""
        code = self._parts.code.get(self._graph.id)
        if code is None or not self._run.kernels:
            return "", None
        calls = list(kernel_calls(code.text))
        if [call[0] for call in calls] != [kernel.name for kernel in self._run.kernels]:
            self._judged.not_judged("the kernels that ran are not those of the code, in its order")
            return "", None
        for (name, variables), kernel in zip(calls, self._run.kernels, strict=True):
            values = [kernel.out] if kernel.out is not None else list(kernel.values)
            for variable, value in zip(variables, values, strict=False):
                node_name = code.buffers.get(variable, "")
                node = _named(self._graph, node_name)
                if node is None or not isinstance(value, StoredTensor):
                    continue
                expected = replays.wide.values.get(node_name)
                native = replays.native.values.get(node_name)
                three = expected, native, replays.moved.values.get(node_name)
                actual = self._load(value, name)
                if not isinstance(expected, torch.Tensor) or actual.shape != expected.shape:
                    continue  # it has another form in memory than the node
                if replays.error(actual, node_name, three) > LIMIT:
                    return name, node
        return "", None

    # Dynamo's graph, and aot_autograd's

    def _judge_forward_of_dynamo(self, replays: _Replays) -> None:
        assert self._aot is not None
        dynamo, why = self._dynamo_graph()
        if dynamo is None:
            self._judged.not_judged(why)
            return
        given, laws = self._random_nodes(dynamo, replays)
        self._seed()
        with_dynamo = GraphReplay(
            dynamo.nodes, dynamo.inner, self._constants(dynamo), dtype=torch.float64, given=given,
            snapshots=True,
        )  # fmt: skip
        inputs = [with_dynamo.cast(value) for value in self._inputs]
        versions = [each._version if isinstance(each, torch.Tensor) else 0 for each in inputs]
        with_dynamo.run(inputs)
        expected = with_dynamo.outputs
        n_mutated, n_results = self._aot.n_mutated, self._aot.n_results
        if n_results != len(expected):
            self._judged.not_judged(
                f"dynamo's graph has {len(expected)} results, aot_autograd's {n_results}"
            )
            return
        self._judged.n_dynamo += 1
        wrong: list[tuple[str, float, int]] = []
        names = _output_names(self._aot)

        def hold(name: str, actual: Any, right: Any, native: Any, moved: Any, at: int) -> None:
            noise = (right, _shifted(right, native, actual), _shifted(right, moved, actual))
            error = replays.error(actual, name, noise)
            if error > LIMIT:
                wrong.append((name, error, at))

        for i, right in enumerate(expected):
            at = n_mutated + i
            wide, native, moved = (
                each.outputs[at] for each in (replays.wide, replays.native, replays.moved)
            )
            hold(names[at], wide, right, native, moved, at)
        changed = [
            i
            for i, each in enumerate(inputs)
            if isinstance(each, torch.Tensor) and each._version != versions[i]
        ]
        in_graph = {int(key) for key in self._run.written if key.isdigit()}
        outside = [i for i in changed if i not in in_graph]
        for i in sorted(in_graph & set(changed)):
            after = (replays.wide_after, replays.native_after, replays.moved_after)
            wide, native, moved = (each[i] for each in after)
            hold(self._aot.inputs[i].name, wide, inputs[i], native, moved, -1)
        if len(outside) == n_mutated:
            for at, i in enumerate(outside):
                wide, native, moved = (
                    each.outputs[at] for each in (replays.wide, replays.native, replays.moved)
                )
                hold(names[at], wide, inputs[i], native, moved, at)
        else:
            lost = [dynamo.inputs[i].name for i in outside]
            self._judged.not_judged(
                f"dynamo's graph writes to {len(lost)} inputs, aot_autograd's to {n_mutated}"
            )
        if self._opaque:
            self._judged.not_judged(
                f"dynamo's {self._opaque}, which draws random numbers inside: its own result"
            )
        if laws:
            node, text = laws[0]
            self._find("aot_autograd", node, math.inf, text, graph=dynamo)
        elif wrong:
            self._blame_aot(dynamo, with_dynamo, replays, wrong)

    def _dynamo_graph(self) -> tuple[RecordedGraph | None, str]:
        assert self._aot is not None
        graphs = self._parts.of(self._aot.compilation, "dynamo")
        if len(graphs) != 1:
            return None, f"{len(graphs)} graphs of dynamo for one compilation"
        stage: Stage = "inference" if self._aot.stage == "inference" else "forward"
        if len(self._parts.of(self._aot.compilation, stage)) > 1:
            return None, "dynamo's graph was split into several (DDP), which go by other inputs"
        n_dynamo, n_aot = len(graphs[0].inputs), len(self._forward_graph().inputs)
        if n_dynamo != n_aot:
            return None, f"dynamo's graph has {n_dynamo} inputs, aot_autograd's {n_aot}"
        return graphs[0], ""

    def _forward_graph(self) -> RecordedGraph:
        assert self._aot is not None
        if self._aot.stage != "backward":
            return self._aot
        return self._parts.of(self._aot.compilation, "forward")[-1]

    def _blame_aot(
        self,
        dynamo: RecordedGraph,
        right: GraphReplay,
        replays: _Replays,
        wrong: list[tuple[str, float, int]],
    ) -> None:
        assert self._aot is not None
        name, error, at = max(wrong, key=lambda each: each[1])
        stage: FaultStage = "aot_autograd"
        graph, values = self._aot, replays.wide.values
        joint = self._parts.of(self._aot.compilation, "joint")
        if len(joint) == 1 and at >= 0:
            try:
                made, outputs = self._joint_values(
                    joint[0], self._aot.n_mutated + len(right.outputs)
                )
            except NotReplayable as reason:
                self._judged.not_judged(f"the joint graph: {reason}")
            else:
                is_same = all(
                    _error(outputs[i], replays.wide.outputs[i], *(replays.wide.outputs[i],) * 2,
                           replays.roundoff(name)) <= LIMIT
                    for _, _, i in wrong
                    if i >= 0
                )  # fmt: skip
                if is_same:
                    graph, values = joint[0], made
                else:
                    stage = "inductor's joint-graph passes"
        node = _first_other(dynamo, right.seen, graph, values, replays)
        through = ""
        if node is not None:
            made_of = [each for each in graph.nodes if each.origin == node.name]
            names = dict.fromkeys(each.target.rpartition("ops.")[2] for each in made_of)
            through = f", which became {', '.join(list(names)[:6])}" if names else ""
        self._find(
            stage, node, error,
            f"{name} is {_far(error)} what dynamo's graph gives, both in float64{through}",
            graph=dynamo,
        )  # fmt: skip

    def _joint_values(
        self, joint: RecordedGraph, n_outputs: int
    ) -> tuple[dict[str, Any], list[Any]]:
        """The forward part of the joint graph, in float64: all values, and its first results."""
        names = _output_names(joint)[:n_outputs]
        needed = _ancestors(joint, names)
        inputs = joint.inputs[: len(self._inputs)]
        kept = [node for node in joint.nodes if node.name in needed and node.kind != "input"]
        if any(node.name in needed for node in joint.inputs[len(inputs) :]):
            raise NotReplayable("its results depend on gradients")
        replay = GraphReplay(
            [*inputs, *kept], joint.inner, self._constants(joint), dtype=torch.float64
        )
        self._seed()
        replay.run([replay.cast(value) for value in self._inputs])
        return replay.values, [replay.values.get(name) for name in names]

    def _random_nodes(
        self, dynamo: RecordedGraph, replays: _Replays
    ) -> tuple[dict[str, Callable[[Any], Any]], list[tuple[GraphNode, str]]]:
        """What dynamo's random nodes gave, from aot_autograd's graph: it draws other numbers than
        eager torch. And which of them break the law that they should follow."""
        given: dict[str, Callable[[Any], Any]] = {}
        broken: list[tuple[GraphNode, str]] = []
        masks: list[tuple[GraphNode, torch.Tensor]] = []
        assert self._aot is not None
        drawn = {each.origin for each in self._aot.nodes if is_random(each) and each.origin}
        for node in dynamo.nodes:
            if node.kind not in ("call", "method", "graph"):
                continue
            if not is_random(node) and node.name not in drawn:
                continue
            made = [each for each in self._aot.nodes if each.origin == node.name]
            values = [replays.wide.values.get(each.name) for each in made]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if not _DROPOUT.search(node.target):
                alike = [each for each in tensors if str(list(each.shape)) == node.shape]
                if not alike or any(name in dynamo.inner for name in _graphs_called(dynamo, node)):
                    raise NotReplayable(
                        f"dynamo's stage: {node.name} draws random numbers, other ones than eager"
                    )
                given[node.name] = functools.partial(_as_drawn, alike[-1])
                self._opaque = node.name
                continue
            p = _probability(node)
            mask = next((value for value in tensors if value.dtype == torch.bool), None)
            if p == 0 or (p is None and node.name not in drawn):
                continue
            if p is None or mask is None:
                raise NotReplayable(
                    f"dynamo's stage: the mask of {node.name} is not in aot_autograd's graph"
                )
            count, dropped = mask.numel(), int((~mask).sum())
            spread = math.sqrt(max(count * p * (1 - p), 1e-9))
            if abs(dropped - count * p) > _STATISTICAL * spread + 1:
                text = (
                    f"{node.name} drops {dropped} of {count} numbers; with p={p:g} "
                    f"{count * p:.0f} are expected, give or take {spread:.0f}"
                )
                broken.append((node, text))
            for other, seen in masks:
                if count >= 64 and seen.shape == mask.shape and bool((seen == mask).all()):
                    text = f"{node.name} drops the same numbers as {other.name}: one seed for both"
                    broken.append((node, text))
            if 0 < p < 1:
                masks.append((node, mask))
            scale = 1 / (1 - p) if p < 1 else 0.0
            given[node.name] = functools.partial(_dropped, mask, scale)
        return given, broken

    def _judge_backward_of_dynamo(self) -> None:
        """Hold the backward graph against autograd through dynamo's graph, in float64."""
        assert self._aot is not None
        if any(
            found.stage in ("aot_autograd", "inductor's joint-graph passes")
            and (found.compilation, found.direction) == (self._graph.compilation, "forward")
            for found in self._judged.findings
        ):
            self._judged.not_judged(
                "gradients of dynamo's graph, whose forward is at fault already"
            )
            return
        dynamo, why = self._dynamo_graph()
        if dynamo is None:
            self._judged.not_judged(why)
            return
        forward = self._forward_run()
        if forward is None:
            self._judged.not_judged("the forward run of a backward one was not recorded")
            return
        aot_forward = self._forward_graph()
        before = _RunJudge(self._parts, forward, self._judged)
        wide_forward = GraphReplay(
            aot_forward.nodes, aot_forward.inner, self._constants(aot_forward), dtype=torch.float64
        )
        before._seed()
        wide_forward.run([wide_forward.cast(value) for value in before._inputs])
        by_name = dict(zip(_output_names(aot_forward), wide_forward.outputs, strict=True))
        names = [node.name for node in self._aot.inputs]
        backward = GraphReplay(
            self._aot.nodes, self._aot.inner, self._constants(self._aot), dtype=torch.float64
        )
        inputs = [
            backward.cast(by_name.get(name, value))
            for name, value in zip(names, self._inputs, strict=True)
        ]
        tangents = [value for name, value in zip(names, inputs, strict=True) if "tangents" in name]
        self._seed()
        found = backward.run(inputs)
        replays = _Replays(aot_forward, before._inputs, self._constants(aot_forward), before._seed)
        given, _ = before._random_nodes(dynamo, replays)
        if before._opaque:
            self._judged.not_judged(
                f"gradients of dynamo's graph: {before._opaque} draws random numbers inside"
            )
            return
        right = GraphReplay(
            dynamo.nodes, dynamo.inner, self._constants(dynamo), dtype=torch.float64, given=given,
            grad=True,
        )  # fmt: skip
        leaves: dict[int, torch.Tensor] = {}
        inputs = []
        for i, value in enumerate(before._inputs):
            wide = right.cast(value)
            stored = forward.inputs[i]
            if isinstance(stored, StoredTensor) and wide.is_floating_point() and (
                stored.requires_grad or (i < len(found) and isinstance(found[i], torch.Tensor))
            ):  # fmt: skip
                leaves[i] = wide.requires_grad_()
                wide = wide.view_as(wide)  # it may be written to
            inputs.append(wide)
        before._seed()
        right.run(inputs)
        results = [
            each for each in right.outputs if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if len(results) != len(tangents) or len(found) < len(before._inputs):
            self._judged.not_judged(
                f"backward has {len(tangents)} incoming gradients for {len(results)} results"
            )
            return
        between = {
            node.name: right.values[node.name]
            for node in dynamo.nodes
            if isinstance(right.values.get(node.name), torch.Tensor)
            and right.values[node.name].requires_grad
            and node.kind in ("call", "method")
        }
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                results, [*leaves.values(), *between.values()],
                [t.reshape(r.shape) for t, r in zip(tangents, results, strict=True)],
                allow_unused=True,
            )  # fmt: skip
        self._judged.n_dynamo += 1
        u = max((ROUNDOFF.get(node.dtype, 0.0) for node in self._aot.nodes), default=0.0)
        worst = (0.0, 0)
        for i, expected in zip(leaves, gradients, strict=False):
            actual = found[i]
            if expected is None and actual is None:
                continue
            if expected is None:
                expected = torch.zeros_like(actual)
            if actual is None:
                if not bool(expected.any()):
                    continue
                actual = torch.zeros_like(expected)
            worst = max(worst, (_error(actual, expected, expected, expected, u), i))
        if worst[0] > LIMIT:
            inner = dict(zip(between, gradients[len(leaves) :], strict=True))
            node = _first_other_gradient(dynamo, inner, backward.values, u)
            self._find(
                "aot_autograd", node, worst[0],
                f"the gradient of {dynamo.inputs[worst[1]].name} is {_far(worst[0])} that of "
                "dynamo's graph, both in float64",
                graph=dynamo,
            )  # fmt: skip

    def _forward_run(self) -> GraphRun | None:
        """The run whose saved tensors this backward one was given."""
        names = [node.name for node in self._source.inputs]
        mine = dict(zip(names, self._run.inputs, strict=False))
        for run in reversed(self._parts.runs[: self._run.id]):
            graph = self._parts.graphs.get(run.graph)
            if graph is None or graph.is_backward or graph.inductor != self._graph.inductor:
                continue
            if graph.compilation != self._graph.compilation:
                continue
            source = self._parts.before_inductor(graph)
            if source is None:
                continue
            saved = dict(zip(_output_names(source), run.outputs, strict=False))
            if all(
                self._is_same(value, saved[name]) for name, value in mine.items() if name in saved
            ):
                return run
        return None

    def _is_same(self, a: Value, b: Value) -> bool:
        if not isinstance(a, StoredTensor) or not isinstance(b, StoredTensor):
            return type(a) is type(b)
        if (a.shard, a.offset, a.shape) == (b.shard, b.offset, b.shape):
            return True
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        one, other = self._load(a, "saved"), self._load(b, "saved")
        return bool(((one == other) | ((one != one) & (other != other))).all())

    # Help

    def _find(
        self,
        stage: FaultStage,
        node: GraphNode | None,
        error: float,
        text: str,
        *,
        kernel: str = "",
        more: Iterable[str] = (),
        graph: RecordedGraph | None = None,
    ) -> None:
        self._judged.findings.append(
            StageFinding(
                stage=stage,
                rank=self._parts.rank,
                step=self._run.step,
                run=self._run.id,
                compilation=self._graph.compilation,
                direction="backward" if self._graph.is_backward else "forward",
                node=node,
                text=text,
                error=error,
                kernel=kernel,
                more=list(more),
                graph=graph,
                inputs=self._inputs,
            )
        )

    def _seed(self) -> None:
        if isinstance(self._run.rng, StoredTensor):
            torch.set_rng_state(self._load(self._run.rng, "rng"))
        else:
            torch.manual_seed(0)

    def _load(self, value: Value, name: str) -> Any:
        if isinstance(value, StoredTensor):
            content = value.load(self._parts.folder, f"run {self._run.id}, {name}")
            return with_stride(content, value.stride)
        if isinstance(value, bool | int | float) or value is None:
            return value
        raise NotReplayable(f"{name} was not kept: {value.why}")

    def _constants(self, graph: RecordedGraph) -> dict[str, torch.Tensor]:
        return {
            name: self._load(value, name)
            for name, value in graph.constants.items()
            if isinstance(value, StoredTensor)
        }


def _as_drawn(value: torch.Tensor, args: Any) -> torch.Tensor:
    """A random node whose numbers are known."""
    return value.clone()


def _dropped(mask: torch.Tensor, scale: float, args: Any) -> Any:
    """A dropout whose mask is known."""
    return args[0] * mask * scale


# How far apart


def _error(actual: Any, wide: Any, native: Any, moved: Any, u: float) -> float:
    """How far a value is from its reference in units of rounding; 0 where it is as good as eager's.

    `native` and `moved` say how far rounding alone takes the same graph.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(wide, torch.Tensor):
        return (
            0.0 if isinstance(actual, torch.Tensor) == isinstance(wide, torch.Tensor) else math.inf
        )
    if actual.shape != wide.shape:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    actual, wide = actual.detach(), wide.detach()
    if not (wide.is_floating_point() or wide.is_complex()):
        return _discrete_error(actual, wide, native, moved, u)
    found = actual.to(wide.dtype)
    eager = native.detach().to(wide.dtype)
    if torch.equal(found, eager):
        return 0.0
    dtype = actual.dtype
    wrong = misplaced(found, wide, dtype)
    if bool(wrong.any()) and bool(misplaced(found, eager, dtype).any()):
        return math.inf
    finite = found.isfinite() & wide.isfinite() & eager.isfinite()
    found, wide, eager = (torch.where(finite, each, 0.0) for each in (found, wide, eager))
    shaken = torch.where(finite, moved.detach().to(wide.dtype), 0.0)
    shaken = torch.where(shaken.isfinite(), shaken, wide)
    size = rms(wide)
    least = smallest(dtype)
    unit = math.sqrt((u * size) ** 2 + rms(eager - wide) ** 2 + rms(shaken - wide) ** 2)
    unit = max(unit, least)
    whole = min(rms(found - wide), rms(found - eager)) / unit
    allowed = _PEAK * u * (wide.abs() + size) / LIMIT + least
    allowed = allowed + (eager - wide).abs().max() + (shaken - wide).abs().max()
    apart = torch.minimum((found - wide).abs(), (found - eager).abs())
    return max(whole, float((apart / allowed).max()))


def _discrete_error(actual: Any, wide: Any, native: Any, moved: Any, u: float) -> float:
    """Of whole numbers and masks: rounding may turn over a few of those that it decides on."""
    if actual.dtype != wide.dtype:
        return math.inf
    flips = min(int((actual != wide).sum()), int((actual != native).sum()))
    if not flips:
        return 0.0
    by_rounding = int((native != wide).sum()) + int((moved != wide).sum())
    if not by_rounding and u == 0.0:
        return math.inf
    expected = by_rounding + u * actual.numel()
    error = flips / max(expected, 1.0)
    return error if flips > _FEW * actual.numel() or error <= LIMIT else LIMIT


def _shifted(right: Any, noisy: Any, wide: Any) -> Any:
    """`right`, off by what `noisy` is off from `wide`."""
    if not all(isinstance(each, torch.Tensor) for each in (right, noisy, wide)):
        return right
    if right.shape != wide.shape or not right.is_floating_point():
        return right
    return right + (noisy.to(right.dtype) - wide.to(right.dtype))


def _moved(value: Any, u: float, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8)
    return value.to(torch.float64) * (1 + u * (2 * signs.to(torch.float64) - 1))


def _far(error: float) -> str:
    return "not like" if math.isinf(error) else f"{error:.3g} roundings off"


# Graphs


def _output_names(graph: RecordedGraph) -> list[str]:
    """The node of each result, in order; an empty name for what is no node."""
    output = next((node for node in reversed(graph.nodes) if node.kind == "output"), None)
    names: list[str] = []

    def collect(tree: Any) -> None:
        if isinstance(tree, dict):
            special = tree.get("special")
            if isinstance(special, list) and len(special) == 2:
                names.append(str(special[1]))
            elif "tuple" in tree:
                collect(tree["tuple"])
            elif "dict" in tree:
                for pair in tree["dict"]:
                    collect(pair[1])
            else:
                names.append("")
        elif isinstance(tree, list):
            for item in tree:
                collect(item)
        else:
            names.append("")

    if output is not None:
        args = output.args.get("tuple", []) if isinstance(output.args, dict) else []
        collect(args[0] if args else [])
    return names


def _named(graph: RecordedGraph, name: str) -> GraphNode | None:
    return next((node for node in graph.nodes if node.name == name), None)


def _ancestors(graph: RecordedGraph, names: Iterable[str]) -> set[str]:
    reads = {node.name: nodes_read(node) for node in graph.nodes}
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += reads.get(name, ())
    return found


def _suspects(graph: RecordedGraph, wrong: list[str], fine: list[str]) -> list[str]:
    """Nodes that every wrong result comes from and no right one: a kernel of these is at fault."""
    inputs = {node.name for node in graph.inputs}
    common = set.intersection(*(_ancestors(graph, [name]) for name in wrong))
    common -= _ancestors(graph, fine) | inputs
    return [node.name for node in graph.nodes if node.name in common]


def _first_other(
    dynamo: RecordedGraph,
    right: Mapping[str, Any],
    graph: RecordedGraph,
    values: Mapping[str, Any],
    replays: _Replays,
) -> GraphNode | None:
    """The first node of dynamo's graph of which the other graph has no value that is the same."""
    origins: dict[str, list[str]] = {}
    for node in graph.nodes:
        origins.setdefault(node.origin, []).append(node.name)
    u = max((ROUNDOFF.get(node.dtype, 0.0) for node in graph.nodes), default=0.0)
    for node in dynamo.nodes:
        expected = right.get(node.name)
        if node.kind == "input" or not isinstance(expected, torch.Tensor):
            continue
        made = [values.get(name) for name in origins.get(node.name, ())]
        alike = [
            each for each in made if isinstance(each, torch.Tensor) and each.shape == expected.shape
        ]
        if not alike:
            if made and all(isinstance(each, torch.Tensor) for each in made):
                return node  # of another shape
            continue
        if all(_error(each, expected, expected, expected, u) > LIMIT for each in alike):
            return node
    return None


def _first_other_gradient(
    dynamo: RecordedGraph, gradients: Mapping[str, Any], values: Mapping[str, Any], u: float
) -> GraphNode | None:
    """The node whose backward is wrong: its own gradient is found in the backward graph, and none
    of those before it."""
    made = [value for value in values.values() if isinstance(value, torch.Tensor)]

    def is_there(gradient: torch.Tensor) -> bool:
        return any(
            each.numel() == gradient.numel()
            and _error(each.reshape(gradient.shape), gradient, gradient, gradient, u) <= LIMIT
            for each in made
        )

    there = {
        name: gradient is not None and is_there(gradient) for name, gradient in gradients.items()
    }
    for node in reversed(dynamo.nodes):
        before = [name for name in nodes_read(node) if name in there]
        if there.get(node.name):
            above = [n for n in _ancestors(dynamo, before) if n in there]
            if not any(there[name] for name in above):
                return node
    return None


def _graphs_called(graph: RecordedGraph, node: GraphNode) -> list[str]:
    """The graphs that a node is given to run."""
    targets = {each.name: each.target for each in graph.nodes if each.kind == "graph"}
    return [targets[name] for name in nodes_read(node) if name in targets]


def _probability(node: GraphNode) -> float | None:
    """The share that a dropout drops."""
    args = node.args.get("tuple", []) if isinstance(node.args, dict) else []
    pairs = node.kwargs.get("dict", []) if isinstance(node.kwargs, dict) else []
    named = {pair[0]: pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2}
    p = named.get("p", args[1] if len(args) > 1 else 0.5)
    training = named.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(p, int | float) or training is not True:
        return None
    return float(p) if 0 <= p <= 1 else None


_CALL = re.compile(r"^\s+(cpp_fused\w*|extern_kernels\.\w+)\((.*)\)\s*$")
_OUT = re.compile(r"\bout=(\w+)\)?$")


def kernel_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """The kernels that generated code calls in its order, each with the names of its tensors."""
    start = text.rfind("def call(")
    for line in text[max(start, 0) :].splitlines():
        found = _CALL.match(line)
        if not found:
            continue
        name, arguments = found.groups()
        out = _OUT.search(arguments)
        if name.startswith("extern_kernels"):
            yield name, [out[1]] if out else []
        else:
            yield name, [each.strip() for each in _split(arguments)]


def _split(arguments: str) -> list[str]:
    """Arguments at their commas, those inside of brackets left out."""
    parts, depth, current = [], 0, ""
    for letter in arguments:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]
