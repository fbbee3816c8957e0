"""Writing the native layout: call lines at once, late values and tensors through a queue."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from tensorprobe.records import TensorSummary, count
from tensorprobe.store.beside import Beside
from tensorprobe.store.claim import Identity, claim, move_to_rank
from tensorprobe.store.ending import Ending, write_ending
from tensorprobe.store.lines import (
    CallLine,
    ClosedLine,
    EndLine,
    GapLine,
    Line,
    StackLine,
    ValueLine,
    encode,
    encode_lines,
    encode_now,
    pack_summary,
)
from tensorprobe.store.program_file import write_program
from tensorprobe.store.shard import HEADER_NBYTES, SHARD_NBYTES, Bytes, Shards
from tensorprobe.store.step_files import LOG_FILE
from tensorprobe.tensors.dtypes import numpy_dtype, part_of
from tensorprobe.tensors.packing import Coded, pack
from tensorprobe.trouble import OnTrouble

_GATHER_S = 0.1  # how long the thread lets small things gather before it writes them
_POLL_S = 0.2
_BATCH_LINES = 256
_BATCH_NBYTES = 16 << 20
_LARGE_NBYTES = 1 << 20  # from here on a checksum is made in another thread meanwhile
_PACKING_THREADS = 8  # at most, and half of the processors
_READ_NBYTES = 1 << 20
_CALL_BEGINS = b'\n{"type":"call",'
_NO_DATA = np.empty(0, np.uint8)
Packing = Beside[Sequence[Bytes], list[Coded]]
OUT_OF_BUDGET = "disk budget reached"
_TOO_LATE = "it came after its step had ended"


class PendingSummary(Protocol):
    """A summary that may still be on its way from the device."""

    @property
    def ready(self) -> bool: ...
    @property
    def summary(self) -> TensorSummary | None: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...


class SummarySource(Protocol):
    """What gives the results, such as `tensors.summarizer.Summarizer`."""

    def flush(self) -> None: ...
    def poll(self) -> None: ...
    def land(self) -> None: ...


class _Step:
    """The files of one step of one rank; before `open`, and where that fails, only its counts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fd = self.log_fd = -1
        self.is_resumed = False
        self.shards: Shards | None = None
        self.closed = True
        self.with_data: set[int] = set()  # values whose bytes are in the queue, or written
        self.blobs: dict[int, tuple[int, ...]] = {}  # written, their value line to come
        self.gaps: dict[int, str] = {}  # not written, and why
        self.checksums: dict[int, str] = {}  # likewise, of data that has gone by
        # Lines that wait for company: they go with the next call's, or when the thread comes by.
        # Appending takes no lock; whoever takes some away has the log's, and takes the first ones.
        self.lines: list[bytes] = []
        self.held: list[bytes] = []  # the thread's own: they name data, whose header goes first
        self.n_calls = 0
        self.n_gaps = 0
        self.n_unstored = 0  # tensors that the disk refused
        self.is_late = False  # results are on their way from a device
        # Held until the thread has closed it, or failed to. No Event: a signal's handler that
        # comes while one is waited for, and closes, would wait for the lock inside it.
        self.unfinished = threading.Lock()
        self.unfinished.acquire()

    def open(self, rank_fd: int, shard_nbytes: int) -> None:
        name = f"step{self.number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=rank_fd)
        with contextlib.ExitStack() as failing:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=rank_fd)
            failing.callback(os.close, fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            log_fd = os.open(LOG_FILE, flags, 0o644, dir_fd=fd)
            failing.callback(os.close, log_fd)
            n_shards = sum(file.endswith(".safetensors") for file in os.listdir(fd))
            failing.pop_all()
        self.fd, self.log_fd = fd, log_fd
        self.is_resumed = os.fstat(log_fd).st_size > 0
        self.shards = Shards(fd, n_shards, shard_nbytes)
        self.closed = False

    def is_deleted(self) -> bool:
        """Whether somebody has deleted the log: what is written to it nobody will read."""
        try:
            os.stat(LOG_FILE, dir_fd=self.fd)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESTALE)
        return False

    def count_calls(self) -> int:
        """The calls in the file, also those of before the step was gone on with."""
        if self.is_deleted():
            return 0
        found, before, offset = 0, b"\n", 0
        while text := os.pread(self.log_fd, _READ_NBYTES, offset):
            found += (before + text).count(_CALL_BEGINS)
            before = (before + text)[1 - len(_CALL_BEGINS) :]
            offset += len(text)
        return found

    def close(self) -> None:
        self.closed = True
        assert self.shards is not None
        try:
            self.shards.close()
        finally:
            os.close(self.log_fd)
            os.close(self.fd)


class _TensorBytes(msgspec.Struct):
    value_id: int
    key: str
    dtype: str
    shape: Sequence[int]
    data: Bytes | Callable[[], Bytes]
    nbytes: int
    checksum: Callable[[Bytes], str] | None = None
    stored: bool = True


class _Value(msgspec.Struct, gc=False):
    step: _Step
    id: int
    result: PendingSummary | None


class _EndStep(msgspec.Struct):
    pass


class _Drop(msgspec.Struct):
    """A step, ended before, whose files are to go."""

    number: int


_Item = _TensorBytes | _Value | _EndStep | _Drop | threading.Event


def _name_of(item: EndLine | _Value | _TensorBytes) -> str:
    if isinstance(item, EndLine):
        return f"end of call {item.id}"
    return item.key if isinstance(item, _TensorBytes) else f"value {item.id}"


class CaptureWriter:
    """Writes what one rank of a run recorded, and never raises for the disk's sake.

    `call` and `gap` are in the file when they return; `stack`, `end`, and `value` whose result is
    ready, with the next of those or a moment later. `tensor`, and `value` whose result is still to
    come, go through a queue that one thread empties; `tensor` of a value id comes before its
    `value`. That thread also finishes steps, and is the one to wait for the device then: the
    program goes on, one step ahead at most. After a write error nothing more is written than the
    disk takes: `error` has the first one, which `on_error` is given when it happens, and `lost` has
    the calls that are not in the files, by step. In a forked child nothing is done.

        writer = CaptureWriter(Path("runs/a"), 0, run_identity(os.environ), {}, {})
        writer.begin_step(0)
        writer.call(CallLine(id=0, name="Torch.relu.0.forward", op="torch.relu", args=[...]))
        writer.close()
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        run_id: str,
        facts: Mapping[str, Any],
        rank_facts: Mapping[str, Any],
        *,
        flush: Literal["queue", "call"] = "queue",
        queue_nbytes: int = 256 << 20,
        max_disk_nbytes: int | None = None,
        compress: bool = False,
        shard_nbytes: int = SHARD_NBYTES,
        results: SummarySource | None = None,
        digest_kind: str = "",
        identify: Callable[[], Identity] | None = None,
        on_warning: Callable[[str], None] = lambda text: None,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._on_error = on_error
        self._digest_kind = digest_kind  # what stands before digests of the results
        self.folder = Path(root) / f"rank{rank}"
        # Rank and run, which a process may learn only after it has begun to record.
        self._identify = identify or (lambda: Identity(rank, run_id))
        self._identity = Identity(rank, run_id)
        self._root = Path(root)
        self._claim = functools.partial(
            claim, Path(root), facts=facts, rank_facts=rank_facts, on_warning=on_warning
        )
        self.nbytes_written = 0
        self.waited_s = 0.0
        self.error: Exception | None = None
        self._gaps: dict[int, int] = {}  # lines about gaps, by step
        self._seen: dict[int, int] = {}  # calls, of steps that have ended
        self.lost: dict[int, int] = {}  # those of them that are not in the files
        self.torn: set[int] = set()  # steps whose calls are there, and not all of their values
        self._flush_each = flush == "call"
        self._queue_nbytes = queue_nbytes
        self._max_disk_nbytes = max_disk_nbytes
        self._shard_nbytes = shard_nbytes
        self._results = results
        self._pid = os.getpid()
        _forget_in_children(self)
        self._rank_fd: int | None = None
        self._has_ended = True
        self._step: _Step | None = None
        self._last_step: _Step | None = None  # also after its end, until the next begins
        self._begun_steps: set[int] = set()
        self._ending: _Step | None = None  # the step that has ended last, if it is late
        self._unfinished: deque[_Step] = deque()  # those that the thread has yet to finish
        self._log_lock = threading.RLock()  # a signal's handler may call a module meanwhile
        self._log_broken = False
        self._out_of_budget = False
        self._changed = threading.Condition()
        self._queue: deque[tuple[_Step, _Item]] = deque()
        self._queued_nbytes = 0
        self._hurry = False
        self._asleep = False
        self._stopping = False
        self._waiting: deque[_Value] = deque()  # in the order of their coming
        self._result_error: str | None = None
        self._missing: set[tuple[int, int]] = set()  # step and number of values that never came
        self._beside: Beside[Bytes, str] = Beside()
        threads = max(1, min(_PACKING_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._packing: Packing | None = Beside(threads) if compress else None
        self.log: Any = None  # where `write_by` has it
        self._thread: threading.Thread | None = None

    @property
    def missing(self) -> str:
        """What did not come back from the device, and why; empty where all did."""
        if not self._missing:
            return ""
        why = f" ({self._result_error.splitlines()[0][:200]})" if self._result_error else ""
        return f"{count(len(self._missing), 'value')} did not come back from the device{why}"

    @property
    def n_calls(self) -> int:
        """Calls written down so far; some that are `lost` may count until their step has ended."""
        step = self._step
        seen = sum(self._seen.values()) + (step.n_calls if step is not None else 0)
        return seen - sum(self.lost.values())

    @property
    def n_gaps(self) -> int:
        """What a reader finds missing."""
        return sum(self._gaps.values()) + len(self._ending_now().gaps(0))

    @property
    def n_lost_steps(self) -> int:
        """Steps of which no call is in the files."""
        return sum(calls == self._seen[number] for number, calls in self.lost.items())

    # -- what the recorder calls ---------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Write to this step from now on; one that this run began before is gone on with."""
        if self._forked():
            return
        self.end_step()
        if step in self._begun_steps:
            self._finish_queue()  # the files are opened again: let go of them first
        opening = _Step(step)
        with OnTrouble(self.fail):
            if not self._log_broken:
                self._open(opening)
                self._begun_steps.add(step)
        self._step = opening
        if opening.shards is not None:
            self._last_step = opening

    def write_program(self, facts: Mapping[str, Any]) -> None:
        """What program this is, once its first step is open."""
        if self._rank_fd is not None and not self._forked():
            write_program(facts, self._rank_fd)

    def _open(self, step: _Step) -> None:
        if self._rank_fd is None:
            # Not before: a run that records nothing must not move an earlier one away.
            # By descriptor, not path: a later run may move this folder while we write.
            self._identity = self._identify()
            rank, run_id, who = self._identity
            self.folder = self._claim(rank, run_id, who=who)
            self._rank_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._rank_fd).atexit = False
        self._follow_rank()
        try:
            if self._has_ended:
                write_ending(Ending(ended=False), self._rank_fd)
                self._has_ended = False
            step.open(self._rank_fd, self._shard_nbytes)
        except FileNotFoundError as error:
            raise self._explained(error) from error
        if self._thread is None:
            self._stopping = False
            thread = threading.Thread(target=self._run, name="tensorprobe writer", daemon=True)
            thread.start()
            self._thread = thread

    def _follow_rank(self) -> None:
        """Move the folder if the process has turned out to be another rank."""
        if self._rank_fd is None:
            return
        identity = self._identify()
        if identity != self._identity:
            self._identity = identity
            moved = move_to_rank(self._root, self._rank_fd, identity.rank, identity.who)
            self.folder = moved or self.folder

    @property
    def part(self) -> str:
        """What of the run is written: "rank0", or the name of a role."""
        inside = self.folder.relative_to(self._root).parts
        return inside[0] if inside else ""

    @property
    def is_beside_ranks(self) -> bool:
        """Whether the files are in a folder of a role, where another process may have put them."""
        if self._rank_fd is None:
            return False
        with contextlib.suppress(OSError):  # no handle is left, or somebody has deleted it
            for folder in self._root.glob(f"*/{self.folder.name}"):
                if os.path.samestat(folder.stat(), os.fstat(self._rank_fd)):
                    self.folder = folder
                    return True
        return False

    def _explained(self, error: OSError) -> OSError:
        """The error, or if a file of the capture is missing, that somebody has deleted it."""
        return self._deleted() if isinstance(error, FileNotFoundError) else error

    def _deleted(self) -> OSError:
        return FileNotFoundError(errno.ENOENT, "deleted while it was recorded", str(self.folder))

    def end_step(self) -> None:
        """Let the thread finish the open step once all of it is written."""
        if self._forked() or self._step is None:
            return
        if self._ending is not None:  # or results of ever more steps would fill the device
            self._await(self._ending)  # while other threads may still write to this step
        if self._results is not None:
            self._ask(self._results.flush)
        step, self._step = self._step, None
        if step is None:  # another thread has ended it meanwhile
            return
        if step.shards is None:
            self._count_calls(step)
            return
        self._ending = step if step.is_late else None
        self._unfinished.append(step)
        self._put(step, _EndStep())
        if step.is_late:
            self._wake(hurry=True)
        self._bound_open_files()

    def _bound_open_files(self) -> None:
        """Steps that are not finished hold files open, of which the program may need many."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max(1, (1024 if limit == resource.RLIM_INFINITY else limit) // 64)
        while len(self._unfinished) > most:
            self._wake(hurry=True)
            try:
                oldest = self._unfinished.popleft()
            except IndexError:  # another thread has taken it
                return
            self._await(oldest)

    def _await(self, step: _Step) -> None:
        thread = self._thread
        while thread is not None and thread.is_alive() and thread is not threading.current_thread():
            if step.unfinished.acquire(timeout=1.0):
                step.unfinished.release()
                return

    def drop_step(self, step: int) -> None:
        """Delete what was recorded of a step that has ended; its calls count no more."""
        if self._forked() or self._last_step is None or step not in self._begun_steps:
            return
        self._begun_steps.discard(step)
        self._put(self._last_step, _Drop(step))

    def write_by(self, native: Any) -> None:
        """Have `call` and `end` done by the module of that name, as a rule."""
        if not self._flush_each:
            self.log = log = native.Log(self, encode_now, self.call, self.end)
            self.call, self.end = log.call, log.end  # type: ignore[method-assign]

    def call(self, line: CallLine) -> None:
        """Write that a call is about to run."""
        step = self._step
        if step is not None:
            try:  # as `encode`, which would be one frame more
                text = encode_now([line])
            except UnicodeEncodeError:
                text = encode(line)
            step.lines.append(text)
            with self._log_lock:
                step.n_calls += 1
                self._write_log(step)

    def stack(self, line: StackLine) -> None:
        """Write a stack, with the first call that names it and before it."""
        step = self._step
        if step is not None and step.shards is not None:
            self._add_line(step, line)

    def gap(self, line: GapLine) -> None:
        """Write that something could not be recorded."""
        step = self._step
        if step is not None and step.shards is not None:
            self._append_gap(step, line)

    def end(self, line: EndLine) -> None:
        """Write, soon, that a call has ended."""
        step = self._step
        if step is None or step.shards is None:
            return
        try:
            if step.closed:
                raise RuntimeError(_TOO_LATE)
            step.lines.append(encode(line))
            if self._asleep:
                self._wake()
        except Exception as error:  # noqa: BLE001 recording a call must not end the program
            self._not_written(step, line, error)
        if self._flush_each:
            self._finish_queue()

    def make_room(self, nbytes: int) -> None:
        """Wait until the queue can take this much more: before a copy is made, not after."""
        if self._forked() or self._thread is None:
            return
        with self._changed:
            if self._has_room(nbytes):
                return
            began = time.monotonic()
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_room(nbytes))
            self.waited_s += time.monotonic() - began

    def tensor(
        self,
        value_id: int,
        key: str,
        dtype: str,
        shape: Sequence[int],
        data: Bytes | Callable[[], Bytes],
        nbytes: int | None = None,
        *,
        checksum: Callable[[Bytes], str] | None = None,
        stored: bool = True,
    ) -> None:
        """Queue the bytes of a value, row-major; waits while the queue is full.

        `data` may be a function that gives them later (a copy under way); `nbytes` is needed then.
        What `checksum` makes of them, in the thread that writes, is the value's digest; they need
        not be `stored` for it.
        """
        step = self._step
        if step is None or step.shards is None or self._log_broken:
            return
        if nbytes is None:
            assert not callable(data), "nbytes is needed when the data comes later"
            nbytes = data.nbytes
        self.make_room(nbytes)
        with self._changed:
            self._queued_nbytes += nbytes
        step.with_data.add(value_id)
        self._put(step, _TensorBytes(value_id, key, dtype, shape, data, nbytes, checksum, stored))
        if self._queued_nbytes > _BATCH_NBYTES:
            self._wake(hurry=True)

    def value(
        self, id: int, result: PendingSummary | None = None, *, gap: str | None = None
    ) -> None:
        """Write the line of a value as soon as its result is ready and its bytes are there."""
        step = self._step
        if step is None or step.shards is None or self._log_broken:
            return
        if gap is not None:
            self._add_line(step, ValueLine(id=id, gap=gap))
        elif id in step.with_data:
            if result is not None and not result.ready:
                step.is_late = True
            self._put(step, _Value(step, id, result))
        elif result is None:
            self._add_line(step, ValueLine(id=id))
        elif result.ready:
            self._add_line(step, self._value_line(id, result))
        else:
            step.is_late = True
            self._waiting.append(_Value(step, id, result))
            if self._asleep:
                self._wake()
        if self._flush_each:
            self.drain()

    def drain(self) -> None:
        """Return when everything queued is in the files."""
        if not self._forked():
            if self._results is not None:
                self._ask(self._results.flush)
                self._ask(self._results.land)
            self._finish_queue()

    def close(self) -> None:
        """End the step and the thread. `begin_step` may begin again."""
        if self._forked():
            return
        self.end_step()
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            thread.join()
            self._beside.stop()
            if self._packing is not None:
                self._packing.stop()
        if not self._has_ended:
            self._write_ending()
        with OnTrouble(self.fail):
            self._follow_rank()

    def count_deleted(self) -> None:
        """After `close`: count as lost the calls of steps that somebody has deleted meanwhile."""
        if self._rank_fd is None or self._forked():
            return
        gone = [number for number in self._begun_steps if self._is_gone(number)]
        if gone:
            for number in gone:
                self.lost[number] = self._seen.get(number, 0)
                self._gaps.pop(number, None)
                self.torn.discard(number)
            self.fail(self._deleted())
            self._write_ending()

    def _is_gone(self, number: int) -> bool:
        # Not by listing the folder: that takes a file handle, and a program may have used up all.
        try:
            os.stat(f"step{number}", dir_fd=self._rank_fd)
        except FileNotFoundError:
            return True
        except OSError:  # a program may have closed our handle: nobody can tell
            return False
        return False

    def fail(self, error: Exception) -> None:
        """Something of ours cannot go on; the first error is told."""
        first = self.error is None
        if first:
            self.error = error
        with self._changed:
            self._changed.notify_all()
        if first:
            self._on_error(error)

    # -- helpers of the callers' side ----------------------------------------------------------

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _has_room(self, nbytes: int) -> bool:
        # A tensor larger than the whole queue goes alone.
        return self._queued_nbytes == 0 or self._queued_nbytes + nbytes <= self._queue_nbytes

    def _put(self, step: _Step, item: _Item) -> None:
        self._queue.append((step, item))
        # Seldom true, and no lock is taken until it is: this runs several times a recorded call.
        # The thread says that it sleeps before it looks at the queue, so one of the two notices.
        if self._asleep:
            self._wake()

    def _wake(self, hurry: bool = False) -> None:
        with self._changed:
            self._asleep = False
            self._hurry = self._hurry or hurry
            self._changed.notify_all()

    def _finish_queue(self) -> None:
        if self._thread is None or self._last_step is None:
            return
        done = threading.Event()
        self._put(self._last_step, done)
        self._wake(hurry=True)
        done.wait()

    def _ask(self, results: Callable[[], None]) -> None:
        try:
            results()
        except Exception as error:  # noqa: BLE001 a device that failed: its values become gaps
            self._result_error = f"{type(error).__name__}: {error}"

    # -- the log -------------------------------------------------------------------------------

    def _add_line(self, step: _Step, line: Line) -> None:
        """Let a line wait for the next write: nothing else of a capture depends on its place."""
        if step.closed:
            raise RuntimeError(_TOO_LATE)
        try:
            text = encode_now([line])
        except UnicodeEncodeError:
            text = encode(line)
        step.lines.append(text)
        if self._asleep:
            self._wake()

    def _append(self, step: _Step, text: bytes) -> None:
        """Write to the log what waits, then this."""
        step.lines.append(text)
        with self._log_lock:
            self._write_log(step)

    def _write_log(self, step: _Step) -> None:
        """Write the lines that wait. The caller has the log's lock."""
        lines = step.lines
        n = len(lines)  # another thread may add one now
        text = b"".join(lines[:n])
        del lines[:n]
        if self._log_broken or step.closed:
            return
        written = 0
        try:
            written = os.write(step.log_fd, text)
            while written < len(text):
                written += os.write(step.log_fd, text[written:])
            self.nbytes_written += written
        except OSError as error:
            self._break_log(step, error, written)

    def _break_log(self, step: _Step, error: OSError, written: int) -> None:
        """Write to the log no more; so much was written of what could not be."""
        self._log_broken = True
        self.fail(error)
        with contextlib.suppress(OSError):  # leave whole lines only
            os.ftruncate(step.log_fd, os.fstat(step.log_fd).st_size - written)

    def _append_gap(self, step: _Step, gap: GapLine) -> None:
        with self._log_lock:
            self._append(step, encode(gap))
            if not (self._log_broken or step.closed):
                step.n_gaps += 1
                self._gaps[step.number] = self._gaps.get(step.number, 0) + 1

    def _not_written(
        self, step: _Step, item: EndLine | _Value | _TensorBytes, error: Exception
    ) -> None:
        reason = f"not written: {type(error).__name__}: {error}"
        self._append_gap(step, GapLine(_name_of(item), reason))

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._pause():
            with OnTrouble(self.fail):  # the program may wait for this thread
                if self._waiting:
                    if self._results is not None:
                        self._ask(self._results.poll)
                    self._write_ready()
                self._work(until=time.monotonic() + _POLL_S)

    def _pause(self) -> bool:
        """Sleep until there is work, and a little longer if it may gather; False to end."""
        with self._changed:
            if not self._waiting:
                self._changed.wait_for(self._is_called)
                self._asleep = False
                if self._stopping and not self._has_work():
                    return False
            self._changed.wait_for(lambda: self._hurry or self._stopping, _GATHER_S)
            self._hurry = False
            return True

    def _is_called(self) -> bool:
        # Said anew after each call in vain: the program may have written what it woke us for.
        self._asleep = True
        return self._has_work() or self._stopping

    def _has_work(self) -> bool:
        step = self._last_step
        lines = step is not None and not step.closed and step.lines
        return bool(self._queue or self._waiting or lines)

    def _work(self, until: float) -> None:
        """Take what is queued, in order, for a while."""
        step = self._last_step
        while self._queue and time.monotonic() < until:
            step, item = self._queue.popleft()
            if isinstance(item, _Value):
                if item.result is None or item.result.ready:
                    self._attempt(step, self._write_value, item)
                else:
                    self._waiting.append(item)
            elif isinstance(item, _TensorBytes):
                self._attempt(step, self._write_data, item)
                self._release(item)
            elif isinstance(item, _EndStep):
                self._finish_step(step)
            elif isinstance(item, _Drop):
                self._delete(item.number)
            else:
                self._write_ready()
                self._flush(step)
                item.set()
        if step is not None:
            self._flush(step)
        if self._queue:
            self._hurry = True

    def _attempt(
        self, step: _Step, write: Callable[[_Step, Any], None], item: _Value | _TensorBytes
    ) -> None:
        """Write one thing; if that fails it is a gap, and the program and the rest go on."""
        with OnTrouble(self._not_written, step, item):
            write(step, item)

    def _finish_step(self, step: _Step) -> None:
        try:
            if self._results is not None:
                self._ask(self._results.land)
            self._write_ready(ending=step)
            self._flush(step)
            if step.n_unstored:
                reason = f"{step.n_unstored} not written: {self.error}"
                self._append_gap(step, GapLine("tensors", reason))
            closed = ClosedLine(step.n_calls, step.n_gaps, whole=not step.is_resumed)
            self._append(step, encode(closed))
            if step.is_deleted():
                self._log_broken = True
                self._gaps.pop(step.number, None)
                self.fail(self._deleted())
            with self._log_lock:  # no other thread is about to write to a number that is let go
                try:
                    self._count_calls(step)
                    step.close()
                except OSError as error:
                    self.fail(error)
        finally:
            step.unfinished.release()

    def _count_calls(self, step: _Step) -> None:
        """Count the calls of a step that has ended; where the log broke, those that are in it."""
        seen = self._seen[step.number] = self._seen.get(step.number, 0) + step.n_calls
        if step.shards is None:
            lost = self.lost.get(step.number, 0) + step.n_calls
        else:
            lost = seen - step.count_calls() if self._log_broken else 0
        if lost > 0:
            self.lost[step.number] = lost
            self.torn.discard(step.number)
        elif self._log_broken:
            self.torn.add(step.number)

    def _ending_now(self) -> Ending:
        problem = "" if self.error is None else str(self.error)
        return Ending(ended=True, problem=problem, lost=self.lost, torn=sorted(self.torn))

    def _write_ending(self) -> None:
        """Say that the recording has ended, and what was lost of it."""
        assert self._rank_fd is not None
        self._has_ended = True
        try:
            write_ending(self._ending_now(), self._rank_fd)
        except OSError as error:
            self.fail(self._explained(error))

    def _delete(self, number: int) -> None:
        assert self._rank_fd is not None
        name = f"step{number}"
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._rank_fd)
            try:
                for file in os.listdir(fd):
                    head = 0 if file == LOG_FILE else 8 + HEADER_NBYTES  # of a shard: not counted
                    self.nbytes_written -= os.stat(file, dir_fd=fd).st_size - head
                    os.unlink(file, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=self._rank_fd)
        except OSError as error:
            self.fail(error)

    def _write_ready(self, ending: _Step | None = None) -> None:
        """Write outstanding values whose result has come, and all of a step that ends."""
        waiting = self._waiting
        steps: dict[_Step, list[_Value]] = {}
        kept: list[_Value] = []
        for _ in range(len(waiting)):
            value = waiting.popleft()
            step, result = value.step, value.result
            if step is ending or result is None or result.ready:
                steps.setdefault(step, []).append(value)
            elif ending is None:  # those behind it have not come either
                waiting.appendleft(value)
                break
            else:
                kept.append(value)
        waiting.extendleft(reversed(kept))
        for step, values in steps.items():
            for start in range(0, len(values), _BATCH_LINES):
                self._write_values(step, values[start : start + _BATCH_LINES])
            self._flush(step)

    def _write_values(self, step: _Step, values: Sequence[_Value]) -> None:
        """Write many lines at once, or one by one: where some have bytes, or one is at fault."""
        if not step.closed and step.with_data.isdisjoint([value.id for value in values]):
            with OnTrouble(lambda error: None):  # the one at fault becomes a gap below
                step.lines.append(encode_lines([self._line_of(value) for value in values]))
                return
        for value in values:
            self._attempt(step, self._write_value, value)

    def _line_of(self, value: _Value) -> ValueLine:
        result = value.result
        if result is None:
            return ValueLine(id=value.id)
        if result.ready:
            return self._value_line(value.id, result)
        problem = self._result_error or "its summary did not come back from the device"
        self._missing.add((value.step.number, value.id))
        return ValueLine(id=value.id, gap=problem)

    def _value_line(self, id: int, result: PendingSummary) -> ValueLine:
        digest = None if result.digest is None else self._digest_kind + result.digest
        return ValueLine(
            id=id, summary=pack_summary(result.summary), digest=digest, gap=result.error
        )

    def _write_value(self, step: _Step, value: _Value) -> None:
        result, line = value.result, self._line_of(value)
        if value.id in step.with_data:
            step.with_data.discard(value.id)
            line.blob = step.blobs.pop(value.id, None)
            line.gap = step.gaps.pop(value.id, None) or line.gap
            if result is not None and result.ready:
                line.digest = step.checksums.pop(value.id, None) or line.digest
        if line.blob is None:
            self._add_line(step, line)
        else:
            step.held.append(encode(line))
            if len(step.held) >= _BATCH_LINES:
                self._flush(step)

    def _write_data(self, step: _Step, item: _TensorBytes) -> None:
        try:
            data = item.data() if callable(item.data) else item.data
        except Exception as error:  # noqa: BLE001 a device that failed: this value becomes a gap
            step.gaps[item.value_id] = f"its copy failed: {type(error).__name__}: {error}"
            return
        if item.checksum is None:
            self._store(step, item, data)
        elif data.nbytes < _LARGE_NBYTES:
            step.checksums[item.value_id] = item.checksum(data)
            self._store(step, item, data)
        else:  # each takes about as long as the other
            checksum = self._beside.start(item.checksum, data)
            self._store(step, item, data)
            step.checksums[item.value_id] = checksum.result()

    def _store(self, step: _Step, item: _TensorBytes, data: Bytes) -> None:
        if not item.stored:
            return
        assert step.shards is not None
        if self.error is not None:
            step.gaps[item.value_id] = f"not written after an error: {self.error}"
            step.n_unstored += 1
            return
        try:
            packed = self._packed(item.dtype, data)
            stored = data if packed is None else packed
            place = step.shards.find(stored)
            if place is None and self._exceeds_budget(step, stored.nbytes):
                step.gaps[item.value_id] = OUT_OF_BUDGET
                return
            if place is None:
                place = step.shards.append(item.key, item.dtype, item.shape, stored)
                self.nbytes_written += stored.nbytes
        except OSError as error:
            self.fail(self._explained(error))
            step.gaps[item.value_id] = f"not written: {self.error}"
            step.n_unstored += 1
        else:
            step.blobs[item.value_id] = place if packed is None else (*place, data.nbytes)

    def _packed(self, dtype: str, data: Bytes) -> Bytes | None:
        if self._packing is None or self._out_of_budget:
            return None
        try:
            itemsize = part_of(numpy_dtype(dtype)).itemsize
        except ValueError:  # nobody knows its numbers
            return None
        try:
            return pack(data, itemsize, self._packing.each_of)
        except MemoryError:  # as it is it takes none
            return None

    def _exceeds_budget(self, step: _Step, nbytes: int) -> bool:
        if self._max_disk_nbytes is None or self._out_of_budget:
            return self._out_of_budget
        self._out_of_budget = self.nbytes_written + nbytes > self._max_disk_nbytes
        if self._out_of_budget:
            reason = f"{OUT_OF_BUDGET} ({self._max_disk_nbytes} bytes): statistics only from here"
            self._flush(step)
            self._append_gap(step, GapLine("tensors", reason))
        return self._out_of_budget

    def _flush(self, step: _Step) -> None:
        """Data is named by the shard's header, then by the log: a value line is never early."""
        if step.closed or step.shards is None:
            return
        try:
            step.shards.flush()
        except OSError as error:
            self.fail(error)
        held, step.held = step.held, []
        if held or step.lines:
            self._append(step, b"".join(held))

    def _release(self, item: _TensorBytes) -> None:
        item.data = _NO_DATA  # the memory first, then the room it took
        with self._changed:
            self._queued_nbytes -= item.nbytes
            self._changed.notify_all()


def _forget_in_children(writer: CaptureWriter) -> None:
    """In a forked child no step is open: asked once there, and not with every line here."""
    reference = weakref.ref(writer)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive._step = None

    os.register_at_fork(after_in_child=in_child)
