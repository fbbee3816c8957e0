"""Holds the backward graph of aot_autograd against autograd through dynamo's, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorprobe.compiling.compile_records import (
    GraphNode,
    GraphRun,
    RecordedGraph,
    StoredTensor,
    Value,
)
from tensorprobe.compiling.graph_lookup import ancestors, node_named, output_names
from tensorprobe.compiling.graph_replay import GraphReplay, nodes_read
from tensorprobe.compiling.random_draws import drawn_by_aot, drawn_by_later
from tensorprobe.compiling.recorded_run import RecordedRun
from tensorprobe.compiling.rounded_replays import Given, RoundedReplays, Three
from tensorprobe.compiling.stage_errors import LIMIT, far, shifted, value_error
from tensorprobe.compiling.stage_findings import FaultStage
from tensorprobe.errors import NotReplayable
from tensorprobe.replay.reference import ROUNDOFF

_Values = dict[str, Value]  # by the name of the node


class _DynamosGradients(NamedTuple):
    """Gradients of dynamo's graph: of its inputs by number, and of the nodes in between."""

    inputs: dict[int, torch.Tensor | None]
    between: dict[str, torch.Tensor | None]


def judge_backward(one: RecordedRun, replays: RoundedReplays) -> None:
    """Judge the backward run of a graph whose forward is right. `replays` are of its own graph."""
    assert one.aot is not None
    if any(
        found.stage in ("aot_autograd", "inductor's joint-graph passes")
        and (found.compilation, found.direction) == (one.graph.compilation, "forward")
        for found in one.judged.findings
    ):
        raise NotReplayable("gradients of dynamo's graph, whose forward is at fault already")
    dynamo = one.dynamo_graph()
    run = _forward_run(one)
    if run is None:
        _judge_saved(one, dynamo)
        return
    before = RecordedRun(one.parts, run, one.judged)
    aot_forward = one.forward_graph()
    forward, _ = before.replay(aot_forward, before.inputs)
    backward, incoming = _aot_backward(one, aot_forward, forward)
    drawn = drawn_by_aot(dynamo, aot_forward, forward.values)
    if drawn.opaque:
        raise NotReplayable(
            f"gradients of dynamo's graph: {drawn.opaque} draws random numbers inside"
        )
    right = _gradients(before, dynamo, incoming, backward.outputs, drawn.given)
    one.judged.from_dynamo.add(one.run.id)
    _hold(one, before, dynamo, right, backward, replays, incoming)


def _judge_saved(one: RecordedRun, dynamo: RecordedGraph) -> None:
    """A backward run that no forward run saved what it was given for: the partitioner mixed it up,
    or the forward run was not recorded."""
    for run, saved, mine in _forward_runs(one):
        wrong = [name for name in saved if not _is_same(one, mine[name], saved[name])]
        taken = {
            name: next((n for n in saved if n != name and _is_same(one, mine[name], saved[n])), "")
            for name in wrong
        }
        if len(wrong) < len(saved) and all(taken.values()):
            name = wrong[0]
            before = RecordedRun(one.parts, run, one.judged)
            one.find(
                "aot_autograd", node_named(one.forward_graph(), name), math.inf,
                f"backward gets {taken[name]} of forward where its graph reads {name}: the "
                "partitioner mixed up what forward saves",
                graph=dynamo, of=before,
            )  # fmt: skip
            return
    raise NotReplayable("no recorded forward run saved what a backward one was given")


def _aot_backward(
    one: RecordedRun, aot_forward: RecordedGraph, forward: GraphReplay
) -> tuple[GraphReplay, list[Any]]:
    """The backward graph on what forward saves in float64, and the gradients that come in."""
    assert one.aot is not None
    saved = dict(zip(output_names(aot_forward), forward.outputs, strict=True))
    names = [node.name for node in one.aot.inputs]
    inputs = [saved.get(name, value) for name, value in zip(names, one.inputs, strict=True)]
    incoming = [value for name, value in zip(names, inputs, strict=True) if "tangents" in name]
    backward, _ = one.replay(one.aot, inputs)
    return backward, [backward.cast(value) for value in incoming]


def _gradients(
    before: RecordedRun,
    dynamo: RecordedGraph,
    incoming: Sequence[torch.Tensor],
    found: Sequence[Any],
    given: Given,
) -> _DynamosGradients:
    right = GraphReplay(
        dynamo.nodes, dynamo.inner, before.constants(dynamo), dtype=torch.float64, given=given,
        grad=True,
    )  # fmt: skip
    leaves: dict[int, torch.Tensor] = {}
    inputs = []
    for i, value in enumerate(before.inputs):
        wide = right.cast(value)
        stored = before.run.inputs[i]
        has_gradient = i < len(found) and isinstance(found[i], torch.Tensor)
        if isinstance(stored, StoredTensor) and wide.is_floating_point() and (
            stored.requires_grad or has_gradient
        ):  # fmt: skip
            leaves[i] = wide.requires_grad_()
            wide = wide.view_as(wide)  # it may be written to
        inputs.append(wide)
    before.seed()
    right.run(inputs)
    results = [
        each for each in right.outputs if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    if len(results) != len(incoming) or len(found) < len(before.inputs):
        raise NotReplayable(
            f"backward has {len(incoming)} incoming gradients for {len(results)} results"
        )
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
            [t.reshape(r.shape) for t, r in zip(incoming, results, strict=True)],
            allow_unused=True,
        )  # fmt: skip
    return _DynamosGradients(
        dict(zip(leaves, gradients, strict=False)),
        dict(zip(between, gradients[len(leaves) :], strict=True)),
    )


def _hold(
    one: RecordedRun,
    before: RecordedRun,
    dynamo: RecordedGraph,
    right: _DynamosGradients,
    backward: GraphReplay,
    replays: RoundedReplays,
    incoming: Sequence[torch.Tensor],
) -> None:
    assert one.aot is not None
    u = max((ROUNDOFF.get(node.dtype, 0.0) for node in one.aot.nodes), default=0.0)

    def error(actual: Any, i: int) -> float:
        return _gradient_error(actual, right.inputs[i], replays.output(i), u)

    worst, i = max(((error(backward.outputs[i], i), i) for i in right.inputs), default=(0.0, 0))
    if worst <= LIMIT:
        return
    stage: FaultStage = "aot_autograd"
    try:
        joint = _joint_gradients(before, one.forward_graph(), incoming)
        if error(joint[i], i) <= LIMIT:
            stage = "inductor's joint-graph passes"
    except NotReplayable as reason:
        one.judged.not_judged(f"the joint graph: {reason}")
    one.find(
        stage, _first_other(dynamo, right.between, backward.values, u), worst,
        f"the gradient of {dynamo.inputs[i].name} is {far(worst)} that of dynamo's graph, both in "
        "float64",
        graph=dynamo, of=before,
    )  # fmt: skip


def _joint_gradients(
    before: RecordedRun, aot_forward: RecordedGraph, incoming: Sequence[torch.Tensor]
) -> list[Any]:
    """What the joint graph, before inductor's passes and the partitioner, gives as gradients."""
    found = before.parts.of(aot_forward, "joint")
    if len(found) != 1:
        raise NotReplayable(f"there are {len(found)} of one compilation")

    def values() -> dict[str, Any]:
        return before.replay(aot_forward, before.inputs, dtype=None)[0].values

    drawn = drawn_by_later(found[0], aot_forward, values)
    replay, _ = before.replay(found[0], [*before.inputs, *incoming], given=drawn.given)
    gradients = replay.outputs[len(aot_forward.mutated) + aot_forward.n_results :]
    if len(gradients) < len(before.inputs):
        raise NotReplayable(f"it has {len(gradients)} gradients for {len(before.inputs)} inputs")
    return gradients


def _gradient_error(actual: Any, expected: torch.Tensor | None, noise: Three, u: float) -> float:
    """None, where no gradient comes, is zeros. Some gradients are zero but for rounding (of a bias
    in front of a batch norm), so rounding of the graph itself counts too."""
    if expected is None and actual is None:
        return 0.0
    if expected is None:
        expected = torch.zeros_like(actual)
    if actual is None:
        actual = torch.zeros_like(expected)
    wide, native, moved = noise
    native, moved = shifted(expected, native, wide), shifted(expected, moved, wide)
    return value_error(actual, expected, native, moved, u)


def _first_other(
    dynamo: RecordedGraph,
    gradients: Mapping[str, torch.Tensor | None],
    values: Mapping[str, Any],
    u: float,
) -> GraphNode | None:
    """The node whose backward is wrong: its own gradient is found in the backward graph, and none
    of those before it."""
    made = [value for value in values.values() if isinstance(value, torch.Tensor)]

    def is_there(gradient: torch.Tensor) -> bool:
        return any(
            each.numel() == gradient.numel()
            and value_error(each.reshape(gradient.shape), gradient, gradient, gradient, u) <= LIMIT
            for each in made
        )

    there = {
        name: gradient is not None and is_there(gradient) for name, gradient in gradients.items()
    }
    for node in reversed(dynamo.nodes):
        before = [name for name in nodes_read(node) if name in there]
        if there.get(node.name):
            above = [n for n in ancestors(dynamo, before) if n in there]
            if not any(there[name] for name in above):
                return node
    return None


def _forward_run(one: RecordedRun) -> GraphRun | None:
    """The run whose saved tensors this backward one was given."""
    for run, saved, mine in _forward_runs(one):
        if all(_is_same(one, mine[name], saved[name]) for name in saved):
            return run
    return None


def _forward_runs(
    one: RecordedRun,
) -> Iterator[tuple[GraphRun, dict[str, Value], dict[str, Value]]]:
    """Earlier runs of the forward graph, each with what it saved and what this one was given."""
    names = [node.name for node in one.source.inputs]
    mine = dict(zip(names, one.run.inputs, strict=False))
    for run in reversed(one.parts.runs):
        graph = one.parts.graphs.get(run.graph)
        if run.id >= one.run.id or graph is None or graph.is_backward:
            continue
        if (graph.inductor, graph.compilation) != (one.graph.inductor, one.graph.compilation):
            continue
        source = one.parts.before_inductor(graph)
        if source is not None:
            outputs = zip(output_names(source), run.outputs, strict=False)
            yield run, {name: value for name, value in outputs if name in mine}, mine


def _is_same(one: RecordedRun, a: Value, b: Value) -> bool:
    if not isinstance(a, StoredTensor) or not isinstance(b, StoredTensor):
        return type(a) is type(b)
    if (a.shard, a.offset, a.shape) == (b.shard, b.offset, b.shape):
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = one.load(a, "saved"), one.load(b, "saved")
    return bool(((first == second) | ((first != first) & (second != second))).all())
