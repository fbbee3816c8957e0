"""Writes docs/trust.md: what was found and missed by family, with every failure by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from trust import known
from trust.every_case import is_possible
from trust.harness import Case, Outcome

COLUMNS = "| faults found | cause right | false matches | healthy pairs clean | false alarms |"
RULE = "|---|---|---|---|---|---|"
KEEPS = ("tensors", "stats", "digest")

HEAD = """\
# How far a verdict can be trusted

This page is written by a command, which has {n_faults} planted faults and {n_healthy} healthy
pairs of small programs, and records and compares them:

```
python tests/trust/table.py                # goes on where it was ended
python tests/trust/table.py "data" "seeds"  # some families or cases
```

A fault is **found** if the verdict is `diverged` with exit code 3 and the first culprit is the
planted call, or the place where a difference appears that no recorded call made. Its **cause** is
right if `verdict.json` gives the right cause, once. A **false match** is a fault that gets
`match`. A healthy pair is **clean** if it gets `match` with exit code 0, or, where two runs
differ by a numeric switch or a dtype, one cause that says so. Else it is a **false alarm**. Each
program runs with several values of `keep` and at several levels; the numbers below are runs.
Everything runs on the CPU.

"""
OLDER = """\
**{n} of these {of} runs were measured with older code**, which has changed since. What is known to
fail today stands in `tests/trust/known_failures.txt`.

"""
KNOWN = """
## Failures by name

These {n} runs fail. They are also in `tests/trust/known_failures.txt`, where the tests expect
each of them to fail: a mended one must be removed from there.
"""


def write(
    file: Path,
    outcomes: Sequence[Outcome],
    cases: Sequence[Case],
    *,
    n_older: int = 0,
    lacking: int = 0,
) -> None:
    """The whole page; of some outcomes it says that they are of older sources, or not there."""
    faults = sum(case.is_fault for case in cases)
    text = HEAD.format(n_faults=faults, n_healthy=len(cases) - faults)
    if n_older:
        text += OLDER.format(n=n_older, of=len(outcomes))
    if lacking:
        text += f"**{lacking} runs have not been measured** and are not counted.\n\n"
    for keep in KEEPS:
        kept = [said for said in outcomes if said.keep == keep]
        text += f"## keep={keep}\n\n" + "\n".join(_table(kept)) + "\n\n"
    text += "\n".join(_by_level(outcomes)) + "\n"
    skipped = [case for case in cases if not is_possible(case)]
    if skipped:
        text += "\nNot run here, for want of a package: "
        text += ", ".join(f"{case.name} ({case.needs})" for case in skipped) + ".\n"
    failed = [said for said in outcomes if known.failure_of(said)]
    text += KNOWN.format(n=len(failed))
    for title, some in _by_failure(failed):
        text += f"\n### {title}: {len(some)}\n\n"
        text += "".join(f"- `{said.name}`: {_short(said)}\n" for said in some)
    file.write_text(text)


def failures(outcomes: Sequence[Outcome]) -> str:
    """Each failure with what was expected and the first lines of what was said."""
    text = ""
    for said in outcomes:
        if known.failure_of(said):
            text += (
                f"## {known.failure_of(said)}  [{said.family}]\n{said.wrong or said.wrong_cause}\n"
            )
            text += "".join(f"    {line}\n" for line in said.text.splitlines()[:4]) + "\n"
    return text


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        f"| family {COLUMNS}",
        RULE,
        *(
            _row(family, [said for said in outcomes if said.family == family])
            for family in dict.fromkeys(said.family for said in outcomes)
        ),
        _row("**all**", outcomes),
    ]
    return lines


def _by_level(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "## By level, all of keep",
        "",
        f"| level {COLUMNS}",
        RULE,
        *(
            _row(level, [said for said in outcomes if said.level == level])
            for level in ("mix", "L0", "L1", "L2")
        ),
    ]
    return lines


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    faults = [said for said in outcomes if said.is_fault]
    healthy = [said for said in outcomes if not said.is_fault]
    cells = [
        name,
        _share(faults, [said for said in faults if not said.wrong]),
        _share(faults, [said for said in faults if not said.wrong and not said.wrong_cause]),
        str(sum(said.verdict == "match" for said in faults)),
        _share(healthy, [said for said in healthy if not said.wrong]),
        str(sum(bool(said.wrong) for said in healthy)),
    ]
    return f"| {' | '.join(cells)} |"


def _share(all_of_them: Sequence[Outcome], good: Sequence[Outcome]) -> str:
    return f"{len(good)} of {len(all_of_them)}"


def _by_failure(failed: Iterable[Outcome]) -> list[tuple[str, list[Outcome]]]:
    kinds: dict[str, list[Outcome]] = {
        "False matches": [],
        "False alarms": [],
        "Another call is named": [],
        "Incomparable or crashed": [],
        "Only the cause is wrong": [],
    }
    for said in failed:
        if not said.wrong:
            kind = "Only the cause is wrong"
        elif said.verdict in ("crashed", "incomparable"):
            kind = "Incomparable or crashed"
        elif not said.is_fault:
            kind = "False alarms"
        else:
            kind = "False matches" if said.verdict == "match" else "Another call is named"
        kinds[kind].append(said)
    return [(kind, some) for kind, some in kinds.items() if some]


def _short(said: Outcome) -> str:
    text = " ".join((said.wrong or said.wrong_cause).split())
    return text if len(text) <= 160 else text[:159] + "…"
