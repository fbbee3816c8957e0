"""Starting on tensors by compiled forms, from many threads; the kernels only note what they got."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton.errors")  # not in the Triton of torch 2.1

from tensorprobe.tensors import launch
from tensorprobe.tensors import readback as queue
from tensorprobe.tensors.backends import KernelBackend
from tensorprobe.tensors.memory import Unsupported
from tensorprobe.tensors.readback import Bank
from tensorprobe.tensors.summarizer import Summarizer
from tensorprobe.tensors.tally_rows import HIGH, LOW, SQUARE
from tensors import at_once

CPU = torch.device("cpu")


class Noting:
    """A kernel whose start notes the number of elements for its slot of the bank."""

    function, packed_metadata = 1, (8, 1, 0)

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self.starts = 0
        self.fault: Exception | None = None

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_and_start(*arguments: Any, **constants: Any) -> Any:
            self.note(arguments[2].data_ptr(), *arguments[4:7])
            return self

        return compile_and_start

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.starts += 1
        _, _, rows_at, _, count, row, slot = rest[5:12]
        self.note(rows_at, count, row, slot)

    def note(self, rows_at: int, count: int, row: int, slot: int) -> None:
        key = (rows_at, slot)
        assert key not in self.counts, "a slot is given once"
        self.counts[key] = count


class Nothing:
    """A kernel that does nothing."""

    function, packed_metadata, run = 1, (8, 1, 0), staticmethod("".format)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **constants: self


class Port:
    """Streams of a device that is the host; one that captures a graph takes nothing."""

    def __init__(self, kernel: Noting) -> None:
        self.kernel = kernel
        self.capturing = False
        self.adopted: list[int] = []

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def current_stream(self) -> int:
        if self.capturing:
            raise Unsupported("during graph capture: no summary")
        return threading.get_ident()

    def usual_stream(self) -> int | None:
        return None if self.capturing else threading.get_ident()

    def adopt(self, bank: Bank, stream: int) -> None:
        bank.streams[stream] = stream
        self.adopted.append(stream)

    def read_back(self, bank: Bank) -> "Landed":
        numbers = bank.numbers
        numbers[:] = 0
        for slot in range(len(bank.tickets)):
            count = self.kernel.counts.pop((bank.rows_at, slot), None)
            if count is not None:
                numbers.view(np.float64)[slot, [LOW, HIGH, SQUARE]] = count
        return Landed()


class Landed:
    def query(self) -> bool:
        return True


class Device(Summarizer):
    """A summarizer with a device that notes numbers of elements as the bounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "_starts_directly", lambda: True)
        self.kernel = Noting()
        self.port = Port(self.kernel)
        launcher = launch.Launcher(CPU)
        launcher._floats._function = self.kernel
        launcher._reduce._function = Nothing()
        super().__init__(
            choose=lambda device, **wanted: KernelBackend(
                launcher, self.port, lambda: Bank(CPU, pinned=False), **wanted
            )
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(queue, "SLOTS", 50)
    return Device(monkeypatch)


def test_threads_get_each_their_own(device: Device) -> None:
    results: dict[int, Any] = {}

    def work(part: int) -> None:
        for count in range(1 + part, 2001, at_once.N):
            results[count] = device.submit(torch.empty(count))

    at_once.in_threads(device, work)
    assert len(results) == 2000
    assert all(result.ready for result in results.values())
    assert {count: result.summary.max for count, result in results.items()} == {
        count: float(count) for count in range(1, 2001)
    }
    assert device.kernel.starts >= 1990, "all but the first few are started by the compiled form"
    assert not device.kernel.counts


def test_what_is_dense_in_any_order(device: Device) -> None:
    device.submit(torch.empty(8))
    square = torch.empty(6, 4)
    dense = [square.t(), square[0].expand(5, 4), square.view(2, 3, 4).mT]
    others = [square[:, :1].expand(6, 5), square.t()[:2], square[0, 1:], square[:0]]
    backend: Any = device._host
    assert [backend.start(tensor) is not None for tensor in dense + others] == [True] * 3 + [
        False
    ] * 4
    results = [device.submit(tensor) for tensor in dense + others]
    device.wait()
    assert [result.error for result in results] == [None] * 7
    assert [result.summary.max for result in results] == [24.0, 4.0, 24.0, 6.0, 12.0, 3.0, None]


def test_of_a_form_only_the_address_is_asked(device: Device) -> None:
    first = torch.empty(24)
    device.submit(first)
    given = [first, first.view(6, 4).t(), torch.empty(25)[1:], torch.nn.Parameter(torch.empty(24))]
    results = [device.submit(tensor, 7) for tensor in given]
    results.append(device.submit(torch.empty(12), 8))
    device.wait()
    assert [result.summary.max for result in results] == [24.0] * 4 + [12.0]
    assert device.kernel.starts >= 4, "one is not aligned, and has to be compiled for"


def test_a_start_that_fails_loses_its_slot_alone(device: Device) -> None:
    tensor = torch.empty(3)
    before = [device.submit(tensor, 7) for _ in range(3)]
    device.kernel.fault = RuntimeError("no more")
    lost = device.submit(tensor, 7)
    device.kernel.fault = None
    lost_too = device.submit(tensor, 7)
    after = device.submit(torch.empty(6, dtype=torch.float64))
    device.wait()
    assert (lost.error, lost_too.error) == ("float32 tensor: no more", "float32 tensor: no more")
    assert [result.summary.max for result in [*before, after]] == [3.0, 3.0, 3.0, 6.0]


def test_nothing_starts_where_the_storage_was_freed(device: Device) -> None:
    tensor = torch.empty(24)
    view = tensor[4:]
    results = [device.submit(tensor, 7) for _ in range(2)]
    tensor.untyped_storage().resize_(0)
    assert view.data_ptr(), "that is no address"
    results += [device.submit(tensor, 7), device.submit(tensor), device.submit(view)]
    device.wait()
    freed = "tensor whose storage was freed: no summary"
    assert [result.error for result in results] == [None, None, freed, freed, freed]


def test_nothing_starts_where_a_graph_is_captured(device: Device) -> None:
    device.submit(torch.empty(3))
    device.port.capturing = True
    result = device.submit(torch.empty(4))
    assert (result.error, device.kernel.starts) == ("during graph capture: no summary", 0)


class Sees(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"the summarizer called {func}")


def test_no_function_mode_sees_it(device: Device) -> None:
    tensors = [torch.empty(count) for count in (3, 4)]
    device.submit(tensors[0])
    with Sees():
        results = [device.submit(tensor) for tensor in tensors]
    device.wait()
    assert [result.summary.max for result in results] == [3.0, 4.0]
