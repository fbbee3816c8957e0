"""What was found on a device, on its way to the host: banks of slots, read back as a whole.

A bank is filled by kernels, on whatever stream each tensor is used. When it is full, old or asked
for, it is reduced and copied to the host on a stream of its own, and used again once it landed.
Nothing here waits for the device, `wait` excepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tensorprobe.numerics import rows
from tensorprobe.numerics.rows import Ticket, complete

SLOTS = 2048
ROWS = 1 << 17
MAX_AGE_S = 0.5


class Arrival(Protocol):
    """A copy to the host that is under way; torch's events are such."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Port(Protocol):
    """What a queue needs of a device."""

    def on_device(self) -> AbstractContextManager[object]:
        """While entered, work goes to this device."""
        ...

    def current_stream(self) -> Any:
        """The stream that work started now goes to; hashable."""
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

    def has_room(self, wanted_rows: int) -> bool:
        return len(self.tickets) < SLOTS and self.used_rows + wanted_rows <= ROWS

    def take(self, wanted_rows: int) -> tuple[int, int]:
        """A slot and its first row. Should its kernels fail to start, it is lost, not reused."""
        slot, row = len(self.tickets), self.used_rows
        self.tickets.append(None)
        self.used_rows += wanted_rows
        return slot, row

    def deliver(self) -> None:
        """Complete the result of every slot, and be as new."""
        tickets, self.tickets, self.used_rows = self.tickets, [], 0
        self.streams, self.arrival = {}, None
        complete(tickets, self.numbers[: len(tickets)])


class Queue:
    """The banks of one device."""

    def __init__(self, port: Port, new_bank: Callable[[], Bank]) -> None:
        self._port = port
        self._new_bank = new_bank
        self.lock = threading.Lock()
        self._free: list[Bank] = []
        self._filling: Bank | None = None
        self._landing: list[Bank] = []

    def bank(self, wanted_rows: int) -> tuple[Bank, Any]:
        """A bank with room, and the stream on which to write to it; the caller holds `lock`."""
        bank = self._filling
        if bank is None or not bank.has_room(wanted_rows) or _is_old(bank):
            self._send()
            bank = self._filling = self._free.pop() if self._free else self._new_bank()
            bank.since = time.monotonic()
        stream = self._port.current_stream()
        if stream not in bank.streams:
            self._port.adopt(bank, stream)
        return bank, stream

    def flush(self) -> None:
        with self.lock:
            self._send()

    def poll(self) -> None:
        with self.lock:
            if self._filling is not None and _is_old(self._filling):
                self._send()
            while self._landing and _landed(self._landing[0]):
                self._land()

    def wait(self) -> None:
        self.flush()
        while True:
            with self.lock:
                if not self._landing:
                    return
                bank = self._landing[0]
                arrival = bank.arrival
            if arrival is not None:
                arrival.synchronize()  # without the lock: the program may go on submitting
            with self.lock:
                if self._landing and self._landing[0] is bank:
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
        bank = self._landing.pop(0)
        bank.deliver()
        self._free.append(bank)


def _is_old(bank: Bank) -> bool:
    return bool(bank.tickets) and time.monotonic() - bank.since > MAX_AGE_S


def _landed(bank: Bank) -> bool:
    return bank.arrival is None or bank.arrival.query()
