"""Modules and optimizers as culprits: their settings explain what is inside them."""

from __future__ import annotations

import math

from tensorprobe.comparing.culprit import accuse, kind_by_direction, magnitude
from tensorprobe.comparing.judge import distance
from tensorprobe.comparing.nodes import Node, exceeds
from tensorprobe.comparing.scene import Scene


def settle_containers(scene: Scene) -> None:
    """Settings that were given to a module or optimizer explain what is inside it."""
    for node in scene.nodes:
        if not (node.container and node.differences and node.is_paired):
            continue
        inside = scene.inside(node)
        ours = [n for n, (at, c) in enumerate(scene.culprits) if at in inside]
        explained = [n for n in ours if scene.culprits[n][1].kind in ("argument", "structure")]
        if not explained:
            before = any(at <= max(inside, default=node.i) for at, _ in scene.culprits)
            if before or not exceeds(node):
                continue
        reason = f"called with other arguments: {'; '.join(node.differences[:4])}"
        row = max(node.outputs, key=distance, default=None)
        culprit = accuse(node, "argument", reason, node.d_out, row=row)
        if explained:
            first = explained[0]
            scene.culprits[first] = (node.i, culprit)
            for n in explained[:0:-1]:
                del scene.culprits[n]
        else:
            scene.culprits.append((node.i, culprit))


def blame_module(scene: Scene) -> None:
    """Where operators were not recorded, what a module does beside calling others: the
    innermost whose inputs agree and whose output does not, by more than many calls explain."""
    found = [node for node in scene.nodes if _is_suspect(scene, node)]
    forwards = {_forward(scene, node).i for node in found}
    for node in found:
        if forwards & scene.inside(_forward(scene, node)):
            continue  # one inside it is
        row = scene.furthest(node)
        assert row is not None
        reason = (
            f"its inputs agree, what it calls does too, and its {row.name} differs "
            f"{magnitude(node.d_out)}; record at L1 or mix to see inside"
        )
        culprit = accuse(node, kind_by_direction(node), reason, node.d_out, row=row)
        scene.culprits = [(node.i, culprit)]
        return


def _is_suspect(scene: Scene, node: Node) -> bool:
    if not (node.container and node.is_paired and node.outputs):
        return False
    if not node.call.name.startswith("Module."):
        return False
    n = len(scene.inside(_forward(scene, node)))
    return exceeds(node, 4 * math.sqrt(1 + n))


def _forward(scene: Scene, node: Node) -> Node:
    return scene.forward_of(node) or node
