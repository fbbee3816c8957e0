"""A verdict in about five lines: what, where, how large, whose fault, what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING

from tensorprobe.comparing.judge import number_text
from tensorprobe.store.frames import users_line

if TYPE_CHECKING:
    from tensorprobe.comparing.comparison import Verdict
    from tensorprobe.comparing.culprit import Culprit, Place

_KINDS = {
    "output": "its result is wrong",
    "gradient": "its gradient is wrong",
    "argument": "it was called with other arguments",
    "parameter": "a parameter differs",
    "input": "its input data differs",
    "structure": "the runs do not make the same calls",
    "nonfinite": "it makes NaN or infinity",
}
_FACTS = 6


def describe(verdict: Verdict) -> Iterator[str]:
    """The lines of a verdict."""
    if verdict.verdict == "incomparable":
        yield f"incomparable: {verdict.reason}"
        if verdict.ranks:  # they were judged, as far as both sides go
            yield f"  the rest matches: {_agreement(verdict)}"
    elif verdict.verdict == "match":
        yield f"match: {_agreement(verdict)}"
        yield from _sides(verdict)
    else:
        yield from _diverged(verdict)
    yield from (f"  note: {note}" for note in verdict.notes)
    if verdict.facts:
        more = f"; and {len(verdict.facts) - _FACTS} more" if len(verdict.facts) > _FACTS else ""
        yield f"  the runs also differ in: {'; '.join(verdict.facts[:_FACTS])}{more}"


def _diverged(verdict: Verdict) -> Iterator[str]:
    first = verdict.culprits[0]
    where = f"step {first.step}, rank {first.rank}"
    yield f"diverged at {first.name} ({where}): {_KINDS[first.kind]}"
    place = f"  in {first.module or 'the program'}, {first.op}"
    if first.stack:
        place += f", {users_line(first.stack)}"  # the whole stack is in verdict.json
    yield place
    yield f"  {first.reason}"
    own, inherited = number_text(first.own_error), number_text(first.inherited_error)
    size = f"  own error {own}, inherited {inherited} "
    size += f"(1 = one rounding); {_fault(first)}; {first.affected} later calls affected"
    yield size
    others = verdict.culprits[1:]
    if others:
        names = ", ".join(culprit.name for culprit in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield f"  {len(others)} further, independent: {names}{more}"
    yield from _sides(verdict)
    yield f"  next: {next_command(verdict, first)}"


def _sides(verdict: Verdict) -> Iterator[str]:
    counts = verdict.counts
    parts = [
        f"{counts[key]} only in {side}"
        for key, side in (("only_actual", "actual"), ("only_expected", "expected"))
        if counts[key]
    ]
    if parts:
        total = counts["aligned"] + counts["only_actual"] + counts["only_expected"]
        yield f"  of {total} calls {', '.join(parts)}"


def _agreement(verdict: Verdict) -> str:
    return (
        f"{verdict.counts['aligned']} calls aligned, no call differs by more than rounding "
        f"explains ({_basis(verdict)})"
    )


def _basis(verdict: Verdict) -> str:
    return {
        "tensors": "tensors compared",
        "digest": "digests and statistics compared",
        "stats": "statistics compared",
        "structure": "no values were kept",
    }[verdict.mode]


def _fault(culprit: Culprit) -> str:
    if culprit.side is None:
        return "no side is proven wrong"
    return f"the {culprit.side} side is wrong"


def next_command(verdict: Verdict, culprit: Culprit) -> str:
    """What settles it, or shows it alone."""
    if verdict.mode in ("stats", "digest"):
        options = f"--keep tensors --calls {quote(culprit.name)} --steps {culprit.step}"
        return f"record both sides again with: tensorprobe run {options} ..., and compare"
    if culprit.kind in ("output", "gradient", "nonfinite"):
        capture, place = verdict.actual, _which(culprit)
        if culprit.side == "expected" and culprit.expected is not None:
            capture, place = verdict.expected, _which(culprit.expected)
        return f"tensorprobe repro {quote(capture)} {place} -o repro{_allowing(verdict, culprit)}"
    return f"tensorprobe show {quote(verdict.actual)} {_which(culprit)}"


def _allowing(verdict: Verdict, culprit: Culprit) -> str:
    """The options without which a call that is not torch's own would be refused."""
    if culprit.op.startswith("torch.") and not culprit.op.startswith("torch.ops."):
        return ""
    return "".join(f" --import {quote(package)}" for package in verdict.imports)


def _which(place: Culprit | Place) -> str:
    """A call as commands take it: names begin anew in each step, and in each rank."""
    step = f" --step {place.step}" if place.step else ""
    return quote(place.name) + step + (f" --rank {place.rank}" if place.rank else "")
