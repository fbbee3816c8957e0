"""The rules: what a healthy training does not do. Each is a small class in the table RULES."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from tensorprobe.monitoring.alarms import Alarm
from tensorprobe.monitoring.pending_steps import PendingStep
from tensorprobe.monitoring.series import Array, StepTable, StepValues, kind_number
from tensorprobe.trouble import OnTrouble

WINDOW = 64  # steps that say what is usual
WARM_UP = 24  # before that nothing is unusual
FEW = 64  # elements of an input that may all be 0
QUIET_STEPS = 100  # a condition that was over for so long may raise an alarm again
# Moments of optimizers that divide by them.
ADAPTIVE = ("moment.exp_avg_sq", "moment.square_avg", "moment.sum", "moment.exp_inf")
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_NUMBER = "{:.4g}".format


class Suspicion(NamedTuple):
    """What a rule finds in a step."""

    kind: str
    name: str
    since: int
    reason: str
    value: float | None = None
    usual: float | None = None


class AlarmRule(Protocol):
    """Looks at one step after the other, and says what is wrong in it."""

    def look(self, step: StepValues, facts: PendingStep) -> Iterable[Suspicion]: ...


class RecentValues:
    """The last values of one number, and what is usual among them."""

    def __init__(self, length: int = WINDOW) -> None:
        self.values: deque[float] = deque(maxlen=length)

    @property
    def is_warm(self) -> bool:
        return len(self.values) >= WARM_UP

    def usual(self) -> tuple[float, float]:
        """The median, and a robust standard deviation."""
        values = np.fromiter(self.values, float)
        middle = float(np.median(values))
        return middle, _SIGMA * float(np.median(np.abs(values - middle)))


class RowState:
    """Arrays with an element for each row of a table, which may get other rows."""

    def __init__(self, **fields: float) -> None:
        self._fields = fields
        self.names: tuple[str, ...] = ()
        self.arrays: dict[str, Array] = {name: np.empty(0) for name in fields}

    def fit(self, names: tuple[str, ...]) -> dict[str, Array]:
        """The arrays for these names; those of names that were there before are kept."""
        if names is not self.names and names != self.names:
            at = {name: number for number, name in enumerate(self.names)}
            old = [at.get(name) for name in names]
            for field, start in self._fields.items():
                before = self.arrays[field]
                self.arrays[field] = np.array(
                    [start if place is None else before[place] for place in old], float
                )
        self.names = names
        return self.arrays


class NotFinite:
    """NaN or infinity, in the loss or in a tensor; gradients that a scaler skips are no fault."""

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        for kind in sorted(step.tables, key=kind_number):
            if kind.startswith("gradient") and facts.scale_known:
                continue
            table = step.tables[kind]
            bad = table.column("nan") + table.column("inf")
            rows = np.flatnonzero(bad > 0)
            if rows.size:
                first = rows[0]
                counts = table.column("nan")[first], table.column("inf")[first]
                text = f"{counts[0]:.0f} NaN and {counts[1]:.0f} infinite of "
                text += f"{table.column('count')[first]:.0f} elements"
                yield Suspicion(kind, _and_more(table.names, rows), step.step, text)
                return
        loss = step.scalars.get("loss")
        if loss is not None and not math.isfinite(loss) and not facts.scale_known:
            yield Suspicion("loss", "", step.step, f"it is {loss}", loss)


class Spike:
    """A loss, or the norm of all gradients, far above what the last steps had."""

    def __init__(self, z: float = 12.0, ratio: float = 4.0) -> None:
        self._z, self._ratio = z, ratio
        self._loss, self._norm = RecentValues(), RecentValues()
        self._begun = 0.0  # the loss that the training began with
        self._n_begun = 0
        self._worst = 0.0  # of the spikes before, forgotten slowly

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        loss = step.scalars.get("loss")
        if loss is not None and math.isfinite(loss):
            yield from self._look_at_loss(step, loss)
            self._loss.values.append(loss)
            self._worst *= 0.9995
            if self._n_begun < 5:  # before much is learned
                self._n_begun += 1
                self._begun = max(self._begun, loss)
        norm = step.total_norm()
        if norm and math.isfinite(norm):
            yield from self._look_at_norm(step, norm)
            self._norm.values.append(math.log(norm))

    def _look_at_loss(self, step: StepValues, loss: float) -> Iterator[Suspicion]:
        if not self._loss.is_warm:
            return
        middle, sigma = self._loss.usual()
        sigma = max(sigma, 0.02 * abs(middle), 1e-9)
        highest = max(self._loss.values)
        is_above = loss - middle > self._z * sigma and loss - highest > 0.5 * (highest - middle)
        # Once a training has converged, a hard batch has many times the usual loss: what is less
        # than half of what it began with, or no more than another one had, is no spike.
        is_above = is_above and loss - middle > 1.25 * self._worst
        is_above = is_above and loss > 0.5 * self._begun
        if is_above and (loss > 3 * self._begun > 0 or self._is_rare(loss)):
            self._worst = loss - middle
            text = f"{_NUMBER(loss)}, usually {_NUMBER(middle)} ± {_NUMBER(sigma)}"
            yield Suspicion("loss", "", step.step, text, loss, middle)

    def _is_rare(self, loss: float) -> bool:
        """Whether it is rare among logarithms as well: close to 0 a loss jumps by factors."""
        values = np.fromiter(self._loss.values, float)
        if not (values > 0).all():
            return True
        logs = np.log(values)
        middle = float(np.median(logs))
        sigma = max(_SIGMA * float(np.median(np.abs(logs - middle))), 0.02)
        above, highest = math.log(loss) - middle, float(logs.max()) - middle
        return above > self._z * sigma and above > 1.5 * highest

    def _look_at_norm(self, step: StepValues, norm: float) -> Iterator[Suspicion]:
        if not self._norm.is_warm:
            return
        middle, sigma = self._norm.usual()
        above = math.log(norm) - middle
        highest = max(self._norm.values) - middle
        if above > max(self._z * max(sigma, 0.02), math.log(self._ratio)) and above > 1.5 * highest:
            table = step.tables["gradient"]
            worst = table.names[int(np.nanargmax(table.column("norm")))]
            usual = math.exp(middle)
            text = f"norm of all {_NUMBER(norm)}, usually {_NUMBER(usual)}; most of it in {worst}"
            yield Suspicion("gradient", worst, step.step, text, norm, usual)


class Batch:
    """A batch unlike the others: its numbers are far larger, or far smaller."""

    def __init__(self, z: float = 12.0, ratio: float = 3.0) -> None:
        self._z, self._ratio = z, ratio
        self._windows: dict[str, RecentValues] = {}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        table = step.tables.get("input")
        if table is None:
            return
        counts = table.column("count").tolist()
        for name, rms, numel in zip(table.names, table.rms().tolist(), counts, strict=True):
            window = self._windows.setdefault(name, RecentValues())
            if not (rms > 0 and math.isfinite(rms)):
                if window.is_warm and rms == 0 and numel >= FEW:  # a few labels may all be 0
                    yield Suspicion("input", name, step.step, "all its elements are 0", 0.0)
                continue
            value = math.log(rms)
            if window.is_warm:
                middle, sigma = window.usual()
                off = abs(value - middle)
                furthest = max(abs(each - middle) for each in window.values)
                least = max(self._z * max(sigma, 0.01), math.log(self._ratio), 1.5 * furthest)
                if off > least:
                    usual = math.exp(middle)
                    text = f"root mean square {_NUMBER(rms)}, usually {_NUMBER(usual)}"
                    yield Suspicion("input", name, step.step, text, rms, usual)
            window.values.append(value)


class Frozen:
    """A parameter that requires grad, or was trained until now, and does not change."""

    def __init__(self, steps: int = 10, samples: int = 3) -> None:
        self._steps, self._samples = steps, samples
        self._rows = RowState(norm=math.nan, mean=math.nan, min=math.nan, max=math.nan, same=0.0,
                          since=0.0, stepped=0.0, changed=0.0)  # fmt: skip
        self._gradients = RowState(some=0.0, none=0.0)  # steps with a gradient, then with zeros
        self._stepped = 0  # steps of an optimizer with a learning rate
        self._rates: dict[int, int] = {}  # of each group, such steps

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        if facts.has_stepped:
            rates = {n: v for n, v in step.scalars.items() if n.startswith("lr.")}
            self._stepped += any(rates.values()) or not rates
            for name, rate in rates.items():
                group = int(name.removeprefix("lr."))
                self._rates[group] = self._rates.get(group, 0) + (rate != 0)
            yield from self._look_at_zeros(step, facts)
        table = step.tables.get("parameter")
        if table is None:
            return
        held = self._rows.fit(table.names)
        now = {name: table.column(name) for name in ("norm", "mean", "min", "max")}
        is_same = np.logical_and.reduce([held[name] == now[name] for name in now])
        known = np.array([self._steps_of(name, facts) for name in table.names], float)
        held["changed"] += ~is_same & ~np.isnan(held["norm"])
        held["same"] = np.where(is_same, held["same"] + 1, 0)
        held["since"] = np.where(is_same, held["since"], step.step)
        held["stepped"] = np.where(is_same, held["stepped"], known)
        for name, value in now.items():
            held[name] = value
        still = (held["same"] >= self._samples - 1) & (known - held["stepped"] >= self._steps)
        without_effect = _without_effect(step, 1e-5) if still.any() else set()
        for row in np.flatnonzero(still):
            name = table.names[row]
            if name in without_effect or self._is_rounded_away(name, step, facts):
                continue
            if name in facts.trained or held["changed"][row]:
                yield Suspicion(
                    "parameter", name, int(held["since"][row]) + 1, self._why(name, step, facts)
                )

    def _look_at_zeros(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        """A gradient that has become 0: an optimizer with momentum still moves the parameter."""
        table = step.tables.get("gradient.backward") or step.tables.get("gradient")
        if table is None:
            return
        held = self._gradients.fit(table.names)
        norm = table.column("norm")
        is_zero = norm == 0
        held["none"] = np.where(is_zero, held["none"] + 1, 0)
        held["some"] += norm > 0
        gone = (held["none"] >= self._steps) & (held["some"] >= WARM_UP)
        if gone.sum() > len(norm) / 2:  # all of a loss is 0: nothing is left to learn
            return
        for row in np.flatnonzero(gone):
            name = table.names[row]
            if name in facts.trained or not facts.trained:
                since = step.step - int(held["none"][row]) + 1
                text = f"its gradient is 0 in {int(held['none'][row])} steps, and was not before"
                yield Suspicion("parameter", name, since, text, 0.0)

    def _is_rounded_away(self, name: str, step: StepValues, facts: PendingStep) -> bool:
        """Whether a step is too small to change it, as at the end of a schedule that goes to 0."""
        rate = step.scalars.get(f"lr.{facts.groups.get(name)}")
        gradient = step.tables.get("gradient") or step.tables.get("gradient.backward")
        if rate is None or gradient is None or name not in gradient.names:
            return False
        pace = _largest(gradient, name)
        if not pace:
            return False
        if any(kind in step.tables for kind in ADAPTIVE):
            pace = 1.0  # it divides by how large gradients are
        return rate * pace < 1e-5 * _largest(step.tables["parameter"], name)

    def _steps_of(self, name: str, facts: PendingStep) -> int:
        group = facts.groups.get(name)
        return self._stepped if group is None else self._rates.get(group, self._stepped)

    def _why(self, name: str, step: StepValues, facts: PendingStep) -> str:
        if name not in facts.trained:
            return "it does not change any more: requires_grad is off now"
        gradient = step.tables.get("gradient.backward") or step.tables.get("gradient")
        at = gradient.names.index(name) if gradient and name in gradient.names else None
        if name not in facts.groups:
            return "it requires grad and does not change: no optimizer has it"
        if gradient is None:
            return "it requires grad and does not change"
        if at is None:
            return "it requires grad and does not change: it gets no gradient"
        if gradient.column("norm")[at] == 0:
            return "it requires grad and does not change: its gradient is 0"
        return "it requires grad and has a gradient, and does not change"


class KeptGradient:
    """Gradients that are not cleared between two steps of an optimizer."""

    def __init__(self, times: int = 2) -> None:
        self._times = times
        self._since: dict[str, list[int]] = {}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        for name in facts.kept_gradients:
            since = self._since.setdefault(name, [])
            since.append(step.step)
            if len(since) >= self._times:
                text = "they still have those of the step before in them: zero_grad is missing"
                yield Suspicion("gradient", f"of {name}", since[0], text)
        if facts.has_stepped:
            for name in set(self._since) - set(facts.kept_gradients):
                del self._since[name]


class LostMoments:
    """Moments of an optimizer that were lost, or are 0 although there are gradients."""

    def __init__(self) -> None:
        self._rows: dict[str, RowState] = {}
        self._last: dict[str, int] = {}
        self._zero_since: dict[str, int] = {}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        gradient = step.tables.get("gradient")
        for kind, table in step.tables.items():
            if not kind.startswith("moment."):
                continue
            rows = self._rows.setdefault(kind, RowState(norm=math.nan))
            held = rows.fit(table.names)
            norm = table.column("norm")
            passed = step.step - self._last.get(kind, step.step)
            self._last[kind] = step.step
            lost = np.zeros(len(norm), bool)
            if kind == "moment.exp_avg_sq" and facts.decay < 1:
                # It cannot fall faster than by beta2 in each step, whatever the gradients are.
                lost = norm < 0.9 * facts.decay ** max(1, passed) * held["norm"]
                lost &= held["norm"] > 0
            elif kind == "moment.momentum_buffer" and gradient is not None and passed:
                lost = (held["norm"] > 0) & _equals(table, gradient)
            held["norm"] = norm.copy()
            if lost.any():
                first = int(np.flatnonzero(lost)[0])
                text = f"it began anew: {int(lost.sum())} of {len(norm)} parameters lost it"
                yield Suspicion(
                    kind, _and_more(table.names, np.flatnonzero(lost)), step.step, text,
                    float(norm[first]),
                )  # fmt: skip
            yield from self._zeros(step, kind, table, gradient)

    def _zeros(
        self, step: StepValues, kind: str, table: StepTable, gradient: StepTable | None
    ) -> Iterator[Suspicion]:
        if gradient is None:
            return
        norms = dict(zip(gradient.names, gradient.column("norm").tolist(), strict=True))
        zero = [
            name
            for name, norm in zip(table.names, table.column("norm").tolist(), strict=True)
            if norm == 0 and norms.get(name, 0) > 0
        ]
        if not zero:
            self._zero_since.pop(kind, None)
            return
        since = self._zero_since.setdefault(kind, step.step)
        if step.step - since >= 2:
            text = "it is 0, and the gradient is not"
            more = f" and {len(zero) - 1} more" if zero[1:] else ""
            yield Suspicion(kind, zero[0] + more, since, text, 0.0)


class Rates:
    """The learning rate of one group jumps, and those of the others do not."""

    def __init__(self, ratio: float = 1.5) -> None:
        self._jump = math.log(ratio)
        self._logs: dict[str, deque[float]] = {}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        jumps: dict[str, float] = {}
        rates = {n: v for n, v in step.scalars.items() if n.startswith("lr.") and v > 0}
        for name, rate in rates.items():
            logs = self._logs.setdefault(name, deque(maxlen=3))
            logs.append(math.log(rate))
            if len(logs) == 3:
                jumps[name] = (logs[2] - logs[1]) - (logs[1] - logs[0])
        for name, jump in jumps.items():
            group = int(name.removeprefix("lr."))
            others = [
                each
                for other, each in jumps.items()
                if other != name and facts.beside(group, int(other.removeprefix("lr.")))
            ]
            if others and abs(jump) > self._jump and all(abs(each) < 0.1 for each in others):
                logs = self._logs[name]
                if abs(logs[2] - logs[1]) < self._jump:
                    continue  # back to what it was, after a jump that was told
                before = math.exp(logs[1])
                text = f"{_NUMBER(rates[name])}, and {_NUMBER(before)} a step before; no other "
                text += "group's has changed so"
                yield Suspicion(
                    "learning rate", f"of group {name.removeprefix('lr.')}", step.step, text,
                    rates[name], before,
                )  # fmt: skip


class Updates:
    """Updates out of range: too large or too small for their weight, or for those of one group
    against the others'."""

    def __init__(self, most: float = 0.5, least: float = 1e-4, z: float = 10.0) -> None:
        self._most, self._least, self._z = most, least, z
        self._rows = RowState(high=0.0, low=0.0, seen=0.0, usual=math.nan)
        self._groups: dict[int, RecentValues] = {}
        self._recent: dict[int, deque[float]] = {}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        table = step.tables.get("update")
        if table is None:
            return
        held = self._rows.fit(table.names)
        norm, before = table.column("norm"), table.column("before")
        with np.errstate(all="ignore"):
            ratio = norm / before
        moving = (norm > 0) & (before > 0)
        middle = float(np.median(ratio[moving])) if moving.any() else math.nan
        held["seen"] += 1
        is_old = held["seen"] > WARM_UP
        large = moving & is_old & (ratio > self._most)
        usual = np.where(np.isnan(held["usual"]), norm, held["usual"])
        # One alone may be close to 0 by chance: it is its update that has to have grown.
        high = large & ((norm > 8 * usual) | (large.sum() > len(norm) / 2))
        held["usual"] = np.where(high, usual, 0.98 * usual + 0.02 * norm)
        low = moving & is_old & (ratio < self._least * middle)
        if low.any():  # a small gradient makes a small update
            without_effect = _without_effect(step, 1e-3)
            low &= [name not in without_effect for name in table.names]
        held["high"] = np.where(high, held["high"] + 1, 0)
        held["low"] = np.where(low, held["low"] + 1, 0)
        for field, times, word in (("high", 3, "large"), ("low", 10, "small")):
            rows = np.flatnonzero(held[field] >= times)
            if rows.size:
                value = float(ratio[rows[0]])
                text = f"{_NUMBER(value)} of the parameter in a step, which is too {word}; "
                text += f"the usual one is {_NUMBER(middle)}"
                since = step.step - times + 1
                yield Suspicion("update", _and_more(table.names, rows), since, text, value, middle)
        yield from self._look_at_groups(step, facts, table, moving)

    def _look_at_groups(
        self, step: StepValues, facts: PendingStep, table: StepTable, moving: Array
    ) -> Iterator[Suspicion]:
        # An update follows what the optimizer makes it of, whose noise is not of interest.
        sources = ("moment.exp_avg", "moment.momentum_buffer", "gradient")
        source = next((step.tables[kind] for kind in sources if kind in step.tables), None)
        if source is None or len(facts.optimizers) < 2:
            return
        norms = dict(zip(source.names, source.column("norm").tolist(), strict=True))
        made_of = np.array([norms.get(name, math.nan) for name in table.names])
        with np.errstate(all="ignore"):
            logs = np.log(table.column("norm") / made_of)
        logs[~moving | ~np.isfinite(logs)] = np.nan
        groups = np.array([facts.groups.get(name, -1) for name in table.names])
        known = [int(each) for each in np.unique(groups) if each >= 0]
        if len(known) < 2:
            return
        middles = {each: _middle(logs[groups == each]) for each in known}
        for group, middle in middles.items():
            beside = [each for each in known if each != group and facts.beside(group, each)]
            others = [middles[each] for each in beside]
            rate = step.scalars.get(f"lr.{group}")
            rates = [step.scalars.get(f"lr.{each}") for each in beside]
            if not others or math.isnan(middle) or not rate or not all(rates):
                continue
            # by the learning rate, whose schedule may be the group's own
            shift = middle - math.log(rate)
            shift -= _middle(np.array(others) - np.log(np.array(rates, float)))
            if math.isnan(shift):
                continue
            yield from self._look_at_shift(step, group, shift)

    def _look_at_shift(self, step: StepValues, group: int, shift: float) -> Iterator[Suspicion]:
        window = self._groups.setdefault(group, RecentValues())
        recent = self._recent.setdefault(group, deque(maxlen=8))
        if len(recent) == 8:
            window.values.append(recent[0])
        recent.append(shift)
        if not window.is_warm or len(recent) < 8:
            return
        middle, sigma = window.usual()
        off = np.array(recent) - middle
        z = abs(float(np.mean(off))) / (max(sigma, 0.01) / math.sqrt(8))
        spread = max(abs(each - middle) for each in window.values)
        is_beyond = bool(np.all(np.abs(off) > max(math.log(1.5), spread))) and (
            np.all(off > 0) or np.all(off < 0)
        )
        if z > self._z and is_beyond:
            factor = math.exp(float(np.mean(off)))
            text = f"{_NUMBER(factor)} times what they were for their learning rate, against those "
            text += "of the other groups"
            yield Suspicion("update", f"of group {group}", step.step - 7, text, factor, 1.0)


class Underflow:
    """Gradients that vanish in float16: more and more of their elements are 0."""

    SMALLEST = 2.0**-14  # the smallest normal number of float16

    def __init__(self, share: float = 0.25, times: int = 3) -> None:
        self._share, self._times = share, times
        self._rows = RowState(usual=math.nan, times=0.0, seen=0.0)
        self._half = False

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        self._half |= facts.is_half
        kind = "gradient.backward" if "gradient.backward" in step.tables else "gradient"
        table = step.tables.get(kind)
        if table is None or not self._half:
            return
        held = self._rows.fit(table.names)
        share = table.column("zero") / table.column("count")
        largest = np.fmax(np.abs(table.column("min")), np.abs(table.column("max")))
        tiny = largest < self.SMALLEST
        usual = held["usual"]
        risen = (held["seen"] >= 8) & (share > usual + self._share)
        begun = (held["seen"] < 8) & (share > 0.5)
        bad = tiny & (risen | begun)
        held["times"] = np.where(bad, held["times"] + 1, 0)
        held["seen"] += ~bad
        fresh = np.where(np.isnan(usual), share, 0.9 * usual + 0.1 * share)
        held["usual"] = np.where(bad, usual, fresh)
        rows = np.flatnonzero(held["times"] >= self._times)
        if rows.size:
            first = int(rows[np.argmax(share[rows])])
            text = f"{100 * share[first]:.0f} % of its elements are 0 and the largest is "
            text += f"{_NUMBER(float(largest[first]))}: float16 has no smaller numbers"
            before = usual[first]
            if not math.isnan(before):
                text += f"; usually {100 * before:.0f} % are 0"
            since = step.step - self._times + 1
            order = [first, *[row for row in rows.tolist() if row != first]]
            yield Suspicion(
                kind, _and_more(table.names, np.array(order)), since, text, float(share[first])
            )


class Depth:
    """Gradients that explode or vanish with depth: a steady fall or rise from layer to layer."""

    def __init__(self, ratio: float = 1e4, times: int = 10) -> None:
        self._log, self._times = math.log(ratio), times
        self._bad = {"vanish": 0, "explode": 0}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        table = step.tables.get("gradient")
        if table is None:
            return
        # Weights only, in the order of the model: biases and norms are of another size.
        weights = [n for n, name in enumerate(table.names) if name.endswith("weight")]
        rms = table.rms()[weights]
        with np.errstate(all="ignore"):
            logs = np.log(rms)
        fine = np.isfinite(logs)
        if fine.sum() < 6:
            return
        at = np.arange(len(logs))[fine]
        slope, start = np.polyfit(at, logs[fine], 1)
        explained = slope * at + start
        rest = float(np.var(logs[fine] - explained))
        whole = float(np.var(logs[fine]))
        change = slope * (at[-1] - at[0])
        is_steady = whole > 0 and rest < 0.3 * whole
        for word, bad in (("vanish", change > self._log), ("explode", change < -self._log)):
            self._bad[word] = self._bad[word] + 1 if bad and is_steady else 0
            if self._bad[word] >= self._times:
                names = [table.names[n] for n in np.array(weights)[fine]]
                text = f"gradients {word} with depth: root mean square "
                text += f"{_NUMBER(float(np.exp(logs[fine][0])))} in {names[0]}, "
                text += f"{_NUMBER(float(np.exp(logs[fine][-1])))} in {names[-1]}"
                since = step.step - self._times + 1
                yield Suspicion("gradient", names[0], since, text, math.exp(abs(change)))


class Dead:
    """A module whose output is 0 nearly everywhere, in one sample after another."""

    def __init__(self, share: float = 0.99, samples: int = 3) -> None:
        self._share, self._samples = share, samples
        self._rows = RowState(times=0.0, since=0.0)

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        table = step.tables.get("activation")
        if table is None:
            return
        held = self._rows.fit(table.names)
        share = table.column("zero") / table.column("count")
        dead = share >= self._share
        held["since"] = np.where(dead & (held["times"] == 0), step.step, held["since"])
        held["times"] = np.where(dead, held["times"] + 1, 0)
        for row in np.flatnonzero(held["times"] >= self._samples):
            text = f"{100 * share[row]:.1f} % of its output is 0: its units are dead"
            since = int(held["since"][row])
            yield Suspicion("activation", table.names[row], since, text, float(share[row]))


class LossScale:
    """A loss scale that falls and falls: every step overflows."""

    def __init__(self, halvings: int = 10, steps: int = 50) -> None:
        self._factor = 2.0**halvings
        self._window: deque[tuple[int, float]] = deque(maxlen=steps)

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        scale = step.scalars.get("loss_scale")
        if scale is None or not scale > 0:
            return
        self._window.append((step.step, scale))
        most, at = max((scale, at) for at, scale in self._window)
        if scale * self._factor <= most or scale < 1 <= most:
            text = f"{_NUMBER(scale)}, and {_NUMBER(most)} in step {at}: it has collapsed"
            yield Suspicion("loss scale", "", at + 1, text, scale, most)


class Drift:
    """One layer whose gradients, or outputs, move away from the others', slowly or at once."""

    def __init__(self, z: float = 12.0, ratio: float = 8.0, times: int = 12) -> None:
        self._z, self._log, self._times = z, math.log(ratio), times
        fields = {"fast": math.nan, "slow": math.nan, "spread": 0.0, "seen": 0.0, "times": 0.0}
        self._rows = {kind: RowState(**fields) for kind in ("gradient", "activation")}

    def look(self, step: StepValues, facts: PendingStep) -> Iterator[Suspicion]:
        for kind, rows in self._rows.items():
            table = step.tables.get(kind)
            if table is None or len(table.names) < 4:
                continue
            with np.errstate(all="ignore"):
                logs = np.log(table.rms())
            logs[~np.isfinite(logs)] = np.nan
            held = rows.fit(table.names)
            alone = logs - _middle(logs)
            is_new = np.isnan(held["slow"]) & ~np.isnan(alone)
            for field in ("fast", "slow"):
                held[field] = np.where(is_new, alone, held[field])
            gone = np.isnan(alone)
            off = np.abs(held["fast"] - held["slow"])
            pace = 1.0 / np.minimum(held["seen"] + 1, 200)
            held["fast"] = np.where(gone, held["fast"], 0.8 * held["fast"] + 0.2 * alone)
            step_off = np.abs(alone - held["slow"])
            limit = np.fmax(self._z * held["spread"] / 3, self._log)
            beyond = (held["seen"] > 2 * WINDOW) & (off > limit) & ~gone
            held["times"] = np.where(beyond, held["times"] + 1, 0)
            slow = held["slow"] + pace * (alone - held["slow"])
            spread = held["spread"] + pace * (step_off - held["spread"])
            held["slow"] = np.where(gone | beyond, held["slow"], slow)
            held["spread"] = np.where(gone | beyond, held["spread"], spread)
            held["seen"] += ~gone
            need = self._times if kind == "gradient" else 2
            bad = np.flatnonzero(held["times"] >= need)
            if bad.size == 1 or 0 < bad.size <= len(table.names) // 4:
                first = int(bad[np.argmax(off[bad])])
                factor = math.exp(float(held["fast"][first] - held["slow"][first]))
                text = f"{_NUMBER(factor)} times what it was, against that of the other layers"
                since = step.step - need + 1
                order = np.array([first, *[row for row in bad.tolist() if row != first]])
                yield Suspicion(kind, _and_more(table.names, order), since, text, factor, 1.0)


# What makes each rule; those over ranks are in replica_watch. `rule_names` has what they look for.
RULES: dict[str, Callable[..., AlarmRule]] = {
    "nonfinite": NotFinite,
    "batch": Batch,
    "spike": Spike,
    "zero_grad": KeptGradient,
    "moments": LostMoments,
    "rates": Rates,
    "updates": Updates,
    "frozen": Frozen,
    "underflow": Underflow,
    "loss_scale": LossScale,
    "dead": Dead,
    "depth": Depth,
    "drift": Drift,
}


class Judge:
    """Asks all rules about a step, and says of each condition once that it has begun."""

    def __init__(
        self,
        names: Iterable[str],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        rank: int = 0,
        trouble: Callable[[str, BaseException], None] = lambda name, error: None,
    ) -> None:
        settings = settings or {}
        self._rules = {
            name: RULES[name](**settings.get(name, {})) for name in names if name in RULES
        }
        self._rank = rank
        self._trouble = trouble
        self._last: dict[tuple[str, str, str], int] = {}  # of each condition, the last bad step
        self._first: int | None = None

    def judge(self, step: StepValues, facts: PendingStep) -> list[Alarm]:
        """The alarms that this step raises."""
        if self._first is None:
            self._first = step.step
        alarms = []
        for name, rule in self._rules.items():
            suspicions: list[Suspicion] = []
            with OnTrouble(self._trouble, f"rule {name}"):  # the others are still asked
                suspicions = list(rule.look(step, facts))
            for found in suspicions:
                alarm = self.alarm(name, found, step.step)
                if alarm is not None:
                    alarms.append(alarm)
        return alarms

    def alarm(self, rule: str, found: Suspicion, step: int) -> Alarm | None:
        """The alarm for a condition that has begun; None for one that was told."""
        key = rule, found.kind, found.name.partition(" and ")[0]
        last = self._last.get(key)
        if len(self._last) > 10_000:
            self._last.clear()
        self._last[key] = step
        if last is not None and step - last <= QUIET_STEPS:
            return None
        first = step if self._first is None else self._first
        return Alarm(
            rule=rule,
            step=step,
            since=found.since,
            last_good_step=found.since - 1 if found.since > first else None,
            kind=found.kind,
            name=found.name,
            reason=found.reason,
            value=found.value,
            usual=found.usual,
            rank=self._rank,
        )


def _middle(values: Array) -> float:
    fine = values[~np.isnan(values)]
    return float(np.median(fine)) if fine.size else math.nan


def _largest(table: StepTable, name: str) -> float:
    """The largest absolute value in a row."""
    row = table.names.index(name)
    return float(max(abs(table.column("min")[row]), abs(table.column("max")[row])))


def _without_effect(step: StepValues, share: float) -> set[str]:
    """Parameters whose gradients are as small as rounding errors, against the others': a bias that
    a BatchNorm takes away."""
    table = step.tables.get("gradient") or step.tables.get("gradient.backward")
    if table is None:
        return set()
    rms = table.rms()
    tiny = (rms > 0) & (rms < share * _middle(rms))
    return {table.names[row] for row in np.flatnonzero(tiny)}


def _and_more(names: tuple[str, ...], rows: Array) -> str:
    more = f" and {rows.size - 1} more" if rows.size > 1 else ""
    return f"{names[int(rows[0])]}{more}"


def _equals(table: StepTable, other: StepTable) -> Array:
    """For each row whether the other table has just the same numbers under its name."""
    at = {name: number for number, name in enumerate(other.names)}
    rows = [at.get(name) for name in table.names]
    fields = ("norm", "mean", "min", "max")
    return np.array([
        row is not None
        and all(table.column(f)[number] == other.column(f)[row] for f in fields)
        for number, row in enumerate(rows)
    ], bool)  # fmt: skip
