"""Which calls of a recording made NaN or infinity, each by what was recorded of it. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from tensorprobe.follow.naming import ApiName
from tensorprobe.operators import native_name
from tensorprobe.overflow.call_kinds import ADDS, Kind, plan_for
from tensorprobe.records import Call, Fields, TensorRecord
from tensorprobe.replay.kinds import overwrites

NAN, POSITIVE, NEGATIVE = 1, 2, 4
INFINITE = POSITIVE | NEGATIVE
_WORDS = {NAN: "NaN", POSITIVE: "inf", NEGATIVE: "-inf"}
_LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7976e308}
_NUMBERED = re.compile(r"(?P<prefix>\w+)\.(?P<api>.+)\.\d+\.(?:forward|backward)")
_COLLECTIVES = ("_c10d_functional.", "c10d.", "_dtensor.")  # of namespaces of custom ops
_BUFFER_FIRST = (
    "all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter", "all_to_all", "recv", "irecv",
    "scatter",
)  # fmt: skip
_MASKED_BY = ("log", "mul", "mul_")  # a mask of zeros and ones becomes one of infinities


class What(Enum):
    """What happened to a rank in a call."""

    MAKES = "makes"  # out of finite inputs
    READS = "reads"  # NaN that no recorded call has made
    RECEIVES = "receives"  # from another rank
    APPEARS = "appears"  # in a gradient, between recorded calls


class BadCall(NamedTuple):
    """A call in which NaN or infinity turns up in a rank."""

    what: What
    call: Call
    bits: int
    tensor: TensorRecord
    inputs: tuple[TensorRecord, ...]

    @property
    def reason(self) -> str:
        """One sentence."""
        label = self.tensor.name.removeprefix(self.call.name + ".")
        held = f"{label} ({self.tensor.dtype}) holds {words(self.bits)}"
        if self.what is What.READS:
            return f"it reads NaN, which no recorded call of this rank has made: {held}"
        if self.what is What.RECEIVES:
            return f"what this rank gives to it is finite, and {held}"
        if self.what is What.APPEARS:
            return (
                f"no recorded call of this rank has made it: {held}. A reduction that is not "
                "recorded (DDP, FSDP) may have brought it from another rank"
            )
        given = [bits_of(record) for record in self.inputs]
        if any(given):
            inputs = f"its inputs hold {words(max(given))} and no NaN"
        else:
            inputs = f"its inputs are finite{_extent(self.inputs)}"
        return f"{inputs}, and {held}"


def words(bits: int) -> str:
    """NaN and -inf."""
    return " and ".join(word for bit, word in _WORDS.items() if bits & bit)


def bits_of(record: TensorRecord) -> int:
    """What is not finite in a tensor, by its statistics."""
    s = record.summary
    if s is None or s.is_finite:
        return 0
    bits = NAN if s.nan_count else 0
    if s.inf_count:
        bits |= POSITIVE if s.max == math.inf else 0
        bits |= NEGATIVE if s.min == -math.inf else 0
    return bits


def kind_of(call: Call) -> Kind:
    """How a recorded call's output comes by its values."""
    prefix, api = _split(call)
    if prefix == "Ops" and api.startswith(_COLLECTIVES):
        return Kind.COMMUNICATES
    return plan_for(ApiName(prefix, api, call.op)).kind


def api_of(call: Call) -> str:
    """The last part of what a call calls: all_reduce, log."""
    return _split(call)[1].rpartition(".")[2]


def _split(call: Call) -> tuple[str, str]:
    """Functional and linear; Aten and add, without its overload."""
    found = _NUMBERED.fullmatch(native_name(call.name))
    if found is None:
        return "", call.op
    prefix, api = found["prefix"], found["api"]
    return prefix, api.partition(".")[0] if prefix == "Aten" else api


class RankReader:
    """Follows one rank through its calls, step by step, and tells where NaN or infinity turns up.

    Every call that makes it is told. Of the other ways to come by it the first is: what follows
    from that is no news.
    """

    def __init__(self) -> None:
        self._spoilt = False
        self._unwritten = _Unwritten()

    @property
    def on_unwritten(self) -> BadCall | None:
        """The first that was made of memory which nobody had written to, and came to nothing."""
        return self._unwritten.first

    def events(self, calls: Sequence[Call]) -> Iterator[BadCall]:
        """Of the calls of one step, in execution order; a module is judged when it has ended."""
        forward: dict[str, Call] = {}
        self._unwritten.begin(calls)
        parents = _parents(calls)
        blamed: set[str] = set()  # the calls around those that were told
        for call in _in_order_of_end(calls, parents):
            its_forward = forward.get(call.name.replace(".backward", ".forward", 1))
            event = self._event(call, its_forward)
            event = self._unwritten.judged(call, its_forward, event)
            if call.direction == "forward":
                forward[call.name] = call
            if event is None or (event.what is What.MAKES and call.name in blamed):
                continue
            if event.what is not What.MAKES and self._spoilt:
                continue
            self._spoilt = True
            blamed |= _around(call, parents, calls)
            yield event

    def _event(self, call: Call, forward: Call | None) -> BadCall | None:
        inputs, outputs = _sides(call)
        found = _bits(outputs)
        if not found:
            return None
        worst = next(record for record in outputs if bits_of(record) & found)
        if ".parameters_grad" in call.name:
            return BadCall(What.APPEARS, call, found, worst, ())
        given, told = _bits(inputs), _told((*call.args, *call.kwargs.values()))
        kind = kind_of(call)
        if kind is Kind.MAKES or call.name.startswith("Saved."):
            return None
        if kind is Kind.COMMUNICATES:
            spoke = _bits(_spoken(call, inputs))
            return None if spoke else BadCall(What.RECEIVES, call, found, worst, inputs)
        if given & NAN:
            reads = found & NAN and kind is not Kind.PASSES
            first = next(record for record in inputs if bits_of(record) & NAN)
            return BadCall(What.READS, call, NAN, first, inputs) if reads else None
        if call.direction == "backward":
            made = _made_in_backward(found, given, forward)
        else:
            made = _made(call, found, given, told, inputs, outputs)
        if not made:
            return None
        worst = next(record for record in outputs if bits_of(record) & made)
        return BadCall(What.MAKES, call, made, worst, inputs)


class _Unwritten:
    """Knows contents that come from `empty`: pipelines learn shapes on it, and FSDP and DDP cut it
    before they write to it. NaN there is no finding, unless a parameter is given it.

    Only calls are meant that read such memory, weights, and nothing else: what a call computes of
    other numbers is its own.
    """

    def __init__(self) -> None:
        self.first: BadCall | None = None
        self._seen: set[Hashable] = set()
        self._arbitrary: set[Hashable] = set()
        self._weights: set[Hashable] = set()
        self._forward: set[tuple[int, str]] = set()  # the forward calls on such memory

    def begin(self, calls: Sequence[Call]) -> None:
        """Note what the calls of a step say of weights, before these are judged."""
        self._weights |= _contents(
            record for call in calls for record in call.tensors if record.role == "parameter"
        )

    def judged(self, call: Call, forward: Call | None, event: BadCall | None) -> BadCall | None:
        """The event of a call, or that of an earlier one which has come to something after all."""
        inputs, outputs = _sides(call)
        made = _contents(outputs)
        is_step = call.name.startswith("Optimizer.") and _bits(inputs) & NAN
        if self.first and (is_step or (event is not None and event.what is What.APPEARS)):
            event, self.first = self.first, None
        elif _is_uninitialised(call):
            self._arbitrary |= made - self._seen  # else what was there before, which may be in use
        elif self._is_made_of_it(call, forward, inputs):
            self._forward.add((call.step, call.name))
            self._arbitrary |= made - self._seen
            self.first, event = self.first or event, None
        self._seen |= made
        return event

    def _is_made_of_it(
        self, call: Call, forward: Call | None, inputs: Sequence[TensorRecord]
    ) -> bool:
        if kind_of(call) in (Kind.COMMUNICATES, Kind.MAKES):
            return False
        if forward is not None and (forward.step, forward.name) in self._forward:
            return True
        overwritten = {f"{call.name}.{name}" for name in overwrites(call)}
        read = _contents(r for r in inputs if r.role == "input" and r.name not in overwritten)
        read -= self._weights
        return bool(read) and read <= self._arbitrary


def _contents(records: Iterable[TensorRecord]) -> set[Hashable]:
    return {key for record in records if (key := _content(record)) is not None}


def _is_uninitialised(call: Call) -> bool:
    prefix, api = _split(call)
    return plan_for(ApiName(prefix, api, call.op)).uninitialised


def _content(record: TensorRecord) -> Hashable | None:
    """What tells one content from another; None for one number throughout."""
    s = record.summary
    if s is None or (s.min == s.max and not s.nan_count):
        return None
    return record.digest or (s.min, s.max, s.mean, s.norm, s.nan_count, record.numel, record.dtype)


def _made(
    call: Call,
    found: int,
    given: int,
    told: int,
    inputs: Sequence[TensorRecord],
    outputs: Sequence[TensorRecord],
) -> int:
    """What a call made by itself: neither read, nor told to put there, nor put there as a mask."""
    if new_nan := found & NAN & ~told:
        return new_nan | found & ~given
    infinite = found & INFINITE
    if (given | told) & INFINITE or not infinite:
        return 0  # which of them are new, statistics do not tell
    api = api_of(call)
    if api in _MASKED_BY and all(_is_zero_or_one(record) for record in inputs):
        return 0
    if api in ADDS and infinite == NEGATIVE and _has_extreme(inputs, outputs):
        return 0
    return infinite


def _made_in_backward(found: int, given: int, forward: Call | None) -> int:
    """What a backward made: gradients that its forward's own values do not explain."""
    around = _bits(forward.tensors) if forward is not None else 0
    if around & NAN:
        return 0
    return found & NAN or (0 if given or around else found)


def _sides(call: Call) -> tuple[tuple[TensorRecord, ...], tuple[TensorRecord, ...]]:
    """What a call was given, and what it left: of an optimizer, what its state is after."""
    inputs: list[TensorRecord] = []
    outputs: list[TensorRecord] = []
    for record in call.tensors:
        left = record.role == "output" or record.name.endswith(".after")
        left = left or ".parameters_grad" in call.name
        (outputs if left else inputs).append(record)
    return tuple(inputs), tuple(outputs)


def _spoken(call: Call, inputs: Sequence[TensorRecord]) -> list[TensorRecord]:
    """What a rank gives to a collective, without the memory that is there to be written to."""
    api = api_of(call)
    place = "0" if api.startswith(_BUFFER_FIRST) else "1" if api == "gather" else None
    if api == "broadcast" and call.kwargs.get("src", *call.args[1:2] or (call.rank,)) != call.rank:
        place = "0"
    base = f"{call.name}.input.{place}"
    return [r for r in inputs if r.name != base and not r.name.startswith(f"{base}.")]


def _bits(records: Sequence[TensorRecord]) -> int:
    bits = 0
    for record in records:
        bits |= bits_of(record)
    return bits


def _told(values: Sequence[Any], depth: int = 0) -> int:
    """What is not finite among the numbers that the program itself wrote into the call."""
    bits = 0
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            bits |= NAN if value != value else POSITIVE if value > 0 else NEGATIVE
        elif isinstance(value, list | tuple) and depth < 4:
            bits |= _told(value, depth + 1)
        elif isinstance(value, Fields) and depth < 4:
            bits |= _told(tuple(value.fields.values()), depth + 1)
    return bits


def _is_zero_or_one(record: TensorRecord) -> bool:
    """Numbers from 0 to 1 whose sum is that of their squares are all 0 or 1; some are 1."""
    s = record.summary
    if s is None or s.min is None or s.max is None or s.mean is None or s.norm is None:
        return False
    total, squares = s.mean * record.numel, s.norm**2
    return s.min >= 0 and s.max == 1 and math.isclose(total, squares, rel_tol=1e-5)


def _has_extreme(inputs: Sequence[TensorRecord], outputs: Sequence[TensorRecord]) -> bool:
    """Whether the lowest number of the dtype is among the inputs: a mask, that was added to."""
    limit = max((_LIMITS.get(record.dtype, math.inf) for record in outputs), default=math.inf)
    tops = [abs(b) for r in inputs if r.summary for b in (r.summary.min, r.summary.max) if b]
    return any(top >= limit * 0.999 for top in tops)


def _extent(inputs: Sequence[TensorRecord]) -> str:
    bounds = [b for r in inputs if r.summary for b in (r.summary.min, r.summary.max)]
    numbers = [float(b) for b in bounds if b is not None]
    return f" ({min(numbers):.4g} to {max(numbers):.4g})" if numbers else ""


def _parents(calls: Sequence[Call]) -> dict[str, str]:
    """What each call ran inside of. A backward at L2 has its forward for a parent: that is over."""
    directions = {call.name: call.direction for call in calls}
    return {
        call.name: call.parent
        for call in calls
        if call.parent is not None and directions.get(call.parent) == call.direction
    }


def _in_order_of_end(calls: Sequence[Call], parents: dict[str, str]) -> list[Call]:
    """Calls after all that ran inside of them, which is what made their results."""
    ends = {call.name: i for i, call in enumerate(calls)}
    for i, call in enumerate(calls):
        parent = parents.get(call.name)
        while parent is not None and ends[parent] < i:
            ends[parent] = i
            parent = parents.get(parent)
    order = sorted(range(len(calls)), key=lambda i: (ends[calls[i].name], -i))
    return [calls[i] for i in order]


def _around(call: Call, parents: dict[str, str], calls: Sequence[Call]) -> set[str]:
    """The calls that this one ran inside of: its parents, and the backward of its modules."""
    names: set[str] = set()
    parent = parents.get(call.name)
    while parent is not None and parent not in names:
        names.add(parent)
        parent = parents.get(parent)
    if call.direction == "backward":
        path = f"{call.module}."
        names |= {
            other.name
            for other in calls
            if other.name.startswith("Module.")
            and other.direction == "backward"
            and other is not call
            and (not other.module or path.startswith(f"{other.module}."))
        }
    return names
