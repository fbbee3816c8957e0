"""Which ranks of one run have the same weights, and the rank among them that has not. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tensorprobe.collectives.links import listed
from tensorprobe.comparing.align import content, is_constant
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.scene import label_of
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.kinds import kind_of

_STATE = "buffers.rng_state"  # where the random numbers of a call began
_MOST = 0.5  # of all numbers: replicas have more than this in common


class Odd(NamedTuple):
    """A tensor that some replicas have otherwise than the others."""

    step: int
    what: str  # "parameter" or "gradient"
    label: str
    call: str
    odd: tuple[int, ...]
    others: tuple[int, ...]


class _Seen(NamedTuple):
    content: Hashable
    shape: tuple[int, ...]
    numel: int
    call: str


class Replicas:
    """Collects what each rank has of parameters and of the gradients that its optimizers get."""

    def __init__(self) -> None:
        # by step, what, and label: what each rank has
        self._seen: dict[tuple[int, str, str], dict[int, _Seen]] = defaultdict(dict)
        self._in_ddp: set[int] = set()
        self._random: dict[tuple[int, str], dict[int, Hashable]] = defaultdict(dict)
        self._drawn: dict[tuple[int, str], dict[int, tuple[Hashable, Hashable]]] = defaultdict(dict)

    def add(self, rank: int, calls: Iterable[Call]) -> None:
        """Take the calls of one rank."""
        for call in calls:
            if call.name.startswith("Module.DistributedDataParallel."):
                self._in_ddp.add(rank)
            is_step = call.name.startswith("Optimizer.")
            for record in call.tensors:
                if record.role == "parameter" and call.direction == "forward":
                    self._note(rank, call, record, "stepped" if is_step else "parameter")
                elif record.role == "parameter_grad" and is_step:
                    self._note(rank, call, record, "gradient")
            if call.direction == "forward" and kind_of(call) == "dropout":
                self._note_random(rank, call)

    def _note_random(self, rank: int, call: Call) -> None:
        """The state a call draws from; with statistics only, what it makes of what."""
        given: list[Hashable] = []
        made: list[Hashable] = []
        for record in call.tensors:
            if record.name.endswith(_STATE):
                if record.digest:
                    self._random[call.step, call.name].setdefault(rank, record.digest)
                    return
            elif record.role in ("input", "output"):
                (given if record.role == "input" else made).append(content(record))
        if made and None not in (*given, *made):
            self._drawn[call.step, call.name].setdefault(rank, (tuple(given), tuple(made)))

    def _note(self, rank: int, call: Call, record: TensorRecord, what: str) -> None:
        key = content(record)
        if key is None or not record.numel:
            return
        label = label_of(call, TensorPair(record.name.removeprefix(f"{call.name}."), record, None))
        seen = self._seen[call.step, what, label]
        if rank not in seen:
            told = None if is_constant(record) else key  # of one number: they say nothing
            seen[rank] = _Seen(told or key, record.shape, record.numel, call.name)

    def sets(self, wanted: str = "parameter") -> list[tuple[int, ...]]:
        """The ranks that are replicas of each other: those in DDP, and those that have most of
        their parameters in common, or all of which most ranks have in common.

        What optimizers step ("stepped") is not what modules have where each rank has a shard.
        """
        common: dict[int, dict[str, _Seen]] = defaultdict(dict)
        for (_, what, label), seen in sorted(self._seen.items(), key=lambda each: each[0][:2]):
            if what == wanted:
                for rank, each in seen.items():
                    common[rank].setdefault(label, each)
        ranks = sorted(common)
        found: list[list[int]] = []
        for rank in ranks:
            for group in found:
                if self._are_alike(common[group[0]], common[rank]) or (
                    {rank, group[0]} <= self._in_ddp
                    and _shapes(common[rank]) == _shapes(common[group[0]])
                ):
                    group.append(rank)
                    break
            else:
                found.append([rank])
        largest = max(found, key=len, default=[])
        if len(largest) > len(ranks) / 2 and len(largest) > 1:
            shapes = _shapes(common[largest[0]])
            alone = [g for g in found if len(g) == 1 and _shapes(common[g[0]]) == shapes]
            for group in alone:  # every weight of it is another: it never got those of the others
                largest.extend(group)
                found.remove(group)
        return [tuple(sorted(group)) for group in found if len(group) > 1]

    def _are_alike(self, a: Mapping[str, _Seen], b: Mapping[str, _Seen]) -> bool:
        labels = [label for label in a if label in b and a[label].shape == b[label].shape]
        total = sum(each.numel for each in a.values())
        same = sum(a[label].numel for label in labels if a[label].content == b[label].content)
        return same > _MOST * max(total, sum(each.numel for each in b.values()))

    def odd_ones(self) -> list[Odd]:
        """Where replicas do not agree, the earliest first; of each label once."""
        found: list[Odd] = []
        told: set[tuple[str, str]] = set()
        stepped = self.sets("stepped")
        groups = {"parameter": self.sets(), "gradient": stepped, "stepped": stepped}
        for (step, what, label), seen in sorted(
            self._seen.items(), key=lambda each: (each[0][0], each[0][1] != "parameter")
        ):
            for group in groups[what]:
                mine = {rank: seen[rank] for rank in group if rank in seen}
                odd = _odd(mine)
                if odd is None or (what, label) in told:
                    continue
                told.add((what, label))
                others = tuple(rank for rank in sorted(mine) if rank not in odd)
                found.append(Odd(step, what, label, mine[odd[0]].call, odd, others))
        return found

    def random_states(self) -> tuple[list[Odd], list[str]]:
        """Ranks that draw random numbers from another state than replicas that all have one; and
        what is to be said of the others."""
        odd: list[Odd] = []
        notes: list[str] = []
        states_of = {**self._random}
        for place, drawn in self._drawn.items():
            if place in states_of or len(drawn) < 2:
                continue
            if len({given for given, _ in drawn.values()}) == 1:
                states_of[place] = {rank: made for rank, (_, made) in drawn.items()}
            elif not notes:
                notes.append(
                    f"{place[1]} (step {place[0]}) is given other data on each rank, and its "
                    'random state was not recorded (keep="tensors" has it): seeds were not compared'
                )
        for (step, name), states in sorted(states_of.items()):
            if len(states) < 2:
                continue
            counts = Counter(states.values())
            if len(counts) == 1:
                notes.append(
                    f"{name} (step {step}) draws from one random state on "
                    f"{listed(sorted(states))}: right for the same data (tensor parallel), not "
                    "for dropout on other data"
                )
                break
            if len(counts) == len(states):
                break  # all draw other numbers
            usual, n = counts.most_common(1)[0]
            if n > len(states) / 2 and len(states) > 2:
                ranks = tuple(rank for rank, state in sorted(states.items()) if state != usual)
                others = tuple(rank for rank, state in sorted(states.items()) if state == usual)
                odd.append(Odd(step, "random state", name, name, ranks, others))
            break  # the later ones follow from the first
        return odd, notes


def _shapes(found: Mapping[str, _Seen]) -> set[tuple[str, tuple[int, ...]]]:
    return {(label, each.shape) for label, each in found.items()}


def _odd(mine: Mapping[int, _Seen]) -> tuple[int, ...] | None:
    """The ranks that do not have what most have; where no more than half agree, what the first
    has."""
    counts: Counter[Hashable] = Counter(each.content for each in mine.values())
    if len(counts) < 2:
        return None
    usual, n = counts.most_common(1)[0]
    if n <= len(mine) / 2:
        usual = mine[min(mine)].content
    return tuple(rank for rank in sorted(mine) if mine[rank].content != usual)


def is_majority(each: Odd) -> bool:
    """Whether more ranks agree than do not: then it is known who is the odd one."""
    return len(each.others) > len(each.odd)


def in_words(found: Sequence[Odd]) -> str:
    """Of tensors that are odd on the same ranks: what differs, and who is odd."""
    first = found[0]
    what = f"parameter {first.label}" if first.what != "gradient" else (
        f"the gradient of {first.label} that the optimizer was given"
    )  # fmt: skip
    if first.what == "random state":
        what = f"random state at {first.label}"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    if is_majority(first):
        verb = "has" if len(first.odd) == 1 else "have"
        what = what.removeprefix("the ")
        return f"{listed(first.odd)} {verb} another {what}{more} than {listed(first.others)}"
    if len(first.others) == 1 and len(first.odd) > 1:
        everyone = listed(sorted((*first.odd, *first.others)))
        text = f"no two of {everyone} agree in {what}{more}"
        return f"{text}: it was not reduced" if first.what == "gradient" else text
    return f"{listed(first.odd)} and {listed(first.others)} do not agree in {what}{more}"
