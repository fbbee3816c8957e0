"""What a monitor has written, as lines for a person and as JSON."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import msgspec
import numpy as np

from tensorprobe.monitoring.alarms import line_of
from tensorprobe.monitoring.series_reading import SCALAR, TOTAL, Trend, TrendKey, Trends
from tensorprobe.nests import strict_json
from tensorprobe.records import count

LISTED = 30
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
# What is shown without a pattern, where it is there.
_FIRST = (
    TrendKey(SCALAR, "loss"),
    TrendKey("gradient", TOTAL),
    TrendKey(SCALAR, "loss_scale"),
)


def lines(ranks: list[Trends], pattern: str | None, limit: int) -> list[str]:
    """The steps, the alarms and some curves of each rank."""
    made: list[str] = []
    for rank in ranks:
        steps = rank.steps
        span = f"steps {steps[0]} to {steps[-1]}" if steps.size else "no steps"
        alarms = count(len(rank.alarms), "alarm") if rank.alarms else "no alarms"
        kept = f" ({count(len(steps), 'step')} kept)" if steps.size <= _span(steps) else ""
        made.append(f"rank {rank.rank}: {span}{kept}, {len(rank.trends)} trends, {alarms}")
        made += [f"  {line_of(alarm)}" for alarm in rank.alarms[:limit]]
        if rank.alarms[limit:]:
            made.append(f"  and {len(rank.alarms) - limit} more alarms")
        made += [f"  recorded: {a.recording}" for a in rank.alarms if a.recording][:LISTED]
        made += [f"  gap: {gap}" for gap in rank.gaps[:LISTED]]
        chosen = chosen_trends(rank, pattern)
        made += [f"  {_curve(key, rank.trends[key])}" for key in chosen[:limit]]
        if chosen[limit:]:
            made.append(f"  and {len(chosen) - limit} more trends; --limit shows them")
        if not chosen and pattern is not None:
            made.append(f"  no trend has a name like {pattern}")
        elif not chosen and rank.trends:
            few = ", ".join(str(key) for key in list(rank.trends)[:3])
            made.append(f"  give a NAME to see trends, such as those of {few}")
    return made


def _span(steps: Any) -> int:
    return int(steps[-1] - steps[0])


def chosen_trends(rank: Trends, pattern: str | None) -> list[TrendKey]:
    """The trends whose names match; without a pattern the loss and the other scalars."""
    if pattern is None:
        rates = [key for key in rank.trends if key.kind == SCALAR and key.name.startswith("lr.")]
        own = [key for key in rank.trends if key.kind == SCALAR and key not in (*_FIRST, *rates)]
        return [key for key in (*_FIRST, *rates, *own) if key in rank.trends]
    wanted = pattern if any(char in pattern for char in "*?[") else f"*{pattern}*"
    return [key for key in rank.trends if fnmatch.fnmatchcase(str(key), wanted)]


def _curve(key: TrendKey, trend: Trend) -> str:
    values = trend.values
    fine = values[np.isfinite(values)]
    last = f"{values[-1]:.4g}" if values.size else ""
    if not fine.size:
        return f"{key!s:44} {'':{_WIDTH}} never finite"
    span = f"{fine.min():.4g} to {fine.max():.4g}"
    return f"{key!s:44} {_bars(values)} last {last}, {span}"


def _bars(values: Any) -> str:
    """A curve in one line: the mean of each part of it, logarithmic where it spans much."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    is_wide = low > 0 and high / low > 100
    made = []
    for part in np.array_split(values, min(_WIDTH, len(values))):
        part = part[np.isfinite(part)]
        if not part.size:
            made.append("!")
            continue
        at, bottom, top = float(part.mean()), low, high
        if is_wide:
            at, bottom, top = math.log(at), math.log(low), math.log(high)
        share = 0.0 if top == bottom else (at - bottom) / (top - bottom)
        made.append(_BARS[min(7, int(share * 8))])
    return f"{''.join(made):{_WIDTH}}"


def json_text(ranks: list[Trends], pattern: str | None) -> str:
    """The same as JSON, with all values of the trends that are chosen."""
    content = {
        "format": 1,
        "ranks": [
            {
                "rank": rank.rank,
                "first_step": int(rank.steps[0]) if rank.steps.size else None,
                "last_step": int(rank.steps[-1]) if rank.steps.size else None,
                "alarms": [msgspec.to_builtins(alarm) for alarm in rank.alarms],
                "gaps": rank.gaps,
                "trends": [
                    {
                        "kind": key.kind,
                        "name": key.name,
                        "steps": rank.trends[key].steps.tolist(),
                        "values": rank.trends[key].values.tolist(),
                    }
                    for key in chosen_trends(rank, pattern)
                ],
            }
            for rank in ranks
        ],
    }
    return msgspec.json.format(msgspec.json.encode(strict_json(content)), indent=1).decode()
