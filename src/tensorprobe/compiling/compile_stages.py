"""Which stage of torch.compile made a wrong result: each stage's graph is run by itself.

From what a compiled part was given, dynamo's graph is run node by node, then the graphs of
aot_autograd, then the one that inductor's passes made, each in float64. The first that says
something else than the one before is at fault; if all agree, and what came out of the generated
code is beyond rounding of them, a kernel is. Rounding is what a run of the same graph in the
recorded dtypes, and one with inputs moved by a rounding, are off by: fused multiply-adds, reordered
sums, and numbers kept wide inside of a kernel stay below that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tensorprobe.compiling.compile_records import CompiledParts, GraphRun
from tensorprobe.compiling.dynamo_backward import judge_backward
from tensorprobe.compiling.dynamo_forward import judge_forward
from tensorprobe.compiling.inductor_stages import judge_inductor
from tensorprobe.compiling.recorded_run import RecordedRun
from tensorprobe.compiling.stage_findings import StagesJudged
from tensorprobe.devices import rng_kept
from tensorprobe.errors import NotReplayable, UnreadableCapture
from tensorprobe.replay.reference import quiet


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
            with quiet(), rng_kept(torch.device("cpu")):
                _judge_run(parts, run, judged)
        except (NotReplayable, UnreadableCapture) as error:
            judged.not_judged(str(error))
        except Exception as error:  # noqa: BLE001 replaying one run
            text = str(error).strip().partition("\n")[0][:160]
            judged.not_judged(f"{type(error).__name__}: {text}")
    if not parts.runs:
        judged.not_judged(
            "no run was recorded: none came to its end, or keep='tensors' was not asked for"
        )
    return judged


def _judge_run(parts: CompiledParts, run: GraphRun, judged: StagesJudged) -> None:
    one = RecordedRun(parts, run, judged)
    replays = judge_inductor(one)
    if one.aot is None:
        judged.not_judged("the graph of aot_autograd was not seen")
    elif one.graph.is_backward:
        judge_backward(one, replays)
    else:
        judge_forward(one, replays)
