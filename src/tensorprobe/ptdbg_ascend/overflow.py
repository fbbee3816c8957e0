"""overflow_check: a guard whose findings are written as the peer's overflow files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorprobe.capture.recorder import say
from tensorprobe.guard.findings import Finding
from tensorprobe.guard.guard import Guard
from tensorprobe.ptdbg_ascend.acl import dump_folder, run_with_dump
from tensorprobe.ptdbg_ascend.settings import Target
from tensorprobe.store.loading import load
from tensorprobe.store.ptdbg_names import stem_of
from tensorprobe.store.ptdbg_writing import Style, write_dump

_NOT_COMPARABLE = 101  # the second field of an overflow's lines


class OverflowCheck:
    """Looks at every call; the `overflow_nums`-th overflow ends the program by a ValueError."""

    def __init__(
        self,
        target: Target,
        rank: Callable[[], int | str],
        overflow_nums: int,
        acl_config: Path | None,
        *,
        say_ignored: Callable[[str], None],
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
        self._private = self.target.root / f"overflow.recording-{os.getpid()}"
        self._guard = _DoorGuard(self._found, self._private)

    def start(self) -> None:
        """Look from here on."""
        self.is_on = True
        self._guard.start()

    def stop(self) -> None:
        """Look no more until `start`."""
        self.is_on = False
        self._guard.stop()

    def step(self) -> None:
        """One step of the program has ended."""
        self._guard.step()

    def close(self) -> None:
        """Stop for good, and drop the private part."""
        self.is_on = False
        self._guard.close()
        shutil.rmtree(self._private, ignore_errors=True)

    def _found(self, finding: Finding) -> None:
        self._count += 1
        saved = self._save(finding)
        if self._count == self._overflow_nums:
            raise ValueError(f"[overflow {self._count} times]: dump file is saved in '{saved}'.")

    def _save(self, finding: Finding) -> Path:
        """Write one overflow's call to files of its own, or dump its kernels."""
        if finding.inputs is None:
            say(f"{finding.name} overflowed, and nothing of it could be saved: {finding.reason}")
            return self.target.root
        capture = load(finding.inputs)
        if self._acl_config is not None:
            stem = stem_of(capture.calls[0])
            run_with_dump(capture, stem, self._acl_config)
            return self.target.folder
        index = self._index(finding, stem_of(capture.calls[0]))
        style = Style(
            self.target.release,
            "tensors",
            "yes",
            self.is_filtered,
            only_peers=True,
            flag=_NOT_COMPARABLE,
        )
        write_dump(capture.calls, index, style)
        say(f"{finding.name} overflowed: {index}")
        return index

    def _index(self, finding: Finding, stem: str) -> Path:
        if self.target.release != "2.3":
            place = self.target._replace(stem=f"{stem}_{self._count}")
            return place.index_of("", self._rank(), finding.step)
        stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime())
        place = self.target._replace(stem=f"Overflow_info_{stamp}_{self._count}")
        return place.index_of("", self._rank())


class _DoorGuard(Guard):
    """A guard that tells the door of each finding, and leaves it to the door to stop."""

    def __init__(self, found: Callable[[Finding], None], folder: Path) -> None:
        super().__init__(folder, "overflow", overflow_nums=-1, look_every=1, log=_silent)
        self._found = found

    def report(self, finding: Finding, **options: Any) -> None:
        known = any(finding.identity == old.identity for old in self.findings)
        super().report(finding, **options)
        if not known:
            self._found(finding)


def _silent(text: str) -> None:
    """The guard's own words name a folder that nobody is to see."""
