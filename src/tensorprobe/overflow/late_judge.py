"""Going through calls whose numbers came late: which of them was the first to be bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorprobe.overflow.call_kinds import ADDS, DIVIDES, LOGARITHMS, Kind
from tensorprobe.overflow.cases import Case, Sighting
from tensorprobe.overflow.growth import Latent
from tensorprobe.overflow.pending_calls import UNFLAGGED, Event, Held, Note, Ring, events_of
from tensorprobe.tensors.finiteness import (
    FINE,
    INFINITE,
    LIMITS,
    NAN,
    NEGATIVE,
    Extent,
    Extents,
)

_WORDS = {1: "NaN", 2: "inf", 4: "-inf"}
Found = dict[torch.device, Extents]  # what the flags of each device say
_MOST_CALM = 16  # looks that found nothing and may have to be gone through yet


class Hindsight:
    """Judges calls by what their tensors held, which are no longer there."""

    def __init__(self, latent: Latent, found: Callable[[Case, bool], bool]) -> None:
        self._latent = latent
        self._found = found  # takes a case, and whether a scaler may deal with it
        self._held: dict[int, Extent] = {}  # by storage, as of the call gone through last
        self._cases: dict[int, Case] = {}
        self._pass_case: Case | None = None
        self._gradients_bad = False
        self._asleep: list[Case] = []  # infinite, perhaps at a pole: told when it does harm
        self._calm: list[tuple[list[Note], Found]] = []

    def begin_step(self) -> None:
        self._held.clear()
        self._cases.clear()
        self._asleep.clear()
        self._calm.clear()
        self._pass_case = None

    def forgive(self, cases: Sequence[Case]) -> None:
        self._cases = {k: v for k, v in self._cases.items() if v not in cases}
        if self._pass_case in cases:
            self._pass_case = None

    def go_through(self, notes: list[Note], found: Found, clamped: bool) -> None:
        """The calls since the last look, in order. `clamped`: the flag of the chip was raised.

        While nothing was found in a step nobody asks what its tensors held: that is put off until
        something is, and for most steps for ever.
        """
        calm = not clamped and not self._cases and all(each.is_calm for each in found.values())
        if calm and len(self._calm) < _MOST_CALM:
            self._calm.append((notes, found))
            return
        before, self._calm = self._calm, []
        for earlier, extents in before:
            self._go_through(events_of(earlier), extents, False)
        self._go_through(events_of(notes), found, clamped)

    def _go_through(self, events: list[Event], extents: Found, clamped: bool) -> None:
        for event in events:
            outputs = [(held, self._extent(event, held, extents)) for held in event.outputs]
            if event.sighting is None and event.note == "loss":
                self._reach_loss(event)
            elif any(extent.bits for _, extent in outputs):
                self._suspect(event, outputs)
            elif clamped and event.sighting is not None and self._is_clamped(event, outputs):
                clamped = False
                self._open(event, outputs, "the chip clamps, and its overflow flag was raised")
            elif event.sighting is not None:
                self._remember_near(event, outputs)
            for held, extent in outputs:
                known = self._held.get(held.storage, FINE)
                bits = extent.bits if held.whole else extent.bits | known.bits
                self._held[held.storage] = Extent(bits, extent.top)
        if clamped and events:
            self._blame_all(events)

    def _extent(self, event: Event, held: Held, extents: Found) -> Extent:
        if held.ticket != UNFLAGGED:
            return extents[held.device][held.ticket]
        found = [self._held.get(storage, FINE) for _, storage in event.inputs]
        return Extent(_join(found), max((each.top for each in found), default=0.0))

    def _suspect(self, event: Event, outputs: list[tuple[Held, Extent]]) -> None:
        sighting = event.sighting
        if sighting is None:
            return  # the first look at an input; the call that reads it follows
        if event.direction == "backward":
            case = self._pass_case = self._pass_case or self._case_sent(outputs)
        else:
            case = self._case_behind(event)
        if event.note:
            self._suspect_group(event, outputs)
            return
        if case is not None:
            case.carry(sighting.name(event.direction))
            self._spoil(outputs, case)
            if event.direction == "backward" or _join(extent for _, extent in outputs) & NAN:
                self._wake(case)
            return
        reason = self._reason(event, outputs)
        if reason is not None:
            self._open(event, outputs, reason)

    def _open(self, event: Event, outputs: list[tuple[Held, Extent]], reason: str) -> None:
        assert event.sighting is not None
        metrics = {held.label: _facts(held, extent) for held, extent in outputs}
        case = Case(event.sighting, event.direction, reason, metrics, None)
        case.pending = event.scaler
        name = event.sighting.plan.api.api.rpartition(".")[2]
        may_be_pole = event.direction == "forward" and name in (*DIVIDES, *LOGARITHMS)
        if may_be_pole and outputs and not _join(extent for _, extent in outputs) & NAN:
            self._asleep.append(case)
        elif not self._found(case, event.scaler):
            return
        for _, storage in event.inputs:
            if self._held.get(storage, FINE).bits & NAN:
                self._cases[storage] = case
        self._spoil(outputs, case)
        if event.direction == "backward":
            self._pass_case = case

    def _wake(self, case: Case) -> None:
        if case in self._asleep:
            self._asleep.remove(case)
            self._found(case, case.pending)

    def wake_living(self, ring: Ring) -> None:
        """The step ends: an infinity that is still there was not thrown away."""
        for storage, case in self._cases.items():
            if case in self._asleep and ring.is_alive(storage):
                self._wake(case)

    def _reason(self, event: Event, outputs: list[tuple[Held, Extent]]) -> str | None:
        assert event.sighting is not None
        plan = event.sighting.plan
        found = _join(extent for _, extent in outputs)
        if event.direction == "backward":
            return f"the gradients before it are finite, {_made(outputs)}"
        inputs = [(label, self._held.get(storage, FINE)) for label, storage in event.inputs]
        given = _join(extent for _, extent in inputs)
        if given & NAN:
            if plan.kind is not Kind.COMPUTES:
                return None
            label = next(label for label, extent in inputs if extent.bits & NAN)
            return f"it reads NaN in {label}, which no call that was watched has made"
        if found & NAN & ~event.told:
            where = next((label for label, extent in inputs if extent.bits), None)
            before = f"{where} holds infinity" if where else "its inputs are finite"
            return f"{before}, {_made(outputs)}"
        if not found & ~(given | event.told) or self._is_mask(event, found, inputs):
            return None
        if given & INFINITE and plan.kind is not Kind.COMPUTES:
            return None
        top = max((extent.top for _, extent in inputs), default=0.0)
        return f"its inputs are finite (up to {top:.4g}), {_made(outputs)}"

    def _is_mask(self, event: Event, found: int, inputs: list[tuple[str, Extent]]) -> bool:
        """The lowest number of a dtype, used as a mask, is added to: -inf in float16."""
        assert event.sighting is not None
        name = event.sighting.plan.api.api.rpartition(".")[2]
        limit = max(LIMITS[held.dtype] for held in event.outputs)
        tops = [extent.top for _, extent in inputs]
        return name in ADDS and found == NEGATIVE and any(abs(t) >= limit for t in tops)

    def _case_behind(self, event: Event) -> Case | None:
        found = (self._cases.get(storage) for _, storage in event.inputs)
        return next((case for case in found if case is not None), None)

    def _case_sent(self, outputs: list[tuple[Held, Extent]]) -> Case | None:
        """The case behind gradients that a call sends on as it was given them: backward was begun
        with them, or a hook, or a Function of the program, made them."""
        found = (self._cases.get(held.storage) for held, extent in outputs if extent.bits)
        return next((case for case in found if case is not None), None)

    def _spoil(self, outputs: list[tuple[Held, Extent]], case: Case) -> None:
        for held, extent in outputs:
            if extent.bits or LIMITS[held.dtype] <= extent.top:
                self._cases[held.storage] = case

    def _reach_loss(self, event: Event) -> None:
        self._pass_case = None
        case = self._case_behind(event)
        if case is not None:
            case.reached = "the loss"
            self._pass_case = case
            self._wake(case)

    def _suspect_group(self, event: Event, outputs: list[tuple[Held, Extent]]) -> None:
        """Gradients before an optimizer's step, or parameters after it."""
        bad = [(held, extent) for held, extent in outputs if extent.bits]
        case = self._pass_case
        for held, _ in bad:
            case = case or self._cases.get(held.storage)
        if case is None and not (event.note == "parameters" and self._gradients_bad):
            what = event.note
            case = Case(
                _sighting(event),
                "forward",
                f"{len(bad)} {what} are not finite, and no call before made them so",
                {held.label: _facts(held, extent) for held, extent in bad[:8]},
                None,
            )
            if not self._found(case, False):
                case = None
        self._gradients_bad = event.note == "gradients"
        if case is not None:
            self._wake(case)
            case.reached = f"{len(bad)} {event.note}"
            self._spoil(bad, case)

    def _is_clamped(self, event: Event, outputs: list[tuple[Held, Extent]]) -> bool:
        """Whether this call is the first to reach the limit, its inputs being below."""
        at_limit = any(extent.top >= LIMITS[held.dtype] for held, extent in outputs)
        limit = max((LIMITS[held.dtype] for held, _ in outputs), default=0.0)
        given = [self._held.get(storage, FINE).top for _, storage in event.inputs]
        return at_limit and all(top < limit for top in given)

    def _blame_all(self, events: list[Event]) -> None:
        """The flag was raised, and no tensor shows where: between the first call and the last."""
        sighted = [event for event in events if event.sighting is not None and _computes(event)]
        if not sighted:
            return
        last = sighted[-1]
        assert sighted[0].sighting is not None
        first = sighted[0].sighting.name(sighted[0].direction)
        reason = (
            f"the overflow flag of the chip was raised by a call between {first} and this one, and "
            "no result shows it; look_every=1 names the call"
        )
        self._open(last, [], reason)

    def _remember_near(self, event: Event, outputs: list[tuple[Held, Extent]]) -> None:
        for held, extent in outputs:
            limit = LIMITS[held.dtype]
            if held.ticket == UNFLAGGED:
                continue  # told of the call that made it
            if not limit / 2 <= extent.top < limit:
                continue
            given = [self._held.get(storage, FINE).top for _, storage in event.inputs]
            if event.sighting is not None and not any(top >= limit for top in given):
                name = f"{event.sighting.name(event.direction)}.{held.label}"
                self._latent.see(name, event.sighting.step, extent.top, limit)


def _sighting(event: Event) -> Sighting:
    assert event.sighting is not None
    return event.sighting


def _computes(event: Event) -> bool:
    return _sighting(event).plan.kind is not Kind.PASSES


def _join(extents: Any) -> int:
    bits = 0
    for extent in extents:
        bits |= extent.bits
    return bits


def _made(outputs: list[tuple[Held, Extent]]) -> str:
    held, extent = next((held, extent) for held, extent in outputs if extent.bits)
    words = " and ".join(word for bit, word in _WORDS.items() if extent.bits & bit)
    return f"{held.label} ({str(held.dtype).removeprefix('torch.')}) holds {words}"


def _facts(held: Held, extent: Extent) -> dict[str, Any]:
    return {
        "dtype": str(held.dtype).removeprefix("torch."),
        "shape": list(held.shape),
        "holds": [word for bit, word in _WORDS.items() if extent.bits & bit],
        "largest": extent.top,
    }
