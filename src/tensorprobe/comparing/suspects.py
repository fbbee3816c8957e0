"""Finds calls with an error of their own by replaying those that look suspicious."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tensorprobe.comparing.align import content
from tensorprobe.comparing.culprit import (
    accuse,
    accuse_nonfinite,
    heals,
    kind_by_direction,
    percent,
)
from tensorprobe.comparing.evidence import Evidence, OwnError, Replayer, UserCode, replayer_for
from tensorprobe.comparing.rounding import ROUNDING, number_text, pair_roundoff
from tensorprobe.comparing.scene import FAINT, Node, Scene, nonfinite_differs, shrink_factor
from tensorprobe.comparing.verdict import Culprit, Side
from tensorprobe.records import Call, Fields, TensorRecord
from tensorprobe.replay.calibration import check_own_table

_LEAST_S = 2.0
_SURE, _LIKELY = (
    8.0,
    2.0,
)  # standard errors of a factor: to accuse, and for the other side to share it
_STANDS_OUT = 6.0  # times the error of all rows: a row that is wrong alone
_CONTROLS = 4  # other calls of the same kernel that are asked whether they obey its law
# In roundings: what is systematic to this degree is no way of rounding, whatever the kernel.
_PLAIN = {"float32": 2.0, "bfloat16": 0.25, "float16": 0.25}
_SIDES: tuple[Side, Side] = ("actual", "expected")


class Replays:
    """Replays of one rank's suspects, each at most once, as long as there is time."""

    def __init__(
        self,
        scene: Scene,
        *,
        replayer: Replayer | None = None,
        seconds: float = 120.0,
        enabled: bool = True,
        is_calibrated: bool = True,
    ) -> None:
        self.scene = scene
        self._replayer = replayer or replayer_for(UserCode())
        self._may_try = enabled
        self.enabled = enabled and scene.has_tensors
        self.deadline = time.monotonic() + seconds
        self.seconds_below = seconds / 4  # for errors below any bound: much to look at, mostly none
        if self.enabled:
            check_own_table()
        self.is_calibrated = is_calibrated
        self.n_replayed = 0
        self.n_left = 0  # suspects that the time did not suffice for
        self.left: set[int] = set()  # those of them that are judged without it
        self._quick: dict[tuple[int, int], Evidence] = {}  # by node and side, without noise

    @property
    def in_time(self) -> bool:
        return self.enabled and time.monotonic() < self.deadline

    def of(self, node: Node, threshold: float) -> tuple[Evidence, Evidence] | None:
        """Both sides' evidence; without the second run for noise where the first clears them."""
        if node.evidence is None:
            if node.is_random == "random":
                return None
            quick = self.quick(node, 0), self.quick(node, 1)
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

    def quick(self, node: Node, side: int) -> Evidence:
        """One side's evidence without a second run for noise, worked out once."""
        key = node.i, side
        if key not in self._quick:
            self._quick[key] = self.evidence(node, side, noise=False)
        return self._quick[key]

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

    def after_recomputation(self, node: Node, side: int) -> Iterator[Evidence]:
        """One side's evidence for a backward call, by each forward call that ran for it again."""
        backward = node.pair.pair[side]
        assert isinstance(backward, Call)
        for forwards in recomputed_forwards(self.scene, node):
            yield self._own_error(forwards[side], backward, noise=False)

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

    def matters(self, call: Call, other: Call | None, backward: Call | None = None) -> float | None:
        """How far a call's replay, or that of its backward, moves with the arguments of another;
        None: not to be told."""
        return self._replayer.matters(call, other, backward, seconds=self._seconds_for_one())

    def tried(self, call: Call, other: Call | None) -> float | None:
        """The same on numbers that are made up, where none were kept; for calls that move them."""
        return self.matters(call, other) if self._can_try() else None

    def moves(self, call: Call) -> bool:
        """Whether a call gives what it is given in another order; tried on numbers made up."""
        return self._can_try() and self._replayer.moves(call, seconds=self._seconds_for_one())

    def _can_try(self) -> bool:
        in_time = self._may_try and time.monotonic() < self.deadline
        return in_time and importlib.util.find_spec("torch") is not None

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


def score(node: Node, own: OwnError | None, sigmas: float = _SURE) -> float:
    """An own error with what a long sum may have taken off; a factor counts from so many standard
    errors on."""
    return 0.0 if own is None else _scaled(node, own, sigmas)


def _scaled(node: Node, own: OwnError, sigmas: float = _SURE) -> float:
    row = node.output(own.name)
    long = shrink_factor(node, row)
    found = own.size / long
    if _is_beside_coarse(node, own):  # what is healthy there is far more than what this is off by
        return found * own.unit / _coarsest(node)
    if abs(own.gain) > sigmas * own.gain_sigma:
        found = max(found, abs(own.gain) / math.sqrt(long))
    if own.row > _STANDS_OUT * own.rms:  # long sums are as long in all rows
        found = max(found, own.row / 1.5)
    return 4 * found if own.exact else found


def _is_beside_coarse(node: Node, own: OwnError) -> bool:
    """Whether the other side, or a switch, computes in a coarser arithmetic than this error is in
    units of."""
    return _coarsest(node) > own.unit > 0


def _coarsest(node: Node) -> float:
    return max(map(pair_roundoff, (*node.inputs, *node.outputs)), default=0.0)


def recomputed_forwards(scene: Scene, node: Node) -> Iterator[tuple[Call, Call]]:
    """Forward calls, of actual and expected, that a backward call may have been given.

    The same call run again; or, since recomputation stops early, the first with inputs that were
    made again.
    """
    forward = scene.forward_of(node)
    if forward is None or not forward.is_paired:
        return
    for twin in scene.recomputed(forward):
        ours, theirs, _ = twin.pair.pair
        if ours is not None and theirs is not None:
            yield ours, theirs
    sides = [_with_new_inputs(scene, forward, side) for side in (0, 1)]
    if sides[0] is not None and sides[1] is not None:
        yield sides[0], sides[1]


def _with_new_inputs(scene: Scene, forward: Node, side: int) -> Call | None:
    call = forward.pair.pair[side]
    if not isinstance(call, Call):
        return None
    new: dict[str, TensorRecord] = {}
    for row in forward.inputs:
        record = row.actual if side == 0 else row.expected
        at = scene.flow.producer.get((side, forward.i, row.name))
        if record is None or at is None:
            continue
        found = _made_again(scene, scene.nodes[at], record, side)
        if found is not None:
            kept = {key: getattr(found, key) for key in ("blob", "digest", "summary")}
            new[record.name] = msgspec.structs.replace(record, **kept)
    if not new:
        return None
    return msgspec.structs.replace(
        call,
        args=_replaced(call.args, new),
        kwargs=_replaced(call.kwargs, new),
        tensors=_replaced(call.tensors, new),
    )


def _made_again(
    scene: Scene, producer: Node, record: TensorRecord, side: int
) -> TensorRecord | None:
    for row in producer.outputs:
        made = row.actual if side == 0 else row.expected
        if made is None or content(made) != content(record):
            continue
        for twin in scene.recomputed(producer):
            for other in twin.outputs:
                again = other.actual if side == 0 else other.expected
                if other.name == row.name and again is not None:
                    return again
    return None


def _replaced(tree: Any, new: dict[str, TensorRecord]) -> Any:
    if isinstance(tree, TensorRecord):
        return new.get(tree.name, tree)
    if isinstance(tree, tuple):
        return tuple(_replaced(part, new) for part in tree)
    if isinstance(tree, list):
        return [_replaced(part, new) for part in tree]
    if isinstance(tree, dict):
        return {key: _replaced(part, new) for key, part in tree.items()}
    if isinstance(tree, Fields):
        return msgspec.structs.replace(tree, fields=_replaced(tree.fields, new))
    return tree


def hunt(scene: Scene, replays: Replays) -> None:
    """Accuse every call of the earliest step that differs by more than its inputs do, and has an
    error of its own."""
    for node in _strong_suspects(scene):
        if scene.culprits and node.call.step > scene.culprits[0][1].step:
            break  # later steps inherit
        if not replays.in_time:
            replays.n_left += 1
            replays.left.add(node.i)
            continue
        _try(scene, replays, node, faint=False)
    scene.culprits.sort(key=lambda item: item[0])


def hunt_all(scene: Scene, replays: Replays) -> None:
    """Accuse what is left: calls whose error is hidden by that of their inputs, then small errors,
    then errors too small for any bound, but that rounding does not make."""
    _hunt_hidden(scene, replays)
    if scene.culprits:
        return
    for node in _faint_suspects(scene):
        if scene.culprits and node.call.step > scene.culprits[0][1].step:
            break
        if not replays.in_time:
            replays.n_left += 1
            continue
        _try(scene, replays, node, faint=True)
    if not scene.culprits and replays.is_calibrated:
        hunt_below(scene, replays)
    scene.culprits.sort(key=lambda item: -item[1].own_error)


def _hunt_hidden(scene: Scene, replays: Replays) -> None:
    """Replay whatever differs: where inputs are far apart, an argmax between equal numbers say,
    results do not tell which call has an error of its own."""
    deadline = min(replays.deadline, time.monotonic() + replays.seconds_below)
    for node in _suspects(scene):
        if scene.culprits and node.call.step > min(c.step for _, c in scene.culprits):
            continue
        if time.monotonic() >= deadline:
            replays.n_left += 1
            continue
        _try(scene, replays, node, faint=False)
    scene.culprits.sort(key=lambda item: item[0])


def _try(scene: Scene, replays: Replays, node: Node, *, faint: bool) -> None:
    """Accuse a call, or the forward call that it follows from, where a replay shows its error."""
    found = _own(node, replays, faint)
    if found is None:
        return
    forward = scene.forward_of(node)
    if forward is not None:
        if replays.is_cleared_by_recomputation(node, FAINT if faint else ROUNDING):
            return
        if any(at == forward.i for at, _ in scene.culprits):
            return  # its forward call did it: what backward reuses of that is wrong too
        if earlier := _forward_did_it(forward, found, replays):
            scene.culprits.append((forward.i, earlier))
            return
    if found.kind != "nonfinite" or not heals(scene, (node.i, found)):
        scene.culprits.append((node.i, found))


def _strong_suspects(scene: Scene) -> Iterator[Node]:
    for node in scene.nodes:
        if node.container or not node.is_paired or node.same_out:
            continue
        if scene.is_only_overwritten(node):
            continue
        if node.d_out > ROUNDING / 2 and (node.r_out > 1.2 * node.r_in or node.r_in == math.inf):
            yield node


def _faint_suspects(scene: Scene) -> Iterator[Node]:
    for node in scene.nodes:
        if node.container or not node.is_paired or node.same_out or node.d_out < 2:
            continue
        if node.unit_out >= 2.0**-11:
            yield node


def _forward_did_it(node: Node, backward: Culprit, replays: Replays) -> Culprit | None:
    """The forward call, where its result is off too: what it saved for backward is wrong.

    A loss averages an error of thousands away until it is below what a long sum may have.
    """
    if backward.side is None or not node.is_paired:
        return None
    sides = tuple(replays.evidence(node, side, noise=True) for side in (0, 1))
    if any(evidence.problem for evidence in sides):
        return None
    mine, other = sides if backward.side == "actual" else sides[::-1]
    own, their = mine.worst, other.worst
    if own is None or their is None:
        return None
    size = max(own.size, abs(own.gain) if abs(own.gain) > 8 * own.gain_sigma else 0.0)
    if size <= max(FAINT, 3 * their.size):
        return None
    return _accuse(node, backward.side, own, own.size, backward.weak)


def _own(node: Node, replays: Replays, faint: bool) -> Culprit | None:
    """The call as a culprit, where a replay shows an error of its own."""
    threshold = FAINT if faint else ROUNDING
    sides = replays.of(node, threshold)
    if sides is None:
        return None
    a, e = (worst(node, evidence) for evidence in sides)
    score_a, score_e = score(node, a), score(node, e)
    ratio = 3.0 if faint else 2.0
    if a is not None and score_a > max(threshold, ratio * score(node, e, _LIKELY)):
        return _accuse(node, "actual", a, score_a, faint)
    if e is not None and score_e > max(threshold, ratio * score(node, a, _LIKELY)):
        return _accuse(node, "expected", e, score_e, faint)
    return None


def _accuse(node: Node, side: Side, own: OwnError, size: float, faint: bool) -> Culprit:
    row = node.output(own.name)
    other = "expected" if side == "actual" else "actual"
    what = "result" if node.call.direction == "forward" else "gradient"
    if math.isinf(own.rms) and row is not None and nonfinite_differs(row):
        return accuse_nonfinite(node, row, "replayed")
    if math.isinf(own.rms):
        text = "does not have the values that its inputs give"
    else:
        share = percent(own.relative)
        text = f"is off by {share} of its size, {number_text(size)} times what rounding explains"
    reason = (
        f"replayed in float64 on its own inputs, the {side} {what} {own.name} {text}; "
        f"the {other} side's is within rounding"
    )
    if faint and own.law is None:
        reason += "; how its kernel rounds is not calibrated, so only a loose bound was used"
    culprit = accuse(
        node,
        kind_by_direction(node),
        reason,
        size,
        row=row,
        side=side,
        proof="replayed",
        weak=faint,
    )
    culprit.metrics = {**culprit.metrics, **own.told()}
    return culprit


class _Broken(msgspec.Struct):
    """A call whose result breaks the law of its kernel, and the side that does."""

    node: Node
    side: int
    own: OwnError


def hunt_below(scene: Scene, replays: Replays) -> None:
    """Accuse calls of the earliest step that break the law of their kernel on one side only."""
    found: dict[int, _Broken] = {}
    deadline = min(replays.deadline, time.monotonic() + replays.seconds_below)
    step: float = math.inf
    for node in _suspects(scene):
        if node.call.step > step:
            continue  # later steps inherit
        if time.monotonic() >= deadline:
            break
        broken = _broken(scene, replays, node)
        if broken is not None:
            found[node.i] = broken
            step = min(step, node.call.step)
    for at, broken in sorted(found.items()):
        node = broken.node
        if node.call.step > step:
            continue
        forward = scene.forward_of(node)
        if forward is not None and forward.i in found:
            continue  # what it reuses of its forward call is wrong
        scene.culprits.append((at, _accuse_broken(broken)))


def _suspects(scene: Scene) -> Iterator[Node]:
    """Calls whose results differ, the most suspicious first: those that were given the same, then
    those whose results are further apart than what they were given."""
    nodes = [
        node
        for node in scene.nodes
        if node.is_paired
        and not (node.container or node.same_out or node.is_random)
        and not scene.is_only_overwritten(node)
        and any(row.metrics is not None for row in node.outputs)
    ]
    return iter(sorted(nodes, key=lambda node: (not node.same_in, -_growth(node), node.i)))


def _growth(node: Node) -> float:
    u = node.unit_out
    grown = node.r_out / (node.r_in + u) if node.r_in + u else math.inf
    return round(math.log2(grown)) if 0 < grown < math.inf else 0.0


def _broken(scene: Scene, replays: Replays, node: Node) -> _Broken | None:
    """The side whose result breaks its law, where the other side's does not."""
    sides = [replays.quick(node, side) for side in (0, 1)]
    if any(evidence.problem for evidence in sides):
        return None
    worst = [_worst_breach(node, evidence) for evidence in sides]
    guilty = [side for side in (0, 1) if worst[side] is not None]
    if len(guilty) != 1:
        return None  # where both do, the law is not that of these kernels
    side = guilty[0]
    own = worst[side]
    assert own is not None
    if scene.forward_of(node) is not None and _recomputed_is_right(replays, node, own, side):
        return None
    if own.law == "exact" or _is_plain(node, own, side) or _others_obey(scene, replays, node, side):
        return _Broken(node, side, own)
    return None


def _worst_breach(node: Node, evidence: Evidence) -> OwnError | None:
    broken = [
        (own.breach.size, own)
        for own in evidence.errors.values()
        if own.breach is not None and (own.law == "exact" or not _is_beside_coarse(node, own))
    ]
    return max(broken, key=lambda item: item[0], default=(0.0, None))[1]


def _is_plain(node: Node, own: OwnError, side: int) -> bool:
    """Whether a result is wrong by more than one way of rounding can be from another."""
    row = node.output(own.name)
    if own.systematic is None or row is None:
        return False
    record = (row.actual, row.expected)[side]
    return record is not None and own.systematic.amount > _PLAIN.get(record.dtype, math.inf)


def _others_obey(scene: Scene, replays: Replays, node: Node, side: int) -> bool:
    """Whether other calls of the same kernel on the same side obey the law that this one breaks.

    Where they do not, the kernels of that side are others than those the law was calibrated with.
    """
    kernel = _kernel(node, side)
    alike = (
        other
        for other in sorted(scene.nodes, key=lambda other: abs(other.i - node.i))
        if other is not node and not other.container and _kernel(other, side) == kernel
    )
    obey = break_it = 0
    for other in alike:
        evidence = replays.quick(other, side)
        judged = [own for own in evidence.errors.values() if own.law is not None]
        if evidence.problem or not judged:
            continue
        if any(own.breach is not None for own in judged):
            break_it += 1
        else:
            obey += 1
        if obey + break_it == _CONTROLS or not replays.in_time:
            break
    return obey > break_it


def _kernel(node: Node, side: int) -> object:
    """What two calls of the same kernel have in common."""
    call = node.pair.pair[side]
    if not isinstance(call, Call) or not node.is_paired:
        return None
    return call.op, call.direction, tuple(record.dtype for record in call.tensors)


def _recomputed_is_right(replays: Replays, node: Node, own: OwnError, side: int) -> bool:
    """Whether a backward call did right by what was recomputed for it, under checkpointing."""
    return any(
        not evidence.problem
        and (error := evidence.errors.get(own.name)) is not None
        and error.breach is None
        for evidence in replays.after_recomputation(node, side)
    )


def _accuse_broken(found: _Broken) -> Culprit:
    node, own = found.node, found.own
    assert own.breach is not None
    side, other = _SIDES[found.side], _SIDES[1 - found.side]
    what = "result" if node.call.direction == "forward" else "gradient"
    reason = (
        f"replayed in float64 on its own inputs, the {side} {what} {own.name} {own.breach.text}; "
        f"the {other} side's is as its kernel should give it"
    )
    row = node.output(own.name)
    kind = kind_by_direction(node)
    size = own.breach.size
    culprit = accuse(node, kind, reason, size, row=row, side=side, proof="replayed")
    culprit.metrics = {**culprit.metrics, **own.told()}
    return culprit
