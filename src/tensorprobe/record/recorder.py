"""What the user holds: a Recorder, which owns the modes and hooks and drops them on exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from tensorprobe import native
from tensorprobe.config import (
    Compiled,
    Digests,
    Dtypes,
    Flush,
    Names,
    Numbers,
    Operators,
    RecordConfig,
    Size,
    format_numbers,
    from_msprobe_config,
    strictness,
)
from tensorprobe.devices import check_environment, current_rank, world_size
from tensorprobe.errors import (
    BadUsage,
    NothingRecorded,
    RecordingStopped,
    TensorprobeError,
    WriteFailed,
)
from tensorprobe.follow.dispatch_mode import OperatorMode
from tensorprobe.follow.engine import EngineEntry
from tensorprobe.follow.function_mode import CallMode, WriteMode
from tensorprobe.follow.mode_stack import add_mode, remove_mode
from tensorprobe.follow.module_hooks import ModuleHooks, ModulePaths
from tensorprobe.follow.naming import Counter
from tensorprobe.follow.optimizer_hooks import OptimizerHooks
from tensorprobe.follow.quiet import Quiet
from tensorprobe.follow.steps import StepOn, StepWatch
from tensorprobe.follow.tracebacks import clean_below
from tensorprobe.follow.warning_filters import COMPILED_MODULE, add_filter, remove_filter
from tensorprobe.garbage import rare_searches
from tensorprobe.keywords import keywords
from tensorprobe.native import background
from tensorprobe.record.address_space import check_before, check_meanwhile
from tensorprobe.record.facts import environment_facts
from tensorprobe.record.identity import ProcessIdentity
from tensorprobe.record.observing import BackwardTold, RecordingObserver
from tensorprobe.record.program_facts import program_facts
from tensorprobe.record.requests import requests_value
from tensorprobe.record.selection import Selection
from tensorprobe.record.tape import Tape
from tensorprobe.record.values import Values
from tensorprobe.records import IN_MEMORY, REQUESTS, Keep, Level, count
from tensorprobe.store.outputs import check_writable
from tensorprobe.store.remote import is_url, limit_nbytes, place_of
from tensorprobe.store.uploading import Uploader
from tensorprobe.store.writer import CaptureWriter
from tensorprobe.tensors.summarizer import Summarizer
from tensorprobe.torch_versions import COMPILED_FROM, can_see_compiling
from tensorprobe.trouble import OnTrouble

if TYPE_CHECKING:
    from tensorprobe.compiling.compile_watch import CompileWatch


def say(text: str) -> None:
    """One line to the person who runs the program."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or not there
        sys.stderr.write(f"tensorprobe: {text}\n")
        sys.stderr.flush()


class Recorder:
    """Records the torch calls of a program into a folder, and disturbs nothing.

        with tp.Recorder("runs/npu", level="mix", keep="tensors") as rec:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step()
                rec.step()

    `level` is L0 (modules), L1 (torch calls), mix (both) or L2 (ATen ops); `keep` is structure,
    stats, digest or tensors. `steps` to `names` each narrow what is recorded; how it is written is
    said from `flush` on (docs/recording.md has them one by one). It may be built before or after
    the model, started and stopped many times, and nested in another recorder. With a `counter` of
    its own the numbers of calls go on over steps, and over recorders that share it.

    What goes wrong with the recording, a full disk say, is said on stderr when it happens and when
    it is closed, and is in `failed` from then on; the program goes on. With `strict=True` it is
    raised: when the recorder is made or started, at the end of a step, or by `close`.
    """

    @keywords(on_write_error=strictness)
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        level: Level = "mix",
        keep: Keep = "stats",
        steps: Numbers | None = None,
        ranks: Numbers | None = None,
        directions: Names = ("forward", "backward"),
        sides: Names = ("input", "output"),
        calls: Names = (),
        between: str | Sequence[str] | None = None,
        apis: Names = (),
        modules: Names = (),
        names: Names = (),
        keep_tensors: Names = (),
        dtypes: Dtypes = "all",
        stacks: bool = True,
        digests: Digests = "native",
        operators: Operators = "native",
        compiled: Compiled = "call",
        flush: Flush = "queue",
        max_disk: Size | None = None,
        queue: Size = 256 * 2**20,
        compress: bool = False,
        keep_last: int | None = None,
        stop_after_last_step: bool = False,
        strict: bool = False,
        step_on: StepOn = "explicit",
        first_step: int = 0,
        log: Callable[[str], None] = say,
        facts: dict[str, Any] | None = None,
        counter: Counter | None = None,
    ) -> None:
        self.url = path if is_url(path) else None
        self.path = Path(path if self.url is None else "")  # known when it is checked
        self._uploader: Uploader | None = None
        self.failed: TensorprobeError | None = None  # what went wrong with the recording
        self._raised = False
        self._counter = counter
        self.config = RecordConfig.make(
            level=level, keep=keep, steps=steps, ranks=ranks, directions=directions, sides=sides,
            calls=calls, between=between, apis=apis, modules=modules, names=names,
            keep_tensors=keep_tensors, dtypes=dtypes, stacks=stacks, digests=digests,
            operators=operators, compiled=compiled, flush=flush, max_disk=max_disk, queue=queue,
            compress=compress, keep_last=keep_last, stop_after_last_step=stop_after_last_step,
            strict=strict,
        )  # fmt: skip
        self._selection = Selection(self.config)
        self._log = log
        self._facts = facts or {}
        self._watch = StepWatch(step_on, self._advance)
        self._step = self._first_step = first_step
        self._started = False
        self._paused = False
        self._over = False  # past the last wanted step
        self._closed = False
        self._told_size = False
        self._writer: CaptureWriter | None = None
        self._tape: Tape | None = None
        self._rank_wanted = True
        self._advance_later = False
        self._mode_on = False  # the function mode and the hooks of modules: these also tell where
        self._hooks_on = False  # steps end
        self._inside_on = False  # the engine's entry
        self._ops_on = False  # the mode of L2
        self._writes_on = False  # what torch writes to is seen in C++
        self._filter: Any = None
        self._frames_compiled: int | None = None  # when recording began
        self._compile_watch: CompileWatch | None = None
        self._keep_last = self.config.keep_last
        self._last_opened: int | None = None  # the last step that has a call
        self._on_disk: list[int] = []  # recorded steps that may still be dropped, oldest first
        with self._apart():
            if self.url is not None:
                self.path = place_of(self.url, "spools")
            self._check_folder()

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        *,
        step_on: StepOn = "explicit",
        first_step: int = 0,
        log: Callable[[str], None] = say,
    ) -> Recorder:
        """A recorder as an msprobe config.json describes it."""
        config, folder, notes = from_msprobe_config(Path(path))
        if folder is None:
            raise BadUsage(f"{path}: dump_path is missing; say where the recording goes")
        arguments = config.as_arguments()
        recorder = cls(folder, step_on=step_on, first_step=first_step, log=log, **arguments)
        for note in notes:
            recorder._log(note)
        return recorder

    @property
    def current_step(self) -> int:
        """The number of the step that the program is in."""
        return self._step

    @property
    def is_built(self) -> bool:
        """Whether it was ever started."""
        return self._tape is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded: the last wanted step is past, or the rank is not
        wanted."""
        return self._over

    @property
    def n_calls(self) -> int:
        """How many calls were recorded so far."""
        return self._n_calls()

    # What the user calls

    def start(self) -> Recorder:
        """Record from here on."""
        if self._closed:
            raise BadUsage("this recorder was closed; make a new one to record again")
        with self._apart():
            if self._gives_up():
                self._over = True
                self._stop()
                _at_exit(self._close_at_exit)
                return self
            if self._paused:
                self._paused = False
                self._optimizers.install_once()
                self._put_on()
            if self._started or self._over or (self._tape is None and not self._build()):
                return self
            self._started = True
            if self._compile_watch is not None:
                self._compile_watch.install()
            self._begin_step()
        return self

    def stop(self) -> None:
        """Record no more until `start`; all that was recorded is in the files when it returns."""
        with self._apart():
            self._stop()

    def _stop(self) -> None:
        if not self._started:
            return
        self._started = self._paused = False
        self._take_away()
        assert self._tape is not None
        assert self._writer is not None
        self._tape.end_step()
        self._tape.recording = False
        self._note_compiled()
        self._note_traced()
        if self._compile_watch is not None:
            self._compile_watch.close()
        self._writer.close()

    def pause(self) -> None:
        """See no more calls until `start`, but still record the backward of those seen before.

        What was recorded up to here is in the files when it returns.
        """
        if not self._started or self._paused:
            return
        with self._apart():
            self._paused = True
            self._remove_optimizers()
            # at L2 the mode sees forward and backward alike: off it goes
            inside = self._inside_on and self._op_mode is None
            self._switch(mode=False, writes=self._writes_on, hooks=False, inside=inside)
            self.drain()

    def drain(self) -> None:
        """Return when all that was recorded so far is in the files."""
        if self._writer is not None:
            with self._apart():
                self._writer.drain()

    def step(self) -> None:
        """One step of the program has ended."""
        self._watch.say()

    def name_root(self, module: torch.nn.Module, name: str = "") -> None:
        """Let the paths of modules begin at this one, whichever module the program calls."""
        if self._tape is None:
            if self.failed is not None:
                return
            raise BadUsage("name_root comes after start()")
        self._paths.name_root(module, name)

    def only(self, module: torch.nn.Module | None, name: str = "") -> None:
        """Record this module's own calls, under a name of one's own, and nothing else; with None,
        everything again."""
        if self._tape is None:
            if self.failed is not None:
                return
            raise BadUsage("only comes after start()")
        if module is None:
            self._tape.only = None
        else:
            self._tape.only = {**(self._tape.only or {}), id(module): name}

    def keep_all_steps(self) -> None:
        """Delete no more steps, where `keep_last` has done so until now."""
        self._keep_last = None

    def save(self, name: str, value: Any) -> None:
        """Record a tensor or a nest of tensors by hand, and its gradient when backward comes by."""
        if self._tape is not None and self._tape.recording:
            with self._apart():
                self._tape.save(name, value, sys._getframe(1))

    def save_requests(
        self,
        spans: Iterable[tuple[str | int, int, int]],
        *,
        layout: Literal["packed", "left", "right"] = "packed",
    ) -> None:
        """Say which tokens of which requests the coming call of the model reads.

            rec.save_requests([("r2", 0, 6), ("r0", 5, 6)])     # tokens 0 to 5 of r2, token 5 of r0

        They lie behind each other in one row ("packed"), or are a row each, with padding at its
        "left" or "right". `compare --at outputs --rows saved` then pairs each token of a request
        with the same token of the same request, whatever it was served with.
        """
        if self._tape is not None and self._tape.recording:
            value = requests_value(spans, layout)
            with self._apart():
                self._tape.save(REQUESTS, value, sys._getframe(1))

    def close(self, *, tell: bool = True) -> None:
        """Stop for good and say what was recorded, or why nothing was.

        `tell=False` leaves out the closing line.
        """
        if self._closed:
            return
        self._end(tell=tell, raises=self.config.strict)
        self._raise_if_strict()

    def _end(self, *, tell: bool = True, raises: bool = False) -> None:
        try:
            with self._apart(raises=False):
                self._stop()
                if self._writer is not None:
                    self._take_away()  # what could not go when the last step ended
                    self._writer.close()
                    if tell:
                        self._writer.count_deleted()
                    if self._uploader is not None:
                        self._uploader.tell(self._writer.part)
                        self._uploader.end()
        finally:
            self._closed = True
            atexit.unregister(self._close_at_exit)
        if not self._rank_wanted and world_size() > 1:  # others record
            return
        was_on = self._writer is not None or not self._rank_wanted
        if was_on and self.failed is None and not self._n_calls():
            self.failed = NothingRecorded(self._selection.explain_nothing(self._step))
        is_raised = raises and isinstance(self.failed, NothingRecorded)
        if tell and not is_raised and (was_on or self.failed is not None):
            self._log(self._closing_line())

    def _close_at_exit(self) -> None:
        """Close; at the end of a program there is nobody to catch an error."""
        if not self._closed:
            self._end()
            _let_threads_free_futures()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        clean_below(error)
        if error is None:
            self.close()
        elif not self._closed:
            self._end()  # the program's own exception goes first

    # Trouble of our own

    def _check_folder(self) -> None:
        try:
            check_writable(self.path)
        except BadUsage as error:
            raise WriteFailed(str(error)) from None

    @contextlib.contextmanager
    def _apart(self, *, raises: bool = True) -> Iterator[None]:
        """What goes wrong inside is not the program's trouble: it is said, and recording ends."""
        try:
            yield
        except Exception as error:
            if error is self.failed:
                raise
            self._fail(error)
            self._leave()
            if raises:
                self._raise_if_strict()

    def _fail(self, error: Exception) -> None:
        """Recording cannot go on: say so, once."""
        if self.failed is not None:
            return
        if isinstance(error, TensorprobeError):
            self.failed = error
        else:
            kind = WriteFailed if isinstance(error, OSError) else RecordingStopped
            self.failed = kind(f"recording to {self.path} stopped: {_reason(error)}")
            self.failed.__cause__ = error
        if self._writer is not None:
            self._writer.fail(error)  # who reads the capture is to know
        if not self.config.strict:
            with contextlib.suppress(Exception):  # this may be in a call of the program's
                self._log(f"{self.failed}. The program goes on")

    def _leave(self) -> None:
        """See nothing more of the program, as far as that can be done."""
        self._over = True
        self._started = self._paused = False
        if self._tape is not None:
            self._tape.recording = False
            with contextlib.suppress(Exception):
                self._take_away()
                self._tape.end_step()

    def _gives_up(self) -> bool:
        """Whether nothing more is to be done after a failure: where the program is to end after
        its last step, steps are counted on, for all ranks have to end together."""
        return self.failed is not None and not self.config.stop_after_last_step

    def _raise_if_strict(self) -> None:
        if self.config.strict and self.failed is not None and not self._raised:
            self._raised = True
            raise self.failed

    def __repr__(self) -> str:
        states = {
            "failed": self.failed is not None,
            "closed": self._closed,
            "over": self._over,
            "paused": self._paused,
            "recording": self._started,
            "stopped": self.is_built,
        }
        state = next((state for state, is_so in states.items() if is_so), "not started")
        return f"<Recorder {self.path}: {state}, step {self._step}>"

    # Building and taking apart

    def _build(self) -> bool:
        config = self.config
        rank = current_rank()
        self._rank_wanted = self._selection.wants_rank(rank)
        if not self._rank_wanted:
            self._log(f"rank {rank} is not among ranks {format_numbers(config.ranks)}")
            if not config.stop_after_last_step:  # else it counts: all ranks have to end together
                self._over = True
                return False
        check_before(config)
        for finding in check_environment():
            self._log(finding)
        digests = config.keep in ("digest", "tensors")
        checksums = digests and config.digests == "crc32"
        has_all = digests and not checksums
        summarizer = Summarizer(stats=True, digest=has_all, digest_some=config.keep == "stats")
        facts = environment_facts()
        identity = ProcessIdentity()
        self._writer = CaptureWriter(
            self.path,
            *identity()[:2],
            {**facts, "config": config.as_arguments(), **self._facts},
            facts,
            flush=config.flush,
            queue_nbytes=config.queue,
            max_disk_nbytes=config.max_disk if self.url is None else self._spool_nbytes(),
            compress=config.compress,
            results=summarizer,
            digest_kind=IN_MEMORY if config.keep == "stats" else "",
            identify=identity,
            on_warning=self._log,
            on_error=self._fail,
        )
        if self.url is not None:
            self._uploader = Uploader(self.path, self.url)
        if native.MODULE is not None:
            self._writer.write_by(native.MODULE)
        else:
            background.start(self._log)
        values = Values(self._writer, summarizer, checksums=checksums)
        values.sees_calls = config.level != "L0"
        tape = self._tape = Tape(config, self._selection, self._writer, values, self._counter)
        tape.on_open = self._step_opened
        level = config.level
        self._paths = ModulePaths()
        observer = self._observer = RecordingObserver(
            tape,
            identity,
            records_modules=level in ("L0", "mix"),
            parameter_names=self._paths.parameter_names,
            on_backward=BackwardTold(
                self._backward_begins, self._backward_raised, self._backward_ended
            ),
        )
        mode = CallMode if level in ("L1", "mix") else WriteMode
        self._mode = mode(observer, on_scaler_update=self._watch.scaler_updated)
        self._op_mode = OperatorMode(observer) if level == "L2" else None
        # At L0 the mode is there for scalers and for writes, which C++ sees for less, at L2 for
        # scalers alone.
        self._values = values if level == "L0" and values.contents is not None else None
        self._mode_is_rare = self._values is not None or self._op_mode is not None
        # Those that come along into backward, also while paused, and into other threads.
        modes: list[Any] = [] if self._mode_is_rare else [self._mode]
        if self._op_mode is not None:
            modes.append(self._op_mode)
        self._modes = modes
        self._modules = ModuleHooks(
            observer,
            tape.place,
            paths=self._paths,
            modes=modes,
            on_root=self._root_called,
            stacks=tape.stacks if config.stacks else None,
        )
        observer.shorten(self._mode if isinstance(self._mode, CallMode) else None, self._modules)
        self._optimizers = OptimizerHooks(observer, self._optimizer_stepped)
        self._engine = EngineEntry(modes, observer)
        self._compile_watch = self._watch_compiling()
        _at_exit(self._close_at_exit)
        _stop_in_children(self)
        return True

    def _watch_compiling(self) -> CompileWatch | None:
        """What sees the inside of compiled parts, where that is asked for and can be had."""
        config = self.config
        if config.compiled == "call":
            return None
        if not can_see_compiling():
            self._log(
                f"compiled={config.compiled!r}: torch {torch.__version__} does not show what it "
                f"compiles, torch {COMPILED_FROM} and newer do. A compiled part is one call here"
            )
            return None
        from tensorprobe.compiling.compile_watch import CompileWatch

        return CompileWatch(
            config.compiled,
            keep_tensors=config.keep == "tensors",
            folder=self._rank_folder,
            step=self._recorded_step,
        )

    def _rank_folder(self) -> Path | None:
        """The rank's folder, which is there once a step is."""
        if self._writer is None or self._tape is None:
            return None
        if not self._writer.folder.is_dir() and self._tape.recording:
            self._tape.open_step()
        return self._writer.folder if self._writer.folder.is_dir() else None

    def _recorded_step(self) -> int | None:
        return self._step if self._tape is not None and self._tape.recording else None

    def _spool_nbytes(self) -> int:
        """How much the spool may hold: all of the recording, until it has been sent."""
        limit = limit_nbytes()
        return limit if self.config.max_disk is None else min(limit, self.config.max_disk)

    def _take_away(self) -> None:
        if self._compile_watch is not None:
            self._compile_watch.remove()
        self._remove_optimizers()
        self._switch(mode=False, writes=False, hooks=False, inside=False)

    def _remove_optimizers(self) -> None:
        self._optimizers.remove()
        self._observer.forget_states()

    def _switch(self, *, mode: bool, writes: bool, hooks: bool, inside: bool) -> None:
        """Put on the stack, and register, what the coming step needs; take away all else."""
        if hooks != self._hooks_on:
            self._hooks_on = hooks
            if hooks:
                self._modules.install()
            else:
                self._modules.remove()
        if inside != self._inside_on:
            self._inside_on = inside
            self._switch_inside(inside)
        if writes != self._writes_on and self._values is not None:
            self._writes_on = writes
            self._values.watch_writes(writes)
        # One that cannot be put on or taken off here is at the next step, and lets everything pass
        # till then: inside a call of its own torch has it off the stack.
        if mode and not self._mode_on:
            self._mode_on = add_mode(self._mode)
        elif not mode and self._mode_on:
            self._mode_on = not remove_mode(self._mode)
        if self._mode_is_rare and self._mode_on != (self._mode in self._modes):
            (self._modes.append if self._mode_on else self._modes.remove)(self._mode)
        if self._op_mode is None:
            return
        self._op_mode.on = inside
        if inside and not self._ops_on:
            self._ops_on = add_mode(self._op_mode)
        elif not inside and self._ops_on:
            self._ops_on = not remove_mode(self._op_mode)

    def _switch_inside(self, on: bool) -> None:
        if on:
            rare_searches.begin()
            self._filter = add_filter(COMPILED_MODULE)
            self._frames_compiled = _frames_compiled()
            self._engine.install()
            return
        self._engine.remove()
        remove_filter(self._filter)
        rare_searches.end()

    # Steps

    def _begin_step(self) -> None:
        assert self._tape is not None
        self._paused = False
        self._optimizers.install_once()
        wanted = self._put_on()
        self._tape.begin_step(self._step, wanted)
        self._modules.begin_step()
        self._observer.begin_step()

    def _put_on(self) -> bool:
        """Install what this step needs; says whether it is wanted."""
        wanted = self._selection.wants_step(self._step) and self._rank_wanted
        wanted = wanted and self.failed is None
        watch = self._watch
        # The first step is watched even where it is not wanted: the models met in it get their
        # names, and it shows whether an optimizer or a scaler sets the pace.
        first = self._step == self._first_step
        needs_mode = wanted and not self._mode_is_rare
        scaler_may_come = first or watch.scaler_seen or watch.awaits_optimizer
        self._switch(
            mode=needs_mode or (watch.automatic and scaler_may_come),
            writes=wanted,
            hooks=wanted or first or watch.needs_roots,
            inside=wanted or (watch.automatic and (first or watch.needs_backward)),
        )
        return wanted

    def _step_opened(self, step: int) -> None:
        """A step has got its first call: leave `keep_last` steps on disk, this one included."""
        if self._last_opened is None and self._writer is not None:
            with OnTrouble(lambda error: None), Quiet():
                self._writer.write_program(program_facts())
        self._last_opened = step
        if self._uploader is not None and self._writer is not None and not self._keep_last:
            self._uploader.tell(self._writer.part)
        if self._keep_last is None or self._writer is None or step in self._on_disk:
            return
        self._on_disk.append(step)
        while len(self._on_disk) > self._keep_last:
            self._writer.drop_step(self._on_disk.pop(0))

    def _advance(self) -> None:
        """Go to the next step."""
        if self._inside_on and torch._C._current_graph_task_id() != -1:
            self._advance_later = True  # an optimizer that steps inside of backward
            return
        self._step += 1
        if self._tape is None or self._over:
            return
        with self._apart():
            self._raise_if_strict()
            if not self._started:
                return
            check_meanwhile()
            self._tell_size()
            if self._selection.past_last_step(self._step):
                self._finish()
            elif self._gives_up():
                self._over = True
                self._stop()
            else:
                self._begin_step()

    def _finish(self) -> None:
        """The last wanted step is over: leave the program alone from here on."""
        self._over = True
        self._stop()
        if self.config.stop_after_last_step:
            steps = self.config.steps or ()
            which = format_numbers(steps)
            which = f"step {which} is" if len(steps) == 1 else f"steps {which} are"
            self._log(f"{which} {'over' if self.failed else 'recorded'}: ending the program")
            _let_threads_free_futures()
            raise SystemExit(0)

    def _root_called(self, module: torch.nn.Module) -> None:
        watch = self._watch
        with self._apart():
            if watch.automatic and not watch.scaler_seen and self._saw_scaler():  # with no mode on
                watch.scaler_found()
                self._put_on()
            watch.root_called(module)

    def _saw_scaler(self) -> bool:
        if self._op_mode is not None:
            return self._op_mode.saw_scaler
        return self._values is not None and self._values.saw_scaler()

    def _optimizer_stepped(self, optimizer: object) -> None:
        if self._tape is not None and self._tape.recording:
            self._tell_size()
        watch = self._watch
        if watch.automatic:
            with self._apart():
                watch.optimizer_stepped(optimizer)
                if watch.scaler_seen and self._started and not self._mode_on:
                    self._put_on()  # it has yet to end its round, with those that it skipped

    def _backward_begins(self, roots: Any) -> None:
        tape = self._tape
        if tape is not None and tape.recording and self.config.level in ("L1", "mix"):
            with self._apart():
                tape.functions.begin_backward(roots)

    def _backward_raised(self, error: BaseException, alone: bool) -> None:
        if self._tape is not None and self._tape.recording:
            with self._apart(raises=False):
                self._tape.fail_backwards(error, alone)

    def _backward_ended(self, last: bool) -> None:
        """Backward is over in this thread; the last one, when it is over in all."""
        tape = self._tape
        with self._apart():
            self._watch.backward_ended()
            if tape is not None and tape.recording:
                if last:
                    tape.finish_backwards()
                if self.config.level in ("L0", "mix"):
                    self._observer.modules.record_gradients(self._engine.going, last)
        if self._advance_later:
            self._advance_later = False
            self._advance()

    # What the user reads

    def _tell_size(self) -> None:
        if self._told_size or self.config.keep != "tensors" or self._tape is None:
            return
        if self.failed is not None:  # it was said that recording has stopped
            return
        self._told_size = True
        nbytes = self._tape.nbytes
        steps = self.config.steps
        total = ""
        if steps and len(steps) > 1:
            total = f", {format_nbytes(nbytes * len(steps))} for {len(steps)} steps"
        packed = ", before it is compressed" if self.config.compress else ""
        size = f"{format_nbytes(nbytes)} a step{total}{packed}"
        self._log(f"recording about {size}, to {self.path}")

    def _note_compiled(self) -> None:
        if self._frames_compiled is None:
            return
        count = _frames_compiled() - self._frames_compiled
        if count > 0 and self._tape is not None and self._compile_watch is None:
            self._tape.gap(
                "torch.compile",
                f"{count} frames were compiled while recording: a compiled region is one opaque "
                "call (Compiled, Function.CompiledFunction or its module), its inside is not seen",
            )

    def _note_traced(self) -> None:
        assert self._tape is not None
        number, self._tape.not_traced = self._tape.not_traced, 0
        if number:
            calls = count(number, "call")
            self._tape.gap("torch.jit.trace", f"{calls} made while it traced are not recorded")

    def _n_calls(self) -> int:
        return self._writer.n_calls if self._writer is not None else 0

    def _closing_line(self) -> str:
        """What can be read now, and what was lost."""
        writer = self._writer
        if writer is None or not self._n_calls():
            if isinstance(self.failed, NothingRecorded):
                return str(self.failed)
            lost = _lost_text(writer) if writer is not None else ""
            return f"nothing was recorded to {self.path}{lost}. {self._failure()}"
        assert self._tape is not None
        steps = self._tape.n_steps - writer.n_lost_steps
        # What follows the last step of an optimizer, a loss.item() say, is no step: none ended it.
        rest = self._watch.is_paced and steps > 1 and self._last_opened == self._step
        rest = rest and self._step not in writer.lost
        after = " and after them" if rest else ""
        steps -= rest
        left = self.config.keep_last
        kept = f", the last {left} kept" if self._keep_last and left and steps > left else ""
        gaps = f", {count(writer.n_gaps, 'gap')}" if writer.n_gaps else ""
        gaps += f", {writer.missing}" if writer.missing else ""
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        beside = writer.is_beside_ranks
        where = writer.folder if several else writer.folder.parent if beside else self.path
        waited = f", waited {writer.waited_s:.1f} s for the disk" if writer.waited_s >= 1 else ""
        recorded = f"{count(writer.n_calls, 'call')} in {count(steps, 'step')}{after}"
        lost = _lost_text(writer)
        failed = f"{lost}. Recording ended early: {self._failure()}" if self.failed else ""
        return (
            f"recorded {recorded}{kept}{gaps}, "
            f"{format_nbytes(writer.nbytes_written)} in {where}{waited}{failed}. "
            f"Next: tensorprobe show {shlex.quote(str(where if beside else self.path))}"
        )

    def _failure(self) -> str:
        """Why recording ended early."""
        cause = self.failed.__cause__ if self.failed is not None else None
        return _reason(cause) if isinstance(cause, Exception) else str(self.failed)


def _reason(error: Exception) -> str:
    known = isinstance(error, OSError | TensorprobeError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _lost_text(writer: CaptureWriter) -> str:
    """Such as ", lost: 41 calls of step 12, 7 calls of step 13"; the first steps one by one."""
    lost, torn = writer.lost, sorted(writer.torn)
    steps = sorted(lost)
    parts = [f"{count(lost[step], 'call')} of step {step}" for step in steps[:3]]
    if rest := steps[3:]:
        more = count(sum(lost[step] for step in rest), "call")
        parts.append(f"{more} of step{'s' if rest[1:] else ''} {format_numbers(rest)}")
    if torn:
        parts.append(f"values of step{'s' if torn[1:] else ''} {format_numbers(torn)}")
    return f", lost: {', '.join(parts)}" if parts else ""


def format_nbytes(nbytes: float) -> str:
    """1536 is "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _at_exit(close: Callable[[], None]) -> None:
    atexit.unregister(close)
    atexit.register(close)


def _let_threads_free_futures() -> None:
    """A thread of gloo that still has to free a hook's future in Python would be ended at the exit
    of the interpreter, and abort the process of a rank: let it have the GIL before."""
    if world_size() > 1:
        time.sleep(0.1)


def _frames_compiled() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["ok"]) if utils is not None else 0


def _stop_in_children(recorder: Recorder) -> None:
    """A forked child (a DataLoader worker) has our modes, but nothing of its work is recorded: not
    by this recorder."""
    reference = weakref.ref(recorder)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive._closed = True
            if alive._tape is not None:
                alive._tape.recording = False
            if alive._started:
                with OnTrouble(lambda error: None):
                    alive._take_away()

    os.register_at_fork(after_in_child=in_child)
