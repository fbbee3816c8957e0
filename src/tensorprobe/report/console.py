"""A comparison for the terminal: the verdict, then short tables of what stands behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorprobe.comparing.comparison import Compared
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.rounding import distance, number_text
from tensorprobe.comparing.verdict import Verdict, describe, percent
from tensorprobe.terminal import printable

_CULPRITS = 8
_ONE_SIDED = 6
_STRUCTURE = 4
_RANKS = 16
_LARGEST = 12
_LONGEST = 2000


def render(comparison: Compared) -> str:
    """What `tensorprobe compare` prints."""
    verdict = comparison.verdict
    parts = [list(describe(verdict))]
    if verdict.culprits:
        parts.append(list(_around(comparison)))
    if verdict.at and (verdict.within is not None or _is_open(verdict)):
        parts.append(list(_largest(verdict)))
    if len(verdict.culprits) > 1:
        parts.append(list(_culprits(verdict)))
    if len({(r.rank, r.step) for r in verdict.ranks}) > 1:
        parts.append(list(_ranks(verdict)))
    if verdict.verdict != "incomparable":
        parts.append(list(_one_sided(comparison)))
    if comparison.structure:
        parts.append(list(_structure(comparison)))
    return "\n\n".join("\n".join(map(_line, part)) for part in parts if part)


def _line(text: str) -> str:
    """A line as a terminal shows it; names in a file may be of any length."""
    shown = printable(text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}... ({len(text)} characters)"


def _around(comparison: Compared) -> Iterator[str]:
    """The first culprit and its neighbours: error in, error out."""
    first = comparison.verdict.culprits[0]
    pairs = [pair for pair in comparison.of_rank(first.rank) if pair.call.step == first.step]
    at = next((i for i, pair in enumerate(pairs) if pair.call.name == first.name), None)
    if at is None:
        return
    rows = [("", "call", "module", "error in", "error out")]
    for pair in pairs[max(0, at - 3) : at + 4]:
        mark = ">" if pair.call.name == first.name else ""
        rows.append((mark, pair.call.name, pair.call.module, *_errors(pair)))
    yield from _table(rows, right=(3, 4))


def _is_open(verdict: Verdict) -> bool:
    """Whether nobody knows how far some places may be apart."""
    return any(each.status == "undecided" and each.limit is None for each in verdict.boundaries)


def _largest(verdict: Verdict) -> Iterator[str]:
    """The modules with the largest errors, where nobody knows what is too much."""
    found = [each for each in verdict.boundaries if each.kind == "output" and each.relative]
    least = sorted((each.relative or 0.0 for each in found), reverse=True)[:_LARGEST][-1:]
    rows = [("the largest errors", "error in", "error out", "of its size", "")]
    rows += [
        (
            each.actual or "the model",
            number_text(each.inherited),
            number_text(each.error or 0.0),
            percent(each.relative or 0.0),
            "" if each.status in ("within", "equal") else each.status,
        )
        for each in found
        if least and (each.relative or 0.0) >= least[0]
    ]
    if found:
        yield from _table(rows, right=(1, 2, 3))


def _errors(pair: CallPair) -> tuple[str, str]:
    if not pair.is_paired:
        side = "actual" if pair.pair.actual is not None else "expected"
        return f"only in {side}", ""
    found = {"in": 0.0, "out": 0.0}
    for row in pair.tensors:
        key = "out" if row.role == "output" else "in"
        found[key] = max(found[key], distance(row))
    return number_text(found["in"]), number_text(found["out"])


def _culprits(verdict: Verdict) -> Iterator[str]:
    rows = [("", "culprit", "kind", "step", "rank", "own error", "affected")]
    rows += [
        (
            str(n),
            c.name,
            c.kind,
            str(c.step),
            str(c.rank),
            number_text(c.own_error),
            str(c.affected),
        )
        for n, c in enumerate(verdict.culprits[:_CULPRITS], 1)
    ]
    yield from _table(rows, right=(3, 4, 5, 6))
    if len(verdict.culprits) > _CULPRITS:
        yield f"{len(verdict.culprits) - _CULPRITS} more in verdict.json"


def _ranks(verdict: Verdict) -> Iterator[str]:
    came: dict[int, int] = {}  # by rank the first step in which it was given a difference
    for each in verdict.received:
        came[each.rank] = min(came.get(each.rank, each.step), each.step)
    rows = [("rank", "step", "verdict", "aligned", "diverged", "first culprit")]
    for r in verdict.ranks[:_RANKS]:
        is_given = r.verdict == "match" and came.get(r.rank, r.step + 1) <= r.step
        own = "no own cause" if is_given else r.verdict  # what others sent it does differ
        rows.append(
            (str(r.rank), str(r.step), own, str(r.aligned), str(r.diverged), r.culprit or "")
        )
    yield from _table(rows, right=(0, 1, 3, 4))
    if len(verdict.ranks) > _RANKS:
        yield f"{len(verdict.ranks) - _RANKS} more in verdict.json"


def _one_sided(comparison: Compared) -> Iterator[str]:
    # A step that one side has not at all is said in the verdict, in one line.
    found = comparison.alone
    if not found:
        return
    yield "calls of one side only:"
    for (_, side), alike in list(found.items())[:_ONE_SIDED]:
        more = f" and {alike.n - 1} like it" if alike.n > 1 else ""
        first = "the first " if more else ""
        yield f"  {alike.name}{more} only in {side}, {first}after {alike.after}"
    rest = list(found.values())[_ONE_SIDED:]
    if rest:
        yield f"  and {sum(alike.n for alike in rest)} more, in comparison.csv"


def _structure(comparison: Compared) -> Iterator[str]:
    yield "differences in calls that are not blamed:"
    for text in comparison.structure[:_STRUCTURE]:
        yield f"  {text}"
    if len(comparison.structure) > _STRUCTURE:
        yield f"  and {len(comparison.structure) - _STRUCTURE} more"


def _table(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
