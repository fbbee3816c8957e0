"""One dump under way: a recorder in a private folder, published as the peer's files."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.errors import BadUsage, NothingRecorded, WriteFailed
from tensorprobe.follow.naming import Counter
from tensorprobe.peers.ptdbg.ptdbg_settings import DumpTarget, Switch
from tensorprobe.peers.ptdbg.ptdbg_telling import say
from tensorprobe.peers.ptdbg.ptdbg_writing import write_dump
from tensorprobe.record.recorder import Recorder
from tensorprobe.records import Capture
from tensorprobe.store.loading import load
from tensorprobe.store.refusals import Refusals
from tensorprobe.store.unread import Unread

if TYPE_CHECKING:
    from tensorprobe.follow.steps import StepOn

_LEFT_OVER = re.compile(r".+\.recording-(\d+)")
_STEP = re.compile(r"step(\d+)")
# What the recorder says of its own folder, which nobody is to see.
_PRIVATE_WORDS = "recording about "


def say_of_dump(text: str) -> None:
    """Pass on what a recorder says, except about the private folder."""
    if not text.startswith(_PRIVATE_WORDS):
        say(text)


class PtdbgDump:
    """Records into {root}/{stem}.recording-{pid} and publishes that, a step at a time or whole.

    `rank` is asked when something is published: by then the processes know which one they are.
    """

    def __init__(
        self,
        target: DumpTarget,
        switch: Switch,
        rank: Callable[[], int | str],
        published: set[Path],
        *,
        counter: Counter | None = None,
        step_on: StepOn = "explicit",
        **options: Any,
    ) -> None:
        self.target = target
        self.switch = switch
        self._rank = rank
        self._published = published  # indexes this process has written: more is added to them
        self.private = target.root / f"{target.stem}.recording-{os.getpid()}"
        self._refusals = Refusals(f"the dump in '{target.root}'", say)
        with self._refusals.told():
            _tell_of_left_overs(target.root)
        self.recorder = Recorder(
            self.private,
            step_on=step_on,
            log=say_of_dump,
            counter=counter,
            **{**switch.options, **options},
        )

    def start(self) -> None:
        """Record from here on."""
        self.recorder.start()

    def stop(self) -> None:
        """Record no more until `start`."""
        self.recorder.stop()

    def only(self, module: Any, name: str = "") -> None:
        """Dump this module's own calls and nothing else; with None, everything again."""
        if module is not None and not hasattr(module, "named_modules"):
            raise BadUsage(f"module_dump: {type(module).__name__} is no nn.Module")
        if module is not None and (not isinstance(name, str) or not name):
            raise BadUsage(f"module_dump: {name!r} is no name")
        self.recorder.only(module, name)

    def publish_steps(self) -> None:
        """Write out the steps that are over, and drop their private part."""
        self.recorder.drain()
        with self._refusals.told():
            for folder in self._steps():
                number = int(folder.name.removeprefix("step"))
                if number < self.recorder.current_step:
                    self._publish(load(folder), folder)

    def close(self) -> None:
        """Stop for good and write out what was recorded; the private part remains if that fails."""
        self.recorder.close(tell=False)
        if isinstance(self.recorder.failed, NothingRecorded) and not self._published:
            say(str(self.recorder.failed))
        with self._refusals.told():
            for folder in self._steps():
                self._publish(load(folder), folder)
        if self._refusals.failed is None:
            drop(self.private)
        elif self.private.is_dir():
            say(_how_to_convert(self.private, self.target))
        if isinstance(self.recorder.failed, WriteFailed):
            say(f"not all was dumped: {self.recorder.failed}")

    def discard(self) -> None:
        """Stop, and drop what was recorded: other settings take its place."""
        self.recorder.close(tell=False)
        drop(self.private)

    def _steps(self) -> list[Path]:
        found = [path for path in self.private.glob("rank*/step*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step")))

    def _publish(self, capture: Capture, folder: Path) -> None:
        step = int(folder.name.removeprefix("step")) if self.target.release != "2.3" else None
        index = self.target.index_of(self.switch.prefix, self._rank(), step)
        unread = Unread(capture.calls)
        count = self.write(capture.calls, index, unread)
        say(f"{count} calls dumped: {index}")
        for gap in capture.gaps[:3]:
            say(f"not recorded: {gap.name}: {gap.reason}")
        if len(capture.gaps) > 3:
            say(f"{len(capture.gaps)} gaps in all")
        for line in unread.lines():
            say(line)
        shutil.rmtree(folder)

    def write(self, calls: Any, index: Path, unread: Unread | None = None) -> int:
        """Write calls to an index: added to what this process wrote there before."""
        count = write_dump(
            calls,
            index,
            self.switch.style,
            append=index in self._published,
            unread=unread,
            on_moved=_tell_moved,
        )
        self._published.add(index)
        return count


class Counting:
    """A recorder that selects nothing: calls between register_hook and ON take their numbers too.

    So a name means the same call wherever in the program the switch is.
    """

    def __init__(self, counter: Counter) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tensorprobe-"))
        self._recorder = Recorder(
            self._folder,
            log=lambda text: None,
            counter=counter,
            level="L1",
            operators="dunder",
            keep="structure",
            stacks=False,
            calls=["Saved.nothing.0.forward"],
        )
        self._recorder.start()

    def close(self) -> None:
        """Count no more."""
        self._recorder.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def drop(private: Path) -> None:
    """Remove a private folder, and those above it that were made for it and hold nothing else."""
    shutil.rmtree(private, ignore_errors=True)
    with contextlib.suppress(OSError):  # something is in it
        private.parent.rmdir()


def _tell_moved(older: Path) -> None:
    say(f"an earlier dump was there: it is '{older}' now")


def _tell_of_left_overs(root: Path) -> None:
    """Recordings of programs that were killed: what they hold can be had."""
    if not root.is_dir():
        return
    for folder in root.iterdir():
        found = _LEFT_OVER.fullmatch(folder.name)
        if found and not _is_running(int(found[1])):
            aside = folder.with_name(f"{folder.name}.interrupted-{time.time_ns()}")
            folder.rename(aside)
            say(
                f"an earlier program was killed while it dumped. To have its dump: tensorprobe "
                f"convert {shlex.quote(str(aside))} --to ptdbg -o DIR"
            )


def _is_running(pid: int) -> bool:
    """Whether another process of that number runs; a folder of our own number is an older one's."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _how_to_convert(private: Path, target: DumpTarget) -> str:
    return (
        f"What was recorded is in '{private}': tensorprobe convert {shlex.quote(str(private))} "
        f"--to ptdbg -o {shlex.quote(str(target.folder))}"
    )
