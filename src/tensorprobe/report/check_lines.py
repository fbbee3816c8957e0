"""What a check prints: failures, wrong recordings, what was skipped, and the counts."""

from __future__ import annotations

from collections.abc import Iterator

from tensorprobe.checking.row import Row
from tensorprobe.checking.run import Checked


def lines(checked: Checked, limit: int = 20) -> list[str]:
    """Failures first with the command for their repro, the worst of the rest, the counts."""
    counts = checked.counts
    found = []
    bad = [row for row in checked.rows if row.verdict in ("fail", "crashed")]
    for row in bad[:limit]:
        found += [f"{row.verdict:8} {_what(row)}", f"         {row.reason}"]
        found.append(f"         {row.repro}")
    if len(bad) > limit:
        found.append(f"         and {len(bad) - limit} more in {checked.path / 'check.json'}")
    found += _wrong_recordings(checked, limit)
    found += _skipped(checked, limit)
    found += [f"note     {note}" for note in checked.notes]
    wrong = sum(bool(row.recorded) for row in checked.rows)
    found.append(
        f"{counts['calls']} calls, {counts['checked']} different: {counts['pass']} pass"
        + (f" ({wrong} of them recorded wrong)" if wrong else "")
        + f", {counts['fail']} fail, {counts['crashed']} crashed, {counts['skipped']} skipped"
        f"; {checked.path / 'check.json'}"
    )
    return found


def _wrong_recordings(checked: Checked, limit: int) -> Iterator[str]:
    """Calls that pass here and did not where they were recorded."""
    rows = [row for row in checked.rows if row.recorded]
    for row in rows[:limit]:
        yield f"recorded {_what(row)} passes here, but what was recorded is wrong"
        yield f"         {row.recorded}"
        yield f"         {row.repro}"
    if len(rows) > limit:
        yield f"         and {len(rows) - limit} more in {checked.path / 'check.json'}"


def _skipped(checked: Checked, limit: int) -> Iterator[str]:
    """One line a reason. What to do about one call alone is left out where there are several."""
    reasons: dict[str, list[Row]] = {}
    for row in checked.rows:
        if row.verdict == "skipped":
            first, _, _ = row.reason.removeprefix(row.name + " ").partition(". ")
            reasons.setdefault(first, []).append(row)
    for first, rows in list(reasons.items())[:limit]:
        if len({row.reason for row in rows}) == 1:
            first = rows[0].reason.removeprefix(rows[0].name + " ")
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"skipped  {rows[0].name}{more}: {first}"
    if len(reasons) > limit:
        yield (f"skipped  for {len(reasons) - limit} more reasons in {checked.path / 'check.json'}")


def _what(row: Row) -> str:
    more = f" and {row.alike} alike" if row.alike else ""
    where = f" in {row.module}" if row.module else ""
    kinds = f"{row.device_dtype} on {row.device} against {row.reference_dtype}"
    return f"{row.name}{more}{where} ({row.kind}, {kinds})"
