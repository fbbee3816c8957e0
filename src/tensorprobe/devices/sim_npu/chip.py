"""The state of the one simulated NPU of this process: memory, random stream, faults, flags."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorprobe.devices.process_rank import local_rank
from tensorprobe.devices.sim_npu.acl_dump import AclDump
from tensorprobe.devices.sim_npu.faults import Faults
from tensorprobe.devices.sim_npu.overflow import FloatStatus


class MemoryBlock:
    """A piece of device memory, given back when the last tensor that lies in it is gone."""

    nbytes = 0  # for a block torch.compile makes up while it traces

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes

    def __del__(self) -> None:
        if self.nbytes:
            self.memory.allocated -= self.nbytes


class Memory:
    """Counts the bytes of live device tensors, and their peak."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> MemoryBlock:
        self.allocated += nbytes
        if self.allocated > self.peak:
            self.peak = self.allocated
        return MemoryBlock(self, nbytes)


class RandomStream:
    """The device's random numbers: those a CPU generator of the same seed would give."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._lock = threading.RLock()

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return self._generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, kernels that draw from the CPU's default generator draw from this stream."""
        host = torch.default_generator
        with self._lock:
            kept = host.get_state()
            host.set_state(self._generator.get_state())
            try:
                yield
            finally:
                self._generator.set_state(host.get_state())
                host.set_state(kept)


class Chip:
    """The device: one a process, since PyTorch knows one PrivateUse1 backend a process."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.random = RandomStream()
        self.faults = Faults()
        self.status = FloatStatus()
        self.dump: AclDump | None = None
        self.dump_is_begun = False
        self.has_context = False  # a device was set, or a tensor was made on it

    def check_index(self, index: int | None) -> None:
        """Refuse a device this process does not have.

        Under a launcher each process has the one device its local rank names, so that number is
        accepted as well; its tensors are on npu:0 all the same.
        """
        if index not in (None, 0, local_rank()):
            raise RuntimeError(
                f"Invalid NPU device ID {index}: a process has one simulated NPU, npu:0. "
                "Start one process a device (torchrun), or use npu:0"
            )


CHIP = Chip()
