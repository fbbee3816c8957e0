"""Tensors to summaries and digests, without ever waiting for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from tensorprobe.tensors import backends, digest, memory
from tensorprobe.tensors.backends import Backend, HostBackend, KernelBackend
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.summary import TensorSummary
from tensorprobe.torch_versions import key_bits

__all__ = ["Result", "Summarizer", "summarize"]

_Start = Callable[[torch.Tensor, "int | None", bool], "Result | None"]
_OWN_TYPES = frozenset([torch.Tensor, torch.nn.Parameter])
_function_mode_is_on = torch._C._is_torch_function_mode_enabled


class Choice(Protocol):
    """Makes the backend for a device."""

    def __call__(self, device: torch.device, *, stats: bool, digest: bool) -> Backend: ...


class Summarizer:
    """Summarises tensors as they come; those of an accelerator are ready some time later.

    `submit` may be called from any thread, the others from another one.

        summarizer = Summarizer(digest=True)
        result = summarizer.submit(tensor)
        summarizer.wait()
        result.summary.norm, result.digest
    """

    def __init__(
        self,
        *,
        stats: bool = True,
        digest: bool = False,
        digest_some: bool = False,
        choose: Choice = backends.choose,
    ) -> None:
        """`digest_some`: no more digests than of integers, and of what `submit_whole` is given.

        Those are of the numbers in the order in which they lie in memory, whatever the strides say:
        a matrix and its transpose are one content here, as for statistics.
        """
        self._stats = stats
        self._digest = digest
        self._whole = Summarizer(stats=stats, digest=True, choose=choose) if digest_some else None
        self._choose = choose
        self._starts: dict[torch.device, _Start] = {}
        self._starts_by_form: dict[int | None, _Start] = {}
        self._backends: dict[torch.device, Backend] = {}
        self._lock = threading.RLock()  # a signal's handler may come with a tensor meanwhile
        self._host = self._backend_of(torch.device("cpu"))

    @property
    def digests(self) -> bool:
        """Whether results have a digest."""
        return self._digest

    def submit(
        self, tensor: torch.Tensor, form: int | None = None, is_there: bool = False
    ) -> Result:
        """Start on a tensor as it is now. Never raises and never waits for a device.

        `form` spares looking at what is known: a number for plain memory (nothing nested, negated
        or conjugated) of one device, dtype and number of elements, and of one layout; or, where
        there are no digests, without holes and repetitions. `is_there`: its storage has all of it.
        """
        # Even reading an attribute of a tensor would be seen by a function mode, or by a subclass.
        if type(tensor) in _OWN_TYPES and not _function_mode_is_on():
            start = self._starts_by_form.get(form) or self._start_of(tensor, form)
            started = None if start is None else start(tensor, form, is_there)
            return self._look_closely(tensor) if started is None else started
        with torch._C.DisableTorchFunction():
            return self._look_closely(tensor)

    def submit_whole(self, tensor: torch.Tensor, form: int | None = None) -> Result:
        """The same with a digest, where only some tensors have one and this one has no holes."""
        if type(tensor) in _OWN_TYPES and not _function_mode_is_on():
            return self._submit_whole(tensor) or self.submit(tensor, form)
        with torch._C.DisableTorchFunction():
            return self._submit_whole(tensor) or self._look_closely(tensor)

    def _submit_whole(self, tensor: torch.Tensor) -> Result | None:
        flat = None if self._whole is None else memory.in_one_row(tensor)
        return None if flat is None or self._whole is None else self._whole.submit(flat)

    def flush(self) -> None:
        """Start to bring everything submitted so far to the host; does not block."""
        for backend in self._in_use():
            backend.flush()

    def poll(self) -> None:
        """Complete the results whose numbers have arrived; does not block."""
        for backend in self._in_use():
            backend.poll()

    def land(self) -> None:
        """Block until all that was flushed is ready. Starts nothing."""
        for backend in self._in_use():
            backend.land()

    def wait(self) -> None:
        """Block until every result is ready."""
        self.flush()
        self.land()

    def _start_of(self, tensor: torch.Tensor, form: int | None) -> _Start | None:
        start = self._starts.get(tensor.device)
        if self._whole is not None and tensor.dtype in memory.WHOLE_NUMBERS:
            start = self._start_whole
        if start is not None and form is not None:
            if len(self._starts_by_form) >= backends.MAX_FORMS:
                self._starts_by_form.clear()
            self._starts_by_form[form] = start
        return start

    def _start_whole(
        self, tensor: torch.Tensor, form: int | None = None, is_there: bool = False
    ) -> Result | None:
        del form, is_there  # tensors of one form lie in memory in several orders
        return self._submit_whole(tensor)

    def _look_closely(self, tensor: torch.Tensor) -> Result:
        result = Result()
        try:
            self._start(result, tensor)
        except memory.Unsupported as unsupported:
            result.error = str(unsupported)
            result.ready = True
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            # A kind of tensor nobody foresaw must not end the user's program.
            result.error = f"{type(tensor).__name__} cannot be read: {error}"
            result.ready = True
        return result

    def _start(self, result: Result, tensor: torch.Tensor) -> None:
        keys = key_bits(tensor)
        if not memory.is_plain(keys):
            tensor = memory.settle(tensor, keys)
        name = memory.dtype_name(tensor)
        if not tensor.numel():
            self._finish_empty(result)
        elif tensor.is_cpu:
            self._host.submit(result, tensor, name)
        else:
            self._backend_of(tensor.device).submit(result, tensor, name)

    def _finish_empty(self, result: Result) -> None:
        if self._stats:
            result.summary = TensorSummary(None, None, None, None, 0, 0, 0)
        if self._digest:
            result.digest = digest.finish(0, 0)
        result.ready = True

    def _backend_of(self, device: torch.device) -> Backend:
        backend = self._backends.get(device)
        if backend is None:
            with self._lock:
                backend = self._backends.get(device)
                if backend is None:
                    backend = self._choose(device, stats=self._stats, digest=self._digest)
                    self._backends[device] = backend
                    if isinstance(backend, (HostBackend, KernelBackend)):
                        self._starts[device] = backend.start
        return backend

    def _in_use(self) -> list[Backend]:
        with self._lock:
            found = list(self._backends.values())
        return found if self._whole is None else found + self._whole._in_use()


def summarize(tensor: torch.Tensor) -> TensorSummary:
    """The summary of one tensor; raises ValueError with the reason when there is none."""
    summarizer = Summarizer()
    result = summarizer.submit(tensor)
    summarizer.wait()
    if result.summary is None:
        raise ValueError(result.error)
    return result.summary
