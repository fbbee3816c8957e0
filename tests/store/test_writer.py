"""The queue: late results, full queues, budgets, threads, forks, and things that fail."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_making import SUMMARY, Ready, open_writer, tensor, write_bytes, write_relu

import tensorprobe
from tensorprobe.records import TensorSummary
from tensorprobe.store.lines import CallLine, EndLine, TensorLine, encode
from tensorprobe.store.writer import CaptureWriter


class Late:
    """A result on its way from a device; ready when the device is asked often enough."""

    error: str | None = None
    digest: str | None = None

    def __init__(self, device: Device, polls: int = 2) -> None:
        self._device = device
        self._due = device.n_polls + polls

    @property
    def ready(self) -> bool:
        return self._device.n_polls >= self._due

    @property
    def summary(self) -> TensorSummary | None:
        return SUMMARY if self.ready else None


class Device:
    n_polls = 0
    n_flushes = 0
    n_landings = 0
    fault: Exception | None = None

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.is_done.set()

    def flush(self) -> None:
        self.n_flushes += 1

    def poll(self) -> None:
        self.n_polls += 1

    def land(self) -> None:
        if self.fault:
            raise self.fault
        assert self.is_done.wait(60)
        self.n_landings += 1
        self.n_polls += 100


def run_script(code: str, *args: object) -> str:
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def late_capture(root: Path, device: Device) -> tuple[Path, CaptureWriter]:
    out = open_writer(root, results=device)
    out.begin_step(0)
    out.call(CallLine(id=0, name="C", op="op", args=[tensor(0), tensor(1)]))
    out.value(0, Late(device))
    out.value(1, Ready())
    out.end(EndLine(id=0))
    return root, out


def test_values_are_in_the_file_soon_without_being_asked_for(tmp_path: Path) -> None:
    device = Device()
    root, out = late_capture(tmp_path / "a", device)
    began = time.monotonic()
    while tensorprobe.load(root).calls[0].tensors[0].summary is None:
        assert time.monotonic() - began < 60, "a second, on a machine that is not busy"
        time.sleep(0.05)
    call = tensorprobe.load(root).calls[0]
    assert call.status == "complete"
    assert [record.summary for record in call.tensors] == [SUMMARY, SUMMARY]
    polls = device.n_polls
    time.sleep(0.4)
    assert (device.n_polls, device.n_landings) == (polls, 0), "nothing is outstanding any more"
    out.close()


def test_the_thread_is_awake_after_being_called_in_vain(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.begin_step(0)
    log = tmp_path / "rank0" / "step0" / "calls.jsonl"
    for number in range(200):
        # The line of an end wakes the thread, and the next call takes that line away.
        writer.call(CallLine(id=number, name=f"Torch.relu.{number}.forward", op="torch.relu"))
        writer.end(EndLine(id=number))
        if number % 50 == 0:
            time.sleep(0.15)
    deadline = time.monotonic() + 60
    while log.read_text().count('"type":"end"') < 200:
        assert time.monotonic() < deadline, "the last end is not written while the program sleeps"
        time.sleep(0.02)
    writer.close()


def test_drain_waits_for_results(tmp_path: Path) -> None:
    device = Device()
    _, out = late_capture(tmp_path / "a", device)
    out.drain()
    assert tensorprobe.load(tmp_path / "a").calls[0].tensors[0].summary == SUMMARY
    assert (device.n_flushes, device.n_landings) == (1, 1)
    out.close()


def test_the_program_is_one_step_ahead_of_the_device_and_no_more(tmp_path: Path) -> None:
    device = Device()
    device.is_done.clear()
    root, out = late_capture(tmp_path / "a", device)
    out.begin_step(1)  # returns: nobody waits for the results of step 0 yet
    assert (device.n_flushes, device.n_landings) == (1, 0)
    out.call(CallLine(id=1, name="D", op="op", args=[tensor(2)]))
    out.value(2, Late(device))
    out.end(EndLine(id=1))
    assert not device.is_done.is_set()
    threading.Timer(0.3, device.is_done.set).start()
    out.begin_step(2)  # waits for step 0
    assert device.is_done.is_set()
    out.close()
    tensors = [record for call in tensorprobe.load(root).calls for record in call.tensors]
    assert [record.summary for record in tensors] == [SUMMARY] * 3
    assert not tensorprobe.load(root).gaps


def test_values_of_a_step_that_ends_are_found_behind_those_of_the_next(tmp_path: Path) -> None:
    device = Device()
    device.is_done.clear()
    out = open_writer(tmp_path / "a", results=device)
    out.begin_step(0)
    release = threading.Event()

    def data() -> np.ndarray:  # type: ignore[type-arg]
        assert release.wait(60)
        return np.zeros(4, np.float32)

    out.call(CallLine(id=0, name="C", op="op", args=[tensor(0)]))
    out.tensor(0, "k", "float32", (4,), data, 16)  # so the value waits in the queue behind it
    out.value(0, Late(device))
    out.begin_step(1)
    out.call(CallLine(id=1, name="D", op="op", args=[tensor(1)]))
    out.value(1, Late(device, polls=150))  # comes with the second landing
    release.set()
    device.is_done.set()
    out.close()
    capture = tensorprobe.load(tmp_path / "a")
    assert [call.tensors[0].summary for call in capture.calls] == [SUMMARY] * 2
    assert not capture.gaps


def test_calls_of_another_thread_are_written_while_the_device_is_waited_for(tmp_path: Path) -> None:
    device = Device()
    device.is_done.clear()
    root, out = late_capture(tmp_path / "a", device)
    out.begin_step(1)
    out.value(2, Late(device))

    def call() -> None:
        out.call(CallLine(id=1, name="D", op="op"))
        out.end(EndLine(id=1))
        device.is_done.set()

    timer = threading.Timer(0.2, call)
    timer.start()
    out.begin_step(2)
    timer.join()
    out.close()
    assert [(call.name, call.step) for call in tensorprobe.load(root).calls] == [("C", 0), ("D", 1)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_is_gone(tmp_path: Path) -> None:
    device = Device()
    _, out = late_capture(tmp_path / "a", device)

    def die(step: object) -> None:
        raise SystemExit  # ends the thread, and nothing else

    out._finish_step = die  # type: ignore[method-assign, assignment]
    for step in range(1, 4):
        out.begin_step(step)
        out.value(step, Late(device))
    assert out._thread is not None
    out._thread.join(5)
    out.close()


def test_a_thread_that_cannot_be_started_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    out = open_writer(tmp_path / "a")
    for step in range(3):
        out.begin_step(step)
        out.call(CallLine(id=step, name="C", op="op"))
    out.close()
    assert str(out.error) == "can't start new thread"


def test_the_thread_outlives_what_it_did_not_expect(tmp_path: Path) -> None:
    device = Device()
    root, out = late_capture(tmp_path / "a", device)
    flush, faults = out._flush, [MemoryError()]

    def fail_once(step: Any) -> None:
        if faults:
            raise faults.pop()
        flush(step)

    out._flush = fail_once  # type: ignore[method-assign]
    out.begin_step(1)
    out.call(CallLine(id=1, name="D", op="op"))
    out.close()
    assert isinstance(out.error, MemoryError)
    assert [call.name for call in tensorprobe.load(root).calls] == ["C", "D"]


def test_a_device_that_fails_leaves_gaps_and_the_rest(tmp_path: Path) -> None:
    device = Device()
    device.fault = RuntimeError("device-side assert")
    _, out = late_capture(tmp_path / "a", device)

    def lost() -> np.ndarray:  # type: ignore[type-arg]
        raise RuntimeError("copy lost")

    out.tensor(2, "k", "float32", (4,), lost, 16)
    out.value(2, Ready())
    out.call(CallLine(id=1, name="D", op="op", args=[tensor(2)]))
    out.close()
    capture = tensorprobe.load(tmp_path / "a")
    first, second = capture.calls[0].tensors
    assert first.gap == "RuntimeError: device-side assert"
    assert out.missing == (
        "1 value did not come back from the device (RuntimeError: device-side assert)"
    )
    assert second.summary == SUMMARY
    third = capture.calls[1].tensors[0]
    assert (third.summary, third.gap) == (SUMMARY, "its copy failed: RuntimeError: copy lost")
    assert out.error is None


def test_data_that_comes_later(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    out.call(CallLine(id=0, name="C", op="op", args=[tensor(0)]))
    out.tensor(0, "k", "float32", (4,), lambda: np.arange(4, dtype="f4").view(np.uint8), 16)
    out.value(0)
    out.close()
    (record,) = tensorprobe.load(tmp_path / "a").calls[0].tensors
    assert record.array().tolist() == [0, 1, 2, 3]
    assert record.summary is None


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a", queue_nbytes=1000)
    out.begin_step(0)
    release, wait_for = threading.Event(), out._changed.wait_for

    def slow() -> np.ndarray:  # type: ignore[type-arg]
        assert release.wait(60)
        return np.zeros(900, np.uint8)

    def waits(*arguments: Any) -> bool:
        if threading.current_thread() is threading.main_thread():
            threading.Timer(0.3, release.set).start()
        return wait_for(*arguments)

    out._changed.wait_for = waits  # type: ignore[method-assign]
    out.tensor(0, "a", "uint8", (900,), slow, 900)
    assert out.waited_s == 0
    out.tensor(1, "b", "uint8", (5000,), np.ones(5000, np.uint8))  # larger than all of the queue
    assert release.is_set()
    assert out.waited_s > 0.2
    out.close()
    assert out.nbytes_written > 5900


def test_the_disk_budget_falls_back_to_statistics(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a", max_disk_nbytes=10_000)
    out.begin_step(0)
    for n in range(6):
        write_relu(out, n, np.full(1000, n, np.float32))
    out.close()
    assert out.nbytes_written < 12_000
    assert out.n_gaps == 1
    capture = tensorprobe.load(tmp_path / "a")
    records = [call.tensors[0] for call in capture.calls]
    assert [record.blob is not None for record in records] == [True, True] + [False] * 4
    assert [record.gap for record in records] == [None, None] + ["disk budget reached"] * 4
    assert all(record.summary == SUMMARY for record in records)
    (gap,) = capture.gaps
    assert gap.reason == "disk budget reached (10000 bytes): statistics only from here"


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)

    def work(number: int) -> None:
        for n in range(number * 100, number * 100 + 100):
            write_relu(out, n, np.full(100 + number, n, np.float32))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.close()
    capture = tensorprobe.load(tmp_path / "a")
    assert (len(capture.calls), out.n_calls, capture.gaps) == (800, 800, ())
    for call in capture.calls:
        assert call.status == "complete"
        assert call.tensors[0].array()[0] == int(call.name.split(".")[2])


def test_what_cannot_be_written_is_a_gap(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    out.begin_step(0)
    write_relu(out, 0)
    out.end(EndLine(id=0, outputs=object()))
    out.close()
    (gap,) = tensorprobe.load(tmp_path / "a").gaps
    assert gap.name == "end of call 0"
    assert gap.reason.startswith("not written: TypeError")
    assert out.error is None


def test_after_the_end_nothing_is_written_and_nothing_is_raised(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    write_relu(out, 0)  # before the first step
    out.begin_step(0)
    write_relu(out, 1)
    out.close()
    write_relu(out, 2)
    out.drain()
    out.close()
    assert len(tensorprobe.load(tmp_path / "a").calls) == 1


FORK = """
import os, sys
from pathlib import Path
import numpy as np
from store_making import open_writer, write_relu
out = open_writer(Path(sys.argv[1]))
out.begin_step(0)
write_relu(out, 0, np.zeros(4, np.float32))
child = os.fork()
if child == 0:  # as a data loader's worker
    write_relu(out, 1, np.ones(4, np.float32))
    out.drain(); out.begin_step(1); out.make_room(1 << 40); out.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
write_relu(out, 2, np.ones(4, np.float32))
out.close()
"""


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    run_script(FORK, tmp_path / "a")
    capture = tensorprobe.load(tmp_path / "a")
    assert [call.name for call in capture.calls] == ["Torch.relu.0.forward", "Torch.relu.2.forward"]
    assert [call.status for call in capture.calls] == ["complete"] * 2
    assert capture.steps == (0,)


FLUSH_CALL = """
import os, signal, sys
from pathlib import Path
import numpy as np
from store_making import open_writer, write_bytes, write_relu, tensor
from tensorprobe.store.lines import CallLine
out = open_writer(Path(sys.argv[1]), flush="call")
out.begin_step(0)
for n in range(20):
    write_relu(out, n, np.full(1000, n, np.float32))
out.call(CallLine(id=20, name="crashes", op="op", args=[tensor(20)]))
write_bytes(out, 20, "k", np.full(4, 20, np.float32))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_flush_call_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_script(FLUSH_CALL, tmp_path / "a")
    capture = tensorprobe.load(tmp_path / "a")
    assert [call.name for call in capture.begun] == ["crashes"]
    assert [call.tensors[0].array()[0] for call in capture.calls] == list(range(21))
    assert capture.gaps == ()


RLIMIT = """
import resource, sys
from pathlib import Path
import numpy as np
from store_making import open_writer, write_relu
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
out = open_writer(Path(sys.argv[1]), shard_nbytes=int(sys.argv[3]))
out.begin_step(0)
for n in range(2000):
    write_relu(out, n, np.full(1000, n, np.float32) if n % 10 == 0 else None)
    if n == 1000:
        out.drain()
out.close()
print(out.error.errno, out.n_calls, out.n_gaps, sum(out.lost.values()))
"""


@pytest.mark.parametrize(
    ("limit", "shard_nbytes"), [(1 << 20, 1 << 30), (300 << 10, 10 << 10), (500 << 10, 100 << 10)]
)
def test_a_disk_that_refuses(tmp_path: Path, limit: int, shard_nbytes: int) -> None:
    """Shards cannot be made at all; then the log, too, ends early; then both, later."""
    said = run_script(RLIMIT, tmp_path / "a", limit, shard_nbytes)
    error, calls, gaps, lost = map(int, said.split())
    assert (error, calls + lost) == (errno.EFBIG, 2000), "the program went on"
    capture = tensorprobe.load(tmp_path / "a")
    assert (len(capture.calls), len(capture.gaps)) == (calls, gaps)
    assert all("File too large" in gap.reason for gap in capture.gaps)
    assert calls > 500
    for call in capture.calls:
        number = int(call.name.split(".")[2])
        record = call.tensors[0]
        if record.blob is not None:
            assert record.array().tolist() == [number] * 1000
        elif number % 10 == 0 and record.summary is not None:
            assert "File too large" in (record.gap or "")


RSS = """
import sys
from pathlib import Path
import numpy as np
from store_making import open_writer, write_bytes
def status(field):
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) << 10
bound, each = 32 << 20, 2 << 20
out = open_writer(Path(sys.argv[1]), queue_nbytes=bound)
out.begin_step(0)
write_bytes(out, 0, "first", np.zeros(each, np.uint8))
out.drain()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for n in range(1, 10 * bound // each + 1):
    out.make_room(each)
    write_bytes(out, n, f"k{n}", np.full(each, n, np.uint8))
grown = status("VmHWM") - before
out.close()
print(grown, bound, out.waited_s, out.nbytes_written)
"""


def test_memory_stays_bounded(tmp_path: Path) -> None:
    grown, bound, waited_s, written = map(float, run_script(RSS, tmp_path / "a").split())
    assert grown <= 1.1 * bound
    assert written > 9 * bound
    assert waited_s >= 0


def test_bytes_are_written_before_their_value(tmp_path: Path) -> None:
    """Read over and over while it is written: what a value names is there, and right."""
    out = open_writer(tmp_path / "a", shard_nbytes=1 << 20)
    out.begin_step(0)
    out.call(CallLine(id=0, name="C", op="op", args=[tensor(i, (10_000,)) for i in range(300)]))
    out.call(CallLine(id=1, name="D", op="op"))
    seen = 0
    for n in range(300):
        write_bytes(out, n, f"k{n}", np.full(10_000, n, np.float32))
        if n % 20 == 0:
            out.drain() if n % 40 else time.sleep(0.01)
            for i, record in enumerate(tensorprobe.load(tmp_path / "a").calls[0].tensors):
                if record.blob is not None:
                    seen += 1
                    assert record.array()[[0, -1]].tolist() == [i, i]
    out.close()
    assert seen > 300


def test_sections_that_a_line_has_not_are_not_in_it() -> None:
    call = CallLine(id=0, name="C", op="op")
    assert encode(call) == b'{"type":"call","id":0,"name":"C","op":"op"}\n'
    assert encode(EndLine(id=0)) == b'{"type":"end","id":0}\n'
    call.buffers = {"0": TensorLine("int8", (2,))}
    assert encode(call).endswith(b'"op":"op","buffers":{"0":{"dtype":"int8","shape":[2]}}}\n')


def test_encoding_a_line_leaves_nothing_behind() -> None:
    line = EndLine(id=1)
    encode(line)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        encode(line)
    assert len(gc.get_objects()) < before + 100


def test_a_step_that_is_deleted_counts_no_more(tmp_path: Path) -> None:
    out = open_writer(tmp_path / "a")
    counted = []
    for step in (0, 1):
        out.begin_step(step)
        write_relu(out, 0, np.arange(1000, dtype=np.float32))
        out.end_step()
        out.drain()
        counted.append(out.nbytes_written)
    out.begin_step(2)
    out.drop_step(0)
    out.drop_step(1)
    out.close()
    assert 4000 < counted[0] < counted[1]
    assert out.nbytes_written == sum(
        file.stat().st_size for file in (tmp_path / "a/rank0/step2").iterdir()
    )
