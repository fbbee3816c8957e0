# mypy: allow-untyped-calls
# torch leaves split, Stream and Event without types.
"""Starting the Triton kernels on a CUDA tensor (or, interpreted, on a CPU one)."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from tensorprobe.numerics import host, memory, rows
from tensorprobe.numerics import triton_kernels as kernels
from tensorprobe.numerics.backends import KernelBackend
from tensorprobe.numerics.digest import CHUNK_NBYTES, WEIGHTS
from tensorprobe.numerics.queue import Arrival, Bank

BLOCK = 2048
MAX_ROWS = 1024  # programs a tensor is spread over: enough to fill every multiprocessor
WARPS = 8

# How each dtype is handed to a kernel, and what the kernel makes of it.
READS: dict[str, tuple[tl.dtype, int]] = {
    "float64": (tl.float64, kernels.FLOAT),
    "float32": (tl.float32, kernels.FLOAT),
    "float16": (tl.float16, kernels.FLOAT),
    "bfloat16": (tl.int16, kernels.BFLOAT16),
    "complex128": (tl.float64, kernels.COMPLEX),
    "complex64": (tl.float32, kernels.COMPLEX),
    "complex32": (tl.float16, kernels.COMPLEX),
    "int64": (tl.int64, kernels.INTEGER),
    "int32": (tl.int32, kernels.INTEGER),
    "int16": (tl.int16, kernels.INTEGER),
    "int8": (tl.int8, kernels.INTEGER),
    "uint64": (tl.uint64, kernels.UNSIGNED64),
    "uint32": (tl.uint32, kernels.INTEGER),
    "uint16": (tl.uint16, kernels.INTEGER),
    "uint8": (tl.uint8, kernels.INTEGER),
    "bool": (tl.uint8, kernels.BOOL),
    **dict.fromkeys(host.FLOAT8, (tl.uint8, kernels.TABLE)),
}
_UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.int64}
# What Triton raises where a kernel cannot be built or loaded.
FAILURES = (TritonError, RuntimeError, OSError, subprocess.CalledProcessError)


def rows_for(count: int) -> int:
    """How many rows the tallies of `count` elements take."""
    return min(MAX_ROWS, -(-count // BLOCK))


class Launcher:
    """Starts kernels on one device; keeps the tables they read."""

    def __init__(self, device: torch.device) -> None:
        names = [name for name in host.FLOAT8 if hasattr(torch, name)]
        arrays = [WEIGHTS.view(np.int64)]
        arrays += [host.float8_values(name).astype(np.float32) for name in names]
        # Kept: a copy that does not block may still be reading its source.
        self._sources = [torch.from_numpy(array.copy()) for array in arrays]
        self.constants = [source.to(device, non_blocking=True) for source in self._sources]
        self._weights, *tables = self.constants
        self._tables = dict(zip(names, tables, strict=True))

    def tally(
        self, tensor: torch.Tensor, name: str, count: int, bank: Bank, slot: int, row: int
    ) -> None:
        """Tally `count` elements that lie in one piece from the tensor's first on."""
        read, kind = READS[name]
        x = triton.reinterpret(tensor, read)
        grid = (rows_for(count),)
        if name in memory.WITH_FRACTION:
            table = self._tables.get(name, self._weights)
            wide = name in ("float64", "complex128")
            kernels.tally_floats[grid](
                x, table, bank.rows, bank.meta, count, row, slot,
                KIND=kind, WIDE=wide, FIELDS=rows.FIELDS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        else:
            kernels.tally_integers[grid](
                x, bank.rows, bank.meta, count, row, slot,
                KIND=kind, FIELDS=rows.FIELDS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip

    def digest(self, tensor: torch.Tensor, nbytes: int, bank: Bank, slot: int) -> None:
        """Digest a contiguous tensor."""
        unit = _common_unit(tensor.data_ptr(), nbytes)
        kernels.digest_chunks[(-(-nbytes // CHUNK_NBYTES),)](
            triton.reinterpret(tensor, _UNITS[unit]), self._weights, bank.digests,
            nbytes // unit, slot, UNIT=unit, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def reduce(self, bank: Bank) -> None:
        """Make one row of the rows of each slot."""
        kernels.reduce_rows[(len(bank.takers),)](
            bank.rows, bank.meta, bank.digests, bank.out,
            FIELDS=rows.FIELDS, BLOCK=128, num_warps=4,
        )  # fmt: skip


def _common_unit(address: int, nbytes: int) -> int:
    unit = 8
    while address % unit or nbytes % unit:
        unit //= 2
    return unit


class CudaPort:
    """The streams of a CUDA device, as a queue needs them."""

    def __init__(self, device: torch.device, launcher: Launcher) -> None:
        self._index = device.index
        self._launcher = launcher
        self._side = torch.cuda.Stream(device)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(device))

    def on_device(self) -> AbstractContextManager[object]:
        if torch._C._cuda_getDevice() == self._index:
            return nullcontext()
        return torch.cuda.device(self._index)

    def current_stream(self) -> int:
        if torch._C._cuda_isCurrentStreamCapturing():
            # The kernel would become part of the user's graph and write to a bank long gone.
            raise memory.Unsupported("cuda tensor during graph capture: no summary")
        stream: int = torch._C._cuda_getCurrentRawStream(self._index)
        return stream

    def adopt(self, bank: Bank, stream: int) -> None:
        current = torch.cuda.current_stream(self._index)
        current.wait_event(self._uploaded)
        current.wait_event(bank.born)
        # Else the allocator could give the bank's memory away while that stream still writes.
        for tensor in (bank.rows, bank.meta, bank.digests, *self._launcher.constants):
            tensor.record_stream(current)
        bank.streams[stream] = current

    def read_back(self, bank: Bank) -> Arrival:
        for stream in bank.streams.values():
            written = torch.cuda.Event()
            written.record(stream)
            self._side.wait_event(written)
        with memory.kernels_only(), torch.cuda.device(self._index), torch.cuda.stream(self._side):
            for tensor in (bank.rows, bank.meta, bank.digests, bank.out):
                tensor.record_stream(self._side)
            self._launcher.reduce(bank)
            used = len(bank.takers)
            bank.host[:used].copy_(bank.out[:used], non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(self._side)
        return landed


def cuda_backend(device: torch.device, *, stats: bool, digest: bool) -> KernelBackend:
    """The backend of a CUDA device; raises one of FAILURES where Triton cannot compile."""

    def new_bank() -> Bank:
        with memory.kernels_only(), torch.inference_mode(False):
            bank = Bank(device, pinned=True)
        bank.born = torch.cuda.Event()
        bank.born.record(torch.cuda.current_stream(device))
        return bank

    with torch.cuda.device(device), memory.kernels_only(), torch.inference_mode(False):
        launcher = Launcher(device)
        # Tried on a bank that is not used: Triton wants a C compiler, which many machines lack.
        trial = Bank(device, pinned=False)
        launcher.tally(trial.digests, "int64", 1, trial, 0, 0)
        port = CudaPort(device, launcher)
    return KernelBackend(launcher, port, new_bank, stats=stats, digest=digest)
