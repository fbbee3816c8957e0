"""Which of several calls that look alike is the one that the other side does not have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from tensorprobe.comparing.content import content, is_constant
from tensorprobe.records import Call

# Beyond this many pairs to choose from, the first of one side stay with the first of the other.
_MAX_CHOICES = 40_000
_SAME_INPUTS, _SAME_LINE = 2, 1


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
    """The content of what a call was given; None where nothing tells it from another."""
    given = [r for r in call.tensors if r.role == "input" and not is_constant(r)]
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
