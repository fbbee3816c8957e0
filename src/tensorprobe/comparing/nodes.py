"""A pair of calls while it is judged: how far what went in and what came out is apart."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Literal

import msgspec

from tensorprobe.comparing.dataflow import is_written
from tensorprobe.comparing.evidence import Evidence
from tensorprobe.comparing.judge import (
    ROUNDING,
    distance,
    pair_roundoff,
    reduction,
    rms_size,
    same_bits,
)
from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.errors import UnreadableCapture
from tensorprobe.records import Call, TensorRecord
from tensorprobe.replay.kinds import Kind, kind_of

# Between this and ROUNDING an own error is named only in 16-bit and coarser dtypes, and only when
# nothing worse is found: noise of 1-2 ULP on every kernel of seven models stayed below 4.5.
FAINT = 4.8
# What may come out of a call that is not replayed, per unit that went in: it may amplify.
AMPLIFIES = 4.0
# Where the random numbers of a call began: no number of the program's.
_RANDOM_STATE = "buffers.rng_state"
_SUMS = ("product", "reduction", "scatter", "general")
_CANCELS = ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv")


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
    differences: list[str] = []
    evidence: tuple[Evidence, Evidence] | None = None
    op_kind: Kind | None = None  # None: a module

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
    def makes_sums(self) -> bool:
        return self.op_kind in _SUMS


def make_node(i: int, pair: CallPair, container: bool) -> Node:
    """A node without its distances."""
    inputs: list[TensorPair] = []
    outputs: list[TensorPair] = []
    for row in pair.tensors:
        if not row.name.endswith(_RANDOM_STATE):
            (outputs if is_written(row) else inputs).append(row)
    call = pair.call
    kind = None if call.name.startswith("Module.") else kind_of(call)
    if kind == "uninitialised":
        outputs = []  # torch.empty: whatever was there
    return Node(i, pair, call, container, inputs, outputs, op_kind=kind)


def exceeds(node: Node, long: float = 1.0) -> bool:
    """Whether a call's outputs differ by more than rounding and its inputs explain."""
    u = max((pair_roundoff(row) for row in node.outputs), default=0.0)
    if math.isinf(node.r_out):
        return not math.isinf(node.r_in)
    if node.same_in and node.d_in == 0:
        # nothing was inherited: in 16 bit less than 16 roundings can be told from noise
        return node.d_out > (FAINT if u >= 2.0**-11 else ROUNDING) * long
    return node.r_out > ROUNDING * (u * long + AMPLIFIES * node.r_in)


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
    return _cancelled_size(node) or _summed_size(node, row)


def _summed_size(node: Node, row: TensorPair) -> float:
    # with tensors, a replay tells more exactly
    return 0.0 if row.metrics is not None else summed_size(node, row)


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
    if node.call.op.rpartition(".")[2].rstrip("_") not in _CANCELS:
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
    if a.digest is not None and e.digest is not None and a.dtype == e.dtype:
        return a.digest != e.digest
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
