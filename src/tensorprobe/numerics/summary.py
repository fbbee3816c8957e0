"""Tensors to summaries and digests, without ever waiting for a device."""

from __future__ import annotations

import torch

from tensorprobe.numerics import host, memory
from tensorprobe.records import TensorSummary


class Result:
    """What became of one tensor; filled in when `ready`.

    Either `error` says why there is nothing, or `summary` and `digest` hold what was asked for.
    """

    __slots__ = ("digest", "error", "ready", "summary")

    def __init__(self) -> None:
        self.summary: TensorSummary | None = None
        self.digest: str | None = None
        self.error: str | None = None
        self.ready = False

    def __repr__(self) -> str:
        if not self.ready:
            return "<Result: on its way>"
        return f"<Result: {self.error or self.summary} {self.digest or ''}>"


class Summarizer:
    """Summarises tensors as they come; those of an accelerator are ready some time later.

    `submit` may be called from any thread, `flush`, `poll` and `wait` from another one.

        summarizer = Summarizer(digest=True)
        result = summarizer.submit(tensor)
        summarizer.wait()
        result.summary.norm, result.digest
    """

    def __init__(self, *, stats: bool = True, digest: bool = False) -> None:
        self.stats = stats
        self.digest = digest

    def submit(self, tensor: torch.Tensor) -> Result:
        """Start on a tensor as it is now. Never raises and never waits for a device."""
        result = Result()
        # Even reading an attribute of a tensor would be seen by a function mode.
        with torch._C.DisableTorchFunction():
            try:
                keys = memory.keys_of(tensor)
                if not memory.is_plain(keys):
                    tensor = memory.settle(tensor, keys)
                name = memory.dtype_name(tensor)
                if tensor.is_cpu:
                    self._on_host(result, tensor, name)
                else:
                    raise memory.Unsupported(f"{tensor.device.type} tensor: no summary")
            except memory.Unsupported as unsupported:
                result.error = str(unsupported)
                result.ready = True
            except (RuntimeError, TypeError, ValueError, MemoryError) as error:
                # A kind of tensor nobody foresaw must not end the user's program.
                result.error = f"{type(tensor).__name__} cannot be read: {error}"
                result.ready = True
        return result

    def flush(self) -> None:
        """Start to bring everything submitted so far to the host; does not block."""

    def poll(self) -> None:
        """Complete the results whose numbers have arrived; does not block."""

    def wait(self) -> None:
        """Block until every result is ready."""

    def _on_host(self, result: Result, tensor: torch.Tensor, name: str) -> None:
        storage = host.STORAGE[name]
        if self.stats and self.digest and tensor.is_contiguous():
            array = memory.logical_array(tensor, storage)
            result.summary, result.digest = host.summarize_and_digest(array, name)
        else:
            if self.stats:
                array, repeat = memory.distinct_array(tensor, storage)
                result.summary = host.summarize_array(array, name, repeat=repeat)
            if self.digest:
                result.digest = host.digest_strided(memory.logical_array(tensor, storage))
        result.ready = True


def summarize(tensor: torch.Tensor) -> TensorSummary:
    """The summary of one tensor; raises ValueError with the reason when there is none."""
    summarizer = Summarizer()
    result = summarizer.submit(tensor)
    summarizer.wait()
    if result.summary is None:
        raise ValueError(result.error)
    return result.summary
