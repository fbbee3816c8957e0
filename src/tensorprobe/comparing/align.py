"""Pairs the calls of two runs that differ in length, names and order, as a diff does."""

from __future__ import annotations

import bisect
import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

from tensorprobe.comparing.mapping import (
    NO_MAPPING,
    Layers,
    Mapping,
    backward_renaming,
    mapped_calls,
    plain_path,
)
from tensorprobe.operators import native_name
from tensorprobe.records import IN_MEMORY, Call, TensorRecord
from tensorprobe.replay.kinds import overwrites
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

How = Literal["exact", "aligned", "mapped"]
_NUMBER = re.compile(r"\.\d+(?=$|\.(?:forward|backward)$)")
# A gap larger than this is diffed by its unique tokens only: Myers' diff is quadratic in the edits.
_MAX_EDITS = 1500
_MOVES = {"detach", "view", "_unsafe_view", "clone", "expand", "t", "transpose", "alias", "permute"}
_SCALARS = (bool, int, float, str)
# Beyond this many pairs to choose from, the first of one side stay with the first of the other.
_MAX_CHOICES = 40_000
_SAME_INPUTS, _SAME_LINE = 2, 1


def content(record: TensorRecord) -> Hashable | None:
    """What tells one content from another; None where nothing does."""
    if record.digest is not None and not _is_of_some(record):
        return record.digest
    s = record.summary
    if s is None:
        return None
    if s.norm is None:  # bools, and what other tools leave out
        return (s.min, s.max, s.zero_count, record.shape, record.dtype) if s.counted else None
    return (s.min, s.max, s.mean, s.norm, s.zero_count, record.numel, record.dtype)


def _is_of_some(record: TensorRecord) -> bool:
    """Whether a digest is one that others of the same content may lack: those of numbers with a
    fraction, where statistics were kept."""
    digest = record.digest or ""
    return digest.startswith(IN_MEMORY) and record.dtype in FRACTION_BITS


def is_constant(record: TensorRecord) -> bool:
    """All of one number: many calls make the same one."""
    s = record.summary
    return s is not None and s.min == s.max and not s.nan_count


class Pair(NamedTuple):
    """Two calls that are the same one; or one that the other side does not have."""

    actual: Call | None
    expected: Call | None
    how: How


def stem(name: str) -> str:
    """A call's name without number and direction: "Functional.linear"."""
    plain = native_name(name) if "__" in name else name
    if plain.startswith("Module."):
        kind = next((k for k in (".forward", ".backward", ".parameters_grad") if k in plain), "")
        head = plain.rpartition(kind)[0] if kind else plain
        return "Module." + head.rpartition(".")[2] + kind
    return _NUMBER.sub("", plain).removesuffix(".forward").removesuffix(".backward")


def align(
    actual: Sequence[Call], expected: Sequence[Call], mapping: Mapping = NO_MAPPING
) -> list[Pair]:
    """Pair the calls of one step and rank, in the order of `actual`.

    What only `expected` has stands where it would have run. A backward call goes with its forward
    call whatever the order in which the engine came by.
    """
    rename = Layers(actual, mapping.layers).renamed if mapping.layers else None
    back = backward_renaming(mapping.modules) if mapping.modules else None
    sides = (_Side(actual, rename), _Side(expected, back))
    partner = mapped_calls(actual, expected, mapping)
    mapped = set(partner)
    forward = [[i for i, call in enumerate(s.calls) if not _follows(call)] for s in sides]
    settle_repeats(sides[0].calls, sides[1].calls, sides[0].exact, sides[1].exact, forward, partner)
    backward = [[i for i, call in enumerate(s.calls) if _follows(call)] for s in sides]
    _align_sequences(sides, forward[0], forward[1], partner)
    _pair_backward(sides, backward, partner)
    _align_sequences(sides, backward[0], backward[1], partner)
    return _in_order(sides, partner, mapped)


class _Side:
    """The calls of one side with the tokens by which they are told apart, worked out once."""

    def __init__(self, calls: Sequence[Call], rename: Callable[[str], str] | None = None) -> None:
        self.calls = calls
        self.has_mapping = rename is not None
        self.paths: dict[str, str] = {}
        names: dict[str, str] = {}
        self._stems = []
        for call in calls:
            if call.module not in self.paths:
                path = plain_path(call.module)
                self.paths[call.module] = rename(path) if rename else path
            text = call.name
            if text not in names:
                names[text] = stem(text)
            self._stems.append(names[text])
        self.loose: list[Hashable] = [
            (s, self.paths[call.module]) for s, call in zip(self._stems, calls, strict=True)
        ]
        self.strict: list[Hashable] = [
            (token, _signature(call)) for token, call in zip(self.loose, calls, strict=True)
        ]
        # `x * 1.0` put in beside `x * 0.5`: the numbers tell which of two is the new one
        self.exact: list[Hashable] = [
            (token, _scalars(call)) for token, call in zip(self.strict, calls, strict=True)
        ]

    # The next two only where the others leave something.

    @functools.cached_property
    def place(self) -> list[Hashable]:
        """A module of another class, or a renamed API, in the same place."""
        return [
            (_short(s), self.paths[call.module])
            for s, call in zip(self._stems, self.calls, strict=True)
        ]

    @functools.cached_property
    def bare(self) -> list[Hashable]:
        return [
            s.rpartition(".")[2].rstrip("_") if not s.startswith("Module.") else s
            for s in self._stems
        ]

    def is_renamed(self, call: Call) -> bool:
        """Whether the user's mapping gave its module another path."""
        return self.has_mapping and self.paths[call.module] != plain_path(call.module)


def _short(stem: str) -> str:
    if stem.startswith("Module."):
        return "Module." + stem.rpartition(".")[2]
    return stem.rpartition(".")[2].rstrip("_")


def _signature(call: Call) -> Hashable:
    return (
        tuple([record.shape for record in call.tensors]),
        tuple([_kind(value) for value in call.args]),
    )


def _scalars(call: Call) -> Hashable:
    values = [v for v in call.args if type(v) in _SCALARS]
    values += [v for v in call.kwargs.values() if type(v) in _SCALARS]
    return tuple(values)


def _kind(value: object) -> Hashable:
    if isinstance(value, TensorRecord):
        return "tensor"
    if isinstance(value, list | tuple):
        return tuple(_kind(part) for part in value[:8])
    return type(value).__name__


def _follows(call: Call) -> bool:
    return call.direction == "backward"


def _align_sequences(
    sides: tuple[_Side, _Side], ours: list[int], theirs: list[int], partner: dict[int, int]
) -> None:
    """Pair what is not paired yet: strictly first, then with less asked of what is between."""
    taken = set(partner.values())
    blocks = [
        ([i for i in ours if i not in partner], [j for j in theirs if j not in taken]),
    ]
    for kind in ("exact", "strict", "loose", "place", "bare"):
        if not blocks:
            break
        a, e = getattr(sides[0], kind), getattr(sides[1], kind)
        left = []
        for mine, other in blocks:
            if not mine or not other:
                continue
            pairs = diff([a[i] for i in mine], [e[j] for j in other])
            if kind not in ("exact", "strict"):
                pairs = [(p, q) for p, q in pairs if not _only_moves(sides, mine[p], other[q])]
            for p, q in pairs:
                partner[mine[p]] = other[q]
            left += _gaps(mine, other, pairs)
        blocks = left


def _only_moves(sides: tuple[_Side, _Side], i: int, j: int) -> bool:
    """Whether two ATen calls that only move numbers have other shapes: they are not one call."""
    call, other = sides[0].calls[i], sides[1].calls[j]
    if not call.name.startswith("Aten.") or call.op.split(".")[3:4] == []:
        return False
    return call.op.split(".")[3] in _MOVES and _signature(call) != _signature(other)


def _gaps(
    mine: list[int], other: list[int], pairs: list[tuple[int, int]]
) -> list[tuple[list[int], list[int]]]:
    """What lies between the pairs, where both sides have something left."""
    gaps = []
    p = q = 0
    for i, j in [*pairs, (len(mine), len(other))]:
        if i > p and j > q:
            gaps.append((mine[p:i], other[q:j]))
        p, q = i + 1, j + 1
    return gaps


def diff(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places of equal tokens, in order: a longest common subsequence where that is affordable."""
    pairs: list[tuple[int, int]] = []
    _diff(a, b, 0, len(a), 0, len(b), pairs)
    pairs.sort()
    return pairs


def _diff(
    a: Sequence[Hashable],
    b: Sequence[Hashable],
    a0: int,
    a1: int,
    b0: int,
    b1: int,
    pairs: list[tuple[int, int]],
) -> None:
    while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
        pairs.append((a0, b0))
        a0, b0 = a0 + 1, b0 + 1
    while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
        a1, b1 = a1 - 1, b1 - 1
        pairs.append((a1, b1))
    if a0 == a1 or b0 == b1:
        return
    anchors = _anchors(a, b, a0, a1, b0, b1)
    if not anchors:
        pairs += _myers(a, b, a0, a1, b0, b1)
        return
    for i, j in anchors:
        pairs.append((i, j))
        _diff(a, b, a0, i, b0, j, pairs)
        a0, b0 = i + 1, j + 1
    _diff(a, b, a0, a1, b0, b1, pairs)


def _anchors(
    a: Sequence[Hashable], b: Sequence[Hashable], a0: int, a1: int, b0: int, b1: int
) -> list[tuple[int, int]]:
    """Tokens that both sides have exactly once, the longest run of them that is in order."""
    counts = Counter(a[a0:a1])
    others = Counter(b[b0:b1])
    place = {b[j]: j for j in range(b0, b1) if others[b[j]] == 1}
    unique = [(i, place[a[i]]) for i in range(a0, a1) if counts[a[i]] == 1 and a[i] in place]
    return _increasing(unique)


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    tails: list[int] = []  # smallest last place of an increasing run of each length
    ends: list[int] = []
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        k = bisect.bisect_left(tails, j)
        before.append(ends[k - 1] if k else -1)
        if k == len(tails):
            tails.append(j)
            ends.append(n)
        else:
            tails[k], ends[k] = j, n
    run = []
    n = ends[-1] if ends else -1
    while n >= 0:
        run.append(pairs[n])
        n = before[n]
    return run[::-1]


def _myers(
    a: Sequence[Hashable], b: Sequence[Hashable], a0: int, a1: int, b0: int, b1: int
) -> list[tuple[int, int]]:
    """Myers' greedy diff; beyond _MAX_EDITS edits what it has matched so far."""
    n, m = a1 - a0, b1 - b0
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    best, best_k = -1, 0
    for edits in range(min(n + m, _MAX_EDITS) + 1):
        trace.append(dict(reach))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            y = x - k
            while x < n and y < m and a[a0 + x] == b[b0 + y]:
                x, y = x + 1, y + 1
            reach[k] = x
            if x <= n and y <= m and x + y > best:
                best, best_k = x + y, k
            if x >= n and y >= m:
                return _walk_back(trace, k, x, a0, b0)
    return _walk_back(trace, best_k, reach[best_k], a0, b0)


def _walk_back(
    trace: list[dict[int, int]], k: int, x: int, a0: int, b0: int
) -> list[tuple[int, int]]:
    pairs = []
    y = x - k
    for edits in range(len(trace) - 1, -1, -1):
        reach = trace[edits]
        down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
        from_k = k + 1 if down else k - 1
        from_x = reach.get(from_k, 0)
        from_y = from_x - from_k
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            if x < from_x or y < from_y:
                break
            pairs.append((a0 + x, b0 + y))
        if edits == 0:
            break
        x, y, k = from_x, from_y, from_k
    return pairs[::-1]


def _pair_backward(
    sides: tuple[_Side, _Side], backward: list[list[int]], partner: dict[int, int]
) -> None:
    """Backward calls of paired forward calls, the n-th pass with the n-th."""
    forward_name = [_forward_names(side.calls) for side in sides]
    theirs: dict[tuple[str, int], int] = {}
    counts: Counter[str] = Counter()
    taken = set(partner.values())
    for j in backward[1]:
        name = sides[1].calls[j].name
        theirs[name, counts[name]] = j
        counts[name] += 1
    counts.clear()
    for i in backward[0]:
        name = sides[0].calls[i].name
        nth = counts[name]
        counts[name] += 1
        mine = forward_name[0].get(forward_of(name))
        if i in partner or mine is None or mine not in partner:
            continue
        other = sides[1].calls[partner[mine]].name
        place = theirs.get((backward_of(other), nth))
        if place is not None and place not in taken:
            partner[i] = place
            taken.add(place)


def _forward_names(calls: Sequence[Call]) -> dict[str, int]:
    names: dict[str, int] = {}
    for i, call in enumerate(calls):
        if call.direction == "forward":
            names.setdefault(call.name, i)
    return names


def forward_of(name: str) -> str:
    """The name of the forward call that a backward call belongs to."""
    if name.endswith(".backward"):
        return name.removesuffix(".backward") + ".forward"
    return name.replace(".backward.", ".forward.")


def backward_of(name: str) -> str:
    """The name of the backward call of a forward call."""
    if name.endswith(".forward"):
        return name.removesuffix(".forward") + ".backward"
    return name.replace(".forward.", ".backward.")


def _in_order(sides: tuple[_Side, _Side], partner: dict[int, int], mapped: set[int]) -> list[Pair]:
    """Pairs in the order of `actual`; what only `expected` has after what it follows there."""
    actual, expected = sides[0].calls, sides[1].calls
    owner = {j: i for i, j in partner.items()}
    after: dict[int, list[int]] = {}
    last = -1
    for j in range(len(expected)):
        if j in owner:
            last = owner[j]
        else:
            after.setdefault(last, []).append(j)
    pairs = [Pair(None, expected[j], "aligned") for j in after.get(-1, ())]
    for i, call in enumerate(actual):
        j = partner.get(i, -1)
        other = expected[j] if j >= 0 else None
        how: How = "aligned"
        if other is not None:
            renamed = sides[0].is_renamed(call) or sides[1].is_renamed(other)
            if i in mapped or renamed:
                how = "mapped"
            elif call.name == other.name:
                how = "exact"
        pairs.append(Pair(call, other, how))
        pairs += [Pair(None, expected[k], "aligned") for k in after.get(i, ())]
    return pairs


def settle_repeats(
    actual: Sequence[Call],
    expected: Sequence[Call],
    ours: Sequence[Hashable],
    theirs: Sequence[Hashable],
    forward: Sequence[Sequence[int]],
    partner: dict[int, int],
) -> None:
    """Pair calls of one token of which one side has more, where lines or contents tell how.

    A diff pairs the first with the first. That is left to it where nothing speaks against it.
    """
    taken = set(partner.values())
    places = [_places(ours, forward[0], partner), _places(theirs, forward[1], taken)]
    for token, mine in places[0].items():
        other = places[1].get(token, [])
        if len(mine) == len(other) or not other or len(mine) * len(other) > _MAX_CHOICES:
            continue
        calls = [actual[i] for i in mine], [expected[j] for j in other]
        scores = _scores(*calls)
        pairs = _best(scores)
        first = sum(scores[n][n] for n in range(min(map(len, calls))))
        if sum(scores[p][q] for p, q in pairs) > first:
            partner.update({mine[p]: other[q] for p, q in pairs})


def _places(
    tokens: Sequence[Hashable], order: Sequence[int], done: dict[int, int] | set[int]
) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for i in order:
        if i not in done:
            found.setdefault(tokens[i], []).append(i)
    return found


def _scores(ours: Sequence[Call], theirs: Sequence[Call]) -> list[list[int]]:
    """How much speaks for each pair."""
    lines = [[_line(call) for call in calls] for calls in (ours, theirs)]
    few, many = sorted(lines, key=len)
    # a line that was put in before them moves all: then lines are no evidence
    has_lines = not Counter(few) - Counter(many) and None not in few
    inputs = [[_inputs(call) for call in calls] for calls in (ours, theirs)]
    return [
        [
            (_SAME_LINE if has_lines and line == other_line else 0)
            + (_SAME_INPUTS if given is not None and given == other_given else 0)
            for other_line, other_given in zip(lines[1], inputs[1], strict=True)
        ]
        for line, given in zip(lines[0], inputs[0], strict=True)
    ]


def _line(call: Call) -> str | None:
    """The innermost line that is not torch's own, with what called it."""
    own = [line for line in call.stack if "/torch/" not in line]
    return " < ".join(own[:2]) if own else None


def _inputs(call: Call) -> Hashable | None:
    """The content of what a call was given, or, of a draw that fills its argument, what it drew;
    None where nothing tells it from another."""
    role = "output" if overwrites(call) else "input"
    given = [r for r in call.tensors if r.role == role and not is_constant(r)]
    keys = tuple(content(record) for record in given)
    return keys if keys and None not in keys else None


def _best(scores: list[list[int]]) -> list[tuple[int, int]]:
    """As many pairs as the shorter side has, in order, for which most speaks; the first of equals.

    best[p][q] is the most that can be had of what begins at p and q.
    """
    n, m = len(scores), len(scores[0])
    short = min(n, m)
    never = -(10**9)
    best = [[0] * (m + 1) for _ in range(n + 1)]
    for p in range(n, -1, -1):
        for q in range(m, -1, -1):
            if (p == n and n <= m) or (q == m and m < n):
                continue  # all of the shorter side are paired
            pair = scores[p][q] + best[p + 1][q + 1] if p < n and q < m else never
            skip = best[p][q + 1] if n <= m and q < m else never
            skip = best[p + 1][q] if m < n and p < n else skip
            best[p][q] = max(pair, skip)
    pairs: list[tuple[int, int]] = []
    p = q = 0
    while len(pairs) < short:
        if scores[p][q] + best[p + 1][q + 1] == best[p][q]:
            pairs.append((p, q))
            p, q = p + 1, q + 1
        elif n <= m:
            q += 1
        else:
            p += 1
    return pairs
