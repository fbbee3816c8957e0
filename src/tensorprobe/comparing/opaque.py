"""Modules whose inside only one side shows: compiled, fused, or run by a fast path."""

from __future__ import annotations

from collections.abc import Sequence

from tensorprobe.comparing.align import forward_of
from tensorprobe.comparing.measure import CallPair
from tensorprobe.records import Call

_COMPILED = ("Compiled.", "Function.CompiledFunction.")
_Key = tuple[int, int, str]  # rank, step, name


def opaque_modules(pairs: Sequence[CallPair]) -> dict[int, set[int]]:
    """The pairs of such modules, forward and backward, and what the other side shows inside.

    Such a pair is one unit, judged by what goes in and what comes out.
    """
    sides = [_Tree(pairs, side) for side in (0, 1)]
    found: dict[int, set[int]] = {}
    units: dict[_Key, set[int]] = {}
    within: set[int] = set()
    for i, pair in enumerate(pairs):
        call = pair.call
        if not pair.is_paired or not call.name.startswith("Module."):
            continue
        if call.direction == "backward":
            inside = units.get((call.rank, call.step, forward_of(call.name)))
            if inside is not None:
                found[i] = inside
            continue
        if i in within:
            continue
        trees = [tree.inside(i) for tree in sides]
        if any(pairs[at].is_paired for tree in trees for at in tree) or not any(trees):
            continue
        if not all(trees) or _is_compiled(pair):
            inside = trees[0] | trees[1]
            within |= inside
            found[i] = units[call.rank, call.step, call.name] = inside
    return found


def _is_compiled(pair: CallPair) -> bool:
    calls = [call for call in pair.pair[:2] if isinstance(call, Call)]
    return any(note.startswith("compiled:") for call in calls for note in call.notes)


class _Tree:
    """What ran inside of what on one side."""

    def __init__(self, pairs: Sequence[CallPair], side: int) -> None:
        self._calls: list[Call | None] = []
        self._children: dict[_Key, list[int]] = {}
        self._later: dict[_Key, list[int]] = {}  # backward calls, by their forward call
        self._gradients: dict[_Key, list[int]] = {}  # by module
        for i, pair in enumerate(pairs):
            call = pair.pair[side]
            self._calls.append(call if isinstance(call, Call) else None)
            if not isinstance(call, Call):
                continue
            if call.parent:
                self._children.setdefault((call.rank, call.step, call.parent), []).append(i)
            if ".parameters_grad." in call.name:
                self._gradients.setdefault((call.rank, call.step, call.module), []).append(i)
            elif call.direction == "backward":
                key = call.rank, call.step, forward_of(call.name)
                self._later.setdefault(key, []).append(i)

    def inside(self, at: int) -> set[int]:
        """Everything inside a module's call, with its backward; without what is compiled."""
        found: set[int] = set()
        todo = [at]
        while todo:
            i = todo.pop()
            call = self._calls[i]
            if call is None:
                continue
            key = call.rank, call.step, call.name
            more = list(self._children.get(key, ()))
            if i != at:
                more += self._later.get(key, ())
                if call.module:
                    more += self._gradients.get((call.rank, call.step, call.module), ())
            for each in more:
                if each not in found and not self._is_compiled(each):
                    found.add(each)
                    todo.append(each)
        return found

    def _is_compiled(self, at: int) -> bool:
        call = self._calls[at]
        return call is not None and call.name.startswith(_COMPILED)
