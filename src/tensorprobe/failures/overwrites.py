"""Which calls wrote to tensors: autograd's error only tells which tensor was changed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.store.frames import users_line

_ERROR = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\].*"
    r"is at version (?P<now>\d+); expected version (?P<saved>\d+)",
    re.DOTALL,
)
_MAX_STORAGES = 10_000
_MAX_WRITES = 8  # of one storage
_MAX_SUSPECTS = 3


class Write(NamedTuple):
    """A call that wrote to a tensor, and the tensor's version then."""

    call: str
    frames: Sequence[str]
    sizes: list[int]
    version: int


class Writes:
    """The last writes to each storage that is in use; it holds no tensor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, deque[Write]]] = {}

    def note(self, call: str, frames: Sequence[str], tensors: Iterable[torch.Tensor]) -> None:
        """A call has written to these."""
        for tensor in tensors:
            if tensor.is_inference():
                continue  # it has no version, and no backward
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._known.get(key)
            if known is None or known[0].expired():
                self._make_room()
                known = self._known[key] = (StorageWeakRef(storage), deque(maxlen=_MAX_WRITES))
            known[1].append(Write(call, frames, _sizes(tensor.shape), tensor._version))

    def tell(self, error: str, given: Iterable[tuple[torch.Tensor, int]]) -> list[str]:
        """Who wrote over what a failed backward had saved.

        `given` are the inputs of its call that are still held, each with the version it saw.
        """
        found = _ERROR.search(error)
        if found is None:
            return []
        saved, now = int(found["saved"]), int(found["now"])
        sizes = _sizes(int(number) for number in found["shape"].split(",") if number.strip())
        suspects = self._inputs(given, sizes, saved, now) | self._fitting(sizes, saved, now)
        by = _words([self._since(key, saved) for key in suspects])
        return [f"what it had saved was overwritten by {by}"] if by else []

    def _inputs(
        self, given: Iterable[tuple[torch.Tensor, int]], sizes: list[int], saved: int, now: int
    ) -> set[int]:
        """The inputs that the error may be about: those written to, through any view of them."""
        return {
            tensor.untyped_storage()._cdata
            for tensor, version in given
            if not tensor.is_inference()
            and (version, tensor._version, _sizes(tensor.shape)) == (saved, now, sizes)
        } & self._known.keys()

    def _fitting(self, sizes: list[int], saved: int, now: int) -> set[int]:
        """The storages of tensors like the one that the error means."""
        return {
            key
            for key, (reference, writes) in self._known.items()
            if writes[-1].version == now
            and not reference.expired()
            and all(write.sizes == sizes for write in self._since(key, saved))
        }

    def _since(self, key: int, saved: int) -> list[Write]:
        return [write for write in self._known[key][1] if write.version > saved]

    def _make_room(self) -> None:
        if len(self._known) < _MAX_STORAGES:
            return
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        while len(self._known) >= _MAX_STORAGES:
            del self._known[next(iter(self._known))]


def _sizes(shape: Iterable[int]) -> list[int]:
    """A shape in any order: what a linear saves of its weight is transposed."""
    return sorted(shape)


def _words(suspects: Sequence[Sequence[Write]]) -> str:
    """The calls, and the line of each; where there are too many, the line that they share."""
    if len(suspects) == 1:
        return _places(suspects[0])
    if len(suspects) <= _MAX_SUSPECTS:
        return f"one of these: {'; '.join(map(_places, suspects))}" if suspects else ""
    lines = {users_line(write.frames) for writes in suspects for write in writes}
    return f"one of {len(suspects)} calls at {lines.pop()}" if len(lines) == 1 else ""


def _places(writes: Iterable[Write]) -> str:
    return " and ".join(dict.fromkeys(f"{w.call}, {users_line(w.frames)}" for w in writes))
