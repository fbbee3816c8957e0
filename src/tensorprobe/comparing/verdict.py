"""The answer of a comparison: its form in verdict.json, and the lines a person reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any, Literal

import msgspec

from tensorprobe.collectives.links import is_communication, listed
from tensorprobe.comparing.rounding import Mode, number_text
from tensorprobe.errors import BadUsage
from tensorprobe.notebooks import html_of
from tensorprobe.records import Call, count
from tensorprobe.store.frames import users_line
from tensorprobe.terminal import printable

CulpritKind = Literal[
    "output", "gradient", "argument", "parameter", "input", "structure", "nonfinite", "boundary"
]
Cause = Literal[
    "flag", "dtype", "seed", "data", "weights", "argument", "structure", "result", "boundary"
]
Side = Literal["actual", "expected"]
FORMAT = 1
Outcome = Literal["match", "diverged", "incomparable"]
_CAUSES = {
    "flag": "another numeric switch is on",
    "dtype": "it computes in another dtype",
    "seed": "the runs draw other random numbers",
    "data": "the runs are given other data",
    "weights": "the weights differ",
    "argument": "it was called with other arguments",
    "structure": "the runs do not make the same calls",
    "boundary": "a difference appears here that no recorded call made",
}
_RESULTS = {
    "output": "its result is wrong",
    "gradient": "its gradient is wrong",
    "nonfinite": "it makes NaN or infinity",
}
_FACTS = 6


class Place(msgspec.Struct):
    """Which call of a capture it is."""

    name: str
    step: int
    rank: int


class Culprit(msgspec.Struct, kw_only=True):
    """A call that caused a difference, in the form of verdict.json."""

    name: str
    cause: Cause = "result"
    kind: CulpritKind
    direction: str
    step: int
    rank: int
    module: str
    op: str
    stack: tuple[str, ...]
    reason: str
    own_error: float
    inherited_error: float
    metrics: dict[str, Any] = {}
    affected: int = 0
    side: Side | None = None
    proof: str = "compared"  # replayed | compared | statistics | digests
    tensor: str | None = None
    weak: bool = False
    expected: Place | None = None  # what it is called on the expected side, where that has it
    follows: list[Culprit] = []  # others that it explains, or that have the same cause

    def __repr__(self) -> str:
        return f"<Culprit {self.name}, step {self.step}, rank {self.rank}: {self.reason}>"


Status = Literal["equal", "within", "undecided", "beyond", "not compared"]


class MeasuredPlace(msgspec.Struct, kw_only=True):
    """How far the sides are apart at a chosen place: a line of `boundaries` in verdict.json.

    `error` and `limit` are in roundings; `relative` is the error's share of the tensor's size.
    """

    actual: str  # modules, several as "k_proj + v_proj"; or the name of a call without its number
    expected: str
    tensor: str
    kind: Literal["output", "input", "parameter", "gradient"]
    call: str | None = None  # of actual
    step: int = 0
    rank: int = 0
    error: float | None = None
    relative: float | None = None
    limit: float | None = None
    inherited: float = 0.0
    rows: int | None = None  # how many were compared, where rows were paired
    row: str | None = None  # the worst of them
    status: Status
    note: str | None = None


class RowCounts(msgspec.Struct):
    """Rows of what the model gave, where they were paired: with a partner, and without."""

    compared: int = 0
    only_actual: int = 0
    only_expected: int = 0


class Received(msgspec.Struct):
    """How damage came to a rank that is no origin of it."""

    rank: int
    step: int
    name: str  # the call by which it came
    through: str  # "all_reduce #12 of ranks 0, 1, 2, 3"
    origin: int  # the rank that it came from


class RankResult(msgspec.Struct):
    """One line of the table of ranks and steps."""

    rank: int
    step: int
    verdict: Outcome
    aligned: int
    only_actual: int
    only_expected: int
    diverged: int
    culprit: str | None = None


class Verdict(msgspec.Struct, kw_only=True):
    """The answer, in the form of verdict.json; as text, the few lines that a person reads."""

    format: int = FORMAT
    verdict: Outcome
    actual: str
    expected: str
    mode: Mode
    counts: dict[str, int]
    culprits: list[Culprit]
    reason: str | None = None  # why the runs are incomparable
    notes: list[str] = []  # what weakens or explains the verdict
    facts: list[str] = []  # versions and numeric switches that differ
    ranks: list[RankResult] = []
    origins: list[int] = []  # of several ranks: those at which a difference begins
    received: list[Received] = []  # and those to which communications have brought it
    imports: list[str] = []  # what the user allowed a replay to call
    at: list[str] = []  # where the runs were compared, if at chosen places only
    within: float | None = None  # what was stated to be allowed there
    boundaries: list[MeasuredPlace] = []  # what was found there
    rows: RowCounts | None = None

    @property
    def ok(self) -> bool:
        """Whether the runs match; False where they are incomparable, too."""
        return self.verdict == "match"

    def __bool__(self) -> bool:
        raise BadUsage(f"a verdict is neither true nor false, this one is {self.verdict}: ask .ok")

    def to_json(self) -> dict[str, Any]:
        """As plain values; NaN and infinities as text, which strict JSON does not have."""
        tree = _plain(msgspec.to_builtins(self))
        assert isinstance(tree, dict)
        return tree

    def __str__(self) -> str:
        return "\n".join(map(printable, describe(self)))

    def __repr__(self) -> str:
        return f"<Verdict {in_short(self)}>"

    def _repr_html_(self) -> str:
        return html_of(self)


def in_short(verdict: Verdict) -> str:
    """The outcome, how many culprits there are, and the first."""
    if not verdict.culprits:
        return f"{verdict.verdict}: {count(verdict.counts['aligned'], 'call')} aligned"
    found = count(len(verdict.culprits), "culprit")
    return f"{verdict.verdict}: {found}, first {verdict.culprits[0].name}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


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
    yield f"diverged at {first.name} ({where}): {_in_words(first)}"
    place = f"  in {first.module or 'the program'}, {first.op}"
    if first.stack:
        place += f", {users_line(first.stack)}"  # the whole stack is in verdict.json
    yield place
    yield f"  {first.reason}"
    own, inherited = number_text(first.own_error), number_text(first.inherited_error)
    size = f"  own error {own}, inherited {inherited} "
    size += f"(1 = one rounding); {_fault(first)}; {first.affected} later calls affected"
    yield size
    same = [c for c in first.follows if (c.name, c.step) == (first.name, first.step)]
    if ranks := sorted({culprit.rank for culprit in same} - {first.rank}):
        yield f"  the same on {listed(ranks)}"
    if others := [culprit for culprit in first.follows if culprit.rank not in ranks]:
        yield f"  {len(others)} more follow from it: {name_some(others)}"
    yield from _by_ranks(verdict)
    if others := verdict.culprits[1:]:
        yield f"  {len(others)} further, independent: {name_some(others)}"
    yield from _sides(verdict)
    yield f"  next: {next_command(verdict, first)}"


def _by_ranks(verdict: Verdict) -> Iterator[str]:
    """Which ranks are origins, and through what the others received it."""
    if not verdict.received and len(verdict.origins) < 2:
        return
    number = count(len(verdict.origins), "origin")
    text = f"  {number} ({listed(verdict.origins)})"
    if verdict.received:
        text += f", {len(verdict.received)} received it"
    ways: dict[str, list[int]] = {}
    for each in verdict.received:
        ways.setdefault(each.through, []).append(each.rank)
    found = sorted(ways.items(), key=lambda way: -len(way[1]))
    text += ": " * bool(found)
    text += "; ".join(f"{listed(ranks)} through {through}" for through, ranks in found[:3])
    yield text + (f"; and {len(found) - 3} other ways" if len(found) > 3 else "")


def _in_words(culprit: Culprit) -> str:
    return _CAUSES.get(culprit.cause) or _RESULTS.get(culprit.kind, "its result is wrong")


def name_some(calls: Sequence[Culprit | Call]) -> str:
    """The first three names, and how many more there are."""
    names = ", ".join(call.name for call in calls[:3])
    return names + (f" and {len(calls) - 3} more" if len(calls) > 3 else "")


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
    if verdict.at:
        return _chosen(verdict)
    return (
        f"{verdict.counts['aligned']} calls aligned, no call differs by more than rounding "
        f"explains ({_basis(verdict)})"
    )


def _chosen(verdict: Verdict) -> str:
    """What was compared at chosen places, and the largest error there."""
    found = [each for each in verdict.boundaries if each.error is not None]
    text = f"{count(len(found), 'tensor')} at {', '.join(verdict.at)}"
    rows = verdict.rows
    if rows is not None and rows.compared:
        fewer = rows.compared + min(rows.only_actual, rows.only_expected)
        of = f"{rows.compared} of {fewer}" if fewer > rows.compared else str(rows.compared)
        text += f", in {of} rows of what the model gave,"
    is_one = len(found) == 1
    worst = max(found, key=lambda each: (each.error or 0.0) / (each.limit or 1.0), default=None)
    if worst is None or not worst.error:
        return f"{text} {'is' if is_one else 'are'} equal ({_basis(verdict)})"
    where = f"{worst.actual or 'the model'} {worst.tensor}"
    size = measured_text(worst, verdict.within)
    nearest = f"the nearest to its limit is {where}, {size} ({_basis(verdict)})"
    return f"{text} {'agrees' if is_one else 'agree'}; {nearest}"


def measured_text(found: MeasuredPlace, within: float | None = None) -> str:
    """An error at a chosen place in words, with what is allowed."""
    share = "" if found.relative is None else f"{percent(found.relative)} of its size"
    if within is not None and share:
        return f"off by {share}; {percent(within)} is allowed"
    text = f"off by {number_text(found.error or 0.0)} roundings"
    text += f" ({share})" if share else ""
    if found.limit is None:
        return text
    return f"{text}; {number_text(found.limit)} are explained by rounding"


def percent(share: float) -> str:
    """A share of something for a person to read."""
    return f"{100 * share:.3g} %" if share < 1e4 else "far more than 100 %"


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
    if (
        verdict.mode in ("stats", "digest")
        and culprit.cause in ("result", "dtype")
        and not verdict.at
    ):
        options = f"--keep tensors --calls {quote(culprit.name)} --steps {culprit.step}"
        return f"record both sides again with: tensorprobe run {options} ..., and compare"
    if culprit.cause == "result" and not verdict.at and not is_communication(culprit.name):
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
