"""overflow_check: a guard whose findings are written as the peer's overflow files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from tensorprobe.errors import GuardStopped
from tensorprobe.follow.naming import split_direction
from tensorprobe.follow.steps import StepOn
from tensorprobe.guarding.findings import Finding
from tensorprobe.guarding.guard import Guard
from tensorprobe.peers.peer_names import peer_name, renamed
from tensorprobe.peers.ptdbg.ptdbg_acl import dump_folder, run_with_dump
from tensorprobe.peers.ptdbg.ptdbg_dump import drop
from tensorprobe.peers.ptdbg.ptdbg_names import stem_of
from tensorprobe.peers.ptdbg.ptdbg_settings import DumpTarget
from tensorprobe.peers.ptdbg.ptdbg_telling import say
from tensorprobe.peers.ptdbg.ptdbg_writing import Style, write_dump
from tensorprobe.records import Call, Capture
from tensorprobe.store.loading import load

_NOT_COMPARABLE = 101  # the second field of an overflow's lines


class OverflowCheck:
    """Looks at every call; the `overflow_nums`-th overflow ends the program by a ValueError."""

    def __init__(
        self,
        target: DumpTarget,
        rank: Callable[[], int | str],
        overflow_nums: int,
        acl_config: Path | None,
        *,
        say_ignored: Callable[[str], None],
        first_step: int | None = None,  # None: steps end by themselves
    ) -> None:
        self.target = target
        self.is_filtered = True
        self.is_on = False
        self._rank = rank
        self._overflow_nums = overflow_nums
        self._acl_config = acl_config
        self._count = 0
        if acl_config is not None:
            folder = dump_folder(acl_config)
            say_ignored(f"set_dump_path is not used: ACL data goes to dump_path of '{acl_config}'")
            self.target = target._replace(folder=folder)
        self._private = self.target.root / f"overflow-{os.getpid()}"
        self._is_needed = False  # the private part: a command names it
        step_on: StepOn = "auto" if first_step is None else "explicit"
        self._guard = _DoorGuard(self._found, self._private, overflow_nums, step_on)
        for _ in range(first_step or 0):
            self._guard.step()

    def start(self) -> None:
        """Look from here on."""
        self.is_on = True
        self._guard.start()

    def stop(self) -> None:
        """Look no more until `start`."""
        self.is_on = False
        with contextlib.suppress(GuardStopped):  # told as a ValueError, which somebody caught
            self._guard.stop()

    def step(self) -> None:
        """One step of the program has ended."""
        self._guard.step()

    def close(self) -> None:
        """Stop for good, and drop the private part."""
        self.is_on = False
        try:
            with contextlib.suppress(GuardStopped):
                self._guard.close()
        except ValueError as error:  # found at the end of the program: nobody is there to catch it
            say(str(error))
        if not self._is_needed:
            drop(self._private)

    def _found(self, finding: Finding) -> None:
        self._count += 1
        saved = self._save(finding)
        if self._count == self._overflow_nums:
            raise ValueError(f"[overflow {self._count} times]: dump file is saved in '{saved}'.")

    def _save(self, finding: Finding) -> Path:
        """Write one overflow's call to files of its own, or dump its kernels."""
        calls = self._calls(finding)
        call = next(call for call in calls if call.name == finding.name)
        if self._acl_config is not None and finding.inputs is not None:
            capture = Capture(Path(finding.inputs), "native", calls)
            done = run_with_dump(capture, stem_of(call), self._acl_config)
            self._is_needed = self._is_needed or not done
            return self.target.folder
        index = self._index(finding, stem_of(renamed(call, peer_name)))
        style = Style(
            self.target.release,
            "tensors",
            "yes",
            self.is_filtered,
            only_peers=True,
            flag=_NOT_COMPARABLE,
        )
        write_dump([renamed(call, peer_name)], index, style)
        say(f"{finding.name} overflowed, {finding.reason}: {index}")
        if finding.inputs is None:
            stem = split_direction(finding.name)[0]
            say(
                "its inputs are gone. To have them, run it again as `tensorprobe run` with "
                f"--calls {stem} --steps {finding.step} --keep tensors -o again"
            )
        return index

    def _calls(self, finding: Finding) -> list[Call]:
        """The forward call of a finding and its backward, as far as the guard has saved them."""
        stem = split_direction(finding.name)[0]
        saved = load(finding.inputs).calls(step=finding.step) if finding.inputs else ()
        calls = [call for call in saved if split_direction(call.name)[0] == stem]
        if any(call.name == finding.name for call in calls):
            return calls
        told = Call(
            index=0,
            name=finding.name,
            op=finding.op,
            module=finding.module,
            direction=finding.direction,
            stack=finding.stack,
        )
        return [*calls, told]

    def _index(self, finding: Finding, stem: str) -> Path:
        if self.target.release != "2.3":
            place = self.target._replace(stem=f"{stem}_{self._count}")
            return place.index_of("", self._rank(), finding.step)
        stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
        place = self.target._replace(stem=f"Overflow_info_{stamp}_{self._count}")
        return place.index_of("", self._rank())


class _DoorGuard(Guard):
    """A guard that tells the door of each finding, which may raise in its place."""

    def __init__(
        self,
        found: Callable[[Finding], None],
        folder: Path,
        overflow_nums: int,
        step_on: StepOn,
    ) -> None:
        super().__init__(
            folder,
            "overflow",
            overflow_nums=overflow_nums,
            look_every=1,
            step_on=step_on,
            log=_silent,
        )
        self._found = found

    def report(self, finding: Finding, *, tell: bool = True) -> None:
        """It is told once, when all of it is known; before a guard would stop the program."""
        super().report(finding, tell=tell)
        if tell:
            self._found(finding)


def _silent(text: str) -> None:
    """The guard's own words name a folder that nobody is to see."""
