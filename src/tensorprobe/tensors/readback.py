"""What was found on a device, on its way to the host: banks of slots, read back as a whole.

A bank is filled by kernels, on whatever stream each tensor is used. When it is full, old or asked
for, it is reduced and copied to the host on a stream of its own, and used again once it landed.
Nothing here waits for the device, `land` excepted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tensorprobe.tensors import cuda_graphs as captures
from tensorprobe.tensors import tally_rows as rows
from tensorprobe.tensors import torch_ops
from tensorprobe.tensors.memory import Array
from tensorprobe.tensors.tally_rows import Ticket

SLOTS = 2048
ROWS = 1 << 19  # of 96 bytes; the tallies of a large tensor take 528
MAX_AGE_S = 0.5
PATIENCE_S = 3.0


def await_arrival(
    has_come: Callable[[], bool],
    finish: Callable[[], None] | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Wait for a device by asking it again and again; RuntimeError if it has failed.

    While one thread waits inside of CUDA's driver, others take longer to start kernels: a recorded
    call took 89 us instead of 66 (H200). But an NPU whose queue has failed answers "not yet" for
    ever, and tells the error only to who waits. So after a while `finish` does that.
    """
    pause, begun = 0.0005, time.monotonic()
    while not has_come():
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
        if finish is not None and time.monotonic() - begun > patience_s:
            finish()
            if not has_come():
                raise RuntimeError("the device has finished, and what it was to send has not come")


def finishing(device: torch.device) -> Callable[[], None] | None:
    """What waits for a whole device, and raises what went wrong there; for `await_arrival`.

    None for CUDA: its events say themselves what went wrong, and such a wait could spoil a graph
    that the program captures.
    """
    if captures.may_capture(device):
        return None
    module = torch_ops.device_module(device)
    return module.synchronize if hasattr(module, "synchronize") else None


def await_event(event: Any, device: torch.device, patience_s: float = PATIENCE_S) -> None:
    """Wait for an event of a device; RuntimeError if it has failed."""
    finish = finishing(device)
    if finish is None:
        captures.ask(device, event.synchronize)
    else:
        await_arrival(event.query, finish, patience_s)


class Arrival(Protocol):
    """A copy to the host that is under way; torch's events are such."""

    def query(self) -> bool: ...


class Port(Protocol):
    """What a queue needs of a device."""

    def on_device(self) -> AbstractContextManager[object]:
        """While entered, work goes to this device."""
        ...

    def current_stream(self) -> Any:
        """The stream that work started now goes to; hashable. Raises where nothing may start."""
        ...

    def usual_stream(self) -> Any:
        """The stream in use if it can be used as it is, else None."""
        ...

    def adopt(self, bank: Bank, stream: Any) -> None:
        """Let a stream that is new to a bank write to it."""

    def read_back(self, bank: Bank) -> Arrival:
        """Reduce the bank's slots and copy them to `bank.host`, after all its streams."""
        ...


class Bank:
    """The memory for the tallies of many tensors."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.rows = torch.empty((ROWS, rows.FIELDS), dtype=torch.int64, device=device)
        self.meta = torch.zeros((SLOTS, 4), dtype=torch.int32, device=device)
        self.digests = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self.out = torch.empty((SLOTS, rows.FIELDS), dtype=torch.int64, device=device)
        self.host = torch.empty((SLOTS, rows.FIELDS), dtype=torch.int64, pin_memory=pinned)
        self.numbers = self.host.numpy()
        self.rows_at, self.meta_at, self.digests_at, self.out_at = (
            tensor.data_ptr() for tensor in (self.rows, self.meta, self.digests, self.out)
        )
        self.born: Any = None
        self.tickets: list[Ticket | None] = []  # of each slot; None: its kernels did not start
        self.used_rows = 0
        self.streams: dict[Any, Any] = {}
        self.since = 0.0
        self.arrival: Arrival | None = None

    def clear(self) -> None:
        """Be as new."""
        self.tickets, self.used_rows = [], 0
        self.streams, self.arrival = {}, None


class Queue:
    """The banks of one device. `complete` is given the tickets of one that landed, and its rows."""

    def __init__(
        self,
        port: Port,
        new_bank: Callable[[], Bank],
        complete: Callable[[list[Ticket | None], Array], None],
    ) -> None:
        self._port = port
        self._new_bank = new_bank
        self._complete = complete
        # of the bank that is being filled; a signal's handler may come in between with a tensor
        self.lock = threading.RLock()
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self._landing_lock = threading.Lock()  # taken first; the program never waits for it
        self._free: list[Bank] = []
        self._filling: Bank | None = None
        self._landing: deque[Bank] = deque()

    def place(self, wanted_rows: int, stream: Any) -> tuple[Bank, int, int]:
        """A bank to write to on this stream, a slot of it and the slot's first row.

        The caller holds `lock`, and sets the slot's ticket once its kernels have started: should
        they fail to, the slot is lost, not reused. How old the bank is, `poll` looks at.
        """
        bank = self._filling
        if bank is None or len(bank.tickets) >= SLOTS or bank.used_rows + wanted_rows > ROWS:
            self._send()
            bank = self._filling = self._free.pop() if self._free else self._new_bank()
            bank.since = time.monotonic()
        if stream not in bank.streams:
            self._port.adopt(bank, stream)
        tickets, row = bank.tickets, bank.used_rows
        slot = len(tickets)
        tickets.append(None)
        bank.used_rows = row + wanted_rows
        return bank, slot, row

    def flush(self) -> None:
        with self.lock:
            self._send()

    def poll(self) -> None:
        with self.lock:
            if self._filling is not None and _is_old(self._filling):
                self._send()
        # Another thread that lands them has this lock: then there is nothing to do here.
        if self._landing_lock.acquire(blocking=False):
            try:
                while self._landing and _landed(self._landing[0]):
                    self._land()
            finally:
                self._landing_lock.release()

    def land(self) -> None:
        with self._landing_lock:
            for _ in range(len(self._landing)):  # not those that the program sends meanwhile
                bank = self._landing[0]
                await_arrival(functools.partial(_landed, bank))
                self._land()

    def _send(self) -> None:
        bank, self._filling = self._filling, None
        if bank is None:
            return
        if bank.tickets:
            bank.arrival = self._port.read_back(bank)
            self._landing.append(bank)
        else:
            self._free.append(bank)

    def _land(self) -> None:
        # Without the other lock, which the program would wait for: a full bank takes milliseconds.
        bank = self._landing.popleft()
        self._complete(bank.tickets, bank.numbers[: len(bank.tickets)])
        bank.clear()
        self._free.append(bank)


def _is_old(bank: Bank) -> bool:
    return bool(bank.tickets) and time.monotonic() - bank.since > MAX_AGE_S


def _landed(bank: Bank) -> bool:
    return bank.arrival is None or bank.arrival.query()
