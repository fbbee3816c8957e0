"""Going through calls whose numbers came late, in order: what they held, for the judge."""

from __future__ import annotations

import torch

from tensorprobe.overflow.call_kinds import Kind
from tensorprobe.overflow.cases import Case, OpenCases
from tensorprobe.overflow.judge import (
    CallValues,
    Growth,
    SeenTensor,
    bits_of,
    clamped,
    fault,
    is_first_at_limit,
    near_limit,
)
from tensorprobe.overflow.pending_calls import (
    UNFLAGGED,
    Note,
    PendingCall,
    PendingTensor,
    calls_in,
)
from tensorprobe.tensors.finiteness import FINE, Extent, Extents

Found = dict[torch.device, Extents]  # what the flags of each device say
_MOST_CALM = 16  # looks that found nothing and may have to be gone through yet


class LateCalls:
    """Judges calls by what their tensors held, which are no longer there."""

    def __init__(self, cases: OpenCases, growth: Growth) -> None:
        self._cases = cases
        self._growth = growth
        self._known: dict[int, SeenTensor] = {}  # by storage, as of the call gone through last
        self._gradients_bad = False
        self._calm: list[tuple[list[Note], Found]] = []

    def begin_step(self) -> None:
        self._known.clear()
        self._calm.clear()

    def go_through(self, notes: list[Note], found: Found, was_clamped: bool) -> None:
        """The calls since the last look, in order. `was_clamped`: the flag of the chip was raised.

        While nothing was found in a step nobody asks what its tensors held: that is put off until
        something is, and for most steps for ever.
        """
        calm = not was_clamped and not self._cases and all(each.is_calm for each in found.values())
        if calm and len(self._calm) < _MOST_CALM:
            self._calm.append((notes, found))
            return
        before, self._calm = self._calm, []
        for earlier, extents in before:
            self._go_through(calls_in(earlier), extents, False)
        self._go_through(calls_in(notes), found, was_clamped)

    def _go_through(self, calls: list[PendingCall], found: Found, was_clamped: bool) -> None:
        for call in calls:
            inputs = [self._known_as(label, storage) for label, storage in call.inputs]
            outputs = [_seen(output, inputs, found) for output in call.outputs]
            if call.note == "loss":
                self._cases.begin_backward(inputs)
            elif call.note:
                self._look_at_group(call, outputs)
            elif call.call is not None:  # else the first look at an input of one that follows
                plan = call.call.plan
                values = CallValues(plan, inputs, outputs, call.told, call.direction)
                if values.found:
                    self._suspect(call, values)
                elif was_clamped and is_first_at_limit(values):
                    was_clamped = False
                    self._open(call, values, clamped(values))
                else:
                    self._remember_near(call, values)
            for output, seen in zip(call.outputs, outputs, strict=True):
                before = self._known.get(seen.storage)
                if before is not None and not output.whole:
                    seen = seen._replace(bits=seen.bits | before.bits)
                self._known[seen.storage] = seen
        if was_clamped:
            self._blame_all(calls)

    def _known_as(self, label: str, storage: int) -> SeenTensor:
        known = self._known.get(storage)
        if known is None:
            return SeenTensor(label, storage, torch.float64, (), *FINE)
        return known._replace(label=label)

    def _suspect(self, call: PendingCall, values: CallValues) -> None:
        assert call.call is not None
        case = self._cases.behind(values)
        if case is not None:
            self._cases.carry(case, call.call, values)
        elif (reason := fault(values, self._cases.origin)) is not None:
            self._open(call, values, reason)

    def _open(self, call: PendingCall, values: CallValues, reason: str) -> None:
        assert call.call is not None
        self._cases.blame(call.call, values, reason, in_backward=call.in_backward)

    def _look_at_group(self, call: PendingCall, outputs: list[SeenTensor]) -> None:
        """Gradients before an optimizer's step, or parameters after it."""
        assert call.call is not None
        bad = [each for each in outputs if each.bits]
        if not bad:
            return
        case = self._cases.of_backward or self._cases.among(bad)
        if case is None and not (call.note == "parameters" and self._gradients_bad):
            reason = f"{len(bad)} {call.note} are not finite, and no call before made them so"
            metrics = {each.label: each.facts for each in bad[:8]}
            case = self._cases.add(Case(call.call, "forward", reason, metrics))
        self._gradients_bad = call.note == "gradients"
        if case is not None:
            self._cases.reach(case, f"{len(bad)} {call.note}", bad)

    def _blame_all(self, calls: list[PendingCall]) -> None:
        """The flag was raised, and no tensor shows where: between the first call and the last."""
        named = [(each, each.call) for each in calls if each.call is not None]
        named = [each for each in named if each[1].plan.kind is not Kind.PASSES]
        if not named:
            return
        (first, first_call), (last, last_call) = named[0], named[-1]
        reason = (
            "the overflow flag of the chip was raised by a call between "
            f"{first_call.name(first.direction)} and this one, and no result shows it; "
            "look_every=1 names the call"
        )
        self._open(last, CallValues(last_call.plan, [], [], direction=last.direction), reason)

    def _remember_near(self, call: PendingCall, values: CallValues) -> None:
        assert call.call is not None
        pairs = zip(call.outputs, values.outputs, strict=True)
        flagged = [seen for output, seen in pairs if output.ticket != UNFLAGGED]
        near = near_limit(
            values._replace(outputs=flagged)
        )  # others are told of where they are made
        if near:
            self._growth.see(call.call.name(call.direction), call.call.step, near)


def _seen(output: PendingTensor, inputs: list[SeenTensor], found: Found) -> SeenTensor:
    if output.ticket != UNFLAGGED:
        extent = found[output.device][output.ticket]
    else:  # it has what the inputs have
        extent = Extent(bits_of(inputs), max((each.top for each in inputs), default=0.0))
    return SeenTensor(output.label, output.storage, output.dtype, output.shape, *extent)
