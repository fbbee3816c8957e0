"""What recent calls were given, held within a budget, so that one that fails can be shown alone.

A tensor of the host is held itself: nothing is copied, and its version tells whether it still has
the content that the call saw. An accelerator that has failed cannot be read any more, so what lies
there is copied to the host before the call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.devices import device_layer
from tensorprobe.record.transfer import HostCopy, Transfer
from tensorprobe.tensors.memory import Unsupported

GONE = "it was written to after the call"
DROPPED = "it was let go of: what came after it filled the budget for inputs"
ENDED = "it was let go of when its step ended"
STEPPING = "it was not copied: what an optimizer calls is copied only where it is asked for"
TOO_LARGE = "it was not copied: the call alone has more than the budget for inputs"

# A layout of one storage: version, offset, shape, stride and dtype.
_View = tuple[int, Any, Any, Any, torch.dtype]
_PRUNE_AT = 1000
_MAX_CALLS = 50_000  # of a program that has no steps, each with small tensors


class Content:
    """What one tensor held when a call was given it."""

    __slots__ = (
        "__weakref__", "_copy", "_reason", "_tensor", "_version", "memory", "nbytes", "users",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor | None, copy: HostCopy | None = None, reason: str = GONE
    ) -> None:
        self._tensor = tensor
        self._version = -1 if tensor is None else _version(tensor)
        self._copy = copy
        self._reason = reason
        self.memory: int | None = None  # what it keeps alive that would be free otherwise
        self.nbytes = 0
        self.users = 0  # calls that hold it
        if copy is not None:
            self.memory, self.nbytes = id(copy), copy.nbytes

    @property
    def is_there(self) -> bool:
        return self._copy is not None or self._tensor is not None

    @property
    def held(self) -> tuple[torch.Tensor, int] | None:
        """The tensor itself, and the version of it that the call saw; None for a copy."""
        return None if self._tensor is None else (self._tensor, self._version)

    def outlive_call(self) -> None:
        """Keep the numbers and not the graph that made them; parameters cost nothing to hold."""
        tensor = self._tensor
        if tensor is None or (tensor.is_leaf and tensor.requires_grad):
            return
        if tensor.grad_fn is not None:
            tensor = self._tensor = tensor.detach()
        storage = _storage(tensor)
        if storage is not None:
            self.memory, self.nbytes = storage._cdata, storage.nbytes()

    def let_go(self, reason: str) -> None:
        """Give the memory back; `read` says why there is nothing then."""
        self._tensor = self._copy = None
        self._reason = reason

    def read(self) -> HostCopy:
        """The content on the host; Unsupported, with the reason, where there is none."""
        if self._copy is not None:
            return self._copy
        if self._tensor is None or _version(self._tensor) != self._version:
            raise Unsupported(self._reason)
        return Transfer().snapshot(self._tensor)


class Kept:
    """Holds the contents of recent calls; when they are more than `budget`, the oldest go."""

    def __init__(self, budget: int) -> None:
        self.nbytes = 0
        self.budget = budget
        self._lock = threading.RLock()  # backward runs in a thread a device
        self._transfer = Transfer(pinned=False)
        self._calls: deque[list[Content]] = deque()
        self._memory: dict[int, int] = {}  # how many contents hold each piece of memory
        # what was copied from each live storage; only calls keep the copies alive
        self._copies: dict[
            int, tuple[StorageWeakRef, weakref.WeakValueDictionary[_View, Content]]
        ] = {}

    def take(self, tensor: torch.Tensor, *, copy: bool = False) -> Content:
        """The content of a tensor that a call is about to be given.

        Copied where the device may fail, and where the call itself is going to write to it.
        """
        tensor = _without_levels(tensor)
        if not can_be_lost(tensor):
            return Content(None, self._transfer.snapshot(tensor)) if copy else Content(tensor)
        storage = _storage(tensor)
        if storage is None:
            return Content(None, self._transfer.snapshot(tensor))
        view = (
            _version(tensor),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        with self._lock:
            copies = self._copies_of(storage)
            content = copies.get(view)
            if content is None or not content.is_there:
                content = copies[view] = Content(None, self._transfer.snapshot(tensor))
            return content

    def hold(self, contents: Sequence[Content]) -> None:
        """Keep these after their call has ended, until the budget or the step does."""
        held = [content for content in contents if content.is_there]
        with self._lock:
            for content in held:
                if content.users == 0:
                    content.outlive_call()
                    self._count(content)
                content.users += 1
            self._calls.append(held)
            while self._calls and (self.nbytes > self.budget or len(self._calls) > _MAX_CALLS):
                self._drop(self._calls.popleft(), DROPPED)

    def release(self) -> None:
        """Let everything go: a step is over."""
        with self._lock:
            while self._calls:
                self._drop(self._calls.popleft(), ENDED)
            self._prune()

    def _copies_of(
        self, storage: torch.UntypedStorage
    ) -> weakref.WeakValueDictionary[_View, Content]:
        known = self._copies.get(storage._cdata)
        if known is None or known[0].expired():
            if len(self._copies) > _PRUNE_AT:
                self._prune()
            known = (StorageWeakRef(storage), weakref.WeakValueDictionary())
            self._copies[storage._cdata] = known
        return known[1]

    def _count(self, content: Content) -> None:
        if content.memory is not None:
            holders = self._memory.get(content.memory, 0)
            self._memory[content.memory] = holders + 1
            self.nbytes += 0 if holders else content.nbytes

    def _drop(self, contents: list[Content], reason: str) -> None:
        for content in contents:
            content.users -= 1
            if content.users:
                continue
            content.let_go(reason)
            if content.memory is not None:
                self._memory[content.memory] -= 1
                if not self._memory[content.memory]:
                    del self._memory[content.memory]
                    self.nbytes -= content.nbytes

    def _prune(self) -> None:
        self._copies = {k: known for k, known in self._copies.items() if not known[0].expired()}


def can_be_lost(tensor: torch.Tensor) -> bool:
    """Whether a failure of its device would make this tensor unreadable."""
    return not tensor.is_cpu and _may_fail(tensor.device.type)


@functools.cache
def _may_fail(device: str) -> bool:
    return device_layer(device).launch_blocking is not None


def _without_levels(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func.grad has wrapped; one of vmap's is as many as its batch has."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        raise Unsupported("it is batched by torch.func.vmap, and has no content of its own")
    return tensor


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, nested, wrappers
        return None
