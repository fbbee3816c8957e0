"""All paired calls of one rank: how far apart they are, who made what, what lies inside what."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from tensorprobe.comparing import arguments
from tensorprobe.comparing.align import content, forward_of, is_constant
from tensorprobe.comparing.evidence import Evidence
from tensorprobe.comparing.heard import Heard, RankHears
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.comparing.opaque import opaque_modules
from tensorprobe.comparing.rounding import (
    ROUNDING,
    distance,
    is_moved,
    moved_values,
    pair_roundoff,
    reduction,
    rms_size,
    same_bits,
)
from tensorprobe.comparing.unwritten import calls_on_unwritten, is_of_objects
from tensorprobe.comparing.verdict import Culprit
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import IN_MEMORY, Call, TensorRecord, digests_tell
from tensorprobe.replay.kinds import Kind, api_of, is_running_statistic, kind_of, overwrites

# Between this and ROUNDING an own error is named only in 16-bit and coarser dtypes, and only when
# nothing worse is found: noise of 1-2 ULP on every kernel of seven models stayed below 4.5.
FAINT = 4.8
# What may come out of a call that is not replayed, per unit that went in: it may amplify.
AMPLIFIES = 4.0
CANCELS = 1e-3  # of the size that the terms add up to: less is what rounding leaves of them
# Of its size: inputs that are this far apart explain any result. Statistics of what is made of them
# may agree all the same: numbers that saturate have the same bounds and norm.
APART = 0.1
# Where the random numbers of a call began: no number of the program's.
_RANDOM_STATE = "buffers.rng_state"
_SUMS = ("product", "reduction", "scatter", "general")
_CANCELS = ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv")
_INPUTS = ("input", "parameter", "buffer")
# How many roundings apart the results of a backward are, if what its forward left for it is wrong;
# below, it is judged as any other call.
_CHANGED = 1000.0
_ILL = {
    *("solve", "solve_triangular", "triangular_solve", "lstsq", "inv", "inverse", "pinv", "det"),
    *("slogdet", "logdet", "svd", "svdvals", "eig", "eigh", "eigvals", "eigvalsh", "qr"),
    *("cholesky", "cholesky_solve", "cholesky_inverse", "lu", "lu_factor", "lu_solve", "ldl_solve"),
}
_READS = ("item", "tolist", "numpy", "__float__")
_IN_OPTIMIZER = 0.01  # by how much arguments may differ there that were read off tensors
_OPERATORS = ("Functional.", "Torch.", "Tensor.")


class Node(msgspec.Struct):
    """A pair of calls while it is being judged."""

    i: int
    pair: CallPair
    call: Call
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
    is_apart: bool = False  # what it was given is another thing on each side, though healthy
    unit_size: int = 0  # of a module that is one unit: how many calls one side shows inside
    differences: list[str] = []
    evidence: tuple[Evidence, Evidence] | None = None
    op_kind: Kind | None = None  # None: a module
    heard: Heard | None = None  # of other ranks, by a communication

    @property
    def is_paired(self) -> bool:
        return self.pair.is_paired

    @property
    def is_random(self) -> Literal["random", "dropout"] | None:
        """Whether the call draws random numbers, and how."""
        if self.container or self.op_kind not in ("random", "dropout"):
            return None
        return self.op_kind

    @property
    def is_ill_conditioned(self) -> bool:
        """Whether a rounding of its inputs may change all of its result."""
        name = api_of(self.call.op)
        return name.removeprefix("_").removeprefix("linalg_").removesuffix("_ex") in _ILL

    @property
    def makes_sums(self) -> bool:
        return self.op_kind in _SUMS

    @property
    def unit_out(self) -> float:
        """The unit roundoff of the coarsest of its outputs."""
        return max(map(pair_roundoff, self.outputs), default=0.0)

    def output(self, name: str) -> TensorPair | None:
        """The output of this name."""
        return next((row for row in self.outputs if row.name == name), None)


def make_node(i: int, pair: CallPair, container: bool) -> Node:
    """A node without its distances."""
    inputs: list[TensorPair] = []
    outputs: list[TensorPair] = []
    for row in pair.tensors:
        if not row.name.endswith(_RANDOM_STATE):
            (outputs if is_written(row) else inputs).append(row)
    call = pair.call
    if overwritten := overwrites(call):
        inputs = [row for row in inputs if row.name not in overwritten]
    kind = None if call.name.startswith("Module.") else kind_of(call)
    if kind == "uninitialised":
        outputs = []  # torch.empty: whatever was there
    return Node(i, pair, call, container, inputs, outputs, op_kind=kind)


def _hear(node: Node, hears: RankHears) -> None:
    """Of a communication: what it gave and got, and what others gave."""
    node.heard = hears.calls.get((node.call.step, node.call.name))
    if node.heard is None or node.call.direction != "forward":
        return
    own, made = node.heard.own, node.heard.got
    node.inputs = [row for row in node.inputs if row.name in own or row.role != "input"]
    node.outputs = [row for row in node.outputs if row.name in made or row.role != "output"]


def exceeds(node: Node, long: float = 1.0) -> bool:
    """Whether a call's outputs differ by more than rounding and its inputs explain."""
    u = node.unit_out
    if not node.same_in and node.is_ill_conditioned:
        return False
    if node.unit_size:
        long *= unit_growth(node.unit_size)
    if node.is_apart or math.isinf(node.r_out):
        return not (node.is_apart or _decides(node))
    if node.same_in and node.d_in == 0:
        # nothing was inherited: in 16 bit less than 16 roundings can be told from noise
        return node.d_out > (FAINT if u >= 2.0**-11 else ROUNDING) * long
    return node.r_out > ROUNDING * (u * long + AMPLIFIES * node.r_in)


def _decides(node: Node) -> bool:
    """Whether a call gives other integers of other numbers: which of them are chosen, say."""
    if node.d_in <= ROUNDING or node.op_kind not in ("selection", "exact"):
        return False
    return all(not pair_roundoff(row) for row in node.outputs if math.isinf(distance(row)))


def unit_growth(n_calls: int) -> float:
    """How much more error so many calls may have, one after the other, than one has."""
    return 4 * math.sqrt(1 + n_calls)


def has_other_shape(row: TensorPair) -> bool:
    """Whether a tensor has another shape than on the other side, or is not there."""
    return row.actual is None or row.expected is None or row.actual.shape != row.expected.shape


def has_other_shapes(node: Node) -> bool:
    """Whether a call was given, or gives, tensors of other shapes than on the other side."""
    rows = (*node.inputs, *node.outputs)
    return any(has_other_shape(row) for row in rows if row.role in ("input", "output"))


def wrong_buffer(node: Node) -> TensorPair | None:
    """What a call wrote beside its results, running statistics say, and differs by more than its
    inputs explain. No replay gives these."""
    for row in node.outputs:
        if row.role != "buffer" or same_bits(row):
            continue
        floor = max((rms_size(r.expected) for r in node.inputs if r.expected), default=0.0)
        r = relative(row, distance(row, floor if floor < 1e30 else 0.0))
        if r > ROUNDING * (pair_roundoff(row) + AMPLIFIES * node.r_in):
            return row
    return None


def relative(row: TensorPair, d: float) -> float:
    """A distance relative to the size of the tensor, instead of in roundings of it."""
    u = pair_roundoff(row)
    return d * u if u else d


def shrink_factor(node: Node, row: TensorPair | None) -> float:
    """How much more error a call's sums may have than one rounding."""
    n_in = max((r.actual.numel for r in node.inputs if r.actual), default=1)
    n_out = row.actual.numel if row is not None and row.actual else 1
    return reduction(n_in, n_out)


def size_floor(node: Node, row: TensorPair) -> float:
    """The size below which an output is what is left of larger numbers that cancelled."""
    if (cancelled := _cancelled_size(node)) or row.metrics is not None:
        return cancelled  # with tensors, a replay tells more exactly
    return summed_size(node, row)


def summed_size(node: Node, row: TensorPair) -> float:
    """A gradient that is a sum over many rounds to their size, though all of it may cancel."""
    if node.call.direction != "backward" or row.expected is None:
        return 0.0
    given = [r.expected for r in node.inputs if r.expected is not None]
    n = max((record.numel for record in given), default=0)
    if n < 2 * row.expected.numel:
        return 0.0
    size = max((rms_size(record) for record in given), default=0.0)
    return size * reduction(n, row.expected.numel) if size < 1e30 else 0.0


def _cancelled_size(node: Node) -> float:
    """Sums and differences round to the size of their terms, whatever is left of those."""
    if node.call.direction != "forward" or node.container:
        return 0.0
    if api_of(node.call.op) not in _CANCELS:
        return 0.0
    sizes = [rms_size(row.expected) for row in node.inputs if row.expected is not None]
    return max((size for size in sizes if size < 1e30), default=0.0)


def leaf_differs(row: TensorPair) -> bool:
    """Whether a tensor that no call made is another one, and not the same rounded otherwise."""
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
    if digests_tell(a, e) and a.dtype == e.dtype:
        # of statistics, rounding is allowed as much as where there is no digest beside them
        is_beside = (a.digest or "").startswith(IN_MEMORY) and pair_roundoff(row) > 0
        return not is_beside or distance(row) > 4
    return distance(row) > 4


def drew_otherwise(node: Node, kind: str) -> bool:
    """Whether the two sides drew different random numbers."""
    if kind == "random":
        return exceeds(node)
    row = next((row for row in node.outputs if row.actual and row.expected), None)
    given = next((row for row in node.inputs if row.actual and row.expected), None)
    if row is None or given is None or row.actual is None or row.expected is None:
        return False
    if row.metrics is not None and row.actual.blob and row.expected.blob:
        with suppress(UnreadableCapture):
            return _zeros_differ(row.actual, row.expected, given)
    # 1 - p of what is kept: other masks keep other numbers
    return exceeds(node)


def _zeros_differ(actual: TensorRecord, expected: TensorRecord, given: TensorPair) -> bool:
    """Whether zeros are in other places, but for those that were given."""
    a, e = actual.array() != 0, expected.array() != 0
    ours, theirs = given.actual, given.expected
    if ours and theirs and ours.blob and theirs.blob and ours.shape == actual.shape:
        usable = (ours.array() != 0) & (theirs.array() != 0)
        a, e = a & usable, e & usable
    differ = int((a != e).sum())
    return bool(differ > max(2, 0.01 * a.size))


def nonfinite_counts(record: TensorRecord | None) -> tuple[int, int]:
    """How many NaN, and how many infinities."""
    if record is None or record.summary is None:
        return (0, 0)
    return record.summary.nan_count, record.summary.inf_count


def nonfinite_differs(row: TensorPair) -> bool:
    """Whether NaN or infinity is in other places."""
    if row.metrics is not None:
        return row.metrics.nonfinite_disagree > 0
    a, e = row.actual, row.expected
    if a is not None and e is not None and a.summary is e.summary:
        return False
    return nonfinite_counts(a) != nonfinite_counts(e)


def find_containers(pairs: Sequence[CallPair]) -> list[bool]:
    """Which calls have others inside them: modules at `mix`, optimizer steps beside their ops, and
    custom functions whose backward is Python."""
    parents: set[tuple[int, int, str]] = set()
    for pair in pairs:
        for call in _calls(pair):
            if call.parent:
                parents.add((call.rank, call.step, call.parent))
    found = []
    for i, pair in enumerate(pairs):
        call = pair.call
        name = forward_of(call.name) if call.direction == "backward" else call.name
        # at L2 the parent of a backward operator is its forward one, which it is not inside of
        is_around = name.startswith(("Module.", "Optimizer."))
        inside = is_around and (call.rank, call.step, name) in parents
        if call.name.startswith("Optimizer.") and not inside and i + 1 < len(pairs):
            following = pairs[i + 1].call
            inside = following.step == call.step and not following.name.startswith(
                ("Module.", "Optimizer.")
            )
        if call.name.startswith("Function.") and call.direction == "backward":
            inside = _runs_calls(pairs, i)
        found.append(inside)
    return found


def steps_after_closures(pairs: Sequence[CallPair]) -> list[CallPair]:
    """The same calls, an optimizer's step after the closure it was given: it begins before the
    forward and backward in there, and steps by the gradients that those leave."""
    found: list[CallPair] = []
    waiting: list[tuple[int, CallPair]] = []  # steps, and the call that each comes after
    for i, pair in enumerate(pairs):
        last = _end_of_closure(pairs, i) if pair.call.name.startswith("Optimizer.") else i
        if last > i:
            waiting.append((last, pair))
        else:
            found.append(pair)
        while waiting and waiting[-1][0] == i:
            found.append(waiting.pop()[1])
    return found


def _end_of_closure(pairs: Sequence[CallPair], at: int) -> int:
    """The last call of the model's that runs inside of an optimizer's step; else the step."""
    step = pairs[at].call
    inside, last = {step.name}, at
    for i in range(at + 1, len(pairs)):
        call = pairs[i].call
        is_backward = call.direction == "backward" and last > at
        if call.step != step.step or not (is_backward or call.parent in inside):
            break
        inside.add(call.name)
        if is_backward or call.module or call.name.startswith("Module."):
            last = i
    return last


def _runs_calls(pairs: Sequence[CallPair], at: int) -> bool:
    """Whether the backward of a custom function is Python: forward calls between it and the next
    backward call. Checkpointing runs whole modules in there."""
    backward = pairs[at].call
    may_be = ("Optimizer.",) if "Checkpoint" in backward.name else ("Optimizer.", "Module.")
    for following in range(at + 1, len(pairs)):
        call = pairs[following].call
        if call.step != backward.step or call.name.startswith(may_be):
            return False
        if call.direction == "backward":
            return following > at + 1
    return False


class Dataflow:
    """For each side, which pair made the content that an input has."""

    def __init__(self, pairs: Sequence[CallPair], containers: Sequence[bool]) -> None:
        self.pairs = pairs
        # (side, pair, tensor name) -> the pair that made it
        self.producer: dict[tuple[int, int, str], int] = {}
        self.forward: dict[int, int] = {}  # a backward pair -> its forward pair
        # the pairs that were given a content, by side
        self._readers: dict[tuple[int, Hashable], list[int]] = {}
        for side in (0, 1):
            self._trace(side, containers)
        names: dict[tuple[int, int, str], int] = {}
        for i, pair in enumerate(pairs):
            call = pair.call
            if call.direction == "forward":
                names.setdefault((call.rank, call.step, call.name), i)
            elif (at := names.get((call.rank, call.step, forward_of(call.name)))) is not None:
                self.forward[i] = at

    def _trace(self, side: int, containers: Sequence[bool]) -> None:
        made: dict[Hashable, int] = {}
        around: dict[Hashable, int] = {}  # by modules and optimizers, as a whole
        for i, pair in enumerate(self.pairs):
            if pair.pair[side] is None:
                continue
            outputs = []
            for row in pair.tensors:
                record = row.actual if side == 0 else row.expected
                if record is None or (key := content(record)) is None:
                    continue
                role = record.role
                if role == "parameter_grad":
                    first = made.setdefault(key, i)  # what the engine has added up, seen here
                    if first != i:
                        self.producer[side, i, row.name] = first
                elif role == "output" or (role in ("buffer", "state") and is_written(row)):
                    outputs.append(key)
                else:
                    self._readers.setdefault((side, key), []).append(i)
                    at = made.get(key)
                    if at is None or self._is_part_of_step(at):
                        at = around.get(key, at)
                    if at is not None:
                        self.producer[side, i, row.name] = at
            if containers[i]:
                around.update(dict.fromkeys(outputs, i))
                continue
            for key in outputs:
                before = made.get(key)
                # A call of both sides is the better witness than one that only one side has.
                if before is None or pair.is_paired or not self.pairs[before].is_paired:
                    made[key] = i

    def _is_part_of_step(self, at: int) -> bool:
        """Whether a call is inside of an optimizer's step, and the other side steps otherwise."""
        pair = self.pairs[at]
        return not pair.is_paired and (pair.call.parent or "").startswith("Optimizer.")

    def is_one_sided(self, at: int) -> bool:
        """Whether only one side makes this call."""
        return not self.pairs[at].is_paired

    def readers(self, row: TensorPair) -> set[int]:
        """The pairs that were given this content.

        Where one side has a single number throughout, as fresh memory often is, others may hold the
        same by chance: the other side knows better."""
        sides = [
            (side, record)
            for side, record in enumerate((row.actual, row.expected))
            if record is not None
        ]
        telling = [(side, record) for side, record in sides if not is_constant(record)]
        return {
            at
            for side, record in telling or sides
            for at in self._readers.get((side, content(record)), ())
        }

    def producers(self, i: int, name: str) -> tuple[int | None, int | None]:
        return self.producer.get((0, i, name)), self.producer.get((1, i, name))


def _calls(pair: CallPair) -> list[Call]:
    return [call for call in (pair.pair.actual, pair.pair.expected) if call is not None]


def is_written(row: TensorPair) -> bool:
    """Whether a call made this content: an output, or an argument or buffer it wrote to in place.

    The latter are kept as `buffers.input.1`, named after the argument, and as
    `buffers.running_mean.after`; so is the state of an optimizer.
    """
    if row.role == "state":
        return row.name.endswith(".after")
    if row.role == "buffer":
        return row.name.startswith("buffers.input.") or row.name.endswith(".after")
    return row.role == "output"


def same_content(row: TensorPair, other: TensorPair) -> bool:
    """Whether two tensors are one by content, on a side that has both."""
    return any(
        a is not None and b is not None and (key := content(a)) is not None and key == content(b)
        for a, b in ((row.actual, other.actual), (row.expected, other.expected))
    )


class Scene:
    """What is known of the calls of one rank, in execution order, and who has been accused.

    `floors` gives, for a tensor, how far repeated runs of the expected side are apart;
    `same_settings` says that no version, switch or number of threads differs; `hears` has what
    other ranks gave.
    """

    def __init__(
        self,
        pairs: Sequence[CallPair],
        floors: Mapping[str, float] | None = None,
        same_settings: bool = True,
        hears: RankHears | None = None,
    ) -> None:
        self.floors = floors or {}
        self.hears = hears or RankHears()
        self.same_settings = same_settings
        self.culprits: list[tuple[int, Culprit]] = []  # with the node each is at
        pairs = steps_after_closures(pairs)
        containers = find_containers(pairs)
        units = opaque_modules(pairs)
        for i in units:
            containers[i] = False
        self.unit_of = {at: i for i, inside in reversed(units.items()) for at in inside}
        self.largest_unit = max(map(len, units.values()), default=0)
        self.flow = Dataflow(pairs, containers)
        self.nodes = [make_node(i, p, containers[i]) for i, p in enumerate(pairs)]
        for node in self.nodes:
            _hear(node, self.hears)
        for i, inside in units.items():
            self.nodes[i].unit_size = len(inside)
        self._children = self._find_children()
        for at in calls_on_unwritten(self.nodes, self.flow.forward):
            node = self.nodes[at]
            node.inputs = [row for row in node.inputs if row.role == "parameter"]
            node.outputs = []
        self.objects: str | None = None  # the first call on a pickled object that differs
        for node in self.nodes:
            if is_of_objects(node.call):
                self._leave_out_objects(node)
        for node in self.nodes:
            self._leave_out_workspaces(node)
        self._settle_places()
        for node in self.nodes:
            self._measure(node)
        for node in self.nodes:
            self._inherit(node)
            self._part(node)
        self.has_tensors = any(
            row.metrics is not None for node in self.nodes for row in node.pair.tensors
        )
        self.parameter_names = self._parameter_names()
        self.parameters = {  # by step and label, as the step first has them
            (node.call.step, label_of(node.call, row)): row
            for node in reversed(self.nodes)
            for row in node.inputs
            if row.role == "parameter"
        }
        # at L0 and L2 much of what makes a tensor goes unseen
        self.sees_all = any(map(sees_operators, pairs))
        self.first_step = min((node.call.step for node in self.nodes), default=0)
        self._recomputed: dict[object, list[Node]] | None = None
        self._users: dict[int, list[int]] | None = None
        self._effects: set[Hashable] | None = None
        self._names: dict[tuple[int, str], int] | None = None
        self._units: dict[int, float] = {}  # by step
        self._memory: tuple[set[Hashable], set[Hashable]] | None = None
        self.in_optimizer = {
            at
            for node in self.nodes
            if node.call.name.startswith("Optimizer.")
            for at in (node.i, *self.inside(node))
        }
        self._explain_numbers()

    def _explain_numbers(self) -> None:
        """Numbers that a program reads off tensors differ by what those do: an argument that is
        made of them is no other argument. It is one more input that differs.

        Within an optimizer that has the same settings, arguments come from nowhere else; a line
        search divides what is left of numbers that cancel.
        """
        set_otherwise = {
            node.call.step
            for node in self.nodes
            if node.differences and node.call.name.startswith("Optimizer.")
        }
        read = 0.0
        for node in self.nodes:
            actual, expected, _ = node.pair.pair
            if actual is None or expected is None:
                continue
            if api_of(node.call.op) in _READS and node.r_in < APART:
                read = max(read, node.r_in)
            if not (read and node.differences):
                continue
            found = arguments.computed_differences(actual, expected)
            is_inside = node.i in self.in_optimizer and node.call.step not in set_otherwise
            if found and max(found) <= (_IN_OPTIMIZER if is_inside else AMPLIFIES * read):
                node.differences = []
                node.same_in = False
                node.r_in = max(node.r_in, *found)
                if node.unit_out:
                    node.d_in = max(node.d_in, max(found) / node.unit_out)

    def _leave_out_objects(self, node: Node) -> None:
        # other calls are on memory that is got for them
        if self.objects is None and node.call.name.startswith("Distributed."):
            differ = (same_bits(row) is False or distance(row) > 0 for row in node.outputs)
            self.objects = node.call.name if any(differ) else None
        node.inputs, node.outputs, node.differences = [], [], []

    def _leave_out_workspaces(self, node: Node) -> None:
        """Of an ATen operator with several results, those that change nothing.

        Nobody reads them, or only the operator's own backward, whose results come out alike: memory
        that was never wholly written.
        """
        outputs = [row for row in node.outputs if row.role == "output"]
        if len(outputs) < 2 or not node.call.op.startswith("torch.ops."):
            return
        readers = [
            [self.nodes[at] for at in sorted(self.flow.readers(row)) if at != node.i]
            for row in outputs
        ]
        spare = [not self._matters(node, *pair) for pair in zip(outputs, readers, strict=True)]
        if all(spare):
            return
        for row, found, is_spare in zip(outputs, readers, spare, strict=True):
            if not is_spare:
                continue
            node.outputs.remove(row)
            for reader in found:
                reader.inputs = [other for other in reader.inputs if not same_content(other, row)]
                reader.outputs = [other for other in reader.outputs if not same_content(other, row)]

    def _matters(self, node: Node, row: TensorPair, readers: Sequence[Node]) -> bool:
        """Whether a result is read by others than the operator's own backward, or changes that."""
        for reader in readers:
            if reader.call.op.startswith("torch.ops.aten.detach"):
                continue  # what is saved for backward is detached first
            if reader.call.direction != "backward" or reader.call.parent != node.call.name:
                return True
            others = [other for other in reader.inputs if not same_content(other, row)]
            given = max((self.distance(reader, other) for other in others), default=0.0)
            made = max((self.distance(reader, other) for other in reader.outputs), default=0.0)
            if made > _CHANGED * max(given, 1.0):
                return True
        return False

    def _settle_places(self) -> None:
        """Tell numbers in other places from others that have the same statistics.

        A call that is given other numbers makes other numbers: where the norm is that of a few, as
        after a steep softmax, it does not show the rest.
        """
        anew: set[Hashable] = set()
        for node in self.nodes:
            for row in node.inputs:
                row.is_made_anew = _contents(row) in anew
            if not node.container:
                anew |= _made_anew(node, node.inputs)
        for node in self.nodes:
            if node.container and any(is_moved(row) for row in node.outputs):
                within = self.inside(self.forward_of(node) or node)
                anew |= _made_anew(node, [row for at in within for row in self.nodes[at].outputs])
        for node in self.nodes:
            for row in (*node.inputs, *node.outputs):
                row.is_made_anew = _contents(row) in anew
                row.distance = None

    def _measure(self, node: Node) -> None:
        for row in node.inputs:
            d = self.distance(node, row)
            if d:
                node.d_in, node.r_in = max(node.d_in, d), max(node.r_in, relative(row, d))
            if same_bits(row) is False:
                node.same_in = False
        for told in node.heard.rows if node.heard is not None else ():
            if told.distance:
                node.d_in = max(node.d_in, told.distance)
                node.r_in = max(node.r_in, told.relative)
            if told.same_bits is False:
                node.same_in = False
        for row in node.outputs:
            if _is_sorted_otherwise(node, row):
                continue
            d = self.distance(node, row)
            if d:
                d = self.distance(node, row, size_floor(node, row))
                node.d_out, node.r_out = max(node.d_out, d), max(node.r_out, relative(row, d))
            if same_bits(row) is False:
                node.same_out = False
        actual, expected, _ = node.pair.pair
        if actual is not None and expected is not None:
            node.differences = arguments.differences(actual, expected)
            if not node.container:  # else the calls inside tell which of them is given it
                node.differences += arguments.settings(actual, expected)

    def _inherit(self, node: Node) -> None:
        """A backward call depends on what its forward call was given and made of it."""
        at = self.flow.forward.get(node.i)
        if at is not None:
            forward = self.nodes[at]
            node.d_in = max(node.d_in, forward.d_in, forward.d_out)
            node.r_in = max(node.r_in, forward.r_in, forward.r_out)
            node.same_in = node.same_in and forward.same_in and forward.same_out

    def _part(self, node: Node) -> None:
        """Whether a call was given things that are far apart, or were made of such in forward."""
        if node.r_in >= APART:
            node.is_apart = True
        elif node.call.direction == "forward" and not node.container:
            makers = [
                self.nodes[at]
                for row in node.inputs
                if _has_other_content(row)
                for at in self.flow.producers(node.i, row.name)
                if at is not None
            ]
            node.is_apart = any(m.is_apart and m.call.direction == "forward" for m in makers)

    def distance(self, node: Node, row: TensorPair, floor: float = 0.0) -> float:
        """How far a tensor is from its partner, less where repeated runs are as far apart."""
        found = distance(row, floor)
        if self.floors and row.expected is not None:
            noise = self.floors.get(place(node.call, row.expected), 0.0)
            if found <= 3 * noise:
                return min(found, 1.0)
        return found

    def gradient_distance(self, node: Node, row: TensorPair) -> float:
        """How far a gradient that an optimizer is given is from its partner.

        Where it is far smaller than others of its module, what is left of terms that cancel (the
        bias of keys, before a softmax), it rounds to the size of those.
        """
        found = self.distance(node, row)
        module = row.name.rpartition(".")[0]
        alike = [
            r for r in node.inputs if r.role == row.role and r.name.rpartition(".")[0] == module
        ]
        size = max((rms_size(r.expected) for r in alike if r.expected), default=0.0)
        own = [rms_size(record) for record in (row.actual, row.expected) if record]
        if found and max(own, default=0.0) < CANCELS * size:
            return self.distance(node, row, size)
        return found

    def furthest(self, node: Node) -> TensorPair | None:
        """The output that differs most."""
        return max(node.outputs, key=lambda row: self.distance(node, row), default=None)

    def forward_of(self, node: Node) -> Node | None:
        """Of a backward call, its forward call."""
        at = self.flow.forward.get(node.i)
        return None if at is None else self.nodes[at]

    def users(self, at: int) -> list[int]:
        """The forward calls, no modules, that were given a result of this one."""
        if self._users is None:
            self._users = {}
            for (_, user, _), maker in self.flow.producer.items():
                node = self.nodes[user]
                if not node.container and node.call.direction == "forward":
                    users = self._users.setdefault(maker, [])
                    if user not in users:
                        users.append(user)
        return self._users.get(at, [])

    def is_effect(self, node: Node) -> bool:
        """Whether what a call gives, and differs, is what a model as a whole gives."""
        if self._effects is None:
            self._effects = {
                content(record)
                for other in self.nodes
                if other.is_paired and _is_model(other.call)
                for row in other.outputs
                if row.actual and row.expected and row.actual.shape == row.expected.shape
                if self.distance(other, row) > FAINT
                for record in (row.actual, row.expected)
            } - {None}
        return any(
            record is not None and content(record) in self._effects
            for row in node.outputs
            for record in (row.actual, row.expected)
        )

    def is_weight(self, node: Node, row: TensorPair) -> bool:
        """Whether an input that no call made is a weight or a running statistic, where no modules
        are recorded that would say so."""
        a, e = row.actual, row.expected
        if self.parameter_names or a is None or e is None or node.call.name.startswith("Module."):
            return False
        return (a.requires_grad and e.requires_grad) or is_running_statistic(node.call, row.name)

    def coarsest_unit(self, step: int) -> float:
        """The unit roundoff of the coarsest dtype that calls of a step give."""
        if step not in self._units:
            nodes = (node for node in self.nodes if node.call.step == step)
            rows = (row for node in nodes for row in node.outputs if row.role == "output")
            self._units[step] = max(map(pair_roundoff, rows), default=0.0)
        return self._units[step]

    def named(self, step: int, name: str) -> int | None:
        """The pair of this name."""
        if self._names is None:
            self._names = {(node.call.step, node.call.name): node.i for node in self.nodes}
        return self._names.get((step, name))

    def forward_difference(self, step: int) -> float:
        """How far apart results are at most that the modules of a step give, of the same shapes,
        where no culprit is behind it; relative to their size."""
        return max(
            (
                node.r_out
                for node in self.nodes
                if node.call.step == step
                and node.call.direction == "forward"
                and node.call.module
                and node.is_paired
                and not (node.taint or node.i in self.in_optimizer)
                and math.isfinite(node.r_out)
                and not has_other_shapes(node)
            ),
            default=0.0,
        )

    def is_only_overwritten(self, node: Node) -> bool:
        """Whether a call gives a view of memory that others only write to: FSDP frees and takes the
        memory of its parameters again, with whatever was there."""
        if node.op_kind != "exact" or node.call.direction != "forward" or not node.outputs:
            return False
        if self._memory is None:
            self._memory = _read_and_overwritten(self.nodes)
        read, overwritten = self._memory
        contents = [_contents(row) for row in node.outputs]
        return all(each in overwritten and each not in read for each in contents)

    def belongs_to(self, node: Node) -> Node | None:
        """Of an operator that runs inside backward, seen at L2, the forward one it belongs to."""
        call = node.call
        if call.direction != "backward" or not call.parent:
            return None
        for at in range(node.i - 1, -1, -1):
            other = self.nodes[at].call
            if other.name == call.parent and other.step == call.step:
                return self.nodes[at]
        return None

    def recomputed(self, node: Node) -> list[Node]:
        """Forward calls like this one that ran after backward had begun."""
        if self._recomputed is None:
            self._recomputed = {}
            in_backward: set[int] = set()
            for other in self.nodes:
                if other.call.direction == "backward":
                    in_backward.add(other.call.step)
                elif other.call.step in in_backward:
                    self._recomputed.setdefault(_likeness(other), []).append(other)
        found = self._recomputed.get(_likeness(node), [])
        return [other for other in found if other is not node]

    def inside(self, node: Node) -> set[int]:
        """What ran inside a module, or as part of an optimizer's step."""
        if node.call.name.startswith("Optimizer."):
            return self._inside_optimizer(node)
        return self._descendants(node)

    def is_inside(self, node: Node, around: Node) -> bool:
        """Whether a call ran while another did; of a backward call, its forward one."""
        call = (self.forward_of(node) or node).call
        while call.parent and call.step == around.call.step:
            if call.parent == around.call.name:
                return True
            at = self.named(call.step, call.parent)
            if at is None:
                return False
            call = self.nodes[at].call
        return False

    def _descendants(self, node: Node) -> set[int]:
        found: set[int] = set()
        todo = [node]
        while todo:
            call = todo.pop().call
            for at in self._children.get((call.step, call.name), ()):
                if at > node.i and at not in found:
                    found.add(at)
                    todo.append(self.nodes[at])
        return found

    def _inside_optimizer(self, node: Node) -> set[int]:
        """Its own calls: those after the closure, where it was given one, and what torch's line
        searches make between two calls of that."""
        children = self._children.get((node.call.step, node.call.name))
        if children:
            closure = max((at for at in range(node.i + 1, children[-1]) if self._is_models(at)),
                          default=node.i)  # fmt: skip
            return {at for at in children if at > closure or self._is_of_torch(at)}
        found = set()  # other tools, and older captures, do not say what is inside of what
        for at in range(node.i + 1, len(self.nodes)):
            if self.nodes[at].call.name.startswith(("Module.", "Optimizer.")):
                break
            found.add(at)
        return found

    def _is_of_torch(self, at: int) -> bool:
        stack = self.nodes[at].call.stack
        return bool(stack) and "/torch/optim/" in stack[0].replace("\\", "/")

    def _is_models(self, at: int) -> bool:
        call = self.nodes[at].call
        return call.direction == "backward" or call.name.startswith("Module.")

    def _find_children(self) -> dict[tuple[int, str], list[int]]:
        children: dict[tuple[int, str], list[int]] = {}
        for node in self.nodes:
            if node.call.parent is not None:
                children.setdefault((node.call.step, node.call.parent), []).append(node.i)
        return children

    def _parameter_names(self) -> dict[object, str]:
        names: dict[object, str] = {}
        for node in self.nodes:
            call = node.call
            for row in node.inputs:
                if row.role not in ("parameter", "buffer"):
                    continue
                label = label_of(call, row)
                for record in (row.actual, row.expected):
                    if record is not None and (key := content(record)) is not None:
                        names.setdefault(key, label)
        return names


def _is_sorted_otherwise(node: Node, row: TensorPair) -> bool:
    """Whether a call that sorts numbers which differ by rounding has put the same places in another
    order: of two that are nearly equal, either may come first."""
    a, e = row.actual, row.expected
    if node.op_kind != "selection" or node.same_in or row.metrics is not None:
        return False
    if a is None or e is None or a.summary is None or e.summary is None or pair_roundoff(row):
        return False
    return a.shape == e.shape and moved_values(a.summary, e.summary)


def _read_and_overwritten(nodes: Sequence[Node]) -> tuple[set[Hashable], set[Hashable]]:
    """The contents that calls read, but for views of them, and those that they write over."""
    read: set[Hashable] = set()
    for node in nodes:
        if not node.container:
            given = {_contents(row) for row in node.inputs}
            is_view = node.op_kind == "exact" and given == {_contents(r) for r in node.outputs}
            read |= set() if is_view else given
    overwritten: set[Hashable] = set()
    for node in nodes:
        known = {id(row) for row in (*node.inputs, *node.outputs)}
        overwritten |= {
            _contents(row)
            for row in node.pair.tensors
            if row.role == "input" and id(row) not in known
        }
    return read, overwritten


def _is_model(call: Call) -> bool:
    """Whether a call is of a module that no other module calls."""
    if not call.name.startswith("Module.") or call.direction != "forward":
        return False
    return not (call.parent or "").startswith("Module.")


def sees_operators(pair: CallPair) -> bool:
    """Whether a call is an operator's, as L1 and mix record them; a model's, not an optimizer's."""
    return pair.call.name.startswith(_OPERATORS)


def label_of(call: Call, row: TensorPair) -> str:
    """What the program calls a parameter, a buffer or a gradient: "layers.0.weight"."""
    first, dot, rest = row.name.partition(".")
    is_section = dot and first in ("parameters", "parameters_grad", "buffers", "output", "state")
    label = (rest if is_section else row.name).removesuffix(".after")
    if call.name.startswith("Optimizer.") or not call.module:
        return label
    return f"{call.module}.{label}"


def _made_anew(node: Node, given: Sequence[TensorPair]) -> set[Hashable]:
    """The results with the same statistics that are no permutation: what was given differs by
    rounding."""
    others = [row for row in given if same_bits(row) is False and not is_moved(row)]
    if not others or any(relative(row, distance(row)) >= APART for row in others):
        return set()
    return {_contents(row) for row in node.outputs if same_bits(row) is False and is_moved(row)}


def _contents(row: TensorPair) -> tuple[Hashable, Hashable]:
    a, e = row.actual, row.expected
    return content(a) if a is not None else None, content(e) if e is not None else None


def _has_other_content(row: TensorPair) -> bool:
    """Whether bits or statistics differ."""
    ours, theirs = _contents(row)
    return ours is None or ours != theirs


def _likeness(node: Node) -> object:
    call = node.call
    return call.step, call.op, call.module, tuple(record.shape for record in call.tensors)


def place(call: Call, record: TensorRecord) -> str:
    """What a tensor is known by among repeated runs."""
    return f"{call.rank}/{call.step}/{record.name}"
