"""Tensor contents to host memory, without making the program wait for a device."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorprobe.devices import device_layer
from tensorprobe.tensors.memory import is_plain, settle
from tensorprobe.tensors.readback import PATIENCE_S, await_event
from tensorprobe.torch_versions import key_bits

_LARGE_NBYTES = 128 << 10  # from here on memory is new from the system, and given back to it


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
    """Takes private copies of tensors; those of a device travel while the program goes on.

    Of the memory of copies that nobody holds any more, `spare_nbytes` are kept for the next ones.
    """

    def __init__(self, *, pinned: bool = True, spare_nbytes: int = 0) -> None:
        # pinned memory cannot even be given back once its device has failed: the process aborts
        self._pinned = pinned
        self._failed: set[torch.device] = set()
        self._pins: dict[torch.device, bool] = {}
        self._spare = _Spare(spare_nbytes) if spare_nbytes else None

    def snapshot(self, tensor: torch.Tensor) -> HostCopy:
        """A copy of the content as it is now, in the order of the device's own work."""
        keys = key_bits(tensor)
        source = (tensor if is_plain(keys) else settle(tensor, keys)).detach()
        if source.is_cpu:
            return HostCopy(self._copied(source), None)
        source = source.contiguous()
        device = source.device
        layer = device_layer(device)
        if device not in self._pins:
            self._pins[device] = self._pinned and layer.can_pin_memory()
        done = layer.new_event() if self._pins[device] else None
        if done is None:
            return HostCopy(source.to("cpu"), None)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        # In the program's own stream: what it computes next may write to this very tensor, and a
        # copy in a stream beside it would see that. It is over long before the disk has taken it.
        host.copy_(source, non_blocking=True)
        done.record(layer.current_stream(device))
        # the writer waits, not the program
        return HostCopy(host, functools.partial(self._await, done, device))

    def _await(self, event: Any, device: torch.device) -> None:
        # Once a device has failed, the copies that are still to come are asked for at once.
        try:
            await_event(event, device, 0.0 if device in self._failed else PATIENCE_S)
        except RuntimeError:
            self._failed.add(device)
            raise

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        nbytes = source.numel() * source.element_size()
        if self._spare is None or nbytes < _LARGE_NBYTES or source.is_quantized:
            return source.clone(memory_format=torch.contiguous_format)
        host = torch.from_numpy(self._spare.lend(nbytes)).view(source.dtype).view(source.shape)
        return host.copy_(source)


class _Spare:
    """Memory that is lent again: fresh pages cost three times what copying into them does."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._nbytes = 0
        self._slabs: dict[int, list[np.ndarray[Any, Any]]] = {}  # by size
        self._lock = threading.RLock()  # one may come back while another is being taken

    def lend(self, nbytes: int) -> np.ndarray[Any, Any]:
        """A buffer of `nbytes`. It is used again once no array and no tensor refers to it."""
        step = 1 << max(nbytes.bit_length() - 4, 0)  # sizes that are near each other share slabs
        size = -(-nbytes // step) * step
        with self._lock:
            slabs = self._slabs.get(size)
            slab = slabs.pop() if slabs else None
            self._nbytes -= size if slab is not None else 0
        if slab is None:
            slab = np.empty(size, np.uint8)
        lent = slab[:nbytes]
        weakref.finalize(lent, self._take_back, slab).atexit = False
        return lent

    def _take_back(self, slab: np.ndarray[Any, Any]) -> None:
        with self._lock:
            if self._nbytes + slab.nbytes <= self._most_nbytes:
                self._nbytes += slab.nbytes
                self._slabs.setdefault(slab.nbytes, []).append(slab)
