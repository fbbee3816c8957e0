"""Goes through the calls in execution order and asks of each what nothing before it explains."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from tensorprobe.comparing import arguments, moments
from tensorprobe.comparing.align import content
from tensorprobe.comparing.communicated import communicated, reduced_otherwise
from tensorprobe.comparing.culprit import (
    Found,
    accuse,
    accuse_nonfinite,
    digest_reason,
    has_steps,
    heals,
    kind_by_direction,
    magnitude,
    proof_of,
)
from tensorprobe.comparing.flat_weights import FlatWeights
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.moves import Moves
from tensorprobe.comparing.origins import (
    Boundaries,
    gathered,
    reordered,
    wired_otherwise,
    written_at_the_end,
    written_by_one_side,
    written_through_view,
)
from tensorprobe.comparing.rounding import (
    ROUNDING,
    distance,
    is_moved,
    number_text,
    pair_roundoff,
    rms_size,
    same_bits,
)
from tensorprobe.comparing.scene import (
    AMPLIFIES,
    APART,
    FAINT,
    Node,
    Scene,
    drew_otherwise,
    exceeds,
    has_other_shape,
    has_other_shapes,
    label_of,
    leaf_differs,
    nonfinite_counts,
    nonfinite_differs,
    relative,
    shrink_factor,
    summed_size,
    unit_growth,
    wrong_buffer,
)
from tensorprobe.comparing.suspects import Replays, score, worst
from tensorprobe.comparing.verdict import Culprit, CulpritKind
from tensorprobe.records import Call, digests_tell
from tensorprobe.replay.kinds import api_of, kind_of

# By which optimizers step, where other tools' dumps do not say what is inside of one.
_STEPS = ("_fused_adam", "_fused_adamw", "_fused_adagrad", "addcdiv")
_CUTS = ("chunk", "split", "tensor_split", "split_with_sizes", "unbind")


class Walk:
    """One walk through the calls of a rank, after the hunt has accused what a replay shows."""

    def __init__(self, scene: Scene, replays: Replays, taint: Taint) -> None:
        self.scene = scene
        self.replays = replays
        self.taint = taint
        self._flat = FlatWeights(scene)
        self._boundaries = Boundaries(scene, replays, self._flat)
        self.hazards: list[tuple[int, Culprit]] = []  # where NaN is born, though computed right
        self.cuts: list[tuple[int, Culprit]] = []  # where work is cut into other pieces
        self._moves = Moves(scene, replays)
        self._random_bit = 0  # of the first call that drew other numbers

    def run(self) -> None:
        """Accuse what is found; every call knows afterwards which culprits reached it."""
        scene = self.scene
        self.taint.begin()
        # Later steps inherit from the first one that has a culprit.
        first_step = min((culprit.step for _, culprit in scene.culprits), default=None)
        for node in scene.nodes:
            node.taint |= self.taint.inherited(node)
            if (
                node.is_paired
                and not self.taint.is_culprit(node)
                and (first_step is None or node.call.step <= first_step)
                and not (self.cuts and has_other_shapes(node))
                and not scene.is_only_overwritten(node)
            ):
                found = self._leaf(node) or self._appeared(node)
                if found is None and (not node.container or self._is_unit(node)):
                    found = self._cause(node)
                if found is not None:
                    scene.culprits.append(found)
                    step = found[1].step
                    first_step = step if first_step is None else min(step, first_step)
                    self.taint.add(found[0])
                    node.taint |= scene.nodes[found[0]].taint
            self.taint.leave(node)
            self._flat.leave(node)
            self._boundaries.leave(node)
            self._moves.leave(node)
        if not scene.culprits and (found := self._moves.unhealed() or written_at_the_end(scene)):
            scene.culprits.append(found)
            self.taint.add(found[0])

    def _is_unit(self, node: Node) -> bool:
        """Whether an optimizer is judged as a whole: the two sides step in other ways, from the
        same parameters, gradients and state."""
        if not node.call.name.startswith("Optimizer.") or not node.same_in or node.d_in:
            return False
        return not any(self.scene.nodes[at].is_paired for at in self.scene.inside(node))

    def _appeared(self, node: Node) -> Found:
        """An input that differs, that no recorded call made, and that nothing before explains."""
        if node.taint:
            return None
        if found := reduced_otherwise(self.scene, node):
            return found
        found = self._boundaries.look_at(node)
        if found is not None and heals(self.scene, found, node):
            found = None
        found = reordered(self.scene, node) or found
        if found is None:
            return None
        row = next((row for row in node.inputs if row.name == found[1].tensor), None)
        for record in (row.actual, row.expected) if row is not None else ():
            if record is not None and (key := content(record)) is not None:
                self.taint.bad_contents[key] = found[0]
        return found

    # Tensors that no call made

    def _leaf(self, node: Node) -> Found:
        """A tensor that no call made, and that differs: the data, or a parameter."""
        scene = self.scene
        if node.call.direction == "backward":
            return None
        for row in node.inputs:
            a, e = row.actual, row.expected
            if a is None or e is None or row.role == "parameter_grad" or not leaf_differs(row):
                continue
            if row.role == "input" and node.call.step in self.taint.in_backward:
                continue  # a gradient that the engine has added up
            if scene.flow.producers(node.i, row.name) != (None, None):
                continue
            keys = [key for key in (content(a), content(e)) if key is not None]
            if any(key in self.taint.bad_contents for key in keys):
                continue
            if not (scene.sees_all or self._is_known_leaf(row, keys)):
                continue  # it may be a result of calls that were not recorded
            is_later = node.call.step != scene.first_step
            if is_later and row.role != "input":
                continue
            if (is_later or row.role == "parameter") and self._boundaries.has_seen(node, row):
                continue  # stepped since, in the closure of an optimizer, say
            if not self._changes_something(node) or gathered(scene, node, row):
                continue
            if row.role == "input" and (origin := written_through_view(scene, node, row)):
                node.taint |= origin.taint
                continue
            if row.role == "input" and (written := written_by_one_side(scene, node, row)):
                return written
            if is_later and (origin := self._flat.behind(node, row)):
                node.taint |= origin.taint
                continue
            found = node.i, self._leaf_culprit(node, row)
            if heals(scene, found):
                continue
            self.taint.bad_contents |= dict.fromkeys(keys, node.i)
            return found
        return None

    def _is_known_leaf(self, row: TensorPair, keys: list[Hashable]) -> bool:
        """Whether a tensor without a producer is a parameter, or tokens or a mask."""
        if row.role != "input" or any(key in self.scene.parameter_names for key in keys):
            return True
        return pair_roundoff(row) == 0

    def _leaf_culprit(self, node: Node, row: TensorPair) -> Culprit:
        a, e = row.actual, row.expected
        assert a is not None
        assert e is not None
        names = self.scene.parameter_names
        name = names.get(content(a)) or names.get(content(e))
        is_parameter = row.role in ("parameter", "buffer", "state") or name is not None
        if is_parameter:
            word = {"buffer": "buffer", "state": "the optimizer's state"}.get(row.role, "parameter")
            label = name or label_of(node.call, row)
            what = f"{word} {label} differs, and no recorded call made it"
        else:
            what = (
                f"{row.name}, which no recorded call made, differs: the runs were given other data"
            )
        if a.shape != e.shape:
            what += f" (shapes {list(a.shape)} and {list(e.shape)})"
        kind: CulpritKind = "parameter" if is_parameter else "input"
        d = distance(row)
        return accuse(node, kind, what, d, row=row, proof=proof_of(row), inherited=0.0)

    def _changes_something(self, node: Node) -> bool:
        nodes = self.scene.nodes
        return any(
            not nodes[at].same_out or nodes[at].d_out > 0
            for at in range(node.i, len(nodes))
            if not nodes[at].container
        )

    # Calls

    def _cause(self, node: Node) -> Found:
        """Why this call's outputs differ, when nothing before it explains it."""
        if node.same_out and node.d_out == 0:
            return None
        if node.heard is not None:
            return self._called_otherwise(node) or communicated(self.scene, node)
        ways = (self._born_nonfinite, self._called_otherwise, self._drawn, self._wired_otherwise)
        for way in ways:
            found = way(node)
            if found is None:
                continue
            if heals(self.scene, found, node):
                return None
            if _cuts_otherwise(node):
                self.cuts.append(found)
                return None
            return found
        own = self._unreplayed(node)
        if own is None:
            return None
        moved = self._moves.behind(node) if own.proof == "statistics" else None
        return moved or (node.i, own)

    def _wired_otherwise(self, node: Node) -> Found:
        return wired_otherwise(self.scene, self.replays, node)

    def _born_nonfinite(self, node: Node) -> Found:
        if node.taint or any(nonfinite_differs(row) for row in node.inputs):
            return None
        forward = self.scene.forward_of(node)
        if forward is not None and any(
            nonfinite_differs(row) for row in (*forward.inputs, *forward.outputs)
        ):
            return None
        for row in node.outputs:
            if not nonfinite_differs(row):
                continue
            if all(sum(nonfinite_counts(record)) for record in (row.actual, row.expected)):
                continue  # both make them, of finite numbers: rounding decides where
            culprit = accuse_nonfinite(node, row, proof_of(row))
            if self._follows_from_inputs(node):
                if not heals(self.scene, (node.i, culprit)):
                    self.hazards.append((node.i, culprit))
                continue
            return node.i, culprit
        return None

    def _follows_from_inputs(self, node: Node) -> bool:
        """Whether both sides computed what their inputs give: a division by what is left of 0."""
        sides = self.replays.of(node, ROUNDING) if self.replays.enabled else None
        if sides is None:
            return False
        return all(score(node, worst(node, evidence)) <= ROUNDING for evidence in sides)

    def _drawn(self, node: Node) -> Found:
        """A call that draws random numbers, and has drawn others."""
        kind = node.is_random
        if kind is None or node.differences or node.call.direction == "backward":
            return None
        if not drew_otherwise(node, kind):
            return None
        if self._random_bit:
            node.taint |= self._random_bit
            return None
        self._random_bit = 1 << len(self.scene.culprits)
        what = "dropout mask" if kind == "dropout" else "random numbers"
        reason = (
            f"random: the two runs drew different {what}. Not a fault of this call: give both "
            f"runs the same random state (tp.seed_all), or switch the randomness off"
        )
        row = max(node.outputs, key=distance, default=None)
        return node.i, accuse(node, "output", reason, node.d_out, row=row, cause="seed")

    def _called_otherwise(self, node: Node) -> Found:
        """Arguments that differ, and by which the values do."""
        given = self._given_by(node)
        if given is None:
            return None
        differences = given.differences
        if not differences:
            differences = self._left_to_default(node, given)
        elif not self._arguments_matter(node, given):
            return None
        if not differences:
            return None
        if node.taint and all("." in text.partition(": ")[2] for text in differences):
            return None  # floats, downstream of a culprit: read off a tensor
        reason = f"called with other arguments: {'; '.join(differences[:4])}"
        row = max(node.outputs, key=distance, default=None)
        proof = "replayed" if node.evidence else "compared"
        return node.i, accuse(node, "argument", reason, node.d_out, row=row, proof=proof)

    def _given_by(self, node: Node) -> Node | None:
        """The call that has the arguments: of a backward call its forward one, which has been asked
        already whether they change its results."""
        if node.call.direction == "forward" or node.differences:
            return node
        forward = self.scene.forward_of(node)
        if forward is None or not forward.is_paired or forward.container or forward.is_random:
            return None
        if self.taint.is_culprit(forward) or (node.taint and not self.replays.enabled):
            return None
        return forward

    def _left_to_default(self, node: Node, given: Node) -> list[str]:
        """Arguments that one side gives and the other leaves out, where that makes a difference."""
        a, e = given.pair.pair.actual, given.pair.pair.expected
        if a is None or e is None or node.d_out <= FAINT or node.is_random is not None:
            return []
        if node.call.direction != "forward" and given is node:
            return []
        absent = arguments.absences(a, e)
        if not absent:
            return []
        if self.replays.in_time:
            found = self.replays.matters(a, arguments.transplant(a, given.pair), _back(node))
            if found is not None:
                return absent if found > FAINT else []
        return absent if not node.taint and exceeds(node) else []

    def _arguments_matter(self, node: Node, given: Node) -> bool:
        a, e = given.pair.pair.actual, given.pair.pair.expected
        assert a is not None
        assert e is not None
        if any(arguments.settings(a, e)):  # each side did what its own say: a replay tells nothing
            return not node.taint and exceeds(node)
        is_known = node.call.direction == "forward" or given is not node
        if self.replays.in_time and is_known and node.is_random is None:
            found = self.replays.matters(a, arguments.graft(a, e), _back(node))
            if found is not None:
                return found > FAINT or (not node.taint and wrong_buffer(node) is not None)
        if node.taint:
            return False
        return exceeds(node)

    def _unreplayed(self, node: Node) -> Culprit | None:
        """A call that cannot be replayed, or whose tensors were not kept."""
        if node.taint or not node.outputs or _draws_only(node):
            return None
        if (row := wrong_buffer(node)) is not None:
            d = distance(row)
            reason = f"its inputs agree, and what it wrote to {row.name} differs {magnitude(d)}"
            return accuse(node, "output", reason, d, row=row, proof=proof_of(row))
        if node.d_out <= FAINT and not node.same_in:
            return self._drifted(node)
        if node.evidence is not None and not any(found.problem for found in node.evidence):
            scores = [score(node, worst(node, found)) for found in node.evidence]
            if min(scores) <= ROUNDING:
                return None  # acquitted
        elif (
            self.replays.enabled
            and node.evidence is None
            and node.i not in self.replays.left
            and _is_replayable(node)
        ):
            return None  # it was no suspect, or was acquitted
        if any("the inputs are not visible" in note for note in node.call.notes):
            return None
        row = self.scene.furthest(node)
        assert row is not None
        kind = kind_by_direction(node)
        if node.same_in and self._bits_tell(node, row):
            reason = digest_reason(row)
            return accuse(node, kind, reason, node.d_out, row=row, proof="digests")
        if node.same_in and self._statistics_tell(node, row):
            reason = (
                f"its inputs have equal statistics, and norm or mean of {row.name} differs by more "
                "than another order of its sums makes"
            )
            return accuse(node, kind, reason, node.d_out, row=row, proof="statistics")
        if not self._exceeds(node, row):
            return self._drifted(node) or self._rejoined(node, row)
        what = "result" if node.call.direction == "forward" else "gradient"
        inputs = "are equal" if node.same_in and node.d_in == 0 else "agree"
        if proof_of(row) == "statistics":
            inputs = "have equal statistics" if inputs == "are equal" else inputs
        reason = f"its inputs {inputs} and its {what} {row.name} differs {magnitude(node.d_out)}"
        problem = next((e.problem for e in node.evidence or () if e.problem), None)
        if problem:
            reason += f"; not replayed: {problem}"
        reason += _dtypes(row)
        return accuse(node, kind, reason, node.d_out, row=row, proof=proof_of(row))

    def _exceeds(self, node: Node, row: TensorPair) -> bool:
        if not exceeds(node, shrink_factor(node, row)):
            return False
        if self.scene.distance(node, row, summed_size(node, row)) <= ROUNDING:
            return False  # what a sum that cancels has left
        if self._is_part(node, row):
            return False
        # Adam divides noise by noise: only a replay can tell
        is_step = node.i in self.scene.in_optimizer or api_of(node.call.op) in _STEPS
        return not (is_step and (not node.same_in or node.d_in))

    def _is_part(self, node: Node, row: TensorPair) -> bool:
        """Whether the difference is one that what was given has as a whole: a small piece of it,
        such as a bias of gathered weights, is further apart for its own size."""
        if node.op_kind != "exact" or node.same_in or node.call.direction != "forward":
            return False
        given = max((_whole_difference(self.scene, node, each) for each in node.inputs), default=0)
        return _whole_difference(self.scene, node, row) <= AMPLIFIES * given

    def _drifted(self, node: Node) -> Culprit | None:
        """A call whose result is within the loose bound for single numbers, but whose norm or mean
        is not within that of many."""
        found = moments.drifted(self.scene, node)
        if found is None:
            return None
        row, size = found
        reason = (
            f"its inputs agree, and norm or mean of {row.name} is moved by {number_text(size)} "
            f"roundings, more than rounding moves those: seen in statistics only{_dtypes(row)}"
        )
        kind = kind_by_direction(node)
        return accuse(node, kind, reason, size, row=row, proof=proof_of(row), weak=True)

    def _rejoined(self, node: Node, row: TensorPair) -> Culprit | None:
        """A call that takes the same part of tensors of other shapes, of all tokens and of the last
        with a cache: what it takes must agree, or some call before it was wrong."""
        if row.metrics is not None or node.op_kind != "exact" or node.call.direction == "backward":
            return None
        is_given_other = any(has_other_shape(given) for given in node.inputs)
        if not is_given_other or any(map(has_other_shape, node.outputs)) or has_steps(self.scene):
            return None
        if not ROUNDING * node.unit_out * unit_growth(node.i) < node.r_out < APART:
            return None
        reason = (
            f"{row.name}, a part that both sides take of tensors of other shapes, differs "
            f"{magnitude(node.d_out)}; what came before could not be compared, for its shapes"
        )
        return accuse(node, "boundary", reason, node.d_out, row=row, proof=proof_of(row))

    def _bits_tell(self, node: Node, row: TensorPair) -> bool:
        """Whether equal inputs and other bits are proof enough without the content.

        They are when the call only moves numbers, when the same numbers are in other places, and
        when the runs have so far given the same bits wherever sums were made: then rounding is not
        what they differ by.
        """
        a, e = row.actual, row.expected
        if a is None or e is None or not digests_tell(a, e) or a.dtype != e.dtype:
            return False
        if a.digest == e.digest or row.metrics is not None:
            return False
        if is_moved(row):
            return True
        if node.call.direction == "forward" and kind_of(node.call) in ("exact", "conversion"):
            return True
        return node.d_out > FAINT and self._reproducible_before(node)

    def _statistics_tell(self, node: Node, row: TensorPair) -> bool:
        """The same where only statistics were kept."""
        a, e = row.actual, row.expected
        if a is None or e is None or a.dtype != e.dtype or node.d_in:
            return False
        if row.metrics is not None or digests_tell(a, e):
            return False
        if moments.is_cast_otherwise(node, row):
            return True
        if moments.is_systematic(self.scene, node, row):
            return True
        return moments.tells(node, row) and self._reproducible_before(node)

    def _reproducible_before(self, node: Node) -> bool:
        """Whether sums have come out bit for bit alike so far: of this op, or of three others."""
        if not self.scene.same_settings:
            return False
        alike: set[str] = set()
        for earlier in self.scene.nodes[: node.i]:
            if earlier.container or not earlier.is_paired or not _makes_sums(earlier):
                continue
            if earlier.same_in and not earlier.same_out:
                return False
            if earlier.same_in:
                alike.add(earlier.call.op)
        return node.call.op in alike or len(alike) >= 3


def _whole_difference(scene: Scene, node: Node, row: TensorPair) -> float:
    """The norm of the difference of two tensors, about."""
    if row.expected is None:
        return 0.0
    apart = relative(row, scene.distance(node, row))
    return apart * rms_size(row.expected) * math.sqrt(row.expected.numel)


def _dtypes(row: TensorPair) -> str:
    a, e = row.actual, row.expected
    if a is None or e is None or a.dtype == e.dtype:
        return ""
    return f" ({a.dtype} here, {e.dtype} expected)"


def _draws_only(node: Node) -> bool:
    """Whether a call gives random numbers and nothing else; attention with dropout computes too."""
    return node.is_random == "random" and api_of(node.call.op) != "scaled_dot_product_attention"


def _makes_sums(node: Node) -> bool:
    """Whether a call adds numbers up; a module with weights does, as far as one can see."""
    is_module = node.op_kind is None and any(row.role == "parameter" for row in node.inputs)
    return node.makes_sums or is_module


def _cuts_otherwise(node: Node) -> bool:
    """Whether a call cuts the same tensor into other pieces: `chunk(2)` and `chunk(4)`."""
    return api_of(node.call.op) in _CUTS and node.same_in and has_other_shapes(node)


def _back(node: Node) -> Call | None:
    """The call, if it is a backward one, as the actual side has it."""
    return node.pair.pair.actual if node.call.direction == "backward" else None


def _is_replayable(node: Node) -> bool:
    is_kept = any(row.metrics is not None for row in node.outputs)
    return is_kept and node.is_random != "random"


class Taint:
    """The bits that calls take over from what they were given, in execution order."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.bad_contents: dict[object, int] = {}  # leaves that differ -> where they are blamed
        self.in_backward: set[int] = set()  # steps whose backward has begun
        self._gradients = 0
        self._step, self._unseen = -1, 0
        self._own: dict[int, int] = {}

    def begin(self) -> None:
        """Start from the first call, with the culprits known by now."""
        self._own = {at: bit for bit, (at, _) in enumerate(self.scene.culprits)}
        self._gradients = 0
        self._step, self._unseen = -1, 0
        self.in_backward.clear()

    def is_culprit(self, node: Node) -> bool:
        """Whether a call has been accused."""
        return node.i in self._own

    def add(self, at: int) -> None:
        """The culprit that was added last is at this node: it and what follows is tainted."""
        bit = len(self.scene.culprits) - 1
        self._own.setdefault(at, bit)
        self.scene.nodes[at].taint |= 1 << bit

    def inherited(self, node: Node) -> int:
        """The bits of what a call was given, and its own."""
        scene, taint = self.scene, 0
        for row in node.inputs:
            producers = scene.flow.producers(node.i, row.name)
            for at in producers:
                if at is not None:
                    taint |= scene.nodes[at].taint
            if self.bad_contents:
                for record in (row.actual, row.expected):
                    if record is not None:
                        taint |= self._bit_at(self.bad_contents.get(content(record)))
            if self._gradients and producers == (None, None) and not same_bits(row):
                # several gradients that the engine has added up, or a gradient that was kept
                # or that the optimizer is given
                taint |= self._gradients
        if self._unseen and node.call.step == self._step and not node.same_in:
            taint |= self._unseen  # by calls that were not recorded
        forward = scene.forward_of(node)
        if forward is not None:
            taint |= forward.taint
            for twin in scene.recomputed(forward):
                if twin.i < node.i:
                    taint |= twin.taint
        return taint | self._bit_at(node.i)

    def bit_of(self, at: int) -> int:
        """The number of the bit of a call that has one of its own."""
        return self._own[at]

    def _bit_at(self, at: int | None) -> int:
        bit = None if at is None else self._own.get(at)
        return 0 if bit is None else 1 << bit

    def leave(self, node: Node) -> None:
        """Go on from a call whose bits are settled."""
        if not self.scene.sees_all:
            if node.call.step != self._step:
                self._step, self._unseen = node.call.step, 0
            self._unseen |= node.taint
        if node.call.direction == "backward":
            self._gradients |= node.taint
            self.in_backward.add(node.call.step)

    def spread(self, more: Sequence[int] = ()) -> None:
        """Work out again which calls each culprit has reached; and each of some more calls, by the
        bits after theirs."""
        self.begin()
        last = len(self.scene.culprits)
        for bit, at in enumerate(more, start=last):
            self._own.setdefault(at, bit)
        for node in self.scene.nodes:
            node.taint = self.inherited(node)
            self.leave(node)
