"""Judges what inductor made of a graph: its passes, and the kernels that it generated."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tensorprobe.compiling.compile_records import GraphNode, StoredTensor
from tensorprobe.compiling.graph_lookup import node_named, output_names, suspects
from tensorprobe.compiling.graph_replay import GraphReplay
from tensorprobe.compiling.kernel_calls import kernel_calls
from tensorprobe.compiling.random_draws import Drawn, drawn_by_later
from tensorprobe.compiling.recorded_run import RecordedRun
from tensorprobe.compiling.rounded_replays import RoundedReplays, Three
from tensorprobe.compiling.stage_errors import LIMIT, far, value_error
from tensorprobe.errors import NotReplayable


class _Wrong(NamedTuple):
    """A result that is beyond rounding: its node, by how much, and what it is called."""

    name: str
    error: float
    what: str


def judge_inductor(one: RecordedRun) -> RoundedReplays:
    """Hold what came out of the generated code against the graph that inductor was given."""
    drawn = Drawn({}, [])
    if one.aot is not None:
        drawn = drawn_by_later(one.aot, one.graph, lambda: _native_values(one))
    replays = one.replay_thrice(one.source, drawn.given)
    wrong = [*_wrong_outputs(one, replays), *_wrong_inputs(one, replays)]
    one.judged.n_judged += 1
    if drawn.broken:
        node, text = drawn.broken[0]
        one.find("inductor's graph passes", node, math.inf, text, about_random=True, graph=one.aot)
    elif wrong:
        _blame(one, replays, wrong)
    return replays


def _native_values(one: RecordedRun) -> dict[str, object]:
    """What each node of the graph after inductor's passes gives, random numbers among them."""
    return one.replay(one.graph, one.inputs, dtype=None)[0].values


def _wrong_outputs(one: RecordedRun, replays: RoundedReplays) -> list[_Wrong]:
    names = output_names(one.source)
    outputs = one.run.outputs
    if len(outputs) != len(replays.wide.outputs):
        raise NotReplayable(
            f"the run gave {len(outputs)} results, its graph gives {len(replays.wide.outputs)}"
        )
    found = []
    for i, value in enumerate(outputs):
        actual = one.load(value, f"output {i}")
        error = replays.error(actual, names[i], replays.output(i))
        node = node_named(one.source, names[i])
        what = f"result {i}"
        wanted = node.dtype if node is not None else ""
        if isinstance(value, StoredTensor) and wanted and wanted != value.dtype:
            error, what = math.inf, f"{what}, {value.dtype} where the graph has {wanted},"
        found += _if_wrong(one, _Wrong(names[i], error, what))
    return found


def _wrong_inputs(one: RecordedRun, replays: RoundedReplays) -> list[_Wrong]:
    """Inputs that are not afterwards what the graph makes of them, or leaves them."""
    copied = one.source.copied()
    found = []
    for i, node in enumerate(one.source.inputs):
        if i not in copied and (str(i) not in one.run.written or one.may_overwrite(i)):
            continue
        value = one.after(i)
        if not isinstance(value, StoredTensor):
            continue
        error = replays.error(one.load(value, "written"), node.name, replays.after(i))
        if i not in copied:
            what = f"input {i} ({node.name}) is overwritten, which its graph does not do: it"
        elif str(i) not in one.run.written:
            what = f"what should be written to input {i} ({node.name}) is not: it"
        else:
            what = f"what is written to input {i} ({node.name})"
        found += _if_wrong(one, _Wrong(copied.get(i, node.name), error, what))
    return found


def _if_wrong(one: RecordedRun, wrong: _Wrong) -> list[_Wrong]:
    if not wrong.error <= LIMIT:
        return [wrong]
    one.judged.worst = max(one.judged.worst, wrong.error)
    return []


def _blame(one: RecordedRun, replays: RoundedReplays, wrong: list[_Wrong]) -> None:
    if one.aot is not None:
        try:
            if _blame_passes(one, replays):
                return
        except NotReplayable as reason:
            one.judged.not_judged(f"the graph after inductor's passes: {reason}")
    worst = max(wrong, key=lambda each: each.error)
    kernel, node = _first_wrong_kernel(one, replays)
    more: list[str] = []
    if node is None:
        names = {each.name for each in wrong}
        fine = [name for name in output_names(one.source) if name and name not in names]
        more = suspects(one.source, [each.name for each in wrong], fine)
        node = node_named(one.source, worst.name)
        if node is not None and node.kind == "input":
            node = None
    one.find(
        "kernel", node, worst.error,
        f"{worst.what} ({worst.name}) of the generated code is {far(worst.error)} its graph in "
        "float64",
        kernel=kernel, more=more, graph=one.source,
    )  # fmt: skip


def _blame_passes(one: RecordedRun, replays: RoundedReplays) -> bool:
    """Whether inductor's passes made another graph of the one that they were given."""
    assert one.aot is not None
    after, inputs = one.replay(one.graph, one.inputs)
    names = output_names(one.aot)
    copied = one.aot.copied()
    if len(after.outputs) != len(names):
        raise NotReplayable(f"it has {len(after.outputs)} results, the one before {len(names)}")
    pairs: list[tuple[str, object, Three]] = [
        (names[i], after.outputs[i], replays.output(i)) for i in range(len(names))
    ]
    pairs += [
        (copied.get(i, node.name), inputs[i], replays.after(i))
        for i, node in enumerate(one.aot.inputs)
    ]
    errors = [(replays.error(actual, name, three), name) for name, actual, three in pairs]
    worst, name = max(errors)
    if worst <= LIMIT:
        return False
    node = _first_other(one, replays, after) or node_named(one.graph, name)
    one.find(
        "inductor's graph passes", node or node_named(one.aot, name), worst,
        f"the graph after inductor's passes gives another {name} than before them: "
        f"{far(worst)} it, both in float64",
        graph=one.aot,
    )  # fmt: skip
    return True


def _first_other(one: RecordedRun, replays: RoundedReplays, after: GraphReplay) -> GraphNode | None:
    """The first node of inductor's graph that gives something else than the one of its name."""
    for node in one.graph.nodes:
        before = replays.wide.values.get(node.name)
        if node.kind == "input" or not isinstance(before, torch.Tensor):
            continue
        now = after.values.get(node.name)
        u = replays.roundoff(node.name)
        if value_error(now, before, before, before, u) > LIMIT:
            return node
    return None


def _first_wrong_kernel(one: RecordedRun, replays: RoundedReplays) -> tuple[str, GraphNode | None]:
    """The first kernel that gave something else, where kernels were recorded."""
    code = one.parts.code.get(one.graph.id)
    if code is None or not one.run.kernels:
        return "", None
    calls = list(kernel_calls(code.text))
    if [call[0] for call in calls] != [kernel.name for kernel in one.run.kernels]:
        one.judged.not_judged("the kernels that ran are not those of the code, in its order")
        return "", None
    for (name, variables), kernel in zip(calls, one.run.kernels, strict=True):
        values = [kernel.out] if kernel.out is not None else list(kernel.values)
        for variable, value in zip(variables, values, strict=False):
            node = node_named(one.graph, code.buffers.get(variable, ""))
            if node is None or not isinstance(value, StoredTensor):
                continue
            three = replays.node(node.name)
            actual = one.load(value, name)
            if not isinstance(three[0], torch.Tensor) or actual.shape != three[0].shape:
                continue  # it has another form in memory than the node
            if not replays.error(actual, node.name, three) <= LIMIT:
                return name, node
    return "", None
