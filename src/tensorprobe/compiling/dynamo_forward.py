"""Holds the forward graph of aot_autograd against dynamo's, both in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tensorprobe.compiling.compile_records import GraphNode, RecordedGraph
from tensorprobe.compiling.graph_lookup import ancestors, last_write, node_named, output_names
from tensorprobe.compiling.graph_replay import GraphReplay
from tensorprobe.compiling.random_draws import drawn_by_aot, drawn_by_later
from tensorprobe.compiling.recorded_run import RecordedRun
from tensorprobe.compiling.rounded_replays import RoundedReplays, Three
from tensorprobe.compiling.stage_errors import LIMIT, far, shifted, value_error
from tensorprobe.compiling.stage_findings import FaultStage
from tensorprobe.errors import NotReplayable
from tensorprobe.replay.reference import ROUNDOFF


class _Other(NamedTuple):
    """A value of aot_autograd's graph that is not dynamo's."""

    name: str  # of its node
    error: float
    at: int = -1  # its number among the results; -1: what an input becomes
    input: str = ""  # the input that becomes it, by dynamo's name


def judge_forward(one: RecordedRun, replays: RoundedReplays) -> None:
    """Judge a forward graph, or one without backward. `replays` are those of aot_autograd's."""
    assert one.aot is not None
    dynamo = one.dynamo_graph()
    drawn = drawn_by_aot(dynamo, one.aot, replays.wide.values)
    right = GraphReplay(
        dynamo.nodes, dynamo.inner, one.constants(dynamo), dtype=torch.float64, given=drawn.given,
        snapshots=True,
    )  # fmt: skip
    inputs = [right.cast(value) for value in one.inputs]
    versions = [_version(each) for each in inputs]
    one.seed()
    right.run(inputs)
    if one.aot.n_results != len(right.outputs):
        raise NotReplayable(
            f"dynamo's graph has {len(right.outputs)} results, aot_autograd's {one.aot.n_results}"
        )
    one.judged.from_dynamo.add(one.run.id)
    if drawn.opaque:
        one.judged.not_judged(
            f"dynamo's {drawn.opaque}, which draws random numbers inside: its own result"
        )
    changed = {i for i, each in enumerate(inputs) if _version(each) != versions[i]}
    wrong = [
        *_other_results(one, dynamo, right, replays),
        *_other_inputs(one, dynamo, inputs, changed, replays),
    ]
    if drawn.broken:
        node, text = drawn.broken[0]
        one.find("aot_autograd", node, math.inf, text, about_random=True, graph=dynamo)
    elif wrong:
        _blame(one, dynamo, right, replays, wrong)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _error(replays: RoundedReplays, name: str, three: Three, right: Any) -> float:
    """How far aot_autograd's value, in float64, is from dynamo's."""
    wide, native, moved = three
    noise = right, shifted(right, native, wide), shifted(right, moved, wide)
    return replays.error(wide, name, noise)


def _other_results(
    one: RecordedRun, dynamo: RecordedGraph, right: GraphReplay, replays: RoundedReplays
) -> list[_Other]:
    assert one.aot is not None
    names, dynamos = output_names(one.aot), output_names(dynamo)
    found = []
    for i, expected in enumerate(right.outputs):
        at = len(one.aot.mutated) + i
        error = _error(replays, names[at], replays.output(at), expected)
        mine, its = node_named(one.aot, names[at]), node_named(dynamo, dynamos[i])
        if mine is not None and its is not None and mine.dtype and its.dtype:
            error = error if mine.dtype == its.dtype else math.inf
        if not error <= LIMIT:
            found.append(_Other(names[at], error, at))
    return found


def _other_inputs(
    one: RecordedRun, dynamo: RecordedGraph, inputs: list[Any], changed: set[int],
    replays: RoundedReplays,
) -> list[_Other]:  # fmt: skip
    """Inputs that the two graphs do not leave alike: one of them forgot to write, or wrote more."""
    assert one.aot is not None
    becomes = dict.fromkeys(one.aot.copied(), -1)
    becomes |= {i: at for at, i in enumerate(one.aot.mutated)}
    found = []
    names = output_names(one.aot)
    for i in sorted(changed | set(becomes)):
        if i >= len(inputs):
            continue
        at = becomes.get(i, -1)
        name = names[at] if at >= 0 else one.aot.inputs[i].name
        three = replays.output(at) if at >= 0 else replays.after(i)
        error = _error(replays, name, three, inputs[i])
        if not error <= LIMIT:
            found.append(_Other(name, error, at, dynamo.inputs[i].name))
    return found


def _blame(
    one: RecordedRun, dynamo: RecordedGraph, right: GraphReplay, replays: RoundedReplays,
    wrong: list[_Other],
) -> None:  # fmt: skip
    assert one.aot is not None
    worst = max(wrong, key=lambda each: each.error)
    stage: FaultStage = "aot_autograd"
    graph, values = one.aot, replays.wide.values
    joint = one.parts.of(one.aot, "joint")
    if len(joint) == 1 and worst.at >= 0:
        try:
            made, outputs = _joint_values(one, joint[0], replays, len(right.outputs))
        except NotReplayable as reason:
            one.judged.not_judged(f"the joint graph: {reason}")
        else:
            numbers = [each.at for each in wrong if each.at >= 0]
            if _are_same(outputs, replays, numbers, worst.name):
                graph, values = joint[0], made
            else:
                stage = "inductor's joint-graph passes"
    node = _first_other(dynamo, right.seen, graph, values)
    if node is None and worst.input:
        node = last_write(dynamo, worst.input)
    what = f"{worst.name} is {far(worst.error)} what dynamo's graph gives"
    if worst.input:
        what = f"what {worst.input} becomes is {far(worst.error)} what dynamo's graph writes to it"
    one.find(stage, node, worst.error, f"{what}, both in float64{_made(graph, node)}", graph=dynamo)


def _made(graph: RecordedGraph, node: GraphNode | None) -> str:
    """What a node of dynamo's graph was decomposed into."""
    if node is None:
        return ""
    made_of = [each for each in graph.nodes if each.origin == node.name]
    names = dict.fromkeys(each.target.rpartition("ops.")[2] for each in made_of)
    return f"; {node.name} became {', '.join(list(names)[:6])}" if names else ""


def _are_same(outputs: list[Any], replays: RoundedReplays, numbers: list[int], name: str) -> bool:
    u = replays.roundoff(name)
    pairs = [(outputs[i], replays.wide.outputs[i]) for i in numbers]
    return all(value_error(a, b, b, b, u) <= LIMIT for a, b in pairs)


def _joint_values(
    one: RecordedRun, joint: RecordedGraph, replays: RoundedReplays, n_results: int
) -> tuple[dict[str, Any], list[Any]]:
    """The forward part of the joint graph, in float64: all values, and its first results."""
    assert one.aot is not None
    names = output_names(joint)[: len(one.aot.mutated) + n_results]
    needed = ancestors(joint, names)
    inputs = joint.inputs[: len(one.inputs)]
    kept = [node for node in joint.nodes if node.name in needed and node.kind != "input"]
    if any(node.name in needed for node in joint.inputs[len(inputs) :]):
        raise NotReplayable("its results depend on gradients")
    nodes = (*inputs, *kept)
    part = RecordedGraph(joint.id, joint.stage, joint.compilation, nodes)
    drawn = drawn_by_later(part, one.aot, lambda: replays.native.values)
    replay = GraphReplay(
        nodes, joint.inner, one.constants(joint), dtype=torch.float64, given=drawn.given
    )
    one.seed()
    replay.run([replay.cast(value) for value in one.inputs])
    return replay.values, [replay.values.get(name) for name in names]


def _first_other(
    dynamo: RecordedGraph,
    right: Mapping[str, Any],
    graph: RecordedGraph,
    values: Mapping[str, Any],
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
        if all(value_error(each, expected, expected, expected, u) > LIMIT for each in alike):
            return node
    return None
