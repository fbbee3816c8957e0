"""Which graph node backward is in, without anomaly mode: each says so when backward enters it."""

from __future__ import annotations

import bisect
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from tensorprobe.failures.followed_calls import FollowedCalls, Stamp, WatchedCall
from tensorprobe.follow.gradients import LEAF, Gradients
from tensorprobe.follow.quiet import Quiet
from tensorprobe.trouble import OnTrouble


class BackwardWatch:
    """Follows backward from node to node; `on_failed` is given an error, its node, when it began.

    A prehook that returns nothing sits on every node, put there when a backward first starts above
    it. Nodes may run in threads of their own, and the exception comes out here. `going` gives the
    threads that go backward.
    """

    def __init__(
        self,
        calls: FollowedCalls,
        on_failed: Callable[[Exception, Any, int], None],
        going: Callable[[], set[int]],
    ) -> None:
        self.on = False
        self._calls = calls
        self._on_failed = on_failed
        self._going = going
        self._mark = f"{calls.key} entered"
        self._count = itertools.count(1)
        self._entered: dict[int, tuple[int, Any]] = {}  # the last node, by thread
        self._made: dict[int, list[tuple[int, WatchedCall]]] = {}  # by backward with create_graph
        self._creating = 0

    def forget(self) -> None:
        """A step is over: graphs that backward made in it are not gone through again."""
        self._made.clear()

    def now(self) -> int:
        """A counter that grows with every node entered, and with every call of this."""
        return next(self._count)

    def call_of(self, node: Any) -> WatchedCall | None:
        """The forward call that a node belongs to; of a node that backward made, the same."""
        stamp: Stamp | None = node.metadata.get(self._calls.key)
        if stamp is not None:
            return stamp.call
        number, found = node._sequence_nr(), []
        for starts in self._made.values():
            place = bisect.bisect_right(starts, number, key=lambda each: each[0])
            if place:
                found.append(starts[place - 1][1])
        return found[0] if len(found) == 1 else None

    def around(self, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Run backward with `run`, which passes `args` to torch's engine."""
        ident = threading.get_ident()
        began, before = next(self._count), self._entered.get(ident)
        leaves = self._listen(args[0] if args else ())
        # backward(outputs, gradients, keep_graph, create_graph, ...)
        creates = len(args) > 3 and bool(args[3])
        self._creating += creates
        try:
            return run()
        except Exception as error:
            self._on_failed(error, self._last_entered(began), began)
            raise
        finally:
            self._creating -= creates
            for handle in leaves:
                handle.remove()
            for thread in self._entered_since(began):  # one that is held keeps the graph below it
                self._entered.pop(thread, None)
            if before is not None:
                self._entered[ident] = before

    def begins(self, roots: Any) -> None:
        """Follow what backward starts from: a loss may come from a custom Function alone."""
        calls = self._calls
        with OnTrouble(calls.gap, "backward"), Quiet():
            nodes = [(root, root.grad_fn) for root in roots if isinstance(root, torch.Tensor)]
            kind = torch.autograd.function.BackwardCFunction
            calls.note_functions([each for each in nodes if isinstance(each[1], kind)])

    def _last_entered(self, began: int) -> Any:
        recent = self._entered_since(began).values()
        return max(recent, key=lambda each: each[0])[1] if recent else None

    def _entered_since(self, began: int) -> dict[int, tuple[int, Any]]:
        """By thread, the last node it entered; without threads that run a backward of their own."""
        others = self._going() - {threading.get_ident()}
        entered = list(self._entered.items())
        return {k: each for k, each in entered if each[0] > began and k not in others}

    def _listen(self, roots: Any) -> list[Any]:
        """Put our prehook on every node below `roots` that has none; gives those to take away.

        The nodes of leaves outlive their graphs, so that hooks on them would pile up.
        """
        leaves: list[Any] = []
        if _is_traced():
            return leaves
        with OnTrouble(self._calls.gap, "backward"), Quiet():
            todo = [node for node in map(_node_of, roots) if node is not None]
            seen_leaves = set()
            while todo:
                node = todo.pop()
                if node._sequence_nr() == LEAF:
                    if node not in seen_leaves:
                        seen_leaves.add(node)
                        leaves.append(node.register_prehook(self._enter))
                elif self._mark not in node.metadata:
                    node.metadata[self._mark] = True
                    node.register_prehook(self._enter)
                    todo += [after for after, _ in node.next_functions if after is not None]
        return leaves

    def _enter(self, grads: Gradients) -> None:
        if not self.on:  # the guard is over, the graph is not
            return
        with OnTrouble(self._calls.gap, "backward"):
            node: Any = torch._C._current_autograd_node()
            if node is None:
                return
            ident = threading.get_ident()
            self._entered[ident] = (next(self._count), node)
            stamp: Stamp | None = node.metadata.get(self._calls.key)
            if stamp is None:
                return
            if self._creating:
                number = torch._C._autograd._get_sequence_nr()
                self._made.setdefault(ident, []).append((number, stamp.call))
            with Quiet():
                self._calls.receive(stamp, grads)


def _node_of(root: Any) -> Any:
    """The node of a tensor, or of a GradientEdge, which backward takes too."""
    return root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)


def _is_traced() -> bool:
    """Whether compiled autograd would take our hooks for a part of the program."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
