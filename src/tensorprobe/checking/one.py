"""One call, run on the device and held against its reference: a row of the check."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

import torch

from tensorprobe.checking.benchmark import hold_against
from tensorprobe.checking.chance import judge_dropout, judge_random
from tensorprobe.checking.result_judge import judge, same_choice
from tensorprobe.checking.row import TABLES, Judgement, Row, Verdict, row_for
from tensorprobe.devices import device_layer, rows
from tensorprobe.errors import NotReplayable
from tensorprobe.records import Call
from tensorprobe.replay.generate import load_or_generate
from tensorprobe.replay.kinds import kind_of
from tensorprobe.replay.pairing import ForwardBackward, is_generated
from tensorprobe.replay.rebuild import Source, load, refuse, remember
from tensorprobe.replay.reference import Replayed, Results, perform, replay_both, rng_state
from tensorprobe.replay.rules import length


def check_one(
    pair: ForwardBackward,
    device: torch.device,
    benchmark: ForwardBackward | None = None,
    *,
    peer_metrics: bool = False,
) -> Row:
    """Run one call on `device` and judge it. Never raises for what the call does."""
    begin = time.perf_counter()
    row = _checked(pair, device, benchmark, peer_metrics)
    row.device = str(device)
    row.elapsed_s = round(time.perf_counter() - begin, 4)
    return row


def _checked(
    pair: ForwardBackward, device: torch.device, benchmark: ForwardBackward | None, peer: bool
) -> Row:
    call = pair.forward
    source = remember(load_or_generate)
    try:
        refuse(call)
        there, back, notes = _references(pair, source, device)
    except NotReplayable as error:
        return row_for(call, "skipped", str(error))
    backward = pair.backward if back is not None or _by_chance(call) else None
    try:
        results = perform(call, backward, device, source)
    except NotReplayable as error:
        return row_for(call, "skipped", str(error))
    except Exception as error:  # noqa: BLE001 replaying one call: what it raised is its result
        text = str(error).strip().partition("\n")[0]
        verdict: Verdict = "skipped" if call.status == "raised" else "crashed"
        reason = f"raised {type(error).__name__}: {text}"
        if verdict == "skipped":
            reason += " (as it did when it was recorded)"
        return row_for(call, verdict, reason)
    if there is None:
        judged = _judge_chance(pair, results, backward, source)
        if judged is None:
            return row_for(call, "skipped", "random, and no distribution is known for it")
        return _summed(call, *judged, notes, "its distribution")
    tf32 = device_layer(device).uses_tf32()
    forwards = _judge_all(call, None, there, results[0], tf32, source, peer)
    backwards = _judge_all(call, backward, back, results[1], tf32, source, peer) if back else []
    if benchmark is not None:
        _three_way(forwards, backwards, benchmark, peer)
    row = _summed(call, forwards, backwards, notes, there.how)
    row.generated = any(t.blob is None for t in call.tensors if t.role == "input")
    if row.verdict == "pass" and not is_generated(pair):  # else it is of other inputs
        row.recorded = _wrong_recording(pair, there, back, source)
    return row


def _by_chance(call: Call) -> bool:
    return kind_of(call) in ("dropout", "random")


def _repeatable(call: Call, device: torch.device) -> bool:
    """Random numbers can be drawn again only on the kind of device whose state was recorded."""
    return device_layer(device).is_host and rng_state(call, "cpu") is not None


def _references(
    pair: ForwardBackward, source: Source, device: torch.device
) -> tuple[Replayed | None, Replayed | None, list[str]]:
    """What to hold the call against; nothing for calls that draw random numbers."""
    if _by_chance(pair.forward) and not _repeatable(pair.forward, device):
        return None, None, []
    try:
        return *replay_both(*pair, source=source), []
    except NotReplayable as error:
        if pair.backward is None:
            raise
        there, _ = replay_both(pair.forward, source=source)
        return there, None, [f"forward only: {error}"]


def _judge_all(
    call: Call,
    backward: Call | None,
    replayed: Replayed,
    found: Mapping[str, torch.Tensor],
    tf32: bool,
    source: Source,
    peer: bool = False,
) -> list[Judgement]:
    direction = "forward" if backward is None else "backward"
    judgements = []
    for name in replayed.outputs:
        if name not in found:
            continue
        many = length(call, backward, replayed.kind, found[name].numel(), source)
        roundoff = _device_roundoff(replayed, found[name]) if tf32 else None
        judgement = judge(name, found[name], replayed, direction, many, roundoff)
        if peer:
            peer_metrics = TABLES.module("peers").peer_metrics
            judgement.peer = peer_metrics(found[name], replayed.outputs[name])
        judgements.append(judgement)
    unlike = replayed.kind == "selection" and not all(j.ok for j in judgements)
    if unlike and same_choice(call, dict(found), replayed):
        for judgement in judgements:
            judgement.ok, judgement.reason = True, "other indices of equal values"
    return judgements


def _device_roundoff(replayed: Replayed, found: torch.Tensor) -> float | None:
    """TF32 keeps eleven bits of float32; cuDNN uses it unless told not to."""
    return 2.0**-11 if found.dtype == torch.float32 and replayed.kind == "product" else None


def _wrong_recording(
    pair: ForwardBackward, there: Replayed, back: Replayed | None, source: Source
) -> str:
    """What is wrong with the result that was recorded, on whatever device that was."""
    for replayed, call, backward in (
        (there, pair.forward, None),
        (back, pair.backward, pair.backward),
    ):
        if replayed is None or call is None:
            continue
        tf32 = any(_may_use_tf32(t.device) for t in call.tensors if t.role == "output")
        judged = _judge_all(pair.forward, backward, replayed, _outputs(call), tf32, source)
        wrong = next((each for each in judged if not each.ok), None)
        if wrong is not None:
            direction = "forward" if backward is None else "backward"
            return f"{direction}.{wrong.name}: {wrong.reason}"
    return ""


def _may_use_tf32(device: str) -> bool:
    """Where a call was recorded, which may be a kind of device that this torch does not know."""
    return any(row.type == device.partition(":")[0] and row.uses_tf32() for row in rows())


def _outputs(call: Call) -> dict[str, torch.Tensor]:
    """The results that were kept and can be read, by their names without the call's."""
    found = {}
    for record in call.tensors:
        if record.role == "output" and record.blob is not None:
            with contextlib.suppress(NotReplayable):
                found[record.name.removeprefix(call.name + ".")] = load(record)
    return found


def _judge_chance(
    pair: ForwardBackward, results: Results, backward: Call | None, source: Source
) -> tuple[list[Judgement], list[Judgement]] | None:
    call = pair.forward
    outputs, sent = results
    if kind_of(call) == "random":
        judged = judge_random(call, outputs)
        return None if judged is None else (judged, [])
    record = next(t for t in call.tensors if t.role == "input")
    gradients = None
    if backward is not None and sent:
        incoming = next(t for t in backward.tensors if t.role == "input")
        gradients = (source(incoming), next(iter(sent.values())))
    judged = judge_dropout(call, source(record), outputs["output.0"], gradients)
    return judged[:1], judged[1:]


def _three_way(
    forwards: list[Judgement], backwards: list[Judgement], benchmark: ForwardBackward, peer: bool
) -> None:
    """Hold the device against the benchmark device's own distance from its reference."""
    try:
        there, back, _ = _references(benchmark, load, torch.device("meta"))
    except NotReplayable:
        return
    for judgements, replayed, call in (
        (forwards, there, benchmark.forward),
        (backwards, back, benchmark.backward),
    ):
        if replayed is None or call is None:
            continue
        recorded = _outputs(call)
        direction = "forward" if call is benchmark.forward else "backward"
        errors = {
            name: judge(name, tensor, replayed, direction, 1.0).error
            for name, tensor in recorded.items()
            if name in replayed.outputs
        }
        hold_against(judgements, errors)
        if peer:
            peer_metrics = TABLES.module("peers").peer_metrics
            for judgement in judgements:
                if judgement.name in errors:
                    judgement.benchmark_peer = peer_metrics(
                        recorded[judgement.name], replayed.outputs[judgement.name]
                    )


def _summed(
    call: Call,
    forwards: list[Judgement],
    backwards: list[Judgement],
    notes: list[str],
    how: str,
) -> Row:
    for judgement in backwards:
        judgement.name = f"backward.{judgement.name}"
    for judgement in forwards:
        judgement.name = f"forward.{judgement.name}"
    judged = forwards + backwards
    if not judged:
        return row_for(call, "skipped", "no tensor comes out of it", reference=how)
    wrong = [j for j in judged if not j.ok]
    reason = f"{wrong[0].name}: {wrong[0].reason}" if wrong else "; ".join(notes)
    if not reason:
        reason = next((j.reason for j in judged if j.reason), "")
    row = row_for(call, "fail" if wrong else "pass", reason, reference=how, tensors=judged)
    row.forward = _direction(forwards)
    row.backward = _direction(backwards)
    worst = max(judged, key=_share)
    share = _share(worst)
    row.error = share if math.isfinite(share) else None
    row.device_dtype, row.reference_dtype = worst.device_dtype, worst.reference_dtype
    return row


def _direction(judgements: list[Judgement]) -> Verdict | None:
    if not judgements:
        return None
    return "pass" if all(j.ok for j in judgements) else "fail"


def _share(judgement: Judgement) -> float:
    if judgement.error is None:
        return math.inf
    if judgement.error == 0.0:
        return 0.0
    return judgement.error / judgement.limit if judgement.limit else math.inf
