"""The calls that a guard found, written into a capture: what went in, what came out, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tensorprobe.config import RecordConfig
from tensorprobe.devices import current_rank
from tensorprobe.errors import TensorprobeError
from tensorprobe.follow.gradients import Path as Place
from tensorprobe.follow.naming import CallNames
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.calls import OpenCall
from tensorprobe.record.encode import as_arguments, nest_gradients
from tensorprobe.record.facts import environment_facts
from tensorprobe.record.selection import Selection
from tensorprobe.record.tape import Tape
from tensorprobe.record.values import Values
from tensorprobe.store.claim import run_identity
from tensorprobe.store.lines import CallLine, EndLine
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.summarizer import Summarizer

CHANGED = -2  # a version no tensor has: the call wrote to this input


def make_tape(folder: Path, log: Callable[[str], None]) -> Tape:
    """A tape of its own for a guard: it names calls, and writes only those it is given."""
    config = RecordConfig.make(level="L1", keep="tensors")
    summarizer = Summarizer(stats=True, digest=True)
    facts = environment_facts()
    writer = CaptureWriter(
        folder,
        current_rank(),
        run_identity(os.environ),
        {**facts, "config": config.as_arguments()},
        facts,
        results=summarizer,
        on_warning=log,
    )
    return Tape(config, Selection(config), writer, Values(writer, summarizer))


def write_forward(
    tape: Tape,
    names: CallNames,
    frames: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    written: Mapping[Place, torch.Tensor],
) -> None:
    """Write down a call that has run. `args` are as they were before; `written` those of them that
    the call wrote to, as they are now."""
    call = tape.begin(names, args, kwargs, stack=tape.add_stack(frames))
    if call is None:
        return
    for number, (_, path) in enumerate(call.inputs):
        if path in written:
            call.inputs[number] = (written[path], path)
            call.versions[number] = CHANGED
    tape.end(call, result)


def write_backward(
    tape: Tape,
    names: CallNames,
    frames: Sequence[str],
    received: Mapping[Place, torch.Tensor],
    sent: Mapping[Place, torch.Tensor],
) -> None:
    """Write down the backward of a call: gradients that came in, and those it sent on."""
    number = tape.add_stack(frames)
    with Quiet():
        call = OpenCall(names, "tensors", tape.step)
        call.id = next(tape.ids)
        args, kwargs = as_arguments(_lines(tape, call, received, "input"))
        line = CallLine(
            id=call.id,
            name=names.name,
            op=names.api.op,
            module=names.module,
            direction="backward",
            stack=number,
            args=args,
            kwargs=kwargs,
        )
        tape.writer.call(line)
        outputs = nest_gradients(_lines(tape, call, sent, "output"))
        tape.writer.end(EndLine(id=call.id, outputs=outputs))


def _lines(
    tape: Tape, call: OpenCall, gradients: Mapping[Place, torch.Tensor], side: Any
) -> dict[Place, Any]:
    lines = {}
    for path, gradient in gradients.items():
        line = tape.lines.line(gradient, call, side, ".".join(path))
        line.grad = False
        lines[path] = {"tensor": line}
    return lines


def write_repro(capture: Path, name: str, step: int, rank: int, folder: Path) -> Path | None:
    """The folder that shows a written call alone; None where that is not possible."""
    from tensorprobe.replay.repro import repro

    try:
        with Quiet():
            return repro(capture, name, folder, step=step, rank=rank, recorded_here=True)
    except (TensorprobeError, KeyError, OSError):
        return None
