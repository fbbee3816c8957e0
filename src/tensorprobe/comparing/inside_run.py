"""What the ranks of one run say without a reference: where they should agree and do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Literal

import msgspec

from tensorprobe.collectives.bounds import out_of_bounds
from tensorprobe.collectives.links import (
    Key,
    given,
    got,
    linked,
    listed,
    members_of,
    reduction_of,
    told,
)
from tensorprobe.comparing.align import content
from tensorprobe.comparing.rank_facts import odd_facts, world_size
from tensorprobe.comparing.replicas import Odd, Replicas, in_words
from tensorprobe.comparing.rounding import number_text
from tensorprobe.comparing.waiting import deaths, waiting
from tensorprobe.records import Call, Capture

FindingKind = Literal[
    "hang", "death", "order", "arguments", "collective", "parameter", "gradient", "random", "fact"
]
_SAME: tuple[str, ...] = ("all_reduce", "all_gather", "broadcast")  # each member gets the same


class RankFinding(msgspec.Struct, frozen=True):
    """Something in which the ranks of a run should agree and do not, or that stops them."""

    kind: FindingKind
    ranks: tuple[int, ...]  # the odd ones, where that is known
    reason: str
    step: int | None = None
    name: str = ""  # of the first call that shows it
    stack: tuple[str, ...] = ()


class InsideRun(msgspec.Struct):
    """The answer: findings, the gravest first; what was looked at, and what could not be."""

    findings: list[RankFinding] = []
    counts: dict[str, int] = {}
    notes: list[str] = []


def look_inside(capture: Capture) -> InsideRun:
    """Hold the ranks of a run against each other."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in capture.calls:
        calls[call.rank].append(call)
    ranks = sorted(calls)
    size = world_size(capture) or len(ranks)
    everyone = list(range(size)) if size >= len(ranks) and ranks[-1:] < [size] else ranks
    found = InsideRun()
    dead = {death.stop.rank: death for death in deaths(capture, calls, everyone)}
    for each in waiting(capture, calls, everyone):
        absent = {stop.rank for stop in each.absent}
        if absent and absent <= dead.keys() and not each.unrecorded:
            continue  # what they wait for is told as a death
        gone = tuple(stop.rank for stop in each.absent) + each.unrecorded
        stack = next((c.stack for c in calls[each.waiting[0]] if c.name == each.name), ())
        found.findings.append(
            RankFinding("hang", gone or each.waiting, each.reason, each.step, each.name, stack)
        )
    hung = {rank for finding in found.findings for rank in finding.ranks}
    for death in dead.values():
        last, rank = death.stop.call, death.stop.rank
        if rank not in hung and last is not None:
            place = last.step, last.name, last.stack
            found.findings.append(RankFinding("death", (rank,), death.reason, *place))
    _look_at_communications(calls, everyone, hung | dead.keys(), found)
    replicas = Replicas()
    for rank, mine in calls.items():
        replicas.add(rank, mine)
    _look_at_replicas(replicas, calls, found)
    for fact in odd_facts(capture):
        reason = f"{fact.name} is {fact.value} on {listed(fact.ranks)}, {fact.usual} on the others"
        found.findings.append(RankFinding("fact", fact.ranks, reason))
    missing = [rank for rank in everyone if rank not in calls]
    if missing:
        found.notes.append(f"{listed(missing)}: not recorded")
    return found


def _look_at_replicas(
    replicas: Replicas, calls: Mapping[int, Sequence[Call]], found: InsideRun
) -> None:
    groups: dict[tuple[str, int, tuple[int, ...]], list[Odd]] = {}
    for each in replicas.odd_ones():
        groups.setdefault((each.what, each.step, each.odd), []).append(each)
    explained: set[tuple[int, ...]] = set()
    for (what, step, odd), some in sorted(
        groups.items(), key=lambda each: (each[0][1], each[0][0])
    ):
        if odd in explained:
            continue  # what they did not agree in before
        explained.add(odd)
        kind: FindingKind = "gradient" if what == "gradient" else "parameter"
        name = some[0].call
        stack = next((c.stack for c in calls[odd[0]] if c.name == name and c.step == step), ())
        found.findings.append(RankFinding(kind, odd, in_words(some), step, name, stack))
    states, notes = replicas.random_states()
    found.findings += [
        RankFinding("random", each.odd, in_words([each]), each.step, each.call) for each in states
    ]
    found.notes += notes
    found.counts["replicas"] = sum(map(len, replicas.sets()))


def _look_at_communications(
    calls: Mapping[int, Sequence[Call]],
    ranks: Sequence[int],
    stopped: Set[int],
    found: InsideRun,
) -> None:
    members: dict[Key, dict[int, Call]] = defaultdict(dict)
    unlinked = 0
    for rank, mine in calls.items():
        for key, call in linked(mine):
            if key is None:
                unlinked += 1
            else:
                members[key][rank] = call
    if unlinked:
        found.notes.append(f"{unlinked} communications: it is not known who spoke to whom")
    found.counts["communications"] = len(members)
    crossed = _crossed(members, calls, ranks, stopped)
    found.findings += crossed
    n_judged = 0
    for key, here in sorted(members.items()):
        if any(call.status != "complete" for call in here.values()):
            continue
        if other := _other_arguments(key, here, ranks):
            found.findings.append(other)
            continue
        wrong, is_judged = _wrong_result(key, here, ranks)
        n_judged += is_judged
        if wrong is not None:
            found.findings.append(wrong)
    found.counts["communications judged"] = n_judged


def _crossed(
    members: Mapping[Key, Mapping[int, Call]],
    calls: Mapping[int, Sequence[Call]],
    ranks: Sequence[int],
    stopped: Set[int],
) -> list[RankFinding]:
    """The first communication of each group at which its members do not all do the same."""
    by_place: dict[tuple[str, str, int, int], dict[str, dict[int, Call]]] = defaultdict(dict)
    for key, here in members.items():
        recorded = next(iter(here.values())).collective is not None
        if key.kind != "message":
            place = (key.group, key.name, -1 if recorded else key.step, key.number)
            by_place[place].setdefault(key.kind, {}).update(here)
    found: list[RankFinding] = []
    told_groups: set[tuple[str, str]] = set()
    for (group, name, _, number), kinds in sorted(by_place.items()):
        if (group, name) in told_groups:
            continue
        here = {rank: call for each in kinds.values() for rank, call in each.items()}
        wanted = [
            rank for rank in members_of(_key_of(kinds, group, number), ranks) if rank in calls
        ]
        recorded = next(iter(here.values())).collective is not None
        kind, most = max(kinds.items(), key=lambda each: len(each[1]))
        if recorded and len(kinds) > 1:
            odd = {
                rank: call for k, each in kinds.items() if k != kind for rank, call in each.items()
            }
            call = odd[min(odd)]
            text = (
                f"{listed(sorted(odd))} {'calls' if len(odd) == 1 else 'call'} {call.name} as "
                f"communication #{number} of {_group_words(group, ranks)}, where "
                f"{listed(sorted(most))} {'calls' if len(most) == 1 else 'call'} "
                f"{next(iter(most.values())).name}"
            )
            told_groups.add((group, name))
            found.append(
                RankFinding("order", tuple(sorted(odd)), text, call.step, call.name, call.stack)
            )
            continue
        lacking = [rank for rank in wanted if rank not in here]
        if stopped & set(lacking):
            continue  # it is told that they hang or died
        if lacking and len(lacking) < len(wanted) and not _are_cut_short(calls, lacking, here):
            call = here[min(here)]
            text = (
                f"{listed(lacking)} {'does' if len(lacking) == 1 else 'do'} not call {call.name}, "
                f"{kind} #{number} of {_group_words(group, ranks)}, which {listed(sorted(here))} "
                f"{'calls' if len(here) == 1 else 'call'}"
            )
            told_groups.add((group, name))
            found.append(
                RankFinding("order", tuple(lacking), text, call.step, call.name, call.stack)
            )
    return found


def _key_of(kinds: Mapping[str, Mapping[int, Call]], group: str, number: int) -> Key:
    return Key(0, group, next(iter(kinds)), number)  # type: ignore[arg-type]


def _group_words(group: str, ranks: Sequence[int]) -> str:
    members = members_of(Key(0, group, "all_reduce", 0), ranks)
    return "all ranks" if len(members) == len(ranks) else listed(members)


def _are_cut_short(
    calls: Mapping[int, Sequence[Call]], lacking: Sequence[int], here: Mapping[int, Call]
) -> bool:
    """Whether those that lack a communication have not been recorded up to it: they hang or died,
    or steps were left out."""
    step = min(call.step for call in here.values())
    return any(
        not calls[rank]
        or calls[rank][-1].status != "complete"
        or step not in {call.step for call in calls[rank]}
        or max(call.step for call in calls[rank]) < max(c.step for c in here.values())
        for rank in lacking
    ) or any(call.status == "begun" for call in here.values())


def _other_arguments(
    key: Key, here: Mapping[int, Call], ranks: Sequence[int]
) -> RankFinding | None:
    """A member that reduces otherwise, or gives other shapes or dtypes, than most."""
    if key.kind in ("message", "barrier") or len(here) < 2:
        return None
    said: dict[tuple[str, str, str], list[int]] = {}
    for rank, call in here.items():
        gave = given(call, key.kind)
        if not gave:
            continue
        shapes = ", ".join(f"{r.dtype}{list(r.shape)}" for r in gave)
        if key.kind in ("all_to_all", "all_gather", "gather", "scatter"):
            shapes = gave[0].dtype  # pieces may have lengths of their own
        reduce, root = "", ""
        if call.collective is not None:
            reduce = call.collective.reduce or ""
            root = "" if call.collective.root is None else str(call.collective.root)
        said.setdefault((shapes, reduce, root), []).append(rank)
    if len(said) < 2:
        return None
    usual, most = max(said.items(), key=lambda each: len(each[1]))
    odd = [(what, who) for what, who in said.items() if what != usual]
    (what, who) = odd[0]
    texts = [
        f"{noun} {mine or 'none'}, not {theirs or 'none'}"
        for noun, mine, theirs in zip(("it gives", "reduces by", "root"), what, usual, strict=True)
        if mine != theirs
    ]
    call = here[who[0]]
    verb = "calls" if len(who) == 1 else "call"
    text = (
        f"{listed(who)} {verb} {told(key, ranks)} otherwise than {listed(most)}: {'; '.join(texts)}"
    )
    return RankFinding("arguments", tuple(who), text, call.step, call.name, call.stack)


def _wrong_result(
    key: Key, here: Mapping[int, Call], ranks: Sequence[int]
) -> tuple[RankFinding | None, bool]:
    """A member whose result is not what was given, and whether that could be said at all."""
    members = members_of(key, ranks)
    if len(members) < 2 or set(members) - here.keys() or key.kind == "barrier":
        return None, False
    if odd := _results_differ(key, here):
        call = here[odd[0]]
        verb = "gets" if len(odd) == 1 else "get"
        text = f"{listed(odd)} {verb} another result of {told(key, ranks)} than the other members"
        better = _by_tensors(key, here, members)
        if better is not None:
            return better, True
        return RankFinding("collective", odd, text, call.step, call.name, call.stack), True
    if _has_tensors(key, here):
        return _by_tensors(key, here, members), True
    return _by_statistics(key, here, members)


def _results_differ(key: Key, here: Mapping[int, Call]) -> tuple[int, ...]:
    """The members that got another result than most, of those where all get the same."""
    if key.kind not in _SAME:
        return ()
    results: dict[object, list[int]] = {}
    for rank, call in here.items():
        heard = got(call, key.kind)
        if not heard and key.kind == "broadcast":
            heard = given(call, key.kind)
        contents = tuple(record.digest for record in heard)
        if not contents or None in contents:
            return ()
        results.setdefault(contents, []).append(rank)
    if len(results) < 2:
        return ()
    most = max(results.values(), key=len)
    return tuple(sorted(rank for who in results.values() if who is not most for rank in who))


def _has_tensors(key: Key, here: Mapping[int, Call]) -> bool:
    return all(
        record.blob is not None
        for call in here.values()
        for record in (*given(call, key.kind), *got(call, key.kind))
    )


def _by_tensors(key: Key, here: Mapping[int, Call], members: Sequence[int]) -> RankFinding | None:
    if not _has_tensors(key, here) or _is_surely_right(key, here):
        return None
    from tensorprobe.collectives.reductions import gather, judge  # here: they take numpy

    gave = gather(key, here, members)
    if gave is None:
        return None
    wrong = {
        rank: judged
        for rank, call in here.items()
        if (judged := judge(gave, call)) is not None and judged.is_wrong
    }
    if not wrong:
        return None
    rank, judged = max(wrong.items(), key=lambda each: each[1].error)
    call = here[rank]
    reduced = f" ({gave.op})" if gave.op else ""
    text = (
        f"the result of {told(key, members)} on {listed(sorted(wrong))} is not what its "
        f"{len(members)} members gave{reduced}: off by {number_text(judged.error)} roundings, "
        f"where {judged.allowed:.0f} are explained"
    )
    return RankFinding("collective", tuple(sorted(wrong)), text, call.step, call.name, call.stack)


def _by_statistics(
    key: Key, here: Mapping[int, Call], members: Sequence[int]
) -> tuple[RankFinding | None, bool]:
    if key.kind not in ("all_reduce", "reduce"):
        return None, False
    ops = {reduction_of(here[rank]) for rank in members}
    op = ops.pop() if len(ops) == 1 else None
    seen: set[object] = set()
    for rank in sorted(here):
        results = tuple(content(record) for record in got(here[rank], key.kind))
        if results in seen:
            continue  # as another member
        seen.add(results)
        found = out_of_bounds(key, op, here, members, rank)
        if found is not None:
            call = here[rank]
            text = (
                f"the result of {told(key, members)} on rank {rank} is not what its "
                f"{len(members)} members gave ({op}): its {found.what} is "
                f"{number_text(found.found)}, and must be {number_text(found.expected)}"
            )
            finding = RankFinding("collective", (rank,), text, call.step, call.name, call.stack)
            return finding, True
    return None, op is not None


def _is_surely_right(key: Key, here: Mapping[int, Call]) -> bool:
    """Of a broadcast: by its digests, without reading it."""
    if key.kind != "broadcast":
        return False
    contents = {
        content(record)
        for call in here.values()
        for record in (given(call, key.kind) or got(call, key.kind))
    }
    return len(contents) == 1 and None not in contents
