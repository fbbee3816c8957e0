"""Where msprobe has the exceptions of its compare."""

from tensorprobe.peers.msprobe.msprobe_exceptions import (
    CompareException,
    DumpException,
    MsprobeBaseException,
)

__all__ = [
    "CompareException",
    "DumpException",
    "MsprobeBaseException",
]
