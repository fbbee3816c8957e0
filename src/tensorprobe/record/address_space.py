"""How much memory a limit (ulimit -v) leaves: recording must not take what the program needs."""

from __future__ import annotations

import resource
from pathlib import Path

from tensorprobe.config import RecordConfig
from tensorprobe.errors import RecordingStopped

_MB = 1_000_000
_SIZES = Path("/proc/self/statm")
_NEEDED_NBYTES = 512 * _MB  # code, threads, and what their allocators set aside
_LEFT_NBYTES = 192 * _MB  # less than this while it records, and the program is close to its end


def check_before(config: RecordConfig) -> None:
    """Raise RecordingStopped where a limit may leave too little for the program."""
    copies = config.keep == "tensors" or bool(config.keep_tensors) or config.digests == "crc32"
    _check(_NEEDED_NBYTES + (config.queue if copies else 0), "recording may take")


def check_meanwhile() -> None:
    """Check at the end of a step that enough address space is left."""
    _check(_LEFT_NBYTES, "recording goes on with no less than")


def _check(needed_nbytes: int, what: str) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not _SIZES.exists():
        return
    pages = int(_SIZES.read_bytes().split()[0])
    left = limit - pages * resource.getpagesize()
    if left < needed_nbytes:
        raise RecordingStopped(
            f"memory is limited to {limit // _MB} MB (ulimit -v) and {max(left, 0) // _MB} MB are "
            f"left; {what} {needed_nbytes // _MB} MB, which the program could lack. Raise the limit"
        )
