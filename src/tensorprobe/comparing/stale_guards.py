"""A compiled part whose graphs are all right, and which is not what the program says: the stage of
dynamo, whose guards let a graph run that was made for something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tensorprobe.comparing.comparison import compare_captures
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.compiling.compile_records import CompiledParts
from tensorprobe.compiling.compile_stages import StageFinding, StagesJudged
from tensorprobe.compiling.inductor_operators import RANDOM
from tensorprobe.records import Call
from tensorprobe.store.loading import load

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
    calls = {(call.rank, call.step, call.name): call for call in load(actual).calls}
    culprit = verdict.culprits[0] if verdict.culprits else None
    call = calls.get((culprit.rank, culprit.step, culprit.name)) if culprit is not None else None
    if culprit is None or not _is_compiled(culprit, call):
        where = culprit.name if culprit is not None else "no call"
        return f"against eager: diverged, first at {where}, which is no compiled part"
    for parts, each in zip(ranks, judged, strict=True):
        if parts.rank != culprit.rank or each.findings:
            continue
        if any("before recording" in why for why in each.unjudged) or not each.n_dynamo:
            each.not_judged("dynamo's stage: its graphs could not all be held against each other")
            continue
        if any(node.target in RANDOM for graph in parts.graphs.values() for node in graph.nodes):
            each.not_judged(
                "dynamo's stage: inductor draws other random numbers than eager torch. Record "
                "with torch._inductor.config.fallback_random = True"
            )
            continue
        run = next((run for run in parts.runs if run.step == culprit.step), None)
        graph = parts.graphs.get(run.graph) if run is not None else None
        each.findings.append(
            StageFinding(
                stage="dynamo",
                rank=culprit.rank,
                step=culprit.step,
                run=run.id if run is not None else -1,
                compilation=graph.compilation if graph is not None else "?",
                direction=culprit.direction,
                node=None,
                text=f"{culprit.name} is given what it is given uncompiled, and gives something "
                "else, though every stage below agrees with dynamo's graph: that graph is not "
                "what the program does here. A guard that should have failed let an older graph "
                "run, or dynamo traced something else",
                error=math.inf,
            )
        )
    return f"against eager: diverged, first at {culprit.name}"


def _is_compiled(culprit: Culprit, call: Call | None) -> bool:
    if culprit.name.startswith(_COMPILED):
        return True
    return call is not None and any(note.startswith("compiled:") for note in call.notes)
