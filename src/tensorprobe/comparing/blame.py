"""Names the calls that caused a difference: own error against inherited, one cause one culprit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tensorprobe.comparing.containers import blame_module, settle_containers
from tensorprobe.comparing.culprit import Culprit
from tensorprobe.comparing.drift import drifted
from tensorprobe.comparing.hunt import hunt
from tensorprobe.comparing.judge import ROUNDING, pair_roundoff
from tensorprobe.comparing.measure import CallPair
from tensorprobe.comparing.replaying import Replayer
from tensorprobe.comparing.replays import Replays
from tensorprobe.comparing.scene import Scene
from tensorprobe.comparing.taint import Taint
from tensorprobe.comparing.walk import Walk

_MUCH = 0.1  # of a result's size


class Findings(msgspec.Struct):
    """What blame has found in one rank."""

    culprits: list[Culprit]
    diverged: dict[int, int] = {}  # calls beyond rounding, by step
    structure: list[str] = []  # what is different but changed no values
    n_replayed: int = 0
    n_left: int = 0  # suspects that the time did not suffice for
    first_bits: str | None = None  # the first call whose bits differ, where that is all
    unexplained: str | None = None  # the first call that differs much, though nobody is to blame


def blame(
    pairs: Sequence[CallPair],
    *,
    replayer: Replayer | None = None,
    seconds: float = 120.0,
    floors: Mapping[str, float] | None = None,
    replay: bool = True,
) -> Findings:
    """All culprits among the paired calls of one rank, the earliest first."""
    scene = Scene(pairs, floors)
    replays = Replays(scene, replayer=replayer, seconds=seconds, enabled=replay)
    taint = Taint(scene)
    if replays.enabled:
        hunt(scene, replays, faint=False)
    walk = Walk(scene, replays, taint)
    walk.run()
    if replays.enabled and not scene.culprits:
        hunt(scene, replays, faint=True)
        scene.culprits.sort(key=lambda item: -item[1].own_error)
    if not scene.culprits and not scene.has_tensors and (found := drifted(scene)):
        scene.culprits.append(found)
    if not scene.culprits and walk.hazards:
        scene.culprits.append(walk.hazards[0])
    settle_containers(scene)
    if not scene.culprits and not scene.sees_all:
        blame_module(scene)
    taint.spread()
    return _findings(scene, replays)


def _findings(scene: Scene, replays: Replays) -> Findings:
    _count_affected(scene)
    diverged: dict[int, int] = {}
    for node in scene.nodes:
        if node.taint and node.d_out > ROUNDING and not node.container:
            diverged[node.call.step] = diverged.get(node.call.step, 0) + 1
    first_step = min((culprit.step for _, culprit in scene.culprits), default=0)
    culprits = [item for item in scene.culprits if item[1].step == first_step]
    culprits.sort(key=lambda item: (item[1].weak, 0 if item[1].weak else item[0]))
    first = next((n for n in scene.nodes if not n.container and n.same_in and not n.same_out), None)
    return Findings(
        [culprit for _, culprit in culprits],
        diverged,
        _harmless(scene),
        replays.n_replayed,
        replays.n_left,
        first.call.name if first else None,
        _unexplained(scene),
    )


def _unexplained(scene: Scene) -> str | None:
    """Rounding that was blown up, as far as anyone can tell: to be said all the same."""
    for node in scene.nodes:
        if node.container or node.taint or node.is_random or not node.is_paired:
            continue
        if node.call.direction == "forward" and node.r_out > _MUCH:
            u = max((pair_roundoff(row) for row in node.outputs), default=0.0)
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
