"""Which runs are gone through rank by rank. Told before anything is read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorprobe.records import Capture
from tensorprobe.store.step_files import LOG_FILE

# Of logs: some ten times that many bytes of memory is what comparing them at once takes.
LARGE_NBYTES = 16 << 20
_RANK = re.compile(r"rank\d+")


def is_streamed(
    sources: tuple[object, object], rank: int | None, jobs: int | None, has_noise: bool
) -> bool:
    """Whether two runs are gone through rank by rank, by other processes than those that measure
    one tensor at a time."""
    paths = whole_runs(sources)
    if paths is None or rank is not None or has_noise:
        return False
    return (jobs or 1) > 1 or are_large(paths)


def whole_runs(sources: tuple[object, object]) -> tuple[Path, Path] | None:
    """Where the runs are, if both are native ones and at least one has several ranks."""
    if any(isinstance(source, Capture) for source in sources):
        return None
    actual, expected = (Path(source) for source in sources)  # type: ignore[arg-type]
    counts = [_n_ranks(path) for path in (actual, expected)]
    return (actual, expected) if min(counts) > 0 and max(counts) > 1 else None


def _n_ranks(path: Path) -> int:
    if not (path / "capture.json").is_file():
        return 0
    return sum(bool(_RANK.fullmatch(name)) for name in os.listdir(path))


def are_large(paths: tuple[Path, Path]) -> bool:
    total = 0
    for path in paths:
        for folder in sorted(os.listdir(path)):
            if _RANK.fullmatch(folder):
                total += sum(map(log_nbytes, (path / folder).glob("step*")))
                if total >= LARGE_NBYTES:
                    return True
    return False


def log_nbytes(step: Path) -> int:
    """How long the log of a step is."""
    try:
        return (step / LOG_FILE).lstat().st_size
    except OSError:  # none is there
        return 0
