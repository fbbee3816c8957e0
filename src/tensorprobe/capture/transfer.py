"""Tensor contents to host memory, without making the program wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class HostCopy:
    """The row-major bytes of a tensor as they were; `get` waits for them where they travel."""

    __slots__ = ("_bytes", "_ready", "dtype", "nbytes", "shape")

    def __init__(self, host: torch.Tensor, ready: Callable[[], None] | None) -> None:
        self.dtype = str(host.dtype).removeprefix("torch.")
        self.shape = tuple(host.shape)
        self.nbytes = host.numel() * host.element_size()
        self._bytes = host
        self._ready = ready

    def get(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._ready is not None:
            self._ready()
        flat = self._bytes.reshape(-1)
        array: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
        return array


def snapshot(tensor: torch.Tensor) -> HostCopy:
    """A private copy of the content, taken now in the order of the device's own work."""
    source = tensor.detach()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if source.device.type == "cpu":
        return HostCopy(source.clone(memory_format=torch.contiguous_format), None)
    if source.device.type == "cuda":
        return _from_cuda(source)
    return HostCopy(source.contiguous().to("cpu"), None)


def _from_cuda(source: torch.Tensor) -> HostCopy:
    """Copy on a stream of its own into pinned memory; the writer, not the program, waits for it."""
    source = source.contiguous()
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    side = _side_stream(source.device)
    side.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(side)
    source.record_stream(side)  # its memory is not given out again before the copy is done
    return HostCopy(host, done.synchronize)


_side_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index or 0
    stream = _side_streams.get(index)
    if stream is None:
        stream = _side_streams[index] = torch.cuda.Stream(device)
    return stream
