"""What the ranks of a run gave each other, as far as blaming one rank needs it.

The result of a communication is made of what all its members gave. Blame of one rank therefore sees
the inputs of the others too, and how far their own gradients are apart where all are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorprobe.collectives.links import Key, given, got, kind_of, linked, listed, members_of, told
from tensorprobe.comparing.align import content, forward_of
from tensorprobe.comparing.arguments import differences
from tensorprobe.comparing.heard import Heard, Others, RankHears
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.rounding import ROUNDING, distance, pair_roundoff, rms_size, same_bits
from tensorprobe.comparing.scene import label_of
from tensorprobe.records import Call

if TYPE_CHECKING:
    from tensorprobe.collectives.reductions import ReductionError

_MANY, _MOST_MEMBERS = 64, 8  # rows of one communication, and the members of which some are kept
_Label = tuple[int, str]  # a step, and the name of a parameter


class Exchanges:
    """The communications of all ranks; each rank is added once, and then asked for what it heard.

    Only what is small is kept: of each communication the inputs of its members that differ.
    """

    def __init__(self, ranks: Sequence[int], is_whole: bool) -> None:
        self._ranks = tuple(ranks)
        self._is_whole = is_whole  # else the run has ranks that are not among these
        self._members: dict[Key, dict[int, list[TensorPair]]] = {}
        self._pairs: dict[Key, dict[int, CallPair]] = {}  # to be judged
        self._suspects: set[Key] = set()
        self._otherwise: dict[Key, dict[int, list[str]]] = {}
        self._keys: dict[int, list[tuple[Key, CallPair]]] = {}
        self._locals: dict[_Label, dict[int, tuple[float, float]]] = {}
        self._worst: dict[Key, list[tuple[int, TensorPair]]] = {}
        self._ddp: dict[int, set[int]] = {}  # the steps in which a rank's model is in DDP
        self._reduced: dict[_Label, dict[object, list[int]]] = {}
        self._judged: dict[
            tuple[Key, int], tuple[ReductionError | None, ReductionError | None]
        ] = {}

    def add(self, rank: int, pairs: Sequence[CallPair]) -> None:
        """Take what a rank gave to others; its pairs have been measured."""
        speaking = [pair for pair in pairs if pair.pair.actual is not None]
        keys = self._keys.setdefault(rank, [])
        by_call = {id(pair.pair.actual): pair for pair in speaking}
        for key, call in linked(pair.pair.actual for pair in speaking if pair.pair.actual):
            if key is None:
                continue
            pair = by_call[id(call)]
            names = _names(given(call, key.kind), call)
            gave = [row for row in pair.tensors if row.name in names]
            self._members.setdefault(key, {})[rank] = gave
            keys.append((key, pair))
            self._pairs.setdefault(key, {})[rank] = pair
            other = pair.pair.expected
            if other is not None and (texts := differences(call, other)):
                self._otherwise.setdefault(key, {})[rank] = texts
            results = _names(got(call, key.kind), call)
            if any(distance(row) > ROUNDING for row in pair.tensors if row.name in results):
                self._suspects.add(key)
        self._ddp[rank] = {
            pair.call.step for pair in pairs
            if pair.call.name.startswith("Module.DistributedDataParallel.")
        }  # fmt: skip
        before: dict[str, tuple[float, float]] = {}  # gradients may add up over steps
        for (step, name), (apart, size) in sorted(local_gradients(pairs).items()):
            worst = before.get(name, (0.0, 0.0))
            before[name] = max(worst[0], apart), max(worst[1], size)
            self._locals.setdefault((step, name), {})[rank] = before[name]
        for label, made in _reduced_gradients(pairs).items():
            for side, each in enumerate(made):
                if each is not None:
                    found = self._reduced.setdefault(label, {}).setdefault((side, each), [])
                    found.append(rank)

    def judge(self) -> None:
        """Hold the results that differ against what all members gave, where tensors were kept."""
        if not self._suspects:
            return
        # here: it takes numpy, which most comparisons do without
        from tensorprobe.collectives.reductions import gather, judge

        for key in sorted(self._suspects):
            found = self._pairs[key]
            members = members_of(key, self._ranks)
            for side in (0, 1):
                calls = {
                    rank: call for rank, pair in found.items()
                    if (call := pair.pair[side]) is not None and isinstance(call, Call)
                }  # fmt: skip
                gave = gather(key, calls, members)
                if gave is None:
                    continue
                for rank, call in calls.items():
                    before = self._judged.get((key, rank), (None, None))
                    one = judge(gave, call)
                    self._judged[key, rank] = (one, before[1]) if side == 0 else (before[0], one)
        self._pairs.clear()

    def heard_by(self, rank: int) -> RankHears:
        """What this rank heard of the others."""
        calls = {}
        for key, pair in self._keys.get(rank, ()):
            call = pair.pair.actual
            if call is None:
                continue
            members = members_of(key, self._ranks)
            found = self._members.get(key, {})
            missing = tuple(each for each in members if each not in found)
            rows = [row for other, row in self._telling(key) if other != rank]
            calls[call.step, call.name] = Heard(
                key=key,
                words=told(key, self._ranks),
                rows=rows,
                own=_names(given(call, key.kind), call),
                got=_names(got(call, key.kind), call),
                members=members,
                missing=missing,
                is_alone=not key.group and not self._is_whole,
                judged=self._judged.get((key, rank), (None, None)),
                otherwise={
                    other: texts
                    for other, texts in self._otherwise.get(key, {}).items()
                    if other != rank
                },
            )
        own = {label: found[rank] for label, found in self._locals.items() if rank in found}
        ddp = self._ddp.get(rank, set())
        return RankHears(calls, self._gradients_for(rank), own, ddp, self._is_whole)

    def _telling(self, key: Key) -> list[tuple[int, TensorPair]]:
        """Of what all members gave, the rows that tell most: those that are furthest apart, with
        other bits, and one of the others. There may be thousands."""
        if key not in self._worst:
            rows = [(rank, row) for rank, given in self._members[key].items() for row in given]
            if len(rows) > _MANY:
                rows.sort(key=lambda each: (distance(each[1]), same_bits(each[1]) is False))
                ranks = dict.fromkeys(rank for rank, _ in reversed(rows))
                kept = set(list(ranks)[:_MOST_MEMBERS]) | {rows[0][0]}
                rows = [each for each in rows if each[0] in kept]
            self._worst[key] = rows
        return self._worst[key]

    def _gradients_for(self, rank: int) -> dict[_Label, Others]:
        found = {}
        for label, made in self._reduced.items():
            members = sorted({each for ranks in made.values() if rank in ranks for each in ranks})
            others = [self._locals.get(label, {}).get(each) for each in members if each != rank]
            known = [each for each in others if each is not None]
            if known:
                apart = max(each[0] for each in known)
                found[label] = Others(apart, max(each[1] for each in known), tuple(members))
        return found

    def missing_note(self) -> str | None:
        """Members that nobody recorded."""
        lacking = {
            rank for key, found in self._members.items()
            for rank in members_of(key, self._ranks) if rank not in found
        }  # fmt: skip
        if not lacking:
            return None
        return f"what {listed(sorted(lacking))} gave to the others was not compared"


def _names(records: Iterable[object], call: Call) -> set[str]:
    prefix = f"{call.name}."
    return {str(getattr(record, "name", "")).removeprefix(prefix) for record in records}


def local_gradients(pairs: Sequence[CallPair]) -> dict[_Label, tuple[float, float]]:
    """How far apart what backward sent to each parameter is, relative to its size, and its size.

    A parameter is known by its content, which modules and calls share.
    """
    labels: dict[tuple[int, object], str] = {}
    forwards: dict[tuple[int, str], CallPair] = {}
    found: dict[_Label, tuple[float, float]] = {}
    for pair in pairs:
        call = pair.call
        if call.direction == "forward":
            forwards[call.step, call.name] = pair
            for row in pair.tensors:
                if row.role == "parameter" and (key := _content(row)) is not None:
                    labels.setdefault((call.step, key), label_of(call, row))
            continue
        forward = forwards.get((call.step, forward_of(call.name)))
        if forward is None or call.name.startswith("Module."):
            continue
        inputs = {row.name: row for row in forward.tensors}
        for row in pair.tensors:
            if row.role != "output" or row.actual is None or row.expected is None:
                continue
            source = inputs.get(row.name.replace("output", "input", 1))
            label = None if source is None else labels.get((call.step, _content(source)))
            if label is None:
                continue
            before = found.get((call.step, label), (0.0, 0.0))
            apart = distance(row) * pair_roundoff(row)
            size = rms_size(row.expected) if row.expected.summary else 0.0
            found[call.step, label] = max(before[0], apart), max(before[1], size)
    return found


def _reduced_gradients(pairs: Sequence[CallPair]) -> dict[_Label, tuple[object, object]]:
    """The content of each parameter's gradient as the program has it after backward."""
    found: dict[_Label, tuple[object, object]] = {}
    for pair in pairs:
        for row in pair.tensors:
            if row.role == "parameter_grad":
                key = pair.call.step, label_of(pair.call, row)
                sides = (row.actual, row.expected)
                found.setdefault(key, tuple(content(r) if r else None for r in sides))  # type: ignore[arg-type]
    return found


def _content(row: TensorPair) -> object:
    record = row.actual or row.expected
    return content(record) if record is not None else None


def hears_for(
    pairs: Mapping[int, Sequence[CallPair]], is_whole: bool
) -> tuple[dict[int, RankHears], str | None]:
    """What each rank heard of the others, and what could not be linked."""
    exchanges = Exchanges(sorted(pairs), is_whole)
    for rank, mine in pairs.items():
        exchanges.add(rank, mine)
    exchanges.judge()
    return {rank: exchanges.heard_by(rank) for rank in pairs}, exchanges.missing_note()


def by_rank(pairs: Sequence[CallPair]) -> dict[int, list[CallPair]]:
    """The pairs of each rank, in order; of one rank on either side, whatever its number, all."""
    sides = [{c.rank for p in pairs if (c := p.pair[side]) is not None} for side in (0, 1)]  # type: ignore[union-attr]
    if len(sides[0]) == 1 and len(sides[1]) <= 1:
        return {sides[0].pop(): list(pairs)}
    found: dict[int, list[CallPair]] = {}
    for pair in pairs:
        found.setdefault(pair.call.rank, []).append(pair)
    return dict(sorted(found.items()))


def in_causal_order(pairs: Mapping[int, Sequence[CallPair]]) -> list[int]:
    """The ranks, first those that differ before the others can have told them anything."""
    return sorted(pairs, key=lambda rank: (_first_difference(pairs[rank]), rank))


def _first_difference(pairs: Sequence[CallPair]) -> tuple[float, int]:
    """The step of the first call that differs, and how many communications are before it."""
    step, before = None, 0
    for pair in pairs:
        call = pair.call
        if call.step != step:
            step, before = call.step, 0
        before += kind_of(call) is not None
        if not pair.is_paired or any(
            row.role == "output" and distance(row) > ROUNDING for row in pair.tensors
        ):
            return call.step, before
    return math.inf, 0
