"""Calls whose numbers a device is still working out, in order, until there is time to look."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.guard.cases import Sighting
from tensorprobe.numerics.finiteness import Extent, Flags, flags_for
from tensorprobe.records import Direction


class Held(NamedTuple):
    """A tensor of a call: the memory it is in, and which flag tells of it."""

    label: str
    storage: int
    device: torch.device
    ticket: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: bool  # it is all of its storage


class Event:
    """One call, forward or backward; without a sighting, the first look at an input."""

    __slots__ = ("direction", "inputs", "is_leaf", "note", "outputs", "scaler", "sighting", "told")

    def __init__(
        self,
        sighting: Sighting | None,
        direction: Direction = "forward",
        inputs: list[tuple[str, int]] | None = None,
        told: int = 0,
        *,
        scaler: bool = False,
        is_leaf: bool = False,
        note: str = "",
    ) -> None:
        self.sighting, self.direction = sighting, direction
        self.inputs = inputs or []
        self.outputs: list[Held] = []
        self.told = told
        self.scaler = scaler  # GradScaler may deal with it
        self.is_leaf = is_leaf  # gradients of parameters
        self.note = note  # loss, gradients, parameters: what else it stands for


class Ring:
    """Events in order, with their flags on the devices; taken as a whole."""

    def __init__(self, look_every: int | None) -> None:
        self._look_every = look_every
        self._flags: dict[torch.device, Flags] = {}
        self._events: list[Event] = []
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # storages, and their version
        self.active = False

    def clear(self) -> None:
        """A new step: nothing is known of what is in memory."""
        self._known.clear()

    def is_alive(self, storage: int) -> bool:
        """Whether this memory is still in use."""
        known = self._known.get(storage)
        return known is not None and not known[0].expired()

    @property
    def is_due(self) -> bool:
        if self._look_every is not None and len(self._events) >= self._look_every:
            return True
        return any(flags.full for flags in self._flags.values())

    def inputs(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, int]]:
        """The memory of the inputs of a call; what is new there is flagged first."""
        found = []
        for label, content in tensors:
            storage = content.untyped_storage()
            key = storage._cdata
            known = self._known.get(key)
            if known is None or known[1] != _version(content):
                first = Event(None)
                self.hold(first, label, content)
                self.add(first)
            found.append((label, key))
        return found

    def hold(self, event: Event, label: str, content: torch.Tensor, *, flag: bool = True) -> None:
        """Start to flag a tensor as part of an event; without `flag` it has what its inputs had."""
        self.active = True
        device = content.device
        ticket = -1
        if flag:
            flags = self._flags.get(device)
            if flags is None:
                flags = self._flags[device] = flags_for(device)
            ticket = flags.submit(content)
        storage = content.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            self._known[key] = (StorageWeakRef(storage), _version(content))
        else:
            self._known[key] = (known[0], _version(content))
        whole = content.numel() * content.element_size() >= storage.nbytes()
        shape = tuple(content.shape)
        event.outputs.append(Held(label, key, device, ticket, content.dtype, shape, whole))

    def add(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> tuple[list[Event], dict[torch.device, list[Extent]]]:
        """All events, and the extents that their tickets number."""
        events, self._events = self._events, []
        return events, {device: flags.fetch() for device, flags in self._flags.items()}


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
