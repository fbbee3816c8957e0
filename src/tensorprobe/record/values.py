"""Live tensors to numbered values: each content is summarised, copied and written once a step."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tensorprobe import native
from tensorprobe.follow.naming import CallNames
from tensorprobe.follow.plain_arguments import PLAIN_TENSORS
from tensorprobe.follow.quiet import Quiet
from tensorprobe.record.in_flight import InFlight, Promise, nothing_runs, version_of
from tensorprobe.record.transfer import Transfer
from tensorprobe.records import Keep, Role
from tensorprobe.store.shard import Bytes
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.digest import digest_bytes
from tensorprobe.tensors.memory import Unsupported, as_waiter, is_dense, own_part, stretch
from tensorprobe.tensors.summarizer import Result, Summarizer
from tensorprobe.torch_versions import is_own

# The call, the role and the label within it of a tensor, the label whole or in parts.
TensorName = tuple["Named", Role, "str | tuple[str, ...]"]
# What tells one content from another: the mark of its storage, version, offset, and the number of
# its form (see `Values.form`). Plain numbers: the garbage collector, which the many of them would
# set off, soon leaves them out.
_View = tuple[int, int, Any, int]
_MAX_FORMS = 10_000  # shapes that are new in every step would fill the table without end
UNSEEN = "the result of a collective that had not been waited for; record it at level mix"
_SPARE_NBYTES = 128 << 20  # memory of copies that are written, for the next ones
_LARGE_NBYTES = 128 << 10
_OF_OUTSIDE = ("input", "parameter", "buffer")
_SECTIONS: dict[Role, str] = {
    "input": "input",
    "output": "output",
    "parameter": "parameters",
    "parameter_grad": "parameters_grad",
    "buffer": "buffers",
    "state": "state",
}


class Named(Protocol):
    """A call that contents are called after."""

    names: CallNames


class Values:
    """Numbers the distinct tensor contents of a step and sends each to the store.

    The output of one call is the input of the next, so most tensors are met several times. Content
    is known by its live storage and version, never by an address: a weak reference is held to every
    storage met, so that no other storage can take its place while it is remembered.

    What moves no version is not seen by itself: a write by a kernel of one's own, say. Then the
    content met first in the step is shown again. Where such writes are known (collectives, running
    statistics, optimizers, in-place calls that are not recorded) `forget` is called; in C++
    `watch_writes` does so for all operations of torch, whoever calls them. Memory that was lent to
    numpy, or borrowed from it, is looked at again each time it is used.
    """

    def __init__(
        self, writer: CaptureWriter, summarizer: Summarizer, *, checksums: bool = False
    ) -> None:
        self.nbytes = 0  # of the contents kept in this step
        self.sees_calls = True  # those that wait for collectives, and write to their results
        self._writer = writer
        self._summarizer = summarizer
        self._checksums = checksums  # made of the bytes, on the host
        self._transfer = Transfer(spare_nbytes=_SPARE_NBYTES)
        # What is copied from the CPU anyway is digested by the thread that writes it.
        self._statistics = Summarizer() if summarizer.digests else None
        self._held = _Held()  # the storages met in this step
        self._marks: dict[int, int] = {}  # those of which something is known; anew after `forget`
        self._numbers: dict[_View, int] = {}
        self._lent: dict[int, str | None] = {}  # digests of what was in memory that is lent
        self._seen_lent = _Held()  # storages, of any step, that `lend` was told of
        self._forms: dict[Any, int] = {}
        self._new_forms = itertools.count()
        self._is_first_step: bool | None = None
        self._ids = itertools.count(1)
        self._new_marks = itertools.count(1)
        self.in_flight = InFlight(self._keep_promise, self._give_up, self._hold)
        self.of, self.forget = self._of, self._forget
        # The same in C++: of plain tensors it knows the storages and numbers by itself.
        self.contents: Any = None
        self.nameless = not checksums  # statistics are all that is made, and nobody asks whose
        if native.MODULE is not None:
            submit = None if checksums else summarizer.submit
            self.contents = native.MODULE.Contents(
                self._of, self._forget, self._new, submit, writer.value, self._marks, self._of_lent
            )
            self.contents.begin_step(self._ids)
            self.of, self.forget = self.contents.of, self.contents.forget

    def begin_step(self) -> None:
        """Number every content anew: a step can be read, or deleted, without the others.

        The numbers go on: another thread may have one that it is about to write down, in the step
        that begins now.
        """
        # not the other way round: another thread may mark a storage meanwhile, which is then held
        self._is_first_step = self._is_first_step is None
        held, self._held = self._held, _Held()
        self._marks.clear()
        self._numbers.clear()
        self._lent.clear()
        held.clear()
        self._seen_lent.drop_gone()
        self.nbytes = 0
        if self.contents is not None:
            self.contents.begin_step(self._ids)

    def watch_writes(self, on: bool) -> None:
        """See what torch's operations write to, without being called for each; only in C++."""
        self.contents.watch_writes(on)

    def saw_scaler(self) -> bool:
        """Whether a GradScaler's update was among what was seen."""
        return bool(self.contents.saw_scaler())

    def _forget(self, tensor: torch.Tensor) -> None:
        """The content of this tensor's storage was changed by something that moves no version."""
        inner = numbers_behind(tensor)
        if inner is not tensor:
            self.forget(inner)
            return
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage: never known
            self._marks.pop(tensor.untyped_storage()._cdata, None)

    def form(self, tensor: torch.Tensor, keep: Keep, stride: Sequence[int] | None) -> int:
        """The number of what, beside the memory, tells a content: dtype, elements, their order.

        `stride` is None where the elements follow each other in order.
        """
        layout: Any = None
        if stride is not None:
            shape = tuple(tensor.shape)
            # Statistics ask for no order: those of a transposed matrix are the matrix's own.
            ordered = keep != "stats" or self._checksums or self._summarizer.digests
            if ordered or not is_dense(shape, tuple(stride)):
                layout = (shape, tuple(stride))
        try:
            # The device, too: a summarizer knows by this number how to start on such tensors.
            form = (tensor.dtype, tensor.numel(), layout, keep == "tensors", tensor.device)
        except (NotImplementedError, RuntimeError):  # it has no elements that could be counted
            return next(self._new_forms)
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        return self._forms.setdefault(form, next(self._new_forms))

    def _of(
        self,
        tensor: torch.Tensor,
        form: int,
        call: Named,
        role: Role,
        label: str | tuple[str, ...],
        keep: Keep,
    ) -> int:
        """The number of this tensor's content; where it is new it goes by `call`, role and label.

        `form` is what the method of that name says of such tensors.
        """
        if type(tensor) not in PLAIN_TENSORS:
            inner = own_part(tensor)
            waiter = as_waiter(inner)
            if waiter is not None:
                inner = waiter.elem
                if not waiter.completed and not self.sees_calls and not nothing_runs():
                    self._give_up(unread := next(self._ids), UNSEEN)
                    return unread
                if not waiter.completed:
                    self.in_flight.meet(waiter, inner)
            if inner is not tensor:  # known by its own memory, whoever writes to that
                return int(self.of(inner, form, call, role, label, keep))
        try:
            storage = tensor.untyped_storage()
            key = storage._cdata
            mark = self._marks.get(key)
            if mark is None:
                if not _is_its_storage(tensor):
                    return self._new(tensor, (call, role, label), keep == "tensors")
                mark = self._mark(storage)
            elif tensor.is_neg() or tensor.is_conj() or tensor.is_nested:
                # the same memory means other numbers
                return self._new(tensor, (call, role, label), keep == "tensors")
            if tensor.is_inference() and key in self.in_flight:
                return self._promised(key, tensor, form, call, role, label, keep)
            view = (mark, tensor._version, tensor.storage_offset(), form)
        except (NotImplementedError, RuntimeError):
            # inference tensors keep no version; sparse, nested, functorch's and others no storage
            return self._new(tensor, (call, role, label), keep == "tensors")
        number = self._numbers.get(view)
        if self.in_flight.running and key in self.in_flight:
            if number is None:
                number = self._promised(key, tensor, form, call, role, label, keep)
                self._numbers[view] = number
        elif not is_own(storage) or (self._seen_lent and key in self._seen_lent):
            number = self._of_lent(tensor, number, form, call, role, label, keep)
            self._numbers[view] = number
        elif number is None:
            name = (call, role, label)
            number = self._numbers[view] = self._new(tensor, name, keep == "tensors", form)
        return number

    def _of_lent(
        self,
        tensor: torch.Tensor,
        known: int | None,
        form: int,
        call: Named,
        role: Role,
        label: str | tuple[str, ...],
        keep: Keep,
    ) -> int:
        """The number of a content that others may write to: `known`, unless they have.

        Memory that numpy has cannot be resized, says torch; nor can a file's, which nobody writes
        to. C++ tells the two apart. Memory that a collective writes to comes here from C++, too.
        """
        if self.in_flight.running and (key := tensor.untyped_storage()._cdata) in self.in_flight:
            if known is not None:
                return known
            return self._promised(key, tensor, form, call, role, label, keep)
        digest = digest_of_memory(tensor)
        if known is not None and digest is not None and self._lent.get(known) == digest:
            return known
        number = self._new(tensor, (call, role, label), keep == "tensors", form)
        self._lent[number] = digest
        return number

    def _promised(
        self,
        storage: int,
        tensor: torch.Tensor,
        form: int,
        call: Named,
        role: Role,
        label: str | tuple[str, ...],
        keep: Keep,
    ) -> int:
        """The number of a content that a collective has yet to make."""
        number = next(self._ids)
        name = _text((call, role, label)) if call is not None else ""
        promise = Promise(number, tensor, version_of(tensor), name, keep == "tensors", form)
        self.in_flight.promise(storage, promise)
        return number

    def _keep_promise(self, promise: Promise) -> None:
        with Quiet():
            p = promise
            self._make(p.number, p.tensor, p.name, p.stored, p.form)

    def _give_up(self, number: int, reason: str) -> None:
        self._writer.value(number, Result(error=reason, ready=True))

    def _hold(self, tensor: torch.Tensor, on: bool) -> None:
        if self.contents is not None:
            self.contents.hold(tensor, on)

    def lend(self, tensor: torch.Tensor) -> None:
        """The program has lent this memory to something that is not torch."""
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no storage
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen_lent:
                reference: Any = storage._weak_ref()
                self._seen_lent.add(reference)
        if self.contents is not None:
            self.contents.lend(tensor)

    def _mark(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        mark = self._marks.setdefault(key, next(self._new_marks))
        if key not in self._held:
            reference: Any = storage._weak_ref()  # is where the storage is, as is the key
            self._held.add(reference)
        return mark

    def _new(
        self, tensor: torch.Tensor, name: TensorName, tensors: bool, form: int | None = None
    ) -> int:
        number = next(self._ids)
        self._make(number, tensor, name, tensors, form)
        return number

    def _make(
        self,
        number: int,
        tensor: torch.Tensor,
        name: TensorName | str,
        tensors: bool,
        form: int | None,
    ) -> None:
        if not tensors and not self._checksums:
            if not isinstance(name, str) and self._came_from_outside(tensor, name[1]):
                self._writer.value(number, self._summarizer.submit_whole(tensor, form))
            else:
                self._writer.value(number, self._summarizer.submit(tensor, form))
            return
        checksum = crc32 if self._checksums else None
        summarizer = self._summarizer
        if tensors and self._statistics is not None and _is_large_on_host(tensor):
            summarizer, checksum = self._statistics, digest_bytes
        result = summarizer.submit(tensor, form)
        if (tensors or checksum) and result.error is None:
            with Quiet():
                self._copy(number, tensor, name, checksum, tensors)
        self._writer.value(number, result)

    def _came_from_outside(self, tensor: torch.Tensor, role: Role) -> bool:
        """Whether no recorded call has made a content that is new, as data, or as weights are in
        the first step; in later ones an optimizer has made those."""
        if role not in _OF_OUTSIDE or torch._C._current_graph_task_id() != -1:
            return False
        is_data = role == "input" and not tensor.requires_grad
        return is_data or bool(self._is_first_step)

    def _copy(
        self,
        number: int,
        tensor: torch.Tensor,
        name: TensorName | str,
        checksum: Callable[[Bytes], str] | None,
        stored: bool,
    ) -> None:
        self._writer.make_room(tensor.numel() * tensor.element_size())
        copy = self._transfer.snapshot(tensor)
        self.nbytes += copy.nbytes if stored else 0
        self._writer.tensor(
            number,
            name if isinstance(name, str) else _text(name),
            copy.dtype,
            copy.shape,
            copy.get,
            copy.nbytes,
            checksum=checksum,
            stored=stored,
        )


class _Held(set[int]):
    """Weak references to storages: while there is one, no other takes a storage's place in memory.

    As torch's StorageWeakRef does it, without an object for each.
    """

    _free: Any = torch.UntypedStorage._free_weak_ref  # kept: torch may go first at exit

    def clear(self) -> None:
        while self:
            self._free(self.pop())

    def drop_gone(self) -> None:
        """Let go of those that nobody else holds any more."""
        for reference in [each for each in self if torch.UntypedStorage._expired(each)]:
            self.remove(reference)
            self._free(reference)

    __del__ = clear


def crc32(data: Bytes) -> str:
    """The checksum that the peer makes of a content, with its kind before it."""
    return f"crc32:{zlib.crc32(data.data):08x}"


def digest_of_memory(tensor: torch.Tensor) -> str | None:
    """What tells one content of the memory of a tensor from another; None where nobody can say."""
    try:
        return digest_bytes(stretch(tensor)) if tensor.is_cpu else None
    except Unsupported:  # it was freed
        return None


def _is_large_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.numel() * tensor.element_size() >= _LARGE_NBYTES


def _text(name: TensorName) -> str:
    call, role, label = name
    label = label if isinstance(label, str) else ".".join(label)
    return f"{call.names.name}.{_SECTIONS[role]}.{label}"


def numbers_behind(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in whose memory the numbers of a DTensor, or of a waiting tensor, are."""
    if type(tensor) in PLAIN_TENSORS:
        return tensor
    inner = own_part(tensor)
    waiter = as_waiter(inner)
    return inner if waiter is None else waiter.elem


def _is_its_storage(tensor: torch.Tensor) -> bool:
    """Whether storage and version say what a tensor holds."""
    return not (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_conj()  # the same memory means other numbers
        or tensor.is_neg()
    )
