"""Suspects replayed in float64 on each side's own inputs: whose error is whose."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from tensorprobe.comparing.evidence import Evidence, OwnError
from tensorprobe.comparing.nodes import FAINT, Node, shrink_factor
from tensorprobe.comparing.recomputation import recomputed_forwards
from tensorprobe.comparing.replaying import Replayer, UserCode, replayer_for
from tensorprobe.comparing.scene import Scene
from tensorprobe.records import Call

_LEAST_S = 2.0


class Replays:
    """Replays of one rank's suspects, each at most once, as long as there is time."""

    def __init__(
        self,
        scene: Scene,
        *,
        replayer: Replayer | None = None,
        seconds: float = 120.0,
        enabled: bool = True,
    ) -> None:
        self.scene = scene
        self._replayer = replayer or replayer_for(UserCode())
        self.enabled = enabled and scene.has_tensors
        self.deadline = time.monotonic() + seconds
        self.n_replayed = 0
        self.n_left = 0  # suspects that the time did not suffice for

    @property
    def in_time(self) -> bool:
        return self.enabled and time.monotonic() < self.deadline

    def of(self, node: Node, threshold: float) -> tuple[Evidence, Evidence] | None:
        """Both sides' evidence; without the second run for noise where the first clears them."""
        if node.evidence is None:
            if node.is_random == "random":
                return None
            quick = self.evidence(node, 0, noise=False), self.evidence(node, 1, noise=False)
            self.n_replayed += 1
            if any(evidence.problem for evidence in quick):
                node.evidence = quick
                return None
            if all(score(node, worst(node, evidence)) <= threshold for evidence in quick):
                if threshold > FAINT:
                    return quick
                node.evidence = quick
                return quick
            node.evidence = self.evidence(node, 0, noise=True), self.evidence(node, 1, noise=True)
        if any(evidence.problem for evidence in node.evidence):
            return None
        return node.evidence

    def is_cleared_by_recomputation(self, node: Node, threshold: float) -> bool:
        """Whether a backward call did right by what was recomputed for it.

        Under checkpointing backward is given what its forward call, or those before it, gave when
        they ran for the second time.
        """
        return any(
            all(
                not evidence.problem and score(node, worst(node, evidence)) <= threshold
                for evidence in self._backwards(node, forwards)
            )
            for forwards in recomputed_forwards(self.scene, node)
        )

    def _backwards(self, node: Node, forwards: tuple[Call, Call]) -> Iterator[Evidence]:
        for forward, backward in zip(forwards, node.pair.pair[:2], strict=True):
            assert isinstance(backward, Call)
            yield self._own_error(forward, backward)

    def evidence(self, node: Node, side: int, noise: bool) -> Evidence:
        """One side's; a backward call is replayed together with its forward call."""
        call = node.pair.pair[side]
        assert isinstance(call, Call)
        at = self.scene.forward_of(node)
        is_kernel = at is None and call.op.startswith("torch.ops.")  # of backward, seen at L2
        if call.direction == "forward" or is_kernel:
            return self._own_error(call, noise=noise)
        given = at.pair.pair[side] if at is not None else None
        if not isinstance(given, Call):
            return Evidence(problem=f"{call.name}: its forward call was not recorded")
        return self._own_error(given, call, noise=noise)

    def matters(self, call: Call, other: Call | None) -> float | None:
        """How far a call's replay moves with the arguments of another; None: not to be told."""
        return self._replayer.matters(call, other, seconds=self._seconds_for_one())

    def _own_error(
        self, forward: Call, backward: Call | None = None, noise: bool = True
    ) -> Evidence:
        seconds = self._seconds_for_one()
        return self._replayer.own_error(forward, backward, noise=noise, seconds=seconds)

    def _seconds_for_one(self) -> float:
        """One call may take what is left of the time, and some seconds however late it is."""
        return max(self.deadline - time.monotonic(), _LEAST_S)


def worst(node: Node, evidence: Evidence) -> OwnError | None:
    """The output with the largest own error."""
    return max(evidence.errors.values(), key=lambda own: _scaled(node, own), default=None)


def score(node: Node, own: OwnError | None) -> float:
    """An own error with what a long sum may have taken off."""
    return 0.0 if own is None else _scaled(node, own)


def _scaled(node: Node, own: OwnError) -> float:
    row = next((row for row in node.outputs if row.name == own.name), None)
    long = shrink_factor(node, row)
    found = own.size / long
    if abs(own.gain) > 8 * own.gain_sigma:
        found = max(found, abs(own.gain) / math.sqrt(long))
    return 4 * found if own.exact else found
