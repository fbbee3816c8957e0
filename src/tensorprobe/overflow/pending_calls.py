"""Calls whose numbers a device is still working out, in order, until there is time to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tensorprobe.follow.gradients import Path
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.overflow.call_kinds import Passing
from tensorprobe.overflow.cases import NamedCall, NotedCall
from tensorprobe.records import Direction
from tensorprobe.tensors import memory
from tensorprobe.tensors.finiteness import LIMITS, REAL, Extents, Flags, flags_for, readable
from tensorprobe.tensors.layouts import is_dense

UNFLAGGED = -1  # a ticket: the tensor has what the inputs of its call had

# What is noted of every call, in plain tuples, as NotedCall is. `calls_in` puts them into words.
NotedInput = tuple[Path, int]  # and its storage
# path, storage, device, ticket, dtype, shape, and whether it is all of its storage
NotedOutput = tuple[Path, int, torch.device, int, torch.dtype, tuple[int, ...], bool]
# the call, direction, inputs, outputs, what it was told to put in, whether backward runs, and what
# else it stands for: loss, gradients, parameters
Note = tuple[
    NotedCall | None, Direction, Sequence[NotedInput], Sequence[NotedOutput], int, bool, str
]  # fmt: skip
# its dtype, how many numbers, their address, and the storage they are in
Piece = tuple[torch.dtype, int, int, torch.UntypedStorage]
# It is not there; it is of inference mode, which has no versions; it is sparse, or a wrapper.
_NOT_KNOWN = (KeyError, RuntimeError, NotImplementedError)
_NO_INPUTS: tuple[NotedInput, ...] = ()


class PendingTensor(NamedTuple):
    """A tensor of a call: the memory it is in, and which flag tells of it."""

    label: str
    storage: int
    device: torch.device
    ticket: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: bool  # it is all of its storage


class PendingCall(NamedTuple):
    """One call, forward or backward; without a name, the first look at an input."""

    call: NamedCall | None
    direction: Direction
    inputs: list[tuple[str, int]]
    outputs: list[PendingTensor]
    told: int
    in_backward: bool
    note: str  # loss, gradients, parameters: what else it stands for


def calls_in(notes: Iterable[Note]) -> list[PendingCall]:
    """The notes of calls in words."""
    calls = []
    for noted, direction, inputs, outputs, told, in_backward, note in notes:
        side = note or "output"
        held = [PendingTensor(f"{side}.{'.'.join(each[0])}", *each[1:]) for each in outputs]
        given = [(f"input.{'.'.join(path)}", storage) for path, storage in inputs]
        call = None if noted is None else NamedCall(*noted)
        calls.append(PendingCall(call, direction, given, held, told, in_backward, note))
    return calls


def piece_of(tensor: torch.Tensor) -> Piece | None:
    """What to know of a torch.Tensor or Parameter to look at it, if it is `readable` as it is: real
    floats that lie in memory of their own.

    It is asked of every result, and takes half of a look at its dispatch keys. Tensors without
    memory have no address (meta, zero), or raise (sparse ones, functorch's).
    """
    try:
        dtype = tensor.dtype
        if dtype not in REAL or tensor.is_nested or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        count, address = tensor.numel(), tensor.data_ptr()
        if count and address and storage.nbytes():  # freed, a view has an address all the same
            return dtype, count, address, storage
    except RuntimeError:
        pass
    return None


def holds_all_of(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a cast between these dtypes cannot overflow; copies between devices are looked at."""
    return source.is_cpu == target.is_cpu and LIMITS[source.dtype] <= LIMITS[target.dtype]


_DOUBTFUL = -2  # no tensor has this version


class PendingCalls:
    """Notes in order, with their flags on the devices; taken as a whole.

    What it is given is read with function modes off, and no operation of torch is called on it
    unless it is hidden from the program's modes and graph.
    """

    def __init__(self, look_every: int | None) -> None:
        self._look_every = look_every
        self._flags: dict[torch.device, Flags] = {}
        self._notes: list[Note] = []
        self._known = _Storages()
        self.native: Any = None  # the part in C++ that holds plain tensors, where it is built
        self.active = False
        self.is_due = False  # whether it is time to look

    def clear(self) -> None:
        """A new step: nothing is known of what is in memory."""
        self._known.clear()

    def storage_at(self, key: int) -> torch.UntypedStorage | None:
        """The memory that is known by this number, where it is still in use."""
        return self._known.storage_at(key)

    def inputs(self, tensors: Iterable[tuple[torch.Tensor, Path]]) -> Sequence[NotedInput]:
        """The memory of the inputs of a call; what is new there is flagged first."""
        found = []
        versions = self._known.versions
        for tensor, path in tensors:
            if tensor.dtype not in LIMITS:
                continue
            if type(tensor) in PLAIN_TENSORS:
                try:  # as known_storage does, with a call less for each input of each call
                    key = tensor.untyped_storage()._cdata
                    if versions.get(key) != tensor._version:
                        held = self.hold_plain(tensor, path)
                        if held is not None:
                            self._notes.append((None, "forward", (), (held,), 0, False, ""))
                            self._doubt_rest(tensor)
                            found.append((path, key))
                            continue
                    elif not tensor.is_neg():
                        found.append((path, key))
                        continue
                except _NOT_KNOWN:
                    pass
            with Quiet():
                content = readable(tensor)
                if content is not None:
                    found.append((path, self._first_look(content, path)))
        return tuple(found)

    def known_storage(self, tensor: torch.Tensor) -> int | None:
        """The memory of a plain tensor whose content is known as it is now."""
        try:
            key: int = tensor.untyped_storage()._cdata
            if self._known.versions[key] == tensor._version and not tensor.is_neg():
                return key
        except _NOT_KNOWN:
            pass
        return None

    def _first_look(self, content: torch.Tensor, path: Path) -> int:
        key: int = content.untyped_storage()._cdata
        if self._known.versions.get(key) != _version(content):
            held = self.hold(content, path)
            self._notes.append((None, "forward", _NO_INPUTS, (held,), 0, False, ""))
            self._doubt_rest(content)
        return key

    def _doubt_rest(self, content: torch.Tensor) -> None:
        """A look at a part of what was in memory before says nothing of the other parts."""
        storage = content.untyped_storage()
        if content.nbytes < storage.nbytes():
            self._known.versions[storage._cdata] = _DOUBTFUL

    def hold(self, content: torch.Tensor, path: Path, flag: bool = True) -> NotedOutput:
        """Start to flag a tensor of a call; without `flag` it has what its inputs had."""
        storage = content.untyped_storage()
        piece = (content.dtype, content.numel(), content.data_ptr(), storage)
        return self.hold_piece(content, path, flag, piece)

    def hold_plain(self, tensor: torch.Tensor, path: Path) -> NotedOutput | None:
        """`hold` for a torch.Tensor or Parameter as it is; None where that does not do."""
        if self.native is not None:
            held: NotedOutput | None = self.native.hold_plain(tensor, path)
            return held
        return self.hold_piecemeal(tensor, path)

    def hold_piecemeal(self, tensor: torch.Tensor, path: Path) -> NotedOutput | None:
        """`hold_plain` in Python, by asking for one fact after the other."""
        piece = piece_of(tensor)
        return None if piece is None else self.hold_piece(tensor, path, True, piece)

    # Gradients

    def hold_gradient(
        self, grad: torch.Tensor, path: Path, passing: Passing, incoming: Sequence[Any]
    ) -> tuple[NotedOutput, NotedInput | None] | None:
        """`hold_plain` for what a node sends on, given `incoming`; and the memory whose values it
        is known to have, if there is some: then it is not flagged once more."""
        piece = piece_of(grad)
        if piece is None:
            return None
        given = self._source_of(grad, passing, incoming) if passing else None
        held = self.hold_piece(grad, path, given is None, piece)
        if given != held[1]:
            self._keep_span(grad, held)
        return held, None if given is None else (path, given)

    def _keep_span(self, grad: torch.Tensor, held: NotedOutput) -> None:
        """Remember where a gradient lies, for the next call that is given the same memory.

        Only for a gradient that fills its memory: beside a part there may be something infinite.
        """
        key, dtype, is_whole = held[1], held[4], held[6]
        version = self._known.versions[key]
        if is_whole and version >= 0 and (grad.is_contiguous() or _has_no_holes(grad)):
            self._known.spans[key] = (dtype, version, *_span(grad))
        else:
            self._known.spans.pop(key, None)

    def _source_of(
        self, grad: torch.Tensor, passing: Passing, incoming: Sequence[Any]
    ) -> int | None:
        source = grad
        if passing == Passing.COPIED:
            if len(incoming) != 1 or type(incoming[0]) not in PLAIN_TENSORS:
                return None
            source = incoming[0]
            if piece_of(source) is None or not holds_all_of(grad, source):
                return None
        key: int = source.untyped_storage()._cdata
        seen = self._known.spans.get(key)
        if seen is None or seen[:2] != (source.dtype, _version(source)):
            return None
        begin, end = _span(source)
        return key if seen[2] <= begin and end <= seen[3] else None

    def hold_piece(
        self, content: torch.Tensor, path: Path, flag: bool, piece: Piece
    ) -> NotedOutput:
        """`hold` for a tensor of which some facts are known: to ask for them takes as long."""
        dtype, count, address, storage = piece
        device = content.device
        ticket = UNFLAGGED
        if flag:
            flags = self._flags.get(device) or self.flags_of(device)
            if flags.computes:
                with Quiet():
                    ticket = flags.submit(content)
            elif content.is_contiguous():
                ticket = flags.submit_piece(content, dtype, count, address)
            else:
                ticket = flags.submit(content)
            if flags.full:
                self.is_due = True
        key = storage._cdata
        versions = self._known.versions
        # of memory that is new it makes no difference how much of it this is
        whole = True
        if key in versions:
            whole = content.nbytes >= storage.nbytes()
        else:
            storage._weak_ref()
        try:
            versions[key] = content._version
        except RuntimeError:  # of inference mode
            versions[key] = -1
        return path, key, device, ticket, dtype, tuple(content.shape), whole

    def flags_of(self, device: torch.device) -> Flags:
        """The flags of this device."""
        flags = self._flags.get(device)
        if flags is None:
            self.active = True
            flags = self._flags[device] = flags_for(device)
        return flags

    def add(
        self,
        call: NotedCall | None,
        direction: Direction,
        outputs: Sequence[NotedOutput],
        inputs: Sequence[NotedInput] = _NO_INPUTS,
        told: int = 0,
        in_backward: bool = False,
        note: str = "",
    ) -> None:
        """Note a call whose outputs are held; without one, the first look at an input."""
        notes = self._notes
        notes.append((call, direction, inputs, outputs, told, in_backward, note))
        if self._look_every is not None and len(notes) >= self._look_every:
            self.is_due = True

    def take(self) -> tuple[list[Note], dict[torch.device, Extents]]:
        """All notes, and the extents that their tickets number."""
        notes, self._notes = self._notes, []
        self.is_due = False
        return notes, {device: flags.fetch() for device, flags in self._flags.items()}


class _Storages:
    """Memory whose content is known, and at which version.

    Each storage is held weakly, so that no other is put at its address. By number and not by
    StorageWeakRef, which takes longer to make and to delete than all else that is noted of a call.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        # of gradients: dtype, version and the addresses between which all was looked at
        self.spans: dict[int, tuple[torch.dtype, int, int, int]] = {}
        # kept: it may be deleted when torch is gone already
        self._free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref

    def storage_at(self, key: int) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(key) if key in self.versions else None

    def clear(self) -> None:
        versions, self.versions, self.spans = self.versions, {}, {}
        for key in versions:
            self._free(key)

    def __del__(self) -> None:
        self.clear()


def _has_no_holes(tensor: torch.Tensor) -> bool:
    shape, strides, _ = memory.without_repeats(tensor)
    return is_dense(shape, strides)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its numbers begin and end in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((length - 1) * step for length, step in steps)
    begin = tensor.data_ptr()
    return begin, begin + extent * tensor.element_size()


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # of inference mode
        return -1
