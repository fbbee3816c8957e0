"""Explains inputs that differ by where they come from: other calls, views, or nobody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from tensorprobe.comparing.align import content, is_constant
from tensorprobe.comparing.communicated import is_reduced
from tensorprobe.comparing.culprit import (
    Found,
    accuse,
    kind_by_direction,
    magnitude,
    percent,
    proof_of,
)
from tensorprobe.comparing.flat_weights import FlatWeights
from tensorprobe.comparing.measure import TensorPair
from tensorprobe.comparing.rounding import (
    ROUNDING,
    SAME_SUM,
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
    CANCELS,
    Node,
    Scene,
    is_written,
    label_of,
    nonfinite_differs,
    relative,
    summed_size,
    unit_growth,
)
from tensorprobe.comparing.suspects import Replays, score, worst
from tensorprobe.comparing.verdict import Culprit, CulpritKind, Side, name_some
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import TensorRecord
from tensorprobe.replay.kinds import api_of

_STATES = ("parameter", "buffer", "state")
# Of the numbers: a view that leaves fewer of them alone is taken for another tensor.
_LEFT_ALONE = 0.05
_LOOK_BACK = 200
_COPIES = ("clone", "contiguous", "copy", "to", "cpu", "cuda", "npu", "repeat", "cat", "stack")


class Boundaries:
    """Explains every input that differs, call by call in execution order.

    An input is explained by the call that made it, if both sides have that call: it was judged
    where it ran. Where nobody recorded who made it, it may differ by as much as what it can have
    been made of: gradients by what the calls sent that used the tensor, parameters by what they
    differed by before, other inputs by the results so far.
    """

    def __init__(self, scene: Scene, replays: Replays, flat: FlatWeights) -> None:
        self._scene = scene
        self._replays = replays
        self._flat = flat
        self._uses = _uses(scene)
        self._backwards: dict[int, list[int]] = {}  # a forward call -> its backward calls
        for backward, forward in scene.flow.forward.items():
            self._backwards.setdefault(forward, []).append(backward)
        self._before: dict[str, float] = {}  # by label: how far a parameter or buffer was apart
        self._forward = self._backward = 0.0  # the largest difference so far in this step
        self._gradients: list[tuple[float, float]] = []  # of this step: norm, and how far apart
        self._sums: dict[str, float] = {}  # the size that a gradient's terms add up to
        self._of_module: dict[tuple[int, str], list[int]] = {}  # backward calls so far
        self._stepped: set[str] = set()  # parameters that an optimizer has stepped
        self._largest = 0.0  # of all in `_before` that optimizers were given
        self._left = 0.0  # the same of what the last one has left
        self._step: int | None = None
        self._given: Found = None  # what the model was given in other places, in this step

    def look_at(self, node: Node) -> Found:
        """The first input of a call that differs and that nothing explains, as a culprit."""
        if node.call.step != self._step:
            self._step, self._forward, self._backward = node.call.step, 0.0, 0.0
            self._gradients = []
            self._sums.clear()
            self._given = None
        if not node.is_paired:
            return None
        return next(filter(None, (self._explain(node, row) for row in node.inputs)), None)

    def _explain(self, node: Node, row: TensorPair) -> Found:
        a, e = row.actual, row.expected
        if a is None or e is None:
            return self._missing(node, row)
        if same_bits(row) or not (d := self._distance(node, row)):
            return None
        if not self._has_effect(node):
            if self._given is None and is_moved(row) and self._is_data(node, row):
                self._given = node.i, self._unexplained(node, row, d)
            return None
        if is_reduced(self._scene, node, row):
            return None
        ours, theirs = self._scene.flow.producers(node.i, row.name)
        if ours is not None and ours == theirs:
            return None
        context = self._context(node, row)
        if context >= APART and not nonfinite_differs(row):
            return None
        inherited = AMPLIFIES * context
        unit = max(pair_roundoff(row), one_sided_unit(self._scene, node, row))
        if row.role == "parameter_grad" and (size := self._scene.largest_unit):
            unit *= unit_growth(size)
        if relative(row, d) <= ROUNDING * (unit + inherited):
            return None
        region = _one_sided_calls(self._scene, node, row)
        found = _faulty_one_sided(self._scene, self._replays, region)
        if found := found or _one_sided(self._scene, node, row, region, d):
            return found
        if found := self._sent_by_one_side(node, row, d):
            return found
        is_given = row.role == "input" and node.call.direction == "forward"
        if is_given and (found := written_by_one_side(self._scene, node, row)):
            return found
        if ours is None and theirs is None and row.role in ("input", "parameter"):
            is_later = node.call.step != self._scene.first_step
            if is_later and (origin := self._flat.behind(node, row)):
                node.taint |= origin.taint
                return None
        is_guess = is_constant(a) or is_constant(e)  # many calls make the same constant
        if ours is not None and theirs is not None and not is_guess:
            return node.i, from_elsewhere(self._scene, node, row, d)
        if self._given is not None and is_moved(row):
            return self._given  # where statistics did not show what came of it
        return node.i, self._unexplained(node, row, d)

    def _distance(self, node: Node, row: TensorPair) -> float:
        d = self._scene.distance(node, row)
        if d and row.role == "parameter_grad":
            summed = self._summed(node, row)
            sizes = [rms_size(record) for record in (row.actual, row.expected) if record]
            if max(sizes) < CANCELS * summed:
                return 0.0  # rounding that is left of numbers that cancel: a bias before a norm
            return self._scene.distance(node, row, summed)
        if d and node.call.direction == "backward":
            return self._scene.distance(node, row, summed_size(node, row))
        return d

    def _summed(self, node: Node, row: TensorPair) -> float:
        """The size that the terms of a parameter's gradient add up to, if they do not cancel: it
        rounds to the size of those."""
        key = _gradient_key(label_of(node.call, row))
        found = self._sums.get(key, 0.0)  # an optimizer is given what its module has shown
        shape = row.expected.shape if row.expected is not None else ()
        if node.call.name.startswith("Optimizer."):
            return found
        for at in self._module_backwards(node):
            backward = self._scene.nodes[at]
            forward = self._scene.forward_of(backward)
            for given in backward.inputs:
                record = given.expected
                if record is None or not record.numel or not shape:
                    continue
                size = rms_size(record) * math.sqrt(max(record.numel / shape[0], 1.0))
                if len(shape) > 1 and forward is not None:
                    size *= max((rms_size(r.expected) for r in forward.inputs
                                 if r.role == "input" and r.expected), default=1.0)  # fmt: skip
                found = max(found, size if size < 1e30 else 0.0)
        self._sums[key] = found
        return found

    def _module_backwards(self, node: Node) -> list[int]:
        """The calls of this step's backward so far that belong to the same module."""
        return self._of_module.get((node.call.step, node.call.module), [])

    # What a tensor may have been made of

    def _context(self, node: Node, row: TensorPair) -> float:
        """How far apart that is of which an input can have been made, relative to its size."""
        if row.role == "parameter_grad":
            return self._context_of_gradient(node, row)
        if row.role in _STATES:
            before = self._before.get(label_of(node.call, row), 0.0)
            if row.role == "parameter" and self._gradients and self._is_in_closure(node):
                return max(before, APART)  # an optimizer divides noise by noise
            return before
        if node.i in self._scene.in_optimizer:
            return self._largest
        if node.call.direction == "backward":
            forward = self._scene.forward_of(node)
            sent = self._sent_to_result(forward, row) if forward is not None else 0.0
            return sent or max(self._backward, self._forward)
        return max(self._forward, self._context_of_weight(row))

    def _context_of_weight(self, row: TensorPair) -> float:
        """The same for an operator's input that its module has as a parameter."""
        return max((self._before.get(label, 0.0) for label in self._weights(row)), default=0.0)

    def _context_of_gradient(self, node: Node, row: TensorPair) -> float:
        sent = self._sent_to_parameter(node, row)
        before = self._before.get(_gradient_key(label_of(node.call, row)))
        if not sent:
            nodes = [self._scene.nodes[at] for at in self._module_backwards(node)]
            found = [r for other in nodes for r in (other.r_in, other.r_out) if math.isfinite(r)]
            sent = max(found, default=self._backward)
        if before is None:
            return sent
        # it may have been clipped since, by the norm of all of them
        return max(sent, before, self._norm_difference())

    def has_seen(self, node: Node, row: TensorPair) -> bool:
        """Whether the program has used a parameter or buffer before."""
        if row.role == "input":
            return any(label in self._before for label in self._weights(row))
        return label_of(node.call, row) in self._before

    def _weights(self, row: TensorPair) -> set[str]:
        """What modules call an operator's input that they have as a parameter."""
        names = self._scene.parameter_names
        keys = (content(record) for record in (row.actual, row.expected) if record is not None)
        return {names[key] for key in keys if key in names}

    def _is_in_closure(self, node: Node) -> bool:
        """Whether a call is in the closure of an optimizer that has had gradients: by them it may
        have stepped already."""
        parent = node.call.parent
        while parent and not parent.startswith("Optimizer."):
            at = self._scene.named(node.call.step, parent)
            parent = None if at is None else self._scene.nodes[at].call.parent
        return bool(parent)

    def _norm_difference(self) -> float:
        """How far apart the norm of all gradients of this step is, at most."""
        total = math.fsum(size * size for size, _ in self._gradients)
        parts = math.fsum((size * min(r, 2.0)) ** 2 for size, r in self._gradients)
        return math.sqrt(parts / total) if total else 0.0

    def _sent_to_result(self, forward: Node, row: TensorPair) -> float:
        """What the calls that used a result sent back to it."""
        name = row.name.replace("input", "output", 1)
        made = next((each for each in forward.outputs if each.name == name), None)
        return self._sent_back(made) if made is not None else 0.0

    def _sent_to_parameter(self, node: Node, row: TensorPair) -> float:
        key = label_of(node.call, row)
        value = self._scene.parameters.get((node.call.step, key))
        return self._sent_back(value) if value is not None else 0.0

    def _sent_by_one_side(self, node: Node, row: TensorPair, d: float) -> Found:
        """The calls that send a gradient to a result on one side only: a `detach` on the other."""
        forward = self._scene.forward_of(node)
        name = row.name.replace("input", "output", 1)
        made = next((r for r in forward.outputs if r.name == name), None) if forward else None
        if made is None:
            return None
        users = {
            at
            for record in (made.actual, made.expected)
            if record is not None and (key := content(record)) is not None
            for at, _ in self._uses.get((self._step, key), ())
        }
        sent = {back for at in users for back in self._backwards.get(at, ())}
        return _one_sided(self._scene, node, row, _region(self._scene, sorted(sent))[1], d)

    def _sent_back(self, made: TensorPair) -> float:
        """How far apart the gradients are that were sent to a tensor, the largest."""
        found = 0.0
        for record in (made.actual, made.expected):
            key = content(record) if record is not None else None
            for at, name in self._uses.get((self._step, key), ()) if key is not None else ():
                wanted = name.replace("input", "output", 1)
                for back in self._backwards.get(at, ()):
                    other = self._scene.nodes[back]
                    for row in other.outputs:
                        if row.name == wanted and row.actual and row.expected:
                            d = self._scene.distance(other, row)
                            found = max(found, relative(row, d))
        return found

    def leave(self, node: Node) -> None:
        """Go on from a call: what comes later may be made of its results."""
        if node.call.name.startswith("Optimizer."):
            self._largest, self._left = max(self._largest, self._left), 0.0
            given = (row for row in node.inputs if row.role == "parameter")
            self._stepped.update(label_of(node.call, row) for row in given)
        for row in (*node.inputs, *node.outputs):
            if row.actual is None or row.expected is None:
                continue
            is_state = row.role in _STATES or row.role == "parameter_grad"
            if is_state or node.call.name.startswith("Optimizer."):
                r = relative(row, self._distance(node, row))
                key = label_of(node.call, row)
                if row.role == "parameter_grad":
                    key = _gradient_key(key)
                    if node.call.direction == "backward" and row.expected.summary is not None:
                        self._gradients.append((row.expected.summary.norm or 0.0, r))
                self._before[key] = max(self._before.get(key, 0.0), r)
                if not is_written(row):  # what it makes is no source of its own
                    self._largest = max(self._largest, r)
                elif row.role == "state":
                    self._left = max(self._left, r)
        if node.call.direction == "backward":
            self._of_module.setdefault((node.call.step, node.call.module), []).append(node.i)
        if node.container or not node.is_paired or not math.isfinite(node.r_out):
            return
        if node.call.direction == "backward":
            self._backward = max(self._backward, node.r_out)
        elif node.i not in self._scene.in_optimizer:
            self._forward = max(self._forward, node.r_out)

    # Words

    def _has_effect(self, node: Node) -> bool:
        if not node.outputs:  # a number that an optimizer reads has its effect on the weights
            return node.i not in self._scene.in_optimizer
        return not node.same_out or node.d_out > 0

    def _missing(self, node: Node, row: TensorPair) -> Found:
        """A gradient, or an optimizer's state, that one side lacks."""
        record = row.actual or row.expected
        if row.role not in ("parameter_grad", "state") or record is None:
            return None
        if record.summary is not None and record.summary.norm == 0:
            return None  # none, or one of zeros
        side = "actual" if row.actual is not None else "expected"
        label = label_of(node.call, row)
        kind: CulpritKind = "structure"
        reason = f"{label} has a gradient only in {side}"
        if row.role == "state":
            if label.rpartition(".")[0] in self._stepped:
                return None  # each optimizer begins once
            kind = "parameter"
            reason = f"only in {side} does the optimizer begin with a state ({label})"
        return node.i, accuse(node, kind, reason, math.inf, row=row, inherited=0.0)

    def _unexplained(self, node: Node, row: TensorPair, d: float) -> Culprit:
        before = self._last_agreeing(node)
        what = _what(node, row)
        reason = (
            f"{what} differs {magnitude(d)}; the difference appears between {before} and "
            f"{node.call.name}, and no recorded call made it"
        )
        kind: CulpritKind = "boundary"
        if self._is_data(node, row) and self._scene.is_weight(node, row):
            kind = "parameter"
            reason = f"{what} is a weight or a buffer; it differs, and no recorded call made it"
        elif self._is_data(node, row):
            kind = "input"
            reason = f"{what}, which no recorded call made, differs: the runs were given other data"
        return accuse(node, kind, reason, d, row=row, proof=proof_of(row), inherited=0.0)

    def _is_data(self, node: Node, row: TensorPair) -> bool:
        """Whether the program brings it: an operator or the model as a whole is given it, before
        anything differs."""
        parent = node.call.parent or "Optimizer."  # or in the closure of one
        is_root = not node.call.name.startswith("Module.") or parent.startswith("Optimizer.")
        is_first = node.call.direction == "forward" and not self._forward
        return (
            row.role == "input" and is_root and is_first and node.i not in self._scene.in_optimizer
        )

    def _last_agreeing(self, node: Node) -> str:
        for at in range(node.i - 1, -1, -1):
            other = self._scene.nodes[at]
            if other.is_paired and not other.container:
                return other.call.name
        return "the start"


def _gradient_key(label: str) -> str:
    return f"gradient of {label}"


def _what(node: Node, row: TensorPair) -> str:
    label = label_of(node.call, row)
    if row.role == "parameter_grad":
        return f"the gradient of {label}"
    if row.role == "state":
        return f"the optimizer's state {label}"
    if row.role in _STATES:
        return f"{row.role} {label}"
    if node.call.direction == "backward":
        return f"the gradient that comes in ({row.name})"
    return row.name


def _uses(scene: Scene) -> dict[Hashable, list[tuple[int, str]]]:
    """Which forward calls of a step were given a content, and as which argument."""
    found: dict[Hashable, list[tuple[int, str]]] = {}
    for node in scene.nodes:
        if node.call.direction == "backward" or node.i in scene.in_optimizer:
            continue
        for row in node.inputs:
            for record in (row.actual, row.expected):
                if record is not None and (key := content(record)) is not None:
                    found.setdefault((node.call.step, key), []).append((node.i, row.name))
    return found


def wired_otherwise(scene: Scene, replays: Replays, node: Node) -> Found:
    """An input that comes from elsewhere than on the other side, and differs by it."""
    if node.taint:
        return None
    for row in node.inputs:
        d = scene.distance(node, row)
        if d <= ROUNDING or row.actual is None or row.expected is None:
            continue
        ours, theirs = scene.flow.producers(node.i, row.name)
        if ours == theirs:
            continue
        is_gradient = node.call.direction == "backward" or row.role == "parameter_grad"
        if is_gradient and None in (ours, theirs):
            continue
        known, region = _region(scene, (ours, theirs))
        if any(scene.nodes[at].taint for at in (*known, *region)):
            continue
        if not region and (is_constant(row.actual) or is_constant(row.expected)):
            continue  # many calls make the same constant: who made this one is a guess
        before = max((scene.nodes[at].r_out for at in known), default=0.0)
        u = max(pair_roundoff(row), coarsest(scene, region))
        if relative(row, d) > ROUNDING * (u + AMPLIFIES * before):
            return (
                _faulty_one_sided(scene, replays, region)
                or _one_sided(scene, node, row, region, d)
                or (node.i, from_elsewhere(scene, node, row, d))
            )
    return None


def reordered(scene: Scene, node: Node) -> Found:
    """A list of the same tensors in another order: `cat([a, b])` and `cat([b, a])`."""
    lists: dict[str, list[TensorPair]] = {}
    for row in node.inputs:
        head, _, last = row.name.rpartition(".")
        if last.isdigit() and head != "input":
            lists.setdefault(head, []).append(row)
    for head, rows in lists.items():
        ours = [content(row.actual) for row in rows if row.actual]
        theirs = [content(row.expected) for row in rows if row.expected]
        if ours == theirs or None in ours or Counter(ours) != Counter(theirs):
            continue
        reason = f"{head} has the same {len(rows)} tensors as in expected, in another order"
        d = max(scene.distance(node, row) for row in rows)
        return node.i, accuse(node, "structure", reason, d, row=rows[0], inherited=0.0)
    return None


def coarsest(scene: Scene, at: Sequence[int]) -> float:
    """The unit roundoff of the coarsest dtype that these calls are given, or give."""
    nodes = [scene.nodes[i] for i in at]
    rows = (row for node in nodes for row in (*node.inputs, *node.outputs))
    return max(map(pair_roundoff, rows), default=0.0)


def one_sided_unit(scene: Scene, node: Node, row: TensorPair) -> float:
    """Of the calls that only one side has, on the way to an input: the coarsest unit roundoff."""
    return coarsest(scene, _one_sided_calls(scene, node, row))


def _one_sided_calls(scene: Scene, node: Node, row: TensorPair) -> list[int]:
    """The calls of one side only on the way to an input."""
    return _region(scene, scene.flow.producers(node.i, row.name))[1]


def _region(scene: Scene, origin: Sequence[int | None]) -> tuple[set[int], list[int]]:
    """The calls of one side only that lead to `origin`, and the paired calls before them."""
    known: set[int] = set()
    region: list[int] = []
    todo = [at for at in origin if at is not None]
    seen = set(todo)
    while todo:
        at = todo.pop()
        node = scene.nodes[at]
        if node.is_paired:
            known.add(at)
            continue
        region.append(at)
        for row in node.inputs:
            for before in scene.flow.producers(at, row.name):
                if before is not None and before not in seen:
                    seen.add(before)
                    todo.append(before)
    return known, sorted(region)


def _by_side(scene: Scene, region: list[int]) -> tuple[list[int], list[int]]:
    mine = [at for at in region if scene.nodes[at].pair.pair.actual is not None]
    return mine, [at for at in region if scene.nodes[at].pair.pair.actual is None]


def _faulty_one_sided(scene: Scene, replays: Replays, region: list[int]) -> Found:
    mine, other = _by_side(scene, region)
    for at in (*mine, *other):
        found = _own_error(scene.nodes[at], replays)
        if found is not None:
            return at, found
    return None


def _own_error(node: Node, replays: Replays) -> Culprit | None:
    """A call that only one side has, with an error of its own."""
    side = 0 if node.pair.pair.actual is not None else 1
    if not replays.in_time or node.container or node.is_random is not None:
        return None
    evidence = replays.evidence(node, side, noise=True)
    replays.n_replayed += 1
    own = worst(node, evidence)
    if own is None or score(node, own) <= ROUNDING:
        return None
    name: Side = "actual" if side == 0 else "expected"
    reason = (
        f"only in {name}; replayed in float64 on its own inputs, its {own.name} is off by "
        f"{percent(own.relative)}, {number_text(own.size)} times what rounding explains"
    )
    row = node.output(own.name)
    kind = kind_by_direction(node)
    culprit = accuse(node, kind, reason, own.size, row=row, side=name, proof="replayed")
    culprit.metrics = {**culprit.metrics, **own.told()}
    return culprit


def _one_sided(scene: Scene, node: Node, row: TensorPair, region: list[int], d: float) -> Found:
    units = [scene.unit_of[at] for at in region if at in scene.unit_of]
    if units:
        unit = scene.nodes[min(units)]
        reason = (
            f"only one side shows its inside, and {row.name} of {node.call.name}, which it leads "
            f"to, differs {magnitude(d)}"
        )
        return unit.i, accuse(unit, "boundary", reason, d, row=row, inherited=unit.d_in)
    mine, other = _by_side(scene, sorted({_forward(scene, at) for at in region}))
    if not mine and not other:
        return None
    at = (mine or other)[0]
    where = " and ".join(
        f"{name_some([scene.nodes[i].call for i in calls])} only in {side}"
        for calls, side in ((mine, "actual"), (other, "expected"))
        if calls
    )
    reason = f"{where}: after it, {row.name} of {node.call.name} differs"
    return at, accuse(scene.nodes[at], "structure", reason, d, row=row, inherited=0.0)


def _forward(scene: Scene, at: int) -> int:
    """Of a backward call, its forward call, where only the same side has it."""
    forward = scene.forward_of(scene.nodes[at]) or scene.belongs_to(scene.nodes[at])
    return at if forward is None or forward.is_paired else forward.i


def from_elsewhere(scene: Scene, node: Node, row: TensorPair, d: float) -> Culprit:
    """A call that was given the result of another call than on the other side."""
    origin = scene.flow.producers(node.i, row.name)
    names = [scene.nodes[p].call.name if p is not None else "no call" for p in origin]
    reason = f"{row.name} comes from {names[0]} in actual, from {names[1]} in expected"
    return accuse(node, "structure", reason, d, row=row, inherited=0.0)


def written_through_view(scene: Scene, node: Node, row: TensorPair) -> Node | None:
    """The call that last wrote into part of an input, where some call gave it as it was before.

    `h[:4].add_(1)` has the slice as its result; `h` as a whole is nobody's.
    """
    found = _writing(scene, node, row.actual, 0)
    if found is None:
        return None
    before, writer = found
    return writer if _explains(row, before, writer) else None


def gathered(scene: Scene, node: Node, row: TensorPair) -> bool:
    """Whether on both sides an input is what a communication before it got, piece by piece.

    FSDP1 gathers its weights into pieces of one tensor, which no call then gives as a whole.
    """
    for at in range(node.i - 1, max(-1, node.i - _LOOK_BACK), -1):
        heard = scene.nodes[at].heard
        if heard is not None and len(pieces := scene.nodes[at].outputs) > 1:
            sides = (0, 1)
            if all(_is_joined(_side(row, n), [_side(piece, n) for piece in pieces]) for n in sides):
                return True
    return False


def _side(row: TensorPair, side: int) -> TensorRecord | None:
    return (row.actual, row.expected)[side]


def _is_joined(whole: TensorRecord | None, pieces: Sequence[TensorRecord | None]) -> bool:
    """Whether a tensor has the numbers of several others, by their statistics."""
    total = whole.summary if whole is not None else None
    known = [(each, each.summary) for each in pieces if each is not None and each.summary]
    if whole is None or total is None or total.norm is None or len(known) < len(pieces):
        return False
    if sum(each.numel for each, _ in known) != whole.numel:
        return False
    ends = [(s.min, s.max) for _, s in known if s.min is not None and s.max is not None]
    norms = [s.norm for _, s in known if s.norm is not None]
    if len(ends) < len(known) or len(norms) < len(known):
        return False
    return (total.min, total.max) == (min(e[0] for e in ends), max(e[1] for e in ends)) and (
        math.isclose(total.norm, math.hypot(*norms), rel_tol=SAME_SUM)
    )


def written_by_one_side(scene: Scene, node: Node, row: TensorPair) -> Found:
    """A call that writes into part of an input, and that the other side does not make."""
    for side, record in enumerate((row.actual, row.expected)):
        found = _writing(scene, node, record, side)
        if found is None or found[1].is_paired:
            continue
        writer = found[1]
        where = "actual" if side == 0 else "expected"
        reason = (
            f"{writer.call.name} only in {where}: it writes into part of {row.name} of "
            f"{node.call.name}, which differs"
        )
        d = scene.distance(node, row)
        return writer.i, accuse(writer, "structure", reason, d, row=row, inherited=0.0)
    return None


def written_at_the_end(scene: Scene) -> Found:
    """A call by which only one side writes into weights that an optimizer has stepped, after the
    last call of the model: nobody reads them any more, and they are what the run has come to."""
    stepped: tuple[set[Hashable], set[Hashable]] = (set(), set())
    last = -1
    for node in scene.nodes:
        if node.call.name.startswith("Optimizer."):
            for row in node.outputs:
                if row.role == "output":
                    for side, record in enumerate((row.actual, row.expected)):
                        if record is not None:
                            stepped[side].add(content(record))
        if node.call.name.startswith(("Module.", "Optimizer.")) and node.is_paired:
            last = max(node.i, *scene.inside(node), -1)
    for node in scene.nodes[last + 1 :]:
        if api_of(node.call.op) in _COPIES:  # the copy may be what is written to
            for row in node.outputs:
                for side in (0, 1):
                    if (record := _side(row, side)) is not None:
                        stepped[side].discard(content(record))
        if node.is_paired or not _writes_in_place(node) or node.i in scene.in_optimizer:
            continue
        side = 0 if node.pair.pair.actual is not None else 1
        made = {content(r) for r in (_side(row, side) for row in node.outputs) if r}
        for row in node.pair.tensors:
            record = _side(row, side)
            if row.role != "input" or record is None or content(record) in made:
                continue
            if _is_stepped(scene, node.i, row, side, stepped[side] - {None}):
                where = "actual" if side == 0 else "expected"
                reason = (
                    f"only {where} makes this call: it writes into a weight after the last call of "
                    "the model"
                )
                return node.i, accuse(node, "structure", reason, math.inf, row=row, inherited=0.0)
    return None


def _writes_in_place(node: Node) -> bool:
    name = node.call.op.rpartition(".")[2]
    is_named_so = name.endswith("_") and not name.endswith("__")
    return node.call.direction == "forward" and (is_named_so or name == "__setitem__")


def _is_stepped(
    scene: Scene, at: int, row: TensorPair, side: int, stepped: Collection[Hashable]
) -> bool:
    """Whether an input is a weight as an optimizer has left it, or a view of one."""
    record = _side(row, side)
    maker = scene.flow.producer.get((side, at, row.name))
    if maker is None or maker in scene.in_optimizer:
        return record is not None and content(record) in stepped
    node = scene.nodes[maker]
    if node.op_kind != "exact" or api_of(node.call.op) in _COPIES or node.container:
        return False
    given = next((each for each in node.pair.tensors if each.role == "input"), None)
    return given is not None and _is_stepped(scene, maker, given, side, stepped)


def _writing(
    scene: Scene, node: Node, whole: TensorRecord | None, side: int
) -> tuple[Node, Node] | None:
    """The call that gave a tensor, and the one that has last written into part of it since."""
    if whole is None:
        return None
    writer: Node | None = None
    for at in range(node.i - 1, max(-1, node.i - _LOOK_BACK), -1):
        earlier = scene.nodes[at]
        if earlier.container or earlier.pair.pair[side] is None:
            continue
        made = [(row.actual, row.expected)[side] for row in earlier.outputs]
        if _writes_part(earlier, made, whole):
            writer = writer or earlier
        elif writer is not None and any(_was(record, whole) for record in made):
            return earlier, writer
    return None


def _writes_part(node: Node, made: Sequence[TensorRecord | None], whole: TensorRecord) -> bool:
    name = node.call.op.rpartition(".")[2]
    if not name.endswith("_") or name.endswith("__"):
        return False
    parts = [record for record in made if record is not None]
    return any(part.dtype == whole.dtype and part.numel < whole.numel for part in parts)


def _was(before: TensorRecord | None, after: TensorRecord) -> bool:
    """Whether one tensor may be the other before part of it was written to."""
    if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if before.blob is None or after.blob is None:
        return True  # nobody can tell
    try:
        return bool((before.array() == after.array()).mean() > _LEFT_ALONE)
    except UnreadableCapture:
        return True


def _explains(row: TensorPair, before: Node, writer: Node) -> bool:
    """Whether what was there, and what was written, account for the difference."""
    if before.taint or writer.taint:
        return True
    return distance(row) <= ROUNDING * (1 + max(before.d_out, writer.d_out, writer.d_in))
