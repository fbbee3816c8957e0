"""Two trainings: the first step and place at which their trends part beyond their own noise."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tensorprobe.errors import BadArtefact
from tensorprobe.monitoring.series import Array, kind_number
from tensorprobe.monitoring.series_reading import (
    SCALAR,
    TOTAL,
    Trend,
    TrendKey,
    Trends,
    read_trends,
)
from tensorprobe.nests import strict_json

WIDTH = 8  # steps whose mean is compared
LEAST_STEPS = 12  # that both have of a trend
COURSE = 33  # steps: what changes more slowly is the course of a trend
Z = 6.0
WANDERING = 0.1  # of the logarithm of an update
LEAST = 0.05  # of the value: what is nearer is alike whatever the noise
LISTED = 20  # lines for a person
# In the order of a step; a learning rate comes before all that it changes.
_SETTINGS = ("lr.", "loss_scale")


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """A trend that parts: from `step` on, for certain at `certain_at`."""

    kind: str
    name: str
    rank: int
    step: int
    certain_at: int
    actual: float | None
    expected: float | None
    noise: float  # of one step, as a factor: 0.1 is 10 %


class TrendComparison(NamedTuple):
    """The verdict, and every trend that parts, the first first."""

    verdict: Literal["match", "parted"]
    actual: Path
    expected: Path
    n_compared: int
    n_steps: int
    partings: list[Parting]
    not_compared: list[str]
    next: str


def compare_trends(actual: Path, expected: Path) -> TrendComparison:
    """Compare what two monitors have written; BadArtefact where they have nothing in common."""
    ours = {each.rank: each for each in read_trends(actual)}
    theirs = {each.rank: each for each in read_trends(expected)}
    both = sorted(set(ours) & set(theirs))
    skipped = [f"rank {rank} (one side only)" for rank in sorted(set(ours) ^ set(theirs))]
    partings: list[Parting] = []
    compared, steps = 0, 0
    for rank in both:
        skipped += [f"rank {rank}: {gap}" for gap in (*ours[rank].gaps, *theirs[rank].gaps)]
        n_trends, n_steps, found = _compare(ours[rank], theirs[rank], skipped)
        compared, steps = compared + n_trends, max(steps, n_steps)
        partings += found
    if not compared:
        raise BadArtefact(
            f"nothing to compare: '{actual}' and '{expected}' have no number with "
            f"{LEAST_STEPS} steps in common. {_what_is_there(ours, theirs)}"
        )
    partings.sort(key=_order)
    first = partings[0] if partings else None
    following = "" if first is None else record_command(ours[first.rank], first.step)
    return TrendComparison(
        "parted" if partings else "match", actual, expected, compared, steps, partings, skipped,
        following,
    )  # fmt: skip


def _compare(ours: Trends, theirs: Trends, skipped: list[str]) -> tuple[int, int, list[Parting]]:
    pairs: dict[TrendKey, tuple[Array, Array, Array]] = {}
    for key in ours.trends:
        if key in theirs.trends:
            pair = common(ours.trends[key], theirs.trends[key])
            if len(pair[0]) >= LEAST_STEPS:
                pairs[key] = pair
    most = max((len(steps) for steps, _, _ in pairs.values()), default=0)
    together = begin_alike(pairs)
    if pairs and not together:
        skipped.append(
            "weights, moments and updates: the two begin with other weights, or other data"
        )
        pairs = {key: pair for key, pair in pairs.items() if not _remembers(key.kind)}
    spreads = {} if together else _spreads(pairs)
    # An update wanders for long by what an optimizer remembers.
    spreads["update"] = max(WANDERING, spreads.get("update", 0.0))
    found = []
    for key, pair in pairs.items():
        parting = _parting(key, ours.rank, *pair, spreads.get(key.kind, 0.0))
        if parting is not None:
            found.append(parting)
    lonely = [set(ours.trends) - set(theirs.trends), set(theirs.trends) - set(ours.trends)]
    for side, keys in zip(("actual", "expected"), lonely, strict=True):
        if keys:
            few = ", ".join(sorted(str(key) for key in keys)[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            skipped.append(f"{few}{more} ({side} only)")
    return len(pairs), most, found


def _remembers(kind: str) -> bool:
    """Whether a number is a sum over all steps so far, so that no trend is its own."""
    return kind in ("parameter", "update") or kind.startswith("moment.")


def begin_alike(pairs: dict[TrendKey, tuple[Array, Array, Array]]) -> bool:
    """Whether two trainings begin with the same weights and data: then they go together at first,
    and each gradient of the first step is nearly that of the other."""
    first = min((int(steps[0]) for steps, _, _ in pairs.values()), default=0)
    apart = [
        abs(mine[0] - other[0]) <= 0.05 * max(abs(mine[0]), abs(other[0]))
        for key, (steps, mine, other) in pairs.items()
        if steps[0] == first and key.kind.startswith("gradient")
        if math.isfinite(mine[0]) and math.isfinite(other[0])
    ]
    return not apart or sum(apart) >= 0.8 * len(apart)


def _spreads(pairs: dict[TrendKey, tuple[Array, Array, Array]]) -> dict[str, float]:
    """Of each kind how far its trends are apart from the first to the last step, robustly: so far
    do trainings go that begin with other numbers."""
    found: dict[str, list[float]] = {}
    for key, (_, mine, other) in pairs.items():
        fine = np.isfinite(mine) & np.isfinite(other)
        if fine.sum() >= LEAST_STEPS and key.name != TOTAL:
            ours, theirs = _comparable(mine[fine], other[fine])
            found.setdefault(key.kind, []).append(abs(float(np.median(ours - theirs))))
    return {
        kind: 0.3 if kind == SCALAR else 1.4826 * float(np.median(each))
        for kind, each in found.items()
    }


def common(one: Trend, other: Trend) -> tuple[Array, Array, Array]:
    """The steps that two trends share, and the values of both."""
    steps, at, there = np.intersect1d(
        one.steps, other.steps, assume_unique=True, return_indices=True
    )
    return steps, one.values[at], other.values[there]


def _parting(
    key: TrendKey, rank: int, steps: Array, mine: Array, other: Array, spread: float
) -> Parting | None:
    is_setting = key.kind == SCALAR and key.name.startswith(_SETTINGS)
    least = 5 * LEAST if key.kind.endswith("_sq") else LEAST
    at = first_setting(mine, other) if is_setting else first_parting(mine, other, spread, least)
    if at is None:
        return None
    first, certain, noise = at
    return Parting(
        kind=key.kind, name=key.name, rank=rank, step=int(steps[first]),
        certain_at=int(steps[certain]), actual=_plain(mine[first]), expected=_plain(other[first]),
        noise=noise,
    )  # fmt: skip


def first_setting(mine: Array, other: Array) -> tuple[int, int, float] | None:
    """Where two settings first differ: they have no noise."""
    apart = ~np.isclose(mine, other, rtol=1e-6, atol=0, equal_nan=True)
    if not apart.any():
        return None
    first = int(np.argmax(apart))
    return first, first, 0.0


def first_parting(
    mine: Array, other: Array, spread: float = 0.0, least: float = LEAST
) -> tuple[int, int, float] | None:
    """Where two trends part: the first place, where it is certain, and the noise of a step.

    The noise is how far each of the two is from its own course. Two healthy trainings that draw
    other numbers, or round otherwise for long, differ by that in each step, and by less in the mean
    of several. `spread` is how far trends of this kind are apart anyway, and `least` what is no
    difference.
    """
    finite = np.isfinite(mine) & np.isfinite(other)
    gone = np.isfinite(other) & ~np.isfinite(mine) | np.isfinite(mine) & ~np.isfinite(other)
    broken = int(np.argmax(gone)) if gone.any() else None
    at = np.flatnonzero(finite)
    found = None
    if len(at) >= LEAST_STEPS:
        found = _first_parting(*_comparable(mine[at], other[at]), spread, least)
        if found is not None:
            found = int(at[found[0]]), int(at[found[1]]), found[2]
    if broken is not None and (found is None or broken < found[0]):
        return broken, broken, 0.0 if found is None else found[2]
    return found


def _comparable(mine: Array, other: Array) -> tuple[Array, Array]:
    """As logarithms, if none is below 0; else in units of how large they are."""
    if (mine >= 0).all() and (other >= 0).all():
        both = np.concatenate((mine[mine > 0], other[other > 0]))
        least = float(both.min()) if both.size else 1.0
        return np.log(np.fmax(mine, least * 0.1)), np.log(np.fmax(other, least * 0.1))
    size = float(np.median(np.abs(np.concatenate((mine, other))))) or 1.0
    return mine / size, other / size


def _first_parting(
    mine: Array, other: Array, spread: float, least: float
) -> tuple[int, int, float] | None:
    apart = mine - other
    width = min(WIDTH, len(apart) // 2)
    one, memory = _noise(mine)
    two, other_memory = _noise(other)
    noise = math.hypot(one, two)
    count = max(1.0, width * (1 - max(memory, other_memory)) / (1 + max(memory, other_memory)))
    floor = max(math.log1p(least), Z * spread)
    limit = max(Z * noise / math.sqrt(count), floor)
    means = np.convolve(apart, np.full(width, 1.0 / width), "valid")
    beyond = np.abs(means) > limit
    if not beyond.any():
        return None
    certain = int(np.argmax(beyond)) + width - 1
    sign = np.sign(means[certain - width + 1])
    first = certain
    # Back to where it left the noise; a step that is alone within it does not count.
    near = sign * apart <= max(3 * noise, 0.5 * floor)
    while first > 0 and not (near[first - 1] and near[max(0, first - 2)]):
        first -= 1
    while first < certain and near[first]:
        first += 1
    return first, certain, noise


def _noise(values: Array) -> tuple[float, float]:
    """How far values are from their own course, robustly, and how alike neighbours are in it."""
    width = min(COURSE, len(values) | 1)
    around = np.pad(values, width // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(around, width)
    rest = values - np.median(windows[: len(values)], axis=1)
    sigma = 1.4826 * float(np.median(np.abs(rest)))
    variance = float(np.mean(np.square(np.clip(rest, -3 * sigma, 3 * sigma))))
    if not variance or len(values) < 3:
        return sigma, 0.0
    clipped = np.clip(rest, -3 * sigma, 3 * sigma)
    memory = float(np.mean(clipped[1:] * clipped[:-1])) / variance
    return max(sigma, math.sqrt(variance)), min(0.95, max(0.0, memory))


def _order(parting: Parting) -> tuple[Any, ...]:
    """The first step; of one step what comes first in it, and what is surest."""
    is_setting = parting.kind == SCALAR and parting.name.startswith(_SETTINGS)
    kind = -1 if is_setting else 2.5 if parting.kind == SCALAR else kind_number(parting.kind)
    return parting.step, kind, parting.certain_at, parting.rank


def record_command(trends: Trends, step: int) -> str:
    """What records one step of this training."""
    attempts = trends.facts.get("attempts")
    words: Any = None
    if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict):
        words = attempts[-1].get("program")
    is_known = isinstance(words, list) and all(isinstance(word, str) for word in words)
    program = shlex.join(words) if is_known and words else "SCRIPT"
    step = max(0, step)
    options = f"--level mix --keep tensors --steps {step} --stop-after-last-step -o runs/step{step}"
    return f"tensorprobe run {options} {program}"


def _what_is_there(ours: dict[int, Trends], theirs: dict[int, Trends]) -> str:
    sides = []
    for word, side in (("actual", ours), ("expected", theirs)):
        one = next(iter(side.values()))
        steps = one.steps
        span = f"steps {steps[0]} to {steps[-1]}" if steps.size else "no steps"
        names = ", ".join(str(key) for key in list(one.trends)[:2])
        sides.append(f"{word} has {span}: {names}")
    return "; ".join(sides)


# Words


def lines(found: TrendComparison) -> list[str]:
    """What a person reads."""
    head = f"{found.n_compared} trends over {found.n_steps} steps"
    if not found.partings:
        made = [f"match: {head}: they part nowhere beyond their own noise"]
    else:
        first = found.partings[0]
        made = [f"parted at step {first.step}: {_place(first)}; {len(found.partings)} of {head}"]
        made += [f"  {_line(each)}" for each in found.partings[:LISTED]]
        if found.partings[LISTED:]:
            made.append(f"  and {len(found.partings) - LISTED} more")
    for each in found.not_compared[:LISTED]:
        made.append(f"  not compared: {each}")
    if found.next:
        made.append(f"next: {found.next}")
    return made


def _place(parting: Parting) -> str:
    rank = f" (rank {parting.rank})" if parting.rank else ""
    return f"{TrendKey(parting.kind, parting.name)}{rank}"


def _line(parting: Parting) -> str:
    values = " here, ".join(_number(each) for each in (parting.actual, parting.expected))
    certain = "" if parting.certain_at == parting.step else f", certain at {parting.certain_at}"
    noise = f", noise {100 * parting.noise:.2g} %" if parting.noise else ""
    return f"step {parting.step}{certain}  {_place(parting)}: {values} there{noise}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def json_text(found: TrendComparison) -> str:
    """The comparison as JSON."""
    content = {
        "format": 1,
        "verdict": found.verdict,
        "actual": str(found.actual),
        "expected": str(found.expected),
        "compared": found.n_compared,
        "steps": found.n_steps,
        "partings": [msgspec.to_builtins(each) for each in found.partings],
        "not_compared": found.not_compared,
        "next": found.next,
    }
    text = msgspec.json.format(msgspec.json.encode(strict_json(content)), indent=1)
    return text.decode()
