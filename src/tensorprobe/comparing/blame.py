"""Names the calls of one rank that caused a difference: one cause, one culprit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from tensorprobe.comparing.culprit import (
    accuse,
    has_steps,
    is_cut_otherwise,
    kind_by_direction,
    magnitude,
    unlike_gradients,
)
from tensorprobe.comparing.evidence import Replayer
from tensorprobe.comparing.heard import RankHears
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.reach import Reach, reach_of
from tensorprobe.comparing.rounding import ROUNDING, distance, same_bits
from tensorprobe.comparing.scene import (
    AMPLIFIES,
    Node,
    Scene,
    exceeds,
    has_other_shape,
    unit_growth,
)
from tensorprobe.comparing.suspects import Replays, hunt, hunt_all
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.comparing.walk import Taint, Walk
from tensorprobe.records import Call

_MUCH = 0.1  # of a result's size
_MUCH_UNSEEN = 1e-3  # the same where no replay could tell
# What other settings can be behind; a wrong result inside is that call's own.
_BY_SETTINGS = ("argument", "structure", "boundary")
_BY_CLOSURES = ("parameter", "structure", "boundary")
# What a program does on one side, and not a kernel.
_HABITS = ("argument", "structure")
_GRADIENTS = ".parameters_grad."


class Findings(msgspec.Struct):
    """What blame has found in one rank."""

    culprits: list[Culprit]
    diverged: dict[int, int] = {}  # calls beyond rounding, by step
    structure: list[str] = []  # what is different in calls that are not blamed
    n_replayed: int = 0
    n_left: int = 0  # suspects that the time did not suffice for
    first_bits: str | None = None  # the first call whose bits differ, where that is all
    objects: str | None = None  # the first call on an object, sent to other ranks, that differs
    grown: str | None = None  # the first call whose results are far apart, with nobody to blame
    reach: Reach | None = None  # between communications and culprits
    is_cut: bool = False  # the model works on other pieces, and optimizers agree all the same


def blame(
    pairs: Sequence[CallPair],
    *,
    replayer: Replayer | None = None,
    seconds: float = 120.0,
    seconds_below: float | None = None,
    floors: Mapping[str, float] | None = None,
    replay: bool = True,
    is_calibrated: bool = True,
    same_settings: bool = True,
    hears: RankHears | None = None,
) -> Findings:
    """All culprits among the paired calls of one rank, the earliest first.

    Without `same_settings` other bits are no proof: other libraries, switches or numbers of threads
    sum in another order.
    """
    scene = Scene(pairs, floors, same_settings, hears)
    replays = Replays(
        scene, replayer=replayer, seconds=seconds, enabled=replay, is_calibrated=is_calibrated
    )
    if seconds_below is not None:
        replays.seconds_below = min(replays.seconds_below, seconds_below)
    taint = Taint(scene)
    if replays.enabled:
        hunt(scene, replays)
    walk = Walk(scene, replays, taint)
    walk.run()
    if replays.enabled and not scene.culprits:
        hunt_all(scene, replays)
    if not scene.culprits and walk.hazards:
        scene.culprits.append(walk.hazards[0])
    settle_containers(scene)
    is_cut = is_cut_otherwise(scene) and has_steps(scene)
    unlike = unlike_gradients(scene) if is_cut else None
    if is_cut and unlike is None:
        scene.culprits = [item for item in scene.culprits if _holds_in_pieces(scene, *item)]
    elif unlike is not None and all(c.step > unlike[1].step for _, c in scene.culprits):
        scene.culprits = [unlike]
    elif not scene.culprits and walk.cuts:
        scene.culprits.append(walk.cuts[0])
    if not scene.culprits and not scene.sees_all and not is_cut:
        blame_module(scene)
    taint.spread()
    findings = _findings(scene, replays)
    findings.is_cut = is_cut and unlike is None
    if hears is not None:
        findings.reach = reach_of(scene, taint, findings.culprits)
    return findings


def _holds_in_pieces(scene: Scene, at: int, culprit: Culprit) -> bool:
    """Whether a culprit is one even if the model works on other pieces: a replay has shown it, or
    a call of the model's, before it is given other pieces, has other arguments."""
    node = scene.nodes[at]
    is_whole = bool(node.call.module) and not any(map(has_other_shape, node.inputs))
    return culprit.proof == "replayed" or (culprit.kind == "argument" and is_whole)


def _findings(scene: Scene, replays: Replays) -> Findings:
    _count_affected(scene)
    diverged: dict[int, int] = {}
    for node in scene.nodes:
        if node.taint and node.d_out > ROUNDING and not node.container:
            diverged[node.call.step] = diverged.get(node.call.step, 0) + 1
    first_step = min((culprit.step for _, culprit in scene.culprits), default=0)
    culprits = [item for item in scene.culprits if item[1].step == first_step]
    culprits.sort(key=lambda item: (item[1].weak, 0 if item[1].weak else item[0]))
    first = next((node for node in scene.nodes if _has_other_bits(node)), None)
    return Findings(
        _folded(scene, culprits),
        diverged,
        _harmless(scene),
        replays.n_replayed,
        replays.n_left,
        first.call.name if first else None,
        scene.objects,
        _grown(scene),
    )


def _has_other_bits(node: Node) -> bool:
    """Whether a call was given the same, in the same way, and gives other bits."""
    return not node.container and node.same_in and not node.same_out and not node.differences


def _folded(scene: Scene, culprits: list[tuple[int, Culprit]]) -> list[Culprit]:
    """The causes, each with those that follow from it: reached by its data or weights."""
    bits = {id(culprit): 1 << bit for bit, (_, culprit) in enumerate(scene.culprits)}
    causes: list[Culprit] = []
    for at, culprit in culprits:
        first = next((c for c in causes if _explains(scene, c, bits[id(c)], at, culprit)), None)
        (causes if first is None else first.follows).append(culprit)
    return causes


def _explains(scene: Scene, cause: Culprit, bit: int, at: int, culprit: Culprit) -> bool:
    if (cause.name, cause.step) == (culprit.name, culprit.step):
        return True
    if cause.cause == culprit.cause:
        if cause.cause in ("seed", "weights", "data"):
            return True  # other weights are one cause, however many of them differ
        if (cause.op, cause.reason) == (culprit.op, culprit.reason) and cause.cause in _HABITS:
            return True  # the program does the same thing otherwise, in several places
        if cause.cause == "argument" and cause.stack[:1] == culprit.stack[:1] != ():
            return True  # one line: `average.mul_(decay).add_(new, alpha=1 - decay)`
    if all(c.cause == "boundary" and _is_of_parameter(c) for c in (cause, culprit)):
        return True  # the program has changed its weights, all of them at once
    if cause.cause == culprit.cause == "argument" and all(
        _gives_other_shapes(scene, each) for each in (cause, culprit)
    ):
        return True  # it makes as many as the first one gave
    if _GRADIENTS in cause.name and _GRADIENTS in culprit.name:
        return True  # what the engine has added up
    if at in scene.in_optimizer and culprit.kind in ("boundary", "structure"):
        return True  # an optimizer steps by what it is given
    first = next(n.i for n in scene.nodes if n.call.name == cause.name)
    if first in scene.in_optimizer and at in scene.in_optimizer:
        return True
    return bool(scene.nodes[at].taint & bit)


def _gives_other_shapes(scene: Scene, culprit: Culprit) -> bool:
    at = scene.named(culprit.step, culprit.name)
    return at is not None and any(map(has_other_shape, scene.nodes[at].outputs))


def _is_of_parameter(culprit: Culprit) -> bool:
    return (culprit.tensor or "").startswith("parameters.")


def _grown(scene: Scene) -> str | None:
    """The first call whose results are far apart, though every call did what it should."""
    much = _MUCH if scene.has_tensors else _MUCH_UNSEEN
    called_otherwise: set[int] = set()  # and what is made of their results, until it agrees
    for node in scene.nodes:
        makers = {at for row in node.inputs for at in scene.flow.producers(node.i, row.name)}
        if node.differences or not node.is_paired or makers & called_otherwise:
            called_otherwise.add(node.i)
            continue
        if node.container or node.taint or node.is_random:
            continue
        if scene.is_only_overwritten(node):
            continue
        if node.call.direction == "forward" and node.r_out > much:
            u = node.unit_out
            if node.r_out > ROUNDING * u:
                return node.call.name
    return None


def _count_affected(scene: Scene) -> None:
    places = [at for at, _ in scene.culprits]
    for node in scene.nodes:
        taint = node.taint
        if not taint or node.container or node.d_out <= ROUNDING:
            continue
        while taint:
            bit = (taint & -taint).bit_length() - 1
            taint &= taint - 1
            if bit < len(places) and places[bit] != node.i:
                scene.culprits[bit][1].affected += 1


def _harmless(scene: Scene) -> list[str]:
    """Differences of calls that are not blamed, nor are the same call in another step."""
    blamed = {scene.nodes[at].call.name for at, _ in scene.culprits}
    texts = (
        f"{node.call.name}: {'; '.join(node.differences)}"
        for node in scene.nodes
        if node.differences and node.call.name not in blamed
    )
    return list(dict.fromkeys(texts))


def settle_containers(scene: Scene) -> None:
    """Settings that were given to a module or optimizer explain what is inside it."""
    for node in scene.nodes:
        if not (node.differences and node.is_paired):
            continue
        is_optimizer = node.call.name.startswith("Optimizer.")
        if not (node.container or is_optimizer):
            continue
        inside = {node.i, *scene.inside(node)}
        ours = [n for n, (at, c) in enumerate(scene.culprits) if at in inside]
        explained = [n for n in ours if scene.culprits[n][1].kind in _BY_SETTINGS or is_optimizer]
        explained += _in_closure(scene, node, inside) if is_optimizer else []
        if not explained:
            before = any(at <= max(inside) for at, _ in scene.culprits)
            changed = is_optimizer and node.same_in and not node.same_out
            differs = exceeds(node) if is_optimizer else _exceeds_inside(scene, node)
            if before or not (changed or differs):
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


def _in_closure(scene: Scene, step: Node, inside: set[int]) -> list[int]:
    """The culprits in an optimizer's closure that its settings explain: how often it calls that,
    and with which weights from the second time on, where both sides begin with the same."""
    if any(row.role == "parameter" and same_bits(row) is False for row in step.inputs):
        return []
    return [
        n
        for n, (at, culprit) in enumerate(scene.culprits)
        if culprit.kind in _BY_CLOSURES
        and at not in inside
        and scene.is_inside(scene.nodes[at], step)
        and _is_called_again(scene, scene.nodes[at])
    ]


def _is_called_again(scene: Scene, node: Node) -> bool:
    """Whether a call runs, on a side, after that side has gone backward in this step."""
    forward = _forward(scene, node)
    for side in (0, 1):
        call = forward.pair.pair[side]
        if isinstance(call, Call) and any(
            isinstance(other := earlier.pair.pair[side], Call)
            and (other.step, other.direction) == (call.step, "backward")
            and other.index < call.index
            for earlier in scene.nodes
        ):
            return True
    return False


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
    return _exceeds_inside(scene, node)


def _exceeds_inside(scene: Scene, node: Node) -> bool:
    """Whether a module's outputs differ by more than what went in and what is inside explain."""
    inside = [scene.nodes[at] for at in scene.inside(_forward(scene, node))]
    if not exceeds(node, unit_growth(len(inside))):
        return False
    # weights that have drifted apart are given to the modules inside
    within = [r for other in inside for r in (other.r_in, other.r_out) if math.isfinite(r)]
    return node.r_out > ROUNDING * AMPLIFIES * max(within, default=0.0)


def _forward(scene: Scene, node: Node) -> Node:
    return scene.forward_of(node) or node
