"""Where the work on a tensor is done: on the host, by Triton kernels, or by torch operations."""

from __future__ import annotations

import functools
import importlib.util
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tensorprobe import native
from tensorprobe.tensors import cuda_graphs as captures
from tensorprobe.tensors import digest, host, memory, tally, torch_ops
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors.readback import (
    MAX_AGE_S,
    ROWS,
    SLOTS,
    Bank,
    Port,
    Queue,
    await_arrival,
    finishing,
)
from tensorprobe.tensors.result import Result
from tensorprobe.tensors.tally import Reader
from tensorprobe.torch_versions import key_bits

if TYPE_CHECKING:
    from tensorprobe.tensors.launch import Launcher, Start, Usual

MAX_FORMS = 10_000  # of tensors, that are remembered
MAX_PENDING = 1024  # tensors whose numbers wait on a device before they are fetched


class Backend(Protocol):
    """Takes tensors of one device and completes their results, now or later."""

    def submit(self, result: Result, tensor: torch.Tensor, name: str) -> None: ...
    def flush(self) -> None: ...
    def poll(self) -> None: ...
    def land(self) -> None: ...


class _Readers(threading.local):
    """What reads tensors, by their form. A thread has its own."""

    def __init__(self) -> None:
        self.of: dict[int | None, Reader] = {}


class HostBackend:
    """Reads the memory of CPU tensors; results are ready at once."""

    def __init__(self, *, stats: bool, digest: bool) -> None:
        self._stats = stats
        self._digest = digest
        self._readers = _Readers()

    def start(
        self, tensor: torch.Tensor, form: int | None = None, is_there: bool = False
    ) -> Result | None:
        """Read a tensor as most are; None for one that needs the closer look of `submit`.

        Its type is torch's own, and no function mode is on. The rest as for `Summarizer.submit`.
        """
        readers = self._readers.of
        # Taken out while it reads: a signal's handler may come in between with such a tensor.
        reader = readers.pop(form, None)
        try:
            if reader is None:
                reader = self._reader(tensor)
                if reader is None:
                    return None
            address = tensor.data_ptr()
            if not address:
                return None
            if not is_there and not memory.has_memory(tensor, reader.itemsize, reader.nbytes):
                return None
        except RuntimeError:  # it has no memory of its own: a wrapper of functorch, a sparse tensor
            return None
        threads = torch.get_num_threads() if reader.most_threads > 1 else 1
        outcome = reader.read(address, threads)
        if form is not None:
            if len(readers) >= MAX_FORMS:
                readers.clear()
            readers[form] = reader
        if outcome is None:
            return None
        return Result(outcome[0], outcome[1], None, None, True)

    def _reader(self, tensor: torch.Tensor) -> Reader | None:
        """What reads such a tensor if it lies in one piece; its order matters only to a digest."""
        library, name = tally.LIBRARY, memory.NAMES.get(tensor.dtype, "")
        if library is None or name not in tally.KINDS or not (self._stats or self._digest):
            return None
        if tensor.layout is not torch.strided or not memory.is_plain(key_bits(tensor)):
            return None
        count, repeat = tensor.numel(), 1
        if not tensor.is_contiguous():
            shape, strides, repeat = memory.without_repeats(tensor)
            if self._digest or not memory.is_dense(shape, strides):
                return None
            count //= repeat
        if not count:
            return None
        nbytes = count * tensor.element_size()
        return Reader(library, name, nbytes, repeat, stats=self._stats, digest=self._digest)

    def submit(self, result: Result, tensor: torch.Tensor, name: str) -> None:
        storage = host.STORAGE[name]
        if self._stats and self._digest and tensor.is_contiguous():
            array = memory.logical_array(tensor, storage)
            result.summary, result.digest = host.summarize_and_digest(array, name)
        else:
            if self._stats:
                array, repeat = memory.distinct_array(tensor, storage)
                result.summary = host.summarize_array(array, name, repeat=repeat)
            if self._digest:
                result.digest = host.digest_strided(memory.logical_array(tensor, storage))
        result.ready = True

    def flush(self) -> None:
        """Nothing is ever on its way."""

    poll = land = flush


# Of a form of tensors: the dtype, how its kernel starts, rows and units that are given to it, how
# many different elements there are, how often each, and the bytes of all.
_Plan = tuple[str, "Start", int, int, int, int, int]


class KernelBackend:
    """Tallies by Triton kernels, which write to banks that come to the host as a whole."""

    def __init__(
        self,
        launcher: Launcher,
        port: Port,
        new_bank: Callable[[], Bank],
        spare: Backend | None = None,
        *,
        stats: bool,
        digest: bool,
    ) -> None:
        from tensorprobe.tensors.launch import (
            FAILURES,
            rows_for,
            rows_for_both,
            takes_both,
            takes_runs,
        )

        self._failures = FAILURES
        self._rows_for = rows_for
        self._rows_for_both = rows_for_both
        self._takes_both = takes_both
        self._takes_runs = takes_runs
        self._launcher = launcher
        self._port = port
        self._usual_stream = port.usual_stream
        self._stats = stats
        self._digest = digest
        complete = functools.partial(rows.complete, stats=stats, digest=digest)
        self._queue = Queue(port, new_bank, complete)
        self._spare = spare  # for dtypes whose kernel this Triton cannot build
        self._refused: dict[str, str] = {}  # dtype: why; not tried again, which takes seconds
        self._plans: dict[int | None, _Plan] = {}  # by form
        self._usual: dict[torch.dtype, Usual] = {}  # how to `start`, once its kernel is compiled
        self.start = self._start
        self._starter: Any = None
        if native.MODULE is not None:  # the same in C++, of forms whose plan it knows
            native.check()
            asks = getattr(port, "asks", port.usual_stream)
            self._starter = native.MODULE.Starter(
                self._queue, asks, Result, self._start, SLOTS, ROWS
            )
            self.start = self._starter.start

    def _start(
        self, tensor: torch.Tensor, form: int | None = None, is_there: bool = False
    ) -> Result | None:
        """Start on a tensor as most are; None for one that needs the closer look of `submit`.

        Its type is torch's own, and no function mode is on. The rest as for `Summarizer.submit`.
        """
        plan = self._plans.get(form)
        try:
            if plan is None:
                plan = self._plan(tensor)
                if plan is None:
                    return None
                if form is not None:
                    self._remember(form, plan)
            address = tensor.data_ptr()  # a view of nothing has one, too
            if not tensor.untyped_storage().nbytes():
                return None
        except RuntimeError:  # it has no memory of its own: a wrapper of functorch, a sparse tensor
            return None
        stream = self._usual_stream()
        if stream is None or not address or address & 15:
            return None
        name, start, n_rows, units, count, repeat, nbytes = plan
        queue, result = self._queue, Result()
        queue.acquire()  # half of what `with` takes
        try:
            bank, slot, row = queue.place(n_rows, stream)
            start.begin(n_rows, stream, address, units, bank, row, slot)
            # Does not hold the tensor, which must go when the program lets it go.
            bank.tickets[slot] = (result, name, count, repeat, nbytes)
        except self._failures as error:
            self._refuse(name, tensor.dtype, error)
            return None
        finally:
            queue.release()
        return result

    def _plan(self, tensor: torch.Tensor) -> _Plan | None:
        """How to start on a tensor in one piece, or in runs; its order matters only to a digest."""
        usual = self._usual.get(tensor.dtype)
        if usual is None or tensor.is_nested or tensor.is_neg():
            return None
        start: Start | None = usual.start
        count, repeat = tensor.numel(), 1
        if not tensor.is_contiguous():
            shape, strides, repeat = self._elements_of(tensor)
            count //= repeat
            if self._digest or not memory.is_dense(shape, strides):
                runs = self._runs_of(tensor, usual.dtype, shape, strides)
                if runs is None:
                    return None
                start = self._launcher.start_runs(usual.dtype, runs, digest=self._digest)
        if start is None or not 0 < count < 1 << 31 or count % usual.unit:
            return None
        n_rows = min(usual.max_programs, -(-count // usual.tile))
        nbytes = count * usual.itemsize
        return usual.dtype, start, n_rows, count // usual.unit, count, repeat, nbytes

    def _elements_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape and strides of what is to be read, and how often each element of it counts."""
        if self._digest:  # which is of all elements in their order
            return tuple(tensor.shape), tensor.stride(), 1
        shape, strides, repeat = memory.without_repeats(tensor)
        return *memory.as_in_memory(shape, strides), repeat

    def _runs_of(
        self, tensor: torch.Tensor, name: str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> memory.Runs | None:
        runs = memory.in_runs(shape, strides) if self._stats else None
        return runs if runs is not None and self._takes_runs(name, tensor, runs) else None

    def _remember(self, form: int, plan: _Plan) -> None:
        if len(self._plans) >= MAX_FORMS:
            self._forget_plans()
        self._plans[form] = plan
        if self._starter is not None:
            name, start, n_rows, units, *ticket = plan
            self._starter.know(
                form, n_rows, start.call, start.before, start.given, start.after, units,
                (name, *ticket),
            )  # fmt: skip

    def _forget_plans(self) -> None:
        self._plans.clear()
        if self._starter is not None:
            self._starter.forget()

    def submit(self, result: Result, tensor: torch.Tensor, name: str) -> None:
        if not memory.is_there(tensor):
            raise memory.Unsupported(memory.FREED)
        if name in self._refused:
            self._use_spare(result, tensor, name)
            return
        with self._port.on_device():
            count, repeat = tensor.numel(), 1
            nbytes = count * tensor.element_size()
            runs = None
            if not tensor.is_contiguous():
                shape, strides, repeat = self._elements_of(tensor)
                runs = self._runs_of(tensor, name, shape, strides)
                if runs is not None:
                    count //= repeat
                elif self._digest:
                    with memory.kernels_only():
                        tensor = tensor.contiguous()
                else:
                    tensor, count, repeat = _in_one_piece(tensor)
            try:
                self._launch((result, name, count, repeat, nbytes), tensor, runs)
            except self._failures as error:
                self._refuse(name, tensor.dtype, error)
                self._use_spare(result, tensor, name)
                return
            if tensor.dtype not in self._usual:
                usual = self._launcher.usual(name, stats=self._stats, digest=self._digest)
                if usual is not None:
                    self._usual[tensor.dtype] = usual

    def _launch(self, ticket: rows.Ticket, tensor: torch.Tensor, runs: memory.Runs | None) -> None:
        launcher, queue = self._launcher, self._queue
        _, name, count, _, nbytes = ticket
        both = self._stats and self._digest and self._takes_both(name, tensor, nbytes)
        n_rows = self._rows_for_both(nbytes) if both else self._rows_for(name, count)
        stream = self._port.current_stream()
        with queue.lock:
            bank, slot, row = queue.place(n_rows, stream)
            if both and runs is not None:
                launcher.digest_and_tally_runs(
                    tensor, name, nbytes, runs, n_rows, bank, slot, row, stream
                )
            elif both:
                launcher.digest_and_tally(tensor, name, nbytes, n_rows, bank, slot, row, stream)
            elif runs is not None:
                launcher.tally_runs(tensor, name, count, runs, n_rows, bank, slot, row, stream)
            else:
                if self._stats:
                    launcher.tally(tensor, name, count, n_rows, bank, slot, row, stream)
                if self._digest:
                    launcher.digest(tensor, nbytes, bank, slot, stream)
            bank.tickets[slot] = ticket

    def _refuse(self, name: str, dtype: torch.dtype, error: Exception) -> None:
        self._refused[name] = _first_line(error)
        self._usual.pop(dtype, None)
        self._forget_plans()

    def _use_spare(self, result: Result, tensor: torch.Tensor, name: str) -> None:
        reason = self._refused[name]
        if self._spare is None:
            raise memory.Unsupported(f"{name} tensor: {reason}")
        self._spare.submit(result, tensor, name)
        result.note = f"torch operations instead of Triton kernels: {reason}"

    def flush(self) -> None:
        self._queue.flush()
        if self._spare is not None:
            self._spare.flush()

    def poll(self) -> None:
        self._queue.poll()
        if self._spare is not None:
            self._spare.poll()

    def land(self) -> None:
        self._queue.land()
        if self._spare is not None:
            self._spare.land()


def _in_one_piece(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor from whose first element on all different ones follow, how many, how often each."""
    shape, strides, repeat = memory.without_repeats(tensor)
    if memory.is_dense(shape, strides):
        return tensor, tensor.numel() // repeat, repeat
    with memory.kernels_only():
        base, repeat = torch_ops.distinct(tensor)
        return base.contiguous(), base.numel(), repeat


class _Pending:
    """A tensor whose numbers are on the device."""

    __slots__ = ("complete", "floats", "ints", "mixed")

    def __init__(self, complete: Callable[[list[float], list[int], int], None]) -> None:
        self.complete = complete
        self.floats: torch.Tensor | None = None
        self.ints: torch.Tensor | None = None
        self.mixed: torch.Tensor | None = None


class _Batch:
    """Numbers of many tensors, being copied to the host."""

    def __init__(self, pending: list[_Pending], event: Any, device: torch.device) -> None:
        self.pending = pending  # keeps the device's numbers until they were copied
        self.device = device
        self.event = event
        self.floats = _fetched([p.floats for p in pending if p.floats is not None])
        self.ints = _fetched([p.ints for p in pending if p.ints is not None])
        self.mixed = _fetched([p.mixed for p in pending if p.mixed is not None])
        if event is not None:
            event.record()

    def landed(self) -> bool:
        return self.event is None or bool(captures.ask(self.device, self.event.query))

    def deliver(self) -> None:
        floats, ints, mixed = (
            [] if numbers is None else numbers.tolist()
            for numbers in (self.floats, self.ints, self.mixed)
        )
        for index, pending in enumerate(self.pending):
            pending.complete(
                floats[index] if floats else [],
                ints[index] if ints else [],
                mixed[index] if mixed else 0,
            )


def _fetched(values: list[torch.Tensor]) -> torch.Tensor | None:
    return torch_ops.stack_and_copy(values) if values else None


# What float32 has all the values of.
_NARROW = frozenset(["float32", "float16", "bfloat16", *host.FLOAT8])


class TorchBackend:
    """Tallies by plain torch operations, for any device; copies to the host what it cannot do."""

    def __init__(
        self, device: torch.device, *, stats: bool, digest: bool, note: str | None = None
    ) -> None:
        self._device = device
        self._note = note
        self._module = torch_ops.device_module(device)
        self._stats = stats
        self._digest = digest
        self._host = HostBackend(stats=stats, digest=digest)
        self._digests: torch_ops.Digests | None = None
        self._missing: dict[str, str] = {}  # dtype: why the device cannot do it
        self._is_wide: bool | None = None  # whether it has float64; asked at the first tensor
        self._cannot_digest = ""
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._streams: dict[Any, None] = {}
        self._since = 0.0
        self._batches: list[_Batch] = []

    def submit(self, result: Result, tensor: torch.Tensor, name: str) -> None:
        with self._lock, memory.subclass_only():
            why = self._why_not(name)
            if why is not None:
                self._copy(result, tensor, name, why)
                return
            try:
                pending = self._tally(result, tensor, name)
            except (NotImplementedError, TypeError) as error:
                self._missing[name] = _first_line(error)
                self._copy(result, tensor, name, _first_line(error))
                return
            except RuntimeError as error:
                self._copy(result, tensor, name, _first_line(error))
                return
            if not self._pending:
                self._since = time.monotonic()
            self._pending.append(pending)
            result.note = self._note
            stream = self._current_stream()
            if stream is not None:
                self._streams[stream] = None
            if len(self._pending) >= MAX_PENDING or self._is_old():
                self._send()

    def _why_not(self, name: str) -> str | None:
        """Why tensors of this dtype have to be copied to the host."""
        if self._is_wide is None:
            self._is_wide = torch_ops.has_float64(self._device)
            if self._digest and not torch_ops.digests_agree(self._device):
                self._cannot_digest = "its 64-bit integers are not those of the host"
        if self._cannot_digest:
            return self._cannot_digest
        if not self._is_wide and self._stats and name not in _NARROW:
            return "it has no float64"
        return self._missing.get(name)

    def flush(self) -> None:
        with self._lock, memory.subclass_only():
            self._send()

    def poll(self) -> None:
        with self._lock, memory.subclass_only():
            if self._is_old():
                self._send()
            self._deliver()

    def land(self) -> None:
        with self._lock:
            batches = list(self._batches)
        for batch in batches:
            try:
                # without the lock, which the program takes
                await_arrival(batch.landed, finishing(batch.device))
            except RuntimeError:  # lost, and not in the way of those that follow
                with self._lock:
                    self._batches = [other for other in self._batches if other is not batch]
                raise
            with self._lock, memory.subclass_only():
                self._deliver()

    def _deliver(self) -> None:
        while self._batches and self._batches[0].landed():
            self._batches.pop(0).deliver()

    def _tally(self, result: Result, tensor: torch.Tensor, name: str) -> _Pending:
        base, repeat = torch_ops.distinct(tensor)
        count, nbytes = base.numel(), tensor.numel() * tensor.element_size()

        def complete(floats: list[float], ints: list[int], mixed: int) -> None:
            if self._stats:
                if self._is_wide:
                    row = torch_ops.to_row(floats, ints, name)
                else:
                    row = torch_ops.narrow_row(floats, ints)
                result.summary = rows.decode(row, name, count, repeat)
            if self._digest:
                result.digest = digest.finish(mixed, nbytes)
            result.ready = True

        pending = _Pending(complete)
        if self._stats:
            tallied = torch_ops.tally(base, name) if self._is_wide else torch_ops.tally_narrow(base)
            pending.floats, pending.ints = tallied
        if self._digest:
            if self._digests is None:
                self._digests = torch_ops.Digests(self._device)
            pending.mixed = self._digests.mixed_sum(tensor)
        return pending

    def _copy(self, result: Result, tensor: torch.Tensor, name: str, why: str) -> None:
        self._host.submit(result, tensor.detach().cpu(), name)
        result.note = f"copied to the host, {self._device.type} cannot summarise {name}: {why}"

    def _send(self) -> None:
        if not self._pending:
            return
        current = self._current_stream()
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
        new_event = getattr(self._module, "Event", None)
        pending, self._pending, self._streams = self._pending, [], {}
        event = None if new_event is None else new_event()
        self._batches.append(_Batch(pending, event, self._device))

    def _current_stream(self) -> Any:
        current = getattr(self._module, "current_stream", None)
        return None if current is None else current(self._device)

    def _is_old(self) -> bool:
        return bool(self._pending) and time.monotonic() - self._since > MAX_AGE_S


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def choose(device: torch.device, *, stats: bool, digest: bool) -> Backend:
    """The backend for a device."""
    return _CHOICES.get(device.type, TorchBackend)(device, stats=stats, digest=digest)


def _on_host(device: torch.device, *, stats: bool, digest: bool) -> Backend:
    return HostBackend(stats=stats, digest=digest)


def _on_cuda(device: torch.device, *, stats: bool, digest: bool) -> Backend:
    if importlib.util.find_spec("triton") is None:
        return TorchBackend(device, stats=stats, digest=digest)
    reason = "torch operations instead of Triton kernels: "
    try:
        from tensorprobe.tensors import launch
    except ImportError as error:  # the Triton of an older torch
        note = f"{reason}{_first_line(error)}"
        return TorchBackend(device, stats=stats, digest=digest, note=note)
    try:
        return launch.cuda_backend(device, stats=stats, digest=digest)
    except launch.FAILURES as error:
        note = f"{reason}{_first_line(error)}"
        return TorchBackend(device, stats=stats, digest=digest, note=note)


_CHOICES: dict[str, Callable[..., Backend]] = {"cpu": _on_host, "cuda": _on_cuda}
