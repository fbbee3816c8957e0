"""Live tensors to numbered values: each content is summarised, copied and written once a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.capture.transfer import Transfer
from tensorprobe.numerics.summary import Summarizer
from tensorprobe.records import Keep
from tensorprobe.store.writer import CaptureWriter

# A layout of one storage: version, offset, shape, stride, dtype, and whether its bytes are kept.
_View = tuple[int, Any, Any, Any, torch.dtype, bool]


class Values:
    """Numbers the distinct tensor contents of a step and sends each to the store.

    The output of one call is the input of the next, so most tensors are met several times. Content
    is known by its live storage and version, never by an address: a weak reference is held to every
    storage met, so that no other storage can take its place while it is remembered.

    What moves no version is not seen by itself: a write through numpy, or by a kernel of one's own.
    Then the content met first in the step is shown again. Where such writes are known (collectives,
    running statistics, optimizers, in-place calls that are not recorded) `forget` is called.
    """

    def __init__(
        self, writer: CaptureWriter, summarizer: Summarizer, *, checksums: bool = False
    ) -> None:
        self.nbytes = 0  # of the contents kept in this step
        self._writer = writer
        self._summarizer = summarizer
        self._checksums = checksums  # made of the bytes, on the host
        self._transfer = Transfer()
        self._known: dict[int, tuple[StorageWeakRef, dict[_View, int]]] = {}
        self._ids = itertools.count(1)

    def begin_step(self) -> None:
        """Start numbering afresh: a step can be read, or deleted, without the others."""
        self._known.clear()
        self.nbytes = 0
        self._ids = itertools.count(1)

    def forget(self, tensor: torch.Tensor) -> None:
        """The content of this tensor's storage was changed by something that moves no version."""
        storage = _storage(tensor)
        if storage is not None:
            self._known.pop(storage._cdata, None)

    def of(self, tensor: torch.Tensor, name: Callable[[], str], keep: Keep) -> int | None:
        """The number of this tensor's content; `name` gives what it is called where it is new."""
        if keep == "structure":
            return None
        tensors = keep == "tensors"
        storage = _storage(tensor)
        if storage is None:
            return self._new(tensor, name, tensors)
        view: _View = (
            tensor._version,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensors,
        )
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        number = known[1].get(view)
        if number is None:
            number = known[1][view] = self._new(tensor, name, tensors)
        return number

    def _new(self, tensor: torch.Tensor, name: Callable[[], str], tensors: bool) -> int:
        number = next(self._ids)
        result = self._summarizer.submit(tensor)
        if (tensors or self._checksums) and result.error is None:
            self._writer.make_room(tensor.numel() * tensor.element_size())
            copy = self._transfer.snapshot(tensor)
            self.nbytes += copy.nbytes if tensors else 0
            self._writer.tensor(
                number,
                name(),
                copy.dtype,
                copy.shape,
                copy.get,
                copy.nbytes,
                checksum=self._checksums,
                stored=tensors,
            )
        self._writer.value(number, result)
        return number


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage, where it and the version say what a tensor holds."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if tensor.is_inference():  # keeps no version
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    if tensor.is_conj() or tensor.is_neg():  # the same memory stands for other numbers
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # tensors without storage: nested, wrappers
        return None
