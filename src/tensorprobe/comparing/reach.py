"""How far the culprits of one rank reach: into what it gave to others, out of what it heard."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tensorprobe.collectives.links import Key, listed, speaks
from tensorprobe.comparing.rounding import ROUNDING
from tensorprobe.comparing.scene import Node, Scene, label_of
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.comparing.walk import Taint

_GRADIENTS = "gradients of "


class Hearing(msgspec.Struct):
    """A communication at which a rank got what differs."""

    key: Key
    words: str
    name: str
    step: int


class Reach(msgspec.Struct):
    """In one rank: what went into each communication that matters, and into each culprit.

    Both are numbers of culprits and keys of communications heard before.
    """

    into: dict[Key, tuple[set[int], set[Key]]] = {}
    culprits: list[set[Key]] = []
    heard: dict[Key, Hearing] = {}  # in execution order


def reach_of(scene: Scene, taint: Taint, culprits: Sequence[Culprit]) -> Reach:
    """Follow the damage through one rank once more: from each culprit and each communication."""
    found = Reach()
    nodes: dict[int, Hearing] = {}
    speaking: list[tuple[Key, Node]] = []
    for node in scene.nodes:
        for hearing, is_got in _hearings(scene, node):
            speaking.append((hearing.key, node))
            if is_got:
                found.heard.setdefault(hearing.key, hearing)
                nodes.setdefault(node.i, hearing)
    if not (culprits or nodes):
        return found
    taint.spread(sorted(nodes))
    bits = {id(culprit): bit for bit, (_, culprit) in enumerate(scene.culprits)}
    own = [_bits_of(culprit, bits) for culprit in culprits]
    heard_bits = {1 << taint.bit_of(at): nodes[at].key for at in nodes}
    for key, node in speaking:
        mask = _given_taint(scene, node, key)
        into, before = found.into.setdefault(key, (set(), set()))
        into |= {n for n, each in enumerate(own) if each & mask}
        before |= {heard for bit, heard in heard_bits.items() if bit & mask and heard != key}
    places = {id(culprit): at for at, culprit in scene.culprits}
    for culprit in culprits:
        at = places.get(id(culprit))
        mask = scene.nodes[at].taint if at is not None else 0
        found.culprits.append({key for bit, key in heard_bits.items() if bit & mask})
    return found


def _bits_of(culprit: Culprit, bits: dict[int, int]) -> int:
    """The bits of a culprit and of those that follow from it."""
    mask = 1 << bits[id(culprit)] if id(culprit) in bits else 0
    for other in culprit.follows:
        mask |= _bits_of(other, bits)
    return mask


def _hearings(scene: Scene, node: Node) -> list[tuple[Hearing, bool]]:
    """The communications that a call is, each with whether it got what differs."""
    call = node.call
    if node.heard is not None:
        hearing = Hearing(node.heard.key, node.heard.words, call.name, call.step)
        return [(hearing, node.is_paired and node.d_out > ROUNDING)]
    found = []
    for row in node.inputs:
        if row.role != "parameter_grad":
            continue
        others = scene.hears.gradients.get((call.step, label_of(call, row)))
        if others is not None:
            key = Key(call.step, f"{_GRADIENTS}{others.members}", "all_reduce", 0)
            words = f"the gradient reduction of {listed(others.members)}"
            differs = scene.distance(node, row) > ROUNDING
            found.append((Hearing(key, words, call.name, call.step), differs))
    return found


def _given_taint(scene: Scene, node: Node, key: Key) -> int:
    """What is wrong with what a rank gives: by its inputs, or by how it was called."""
    if key.group.startswith(_GRADIENTS):
        mask = 0
        for other in scene.nodes[: node.i]:
            call = other.call
            is_backward = call.step == node.call.step and call.direction == "backward"
            if is_backward and ".parameters_grad" not in call.name:
                mask |= other.taint
        return mask
    if node.heard is None or node.pair.pair.actual is None:
        return 0
    if not speaks(node.pair.pair.actual, key.kind):
        return 0
    mask = 0
    for row in node.inputs:
        for at in scene.flow.producers(node.i, row.name):
            if at is not None:
                mask |= scene.nodes[at].taint
    for bit, (at, culprit) in enumerate(scene.culprits):
        if at == node.i and culprit.kind != "output":
            mask |= 1 << bit
    return mask
