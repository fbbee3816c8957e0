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
from tensorprobe.monitoring.series_reading import SCALAR, Trend, TrendKey, Trends, read_trends
from tensorprobe.nests import strict_json

WIDTH = 8  # steps whose mean is compared
LEAST_STEPS = 12  # that both have of a trend
Z = 8.0
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
    following = "" if first is None else _record_command(ours[first.rank], first)
    return TrendComparison(
        "parted" if partings else "match", actual, expected, compared, steps, partings, skipped,
        following,
    )  # fmt: skip


def _compare(ours: Trends, theirs: Trends, skipped: list[str]) -> tuple[int, int, list[Parting]]:
    compared, most, found = 0, 0, []
    for key in ours.trends:
        if key not in theirs.trends:
            continue
        steps, mine, other = common(ours.trends[key], theirs.trends[key])
        if len(steps) < LEAST_STEPS:
            continue
        compared, most = compared + 1, max(most, len(steps))
        parting = _parting(key, ours.rank, steps, mine, other)
        if parting is not None:
            found.append(parting)
    lonely = [set(ours.trends) - set(theirs.trends), set(theirs.trends) - set(ours.trends)]
    for side, keys in zip(("actual", "expected"), lonely, strict=True):
        if keys:
            few = ", ".join(sorted(str(key) for key in keys)[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            skipped.append(f"{few}{more} ({side} only)")
    return compared, most, found


def common(one: Trend, other: Trend) -> tuple[Array, Array, Array]:
    """The steps that two trends share, and the values of both."""
    steps, at, there = np.intersect1d(
        one.steps, other.steps, assume_unique=True, return_indices=True
    )
    return steps, one.values[at], other.values[there]


def _parting(key: TrendKey, rank: int, steps: Array, mine: Array, other: Array) -> Parting | None:
    is_setting = key.kind == SCALAR and key.name.startswith(_SETTINGS)
    at = first_setting(mine, other) if is_setting else first_parting(mine, other)
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


def first_parting(mine: Array, other: Array) -> tuple[int, int, float] | None:
    """Where two trends part: the first place, where it is certain, and the noise of a step.

    The noise is what each of the two changes by from one step to the next. Two healthy trainings
    that draw other numbers differ by that in each step, and by less in the mean of several.
    """
    finite = np.isfinite(mine) & np.isfinite(other)
    gone = np.isfinite(other) & ~np.isfinite(mine) | np.isfinite(mine) & ~np.isfinite(other)
    broken = int(np.argmax(gone)) if gone.any() else None
    at = np.flatnonzero(finite)
    found = None
    if len(at) >= LEAST_STEPS:
        found = _first_parting(*_comparable(mine[at], other[at]))
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


def _first_parting(mine: Array, other: Array) -> tuple[int, int, float] | None:
    noise = math.hypot(_noise(mine), _noise(other))
    apart = mine - other
    width = min(WIDTH, len(apart) // 2)
    means = np.convolve(apart, np.full(width, 1.0 / width), "valid")
    # Steps that follow one another are not independent: of so many count as a half.
    limit = max(Z * noise / math.sqrt(max(1.0, width / 2)), math.log1p(LEAST))
    beyond = np.abs(means) > limit
    alone = np.abs(apart) > max(2 * Z * noise, math.log1p(LEAST))
    # A single step that is far off is a parting only if it does not come back at once.
    stays = alone[:-2] & alone[1:-1] & alone[2:] if len(alone) > 2 else alone[:0]
    windows = [int(np.argmax(beyond)) + width - 1] if beyond.any() else []
    windows += [int(np.argmax(stays)) + 2] if stays.any() else []
    if not windows:
        return None
    certain = min(windows)
    sign = np.sign(apart[certain])
    first = certain
    while first > 0 and sign * apart[first - 1] > max(3 * noise, 0.5 * math.log1p(LEAST)):
        first -= 1
    return first, certain, noise


def _noise(values: Array) -> float:
    """How far a value is from its neighbours', robustly; a trend that rises or falls is none."""
    if len(values) < 3:
        return 0.0
    bends = values[1:-1] - (values[:-2] + values[2:]) / 2
    return float(1.4826 * np.median(np.abs(bends)) / math.sqrt(1.5))


def _order(parting: Parting) -> tuple[Any, ...]:
    """The first step; of one step what comes first in it, and what is surest."""
    is_setting = parting.kind == SCALAR and parting.name.startswith(_SETTINGS)
    kind = -1 if is_setting else 2.5 if parting.kind == SCALAR else kind_number(parting.kind)
    return parting.step, kind, parting.certain_at, parting.rank


def _record_command(trends: Trends, first: Parting) -> str:
    """What records the step at which the trends part, of this training."""
    attempts = trends.facts.get("attempts")
    words: Any = None
    if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict):
        words = attempts[-1].get("program")
    is_known = isinstance(words, list) and all(isinstance(word, str) for word in words)
    program = shlex.join(words) if is_known and words else "SCRIPT"
    step = max(0, first.step)
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
