"""What is asked of the ranks of one run: the answer in lines, and as ranks.json."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.comparing.inside_run import InsideRun
from tensorprobe.overflow.across_ranks import FirstNonfinite
from tensorprobe.records import Capture, count
from tensorprobe.store.frames import users_line

RANKS_FILE = "ranks.json"
HEADS = {
    "hang": "it hung",
    "death": "a rank is gone",
    "order": "other communications",
    "arguments": "other arguments",
    "collective": "wrong communication",
    "parameter": "replicas part",
    "gradient": "replicas part",
    "random": "other random numbers",
    "fact": "ranks differ",
}
_MOST_OF_KIND = 4  # findings that are printed
_MOST_RANKS = 8  # that a line names


def as_json(
    found: FirstNonfinite, capture: Capture, inside: InsideRun | None = None
) -> dict[str, Any]:
    """The content of ranks.json; `inside` where several ranks were held against each other."""
    told = {} if inside is None else msgspec.to_builtins(inside)
    return {
        "format": 1,
        "run": str(capture.path),
        "ranks": list(capture.ranks),
        "steps": list(capture.steps),
        "calls": len(capture.calls),
        **told,
        "nonfinite": msgspec.to_builtins(found),
    }


def save(
    found: FirstNonfinite, capture: Capture, folder: Path, inside: InsideRun | None = None
) -> Path:
    """Write ranks.json into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RANKS_FILE
    text = json.dumps(as_json(found, capture, inside), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return path


def inside_lines(inside: InsideRun, capture: Capture) -> Iterator[str]:
    """What the ranks do not agree in, for a person."""
    if not inside.findings:
        counts = inside.counts
        yield (
            f"{count(len(capture.ranks), 'rank')} agree: "
            f"{count(counts.get('communications', 0), 'communication')} linked, "
            f"{counts.get('communications judged', 0)} of them judged by what was given, "
            f"{count(counts.get('replicas', 0), 'replica')} held against each other"
        )
    of_kind: Counter[str] = Counter()
    for each in inside.findings:
        of_kind[each.kind] += 1
        if of_kind[each.kind] > _MOST_OF_KIND:
            continue
        yield f"{HEADS[each.kind]}: {each.reason}"
        where = f"step {each.step}" if each.step is not None else ""
        parts = [part for part in (each.name, where, users_line(each.stack)) if part]
        if parts:
            yield f"  {', '.join(parts)}"
    for kind, number in of_kind.items():
        if number > _MOST_OF_KIND:
            yield f"  and {number - _MOST_OF_KIND} more of '{HEADS[kind]}': ranks.json has all"
    for note in inside.notes:
        yield f"  note: {note}"


def lines(found: FirstNonfinite, capture: Capture) -> Iterator[str]:
    """The answer for a person."""
    if not found.first:
        looked = f"{count(len(capture.calls), 'call')} of {count(len(capture.ranks), 'rank')}"
        yield f"no call makes NaN or infinity: {looked}, {count(len(capture.steps), 'step')}"
    for origin in found.first:
        yield f"first {origin.holds}: {origin.name} (step {origin.step}, rank {origin.rank})"
        module = f"in {origin.module}" if origin.module else ""
        parts = (module, origin.op, users_line(origin.stack))
        yield f"  {', '.join(part for part in parts if part)}"
        yield f"  {origin.reason}"
    ways: dict[str, list[int]] = defaultdict(list)
    for origin in found.received:
        how = "received it through" if origin.what == "receives" else "have it first in"
        ways[f"{how} {origin.name} (step {origin.step})"].append(origin.rank)
    for how, ranks in ways.items():
        yield f"  {_named(ranks)} {how if len(ranks) > 1 else how.replace('have', 'has')}"
    if found.later:
        first_nan = next((origin for origin in found.later if "NaN" in origin.holds), None)
        seen = any("NaN" in origin.holds for origin in found.first)
        following = found.later[0] if seen or first_nan is None else first_nan
        more = "1 more call makes" if len(found.later) == 1 else f"{len(found.later)} more make"
        word = "the next is" if following is found.later[0] else "the first NaN is in"
        where = f"(step {following.step}, rank {following.rank}: {following.holds})"
        yield f"  {more} NaN or infinity; {word} {following.name} {where}"
    for note in found.notes:
        yield f"  note: {note}"
    if found.first and found.first[0].what == "makes":
        origin = found.first[0]
        call = f"{shlex.quote(origin.name)} --step {origin.step} --rank {origin.rank}"
        yield f"  next: tensorprobe show {shlex.quote(str(capture.path))} {call}"


def _named(ranks: Sequence[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:_MOST_RANKS]))
    more = f" and {len(numbers) - _MOST_RANKS} more" if len(numbers) > _MOST_RANKS else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"
