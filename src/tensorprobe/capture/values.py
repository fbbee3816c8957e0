"""Live tensors to numbered values: each content is summarised, copied and written once a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorprobe.capture.quiet import Quiet
from tensorprobe.capture.transfer import Transfer
from tensorprobe.numerics.summary import Summarizer
from tensorprobe.records import Keep
from tensorprobe.store.writer import CaptureWriter

# A layout of one storage: version, offset, shape, stride, dtype, and whether its bytes are kept.
# A stride is given where the elements do not follow each other in order.
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

    def __init__(self, writer: CaptureWriter, summarizer: Summarizer) -> None:
        self.nbytes = 0  # of the contents kept in this step
        self._writer = writer
        self._summarizer = summarizer
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
        try:
            self._known.pop(tensor.untyped_storage()._cdata, None)
        except (NotImplementedError, RuntimeError):
            pass  # without storage it is never known

    def of(self, tensor: torch.Tensor, keep: Keep, name: Callable[[], str]) -> int | None:
        """The number of this tensor's content; `name` gives what it is called where it is new."""
        if keep == "structure":
            return None
        tensors = keep == "tensors"
        try:
            storage = tensor.untyped_storage()._cdata
            view: _View = (
                tensor._version,
                tensor.storage_offset(),
                tensor.shape,
                None if tensor.is_contiguous() else tensor.stride(),
                tensor.dtype,
                tensors,
            )
            known = self._known.get(storage)
            if known is None:
                if not _is_its_storage(tensor):
                    return self._new(tensor, name, tensors)
                reference = StorageWeakRef(tensor.untyped_storage())
                known = self._known.setdefault(storage, (reference, {}))
            elif tensor.is_neg() or (view[4].is_complex and tensor.is_conj()):
                # the same memory stands for other numbers
                return self._new(tensor, name, tensors)
        except (NotImplementedError, RuntimeError):  # inference tensors keep no version; sparse,
            return self._new(tensor, name, tensors)  # nested, functorch's and others no storage
        number = known[1].get(view)
        if number is None:
            number = known[1][view] = self._new(tensor, name, tensors)
        return number

    def _new(self, tensor: torch.Tensor, name: Callable[[], str], tensors: bool) -> int:
        number = next(self._ids)
        with Quiet():
            result = self._summarizer.submit(tensor)
            if tensors and result.error is None:
                self._writer.make_room(tensor.numel() * tensor.element_size())
                copy = self._transfer.snapshot(tensor)
                self.nbytes += copy.nbytes
                self._writer.tensor(number, name(), copy.dtype, copy.shape, copy.get, copy.nbytes)
        self._writer.value(number, result)
        return number


def _is_its_storage(tensor: torch.Tensor) -> bool:
    """Whether storage and version say what a tensor holds."""
    return not (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_conj()
        or tensor.is_neg()
    )
