"""Names the calls that caused a difference: own error against inherited, one cause one culprit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tensorprobe.compare import arguments
from tensorprobe.compare.dataflow import (
    Dataflow,
    content,
    find_containers,
    is_constant,
    is_written,
)
from tensorprobe.compare.evidence import Evidence, OwnError, matters, own_error
from tensorprobe.compare.judge import (
    ROUNDING,
    distance,
    moved_values,
    number_text,
    pair_roundoff,
    reduction,
    rms_size,
    same_bits,
)
from tensorprobe.compare.measure import CallPair, TensorPair
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.kinds import kind_of

CulpritKind = Literal[
    "output", "gradient", "argument", "parameter", "input", "structure", "nonfinite"
]
Side = Literal["actual", "expected"]

# Between this and ROUNDING an own error is named only in 16-bit and coarser dtypes, and only when
# nothing worse is found: noise of 1-2 ULP on every kernel of seven models stayed below 4.5.
FAINT = 4.8
# What may come out of a call that is not replayed, per unit that went in: it may amplify.
_AMPLIFIES = 4.0
# Where the random numbers of a call began: no number of the program's.
_RANDOM_STATE = "buffers.rng_state"


class Culprit(msgspec.Struct, kw_only=True):
    """A call that caused a difference, in the form of verdict.json."""

    name: str
    kind: CulpritKind
    direction: str
    step: int
    rank: int
    module: str
    op: str
    stack: tuple[str, ...]
    reason: str
    own_error: float
    inherited_error: float
    metrics: dict[str, Any] = {}
    affected: int = 0
    side: Side | None = None
    proof: str = "compared"  # replayed | compared | statistics | digests
    tensor: str | None = None
    weak: bool = False


class _Node(msgspec.Struct):
    """A pair of calls while it is being judged."""

    i: int
    pair: CallPair
    container: bool
    inputs: list[TensorPair]
    outputs: list[TensorPair]
    d_in: float = 0.0  # the largest distance of an input, in roundings of its dtype
    d_out: float = 0.0
    r_in: float = 0.0  # the same, relative to its size: comparable between dtypes
    r_out: float = 0.0
    taint: int = 0  # one bit a culprit
    same_in: bool = True
    same_out: bool = True
    differences: list[str] = []
    evidence: tuple[Evidence, Evidence] | None = None

    @property
    def call(self) -> Call:
        return self.pair.call


class Findings(msgspec.Struct):
    """What blame has found in one rank."""

    culprits: list[Culprit]
    diverged: dict[int, int] = {}  # calls beyond rounding, by step
    structure: list[str] = []  # what is different but changed no values
    n_replayed: int = 0
    n_left: int = 0  # suspects that the time did not suffice for
    first_bits: str | None = None  # the first call whose bits differ, where that is all


class Blame:
    """Judges the paired calls of one rank, in execution order.

    `floors` gives, for a tensor, how far repeated runs of the expected side are apart.
    """

    def __init__(
        self,
        pairs: Sequence[CallPair],
        *,
        references: Mapping[str, Callable[..., Any]] | None = None,
        seconds: float = 120.0,
        floors: Mapping[str, float] | None = None,
        replay: bool = True,
    ) -> None:
        self.references = references
        self.floors = floors or {}
        containers = find_containers(pairs)
        self.flow = Dataflow(pairs, containers)
        self.nodes = [
            self._node(i, p, c) for i, (p, c) in enumerate(zip(pairs, containers, strict=True))
        ]
        for node in self.nodes:
            self._inherit(node)
        self.culprits: list[tuple[int, Culprit]] = []  # with the node each is at
        self.deadline = time.monotonic() + seconds
        self.replay = replay and self._has_tensors()
        self.n_replayed = 0
        self.n_left = 0
        self.bad_contents: dict[object, int] = {}
        self.first_step = min((node.call.step for node in self.nodes), default=0)
        self.parameter_names = self._parameter_names()
        # at L0 and L2 much of what makes a tensor goes unseen
        self.sees_all = any(
            node.call.name.startswith(("Functional.", "Torch.", "Tensor.")) for node in self.nodes
        )
        self.random_seen = False
        self._random_bit = 0
        self.in_optimizer = {
            at
            for node in self.nodes
            if node.call.name.startswith("Optimizer.")
            for at in (node.i, *self._inside(node))
        }
        self.hazards: list[tuple[int, Culprit]] = []  # where NaN is born, though computed right

    # Distances

    def _node(self, i: int, pair: CallPair, container: bool) -> _Node:
        rows = [row for row in pair.tensors if not row.name.endswith(_RANDOM_STATE)]
        inputs = [row for row in rows if _is_input(row)]
        outputs = [row for row in rows if not _is_input(row)]
        if not pair.call.name.startswith("Module.") and kind_of(pair.call) == "uninitialised":
            outputs = []  # torch.empty: whatever was there
        node = _Node(i, pair, container, inputs, outputs)
        floor = _cancelled_size(node)
        for row in inputs:
            d = self.distance(node, row)
            node.d_in, node.r_in = max(node.d_in, d), max(node.r_in, _relative(row, d))
        for row in outputs:
            d = self.distance(node, row, floor if floor else _summed_size(node, row))
            node.d_out, node.r_out = max(node.d_out, d), max(node.r_out, _relative(row, d))
        node.same_in = all(same_bits(row) is not False for row in inputs)
        node.same_out = all(same_bits(row) is not False for row in outputs)
        if pair.pair.actual is not None and pair.pair.expected is not None:
            node.differences = arguments.differences(pair.pair.actual, pair.pair.expected)
        return node

    def distance(self, node: _Node, row: TensorPair, floor: float = 0.0) -> float:
        found = distance(row, floor)
        if self.floors and row.expected is not None:
            noise = self.floors.get(_place(node.call, row.expected), 0.0)
            if found <= 3 * noise:
                return min(found, 1.0)
        return found

    def _inherit(self, node: _Node) -> None:
        """A backward call depends on what its forward call was given and made of it."""
        at = self.flow.forward.get(node.i)
        if at is not None:
            forward = self.nodes[at]
            node.d_in = max(node.d_in, forward.d_in, forward.d_out)
            node.r_in = max(node.r_in, forward.r_in, forward.r_out)
            node.same_in = node.same_in and forward.same_in and forward.same_out

    def _has_tensors(self) -> bool:
        return any(row.metrics is not None for node in self.nodes for row in node.pair.tensors)

    def _parameter_names(self) -> dict[object, str]:
        names: dict[object, str] = {}
        for node in self.nodes:
            call = node.call
            for row in node.inputs:
                if row.role not in ("parameter", "buffer"):
                    continue
                label = row.name.partition(".")[2]
                full = label if call.name.startswith("Optimizer.") else f"{call.module}.{label}"
                for record in (row.actual, row.expected):
                    if record is not None and (key := content(record)) is not None:
                        names.setdefault(key, full.strip("."))
        return names

    # The whole story

    def run(self) -> Findings:
        """All culprits, the earliest first."""
        if self.replay:
            self._hunt(self._strong_suspects(), faint=False)
        self._walk()
        if self.replay and not self.culprits:
            self._hunt(self._faint_suspects(), faint=True)
            if self.culprits:
                self.culprits.sort(key=lambda item: -item[1].own_error)
                self._spread()
        if not self.culprits and self.hazards:
            self.culprits.append(self.hazards[0])
            self._spread()
        self._settle_containers()
        if not self.culprits and not self.sees_all:
            self._blame_containers()
        return self._findings()

    def _findings(self) -> Findings:
        culprits = []
        diverged: dict[int, int] = {}
        for node in self.nodes:
            if node.taint and node.d_out > ROUNDING and not node.container:
                diverged[node.call.step] = diverged.get(node.call.step, 0) + 1
        for bit, (at, culprit) in enumerate(self.culprits):
            culprit.affected = sum(
                1
                for node in self.nodes
                if node.taint >> bit & 1
                and node.i != at
                and not node.container
                and node.d_out > ROUNDING
            )
            culprits.append((at, culprit))
        first_step = min((culprit.step for _, culprit in culprits), default=0)
        culprits = [item for item in culprits if item[1].step == first_step]
        culprits.sort(key=lambda item: (item[1].weak, 0 if item[1].weak else item[0]))
        first = next(
            (n for n in self.nodes if not n.container and n.same_in and not n.same_out), None
        )
        return Findings(
            [culprit for _, culprit in culprits],
            diverged,
            self._harmless(),
            self.n_replayed,
            self.n_left,
            first.call.name if first else None,
        )

    def _harmless(self) -> list[str]:
        blamed = {at for at, _ in self.culprits}
        return [
            f"{node.call.name}: {'; '.join(node.differences)}"
            for node in self.nodes
            if node.differences and node.i not in blamed
        ]

    # Own errors, by replay

    def _strong_suspects(self) -> Iterator[_Node]:
        for node in self.nodes:
            if node.container or not node.pair.is_paired or node.same_out:
                continue
            if node.d_out > ROUNDING / 2 and (
                node.r_out > 1.2 * node.r_in or node.r_in == math.inf
            ):
                yield node

    def _faint_suspects(self) -> Iterator[_Node]:
        for node in self.nodes:
            if node.container or not node.pair.is_paired or node.same_out or node.d_out < 2:
                continue
            if max((pair_roundoff(row) for row in node.outputs), default=0.0) >= 2.0**-11:
                yield node

    def _hunt(self, suspects: Iterator[_Node], faint: bool) -> None:
        for node in suspects:
            if self.culprits and node.call.step > self.culprits[0][1].step:
                break  # later steps inherit
            if time.monotonic() > self.deadline:
                self.n_left += 1
                continue
            found = self._own(node, faint)
            if found is None:
                continue
            at = self.flow.forward.get(node.i)
            if at is not None:
                if any(where == at for where, _ in self.culprits):
                    continue  # its forward call did it: what backward reuses of that is wrong too
                if forward := self._forward_did_it(self.nodes[at], found):
                    self.culprits.append((at, forward))
                    continue
            self.culprits.append((node.i, found))
        self.culprits.sort(key=lambda item: item[0])

    def _forward_did_it(self, node: _Node, backward: Culprit) -> Culprit | None:
        """The forward call, where its result is off too: what it saved for backward is wrong.

        A loss averages an error of thousands away until it is below what a long sum may have.
        """
        if backward.side is None or not node.pair.is_paired:
            return None
        sides = tuple(self._evidence(node, side, noise=True) for side in (0, 1))
        if any(evidence.problem for evidence in sides):
            return None
        mine, other = sides if backward.side == "actual" else sides[::-1]
        own, their = mine.worst, other.worst
        if own is None or their is None:
            return None
        size = max(own.size, abs(own.gain) if abs(own.gain) > 8 * own.gain_sigma else 0.0)
        if size <= max(FAINT, 3 * their.size):
            return None
        return self._own_culprit(node, backward.side, own, own.size, backward.weak)

    def _own(self, node: _Node, faint: bool) -> Culprit | None:
        """The call as a culprit, where a replay shows an error of its own."""
        threshold = FAINT if faint else ROUNDING
        sides = self._replayed(node, threshold)
        if sides is None:
            return None
        a, e = (_worst(node, evidence) for evidence in sides)
        score_a, score_e = (_score(node, found) for found in (a, e))
        ratio = 3.0 if faint else 2.0
        side: Side
        if score_a > threshold and score_a > ratio * score_e:
            side, own, score = "actual", a, score_a
        elif score_e > threshold and score_e > ratio * score_a:
            side, own, score = "expected", e, score_e
        else:
            return None
        assert own is not None
        return self._own_culprit(node, side, own, score, faint)

    def _replayed(self, node: _Node, threshold: float) -> tuple[Evidence, Evidence] | None:
        """Both sides' evidence; without the second run for noise where the first clears them."""
        if node.evidence is None:
            if _is_random(node) == "random":
                return None
            quick = tuple(self._evidence(node, side, noise=False) for side in (0, 1))
            self.n_replayed += 1
            if any(evidence.problem for evidence in quick):
                node.evidence = (quick[0], quick[1])
                return None
            if all(_score(node, _worst(node, evidence)) <= threshold for evidence in quick):
                if threshold > FAINT:
                    return quick[0], quick[1]
                node.evidence = (quick[0], quick[1])
                return node.evidence
            full = tuple(self._evidence(node, side, noise=True) for side in (0, 1))
            node.evidence = (full[0], full[1])
        if any(evidence.problem for evidence in node.evidence):
            return None
        return node.evidence

    def _evidence(self, node: _Node, side: int, noise: bool) -> Evidence:
        call = node.pair.pair[side]
        assert isinstance(call, Call)
        at = self.flow.forward.get(node.i)
        is_kernel = at is None and call.op.startswith("torch.ops.")  # of backward, seen at L2
        if call.direction == "forward" or is_kernel:
            return own_error(call, None, self.references, noise=noise)
        forward = self.nodes[at].pair.pair[side] if at is not None else None
        if not isinstance(forward, Call):
            return Evidence(problem=f"{call.name}: its forward call was not recorded")
        return own_error(forward, call, self.references, noise=noise)

    def _own_culprit(
        self, node: _Node, side: Side, own: OwnError, score: float, faint: bool
    ) -> Culprit:
        row = next((row for row in node.outputs if row.name == own.name), None)
        other = "expected" if side == "actual" else "actual"
        what = "result" if node.call.direction == "forward" else "gradient"
        kind: CulpritKind = "output" if node.call.direction == "forward" else "gradient"
        if math.isinf(own.rms) and row is not None and _nonfinite_differs(row):
            return self._nonfinite(node, row, "replayed")
        if math.isinf(own.rms):
            size = "does not have the values that its inputs give"
        else:
            share = _percent(own.relative)
            size = (
                f"is off by {share} of its size, {number_text(score)} times what rounding explains"
            )
        reason = (
            f"replayed in float64 on its own inputs, the {side} {what} {own.name} {size}; "
            f"the {other} side's is within rounding"
        )
        return self._culprit(
            node, kind, reason, score, row=row, side=side, proof="replayed", weak=faint
        )

    # Everything else, in execution order

    def _walk(self) -> None:
        own = {at: bit for bit, (at, _) in enumerate(self.culprits)}
        self._gradient_taint = 0
        self._in_backward: set[int] = set()  # steps whose backward has begun
        for node in self.nodes:
            node.taint |= self._inherited_taint(node)
            if node.i in own:
                node.taint |= 1 << own[node.i]
            elif node.pair.is_paired and not self._inherits_from_earlier_step(node):
                found = self._leaf(node) or (None if node.container else self._cause(node))
                if found is not None:
                    at, culprit = found
                    bit = 1 << len(self.culprits)
                    self.culprits.append((at, culprit))
                    node.taint |= bit
                    if at != node.i:
                        self.nodes[at].taint |= bit
            if node.call.direction == "backward":
                self._gradient_taint |= node.taint
                self._in_backward.add(node.call.step)

    def _inherits_from_earlier_step(self, node: _Node) -> bool:
        return any(culprit.step < node.call.step for _, culprit in self.culprits)

    def _spread(self) -> None:
        """Which later calls each culprit has reached."""
        own = {at: bit for bit, (at, _) in enumerate(self.culprits)}
        self._gradient_taint = 0
        for node in self.nodes:
            node.taint = self._inherited_taint(node)
            if node.i in own:
                node.taint |= 1 << own[node.i]
            if node.call.direction == "backward":
                self._gradient_taint |= node.taint

    def _inherited_taint(self, node: _Node) -> int:
        taint = 0
        for row in node.inputs:
            producers = self.flow.producers(node.i, row.name)
            for at in producers:
                if at is not None:
                    taint |= self.nodes[at].taint
            for record in (row.actual, row.expected):
                if self.bad_contents and record is not None:
                    taint |= self.bad_contents.get(content(record), 0)
            if producers == (None, None) and not same_bits(row):
                # several gradients that the engine has added up, or a gradient that was kept
                # or that the optimizer is given
                taint |= self._gradient_taint
        at = self.flow.forward.get(node.i)
        if at is not None:
            taint |= self.nodes[at].taint
        return taint

    def _leaf(self, node: _Node) -> tuple[int, Culprit] | None:
        """A tensor that no call made, and that differs: the data, or a parameter."""
        for row in node.inputs:
            a, e = row.actual, row.expected
            if a is None or e is None or row.role == "parameter_grad":
                continue
            if node.call.direction == "backward" or not _leaf_differs(row):
                continue
            if row.role == "input" and node.call.step in self._in_backward:
                continue  # a gradient that the engine has added up
            if self.flow.producers(node.i, row.name) != (None, None):
                continue
            keys = [key for key in (content(a), content(e)) if key is not None]
            if any(key in self.bad_contents for key in keys):
                continue
            if not (self.sees_all or self._is_known_leaf(node, row, keys)):
                continue
            if node.call.step != self.first_step and row.role != "input":
                continue
            if not self._changes_something(node):
                continue
            bit = 1 << len(self.culprits)
            for key in keys:
                self.bad_contents[key] = bit
            return node.i, self._leaf_culprit(node, row)
        return None

    def _is_known_leaf(self, node: _Node, row: TensorPair, keys: list[Hashable]) -> bool:
        """Whether a tensor without a producer is no result of calls that were not recorded."""
        if row.role != "input" or any(key in self.parameter_names for key in keys):
            return True
        if pair_roundoff(row) == 0:
            return True  # tokens, masks
        return all(n.same_out for n in self.nodes[: node.i] if not n.container)

    def _leaf_culprit(self, node: _Node, row: TensorPair) -> Culprit:
        a, e = row.actual, row.expected
        assert a is not None
        assert e is not None
        name = self.parameter_names.get(content(a)) or self.parameter_names.get(content(e))
        is_parameter = row.role in ("parameter", "buffer") or name is not None or a.requires_grad
        if is_parameter:
            word = "buffer" if row.role == "buffer" else "parameter"
            what = f"{word} {name or row.name} differs, and no recorded call made it"
        else:
            what = (
                f"{row.name}, which no recorded call made, differs: the runs were given other data"
            )
        if a.shape != e.shape:
            what += f" (shapes {list(a.shape)} and {list(e.shape)})"
        d = distance(row)
        kind: CulpritKind = "parameter" if is_parameter else "input"
        return self._culprit(node, kind, what, d, row=row, proof=_proof(row), inherited=0.0)

    def _changes_something(self, node: _Node) -> bool:
        return any(
            not later.same_out or later.d_out > 0
            for later in self.nodes[node.i :]
            if not later.container
        )

    def _cause(self, node: _Node) -> tuple[int, Culprit] | None:
        """Why this call's outputs differ, when nothing before it explains it."""
        if node.same_out and node.d_out == 0:
            return None
        found = (
            self._born_nonfinite(node)
            or self._called_otherwise(node)
            or self._drawn(node)
            or self._wired_otherwise(node)
        )
        if found is not None:
            return found
        own = self._unreplayed(node)
        return (node.i, own) if own is not None else None

    def _born_nonfinite(self, node: _Node) -> tuple[int, Culprit] | None:
        if node.taint or any(_nonfinite_differs(row) for row in node.inputs):
            return None
        at = self.flow.forward.get(node.i)
        if at is not None and any(
            _nonfinite_differs(row) for row in (*self.nodes[at].inputs, *self.nodes[at].outputs)
        ):
            return None
        for row in node.outputs:
            if not _nonfinite_differs(row):
                continue
            if all(sum(_nonfinite_counts(record)) for record in (row.actual, row.expected)):
                continue  # both make them, of finite numbers: rounding decides where
            culprit = self._nonfinite(node, row, _proof(row))
            if self._follows_from_inputs(node):
                self.hazards.append((node.i, culprit))
                continue
            return node.i, culprit
        return None

    def _follows_from_inputs(self, node: _Node) -> bool:
        """Whether both sides computed what their inputs give: a division by what is left of 0."""
        sides = self._replayed(node, ROUNDING) if self.replay else None
        if sides is None:
            return False
        return all(_score(node, _worst(node, evidence)) <= ROUNDING for evidence in sides)

    def _nonfinite(self, node: _Node, row: TensorPair, proof: str) -> Culprit:
        counts = [_nonfinite_counts(record) for record in (row.actual, row.expected)]
        side: Side = "actual" if sum(counts[0]) >= sum(counts[1]) else "expected"
        nan, inf = counts[0 if side == "actual" else 1]
        what = " and ".join(
            text for n, text in ((nan, f"{nan} NaN"), (inf, f"{inf} infinite")) if n
        )
        reason = (
            f"the {side} {row.name} has {what or 'other'} values where the other side's are "
            "finite, and its inputs have none"
        )
        return self._culprit(
            node, "nonfinite", reason, math.inf, row=row, side=side, proof=proof, inherited=0.0
        )

    def _drawn(self, node: _Node) -> tuple[int, Culprit] | None:
        """A call that draws random numbers, and has drawn others."""
        kind = _is_random(node)
        if kind is None or node.differences or node.call.direction == "backward":
            return None
        if not _drew_otherwise(node, kind):
            return None
        if self.random_seen:
            node.taint |= self._random_bit
            return None
        self.random_seen = True
        self._random_bit = 1 << len(self.culprits)
        what = "dropout mask" if kind == "dropout" else "random numbers"
        reason = (
            f"random: the two runs drew different {what}. Not a fault of this call: give both "
            f"runs the same random state (tp.seed_all), or switch the randomness off"
        )
        row = max(node.outputs, key=lambda row: distance(row), default=None)
        return node.i, self._culprit(node, "output", reason, node.d_out, row=row)

    def _called_otherwise(self, node: _Node) -> tuple[int, Culprit] | None:
        """Arguments that differ, and by which the values do."""
        if not node.differences or not self._arguments_matter(node):
            return None
        if node.taint and all("." in text.partition(": ")[2] for text in node.differences):
            return None  # floats, downstream of a culprit: read off a tensor
        reason = f"called with other arguments: {'; '.join(node.differences[:4])}"
        row = max(node.outputs, key=lambda row: distance(row), default=None)
        proof = "replayed" if node.evidence else "compared"
        return node.i, self._culprit(node, "argument", reason, node.d_out, row=row, proof=proof)

    def _arguments_matter(self, node: _Node) -> bool:
        a, e = node.pair.pair.actual, node.pair.pair.expected
        assert a is not None
        assert e is not None
        in_time = self.replay and time.monotonic() < self.deadline
        if in_time and node.call.direction == "forward" and _is_random(node) is None:
            found = matters(a, arguments.graft(a, e), self.references)
            if found is not None:
                return found > FAINT
        if node.taint:
            return False
        return _exceeds(node)

    def _wired_otherwise(self, node: _Node) -> tuple[int, Culprit] | None:
        """An input that comes from elsewhere than on the other side, and differs by it."""
        if node.taint:
            return None
        for row in node.inputs:
            d = self.distance(node, row)
            if d <= ROUNDING or row.actual is None or row.expected is None:
                continue
            ours, theirs = self.flow.producers(node.i, row.name)
            if ours == theirs or is_constant(row.actual) or is_constant(row.expected):
                continue
            if node.call.direction == "backward" and None in (ours, theirs):
                continue
            origin = [at for at in (ours, theirs) if at is not None]
            known, region = self._region(origin)
            if any(self.nodes[at].taint for at in (*known, *region)):
                continue
            before = max((self.nodes[at].r_out for at in known), default=0.0)
            if _relative(row, d) > ROUNDING * (pair_roundoff(row) + _AMPLIFIES * before):
                return self._structure(node, row, region, ours, theirs, d)
        return None

    def _region(self, origin: Sequence[int]) -> tuple[set[int], list[int]]:
        """The calls of one side only that lead to `origin`, and the paired calls before them."""
        known: set[int] = set()
        region: list[int] = []
        todo = list(origin)
        seen = set(todo)
        while todo:
            at = todo.pop()
            node = self.nodes[at]
            if node.pair.is_paired:
                known.add(at)
                continue
            region.append(at)
            for row in node.inputs:
                for before in self.flow.producers(at, row.name):
                    if before is not None and before not in seen:
                        seen.add(before)
                        todo.append(before)
        return known, sorted(region)

    def _structure(
        self,
        node: _Node,
        row: TensorPair,
        region: list[int],
        ours: int | None,
        theirs: int | None,
        d: float,
    ) -> tuple[int, Culprit]:
        mine = [at for at in region if self.nodes[at].pair.pair.actual is not None]
        other = [at for at in region if self.nodes[at].pair.pair.actual is None]
        for at in (*mine, *other):
            found = self._one_sided_fault(self.nodes[at])
            if found is not None:
                return at, found
        if mine or other:
            at = (mine or other)[0]
            lists = [f"{_names(self.nodes, mine)} only in actual" if mine else "",
                     f"{_names(self.nodes, other)} only in expected" if other else ""]  # fmt: skip
            where = " and ".join(text for text in lists if text)
            reason = f"{where}: after it, {row.name} of {node.call.name} differs"
        else:
            at = node.i
            names = [
                self.nodes[p].call.name if p is not None else "no call" for p in (ours, theirs)
            ]
            reason = f"{row.name} comes from {names[0]} in actual, from {names[1]} in expected"
        culprit = self._culprit(self.nodes[at], "structure", reason, d, row=row, inherited=0.0)
        return at, culprit

    def _one_sided_fault(self, node: _Node) -> Culprit | None:
        """A call that only one side has, with an error of its own."""
        side = 0 if node.pair.pair.actual is not None else 1
        if not self.replay or node.container or _is_random(node) is not None:
            return None
        evidence = self._evidence(node, side, noise=True)
        self.n_replayed += 1
        own = _worst(node, evidence)
        score = _score(node, own)
        if own is None or score <= ROUNDING:
            return None
        name: Side = "actual" if side == 0 else "expected"
        kind: CulpritKind = "output" if node.call.direction == "forward" else "gradient"
        reason = (
            f"only in {name}; replayed in float64 on its own inputs, its {own.name} is off by "
            f"{_percent(own.relative)}, {number_text(own.size)} times what rounding explains"
        )
        row = next((row for row in node.outputs if row.name == own.name), None)
        return self._culprit(node, kind, reason, own.size, row=row, side=name, proof="replayed")

    def _unreplayed(self, node: _Node) -> Culprit | None:
        """A call that cannot be replayed, or whose tensors were not kept."""
        if node.taint or not node.outputs or _is_random(node) == "random":
            return None
        if node.evidence is not None and not any(found.problem for found in node.evidence):
            scores = [_score(node, _worst(node, found)) for found in node.evidence]
            if min(scores) <= ROUNDING:
                return None  # acquitted
        elif self.replay and node.evidence is None and self._is_replayable(node):
            return None  # it was no suspect
        if "the inputs are not visible" in " ".join(node.call.notes):
            return None
        row = max(node.outputs, key=lambda row: self.distance(node, row))
        if node.same_in and self._bits_tell(node, row):
            reason = _digest_reason(row)
            return self._culprit(node, _kind(node), reason, node.d_out, row=row, proof="digests")
        n_in = max((r.actual.numel for r in node.inputs if r.actual), default=1)
        n_out = row.actual.numel if row.actual else 1
        if not _exceeds(node, reduction(n_in, n_out)):
            return None
        if node.i in self.in_optimizer and not node.same_in:
            return None  # Adam divides noise by noise: only a replay can tell
        what = "result" if node.call.direction == "forward" else "gradient"
        inputs = "are equal" if node.same_in and node.d_in == 0 else "agree"
        reason = f"its inputs {inputs} and its {what} {row.name} differs {_magnitude(node.d_out)}"
        problem = next((e.problem for e in node.evidence or () if e.problem), None)
        if problem:
            reason += f"; not replayed: {problem}"
        return self._culprit(node, _kind(node), reason, node.d_out, row=row, proof=_proof(row))

    def _is_replayable(self, node: _Node) -> bool:
        return any(row.metrics is not None for row in node.outputs)

    def _bits_tell(self, node: _Node, row: TensorPair) -> bool:
        """Whether equal inputs and other bits are proof enough without the content.

        They are when the call only moves numbers, when the same numbers are in other places, and
        when the runs have so far given the same bits wherever sums were made: then rounding is not
        what they differ by.
        """
        a, e = row.actual, row.expected
        if a is None or e is None or a.digest is None or e.digest is None or a.dtype != e.dtype:
            return False
        if a.digest == e.digest or row.metrics is not None:
            return False
        if a.summary and e.summary and moved_values(a.summary, e.summary):
            return True
        if node.call.direction == "forward" and kind_of(node.call) in ("exact", "conversion"):
            return True
        return self._reproducible_before(node)

    def _reproducible_before(self, node: _Node) -> bool:
        """Whether sums have come out bit for bit alike so far: of this op, or of three others."""
        alike: set[str] = set()
        for earlier in self.nodes[: node.i]:
            if earlier.container or not earlier.pair.is_paired or not _makes_sums(earlier):
                continue
            if earlier.same_in and not earlier.same_out:
                return False
            if earlier.same_in:
                alike.add(earlier.call.op)
        return node.call.op in alike or len(alike) >= 3

    # Containers

    def _settle_containers(self) -> None:
        """Settings that were given to a module or optimizer explain what is inside it."""
        for node in self.nodes:
            if not (node.container and node.differences and node.pair.is_paired):
                continue
            inside = self._inside(node)
            ours = [n for n, (at, c) in enumerate(self.culprits) if at in inside]
            explained = [n for n in ours if self.culprits[n][1].kind in ("argument", "structure")]
            if not explained:
                before = any(at <= max(inside, default=node.i) for at, _ in self.culprits)
                if before or not _exceeds(node):
                    continue
            reason = f"called with other arguments: {'; '.join(node.differences[:4])}"
            row = max(node.outputs, key=lambda row: distance(row), default=None)
            culprit = self._culprit(node, "argument", reason, node.d_out, row=row)
            if explained:
                first = explained[0]
                self.culprits[first] = (node.i, culprit)
                for n in explained[:0:-1]:
                    del self.culprits[n]
            else:
                self.culprits.append((node.i, culprit))
        self._spread()

    def _blame_containers(self) -> None:
        """Where operators were not recorded, what a module does beside calling others: the
        innermost whose inputs agree and whose output does not, by more than many calls explain."""
        found: list[_Node] = []
        for node in self.nodes:
            if not (node.container and node.pair.is_paired and node.outputs):
                continue
            if not node.call.name.startswith("Module."):
                continue
            n = len(self._inside(self.nodes[self.flow.forward.get(node.i, node.i)]))
            if _exceeds(node, 4 * math.sqrt(1 + n)):
                found.append(node)
        for node in found:
            inside = self._inside(self.nodes[self.flow.forward.get(node.i, node.i)])
            nested = {self.flow.forward.get(other.i, other.i) for other in found} & inside
            if nested:
                continue
            row = max(node.outputs, key=lambda row: self.distance(node, row))
            reason = (
                f"its inputs agree, what it calls does too, and its {row.name} differs "
                f"{_magnitude(node.d_out)}; record at L1 or mix to see inside"
            )
            culprit = self._culprit(node, _kind(node), reason, node.d_out, row=row)
            self.culprits = [(node.i, culprit)]
            self._spread()
            return

    def _inside(self, node: _Node) -> set[int]:
        found = set()
        if node.call.name.startswith("Optimizer."):
            for later in self.nodes[node.i + 1 :]:
                if later.call.name.startswith(("Module.", "Optimizer.")):
                    break
                found.add(later.i)
            return found
        names = {node.call.name}
        for later in self.nodes[node.i + 1 :]:
            if later.call.parent in names:
                found.add(later.i)
                names.add(later.call.name)
        return found

    # Words

    def _culprit(
        self,
        node: _Node,
        kind: CulpritKind,
        reason: str,
        own: float,
        *,
        row: TensorPair | None = None,
        side: Side | None = None,
        proof: str = "compared",
        weak: bool = False,
        inherited: float | None = None,
    ) -> Culprit:
        call = node.call
        return Culprit(
            name=call.name,
            kind=kind,
            direction=call.direction,
            step=call.step,
            rank=call.rank,
            module=call.module,
            op=call.op,
            stack=call.stack,
            reason=reason,
            own_error=own,
            inherited_error=node.d_in if inherited is None else inherited,
            metrics=_metrics(row),
            side=side,
            proof=proof,
            tensor=row.name if row is not None else None,
            weak=weak,
        )


def _exceeds(node: _Node, long: float = 1.0) -> bool:
    """Whether a call's outputs differ by more than rounding and its inputs explain."""
    u = max((pair_roundoff(row) for row in node.outputs), default=0.0)
    if math.isinf(node.r_out):
        return not math.isinf(node.r_in)
    if node.same_in and node.d_in == 0:
        # nothing was inherited: in 16 bit less than 16 roundings can be told from noise
        return node.d_out > (FAINT if u >= 2.0**-11 else ROUNDING) * long
    return node.r_out > ROUNDING * (u * long + _AMPLIFIES * node.r_in)


def _relative(row: TensorPair, d: float) -> float:
    u = pair_roundoff(row)
    return d * u if u else d


def _summed_size(node: _Node, row: TensorPair) -> float:
    """A gradient that is a sum over many rounds to their size, though all of it may cancel."""
    if node.call.direction != "backward" or row.expected is None or row.metrics is not None:
        return 0.0
    given = [r.expected for r in node.inputs if r.expected is not None]
    n = max((record.numel for record in given), default=0)
    if n < 2 * row.expected.numel:
        return 0.0
    size = max((rms_size(record) for record in given), default=0.0)
    return size * reduction(n, row.expected.numel) if size < 1e30 else 0.0


def _is_input(row: TensorPair) -> bool:
    return not is_written(row)


def _place(call: Call, record: TensorRecord) -> str:
    return f"{call.rank}/{call.step}/{record.name}"


def _cancelled_size(node: _Node) -> float:
    """Sums and differences round to the size of their terms, whatever is left of those."""
    if node.call.direction != "forward" or node.container:
        return 0.0
    stem = node.call.op.rpartition(".")[2].rstrip("_")
    if stem not in ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv"):
        return 0.0
    sizes = [rms_size(row.expected) for row in node.inputs if row.expected is not None]
    return max((size for size in sizes if size < 1e30), default=0.0)


def _leaf_differs(row: TensorPair) -> bool:
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    if same_bits(row) or (a.digest is None and e.digest is None and a.summary == e.summary):
        return False
    if a.shape != e.shape:
        return True
    m = row.metrics
    if m is not None and m.ulp_max is not None and not m.nonfinite_disagree:
        return m.ulp_max > 4 and (m.rms_error > 0 or m.mismatched > 0)
    if a.digest is not None and e.digest is not None and a.dtype == e.dtype:
        return a.digest != e.digest
    return distance(row) > 4


def _kind(node: _Node) -> CulpritKind:
    return "output" if node.call.direction == "forward" else "gradient"


def _is_random(node: _Node) -> Literal["random", "dropout"] | None:
    if node.container or node.call.name.startswith(("Module.", "Optimizer.")):
        return None
    kind = kind_of(node.call)
    return kind if kind in ("random", "dropout") else None


_SUMS = ("product", "reduction", "scatter", "general")


def _makes_sums(node: _Node) -> bool:
    return not node.call.name.startswith("Module.") and kind_of(node.call) in _SUMS


def _drew_otherwise(node: _Node, kind: str) -> bool:
    if kind == "random":
        return _exceeds(node)
    row = next((row for row in node.outputs if row.actual and row.expected), None)
    given = next((row for row in node.inputs if row.actual and row.expected), None)
    if row is None or given is None or row.actual is None or row.expected is None:
        return False
    if row.metrics is not None and row.actual.blob and row.expected.blob:
        a, e = row.actual.array() != 0, row.expected.array() != 0
        ours, theirs = given.actual, given.expected
        if ours and theirs and ours.blob and theirs.blob and ours.shape == row.actual.shape:
            usable = (ours.array() != 0) & (theirs.array() != 0)
            a, e = a & usable, e & usable
        differ = int((a != e).sum())
        return bool(differ > max(2, 0.01 * a.size))
    # 1 - p of what is kept: other masks keep other numbers
    return _exceeds(node)


def _worst(node: _Node, evidence: Evidence) -> OwnError | None:
    return max(evidence.errors.values(), key=lambda own: _scaled(node, own), default=None)


def _score(node: _Node, own: OwnError | None) -> float:
    return 0.0 if own is None else _scaled(node, own)


def _scaled(node: _Node, own: OwnError) -> float:
    """An own error with what a long sum may have taken off."""
    row = next((row for row in node.outputs if row.name == own.name), None)
    n_in = max((r.actual.numel for r in node.inputs if r.actual), default=1)
    n_out = row.actual.numel if row is not None and row.actual else 1
    long = reduction(n_in, n_out)
    score = own.size / long
    if abs(own.gain) > 8 * own.gain_sigma:
        score = max(score, abs(own.gain) / math.sqrt(long))
    return 4 * score if own.exact else score


def _nonfinite_counts(record: TensorRecord | None) -> tuple[int, int]:
    if record is None or record.summary is None:
        return (0, 0)
    return record.summary.nan_count, record.summary.inf_count


def _nonfinite_differs(row: TensorPair) -> bool:
    if row.metrics is not None:
        return row.metrics.nonfinite_disagree > 0
    return _nonfinite_counts(row.actual) != _nonfinite_counts(row.expected)


def _names(nodes: Sequence[_Node], at: Sequence[int]) -> str:
    names = [nodes[i].call.name for i in at]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _proof(row: TensorPair) -> str:
    if row.metrics is not None:
        return "compared"
    if row.actual is not None and row.actual.digest is not None:
        return "digests"
    return "statistics"


def _digest_reason(row: TensorPair) -> str:
    a, e = row.actual, row.expected
    assert a is not None
    assert e is not None
    if a.summary and e.summary and moved_values(a.summary, e.summary):
        return f"its inputs are equal bit for bit; {row.name} has the same numbers in other places"
    return f"its inputs are equal bit for bit; {row.name} is not"


def _percent(relative: float) -> str:
    if math.isinf(relative) or relative > 10:
        return "more than its whole size" if math.isinf(relative) else f"{relative:.3g} times"
    percent = 100 * relative
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _magnitude(d: float) -> str:
    if math.isinf(d):
        return "altogether"
    return f"by {number_text(d)} roundings of its size"


def _metrics(row: TensorPair | None) -> dict[str, Any]:
    if row is None:
        return {}
    if row.metrics is not None:
        return msgspec.structs.asdict(row.metrics)
    a, e = row.actual, row.expected
    if a is None or e is None or a.summary is None or e.summary is None:
        return {}
    return {
        f"{key}_{side}": getattr(summary, key)
        for key in ("max", "min", "mean", "norm")
        for side, summary in (("actual", a.summary), ("expected", e.summary))
    }
