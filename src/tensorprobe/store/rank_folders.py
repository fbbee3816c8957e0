"""A native run that is read one rank at a time: no more than that is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorprobe.records import Call, Calls, Capture, Gap
from tensorprobe.store import native


class RankRead(NamedTuple):
    """The calls of one rank, and what is wrong with its folder."""

    calls: list[Call]
    gaps: list[Gap]  # in its steps
    end_gaps: list[Gap]  # told by how its recording ended
    unfinished: list[str]
    unopened: list[str]


class RankFolders:
    """Which ranks a run has, and where; nothing of their calls is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gaps: list[Gap] = []
        steps, self.facts = native.open_run(path, self.gaps.append)
        self.steps: dict[int, list[Path]] = {}
        for step in steps:
            self.steps.setdefault(native.rank_of(step), []).append(step)


def read_rank(path: Path, steps: Sequence[Path]) -> RankRead:
    """Read the steps of one rank, of a run at this path."""
    gaps: list[Gap] = []
    end_gaps: list[Gap] = []
    found = native.read_steps(list(steps), native.root_of(path), gaps.append)
    native.add_endings(path, list(steps), found.unfinished, end_gaps.append)
    return RankRead(found.calls, gaps, end_gaps, found.unfinished, found.unopened)


class RankByRank(Capture):
    """A run whose ranks were read one by one. All of it is read only if somebody asks for calls."""

    def __init__(
        self,
        folders: RankFolders,
        gaps: Sequence[Gap],
        unfinished: list[str],
        steps: Sequence[int],
        ranks: Sequence[int],
        seen: Any,
    ) -> None:
        facts = {**folders.facts, "unfinished": unfinished}
        super().__init__(folders.path, "native", (), gaps, facts)
        self._steps, self._ranks = tuple(steps), tuple(ranks)
        self._read: Calls | None = None
        self.seen = seen  # what comparing.rank_survey has kept of its calls

    @property
    def calls(self) -> Calls:
        if self._read is None:
            self._read = native.read(self.path).calls
        return self._read

    @property
    def steps(self) -> tuple[int, ...]:
        return self._steps

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def __repr__(self) -> str:
        return f"<Capture {self.path} of {len(self.ranks)} ranks, not in memory>"
