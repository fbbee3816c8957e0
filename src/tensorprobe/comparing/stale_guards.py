"""A compiled part whose graphs are all right, and which is not what the program says: the stage of
dynamo, whose guards let a graph run that was made for something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tensorprobe.comparing.align import align
from tensorprobe.comparing.comparison import compare_captures
from tensorprobe.comparing.measure import pair_tensors
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.compiling.compile_records import CompiledParts, GraphRun, StoredTensor
from tensorprobe.compiling.graph_lookup import output_names
from tensorprobe.compiling.inductor_operators import RANDOM
from tensorprobe.compiling.inductor_stages import judge_inductor
from tensorprobe.compiling.recorded_run import RecordedRun
from tensorprobe.compiling.stage_errors import LIMIT
from tensorprobe.compiling.stage_findings import StageFinding, StagesJudged
from tensorprobe.records import Call, Capture, TensorRecord
from tensorprobe.store.loading import load

if TYPE_CHECKING:
    import torch

_COMPILED = ("Compiled.", "Function.CompiledFunction.", "Module.OptimizedModule.")


def judge_guards(
    actual: Path, expected: Path, ranks: Sequence[CompiledParts], judged: Sequence[StagesJudged]
) -> str:
    """Compare with an uncompiled run, add what is dynamo's fault, and give the verdict's line.

    Dynamo is blamed where a compiled part alone makes a difference, and its graphs were held
    against each other and are right.
    """
    compared = compare_captures(actual, expected)
    verdict = compared.verdict
    if verdict.verdict != "diverged":
        return f"against eager: {verdict.verdict}"
    ours = load(actual)
    calls = {(call.rank, call.step, call.name): call for call in ours.calls}
    culprit = verdict.culprits[0] if verdict.culprits else None
    call = calls.get((culprit.rank, culprit.step, culprit.name)) if culprit is not None else None
    if culprit is None or not _is_compiled(culprit, call):
        where = culprit.name if culprit is not None else "no call"
        return f"against eager: diverged, first at {where}, which is no compiled part"
    for parts, each in zip(ranks, judged, strict=True):
        if parts.rank != culprit.rank or each.findings:
            continue
        runs = _runs_of(parts, culprit, call)
        if not runs or not {run.id for run in runs} <= each.from_dynamo:
            each.not_judged(f"dynamo's stage of {culprit.name}: which graphs ran, or if they agree")
            continue
        if _draws(parts, runs):
            each.not_judged(
                "dynamo's stage: inductor draws other random numbers than eager torch. Record "
                "with torch._inductor.config.fallback_random = True"
            )
            continue
        pairs = _tensors_of_both(ours, load(expected), culprit)
        if _is_other(parts, runs, pairs):
            each.findings.append(_finding(parts, culprit, runs))
        else:
            each.not_judged(
                f"dynamo's stage of {culprit.name}: its results agree with the uncompiled ones "
                "within what rounding makes of its graph, so what differs may be rounding too"
            )
    return f"against eager: diverged, first at {culprit.name}"


def _is_compiled(culprit: Culprit, call: Call | None) -> bool:
    if culprit.name.startswith(_COMPILED):
        return True
    return call is not None and any(note.startswith("compiled:") for note in call.notes)


def _runs_of(parts: CompiledParts, culprit: Culprit, call: Call | None) -> list[GraphRun]:
    """The runs of compiled graphs that were part of a call, by the tensors that both have."""
    backward = culprit.direction == "backward"
    in_step = [
        run
        for run in parts.runs
        if run.step == culprit.step
        and (run.graph not in parts.graphs or parts.graphs[run.graph].is_backward == backward)
    ]
    if len(in_step) < 2 or call is None:
        return in_step
    tensors = [each for each in call.tensors if each.role in ("input", "output") and each.shape]
    contents = [each.load() for each in tensors if each.blob is not None]
    found = [run for run in in_step if any(_has(parts, run, content) for content in contents)]
    return found or in_step


def _tensors_of_both(
    actual: Capture, expected: Capture, culprit: Culprit
) -> list[tuple[TensorRecord, TensorRecord]]:
    """The tensors that the two runs have at the same places, in the culprit's step and rank."""
    ours, theirs = (
        [call for call in side.calls if (call.step, call.rank) == (culprit.step, culprit.rank)]
        for side in (actual, expected)
    )
    return [
        (each.actual, each.expected)
        for pair in align(ours, theirs)
        if pair.actual is not None and pair.expected is not None
        for each in pair_tensors(pair).tensors
        if each.actual is not None and each.expected is not None
        and each.actual.blob is not None and each.expected.blob is not None
        and each.actual.shape == each.expected.shape and each.actual.numel > 1
    ]  # fmt: skip


def _is_other(
    parts: CompiledParts,
    runs: Sequence[GraphRun],
    pairs: Sequence[tuple[TensorRecord, TensorRecord]],
) -> bool:
    """Whether the uncompiled run has other results than the graph, beyond rounding of the graph."""
    for run in runs:
        one = RecordedRun(parts, run, StagesJudged())
        replays = judge_inductor(one)
        names = output_names(one.source)
        for i, value in enumerate(run.outputs):
            if not isinstance(value, StoredTensor):
                continue
            mine = one.load(value, f"output {i}")
            for ours, theirs in pairs:
                if ours.shape != value.shape or ours.dtype != value.dtype:
                    continue
                if not ours.load().equal(mine):
                    continue
                if not replays.error(theirs.load(), names[i], replays.output(i)) <= LIMIT:
                    return True
    return False


def _has(parts: CompiledParts, run: GraphRun, content: torch.Tensor) -> bool:
    for value in (*run.inputs, *run.outputs):
        if isinstance(value, StoredTensor) and tuple(content.shape) == value.shape:
            mine = value.load(parts.folder, f"run {run.id}")
            if mine.dtype == content.dtype and mine.equal(content):
                return True
    return False


def _draws(parts: CompiledParts, runs: Sequence[GraphRun]) -> bool:
    graphs = [parts.graphs[run.graph] for run in runs]
    return any(node.target in RANDOM for graph in graphs for node in graph.nodes)


def _finding(parts: CompiledParts, culprit: Culprit, runs: Sequence[GraphRun]) -> StageFinding:
    compilations = sorted({parts.graphs[run.graph].compilation for run in runs})
    return StageFinding(
        stage="dynamo",
        rank=culprit.rank,
        step=culprit.step,
        run=runs[0].id,
        compilation=" or ".join(compilations),
        direction=culprit.direction,
        node=None,
        text=f"{culprit.name} is given what it is given uncompiled, and gives something else, "
        "though every stage below agrees with dynamo's graph: that graph is not what the program "
        "does here. A guard that should have failed let an older graph run, or dynamo traced "
        "something else",
        error=math.inf,
    )
