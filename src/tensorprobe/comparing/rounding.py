"""How far two tensors are apart, in units of what rounding explains."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tensorprobe.comparing.measure import CallPair, TensorPair
from tensorprobe.records import IN_MEMORY, Call, TensorRecord, TensorSummary, digests_tell
from tensorprobe.replay.kinds import api_of, kind_of
from tensorprobe.tensors.pair_metrics import FRACTION_BITS

Mode = Literal["tensors", "digest", "stats", "structure"]
ENOUGH = 8  # numbers: of fewer, rounding may leave statistics as they are
SAME_SUM = 1e-13  # relative: sums of the same numbers in another order
# The same of one tensor's numbers, added up in float64. What one rounding of one of a hundred
# thousand numbers changes is mostly more. Measured: below 5 and 0.1 of float64's spacing.
_SAME_NORM, _SAME_MEAN = 1e-14, 2.0**-52
_AS_WIDE_AS_SUMS = ("float64", "complex128")
# A healthy kernel stays below 3 units of own error, whatever its dtype; see docs/compare.md.
ROUNDING = 16.0
# Of dtypes with a smaller range than float32: the smallest normal number, and the largest.
RANGES = {
    "float16": (2.0**-14, 65504.0),
    "float8_e4m3fn": (2.0**-6, 448.0),
    "float8_e4m3fnuz": (2.0**-7, 240.0),
    "float8_e5m2": (2.0**-14, 57344.0),
    "float8_e5m2fnuz": (2.0**-15, 57344.0),
}
_TF32, _BF16 = 2.0**-11, 2.0**-9  # unit roundoffs
_WORDS = {"tf32": _TF32, "bf16": _BF16, "high": _TF32, "medium": _BF16}
_NAMES = {_TF32: "TF32", _BF16: "bfloat16"}
# For each device: switches of products, and of convolutions.
_SWITCHES = {
    "cuda": (
        ("numerics.matmul_tf32", "numerics.matmul_fp32_precision",
         "numerics.float32_matmul_precision"),
        ("numerics.cudnn_tf32",),
    ),
    "npu": (("npu.matmul_hf32",), ("npu.conv_hf32",)),
    "cpu": (("numerics.mkldnn_fp32_precision",), ("numerics.mkldnn_fp32_precision",)),
}  # fmt: skip
SWITCHES = tuple(
    dict.fromkeys(name for both in _SWITCHES.values() for each in both for name in each)
)


@functools.cache
def roundoff(dtype: str) -> float:
    """Unit roundoff, half the distance from 1 to the next number; 0 for integers and bools."""
    bits = FRACTION_BITS.get(dtype)
    return 0.0 if bits is None else 2.0 ** -(bits + 1)


def pair_roundoff(pair: TensorPair) -> float:
    """Of the coarser of the two dtypes, or of the arithmetic where that is coarser still."""
    a, e = pair.actual, pair.expected
    if a is None or e is None or a.dtype == e.dtype:
        record = a or e
        return max(roundoff(record.dtype), pair.coarse) if record else 0.0
    return max(roundoff(a.dtype), roundoff(e.dtype), pair.coarse)


def content_mode(pair: TensorPair) -> Mode:
    """By what the two tensors can be compared."""
    a, e = pair.actual, pair.expected
    if a is None or e is None:
        return "structure"
    if pair.metrics is not None:
        return "tensors"
    if digests_tell(a, e) and not (a.digest or "").startswith(IN_MEMORY):
        return "digest"
    return "stats" if a.summary is not None and e.summary is not None else "structure"


def same_bits(pair: TensorPair) -> bool | None:
    """Whether both hold the same bits; None when nobody can tell."""
    a, e = pair.actual, pair.expected
    if a is None or e is None:
        return None
    if a.dtype != e.dtype:
        return False
    if digests_tell(a, e):
        return a.digest == e.digest and a.shape == e.shape
    if pair.metrics is not None:
        return pair.metrics.is_equal
    if a.summary is not None and e.summary is not None and a.summary != e.summary:
        if _sums_in_another_order(a, e) and moved_values(a.summary, e.summary):
            return None  # the same numbers may have these sums
        # another tool's mean and norm of the same bits are others
        return False if a.summary.counted else None
    return None


def _sums_in_another_order(a: TensorRecord, e: TensorRecord) -> bool:
    """Whether means and norms of equal numbers may differ in their last digits."""
    return a.stride != e.stride or a.device.partition(":")[0] != e.device.partition(":")[0]


def distance(pair: TensorPair, floor: float = 0.0) -> float:
    """How far a tensor is from its partner, in roundings of its own size; 0 is equal.

    Infinite for integers that differ, for NaN or infinity on one side only, for shapes that differ.
    `floor` is the size below which numbers are what is left of larger ones that cancelled.
    """
    if floor:
        return _distance(pair, floor)
    if pair.distance is None:
        pair.distance = _distance(pair, 0.0)
    return pair.distance


def _distance(pair: TensorPair, floor: float) -> float:
    a, e = pair.actual, pair.expected
    if a is None or e is None or same_bits(pair):
        return 0.0
    if a.shape != e.shape:
        return math.inf
    u = pair_roundoff(pair)
    if pair.metrics is not None:
        m = pair.metrics
        if m.nonfinite_disagree:
            return math.inf
        if not u:
            return math.inf if m.mismatched else 0.0
        return _ratio(m.rms_error, u * max(m.rms_expected, floor))
    if a.summary is None or e.summary is None:
        return 0.0
    other_bits = a.dtype == e.dtype and same_bits(pair) is False
    if other_bits and is_moved(pair):
        return math.inf if not u else 1 / u
    if a.summary == e.summary:
        return math.inf if not u and other_bits else 0.0
    relative = summary_distance(a, e, floor)
    return _ratio(relative, u) if u else (math.inf if relative else 0.0)


def summary_distance(a: TensorRecord, e: TensorRecord, floor: float = 0.0) -> float:
    """The relative error that two summaries show: of extremes, norm and mean, the largest."""
    s, t = a.summary, e.summary
    assert s is not None
    assert t is not None
    if (s.nan_count, s.inf_count) != (t.nan_count, t.inf_count):
        return math.inf
    if not s.counted and roundoff(e.dtype) and (s.norm is None or t.norm is None):
        largest = max(_size(t.min), _size(t.max), floor)
        return _ratio(max(_shift(s.max, t.max), _shift(s.min, t.min)), largest)
    if s.mean is None or t.mean is None or s.norm is None or t.norm is None:
        return 0.0 if (s.min, s.max, s.zero_count) == (t.min, t.max, t.zero_count) else 1.0
    n = max(e.numel, 1)
    rms = max(t.norm / math.sqrt(n), floor)
    peak = max(_size(t.min), _size(t.max), floor)
    if peak > 1e30:  # a mask: only the other end says something of the rest
        ends = [(a, e) for a, e in ((s.min, t.min), (s.max, t.max)) if _size(e) < 1e30]
        return max((_ratio(_shift(a, e), max(_size(e), 1.0)) for a, e in ends), default=0.0)
    return max(
        _ratio(max(abs(s.norm - t.norm) / math.sqrt(n), abs(s.mean - t.mean)), rms),
        _ratio(max(_shift(s.max, t.max), _shift(s.min, t.min)), peak),
    )


def moved_values(a: TensorSummary, e: TensorSummary) -> bool:
    """Whether two summaries are those of the same numbers: with other bits, they are in other
    places. Rounding changes norm and mean in their last digits; a permutation does not."""
    if a.norm is None or e.norm is None or a.mean is None or e.mean is None or not a.norm:
        return False
    if (a.min, a.max, a.zero_count) != (e.min, e.max, e.zero_count):
        return False
    peak = max(_size(a.min), _size(a.max))
    return (
        math.isclose(a.norm, e.norm, rel_tol=SAME_SUM) and abs(a.mean - e.mean) <= SAME_SUM * peak
    )


def is_moved(pair: TensorPair) -> bool:
    """Whether a tensor whose bits differ has the same numbers in other places."""
    a, e = pair.actual, pair.expected
    if pair.is_made_anew or a is None or e is None or a.summary is None or e.summary is None:
        return False
    s, t = a.summary, e.summary
    if e.numel < ENOUGH or not moved_values(s, t):
        return False
    if e.dtype in _AS_WIDE_AS_SUMS or not s.counted or s.norm is None or t.norm is None:
        return True
    assert s.mean is not None
    assert t.mean is not None
    return math.isclose(s.norm, t.norm, rel_tol=_SAME_NORM) and (
        abs(s.mean - t.mean) <= _SAME_MEAN * rms_size(e)
    )


def reduction(n_in: int, n_out: int) -> float:
    """How much more error a long sum may have than one rounding."""
    return math.sqrt(max(1.0, n_in / max(n_out, 1)))


def rms_size(record: TensorRecord) -> float:
    """The size of a tensor's numbers, as its summary has it."""
    s = record.summary
    if s is None or s.norm is None or not record.numel:
        return 0.0
    return s.norm / math.sqrt(record.numel)


def _size(value: float | int | bool | None) -> float:
    return abs(float(value)) if value is not None and math.isfinite(value) else 0.0


def _shift(a: float | int | bool | None, e: float | int | bool | None) -> float:
    if a is None or e is None or not (math.isfinite(a) and math.isfinite(e)):
        return 0.0 if a == e else math.inf
    return abs(float(a) - float(e))


def _ratio(a: float, b: float) -> float:
    if a == 0:
        return 0.0
    return a / b if b else math.inf


def number_text(value: float) -> str:
    """A size for a person to read: 4.07, 8,388, 1.68e+07."""
    if math.isinf(value):
        return "infinite"
    if 100 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def product_unit(facts: Mapping[str, Any], call: Call) -> float:
    """The unit roundoff in which a product of float32 is computed, where a switch makes it coarser
    than its own; else 0."""
    floats = [r for r in call.tensors if r.role in ("input", "output", "parameter")]
    if not floats or any(record.dtype != "float32" for record in floats if "float" in record.dtype):
        return 0.0
    name = call.name.removesuffix(".backward") if call.direction == "backward" else call.name
    if not name.startswith("Module.") and kind_of(call) != "product":
        return 0.0
    device = floats[0].device.partition(":")[0]
    switches = _SWITCHES.get(device)
    if switches is None:
        return 0.0
    is_convolution = "conv" in api_of(call.op).lower()
    return max((switch_unit(facts, switch) for switch in switches[is_convolution]), default=0.0)


def switch_value(facts: Mapping[str, Any], switch: str) -> object:
    """How a switch was set; None where it was not written down."""
    room, _, name = switch.partition(".")
    held = facts.get(room)
    return held.get(name) if isinstance(held, Mapping) else None


def switch_unit(facts: Mapping[str, Any], switch: str) -> float:
    """The unit roundoff that a switch gives to products; 0 if none."""
    value = switch_value(facts, switch)
    if value is True:
        return _TF32
    return _WORDS.get(value, 0.0) if isinstance(value, str) else 0.0


def autocast_unit(calls: Iterable[Call | None]) -> float:
    """The coarsest unit roundoff of the dtypes that autocast gives to some calls."""
    return max(
        (
            roundoff(note.rpartition(".")[2].rpartition(" ")[2])
            for call in calls
            if call is not None
            for note in call.notes
            if note.startswith("autocast ")
        ),
        default=0.0,
    )


def autocast_units(pairs: Sequence[CallPair]) -> dict[int, float]:
    """The coarsest unit roundoff that autocast gives to modules, by step."""
    units: dict[int, float] = {}
    for pair in pairs:
        if pair.call.name.startswith("Module."):
            step = pair.call.step
            units[step] = max(
                units.get(step, 0.0), autocast_unit((pair.pair.actual, pair.pair.expected))
            )
    return units


def coarsen_modules(pairs: Sequence[CallPair], units: Mapping[int, float]) -> None:
    """Let what modules give be judged by autocast's dtype, where operators were not recorded: their
    results may be float32, and what is inside of them is not."""
    for pair in pairs:
        if unit := units.get(pair.call.step, 0.0):
            for row in pair.tensors:
                if row.expected is not None and "float" in row.expected.dtype:
                    row.coarse = max(row.coarse, unit)


def coarsen(
    pairs: Sequence[CallPair], facts: Callable[[int], Sequence[Mapping[str, Any]]]
) -> dict[str, int]:
    """Let products that a switch makes coarser be judged by its rounding; where it is on in one
    side only, what to say of it and how many there are. `facts` gives those of a rank, on both
    sides."""
    told: dict[str, int] = {}
    for pair in pairs:
        if not pair.is_paired:
            continue
        calls = (pair.pair.actual, pair.pair.expected)
        known = facts(pair.call.rank)
        units = [product_unit(f, c) for f, c in zip(known, calls, strict=True) if c is not None]
        if not any(units):
            continue
        for row in pair.tensors:
            if row.role == "output":
                row.coarse = max(units)
        if units[0] != units[1]:
            side = "actual" if units[0] > units[1] else "expected"
            text = f"{_NAMES[max(units)]} is on in {side}"
            told[text] = told.get(text, 0) + 1
    return told


def switch_notes(told: Mapping[str, int]) -> Iterator[str]:
    """What to say of them."""
    for text, n in told.items():
        yield f"{text}: {n} products of float32 are judged by its rounding"


def dtypes_found(pairs: Sequence[CallPair]) -> dict[tuple[str, str], int]:
    """How many calls compute in which dtypes on the two sides, where they differ."""
    found: dict[tuple[str, str], int] = {}
    for pair in pairs:
        kinds = {
            (row.actual.dtype, row.expected.dtype)
            for row in pair.tensors
            if row.role == "output" and row.actual and row.expected
        }
        for ours, theirs in kinds:
            if ours != theirs and "float" in ours and "float" in theirs:
                found[ours, theirs] = found.get((ours, theirs), 0) + 1
    return found


def dtype_notes(found: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """What to say of them."""
    for (ours, theirs), n in sorted(found.items(), key=lambda item: -item[1])[:2]:
        calls = "1 call gives" if n == 1 else f"{n} calls give"
        yield f"{calls} {ours} in actual and {theirs} in expected: judged by the coarser of the two"
