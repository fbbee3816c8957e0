"""A bad value followed from the call that made it: a finding while it is still being made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.follow.naming import CallNames, call_name
from tensorprobe.guarding.findings import Finding
from tensorprobe.overflow.call_kinds import Kind, Plan
from tensorprobe.overflow.call_site import Trail, frames_in, render
from tensorprobe.overflow.judge import CallValues, SeenTensor, is_pole
from tensorprobe.records import Direction
from tensorprobe.tensors.finiteness import NAN

NAMED = 5  # calls that a finding names of those which carry its value on
_MOST_HELD_BACK = 64
_SCALER_FILE = "grad_scaler.py"
# A NamedCall as it is noted of every call: the garbage collector drops plain tuples, and by far the
# most are never looked at again.
NotedCall = tuple[Plan, int, str, int, Trail]


class NamedCall(NamedTuple):
    """One call of the program: what it is called, and where it was made."""

    plan: Plan
    number: int
    module: str
    step: int
    trail: Trail

    def name(self, direction: Direction = "forward") -> str:
        return call_name(self.plan.api, self.number, direction)

    def names(self, direction: Direction = "forward") -> CallNames:
        return CallNames(self.plan.api, self.name(direction), self.module, direction)

    @property
    def is_of_scaler(self) -> bool:
        """Whether a GradScaler made it: it multiplies the loss until something overflows."""
        frames = frames_in(self.trail, 8)
        return any(code.co_filename.endswith(_SCALER_FILE) for code, _ in frames)


class Case:
    """What is known of one bad value so far."""

    def __init__(
        self,
        call: NamedCall,
        direction: Direction,
        reason: str,
        metrics: dict[str, Any],
        *,
        pending: bool = False,
        write: Callable[[], bool] | None = None,
    ) -> None:
        self.call, self.direction = call, direction
        self.reason, self.metrics = reason, metrics
        self.pending = pending  # a GradScaler may deal with it
        self.write = write  # puts it into the capture; False where its forward inputs are gone
        self.saved = False  # in the capture, with all that it takes to run it again
        self.affected = 0
        self.travelled: list[str] = []
        self.reached = ""
        self.told = False

    @property
    def name(self) -> str:
        return self.call.name(self.direction)

    def carry(self, name: str) -> None:
        """Count a further call that returns this value."""
        self.affected += 1
        if len(self.travelled) < NAMED and name not in self.travelled:
            self.travelled.append(name)

    def finding(self, rank: int, **more: Any) -> Finding:
        """The case as a finding, with what is known so far."""
        return Finding(
            name=self.name,
            kind="nonfinite",
            direction=self.direction,
            step=self.call.step,
            rank=rank,
            module=self.call.module,
            op=self.call.plan.api.op,
            stack=render(self.call.trail),
            reason=self.reason,
            metrics=self.metrics,
            affected=self.affected,
            travelled=tuple(self.travelled),
            reached=self.reached,
            **more,
        )


class Watcher(Protocol):
    """The part of a guard that counts findings, and decides whether the program stops."""

    attention: bool

    @property
    def is_full(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def add(self, case: Case) -> None: ...
    def warn(self, name: str, step: int, text: str) -> None: ...
    def trouble(self, name: str, error: BaseException) -> None: ...
    def call_made(self) -> None: ...
    def unscaled(self) -> None: ...
    def scale_updated(self, skipped_at: float | None) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...
    def backward_begins(self, roots: Any) -> None: ...
    def advance(self) -> None: ...


class OpenCases:
    """The bad values that are known: which memory holds them, and of which case.

    By storage, held weakly: what an allocator puts at the same place later is another one.
    """

    def __init__(self, watcher: Watcher, storage_at: Callable[[int], Any]) -> None:
        self._watcher = watcher
        self._storage_at = storage_at  # of one that is pending; None where it is gone
        self.of_backward: Case | None = None  # whose value the backward that runs is full of
        self._spoiled: dict[int, tuple[StorageWeakRef | None, Case]] = {}
        self._spoiled_before: dict[int, tuple[StorageWeakRef | None, Case]] = {}
        self._uninitialised: dict[int, StorageWeakRef] = {}
        # infinite at a pole, such as 1 / 0: many programs mask that, so told when it does harm
        self._held_back: list[Case] = []

    def __bool__(self) -> bool:
        return bool(self._spoiled)

    @property
    def has_held_back(self) -> bool:
        return bool(self._held_back)

    def begin_step(self) -> None:
        """Begin a step: a value that is still bad from the last one is reported again."""
        self._spoiled_before = {k: v for k, v in self._spoiled.items() if _is_alive(v[0])}
        self._spoiled = {}
        self._held_back.clear()
        self._uninitialised.clear()
        self.of_backward = None

    def forgive(self, cases: Sequence[Case]) -> None:
        """Drop cases that a GradScaler has dealt with."""
        self._spoiled = {k: v for k, v in self._spoiled.items() if v[1] not in cases}
        if self.of_backward in cases:
            self.of_backward = None

    def note_uninitialised(self, content: torch.Tensor) -> None:
        """Remember memory to which nothing was written yet (torch.empty)."""
        storage = content.untyped_storage()
        self._uninitialised[storage._cdata] = StorageWeakRef(storage)

    def origin(self, seen: SeenTensor) -> str:
        """Where a NaN comes from that no case of this step explains, in words."""
        if (found := self._spoiled_before.get(seen.storage)) is not None:
            return f", left by {found[1].name} in step {found[1].call.step}"
        if seen.storage in self._uninitialised:
            return ": memory that was never written to (torch.empty)"
        return ", which no call that was watched has made"

    # Following a value

    def of(self, storage: int) -> Case | None:
        """The case that spoiled this memory."""
        found = self._spoiled.get(storage)
        return None if found is None else found[1]

    def among(self, tensors: Iterable[SeenTensor], *, any_value: bool = False) -> Case | None:
        """The case that spoiled one of these tensors, if it is bad or at the limit."""
        for each in tensors:
            case = self.of(each.storage)
            if case is not None and (each.bits or any_value or each.is_at_limit):
                return case
        return None

    def behind(self, values: CallValues, *, any_value: bool = False) -> Case | None:
        """The case whose value a call carries on.

        In backward it is the one that the loss had, or that of a gradient which the call sends on
        as it was given: backward was begun with it, or a hook or Function of the program made it.
        """
        if values.direction == "forward":
            return self.among(values.inputs, any_value=any_value)
        self.of_backward = self.of_backward or self.among(values.outputs, any_value=any_value)
        return self.of_backward

    def carry(
        self, case: Case, call: NamedCall, values: CallValues, *, any_value: bool = False
    ) -> None:
        """Note that a call returns the bad value that it was given."""
        case.carry(call.name(values.direction))
        self.spoil(values.outputs, case, any_value=any_value)
        if values.direction == "backward" or values.found & NAN:
            self.release(case)

    def begin_backward(self, loss: Iterable[SeenTensor]) -> None:
        """Note that backward begins; a bad loss has been reached."""
        case = self.of_backward = self.among(loss)
        if case is not None:
            self.reach(case, "the loss")

    def reach(self, case: Case, what: str, tensors: Iterable[SeenTensor] = ()) -> None:
        """Note that the value has reached the loss, or gradients or parameters of a model."""
        case.reached = what
        self.spoil(tensors, case)
        self.release(case)

    def spoil(self, tensors: Iterable[SeenTensor], case: Case, *, any_value: bool = False) -> None:
        """Assign the tensors that are bad, or at the limit, to this case."""
        for each in tensors:
            if each.bits or any_value or each.is_at_limit:
                here = each.numbers
                held = self._storage_at(each.storage) if here is None else here.untyped_storage()
                ref = None if held is None else StorageWeakRef(held)
                self._spoiled[each.storage] = (ref, case)

    def blame(
        self,
        call: NamedCall,
        values: CallValues,
        reason: str,
        *,
        in_backward: bool,
        any_value: bool = False,
        is_reader: bool = False,
        write: Callable[[], bool] | None = None,
    ) -> None:
        """Open a case for a call at fault; with `is_reader` its bad inputs belong to it too."""
        if self._watcher.is_full:
            return
        spreads = in_backward and values.plan.kind is not Kind.COMMUNICATES
        if spreads and values.direction == "forward":
            reason += "; it runs inside backward"
        pending = in_backward or call.is_of_scaler
        case = Case(call, values.direction, reason, values.facts, pending=pending, write=write)
        self.spoil(values.outputs, case, any_value=any_value)
        if is_reader or values.given & NAN:
            self.spoil([each for each in values.inputs if each.bits], case)
        if is_pole(values):
            self._held_back.append(case)
            del self._held_back[:-_MOST_HELD_BACK]
            return
        if spreads:
            self.of_backward = case
        self._watcher.add(case)

    def add(self, case: Case) -> Case | None:
        """Add a case that no call made; None if there are enough already."""
        if self._watcher.is_full:
            return None
        self._watcher.add(case)
        return case

    # Infinity that may have been meant

    def release(self, case: Case) -> None:
        """Report a case that was held back: its infinity has done harm."""
        if case in self._held_back:
            self._held_back.remove(case)
            if not self._watcher.is_full:
                self._watcher.add(case)

    def release_living(self) -> None:
        """Report held-back cases whose memory is still in use when the step ends."""
        for case in list(self._held_back):
            if any(known is case and _is_alive(ref) for ref, known in self._spoiled.values()):
                self.release(case)


def _is_alive(storage: StorageWeakRef | None) -> bool:
    return storage is not None and not storage.expired()
