"""What stands behind the door: one Recorder, and msprobe's files when a step is over."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tensorprobe.devices import current_rank, world_size
from tensorprobe.devices.process_rank import is_distributed
from tensorprobe.errors import BadUsage, NothingRecorded, WriteFailed
from tensorprobe.guarding.guard import Guard
from tensorprobe.peers.msprobe.msprobe_config import DoorConfig
from tensorprobe.peers.msprobe.msprobe_folders import STEP
from tensorprobe.peers.msprobe.msprobe_writing import NOT_MSPROBES, write_unit
from tensorprobe.record.recorder import Recorder, say
from tensorprobe.store import native
from tensorprobe.store.claim import make_way, run_identity
from tensorprobe.store.loading import UNFINISHED
from tensorprobe.store.refusals import Refusals
from tensorprobe.store.step_files import LOG_FILE
from tensorprobe.store.unread import Unread

# What a run leaves in the folder: its steps, and what it did not come to turn into files.
_OF_A_RUN = re.compile(rf"{STEP.pattern}|{re.escape(UNFINISHED)}")


class MsprobeSession:
    """Records natively into a private folder, and turns each step into msprobe's files.

    `told` is what the sessions of one debugger have said: their notes, and where they wrote to.
    """

    def __init__(
        self,
        settings: DoorConfig,
        first_step: int = 0,
        told: set[Path | str] | None = None,
        log: Callable[[str], None] = say,
    ) -> None:
        if settings.dump_path is None:
            raise BadUsage(
                "dump_path is missing: say where the files go, in config.json or as "
                "PrecisionDebugger(dump_path='./dump')"
            )
        self.folder = Path(settings.dump_path)
        self.step_number = first_step
        self._settings = settings
        self._log = log
        self._told: set[Path | str] = set() if told is None else told
        self._recorder: Recorder | None = None
        self._rank_id: int | None = None
        self._rank = 0  # of the recording: a process group may come later
        self._private = self.folder / UNFINISHED
        self._written: tuple[int, int] = (-1, 0)  # the step, and how large its log was
        self._lost: dict[int, Counter[str]] = {}
        self._place: Path | None = None
        self._is_ranked = False  # whether its folder is named by a rank
        self._with_gradient: set[str] = set()  # values saved by hand
        self._without_gradient: set[str] = set()
        self._waiting: list[tuple[nn.Module, str]] = []  # modules to record alone
        self._refusals = Refusals(f"the dump in {self.folder}", log)

    # What the debugger calls

    def start(self, models: Sequence[nn.Module] = (), rank_id: int | None = None) -> None:
        """Record from here on."""
        if self._settings.dump_enable is False:
            return
        if rank_id is not None:
            self._rank_id = rank_id
        with self._refusals.told():
            self._recorder = self._recorder or self._build()
        recorder = self._recorder
        if recorder is None:
            return
        recorder.start()
        atexit.unregister(self.close)
        atexit.register(self.close)  # the last to be registered is the first to run
        if recorder.is_over:
            return
        for i, model in enumerate(models):
            recorder.name_root(model, "" if len(models) == 1 else str(i))
        for module, name in self._waiting:
            recorder.only(module, name)
        self._waiting.clear()

    def stop(self) -> None:
        """See no more calls; backward of those seen before is still recorded."""
        if self._recorder is not None:
            self._recorder.pause()
            self._recorder.drain()  # it may have been paused before, and backward came by since
            self._write()

    def step(self) -> None:
        """The step is over: its files are complete."""
        if self._recorder is not None:
            self._recorder.stop()
            self._write()
            self._forget_step()
            self._recorder.step()
        self.step_number += 1

    def save(self, name: str, value: Any, gradient: bool = True) -> None:
        """Record a value by hand, and its gradient; outside of start and stop too."""
        (self._with_gradient if gradient else self._without_gradient).add(name)
        if self._recorder is None or not self._recorder.is_built:
            self.start()
        if self._recorder is not None:
            self._recorder.start()
            self._recorder.save(name, value)

    def only(self, module: nn.Module | None, name: str = "") -> None:
        """Record one module as a black box, or everything again."""
        if module is None:
            self._waiting.clear()
            if self._recorder is not None and self._recorder.is_built:
                self._recorder.only(None)
        elif self._recorder is not None and self._recorder.is_built:
            self._recorder.only(module, name)
        else:
            self._waiting.append((module, name))

    def close(self, *, goes_on: bool = False) -> None:
        """Write what is left, and say where everything is; another session may go on from here."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        atexit.unregister(self.close)
        recorder.close(tell=False)
        if isinstance(recorder.failed, NothingRecorded) and not goes_on and not self._wrote():
            self._log(str(recorder.failed))
        self._write()
        self._forget_step()
        if self._refusals.failed is None:
            self._remove_private()
        if isinstance(recorder.failed, WriteFailed):
            self._log(f"not all was dumped: {recorder.failed}")
        if self._place is not None and self.folder not in self._told:
            self._told.add(self.folder)
            next_one = f"tensorprobe show {shlex.quote(str(self.folder))}"
            self._log(f"the dump is in {self.folder}. Next: {next_one}")
        for what, count in sum(self._lost.values(), Counter[str]()).items():
            if what not in NOT_MSPROBES:
                self._log(f"not in the dump: {count} {what}")

    # Behind it

    def _build(self) -> Recorder:
        several = self._has_rank()
        self._private = self.folder / UNFINISHED
        if not several:  # processes that know nothing of each other
            self._private /= f"proc{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        run = run_identity(os.environ) if several else f"{run_identity(os.environ)}/{os.getpid()}"
        make_way(self.folder, run, _OF_A_RUN, self._log)
        self._rank = current_rank()
        recorder = Recorder(
            self._private,
            first_step=self.step_number,
            log=self._log,
            **self._settings.config.as_arguments(),
        )
        for note in self._settings.notes:
            if note not in self._told:
                self._told.add(note)
                self._log(note)
        return recorder

    def _wrote(self) -> bool:
        """Whether a session of this debugger has written a dump."""
        return any(isinstance(said, Path) for said in self._told)

    def _has_rank(self) -> bool:
        return self._rank_id is not None or world_size() > 1 or "RANK" in os.environ

    def _name(self) -> str:
        """The folder of this process: by its rank, as soon as it has one."""
        process = f"proc{os.getpid()}"
        self._is_ranked = self._is_ranked or self._has_rank() or is_distributed()
        if not self._is_ranked:
            return process
        name = f"rank{self._rank_id if self._rank_id is not None else current_rank()}"
        for old in self.folder.glob(f"step*/{process}"):  # from before the process group
            if not old.with_name(name).exists():
                old.rename(old.with_name(name))
        return name

    def _step_folder(self) -> Path:
        return self._private / f"rank{self._rank}" / f"step{self.step_number}"

    def _write(self) -> None:
        with self._refusals.told():
            self._write_step()

    def _write_step(self) -> None:
        """Write the files of this step, unless they are there with all that was recorded."""
        source = self._step_folder()
        log = source / LOG_FILE
        if not log.is_file():
            return
        step, size = self._written
        if step == self.step_number and not _grew(log, size):
            return
        capture = native.read(source)
        self._place = self.folder / f"step{self.step_number}" / self._name()
        if step != self.step_number and self._place.exists():
            self._log(f"{self._place} was dumped before in this run: it is written anew")
        lost: Counter[str] = Counter()
        unread = Unread(capture.calls)
        write_unit(
            list(capture.calls),
            self._place,
            self._settings.config.as_arguments(),
            lost,
            unread,
            saved_alone=self._without_gradient - self._with_gradient,
            keep_files=step == self.step_number,  # what is there was written by stop()
        )
        for gap in capture.gaps:
            self._log(f"not recorded: {gap.name}: {gap.reason}")
        for line in unread.lines():
            self._log(line)
        self._lost[self.step_number] = lost
        self._written = (self.step_number, log.stat().st_size)

    def _forget_step(self) -> None:
        shutil.rmtree(self._step_folder(), ignore_errors=True)

    def _remove_private(self) -> None:
        """Away with what is private, as far as it is ours and empty."""
        shutil.rmtree(self._private / f"rank{self._rank}", ignore_errors=True)
        if not any(self._private.glob("rank*/step*")) and not (self._private / "earlier").exists():
            shutil.rmtree(self._private, ignore_errors=True)
        parent = self.folder / UNFINISHED
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


class OverflowSession:
    """The task overflow_check of earlier releases: a guard, and no dump."""

    def __init__(self, settings: DoorConfig, log: Callable[[str], None] = say) -> None:
        assert settings.overflow_nums is not None
        for note in settings.notes:
            log(note)
        self.step_number = 0
        self._guard = Guard(
            settings.dump_path or "guard",
            overflow_nums=settings.overflow_nums,
            step_on="explicit",
            log=log,
        )

    def start(self, models: Sequence[nn.Module] = (), rank_id: int | None = None) -> None:
        self._guard.start()

    def stop(self) -> None:
        self._guard.stop()

    def step(self) -> None:
        self._guard.step()
        self.step_number += 1

    def save(self, name: str, value: Any, gradient: bool = True) -> None:
        raise BadUsage("save() needs a dump: task overflow_check makes none")

    def only(self, module: nn.Module | None, name: str = "") -> None:
        raise BadUsage("module_dump() needs a dump: task overflow_check makes none")

    def close(self, *, goes_on: bool = False) -> None:
        self._guard.close()


def _grew(log: Path, size: int) -> bool:
    """Whether a log says more than it did at this size, beyond that its step has ended."""
    with log.open("rb") as file:
        file.seek(size)
        return any(b'"type":"closed"' not in line for line in file)
