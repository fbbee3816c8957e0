"""Random numbers of graphs: which node of a later graph drew those of an earlier one, and whether
they follow their law.

Each stage draws other numbers than eager torch. What a stage drew is taken over into the replay of
the one before, and the law that it should follow is looked after.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tensorprobe.compiling.compile_records import GraphNode, RecordedGraph
from tensorprobe.compiling.graph_lookup import graphs_called
from tensorprobe.compiling.graph_replay import is_random
from tensorprobe.errors import NotReplayable
from tensorprobe.replay.allowed import dtype_named

_STATISTICAL = 6.0  # standard deviations
_FEW = 64  # numbers, below which two masks may be the same by chance
_DROPOUT = re.compile(r"(^|\.)(dropout|alpha_dropout|feature_alpha_dropout|native_dropout)\b")
_LAW = re.compile(r"\.(randn?)(_like)?(\.default|\.generator)?$")

Given = dict[str, Callable[[Any], Any]]


class Drawn(NamedTuple):
    """Values for the random nodes of a graph; which of them break their law, and how."""

    given: Given
    broken: list[tuple[GraphNode, str]]
    opaque: str = ""  # a node whose numbers are taken over as they are


def drawn_by_later(
    graph: RecordedGraph, later: RecordedGraph, values: Callable[[], Mapping[str, Any]]
) -> Drawn:
    """Values for random nodes of `graph` that inductor has replaced by its own in `later`."""
    mine, theirs = _draws(graph), _draws(later)
    same = {node.name for node in mine} & {node.name for node in later.nodes}
    gone = [node for node in mine if node.name not in same]
    if not gone:
        return Drawn({}, [])
    made_by = {name: name for name in same}
    made_by |= _stand_ins(gone, [node for node in theirs if node.name not in same])
    known = values()
    found = Drawn({}, [])
    for node in mine:
        value = known.get(made_by[node.name])
        if not isinstance(value, torch.Tensor):
            raise NotReplayable(f"node {node.name}: its random numbers are not known")
        value = value.to(dtype_named(node.dtype)) if node.dtype else value
        found.given[node.name] = functools.partial(_as_drawn, value)
        text = broken_law(node, value)
        if text:
            found.broken.append((node, text))
    return found


def drawn_by_aot(dynamo: RecordedGraph, aot: RecordedGraph, values: Mapping[str, Any]) -> Drawn:
    """Values for the random nodes of dynamo's graph, from aot_autograd's."""
    given: Given = {}
    broken: list[tuple[GraphNode, str]] = []
    masks: list[tuple[GraphNode, torch.Tensor]] = []
    opaque = ""
    drawn = {each.origin for each in aot.nodes if is_random(each) and each.origin}
    for node in dynamo.nodes:
        if node.kind not in ("call", "method"):
            continue
        if _draws_inside(dynamo, node):
            raise NotReplayable(
                f"dynamo's stage: {node.name} draws random numbers in a graph that it calls"
            )
        if not is_random(node) and node.name not in drawn:
            continue
        made = [values.get(each.name) for each in aot.nodes if each.origin == node.name]
        tensors = [value for value in made if isinstance(value, torch.Tensor)]
        if not _DROPOUT.search(node.target):
            value = _taken_over(node, tensors)
            text = broken_law(node, value)
            if text:
                broken.append((node, text))
            given[node.name] = functools.partial(_as_drawn, value)
            opaque = node.name
            continue
        p = _probability(node)
        mask = next((value for value in tensors if value.dtype == torch.bool), None)
        if p == 0 or (p is None and node.name not in drawn):
            continue
        if p is None or mask is None:
            raise NotReplayable(
                f"dynamo's stage: the mask of {node.name} is not in aot_autograd's graph"
            )
        broken += [(node, text) for text in _broken_masks(node, mask, p, masks)]
        if 0 < p < 1:
            masks.append((node, mask))
        given[node.name] = functools.partial(_dropped, mask, 1 / (1 - p) if p < 1 else 0.0)
    return Drawn(given, broken, opaque)


def _stand_ins(gone: list[GraphNode], new: list[GraphNode]) -> dict[str, str]:
    """Which of the new nodes stands for which: that made for the same node of dynamo's graph."""
    found = {}
    for node in gone:
        alike = [each for each in new if len(new) == 1 or each.origin == node.origin]
        twins = [each for each in gone if each.origin == node.origin]
        is_known = len(alike) == 1 == len(twins) or len(new) == len(gone) == 1
        if not is_known or (node.shape and alike[0].shape and node.shape != alike[0].shape):
            raise NotReplayable("which random numbers of inductor's stand for whose is not known")
        found[node.name] = alike[0].name
    return found


def _draws_inside(graph: RecordedGraph, node: GraphNode) -> bool:
    """Whether a graph that a node calls draws numbers: its nodes have no names of their own."""
    todo, seen = list(graphs_called(graph, node)), set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            nodes = graph.inner.get(name, ())
            todo += [each.target for each in nodes if each.kind == "graph"]
            if any(is_random(each) for each in nodes):
                return True
    return False


def _draws(graph: RecordedGraph) -> list[GraphNode]:
    return [node for node in graph.nodes if is_random(node) and "seed" not in node.target]


def _taken_over(node: GraphNode, made: list[torch.Tensor]) -> torch.Tensor:
    alike = [each for each in made if str(list(each.shape)) == node.shape]
    if not alike:
        raise NotReplayable(
            f"dynamo's stage: {node.name} draws random numbers, other ones than eager"
        )
    return alike[-1]


def _broken_masks(
    node: GraphNode, mask: torch.Tensor, p: float, others: list[tuple[GraphNode, torch.Tensor]]
) -> list[str]:
    """What is wrong with the mask of a dropout."""
    found = []
    count, dropped = mask.numel(), int((~mask).sum())
    spread = math.sqrt(max(count * p * (1 - p), 1e-9))
    if abs(dropped - count * p) > _STATISTICAL * spread + 1:
        found.append(
            f"{node.name} drops {dropped} of {count} numbers; with p={p:g} "
            f"{count * p:.0f} are expected, give or take {spread:.0f}"
        )
    for other, seen in others:
        if count >= _FEW and seen.shape == mask.shape and bool((seen == mask).all()):
            found.append(f"{node.name} drops the same numbers as {other.name}: one seed for both")
    return found


def broken_law(node: GraphNode, value: Any) -> str:
    """How numbers that should be uniform, or normal, are not; nothing where they are."""
    law = _LAW.search(node.target)
    if law is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return ""
    numbers = value.double()
    count = numbers.numel()
    if not count:
        return ""
    uniform = law[1] == "rand"
    low, high = float(numbers.min()), float(numbers.max())
    if uniform and not (low >= 0 and high <= 1):
        return f"{node.name} draws from {low:.3g} to {high:.3g}, not from 0 to 1"
    mean, expected, variance = float(numbers.mean()), 0.5 if uniform else 0.0, 1.0
    if uniform:
        variance = 1 / 12
    if abs(mean - expected) > _STATISTICAL * math.sqrt(variance / count) + 1e-3:
        return f"{node.name} draws numbers of the mean {mean:.3g}; {expected:g} is expected"
    square = float((numbers - expected).square().mean())
    spread = math.sqrt((1 / 180 if uniform else 2.0) / count)
    if abs(square - variance) > _STATISTICAL * spread + 1e-3:
        return f"{node.name} draws numbers of the variance {square:.3g}, not {variance:.3g}"
    return ""


def _probability(node: GraphNode) -> float | None:
    """The share that a dropout drops."""
    args = node.args.get("tuple", []) if isinstance(node.args, dict) else []
    pairs = node.kwargs.get("dict", []) if isinstance(node.kwargs, dict) else []
    named = {pair[0]: pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2}
    p = named.get("p", args[1] if len(args) > 1 else 0.5)
    training = named.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(p, int | float) or training is not True:
        return None
    return float(p) if 0 <= p <= 1 else None


def _as_drawn(value: torch.Tensor, args: Any) -> torch.Tensor:
    """A random node whose numbers are known."""
    return value.clone()


def _dropped(mask: torch.Tensor, scale: float, args: Any) -> Any:
    """A dropout whose mask is known."""
    return args[0] * mask * scale
