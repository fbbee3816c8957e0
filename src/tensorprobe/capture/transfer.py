"""Tensor contents to host memory, without making the program wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorprobe.devices import Device, device_layer
from tensorprobe.numerics.memory import is_plain, keys_of, settle


class HostCopy:
    """The row-major bytes of a tensor as they were; `get` waits for them where they travel."""

    __slots__ = ("_host", "_ready", "dtype", "nbytes", "shape")

    def __init__(self, host: torch.Tensor, ready: Callable[[], None] | None) -> None:
        self.dtype = str(host.dtype).removeprefix("torch.")
        self.shape = tuple(host.shape)
        self.nbytes = host.numel() * host.element_size()
        self._host = host
        self._ready = ready

    def get(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        array: np.ndarray[Any, np.dtype[np.uint8]]
        array = self.tensor().reshape(-1).view(torch.uint8).numpy()
        return array

    def tensor(self) -> torch.Tensor:
        """The copy itself, on the host."""
        if self._ready is not None:
            self._ready()
            self._ready = None  # a device that fails later is not asked again
        return self._host


class Transfer:
    """Takes private copies of tensors; those of a device travel on a stream of their own."""

    def __init__(self, *, pinned: bool = True) -> None:
        # pinned memory cannot even be given back once its device has failed: the process aborts
        self._pinned = pinned
        self._streams: dict[torch.device, Any] = {}

    def snapshot(self, tensor: torch.Tensor) -> HostCopy:
        """A copy of the content as it is now, in the order of the device's own work."""
        keys = keys_of(tensor)
        source = (tensor if is_plain(keys) else settle(tensor, keys)).detach()
        if source.is_cpu:
            return HostCopy(source.clone(memory_format=torch.contiguous_format), None)
        source = source.contiguous()
        layer = device_layer(source.device)
        side = self._side_stream(source.device, layer)
        if side is None:
            return HostCopy(source.to("cpu"), None)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        side.wait_stream(layer.current_stream())
        with layer.on_stream(side):
            host.copy_(source, non_blocking=True)
            done = layer.new_event()
            done.record(side)
        source.record_stream(side)  # its memory is not given out again before the copy is done
        return HostCopy(host, done.synchronize)  # the writer waits, not the program

    def _side_stream(self, device: torch.device, layer: Device) -> Any:
        if device not in self._streams:
            pins = self._pinned and layer.can_pin_memory()
            self._streams[device] = layer.new_stream() if pins else None
        return self._streams[device]
