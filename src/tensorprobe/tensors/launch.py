# mypy: allow-untyped-calls
# torch leaves split, Stream and Event without types.
"""Starting the Triton kernels on a CUDA tensor (or, interpreted, on a CPU one)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from tensorprobe.tensors import cuda_graphs as captures
from tensorprobe.tensors import host, memory
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors import triton_kernels as kernels
from tensorprobe.tensors.backends import KernelBackend, TorchBackend
from tensorprobe.tensors.digest import CHUNK_NBYTES, WEIGHTS
from tensorprobe.tensors.readback import Arrival, Bank

LANES = 256  # threads of a program that tallies floats
BLOCK = 2048  # elements that a program takes at once elsewhere
MAX_ROWS = 528  # programs a tensor is spread over: four fill a multiprocessor of an H100
MAX_FLAGGERS = 1056  # the same of those that look for what is not finite, which take few registers
WARPS = 8
SKETCHES = True  # whether kernels make sketches; without them there are none of CUDA tensors
# So many registers let four programs of LANES threads run on a multiprocessor at once; the compiler
# would take more for float16, and let three.
_OPTIONS = {} if torch.version.hip else {"maxnreg": 64}

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
_IN_WORDS = frozenset(["float32", "float16", "bfloat16"])
_UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.int64}
# What Triton raises where a kernel cannot be built, loaded or started.
FAILURES = (
    TritonError,
    RuntimeError,
    OSError,
    TypeError,
    ValueError,
    subprocess.CalledProcessError,
)


def _tile(name: str) -> int:
    """Elements of this dtype that a program takes at once."""
    return LANES * _vector(name) if name in memory.WITH_FRACTION else BLOCK


def _vector(name: str) -> int:
    """Elements in 16 bytes, the widest load there is; of complex ones, their parts."""
    bits: int = READS[name][0].primitive_bitwidth
    return 128 // bits


_TILES = {name: _tile(name) for name in READS}


def rows_for(name: str, count: int) -> int:
    """How many rows the tallies of `count` elements take."""
    return min(MAX_ROWS, -(-count // _TILES[name]))


def takes_both(name: str, tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether one kernel gives the digest and the tallies of this contiguous tensor."""
    return name in _IN_WORDS and not (nbytes % 8 or tensor.data_ptr() % 16)


def takes_runs(name: str, tensor: torch.Tensor, runs: memory.Runs) -> bool:
    """Whether a kernel reads elements that lie so: whole vectors, and not too far from another."""
    if name not in _IN_WORDS or tensor.data_ptr() % 16:
        return False
    vector = _vector(name)
    run, n1, n2, *steps = runs
    if run % vector or any(step % vector for step in steps):
        return False
    counts = (tensor.numel() // (run * n1 * n2), n1, n2)
    extent = run + sum(count * step for count, step in zip(counts, steps, strict=True))
    return extent < 1 << 30 and tensor.numel() < 1 << 30


def rows_for_both(nbytes: int) -> int:
    """How many rows the tallies take that come with a digest: one for 64 KB, up to a limit."""
    return min(MAX_ROWS, -(-nbytes // CHUNK_NBYTES))


# A function, and what it is given between grid and stream and the kernel's arguments, and after
# those.
Form = tuple[Callable[..., object], tuple[object, ...], tuple[object, ...]]
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


class Kernel:
    """A Triton function, started by its compiled form as soon as there is one.

    Triton's own start looks at every argument anew to find that form, which takes longer than all
    else that is done for a small tensor. Here the caller says what it depends on (`key`): the
    dtype, whether addresses are aligned, whether counts need 64 bits.
    """

    def __init__(
        self, function: Any, device: torch.device, warps: int, **constants: object
    ) -> None:
        early = _starts_early(device)
        self._function = function
        self._constants = {**constants, "EARLY": early}
        self._options = {"num_warps": warps, **_OPTIONS}
        if early:
            self._options["launch_pdl"] = True
        self._compiled: dict[Hashable, Form] = {}

    def form(self, key: Hashable) -> Form | None:
        """The compiled form for this key, if there is one."""
        return self._compiled.get(key)

    def start(self, key: Hashable, programs: int, stream: int, *arguments: int) -> bool:
        """Start the compiled form for this key, given addresses and numbers; False without one."""
        known = self._compiled.get(key)
        if known is None:
            return False
        call, before, after = known
        call(programs, 1, 1, stream, *before, *arguments, *after)
        return True

    def compile_and_start(
        self, key: Hashable, programs: int, *arguments: Any, **constants: object
    ) -> None:
        """Let Triton find out what it depends on, and keep the compiled form."""
        constants = {**constants, **self._constants}
        compiled = self._function[(programs,)](*arguments, **constants, **self._options)
        if compiled is not None and _starts_directly():
            self._compiled[key] = _form_of(compiled, tuple(constants.values()))


def _starts_early(device: torch.device) -> bool:
    """Whether a kernel can be got ready on this device while the one before it ends."""
    if device.index is None or torch.version.hip:  # the host, where kernels are interpreted
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _starts_directly() -> bool:
    """Whether compiled kernels take the arguments they are given here, in this Triton."""
    return (3, 4) <= _VERSION <= (3, 9) and not triton.knobs.runtime.interpret


def _form_of(compiled: Any, constants: tuple[object, ...]) -> Form:
    """How to start a compiled kernel without the layer that looks for what ours never need.

    That layer of Triton, in Python, allocates scratch memory for kernels that ask for it. Where
    this one does not, and it is known what this version hands on, the function in C is called.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if _VERSION in ((3, 6), (3, 9)) and _needs_no_scratch(run):
        launch, how = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
        if _VERSION == (3, 6):
            before = (function, *how, None, None, metadata, None, None, None)
            return launch, before, constants
        given = (function, *how, metadata, *[None] * 5, run.arg_annotations, run.kernel_signature)

        def call(x: int, y: int, z: int, stream: int, *arguments: object) -> None:
            launch(x, y, z, stream, *given, arguments)

        return call, (), constants
    return run, (function, metadata, None, None, None), constants


def _needs_no_scratch(run: Any) -> bool:
    kind = type(run)
    if (kind.__module__, kind.__name__) != ("triton.backends.nvidia.driver", "CudaLauncher"):
        return False
    asked = (run.global_scratch_size, run.profile_scratch_size, getattr(run, "gsan_enabled", False))
    return not any(asked)


class Start(NamedTuple):
    """How a compiled kernel starts: `call(programs, 1, 1, stream, *before, *given, *after)`.

    In `given` are numbers, and the names of what differs from one tensor to the next: its address
    and units, row and slot, and a bank's addresses. `begin` does it, given programs, stream,
    address, units, bank, row and slot.
    """

    begin: Callable[[int, int, int, int, Bank, int, int], None]
    call: Callable[..., object]
    before: tuple[object, ...]
    given: tuple[int | str, ...]
    after: tuple[object, ...]


class Usual(NamedTuple):
    """How the kernel of a dtype starts on a tensor that is contiguous and aligned to 16 bytes.

    It has less than 2**31 elements, whole units of them. Each program takes tiles, of which the
    first starts a row.
    """

    dtype: str
    itemsize: int
    tile: int  # elements
    max_programs: int
    unit: int  # elements
    start: Start


class Launcher:
    """Starts kernels on one device; keeps the tables they read."""

    def __init__(self, device: torch.device, *, sketches: bool | None = None) -> None:
        self.sketches = SKETCHES if sketches is None else sketches
        names = [name for name in host.FLOAT8 if hasattr(torch, name)]
        arrays = [WEIGHTS.view(np.int64)]
        arrays += [host.float8_values(name).astype(np.float32) for name in names]
        # Kept: a copy that does not block may still be reading its source.
        self._sources = [torch.from_numpy(array.copy()) for array in arrays]
        self.constants = [source.to(device, non_blocking=True) for source in self._sources]
        self._weights, *tables = self.constants
        self._weights_at = self._weights.data_ptr()
        self._tables = dict(zip(names, tables, strict=True))
        both = {"FIELDS": rows.FIELDS, "SKETCHED": self.sketches}
        lanes = {"LANES": LANES, **both}
        warps = LANES // 32
        self._floats = Kernel(kernels.tally_floats, device, warps, **lanes)
        self._runs = Kernel(kernels.tally_runs, device, warps, **lanes)
        self._integers = Kernel(kernels.tally_integers, device, WARPS, BLOCK=BLOCK, **both)
        self._digest = Kernel(kernels.digest_chunks, device, WARPS, BLOCK=BLOCK)
        self._both = Kernel(kernels.digest_and_tally_floats, device, warps, **lanes)
        self._both_runs = Kernel(kernels.digest_and_tally_runs, device, warps, **lanes)
        self._reduce = Kernel(kernels.reduce_rows, device, WARPS, BLOCK=128, **both)

    def tally(
        self, tensor: torch.Tensor, name: str, count: int, programs: int, bank: Bank, slot: int,
        row: int, stream: int,
    ) -> None:  # fmt: skip
        """Tally `count` elements that lie in one piece from the tensor's first on."""
        address = tensor.data_ptr()
        key = (name, address % 16 == 0, count < 1 << 31)
        if name in memory.WITH_FRACTION:
            table = self._tables.get(name, self._weights)
            if self._floats.start(
                key, programs, stream, address, table.data_ptr(), bank.rows_at, bank.meta_at,
                count, row, slot,
            ):  # fmt: skip
                return
            read, kind = READS[name]
            wide = name in ("float64", "complex128")
            self._floats.compile_and_start(
                key, programs, triton.reinterpret(tensor, read), table, bank.rows, bank.meta,
                count, row, slot, KIND=kind, WIDE=wide, VECTOR=_vector(name),
            )  # fmt: skip
        elif not self._integers.start(
            key, programs, stream, address, bank.rows_at, bank.meta_at, count, row, slot
        ):
            read, kind = READS[name]
            self._integers.compile_and_start(
                key, programs, triton.reinterpret(tensor, read), bank.rows, bank.meta,
                count, row, slot, KIND=kind,
            )  # fmt: skip

    def tally_runs(
        self, tensor: torch.Tensor, name: str, count: int, runs: memory.Runs, programs: int,
        bank: Bank, slot: int, row: int, stream: int,
    ) -> None:  # fmt: skip
        """Tally `count` elements of a tensor that `takes_runs` says yes to."""
        start = self.start_runs(name, runs, digest=False)
        if start is not None:
            start.begin(programs, stream, tensor.data_ptr(), count, bank, row, slot)
            return
        read, kind = READS[name]
        self._runs.compile_and_start(
            name, programs, triton.reinterpret(tensor, read), self._weights, bank.rows, bank.meta,
            count, *runs, row, slot, KIND=kind, VECTOR=_vector(name),
        )  # fmt: skip

    def start_runs(self, name: str, runs: memory.Runs, *, digest: bool) -> Start | None:
        """How to read such a tensor, once the kernel for that is compiled."""
        form = (self._both_runs if digest else self._runs).form(name)
        if form is None:
            return None
        return self._start_both(form, runs) if digest else self._start_floats(form, name, runs)

    def digest(self, tensor: torch.Tensor, nbytes: int, bank: Bank, slot: int, stream: int) -> None:
        """Digest a contiguous tensor."""
        address = tensor.data_ptr()
        unit = _common_unit(address, nbytes)
        units = nbytes // unit
        key = (unit, address % 16 == 0, units < 1 << 31)
        programs = -(-nbytes // CHUNK_NBYTES)
        if not self._digest.start(
            key, programs, stream, address, self._weights_at, bank.digests_at, units, slot
        ):
            x = triton.reinterpret(tensor, _UNITS[unit])
            self._digest.compile_and_start(
                key, programs, x, self._weights, bank.digests, units, slot, UNIT=unit
            )

    def digest_and_tally(
        self, tensor: torch.Tensor, name: str, nbytes: int, programs: int, bank: Bank, slot: int,
        row: int, stream: int,
    ) -> None:  # fmt: skip
        """Both at once, of a tensor that `takes_both` says yes to."""
        address, words = tensor.data_ptr(), nbytes // 8
        key = (name, words < 1 << 31)
        if self._both.start(
            key, programs, stream, address, address, self._weights_at, bank.rows_at, bank.meta_at,
            bank.digests_at, words, row, slot,
        ):  # fmt: skip
            return
        read, kind = READS[name]
        self._both.compile_and_start(
            key, programs, triton.reinterpret(tensor, tl.int64), triton.reinterpret(tensor, read),
            self._weights, bank.rows, bank.meta, bank.digests, words, row, slot,
            KIND=kind, UNIT=tensor.element_size(),
        )  # fmt: skip

    def digest_and_tally_runs(
        self, tensor: torch.Tensor, name: str, nbytes: int, runs: memory.Runs, programs: int,
        bank: Bank, slot: int, row: int, stream: int,
    ) -> None:  # fmt: skip
        """Both at once, of a tensor that `takes_runs` says yes to."""
        words = nbytes // 8
        start = self.start_runs(name, runs, digest=True)
        if start is not None:
            start.begin(programs, stream, tensor.data_ptr(), words, bank, row, slot)
            return
        read, kind = READS[name]
        self._both_runs.compile_and_start(
            name, programs, triton.reinterpret(tensor, tl.int64), triton.reinterpret(tensor, read),
            self._weights, bank.rows, bank.meta, bank.digests, words, *runs, row, slot,
            KIND=kind, UNIT=tensor.element_size(),
        )  # fmt: skip

    def usual(self, name: str, *, stats: bool, digest: bool) -> Usual | None:
        """How to start on the usual tensor of a dtype; None before its kernel is compiled.

        And for what takes more than that: digests by a kernel of their own, numbers that may be
        conjugates.
        """
        itemsize = host.STORAGE[name].itemsize
        if not stats or name.startswith("complex"):
            return None
        if digest:
            form = self._both.form((name, True))
            if form is None:
                return None
            tile, unit = CHUNK_NBYTES // itemsize, 8 // itemsize
            return Usual(name, itemsize, tile, MAX_ROWS, unit, self._start_both(form))
        aligned_and_small = (name, True, True)
        if name in memory.WITH_FRACTION:
            form = self._floats.form(aligned_and_small)
            start = None if form is None else self._start_floats(form, name)
        else:
            form = self._integers.form(aligned_and_small)
            start = None if form is None else self._start_integers(form)
        if start is None:
            return None
        return Usual(name, itemsize, _TILES[name], MAX_ROWS, 1, start)

    def _start_floats(self, form: Form, name: str, runs: tuple[int, ...] = ()) -> Start:
        call, before, after = form
        table_at = self._tables.get(name, self._weights).data_ptr()

        def start(
            programs: int, stream: int, address: int, count: int, bank: Bank, row: int, slot: int
        ) -> None:
            call(
                programs, 1, 1, stream, *before, address, table_at, bank.rows_at, bank.meta_at,
                count, *runs, row, slot, *after,
            )  # fmt: skip

        bank_at = ("rows_at", "meta_at")
        given: tuple[int | str, ...]
        given = ("address", table_at, *bank_at, "units", *runs, "row", "slot")
        return Start(start, call, before, given, after)

    def _start_integers(self, form: Form) -> Start:
        call, before, after = form

        def start(
            programs: int, stream: int, address: int, count: int, bank: Bank, row: int, slot: int
        ) -> None:
            call(
                programs, 1, 1, stream, *before, address, bank.rows_at, bank.meta_at,
                count, row, slot, *after,
            )  # fmt: skip

        given = ("address", "rows_at", "meta_at", "units", "row", "slot")
        return Start(start, call, before, given, after)

    def _start_both(self, form: Form, runs: tuple[int, ...] = ()) -> Start:
        call, before, after = form
        weights_at = self._weights_at

        def start(
            programs: int, stream: int, address: int, words: int, bank: Bank, row: int, slot: int
        ) -> None:
            call(
                programs, 1, 1, stream, *before, address, address, weights_at, bank.rows_at,
                bank.meta_at, bank.digests_at, words, *runs, row, slot, *after,
            )  # fmt: skip

        bank_at = ("rows_at", "meta_at", "digests_at")
        given: tuple[int | str, ...]
        given = ("address", "address", weights_at, *bank_at, "units", *runs, "row", "slot")
        return Start(start, call, before, given, after)

    def reduce(self, bank: Bank, stream: int) -> None:
        """Make one row of the rows of each slot."""
        programs = len(bank.tickets)
        if not self._reduce.start(
            None, programs, stream, bank.rows_at, bank.meta_at, bank.digests_at, bank.out_at
        ):
            self._reduce.compile_and_start(
                None, programs, bank.rows, bank.meta, bank.digests, bank.out
            )


# A torch without CUDA has none of them, and flags nothing.
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Flagger:
    """Starts the kernel that flags NaN and infinity, and reads its table.

    Starting one is most of what a guard does for a tensor, so little is done here. `interpreted`:
    Triton runs its kernels in Python, and the table is on the host.
    """

    def __init__(self, device: torch.device, slots: int, *, interpreted: bool = False) -> None:
        self._index = device.index
        self._tables: dict[torch.dtype, torch.Tensor] = {}
        # and elements that a program takes at once, and the address of the table
        self._forms: dict[Hashable, tuple[Any, Any, Any, int, int]] = {}
        self._device = device
        self._kernel = Kernel(kernels.flag_floats, device, LANES // 32, LANES=LANES)
        if interpreted:
            self._host = self._flags = torch.zeros((slots, 2), dtype=torch.int32)
            self._flags_at = self._flags.data_ptr()
            return
        with torch.cuda.device(device), memory.kernels_only(), torch.inference_mode(False):
            self._flags = torch.zeros((slots, 2), dtype=torch.int32, device=device)
            self._flags_at = self._flags.data_ptr()
            self._host = torch.empty((slots, 2), dtype=torch.int32, pin_memory=True)
            self._trial()

    def _trial(self) -> None:
        """Triton wants a C compiler, which many machines lack: find out now."""
        zeros = torch.zeros(8, device=self._device)
        self.flag(zeros, zeros.dtype, 8, zeros.data_ptr(), 0)
        self._flags.zero_()
        torch.cuda.synchronize(self._index)

    @property
    def parts(self) -> tuple[Any, ...]:
        """For those who do in C++ what `flag` does: itself, its device, what it asks, where the
        flags are, and the most programs of a kernel."""
        asks = (_current_device, _current_stream, _is_capturing)
        return (self, self._index, *asks, self._flags_at, MAX_FLAGGERS)

    def flag(
        self, tensor: torch.Tensor, dtype: torch.dtype, count: int, address: int, slot: int
    ) -> None:
        """Start on `count` elements that lie in one piece from the tensor's first on.

        Its dtype and address are given, for to ask a tensor takes as long as all else here.
        """
        if _is_capturing():
            return  # the kernel would become part of the user's graph
        index = self._index
        if _current_device() != index:
            with torch.cuda.device(index):
                return self.flag(tensor, dtype, count, address, slot)
        known = self._forms.get((dtype, address % 16 == 0, count < 2147483648))
        if known is None:
            self.start(tensor, count, slot)
            return
        call, before, after, tile, table_at = known
        programs = -(-count // tile)
        if programs > MAX_FLAGGERS:
            programs = MAX_FLAGGERS
        call(
            programs, 1, 1, _current_stream(index), *before,
            address, table_at, self._flags_at, count, slot, *after,
        )  # fmt: skip

    def start(self, tensor: torch.Tensor, count: int, slot: int) -> None:
        """Start it by way of Triton, on the current stream; later starts do without Triton."""
        dtype = tensor.dtype
        key = (dtype, tensor.data_ptr() % 16 == 0, count < 2147483648)
        name = memory.NAMES[dtype]
        read, kind = READS[name]
        table = self._flags if kind != kernels.TABLE else self._table(dtype, name)
        self._kernel.compile_and_start(
            key, rows_for(name, count), triton.reinterpret(tensor, read), table, self._flags,
            count, slot, KIND=kind, WIDE=name == "float64", VECTOR=_vector(name),
        )  # fmt: skip
        form = self._kernel.form(key)
        if form is not None:
            self._forms[key] = (*form, _TILES[name], table.data_ptr())

    def _table(self, dtype: torch.dtype, name: str) -> torch.Tensor:
        if dtype not in self._tables:
            values = torch.from_numpy(host.float8_values(name).astype(np.float32).copy())
            with memory.kernels_only():
                self._tables[dtype] = values.to(self._device)
        return self._tables[dtype]

    def read(self, count: int) -> memory.Array:
        """Wait for the device; bits and largest magnitude of the first `count` slots, then zero."""
        with torch.cuda.device(self._index), memory.kernels_only(), torch.inference_mode(False):
            torch.cuda.synchronize()  # tensors were flagged on whatever stream they were used
            self._host[:count].copy_(self._flags[:count])
            self._flags[:count].zero_()
            torch.cuda.synchronize()
        return self.decode(count)

    def decode(self, count: int) -> memory.Array:
        """What the first slots on the host say: bits, and the largest finite magnitude."""
        found = self._host[:count].numpy()
        decoded = np.empty((count, 2))
        decoded[:, 0] = found[:, 0]
        decoded[:, 1] = found[:, 1].view(np.float32)
        return decoded


def _common_unit(address: int, nbytes: int) -> int:
    unit = 8
    while address % unit or nbytes % unit:
        unit //= 2
    return unit


class _Landing:
    """A copy to the host that is under way, marked by an event."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        return bool(captures.ask(self._device, self._event.query))


class CudaPort:
    """The streams of a CUDA device, as a queue needs them."""

    def __init__(self, device: torch.device, launcher: Launcher) -> None:
        self._index = device.index
        self._device_now: Callable[[], int] = torch._C._cuda_getDevice
        self._is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._stream_now: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        # what `usual_stream` asks, for those who do it in C++
        self.asks = (self._index, self._device_now, self._stream_now, self._is_capturing)
        self._launcher = launcher
        self._side = torch.cuda.Stream(device)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(device))

    def on_device(self) -> AbstractContextManager[object]:
        if torch._C._cuda_getDevice() == self._index:
            return nullcontext()
        return torch.cuda.device(self._index)

    def current_stream(self) -> int:
        if self._is_capturing():
            # The kernel would become part of the user's graph and write to a bank long gone.
            raise memory.Unsupported("cuda tensor during graph capture: no summary")
        return self._stream_now(self._index)

    def usual_stream(self) -> int | None:
        index = self._index
        if self._device_now() != index:
            return None
        stream = self._stream_now(index)
        # CUDA captures no graph on stream 0, where most work goes.
        return None if stream and self._is_capturing() else stream

    def adopt(self, bank: Bank, stream: int) -> None:
        current = torch.cuda.current_stream(self._index)
        current.wait_event(self._uploaded)
        current.wait_event(bank.born)
        # Else the allocator could give the bank's memory away while that stream still writes.
        with memory.kernels_only():
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
            self._launcher.reduce(bank, self._side.cuda_stream)
            used = len(bank.tickets)
            bank.host[:used].copy_(bank.out[:used], non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(self._side)
        return _Landing(landed, self._side.device)


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
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        launcher.tally(trial.digests, "int64", 1, 1, trial, 0, 0, stream)
        port = CudaPort(device, launcher)
    spare = TorchBackend(device, stats=stats, digest=digest)
    return KernelBackend(launcher, port, new_bank, spare, stats=stats, digest=digest)
